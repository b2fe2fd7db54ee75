"""DPNAS: a controller learns to draw networks that train well under DP-SGD."""
