"""Constants of optimisers and of the bandit, checked when made; free of torch, to load at once.

``conf/`` sets them, strategies send them to clients as JSON, clients make them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fednas_flwr.errors import ConfigError, unknown_choice

GATES = ("two", "full")
RULES = ("first_order", "second_order", "mixed_level")
SCHEDULES = ("aggressive", "adaptive", "constant")
NORMED_NETWORKS = ("efficientnet_b0", "mobilenet_v2")  # given networks with norms: retrain.norm
# Of a record's decrease of loss in a reward, in nats. How float32 rounds a loss (near 1: by 1e-7)
# depends on the size of its batch: with a bound near that, rounding would be a record's reward.
LEAST_LOSS_BOUND = 1e-3
LARGEST = 1e30  # of rates, decays and norms: fits float32
MOMENTA = ("reset", "averaged", "server")


def check_range(condition: bool, key: str, value: object, expected: str) -> None:
    """Raise ConfigError naming key, value and what was expected unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{key}={value} is out of range: expected {expected}.")


def check_least(settings: object, where: str, **least: float) -> None:
    """Raise ConfigError for the first field of ``settings`` below its least value.

    Args:
        settings: The dataclass.
        where: The dotted name by which the user writes it, empty for the top level.
        **least: The least value of each field that has one.
    """
    for key, bound in least.items():
        value = getattr(settings, key)
        check_range(value >= bound, f"{where}.{key}".lstrip("."), value, f"{bound} or more")


@dataclass(frozen=True)
class SGD:
    """Weights: SGD whose learning rate falls along a cosine from ``lr`` to ``min_lr``.

    Attributes:
        lr: Learning rate of the first round, > 0.
        min_lr: Learning rate after the last round, from 0 to ``lr``.
        momentum: From 0 to below 1.
        weight_decay: L2 coefficient, >= 0.
        clip_norm: Largest norm of a batch's mean gradient, > 0; None does not clip.
    """

    lr: float
    min_lr: float
    momentum: float
    weight_decay: float
    clip_norm: float | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        above = f"a number above 0, to {LARGEST:g}"
        check_range(0 < self.lr <= LARGEST, "weights.lr", self.lr, above)
        check_range(0 <= self.min_lr <= self.lr, "weights.min_lr", self.min_lr, "0 to weights.lr")
        check_range(0 <= self.momentum < 1, "weights.momentum", self.momentum, "0 to below 1")
        decay = self.weight_decay
        check_range(0 <= decay <= LARGEST, "weights.weight_decay", decay, f"0 to {LARGEST:g}")
        check_range(
            self.clip_norm is None or 0 < self.clip_norm <= LARGEST,
            "weights.clip_norm",
            self.clip_norm,
            f"{above}, or null",
        )

    def at_round(self, server_round: int, num_rounds: int) -> SGD:
        """Return the constants of one round of ``num_rounds``; rounds count from 1."""
        progress = (server_round - 1) / num_rounds
        lr = self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * progress)) / 2
        return replace(self, lr=lr)


@dataclass(frozen=True)
class Adam:
    """Alphas: Adam, whose betas the rule of the search gives; ``lr`` 0 keeps the alphas."""

    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        for key in ("lr", "weight_decay"):
            value = getattr(self, key)
            check_range(0 <= value <= LARGEST, f"alphas.{key}", value, f"0 to {LARGEST:g}")


@dataclass(frozen=True)
class Configuration:
    """One arm.

    Attributes:
        lr: Learning rate of the weights, > 0.
        weight_decay: Of the weights, >= 0.
        momentum: Of the weights, from 0 to below 1.
        alpha_lr: Learning rate of the alphas, >= 0.
        alpha_weight_decay: Of the alphas, >= 0.
        dropout: Drop-path probability, from 0 to below 1; of derived networks only.
    """

    lr: float
    weight_decay: float
    momentum: float
    alpha_lr: float
    alpha_weight_decay: float
    dropout: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        self.sgd(None)
        self.adam()
        check_range(0 <= self.dropout < 1, "dropout", self.dropout, "0 to below 1")

    def sgd(self, clip_norm: float | None) -> SGD:
        """Return the constants of the weights' optimiser; the learning rate stays."""
        return SGD(
            lr=self.lr,
            min_lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            clip_norm=clip_norm,
        )

    def annealed(self, weights: SGD) -> SGD:
        """Return ``weights`` with this learning rate, momentum and decay, annealed as before."""
        return replace(
            weights,
            lr=self.lr,
            min_lr=min(weights.min_lr, self.lr),
            momentum=self.momentum,
            weight_decay=self.weight_decay,
        )

    def adam(self) -> Adam:
        """Return the constants of the alphas' optimiser."""
        return Adam(lr=self.alpha_lr, weight_decay=self.alpha_weight_decay)


@dataclass(frozen=True)
class Range:
    """A distribution: uniform from ``low`` to below ``high``; with ``log`` its logarithm is."""

    low: float
    high: float
    log: bool

    def __post_init__(self) -> None:
        """Check the ranges."""
        above = "above 0 where log is true, else 0 or more"
        check_range(self.low >= 0 and (self.low > 0 or not self.log), "low", self.low, above)
        check_range(self.low <= self.high < math.inf, "high", self.high, f"{self.low} or more")

    def at(self, share: float) -> float:
        """Return the value below which a share in [0, 1) of all draws lies."""
        if self.log:
            return math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        return self.low + share * (self.high - self.low)

    def share_of(self, value: float) -> float:
        """Return the share at which ``value`` lies, from 0 to 1; the inverse of :meth:`at`."""
        if value <= self.low or self.low == self.high:
            return 0.0
        if self.log:
            return min(1.0, math.log(value / self.low) / math.log(self.high / self.low))
        return min(1.0, (value - self.low) / (self.high - self.low))


@dataclass(frozen=True)
class BanditSettings:
    """Constants of the bandit.

    Attributes:
        beta: Arms per nat of entropy (kappa = round(beta H)), > 0.
        step_size: How far an estimate moves to a new reward, in (0, 1].
        retention: What an estimate is multiplied with in a phase that does not try its arm, in
            [0, 1]: what was good early may not be later.
        temperature: Of the softmax, > 0, in units of the rewards' scale.
        scaled: Whether rewards are divided by their running scale.
        scale_retention: How much of the scale a phase keeps, in [0, 1).
        resampled_share: Of the arms, replaced after every phase by draws near good ones, in
            [0, 1); 0 keeps the list (see ``search.tuner``).
        sees_state: Whether estimates are predictions from configuration and training state.
    """

    beta: float
    step_size: float
    retention: float
    temperature: float
    scaled: bool
    scale_retention: float
    resampled_share: float
    sees_state: bool

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(0 < self.beta < math.inf, "bandit.beta", self.beta, "a number above 0")
        check_range(0 < self.step_size <= 1, "bandit.step_size", self.step_size, "above 0, to 1")
        check_range(0 <= self.retention <= 1, "bandit.retention", self.retention, "0 to 1")
        check_range(
            0 < self.temperature < math.inf,
            "bandit.temperature",
            self.temperature,
            "a number above 0",
        )
        check_range(
            0 <= self.scale_retention < 1,
            "bandit.scale_retention",
            self.scale_retention,
            "0 to below 1",
        )
        check_range(
            0 <= self.resampled_share < 1,
            "bandit.resampled_share",
            self.resampled_share,
            "0 to below 1",
        )


@dataclass(frozen=True)
class ThetaSettings:
    """Constants of FedEx's distribution over configurations.

    Attributes:
        schedule: Of the step size: sqrt(2 ln N) over the gradient's largest entry (aggressive,
            what the authors' runs use), over the root of the sum of its squares so far (adaptive),
            or over 1 (constant).
        baseline_discount: What a mean loss counts in the baseline a round later, in [0, 1]: 0
            takes the last round's, 1 the mean of all.
    """

    schedule: str
    baseline_discount: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.schedule not in SCHEDULES:
            raise unknown_choice("theta.schedule", self.schedule, SCHEDULES)
        check_range(
            0 <= self.baseline_discount <= 1,
            "theta.baseline_discount",
            self.baseline_discount,
            "0 to 1",
        )


@dataclass(frozen=True)
class ControllerSettings:
    """Constants of DPNAS' controller.

    Attributes:
        lr: Of Adam, > 0.
        temperature: What the logits of every choice are divided by, > 0; above 1 it explores more.
        entropy_weight: Of the policy's entropy per edge, in nats, beside a reward from 0 to 1.
        baseline_decay: Of the moving average of rewards, in [0, 1).
    """

    lr: float
    temperature: float
    entropy_weight: float
    baseline_decay: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(self.lr > 0, "controller.lr", self.lr, "a number above 0")
        check_range(
            self.temperature > 0, "controller.temperature", self.temperature, "a number above 0"
        )
        check_least(self, "controller", entropy_weight=0)
        check_range(
            0 <= self.baseline_decay < 1,
            "controller.baseline_decay",
            self.baseline_decay,
            "0 to below 1",
        )


@dataclass(frozen=True)
class EvolutionSettings:
    """Constants of regularised evolution.

    Attributes:
        population: How many of the newest candidates are alive, at least 1.
        tournament: How many of them a parent is the best of, at least 1.
    """

    population: int
    tournament: int

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_least(self, "evolution", population=1, tournament=1)


@dataclass(frozen=True)
class DPAware:
    """DP-SGD's clipping and noise as a regulariser of a search, with no claim of privacy.

    Attributes:
        max_grad_norm: Largest norm of a record's gradient, > 0.
        noise_multiplier: Standard deviation of the noise on a batch's sum, in units of that norm;
            0 only clips.
    """

    max_grad_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(self.max_grad_norm > 0, "dp_aware.max_grad_norm", self.max_grad_norm, "above 0")
        check_least(self, "dp_aware", noise_multiplier=0)
