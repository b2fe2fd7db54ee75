"""Common ground of all rooms: errors, files, memory, random numbers, layers."""
