"""Settings of the server's rounds: whom it asks, what it sees, what it makes of the replies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from fednas_flwr.settings.names import SAMPLINGS, UNIFORM
from fednas_flwr.settings.optimizers import Count, LearningRate, Positive, ShareBelow1
from fednas_flwr.settings.parser import Between, Checked, OneOf

MOST_SITES = 1000  # of a secure sum
MOST_CLIENTS = 2**31


@dataclass(frozen=True)
class SamplingSettings(Checked):
    """Rounds that ask some of the clients only, as the seed decides.

    No privacy is claimed for it, since the server knows whom it asks.

    Attributes:
        per_round: Number of clients that a round asks, or below 1 their share.
        by: The way they are drawn (:mod:`fednas_flwr.server.client_sampling`): ``uniform`` and
            ``by_size`` keep averages unbiased, ``round_robin`` asks all clients equally often.
        spare: Share of ``per_round`` that stands by in every round, to be asked in the place of
            clients that fail.
    """

    per_round: Annotated[float, Between(0, MOST_CLIENTS, above=True)]
    by: Annotated[str, OneOf(SAMPLINGS)] = UNIFORM
    spare: Annotated[float, Between(0, 1)] = 0.0

    def asked(self, clients: int) -> int:
        """Number of clients that a round asks, of so many."""
        number = self.per_round
        return int(number) if number >= 1 else math.ceil(number * clients - 1e-9)


@dataclass(frozen=True)
class SecureSumSettings(Checked):
    """Replies of which the server sees totals only (:mod:`fednas_flwr.protocol.secure_sum`).

    The terms are those of simulated sites; a real site's own policy has them.

    Attributes:
        least_sites: Fewest clients of which a sum is opened; null is all but one, or ``colluding``
            + 2 if that is more.
        colluding: Clients of which each expects that they may help the server.
    """

    least_sites: Annotated[int, Between(2, MOST_SITES)] | None = None
    colluding: Annotated[int, Between(0, MOST_SITES)] = 1

    def least(self, clients: int) -> int:
        """Fewest clients of a sum in a run of so many."""
        return self.least_sites or max(self.colluding + 2, clients - 1)


@dataclass(frozen=True)
class AggregateSettings(Checked):
    """``mean``: the average by examples; ``median``: that of every coordinate."""

    name: str


@dataclass(frozen=True)
class TrimmedMeanSettings(AggregateSettings):
    """``trimmed_mean``: the mean of every coordinate without its largest and smallest values.

    Attributes:
        trim: Clients that are left out at each end of every coordinate.
    """

    trim: Count


AGGREGATES: dict[str, type] = {
    "mean": AggregateSettings,
    "median": AggregateSettings,
    "trimmed_mean": TrimmedMeanSettings,
}


@dataclass(frozen=True)
class ServerOptimizer(Checked):
    """``none``: the average is the new model."""

    name: str


@dataclass(frozen=True)
class ServerAdagrad(ServerOptimizer):
    """``adagrad``, after Flower's FedAdagrad.

    Attributes:
        lr: About how far a weight moves in a round, > 0.
        tau: Added to the root of the second moments, > 0: more adapts less.
    """

    lr: LearningRate
    tau: Positive


@dataclass(frozen=True)
class ServerAdam(ServerAdagrad):
    """``adam`` and ``yogi``, after Flower's FedAdam and FedYogi.

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
