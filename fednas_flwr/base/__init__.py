"""Common parts of all packages: errors, files, memory, random numbers, layers."""
