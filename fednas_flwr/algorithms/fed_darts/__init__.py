"""Federated DARTS: clients search locally, the server averages."""
