"""The bandit of FEATHERS over hyper-parameter configurations: pure numbers, no networks.

Seng et al. (2023), FEATHERS, section 3.1. An arm is one configuration. In a phase some arms are
tried, each from the same weights; an arm's reward is the decrease of the clients' mean validation
loss. Estimates of the rewards choose the best arm, the distribution from which the next arms are
drawn, and, by its entropy, how many.

Deviations, of which ``experiment=feathers/paper_faithful`` takes back the last two:

* the entropy has its minus sign, which Eq. 7 lacks;
* arms are drawn without replacement: the text's indicator vector knows an arm once;
* step size and retention are two constants, where Eq. 6 uses one for both;
* the softmax is of estimates divided by their scale and a temperature: raw decreases of a loss are
  so small that the distribution stays almost uniform and exploration never falls. Where rewards
  carry noise of known size, differences below it do not count either.

Tensor suffix: N arms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.settings.optimizers import (
    BanditSettings,
    Configuration,
    ConfigurationChoice,
    Range,
    check_ranges,
)
from fednas_flwr.settings.parser import check_range


@dataclass(frozen=True)
class Bandit:
    """Knowledge about the arms; every change is a new object.

    Attributes:
        settings: The constants.
        estimates_N: Estimated reward of every arm, float64; 0 at first.
        scale: Running root mean square of the rewards; 0 before the first.
        noise: Standard deviation of the noise on the newest rewards.
        tried: The arms that have had a reward.
    """

    settings: BanditSettings
    estimates_N: Tensor
    scale: float = 0.0
    noise: float = 0.0
    tried: frozenset[int] = frozenset()

    @classmethod
    def of(cls, num_arms: int, settings: BanditSettings) -> Bandit:
        """Return a bandit that has tried nothing.

        Raises:
            ConfigError: There is no arm.
        """
        check_range(num_arms >= 1, "number of configurations", num_arms, "1 or more")
        return cls(settings, torch.zeros(num_arms, dtype=torch.float64))

    def probabilities(self) -> Tensor:
        """Return pi [N]: the softmax of the estimates in units of scale and temperature."""
        unit = self.settings.temperature
        if self.settings.scaled:
            unit *= self.scale if self.scale > 0 else 1.0
            unit = math.hypot(unit, self.noise)
        return (self.estimates_N / unit).softmax(dim=0)

    def entropy(self) -> float:
        """Return ``H = -sum pi ln pi`` in nats, from 0 to ln(N) (Eq. 7 with its sign)."""
        return max(0.0, float(torch.special.entr(self.probabilities()).sum()))

    def num_trials(self) -> int:
        """Return kappa, the arms to try next: round(beta H), at least 1 and at most N."""
        kappa = round(self.settings.beta * self.entropy())
        return min(max(1, kappa), len(self.estimates_N))

    def draw(self, count: int, generator: torch.Generator) -> list[int]:
        """Return ``count`` different arms from pi, ascending.

        By the Gumbel trick, which needs no probability above zero (torch.multinomial does).
        """
        uniform_N = torch.rand(len(self.estimates_N), generator=generator, dtype=torch.float64)
        gumbel_N = -(-uniform_N.log()).log()
        keys_N = self.probabilities().log() + gumbel_N
        keys_N = keys_N.where(self.probabilities() > 0, gumbel_N - 1e6)
        return sorted(keys_N.topk(count).indices.tolist())

    def best(self) -> int:
        """Return the arm with the largest estimate of those tried; ties go to the lowest.

        Deviation: Alg. 1 takes the maximum over all arms, which is one that nobody has tried as
        soon as all rewards are negative.
        """
        estimates = self.estimates_N.tolist()
        return max(sorted(self.tried) or range(len(estimates)), key=estimates.__getitem__)

    def updated(self, rewards: Mapping[int, float], *, noise: float = 0.0) -> Bandit:
        """Return the bandit after a phase (Eq. 6).

        Tried arms move by ``step_size`` to their reward, as :meth:`bounded` has it, the others
        keep ``retention`` of theirs.

        Args:
            rewards: By arm; empty changes nothing.
            noise: Standard deviation of the noise that privacy has put on each of them.

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
        scale = self._scale_after(list(seen.values()))
        tried = self.tried | set(seen)
        return replace(self, estimates_N=estimates_N, scale=scale, noise=noise, tried=tried)

    def bounded(self, rewards: Mapping[int, float]) -> dict[int, float]:
        """Return the rewards, all finite.

        One that is not, as of a configuration under which training diverged, counts as the worst
        of the phase, or minus the scale if there is no other.
        """
        finite = [reward for reward in rewards.values() if math.isfinite(reward)]
        worst = min(0.0, *finite) if finite else -self.scale
        return {a: r if math.isfinite(r) else worst for a, r in rewards.items()}

    def _scale_after(self, rewards: list[float]) -> float:
        """Return the root of the running mean of squared rewards."""
        newest = math.hypot(*rewards) / math.sqrt(len(rewards))
        if self.scale == 0:
            return newest
        kept = self.settings.scale_retention
        return math.hypot(math.sqrt(kept) * self.scale, math.sqrt(1 - kept) * newest)

    def to_json(self) -> dict[str, Any]:
        """Return the state that changes, as JSON values for a checkpoint."""
        return {
            "estimates": self.estimates_N.tolist(),
            "scale": self.scale,
            "noise": self.noise,
            "tried": sorted(self.tried),
        }

    def with_json(self, values: Mapping[str, Any]) -> Bandit:
        """Return the bandit with the state that :meth:`to_json` gave."""
        estimates_N = torch.tensor(values["estimates"], dtype=torch.float64)
        return replace(
            self,
            estimates_N=estimates_N,
            scale=float(values["scale"]),
            noise=float(values["noise"]),
            tried=frozenset(values["tried"]),
        )


def make_configurations(choice: ConfigurationChoice, seed: int) -> list[Configuration]:
    """The configurations to choose among: those listed, else drawn from the run's seed."""
    if choice.configurations:
        return choice.configurations
    generator = make_generator(seed, "configurations")
    return draw_configurations(choice.num_configurations, choice.ranges, generator)


def draw_configurations(
    count: int, ranges: Mapping[str, Range], generator: torch.Generator
) -> list[Configuration]:
    """Return ``count`` independent configurations, each value from its own range (section 4).

    Raises:
        ConfigError: A range is missing or unknown, or gives a value that is out of range.
    """
    check_ranges(ranges)
    names = [field.name for field in fields(Configuration)]
    shares = torch.rand(count, len(names), generator=generator, dtype=torch.float64).tolist()
    return [
        Configuration(**{n: ranges[n].at(u) for n, u in zip(names, row, strict=True)})
        for row in shares
    ]
