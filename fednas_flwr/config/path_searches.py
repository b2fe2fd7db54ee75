"""Settings of the searches on sampled paths, and of the hardware that they search for."""

from __future__ import annotations

from dataclasses import dataclass

from fednas_flwr.config.algorithms import AlgorithmSettings
from fednas_flwr.errors import ConfigError, unknown_choice
from fednas_flwr.search.settings import (
    GATES,
    SGD,
    Adam,
    ControllerSettings,
    DPAware,
    EvolutionSettings,
    check_least,
    check_range,
)

SAMPLERS = ("controller", "evolution", "random")
GROUPINGS = ("tag", "hardware", "alphas")


@dataclass(frozen=True)
class Hardware:
    """What a network's cost does to the loss of the alphas; see ``hardware.costs.HardwareLoss``.

    Attributes:
        table: File of ``fednas latency measure``, for targets in ms; null has the clients measure
            before the search, each group's its own.
    """

    table: str | None
    unit: str
    target: float
    loss: str
    scale: float
    exponent: float

    def __post_init__(self) -> None:
        """Check the ranges; what the space can reach is known once the costs are."""
        check_range(self.target > 0, "algorithm.hardware.target", self.target, "above 0")
        check_range(self.scale > 0, "algorithm.hardware.scale", self.scale, "above 0")
        if self.unit != "ms" and self.table is not None:
            raise ConfigError(
                f"algorithm.hardware.unit={self.unit} with table={self.table}: a table is for ms "
                "only; set table=null."
            )


@dataclass(frozen=True)
class FDNASSettings(AlgorithmSettings):
    """FDNAS: local epochs of ProxylessNAS on sampled paths, then averaging."""

    gates: str
    warm_up_rounds: int
    local_epochs: int
    batch_size: int
    sparse: bool
    weights: SGD
    alphas: Adam
    hardware: Hardware | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.gates not in GATES:
            raise unknown_choice("algorithm.gates", self.gates, GATES)
        check_least(self, "algorithm", warm_up_rounds=0, local_epochs=1, batch_size=1)
        check_range(
            self.alphas.weight_decay == 0,
            "algorithm.alphas.weight_decay",
            self.alphas.weight_decay,
            "0: ops that are not sampled must keep their probabilities",
        )


@dataclass(frozen=True)
class DPNASSettings(AlgorithmSettings):
    """DPNAS: sampled candidates trained with shared weights, and a controller that learns of them.

    Attributes:
        sampler: What samples: ``controller``, ``evolution`` or ``random``.
        trained_candidates: Per round, each for ``local_steps`` steps.
        rewarded_candidates: Per round, measured on validation records.
        final_candidates: Of which the best is what is found.
        warm_up_rounds: First rounds, in which nothing is measured and the sampler does not learn.
        dp_aware: Null trains plainly; with privacy the noise of ``privacy.weights`` takes its
            place.
    """

    sampler: str
    trained_candidates: int
    rewarded_candidates: int
    final_candidates: int
    warm_up_rounds: int
    local_steps: int
    batch_size: int
    weights: SGD
    dp_aware: DPAware | None
    controller: ControllerSettings
    evolution: EvolutionSettings

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.sampler not in SAMPLERS:
            raise unknown_choice("algorithm.sampler", self.sampler, SAMPLERS)
        for key in ("trained_candidates", "rewarded_candidates", "final_candidates"):
            value = getattr(self, key)
            check_range(1 <= value <= 1000, f"algorithm.{key}", value, "1 to 1000")
        check_least(self, "algorithm", warm_up_rounds=0, local_steps=1, batch_size=1)


@dataclass(frozen=True)
class CFDNASSettings(AlgorithmSettings):
    """CFDNAS: FDNAS of all clients, then in each group of clients, with its own hardware loss.

    Attributes:
        group_by: ``tag`` or ``hardware``, which each client tells of itself, or ``alphas``: similar
            updates of the alphas, see ``strategies.clusters``.
        num_groups: How many, for ``alphas``; else null.
        inherit: Whether groups go on from the supernet of all; false is naive-CFDNAS, which leaves
            that search out.
        group_rounds: Rounds of search in each group.
        group_hardware: What cost does in a group, by its name; other groups have no cost.
        search: How clients search.
    """

    group_by: str
    num_groups: int | None
    inherit: bool
    group_rounds: int
    group_hardware: dict[str, Hardware]
    search: FDNASSettings

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.group_by not in GROUPINGS:
            raise unknown_choice("algorithm.group_by", self.group_by, GROUPINGS)
        check_least(self, "algorithm", group_rounds=1)
        if (self.group_by == "alphas") != (self.num_groups is not None):
            raise ConfigError(
                f"algorithm.group_by={self.group_by} with num_groups={self.num_groups}: a number "
                "is needed to group by alphas, and for that only."
            )
        check_range(
            self.num_groups is None or self.num_groups >= 2,
            "algorithm.num_groups",
            self.num_groups,
            "2 or more",
        )
        if self.group_by == "alphas" and not self.inherit:
            raise ConfigError(
                "algorithm.group_by=alphas with algorithm.inherit=false: the groups come from the "
                "search of all clients; set algorithm.inherit=true."
            )
        if self.num_groups is not None:
            names = [str(number) for number in range(1, self.num_groups + 1)]
            for name in self.group_hardware:
                if name not in names:
                    raise unknown_choice("algorithm.group_hardware", name, names)
