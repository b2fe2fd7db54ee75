"""Real machines: folders of a server and its sites, checks, replacements of Flower's processes."""
