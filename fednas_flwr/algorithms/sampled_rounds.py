"""Which clients the rounds of a run ask, and what a client's reply weighs in their averages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fednas_flwr.algorithms.fedavg.strategy import trained_on
from fednas_flwr.algorithms.gradient_steps import GradientStrategy
from fednas_flwr.algorithms.private_rounds import retrain_batch, search_batch
from fednas_flwr.server.client_sampling import Sampling
from fednas_flwr.settings import Config
from fednas_flwr.settings.incompatible import retrains_by_gradients
from fednas_flwr.settings.names import SPLITS
from fednas_flwr.settings.registry import algorithm_of, imported


def make_sampling(config: Config, splits: Sequence[Mapping[str, int]]) -> Sampling | None:
    """Return who is asked in the rounds of a run, None where it is always everybody.

    Args:
        config: The run's configuration.
        splits: The number of records that each client declares, by split.
    """
    settings = config.sampling
    if settings is None or not config.samples:
        return None
    records = {name: np.array([own.get(name, 0) for own in splits]) for name in SPLITS}
    names = trained_on(config.retrain.evaluate_every)
    trained = np.sum([records[name] for name in names], axis=0)
    search, retrain = records["train"], trained
    entry = algorithm_of(config)
    if entry.search is not None and issubclass(imported(entry.search), GradientStrategy):
        search = _at_most(search, search_batch(config))
    if retrains_by_gradients(config):
        retrain = _at_most(trained, retrain_batch(config))
    elif entry.retraining is not None:
        retrain = records["train"]  # by whose validation records it chooses
    return Sampling(
        seed=config.seed,
        per_round=config.asked,
        backups=min(math.ceil(settings.spare * config.asked - 1e-9), config.clients - config.asked),
        by=settings.by,
        sizes={"search": search, "retrain": retrain},
        num_clients=config.clients,
    )


def _at_most(records: NDArray[np.int64], batch: float | None) -> NDArray[np.int64]:
    """Return what the clients' batches weigh; a share of its records is one of every client's."""
    return records if batch is None or batch < 1 else np.minimum(records, int(batch))
