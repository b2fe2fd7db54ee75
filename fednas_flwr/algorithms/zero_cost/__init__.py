"""Data-free search: scores of networks, no record is read."""
