"""Federated neural architecture search on Flower: one network from data that never moves.

The command ``fednas`` runs everything; from Python, :func:`load_network` gives back the network
that a run trained.
"""

import os
from typing import TYPE_CHECKING

# Flower asks the environment while it is imported: no telemetry unless the user turns it on.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

__version__ = "0.1.0"
__all__ = ["__version__", "load_network"]

if TYPE_CHECKING:
    from fednas_flwr.builders import load_network


def __getattr__(name: str) -> object:
    if name == "load_network":  # importing torch takes seconds: only those who ask for it pay
        from fednas_flwr.builders import load_network

        return load_network
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
