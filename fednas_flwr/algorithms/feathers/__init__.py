"""FEATHERS: a bandit over hyper-parameters alternates with federated DARTS."""
