"""Successive halving: candidates share a supernet, and the better half stays."""
