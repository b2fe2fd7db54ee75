"""Which clients the rounds of a run ask, and what a client's reply weighs in their averages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fednas_flwr.builders.algorithms import (
    ALGORITHMS,
    Algorithm,
    retrain_batch,
    retrains_by_gradients,
    search_batch,
)
from fednas_flwr.config import Config, FNASSettings
from fednas_flwr.exchange.sampling import Sampling
from fednas_flwr.names import SPLITS
from fednas_flwr.strategies.fedavg import trained_on


def make_sampling(config: Config, splits: Sequence[Mapping[str, int]]) -> Sampling | None:
    """Return who is asked in the rounds of a run, None where it is always everybody.

    Args:
        config: The run's configuration.
        splits: The number of records that each client declares, by split.
    """
    if not config.samples:
        return None
    records = {name: np.array([own.get(name, 0) for own in splits]) for name in SPLITS}
    names = trained_on(config.retrain.evaluate_every)
    trained = np.sum([records[name] for name in names], axis=0)
    search, retrain = records["train"], trained
    if isinstance(config.algorithm, FNASSettings):
        search = _at_most(search, search_batch(config))
    if retrains_by_gradients(config):
        retrain = _at_most(trained, retrain_batch(config))
    elif ALGORITHMS[config.algorithm.name].retraining is not Algorithm.retraining:
        retrain = records["train"]  # by whose validation records it chooses
    return Sampling(
        seed=config.seed,
        per_round=config.asked,
        spares=min(
            math.ceil(config.over_selection * config.asked - 1e-9), config.clients - config.asked
        ),
        by=config.sampling,
        sizes={"search": search, "retrain": retrain},
        num_clients=config.clients,
    )


def _at_most(records: NDArray[np.int64], batch: float | None) -> NDArray[np.int64]:
    """Return what the clients' batches weigh; a share of its records is one of every client's."""
    return records if batch is None or batch < 1 else np.minimum(records, int(batch))
