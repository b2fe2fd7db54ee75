"""Cost of a network on hardware."""
