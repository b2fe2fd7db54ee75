"""Files that a run leaves on disk, and the functions that read them."""
