"""What every room stands on: errors, files, memory, random numbers, layers."""
