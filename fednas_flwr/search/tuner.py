"""FEATHERS' hyper-parameter optimisation: the bandit together with the configurations it chooses.

As it is made, a :class:`Tuner` is a :class:`Bandit` over a list that stays. Two switches of
:class:`BanditSettings` go beyond the text, both wishes of its section 5:

* ``resampled_share``: after every phase the arms with the lowest estimates are replaced. A new arm
  takes the place, in the ranges' own (logarithmic) coordinates, of an arm drawn from pi, plus
  Gaussian noise of deviation ``SPREAD * SHRINK ** phase`` of the range, and ``retention`` of its
  estimate. So values between those of the list are reached.
* ``sees_state``: estimates are predictions, by kernel ridge regression on all trials so far, from
  a configuration's coordinates and the state of training: rounds done, loss, last rewards. So an
  arm is judged by trials of its neighbours in a like state, not by its own of long ago.

Neither knows networks. Alone, the first pays for a short list whose best arm stays, the second
for arms whose rewards move (``tests/search/test_tuner.py``).

Tensor suffixes: N arms, M trials so far, D coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fednas_flwr.search.bandit import Bandit
from fednas_flwr.settings.optimizers import BanditSettings, Configuration, Range

SPREAD, SHRINK = 0.2, 0.9  # of resampling: shares of a range, per phase
WIDTH = 0.4  # of the kernel, in shares of a range
STATE_WIDTHS = (0.5, 1.0, 1.0)  # of progress, log loss, last reward in units of its scale
RIDGE = 0.3  # variance of a reward's noise over that of the rewards


@dataclass(frozen=True)
class Tuner:
    """Arms, what is known of them, and what training looks like; every change is a new object.

    Attributes:
        bandit: Estimates of the arms' rewards.
        configurations: The arms.
        ranges: Of the configurations' values.
        state: Progress (0 to 1), log of the loss, and mean of the last phase's rewards in units
            of their scale.
        trials: Of every trial so far the arm's and the state's coordinates and the reward over
            its phase's root mean square; kept where ``sees_state``.
        phases: How many phases there were.
    """

    bandit: Bandit
    configurations: tuple[Configuration, ...]
    ranges: Mapping[str, Range]
    state: tuple[float, ...] = (0.0, 0.0, 0.0)
    trials: tuple[tuple[tuple[float, ...], float], ...] = ()
    phases: int = 0

    @classmethod
    def of(
        cls,
        configurations: Sequence[Configuration],
        ranges: Mapping[str, Range],
        settings: BanditSettings,
    ) -> Tuner:
        """Return a tuner that has tried nothing.

        Raises:
            ConfigError: There is no configuration.
        """
        return cls(Bandit.of(len(configurations), settings), tuple(configurations), ranges)

    def seeing(self, *, progress: float, loss: float | None) -> Tuner:
        """Return the tuner in a state of training, its estimates predicted anew.

        Args:
            progress: Share of the stage's rounds that are done, 0 to 1.
            loss: Mean validation loss in nats; None, or what is no loss, where it is not known.
        """
        level = 0.0
        if loss is not None and math.isfinite(loss):
            level = math.log(max(1e-3, loss))
        return replace(self, state=(progress, level, self.state[2]))._predicted()

    def draw(self, generator: torch.Generator) -> list[int]:
        """Return the kappa arms to try in the next phase."""
        return self.bandit.draw(self.bandit.num_trials(), generator)

    def best(self) -> Configuration:
        """Return the configuration with the largest estimate of those tried."""
        return self.configurations[self.bandit.best()]

    def updated(
        self, rewards: Mapping[int, float], generator: torch.Generator, *, noise: float = 0.0
    ) -> Tuner:
        """Return the tuner after a phase.

        Args:
            rewards: By arm; empty changes nothing.
            generator: Draws the arms that take the place of others.
            noise: Standard deviation of the noise that privacy has put on each reward.
        """
        if not rewards:
            return self
        seen, bandit = self.bandit.bounded(rewards), self.bandit.updated(rewards, noise=noise)
        after = replace(self, bandit=bandit, phases=self.phases + 1)
        if self.bandit.settings.sees_state:
            size = math.sqrt(sum(r**2 for r in seen.values()) / len(seen)) or 1.0
            points = self._points().tolist()
            added = tuple((tuple(points[arm]), r / size) for arm, r in seen.items())
            last = sum(seen.values()) / len(seen) / (bandit.scale or 1.0)
            after = replace(after, trials=self.trials + added)._predicted()
            after = replace(after, state=(*self.state[:2], last))
        return after._resampled(generator)

    def _points(self) -> Tensor:
        """Return the coordinates [N, D] of all arms in the present state, in kernel widths."""
        arms = [[share / WIDTH for share in self._shares(c)] for c in self.configurations]
        state = [s / width for s, width in zip(self.state, STATE_WIDTHS, strict=True)]
        return torch.tensor([[*arm, *state] for arm in arms], dtype=torch.float64)

    def _shares(self, configuration: Configuration) -> list[float]:
        """Return where a configuration lies in its ranges, each from 0 to 1."""
        return [self.ranges[name].share_of(v) for name, v in asdict(configuration).items()]

    def _near(self, configuration: Configuration, generator: torch.Generator) -> Configuration:
        """Return a configuration drawn near another one."""
        shares = torch.tensor(self._shares(configuration), dtype=torch.float64)
        noise = torch.randn(len(shares), generator=generator, dtype=torch.float64)
        moved = reflect(shares + SPREAD * SHRINK**self.phases * noise).tolist()
        names = asdict(configuration)
        return Configuration(**{n: self.ranges[n].at(u) for n, u in zip(names, moved, strict=True)})

    def _predicted(self) -> Tuner:
        """Return the tuner whose estimates are predictions, if it sees the state and can."""
        if not self.trials or not self.bandit.settings.sees_state:
            return self
        points_MD = torch.tensor([point for point, _ in self.trials], dtype=torch.float64)
        rewards_M = torch.tensor([reward for _, reward in self.trials], dtype=torch.float64)
        estimates_N = self.bandit.scale * predict(points_MD, rewards_M, self._points())
        return replace(self, bandit=replace(self.bandit, estimates_N=estimates_N))

    def _resampled(self, generator: torch.Generator) -> Tuner:
        """Return the tuner with the worst arms replaced; the best one always stays."""
        settings, estimates = self.bandit.settings, self.bandit.estimates_N.tolist()
        count = int(settings.resampled_share * len(estimates))
        if count == 0:
            return self
        best = self.bandit.best()
        ranked = sorted(range(len(estimates)), key=lambda arm: (arm == best, estimates[arm]))
        pi_N = self.bandit.probabilities()
        parents = torch.multinomial(pi_N, count, replacement=True, generator=generator).tolist()
        configurations, estimates_N = list(self.configurations), self.bandit.estimates_N.clone()
        for arm, parent in zip(ranked[:count], parents, strict=True):
            configurations[arm] = self._near(self.configurations[parent], generator)
            estimates_N[arm] = settings.retention * estimates[parent]
        tried = self.bandit.tried - set(ranked[:count])
        bandit = replace(self.bandit, estimates_N=estimates_N, tried=tried)
        return replace(self, bandit=bandit, configurations=tuple(configurations))

    def to_json(self) -> dict[str, Any]:
        """Return the state that changes, as JSON values for a checkpoint."""
        return {
            "bandit": self.bandit.to_json(),
            "configurations": [asdict(configuration) for configuration in self.configurations],
            "state": list(self.state),
            "trials": [[list(point), reward] for point, reward in self.trials],
            "phases": self.phases,
        }

    def with_json(self, values: Mapping[str, Any]) -> Tuner:
        """Return the tuner with the state that :meth:`to_json` gave."""
        return replace(
            self,
            bandit=self.bandit.with_json(values["bandit"]),
            configurations=tuple(Configuration(**c) for c in values["configurations"]),
            state=tuple(values["state"]),
            trials=tuple((tuple(point), reward) for point, reward in values["trials"]),
            phases=values["phases"],
        )


def predict(points_MD: Tensor, rewards_M: Tensor, queries_ND: Tensor) -> Tensor:
    """Return the rewards [N] that kernel ridge regression predicts at the queries.

    ``m + k(Q, P) (k(P, P) + RIDGE I)^-1 (r - m)`` with m the mean of r and the Gaussian kernel of
    width 1; far from all points the prediction is m.
    """
    mean = rewards_M.mean()
    regularised_MM = gaussian(points_MD, points_MD) + RIDGE * torch.eye(len(points_MD)).double()
    solved_M: Tensor = torch.linalg.solve(regularised_MM, rewards_M - mean)
    return mean + gaussian(queries_ND, points_MD) @ solved_M


def gaussian(left_ND: Tensor, right_MD: Tensor) -> Tensor:
    """Return ``exp(-|x - y|^2 / 2)`` [N, M] of every pair of rows."""
    distances_NM: Tensor = torch.cdist(left_ND, right_MD)
    return distances_NM.square().mul(-0.5).exp()


def reflect(shares: Tensor) -> Tensor:
    """Return the shares with those outside [0, 1] mirrored at its ends; 1 itself is left out."""
    folded = shares.remainder(2.0)
    return torch.where(folded > 1, 2 - folded, folded).clamp(max=1 - 2.0**-53)
