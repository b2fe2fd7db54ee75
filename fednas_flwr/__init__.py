"""Federated neural architecture search on Flower: one network from data that never moves.

The command ``fednas`` runs everything, and so does :func:`run` with a configuration from
:func:`compose`; :func:`load` returns the model that a run has trained.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

# Libraries ask the environment while they are imported: no telemetry unless the user turns it on.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime's, since 1.29 also on Linux

__version__ = "1.0.0"
__all__ = [
    "Algorithm",
    "FedClassifier",
    "FedRegressor",
    "Result",
    "__version__",
    "compose",
    "load",
    "register_algorithm",
    "register_data_set",
    "register_loss",
    "register_metric",
    "register_network",
    "register_op",
    "register_search_space",
    "run",
]

if TYPE_CHECKING:
    from fednas_flwr.api import (
        Result,
        compose,
        register_algorithm,
        register_data_set,
        register_loss,
        register_metric,
        register_network,
        register_op,
        register_search_space,
        run,
    )
    from fednas_flwr.estimators import FedClassifier, FedRegressor
    from fednas_flwr.models.networks import load
    from fednas_flwr.settings.registry import Algorithm


def __getattr__(name: str) -> object:
    """Import a name on demand; torch takes seconds, and is imported when a run begins."""
    if name in __all__:
        homes = {"Algorithm": "settings.registry", "load": "models.networks"}
        homes |= dict.fromkeys(("FedClassifier", "FedRegressor"), "estimators")
        return getattr(import_module(f"{__name__}.{homes.get(name, 'api')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names, imported or not."""
    return __all__
