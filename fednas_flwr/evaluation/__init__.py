"""What is done with networks: deriving, measuring, exporting. Plain torch, no transport."""
