"""Settings of the server's own optimiser, which steps towards the clients' average."""

from __future__ import annotations

from dataclasses import dataclass

from fednas_flwr.search.settings import LearningRate, Positive, ShareBelow1
from fednas_flwr.typed import Checked


@dataclass(frozen=True)
class ServerOptimizer(Checked):
    """``none``: the average is the new model.

    Attributes:
        name: Of Flower's strategies FedAdam, FedYogi and FedAdagrad, the last word.
    """

    name: str


@dataclass(frozen=True)
class ServerAdagrad(ServerOptimizer):
    """``adagrad``.

    Attributes:
        lr: About how far a weight moves in a round, > 0.
        tau: Added to the root of the second moments, > 0: more adapts less.
    """

    lr: LearningRate
    tau: Positive


@dataclass(frozen=True)
class ServerAdam(ServerAdagrad):
    """``adam`` and ``yogi``.

    Attributes:
        beta_1: Decay of the first moments, from 0 to below 1.
        beta_2: Decay of the second moments, from 0 to below 1.
    """

    beta_1: ShareBelow1
    beta_2: ShareBelow1


SERVER_OPTIMIZERS: dict[str, type] = {
    "none": ServerOptimizer,
    "adam": ServerAdam,
    "yogi": ServerAdam,
    "adagrad": ServerAdagrad,
}
