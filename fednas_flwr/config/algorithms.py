"""Settings of the algorithms, named as the papers are; ``builders.ALGORITHMS`` has each name's.

Those of a family may stand in a file of their own, as in ``path_searches.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fednas_flwr.errors import ConfigError
from fednas_flwr.search.settings import (
    MOST_CANDIDATES,
    REWARDED,
    SGD,
    Adam,
    BanditSettings,
    ClipNorm,
    Configuration,
    Count,
    CountOrZero,
    EvolutionSettings,
    ListLength,
    LossBound,
    Positive,
    PriorSettings,
    Range,
    RateOrZero,
    Rule,
    ShortlistSettings,
    Steps,
    Temperatures,
    ThetaSettings,
    check_ranges,
)
from fednas_flwr.typed import Between, Checked, Length, OneOf, Text, check_distinct, check_range


@dataclass(frozen=True)
class AlgorithmSettings(Checked):
    """Base of all, and the settings of an algorithm that has none."""

    name: str


@dataclass(frozen=True)
class GivenNetwork(AlgorithmSettings):
    """Base of those that do not search: they train a network that is given by name.

    Attributes:
        network: A name of ``evaluation.fixed_networks.FIXED_NETWORKS``, where no genotype is given.
    """

    network: str


@dataclass(frozen=True)
class FedDARTSSettings(AlgorithmSettings):
    """Federated DARTS and FedNAS: local epochs, then averaging.

    Attributes:
        rule: Rule of the alphas' gradient: DARTS' ``first_order`` or ``second_order``, or
            ``mixed_level`` of FedNAS, which also sees the training loss.
        local_epochs: Local epochs of every client per round.
        batch_size: Records per step of a client.
        validation_weight: Weight of the validation loss, with ``mixed_level`` only.
        proximal: FedProx' mu, which holds the weights near those that the server has sent.
        weights: The weights' optimiser.
        alphas: The alphas' optimiser.
        beta_decay: Weight of beta-DARTS' regulariser in the last round, to which it rises linearly;
            0 is the papers' form.
        prior: An architecture that the alphas favour at first; null favours none.
        temperatures: Temperatures of GDAS, whose steps compute one drawn op per edge; null mixes
            all ops.
    """

    rule: Rule
    local_epochs: Steps
    batch_size: Count
    validation_weight: RateOrZero
    proximal: RateOrZero
    weights: SGD
    alphas: Adam
    beta_decay: RateOrZero
    prior: PriorSettings | None
    temperatures: Temperatures | None

    def __post_init__(self) -> None:
        """Check the ranges, and that the rule fits."""
        super().__post_init__()
        if self.temperatures is not None and self.rule == "second_order":
            raise ConfigError(
                "rule=second_order with temperatures: single paths have no second order; set "
                "rule=first_order or temperatures=null."
            )


@dataclass(frozen=True)
class FNASSettings(AlgorithmSettings):
    """Vanilla NAS, FNAS and DP-FNAS: gradient exchanges, two per iteration or one.

    Attributes:
        order: Order of the alphas' gradient (DP-FNAS, Eq. 5).
        reduce: Reduction of the clients' gradients at the server: their ``mean``, weighted by
            batch, or their ``sum``, as the text has it.
        fused: If true, one exchange brings the gradients of weights and alphas, at the same
            weights.
        local_steps: Steps per exchange ("periodic updates").
        batch_size: Records per step of a client; null takes all of them.
        evaluate_every: Rounds between evaluations of the supernet on validation data; 0 is never.
        weights: The weights' optimiser.
        alphas: The alphas' optimiser.
        beta_decay: Weight of beta-DARTS' regulariser in the last round, to which it rises linearly.
        prior: An architecture that the alphas favour at first; null favours none.
    """

    order: Annotated[int, Between(1, 2)]
    reduce: Annotated[str, OneOf(("mean", "sum"))]
    fused: bool
    local_steps: Steps
    batch_size: Count | None
    evaluate_every: CountOrZero
    weights: SGD
    alphas: Adam
    beta_decay: RateOrZero
    prior: PriorSettings | None

    def __post_init__(self) -> None:
        """Check the ranges, and that the second order fits."""
        super().__post_init__()
        if self.order == 2 and self.local_steps > 1:
            raise ConfigError(
                f"order=2 with local_steps={self.local_steps} is not defined: the second-order "
                "correction is for one step; set one of the two to 1."
            )
        if self.order == 2 and self.fused:
            raise ConfigError(
                "order=2 with fused=true is not defined: the second order needs the weights after "
                "the step; set order=1 or fused=false."
            )


@dataclass(frozen=True)
class RandomSearchSettings(AlgorithmSettings):
    """Random search: each round trains one random network a little and ranks it.

    Attributes:
        trial_rounds: Rounds for which every network is trained; 0 with ``rounds=1`` takes one
            untried.
        local_epochs: Local epochs of every client per round.
        batch_size: Records per step of a client.
        weights: The weights' optimiser.
        ranges: Ranges of hyper-parameters that are drawn with every network; null keeps
            ``weights``.
    """

    trial_rounds: CountOrZero
    local_epochs: Steps
    batch_size: Count
    weights: SGD
    ranges: dict[str, Range] | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        if self.ranges is not None:
            check_ranges(self.ranges)


@dataclass(frozen=True)
class NetworkLimits(Checked):
    """Limits on the cost of a found network, at the size at which it is trained; null is none.

    Attributes:
        parameters: Most parameters.
        multiply_adds: Most multiply-adds of one example.
        latency_ms: Highest latency by ``table``, a file of ``fednas latency measure``.
        table: See ``latency_ms``.
    """

    parameters: Count | None
    multiply_adds: Count | None
    latency_ms: Positive | None
    table: Text | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        if (self.latency_ms is None) != (self.table is None):
            raise ConfigError(
                f"limits.latency_ms={self.latency_ms} with limits.table={self.table}: a limit of "
                "latency needs a table, and a table is for that only."
            )


def _check_shortlist(shortlist: ShortlistSettings | None, draws: int, *, least: int = 2) -> None:
    """Raise ConfigError for a shortlist of more networks than are drawn, or of too few."""
    if shortlist is not None:
        keep, expected = shortlist.keep, f"{least} to draws={draws}"
        check_range(least <= keep <= draws, "shortlist.keep", keep, expected)


@dataclass(frozen=True)
class ZeroCostSettings(AlgorithmSettings):
    """Data-free search on the server alone.

    Attributes:
        scores: Names out of ``search.scores.SCORES``; null takes those that rank networks of the
            search space (``search.scores.trusted_scores``), or synflow where none does.
        draws: Architectures per round.
        shortlist: Null ranks all by the same scores.
        evolution: Regularised evolution, whose population is carried over the rounds; null draws
            all at random.
        limits: Limits on the cost of the network that is retrained; in a run that does not, of one
            of the supernet's size.
    """

    scores: Annotated[list[str], Length(Between(1))] | None
    draws: ListLength
    shortlist: ShortlistSettings | None
    evolution: EvolutionSettings | None
    limits: NetworkLimits

    def __post_init__(self) -> None:
        """Check the ranges, and that no score counts twice."""
        super().__post_init__()
        check_distinct("scores", self.scores or [])
        _check_shortlist(self.shortlist, self.draws)


@dataclass(frozen=True)
class PoolSettings(Checked):
    """The networks that a search begins with; no record is read for it.

    Attributes:
        draws: Architectures that are drawn.
        alphas: Folder of a run whose last alphas say how probable an op is; null: all alike.
        keep: Number of the best drawn networks that are trained; null takes 8, or 16 of those that
            no score ranks.
        by: Names out of ``search.scores.SCORES`` that say which are best; none: the first drawn;
            null takes those that rank networks of the search space, or none where none does.
        shortlist: Null goes by the same scores to the end.
        limits: Limits on the cost of the network that is retrained; in a run that does not, of one
            of the supernet's size.
    """

    draws: Count
    alphas: str | None
    keep: Annotated[int, Between(2, MOST_CANDIDATES)] | None
    by: list[str] | None
    shortlist: ShortlistSettings | None
    limits: NetworkLimits

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        keep = self.keep or 2
        if self.keep is None:
            check_range(keep <= self.draws, "draws", self.draws, f"{keep} or more")
        check_range(keep <= self.draws, "keep", keep, f"2 to draws={self.draws}")
        check_distinct("by", self.by or [])
        _check_shortlist(self.shortlist, self.draws, least=keep)


@dataclass(frozen=True)
class SuccessiveHalvingSettings(AlgorithmSettings):
    """Successive halving: a pool, trained by federated rounds and halved by validation accuracy.

    Attributes:
        pool: Pool of networks that it begins with.
        eta: A rung keeps one of this many networks.
        local_epochs: Local epochs of every client per round.
        batch_size: Records per step of a client.
        weights: The weights' optimiser.
        rewarded: Reward by which networks are ranked: the validation accuracy of the clients'
            average (``averaged``), or how fast each client's own copy trains (``local``), in one
            exchange a rung.
    """

    pool: PoolSettings
    eta: Annotated[int, Between(2)]
    local_epochs: Steps
    batch_size: Count
    weights: SGD
    rewarded: Annotated[str, OneOf(REWARDED)]


@dataclass(frozen=True)
class FEATHERSSettings(AlgorithmSettings):
    """FEATHERS: local epochs whose hyper-parameters a bandit chooses.

    Attributes:
        rule: Rule of the alphas' gradient, as of federated DARTS.
        local_epochs: Local epochs of every client per round.
        batch_size: Records per step of a client.
        clip_norm: Largest norm of a batch's mean gradient; null does not clip.
        nas_rounds: Rounds of search between two explorations.
        rewarded: Loss that rewards a configuration: each client's own trained model (``local``), or
            their average (``averaged``), which takes two exchanges per trial.
        beta_decay: Weight of beta-DARTS' regulariser in the last round of the search, to which it
            rises linearly.
        loss_bound: Bound on a record's decrease of loss.
        num_configurations: Number of configurations to draw where none are given.
        configurations: The bandit's arms; empty draws them from ``ranges``.
        ranges: Range of every hyper-parameter, from which configurations are drawn.
        bandit: The bandit's constants.
    """

    rule: Rule
    local_epochs: Steps
    batch_size: Count
    clip_norm: ClipNorm | None
    nas_rounds: Count
    beta_decay: RateOrZero
    rewarded: Annotated[str, OneOf(REWARDED)]
    loss_bound: LossBound
    num_configurations: ListLength
    configurations: list[Configuration]
    ranges: dict[str, Range]
    bandit: BanditSettings

    def __post_init__(self) -> None:
        """Check the ranges; those that nothing is drawn from may be empty."""
        super().__post_init__()
        uses = self.bandit.resampled_share > 0 or self.bandit.sees_state
        if self.ranges or uses or not self.configurations:
            check_ranges(self.ranges)


@dataclass(frozen=True)
class FedAvgSettings(GivenNetwork):
    """No search: FedAvg or FedProx trains a network that is given by name.

    Attributes:
        proximal: FedProx' mu, which holds the weights near those that the server has sent.
    """

    proximal: RateOrZero


@dataclass(frozen=True)
class FedExSettings(GivenNetwork):
    """FedEx: no search; FedAvg of a given network whose clients draw their hyper-parameters.

    Attributes:
        clip_norm: Largest norm of a batch's mean gradient; null does not clip.
        loss_bound: Bound on a client's validation loss.
        theta: The distribution over configurations.
        num_configurations: Number of configurations to draw where none are given.
        configurations: Configurations of which clients draw; empty draws them from ``ranges``.
        ranges: Range of every hyper-parameter.
    """

    clip_norm: ClipNorm | None
    loss_bound: LossBound
    theta: ThetaSettings
    num_configurations: ListLength
    configurations: list[Configuration]
    ranges: dict[str, Range]

    def __post_init__(self) -> None:
        """Check the ranges; those that nothing is drawn from may be empty."""
        super().__post_init__()
        if self.ranges or not self.configurations:
            check_ranges(self.ranges)
