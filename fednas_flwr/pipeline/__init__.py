"""The stages of a run on the server, and its schedule of releases."""
