"""FedEx: the configuration is learned from a product distribution, by exponentiated gradients."""
