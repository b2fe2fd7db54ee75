"""Constants of optimisers and of the bandit, checked when made; without torch, to load fast.

``conf/`` sets them, strategies send them to clients as JSON, and clients parse them again.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated

from fednas_flwr.base.errors import ConfigError, check_choice, show
from fednas_flwr.settings import names
from fednas_flwr.settings.parser import Between, Checked, Conflicts, Length, Names, OneOf, within

RULES = ("first_order", "second_order", "mixed_level")
RESNET8_WIDTHS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
RESNETS = tuple(f"resnet8_{width}" for width in RESNET8_WIDTHS)
NORMED_NETWORKS = ("efficientnet_b0", "mobilenet_v2", *RESNETS)  # those with retrain.norm
# Least bound of a record's decrease of loss in a reward, in nats. float32 rounds a loss (near 1: by
# 1e-7) depending on its batch size; with a bound near that, rounding would be a record's reward.
LEAST_LOSS_BOUND = 1e-3
LARGEST = 1e30  # fits float32
LARGEST_STEP = 1e4  # for rates, decays and weights of losses: one step of more leaves any network
LARGEST_NORM = 1e4  # for gradients
LARGEST_LIST = 100_000  # configurations; every exploration goes through all
MOST_CANDIDATES = 1000  # in one request
MOMENTA = ("reset", "averaged")

# Types of fields, with the values that they may have; see ``parser.Checked``.
Count = Annotated[int, Between(1)]
CountOrZero = Annotated[int, Between(0)]
Steps = Annotated[int, Between(1, 10**6)]  # or epochs, before a client answers
# A lower temperature sends logits to infinity, a higher one to nothing.
Temperature = Annotated[float, Between(1e-3, 1e6)]
Positive = Annotated[float, Between(0, LARGEST, above=True)]
NonNegative = Annotated[float, Between(0, LARGEST)]
Share = Annotated[float, Between(0, 1)]
_STEP = "a larger one leaves every network in one step"
_NORM = "no gradient that a network learns from is larger: null clips nothing"
LearningRate = Annotated[float, Between(0, LARGEST_STEP, above=True, reason=_STEP)]
RateOrZero = Annotated[float, Between(0, LARGEST_STEP, reason=_STEP)]
ClipNorm = Annotated[float, Between(0, LARGEST_NORM, above=True, reason=_NORM)]
ListLength = Annotated[int, Between(1, LARGEST_LIST, reason="all are held in memory")]
ShareAbove0 = Annotated[float, Between(0, 1, above=True)]
ShareBelow1 = Annotated[float, Between(0, 1, below=True)]
InnerShare = Annotated[float, Between(0, 1, above=True, below=True)]
Epsilon = Annotated[float, Between(names.LEAST_EPSILON, names.LARGEST_EPSILON)]
NoiseMultiplier = Annotated[
    float, Between(names.LEAST_NOISE_MULTIPLIER, names.LARGEST_NOISE_MULTIPLIER)
]
LossBound = Annotated[float, Between(LEAST_LOSS_BOUND, 1e3, reason="in nats, of one record")]
Rule = Annotated[str, OneOf(RULES)]


def _decay_within(lr: float, weight_decay: float) -> tuple[bool, str]:
    """Return a conflict for a decay that flips weights: a step subtracts lr * decay of them."""
    expected = f"0 to {1 / lr:.4g}, which is 1 / lr: with more, weights change sign in every step"
    return within(lr * weight_decay <= 1, "weight_decay", weight_decay, expected)


@dataclass(frozen=True)
class SGD(Checked):
    """SGD of the weights; the learning rate falls along a cosine from ``lr`` to ``min_lr``.

    Attributes:
        lr: Learning rate of the first round, > 0.
        min_lr: Learning rate after the last round, from 0 to ``lr``; a default above ``lr`` is
            lowered to ``lr``.
        momentum: Momentum, from 0 to below 1.
        weight_decay: L2 coefficient, from 0 to ``1 / lr``.
        clip_norm: Largest norm of a batch's mean gradient, > 0; null does not clip.
    """

    lr: LearningRate
    min_lr: RateOrZero
    momentum: ShareBelow1
    weight_decay: RateOrZero
    clip_norm: ClipNorm | None

    def conflicts(self) -> Conflicts:
        """Exclude learning rates that rise, and decays by which weights change sign."""
        yield within(self.min_lr <= self.lr, "min_lr", self.min_lr, f"0 to lr={self.lr}")
        yield _decay_within(self.lr, self.weight_decay)

    def at_round(self, server_round: int, num_rounds: int) -> "SGD":
        """Return the constants of one round of ``num_rounds``; rounds count from 1."""
        progress = (server_round - 1) / num_rounds
        lr = self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * progress)) / 2
        return replace(self, lr=lr)


@dataclass(frozen=True)
class Adam(Checked):
    """Adam of the alphas; its betas follow from the rule of the search.

    Attributes:
        lr: Learning rate; 0 keeps the alphas.
        weight_decay: L2 coefficient.
    """

    lr: RateOrZero
    weight_decay: RateOrZero


@dataclass(frozen=True)
class Configuration(Checked):
    """One configuration of hyper-parameters, an arm of the bandit.

    Attributes:
        lr: Learning rate of the weights, > 0.
        weight_decay: Decay of the weights, from 0 to ``1 / lr``.
        momentum: Momentum of the weights, from 0 to below 1.
        alpha_lr: Learning rate of the alphas, >= 0.
        alpha_weight_decay: Decay of the alphas, >= 0.
        dropout: Drop-path probability, from 0 to below 1; for derived networks only.
    """

    lr: LearningRate
    weight_decay: RateOrZero
    momentum: ShareBelow1
    alpha_lr: RateOrZero
    alpha_weight_decay: RateOrZero
    dropout: ShareBelow1

    def conflicts(self) -> Conflicts:
        """Exclude decays by which weights change sign."""
        yield _decay_within(self.lr, self.weight_decay)

    @property
    def _of_weights(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("lr", "momentum", "weight_decay")}

    def sgd(self, clip_norm: float | None, *, annealed: bool = False) -> SGD:
        """Return the constants of the weights' optimiser; its learning rate may fall to 0."""
        return SGD(**self._of_weights, min_lr=0.0 if annealed else self.lr, clip_norm=clip_norm)

    def annealed(self, weights: SGD) -> SGD:
        """Return ``weights`` with this learning rate, momentum and decay, still annealed."""
        return replace(weights, **self._of_weights, min_lr=min(weights.min_lr, self.lr))

    def adam(self) -> Adam:
        """Return the constants of the alphas' optimiser."""
        return Adam(lr=self.alpha_lr, weight_decay=self.alpha_weight_decay)


@dataclass(frozen=True)
class Range(Checked):
    """A uniform distribution.

    Attributes:
        low: Least value.
        high: Upper end, itself left out.
        log: True if the logarithm is uniform instead of the value.
    """

    low: NonNegative
    high: NonNegative
    log: bool

    def conflicts(self) -> Conflicts:
        """Exclude ``high`` below ``low``, and logarithms of 0."""
        yield within(self.low > 0 or not self.log, "low", self.low, "above 0 where log is true")
        yield within(self.low <= self.high, "high", self.high, f"{self.low} or more")

    def at(self, share: float) -> float:
        """Return the quantile of a share in [0, 1): that share of all draws is lower."""
        if self.log:
            return math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        return self.low + share * (self.high - self.low)


def check_ranges(ranges: Mapping[str, Range]) -> None:
    """Raise ConfigError unless there is one range for each value of a :class:`Configuration`.

    The sentence begins with ``ranges``, the name of the setting.
    """
    names = [field.name for field in fields(Configuration)]
    for name in ranges:
        check_choice("ranges", name, names)
    missing = [name for name in names if name not in ranges]
    if missing:
        raise ConfigError(
            f"ranges={show(list(ranges))} has no value for {', '.join(missing)}: give each as "
            "{low: <number>, high: <number>, log: <true or false>}."
        )
    for share in (0.0, 1 - 2**-53):  # the least and the largest draw
        try:
            Configuration(**{name: ranges[name].at(share) for name in names})
        except ConfigError as error:  # its sentence begins with the value
            raise ConfigError(f"ranges.{error}") from None


@dataclass(frozen=True)
class ConfigurationChoice(Checked):
    """The configurations of hyper-parameters that an algorithm chooses among.

    Attributes:
        num_configurations: Number of configurations to draw if none are given.
        configurations: The configurations; empty draws them from ``ranges``.
        ranges: Range of every hyper-parameter.
    """

    num_configurations: ListLength
    configurations: list[Configuration]
    ranges: dict[str, Range]

    def __post_init__(self) -> None:
        """Check the ranges, which may be empty if nothing is drawn."""
        super().__post_init__()
        if self.ranges or not self.configurations:
            check_ranges(self.ranges)


@dataclass(frozen=True)
class BanditSettings(Checked):
    """Constants of the bandit.

    Attributes:
        beta: Arms to try per nat of entropy (kappa = round(beta H)), > 0.
        step_size: Step of an estimate towards a new reward, in (0, 1].
        retention: Factor, in [0, 1], of an arm's estimate in a phase that does not try it, as a
            good arm may not stay good.
        temperature: Temperature of the softmax, in units of the rewards' scale.
        scaled: If true, rewards are divided by their running scale.
    """

    beta: Positive
    step_size: ShareAbove0
    retention: Share
    temperature: Temperature
    scaled: bool


@dataclass(frozen=True)
class ControllerSettings(Checked):
    """Constants of DPNAS' controller.

    Attributes:
        lr: Learning rate of Adam, > 0.
        temperature: Divisor of the logits of every choice; above 1 it explores more.
        entropy_weight: Weight of the policy's entropy per edge, in nats. It is added to a reward
            from 0 to 1 or, with ``scaled``, in standard deviations.
        baseline_decay: Decay of the moving average of rewards, in [0, 1); with ``scaled`` also of
            the averages by which they are scaled.
        scaled: If true, rewards are divided by the standard deviation of those so far. False is the
            paper's form, which learns little where rewards differ by little.
    """

    lr: LearningRate
    temperature: Temperature
    entropy_weight: RateOrZero
    baseline_decay: ShareBelow1
    scaled: bool


@dataclass(frozen=True)
class ShortlistSettings(Checked):
    """A second ranking of the best networks, by scores that cost more.

    Attributes:
        keep: Number of networks to rank again, at least 2.
        scores: Names of scores in ``data_free_scores.SCORES``.
    """

    keep: Annotated[int, Between(2)]
    scores: Annotated[Names, Length(Between(1))]


@dataclass(frozen=True)
class DPAware(Checked):
    """DP-SGD's clipping and noise as a regulariser of a search, without a claim of privacy.

    Attributes:
        max_grad_norm: Largest norm of a record's gradient, > 0.
        noise_multiplier: Standard deviation of the noise on a batch's sum, in units of that norm;
            0 only clips.
    """

    max_grad_norm: ClipNorm
    noise_multiplier: RateOrZero
