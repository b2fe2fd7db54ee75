"""Random search: candidates of the space, each trained by itself."""
