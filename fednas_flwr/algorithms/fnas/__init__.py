"""FNAS and DP-FNAS: clients send gradients of weights and of architecture variables."""
