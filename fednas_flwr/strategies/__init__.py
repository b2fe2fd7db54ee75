"""Server side: one file per algorithm, its rounds in the order of the paper's pseudocode."""
