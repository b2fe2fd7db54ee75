"""Choices among hyper-parameter configurations: FEATHERS' bandit, and FedEx's distribution.

Both are pure numbers and independent of networks.

FEATHERS: Seng et al. (2023), section 3.1. An arm is one configuration. In a phase some arms are
tried, each from the same weights; an arm's reward is the decrease of the clients' mean validation
loss. Estimates of the rewards determine the best arm, the distribution from which the next arms are
drawn and, through its entropy, their number.

Deviations (``experiment=feathers/paper_faithful`` reverts the last two):

* the entropy has its minus sign, which Eq. 7 lacks;
* arms are drawn without replacement, as the paper's indicator vector has an arm once;
* step size and retention are two constants, while Eq. 6 uses one for both;
* the softmax is of estimates divided by their scale and a temperature: raw decreases of a loss are
  so small that the distribution would stay almost uniform and exploration would never fall. If
  rewards carry noise of known size, differences below it do not count either.

FedEx: Khodak et al. (2021), arXiv 2106.04502, Alg. 2. Every client of a round trains with a
configuration drawn from :class:`Theta`; the clients' validation losses, less a baseline, give an
estimate of its gradient, and it moves by an exponentiated gradient step. Deviation: in the first
round the baseline is that round's own mean loss. The public code has 0, with which every
configuration that was drawn would lose to all others.

Tensor suffix: N arms or configurations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.settings import optimizers as opt

LEAST = 1e-30  # a probability or a scale below this counts as none; keeps quotients finite
DISCOUNT = 0.9  # of the losses in FedEx' baseline, per round
EQUAL = 1e-9  # nats: a smaller excess is rounding, which steps would magnify


@dataclass(frozen=True)
class Learnt:
    """The knowledge of a choice: a state that changes, and possibly constants in ``settings``."""

    def probabilities(self) -> Tensor:
        """Probability of each configuration [N]."""
        raise NotImplementedError

    def entropy(self) -> float:
        """``H = -sum p ln p`` in nats, from 0 to ln(N) (FEATHERS' Eq. 7 with its sign)."""
        return max(0.0, float(torch.special.entr(self.probabilities()).sum()))

    def to_json(self) -> dict[str, Any]:
        """The changing state, as JSON values for a checkpoint."""
        names = [field.name for field in fields(self) if field.name != "settings"]
        state = {name.removesuffix("_N"): getattr(self, name) for name in names}
        return {n: v.tolist() if isinstance(v, Tensor) else v for n, v in state.items()}

    def with_json(self, values: Mapping[str, Any]) -> Self:
        """The same object with the state that :meth:`to_json` returned."""
        state = {f.name: values.get(f.name.removesuffix("_N")) for f in fields(self)}
        state.pop("settings", None)
        tensors = {
            n: torch.tensor(v, dtype=torch.float64) for n, v in state.items() if n.endswith("_N")
        }
        return replace(self, **state | tensors)


@dataclass(frozen=True)
class Bandit(Learnt):
    """Knowledge about the arms; every change gives a new object.

    Attributes:
        settings: The constants.
        estimates_N: Estimated reward of every arm, float64; 0 at first.
        scale: Running root mean square of the rewards; 0 before the first.
        noise: Standard deviation of the noise on the newest rewards.
        tried: The arms that have received a reward, ascending.
    """

    settings: opt.BanditSettings
    estimates_N: Tensor
    scale: float = 0.0
    noise: float = 0.0
    tried: Sequence[int] = ()

    @classmethod
    def of(cls, num_arms: int, settings: opt.BanditSettings) -> Self:
        """A bandit that has tried none of its one or more arms."""
        return cls(settings, torch.zeros(num_arms, dtype=torch.float64))

    def probabilities(self) -> Tensor:
        """Pi [N], the softmax of the estimates in units of scale and temperature."""
        unit = self.settings.temperature
        if self.settings.scaled:
            unit *= self.scale if self.scale > LEAST else 1.0
            unit = math.hypot(unit, self.noise)
        return (self.estimates_N / unit).softmax(dim=0)

    def num_trials(self) -> int:
        """Kappa, the number of arms to try next: round(beta H), at least 1 and at most N."""
        return min(max(1, round(self.settings.beta * self.entropy())), len(self.estimates_N))

    def draw(self, count: int, generator: torch.Generator) -> list[int]:
        """Draw ``count`` different arms from pi, ascending.

        It uses the Gumbel trick, which does not need probabilities above zero (torch.multinomial
        does).
        """
        uniform_N = torch.rand(len(self.estimates_N), generator=generator, dtype=torch.float64)
        gumbel_N = -(-uniform_N.log()).log()
        keys_N = self.probabilities().log() + gumbel_N
        keys_N = keys_N.where(self.probabilities() > 0, gumbel_N - 1e6)
        return sorted(keys_N.topk(count).indices.tolist())

    def best(self) -> int:
        """The arm with the largest estimate among those tried; ties go to the lowest.

        Deviation: Alg. 1 takes the maximum over all arms, which is an untried one as soon as all
        rewards are negative.
        """
        estimates = self.estimates_N.tolist()
        return max(self.tried or range(len(estimates)), key=estimates.__getitem__)

    def updated(self, rewards: Mapping[int, float], *, noise: float = 0.0) -> Self:
        """The bandit after a phase (Eq. 6).

        Tried arms move by ``step_size`` towards their reward, as bounded by :meth:`bounded`; the
        others keep ``retention`` of their estimate.

        Args:
            rewards: Rewards by arm; an empty mapping changes nothing.
            noise: Standard deviation of the noise that privacy has added to each of them.

        Raises:
            IndexError: There is no such arm.
        """
        if not rewards:
            return self
        seen = self.bounded(rewards)
        estimates_N = self.settings.retention * self.estimates_N
        for arm, reward in seen.items():
            before = float(self.estimates_N[arm])
            estimates_N[arm] = before + self.settings.step_size * (reward - before)
        newest = math.hypot(*seen.values()) / math.sqrt(len(seen))
        root = math.sqrt(0.5)  # for a running mean of squares, of which each phase keeps half
        scale = math.hypot(root * self.scale, root * newest) if self.scale else newest
        tried = sorted({*self.tried, *seen})
        return replace(self, estimates_N=estimates_N, scale=scale, noise=noise, tried=tried)

    def bounded(self, rewards: Mapping[int, float]) -> dict[int, float]:
        """The rewards, all made finite.

        A reward that is not finite, for instance because training diverged, counts as the worst of
        the phase, or as minus the scale if there is no other.
        """
        finite = [reward for reward in rewards.values() if math.isfinite(reward)]
        worst = min(0.0, *finite) if finite else -self.scale
        return {a: r if math.isfinite(r) else worst for a, r in rewards.items()}


def make_configurations(choice: opt.ConfigurationChoice, seed: int) -> list[opt.Configuration]:
    """The configurations to choose from: those listed, or else drawn from the run's seed."""
    if choice.configurations:
        return choice.configurations
    generator = make_generator(seed, "configurations")
    return draw_configurations(choice.num_configurations, choice.ranges, generator)


def draw_configurations(
    count: int, ranges: Mapping[str, opt.Range], generator: torch.Generator
) -> list[opt.Configuration]:
    """Draw ``count`` independent configurations, each value from its own range (section 4).

    Raises:
        ConfigError: A range is missing or unknown, or gives a value that is out of range.
    """
    opt.check_ranges(ranges)
    names = [field.name for field in fields(opt.Configuration)]
    shares = torch.rand(count, len(names), generator=generator, dtype=torch.float64).tolist()
    return [
        opt.Configuration(**{n: ranges[n].at(u) for n, u in zip(names, row, strict=True)})
        for row in shares
    ]


class Trial(NamedTuple):
    """A client's round: the index of its configuration, its loss afterwards, its weight (> 0)."""

    configuration: int
    loss: float
    weight: float


@dataclass(frozen=True)
class Theta(Learnt):
    """The distribution and the state on which its steps depend; every change gives a new object.

    Attributes:
        log_theta_N: Logarithms of the probabilities, float64.
        loss_sum: Discounted sum of the rounds' mean losses; divided by ``loss_weight`` it is the
            baseline.
        loss_weight: The same sum of ones; 0 before the first round.
    """

    log_theta_N: Tensor
    loss_sum: float = 0.0
    loss_weight: float = 0.0

    @classmethod
    def of(cls, num_configurations: int) -> "Theta":
        """The uniform distribution over one or more configurations."""
        log_share = -math.log(num_configurations)
        return cls(torch.full((num_configurations,), log_share, dtype=torch.float64))

    def probabilities(self) -> Tensor:
        """Theta [N]."""
        return self.log_theta_N.exp()

    def best(self) -> int:
        """The most probable configuration; ties go to the lowest."""
        return int(self.log_theta_N.argmax())

    def draw(self, generator: torch.Generator) -> int:
        """One configuration, drawn from theta."""
        return int(torch.multinomial(self.probabilities(), 1, generator=generator))

    def updated(self, trials: Sequence[Trial]) -> "Theta":
        """The distribution after a round (Alg. 2, lines 10-13).

        ``grad_j = sum_i w_i (L_i - lambda) [c_i = j] / (theta_j sum_i w_i)`` and
        ``theta <- theta exp(-eta grad)``, normalised, with eta ``sqrt(2 ln N)`` over the gradient's
        largest entry, the "aggressive" schedule of the authors' runs. lambda is the mean of all
        losses so far; a round's losses count ``DISCOUNT`` times as much in the next round.

        Args:
            trials: Trials of the clients that answered, with finite losses; an empty list changes
                nothing.
        """
        if not trials:
            return self
        total = sum(trial.weight for trial in trials)
        mean = sum(trial.weight * trial.loss for trial in trials) / total
        baseline = self.loss_sum / self.loss_weight if self.loss_weight else mean
        excess_N = torch.zeros_like(self.log_theta_N)
        for index, loss, weight in trials:
            excess_N[index] += weight / total * (loss - baseline)
        excess_N[excess_N.abs() <= EQUAL] = 0.0
        gradient_N = excess_N / self.probabilities().clamp(min=LEAST)
        largest = float(gradient_N.abs().max())
        if largest > 0:
            gradient_N = gradient_N / largest * math.sqrt(2 * math.log(len(gradient_N)))
        log_theta_N = (self.log_theta_N - gradient_N).log_softmax(dim=0)
        loss_sum, loss_weight = DISCOUNT * self.loss_sum + mean, DISCOUNT * self.loss_weight + 1.0
        return Theta(log_theta_N, loss_sum, loss_weight)
