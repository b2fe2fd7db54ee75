"""One client's steps on a supernet or a network, in plain torch and usable from a notebook."""
