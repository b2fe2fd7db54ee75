"""A script that registers what is its own and makes a run of it, as a user's does."""

from __future__ import annotations  # the workers must know what the texts of types mean

import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fednas_flwr import Algorithm, compose, run
from fednas_flwr.algorithms.fed_darts.strategy import FedDARTS
from fednas_flwr.api import register_algorithm, register_data_set, register_search_space
from fednas_flwr.settings import AlgorithmSettings, SearchSpaceSettings
from fednas_flwr.settings.optimizers import SGD, Adam
from fednas_flwr.spaces.nasbench201 import NASBench201Space


@dataclass(frozen=True)
class OwnSettings(AlgorithmSettings):
    rule: str
    local_epochs: int
    batch_size: int
    proximal: float
    weights: SGD
    alphas: Adam
    beta_decay: float


@dataclass(frozen=True)
class OwnSizes(SearchSpaceSettings):
    channels: int
    depth: int | None


class OwnSpace(NASBench201Space):
    name: ClassVar[str] = "own_space"


def make_space(*, depth, **settings):
    return OwnSpace(num_cells=1, **settings)


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 60)
    images = rng.integers(0, 120, (60, 1, 8, 8)) + 100 * labels[:, None, None, None]
    register_data_set("own_data", {"x_train": images.astype(np.uint8), "y_train": labels})
    sizes = {"channels": 4, "norm": "batch", "depth": None}
    register_search_space("own_space", make_space, settings=OwnSizes, defaults=sizes)
    like_darts = {"defaults": ["fed_darts"]}
    register_algorithm("own", Algorithm(OwnSettings, FedDARTS), defaults=like_darts)
    own = ["algorithm=own", "search_space=own_space", "dataset=own_data"]
    result = run(compose(*own, *sys.argv[1:]))
    print(result.genotype.space)
