"""What a network costs on hardware."""
