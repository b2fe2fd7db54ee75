"""Settings of the searches on sampled paths, and of the hardware that they search for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fednas_flwr.config.algorithms import AlgorithmSettings
from fednas_flwr.errors import ConfigError, show, unknown_choice
from fednas_flwr.search.settings import (
    MOST_CANDIDATES,
    SGD,
    Adam,
    ControllerSettings,
    Count,
    CountOrZero,
    DPAware,
    EvolutionSettings,
    Gates,
    Positive,
    Steps,
)
from fednas_flwr.typed import Between, Checked, OneOf, Text, check_range

SAMPLERS = ("controller", "evolution", "random")
GROUPINGS = ("tag", "hardware", "alphas")
Candidates = Annotated[int, Between(1, MOST_CANDIDATES)]


@dataclass(frozen=True)
class Hardware(Checked):
    """Effect of a network's cost on the loss of the alphas; see ``hardware.costs.HardwareLoss``.

    Attributes:
        table: File of ``fednas latency measure``, for targets in ms; null has the clients measure
            before the search, each group's its own.
        unit: Unit of cost: ``ms``, ``multiply_adds`` or ``parameters``.
        target: Target cost T in this unit, by which the loss is scaled; costs below T still lower
            it.
        loss: Form of the loss, a name of ``hardware.costs.LOSSES``.
        scale: Scale of an additive loss.
        exponent: Exponent of the ratio of cost to target.
    """

    table: Text | None
    unit: str
    target: Positive
    loss: str
    scale: Annotated[float, Between(0, 1e6, above=True)]
    exponent: Annotated[float, Between(-10, 10)]

    def __post_init__(self) -> None:
        """Check the ranges; what the space can reach is known once the costs are."""
        super().__post_init__()
        if self.unit != "ms" and self.table is not None:
            raise ConfigError(
                f"unit={self.unit} with table={self.table}: a table is for ms only; set table=null."
            )


@dataclass(frozen=True)
class FDNASSettings(AlgorithmSettings):
    """FDNAS: local epochs of ProxylessNAS on sampled paths, then averaging.

    Attributes:
        gates: Paths that an alpha step computes: ``two`` drawn ones, or the ``full`` choice.
        warm_up_rounds: First rounds of weights on uniformly drawn paths, in which alphas rest.
        local_epochs: Local epochs of every client per round.
        batch_size: Records per step of a client.
        sparse: If true, clients send only what they have trained; the result is the same.
        weights: The weights' optimiser.
        alphas: The alphas' optimiser.
        hardware: Hardware loss of the alphas; null has none.
    """

    gates: Gates
    warm_up_rounds: CountOrZero
    local_epochs: Steps
    batch_size: Count
    sparse: bool
    weights: SGD
    alphas: Adam
    hardware: Hardware | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        decay = self.alphas.weight_decay
        reason = "0: ops that are not sampled must keep their probabilities"
        check_range(decay == 0, "alphas.weight_decay", decay, reason)


@dataclass(frozen=True)
class DPNASSettings(AlgorithmSettings):
    """DPNAS: sampled candidates trained with shared weights, and a controller that learns of them.

    Attributes:
        sampler: The sampler of candidates: ``controller``, ``evolution`` or ``random``.
        trained_candidates: Per round, each for ``local_steps`` steps.
        rewarded_candidates: Per round, measured on validation records.
        final_candidates: Number of candidates of which the best is found.
        warm_up_rounds: First rounds, in which nothing is measured and the sampler does not learn.
        local_steps: Steps of every trained candidate.
        batch_size: Records per step of a client.
        weights: The weights' optimiser.
        controller: Constants of the sampler ``controller``.
        evolution: Constants of the sampler ``evolution``.
        dp_aware: Null trains plainly; with privacy the noise of ``privacy.weights`` takes its
            place.
    """

    sampler: Annotated[str, OneOf(SAMPLERS)]
    trained_candidates: Candidates
    rewarded_candidates: Candidates
    final_candidates: Candidates
    warm_up_rounds: CountOrZero
    local_steps: Steps
    batch_size: Count
    weights: SGD
    dp_aware: DPAware | None
    controller: ControllerSettings
    evolution: EvolutionSettings


@dataclass(frozen=True)
class CFDNASSettings(AlgorithmSettings):
    """CFDNAS: FDNAS of all clients, then in each group of clients, with its own hardware loss.

    Attributes:
        group_by: ``tag`` or ``hardware``, which each client tells of itself, or ``alphas``: similar
            updates of the alphas, see ``strategies.clusters``.
        num_groups: Number of groups, for ``alphas``; else null.
        inherit: If true, groups start from the supernet of all clients; false is naive-CFDNAS,
            which leaves that search out.
        group_rounds: Rounds of search in each group.
        group_hardware: Hardware loss of a group, by its name; other groups have none.
        search: The clients' search.
    """

    group_by: Annotated[str, OneOf(GROUPINGS)]
    num_groups: Annotated[int, Between(2)] | None
    inherit: bool
    group_rounds: Count
    group_hardware: dict[str, Hardware]
    search: FDNASSettings

    def __post_init__(self) -> None:
        """Check the ranges, and that the groups fit."""
        super().__post_init__()
        if (self.group_by == "alphas") != (self.num_groups is not None):
            raise ConfigError(
                f"group_by={self.group_by} with num_groups={show(self.num_groups)}: a number is "
                "needed to group by alphas, and for that only; set num_groups="
                f"{2 if self.num_groups is None else 'null'}."
            )
        if self.group_by == "alphas" and not self.inherit:
            raise ConfigError(
                "group_by=alphas with inherit=false: the groups come from the search of all "
                "clients; set inherit=true."
            )
        if self.num_groups is not None:
            names = [str(number) for number in range(1, self.num_groups + 1)]
            for name in self.group_hardware:
                if name not in names:
                    raise unknown_choice("group_hardware", name, names)
