"""Places of a run: its stages on the server, its clients, and the three runtimes."""
