"""The client side: the actions a server can ask for, one function each."""
