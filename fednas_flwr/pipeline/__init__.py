"""The stages of one run on the server, its schedule of releases, and what stands in its folder."""
