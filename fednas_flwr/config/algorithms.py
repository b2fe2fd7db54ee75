"""Settings of the algorithms, named as the papers are; ``builders.ALGORITHMS`` has each name's.

Those of a family may stand in a file of their own, as in ``path_searches.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fednas_flwr.errors import ConfigError, unknown_choice
from fednas_flwr.search.settings import (
    LEAST_LOSS_BOUND,
    RULES,
    SGD,
    Adam,
    BanditSettings,
    Configuration,
    EvolutionSettings,
    Range,
    ThetaSettings,
    check_least,
    check_range,
)


@dataclass(frozen=True)
class AlgorithmSettings:
    """Base of all, and the settings of an algorithm that has none."""

    name: str


@dataclass(frozen=True)
class GivenNetwork(AlgorithmSettings):
    """Base of those that do not search: they train a network that is given by name."""

    network: str


@dataclass(frozen=True)
class FedDARTSSettings(AlgorithmSettings):
    """Federated DARTS and FedNAS: local epochs, then averaging."""

    rule: str
    local_epochs: int
    batch_size: int
    validation_weight: float
    proximal: float
    weights: SGD
    alphas: Adam

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.rule not in RULES:
            raise unknown_choice("algorithm.rule", self.rule, RULES)
        check_least(self, "algorithm", local_epochs=1, batch_size=1, proximal=0)


@dataclass(frozen=True)
class FNASSettings(AlgorithmSettings):
    """Vanilla NAS, FNAS and DP-FNAS: gradient exchanges, two per iteration or one."""

    order: int
    reduce: str
    fused: bool
    local_steps: int
    batch_size: int | None
    evaluate_every: int
    weights: SGD
    alphas: Adam

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(self.order in (1, 2), "algorithm.order", self.order, "1 or 2")
        if self.reduce not in ("mean", "sum"):
            raise unknown_choice("algorithm.reduce", self.reduce, ("mean", "sum"))
        check_least(self, "algorithm", local_steps=1)
        check_range(
            self.batch_size is None or self.batch_size >= 1,
            "algorithm.batch_size",
            self.batch_size,
            "1 or more, or null for all of a client's records",
        )
        check_least(self, "algorithm", evaluate_every=0)
        if self.order == 2 and self.local_steps > 1:
            raise ConfigError(
                f"algorithm.order=2 with algorithm.local_steps={self.local_steps} is not defined: "
                "the second-order correction is for one step; set one of the two to 1."
            )
        if self.order == 2 and self.fused:
            raise ConfigError(
                "algorithm.order=2 with algorithm.fused=true is not defined: the second order "
                "needs the weights after the step; set order=1 or fused=false."
            )


@dataclass(frozen=True)
class RandomSearchSettings(AlgorithmSettings):
    """Random search: each round trains one random network a little and ranks it.

    With ``ranges`` each network is trained with hyper-parameters drawn from them.
    """

    trial_rounds: int
    local_epochs: int
    batch_size: int
    weights: SGD
    ranges: dict[str, Range] | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_least(self, "algorithm", trial_rounds=0, local_epochs=1, batch_size=1)


@dataclass(frozen=True)
class NetworkLimits:
    """What a network that is found may cost; null is without limit.

    Attributes:
        parameters: Most parameters.
        multiply_adds: Most multiply-adds of one example.
        latency_ms: Highest latency by ``table``, a file of ``fednas latency measure``.
        table: See ``latency_ms``.
    """

    parameters: int | None
    multiply_adds: int | None
    latency_ms: float | None
    table: str | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        for key in ("parameters", "multiply_adds", "latency_ms"):
            value = getattr(self, key)
            check_range(value is None or value > 0, f"limits.{key}", value, "above 0, or null")
        if (self.latency_ms is None) != (self.table is None):
            raise ConfigError(
                f"limits.latency_ms={self.latency_ms} with limits.table={self.table}: a limit of "
                "latency needs a table, and a table is for that only."
            )


@dataclass(frozen=True)
class ZeroCostSettings(AlgorithmSettings):
    """Data-free search on the server alone.

    Attributes:
        scores: Names out of ``search.scores.SCORES``.
        draws: Architectures per round.
        evolution: Null draws all at random.
        limits: What a network may cost.
    """

    scores: list[str]
    draws: int
    evolution: EvolutionSettings | None
    limits: NetworkLimits

    def __post_init__(self) -> None:
        """Check the ranges; ``search.scores`` knows the names."""
        check_least(self, "algorithm", draws=1)
        check_range(bool(self.scores), "algorithm.scores", self.scores, "at least one score")


@dataclass(frozen=True)
class FEATHERSSettings(AlgorithmSettings):
    """FEATHERS: local epochs whose hyper-parameters a bandit chooses."""

    rule: str
    local_epochs: int
    batch_size: int
    clip_norm: float | None
    nas_rounds: int
    loss_bound: float
    num_configurations: int
    configurations: list[Configuration]
    ranges: dict[str, Range]
    bandit: BanditSettings

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.rule not in RULES:
            raise unknown_choice("algorithm.rule", self.rule, RULES)
        check_least(
            self, "algorithm", local_epochs=1, batch_size=1, nas_rounds=1, num_configurations=1
        )
        check_range(
            self.loss_bound >= LEAST_LOSS_BOUND,
            "algorithm.loss_bound",
            self.loss_bound,
            f"{LEAST_LOSS_BOUND} or more",
        )


@dataclass(frozen=True)
class FedAvgSettings(GivenNetwork):
    """No search: FedAvg trains a network that is given by name."""


@dataclass(frozen=True)
class FedExSettings(GivenNetwork):
    """FedEx: no search; FedAvg of a given network whose clients draw their hyper-parameters."""

    clip_norm: float | None
    loss_bound: float
    theta: ThetaSettings
    num_configurations: int
    configurations: list[Configuration]
    ranges: dict[str, Range]

    def __post_init__(self) -> None:
        """Check the ranges."""
        number = self.num_configurations
        check_range(number >= 1, "algorithm.num_configurations", number, "1 or more")
        check_range(self.loss_bound > 0, "algorithm.loss_bound", self.loss_bound, "above 0")
