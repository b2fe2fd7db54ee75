"""The stages of one run on the server, and its schedule of releases."""
