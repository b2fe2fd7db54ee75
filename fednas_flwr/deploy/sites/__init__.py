"""Real machines: what a server and its sites are given, check, and run in place of Flower's own."""
