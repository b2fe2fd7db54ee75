"""The places where a run is executed: its server, its clients, and the three runtimes."""
