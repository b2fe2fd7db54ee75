"""The client side: the actions that a server can request, one function each."""
