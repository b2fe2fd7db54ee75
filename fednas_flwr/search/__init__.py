"""One client's steps on a supernet or a network: plain torch, usable from a notebook."""
