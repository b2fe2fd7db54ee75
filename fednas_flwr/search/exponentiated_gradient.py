"""FedEx's distribution over hyper-parameter configurations: pure numbers, no networks.

Khodak et al. (2021), arXiv 2106.04502, Alg. 2. Every client of a round trains with a configuration
drawn from theta; their validation losses, less a baseline, give an estimate of theta's gradient,
and theta moves by an exponentiated gradient step.

Deviation: in the first round the baseline is that round's own mean loss, where the public code
has 0; by that every configuration that was drawn would lose to all others.

Tensor suffix: N configurations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fednas_flwr.settings.optimizers import ThetaSettings
from fednas_flwr.settings.parser import check_range

LEAST = 1e-30  # a probability below this is never drawn; keeps the gradient finite
EQUAL = 1e-9  # nats: a smaller excess is rounding, which aggressive steps would magnify


class Trial(NamedTuple):
    """One client's round: index of its configuration, its loss afterwards, its weight (> 0)."""

    configuration: int
    loss: float
    weight: float


@dataclass(frozen=True)
class Theta:
    """The distribution and what its steps depend on; every change is a new object.

    Attributes:
        settings: The constants.
        log_theta_N: Logarithms of the probabilities, float64.
        norm: Root of the sum of squares of the gradients' largest entries so far.
        loss_sum: Discounted sum of the rounds' mean losses; over ``loss_weight`` the baseline.
        loss_weight: The same sum of ones; 0 before the first round.
    """

    settings: ThetaSettings
    log_theta_N: Tensor
    norm: float = 0.0
    loss_sum: float = 0.0
    loss_weight: float = 0.0

    @classmethod
    def of(cls, num_configurations: int, settings: ThetaSettings) -> Theta:
        """Return the uniform distribution.

        Raises:
            ConfigError: There is no configuration.
        """
        check_range(
            num_configurations >= 1, "number of configurations", num_configurations, "1 or more"
        )
        log_share = -math.log(num_configurations)
        return cls(settings, torch.full((num_configurations,), log_share, dtype=torch.float64))

    def probabilities(self) -> Tensor:
        """Return theta [N]."""
        return self.log_theta_N.exp()

    def entropy(self) -> float:
        """Return ``-sum theta ln theta`` in nats, from 0 to ln(N)."""
        return max(0.0, float(torch.special.entr(self.probabilities()).sum()))

    def best(self) -> int:
        """Return the most probable configuration; ties go to the lowest."""
        return int(self.log_theta_N.argmax())

    def draw(self, generator: torch.Generator) -> int:
        """Return one configuration, drawn from theta."""
        return int(torch.multinomial(self.probabilities(), 1, generator=generator))

    def updated(self, trials: Sequence[Trial]) -> Theta:
        """Return the distribution after a round (Alg. 2, lines 10-13).

        ``grad_j = sum_i w_i (L_i - lambda) [c_i = j] / (theta_j sum_i w_i)`` and
        ``theta <- theta exp(-eta grad)``, normalised, with eta of the schedule.

        Args:
            trials: Of the clients that answered, with finite losses; none changes nothing.
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
        norm = math.hypot(self.norm, largest)
        scale = {"aggressive": largest, "adaptive": norm, "constant": 1.0}[self.settings.schedule]
        if scale > 0:
            gradient_N = gradient_N / scale * math.sqrt(2 * math.log(len(gradient_N)))
        discount = self.settings.baseline_discount
        return replace(
            self,
            log_theta_N=(self.log_theta_N - gradient_N).log_softmax(dim=0),
            norm=norm,
            loss_sum=discount * self.loss_sum + mean,
            loss_weight=discount * self.loss_weight + 1.0,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the state that changes, as JSON values for a checkpoint."""
        return {
            "log_theta": self.log_theta_N.tolist(),
            "norm": self.norm,
            "loss_sum": self.loss_sum,
            "loss_weight": self.loss_weight,
        }

    def with_json(self, values: Mapping[str, Any]) -> Theta:
        """Return the distribution with the state that :meth:`to_json` gave."""
        state = dict(values)
        log_theta_N = torch.tensor(state.pop("log_theta"), dtype=torch.float64)
        return replace(self, log_theta_N=log_theta_N, **state)
