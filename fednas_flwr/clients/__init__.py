"""The client side: the verbs a server can ask for, one function each."""
