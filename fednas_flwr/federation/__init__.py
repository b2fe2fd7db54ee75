"""Where a run takes place: its stages on the server, its clients, and the three runtimes."""
