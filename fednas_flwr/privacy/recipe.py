"""Learning rates of DP-SGD from its noise, so that one setting serves many data sets and budgets.

The noise of T steps moves every weight by a random walk. A rate at which that walk is too long
drowns what is learnt, at one at which it is short steps are wasted; what is best in between hardly
depends on the number of records and clients, on the budget or the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fednas_flwr.privacy.plan import PlannedRelease

LAST_RATE = 0.1  # of the learning rate, in the last round


def noise_per_step(release: PlannedRelease, batches: Sequence[float], *, asked: int) -> float:
    """Return the standard deviation of the noise in a value of a step's mean gradient.

    Args:
        release: A stage's releases of gradients, their noise calibrated.
        batches: Every client's expected batch.
        asked: How many of the clients answer in a step.
    """
    if release.noise_multiplier is None:
        raise ValueError(f"the noise of {release.key} is not calibrated yet")
    noises = 1 if release.shared else asked
    whole = asked * sum(batches) / len(batches)
    return release.noise_multiplier * release.max_grad_norm * math.sqrt(noises) / whole


def learning_rate(walk: float, noise: float, *, steps: int, momentum: float) -> float:
    """Return the rate at which the noise of all steps gives each weight a deviation of ``walk``.

    ``walk (1 - m) / (noise sqrt(T))``: a step of momentum m moves a weight by ``lr / (1 - m)`` of
    its noise in the end.

    Args:
        walk: The standard deviation, > 0, as if the rate never fell.
        noise: From :func:`noise_per_step`.
        steps: T, at least 1.
        momentum: m, from 0 to below 1.
    """
    return walk * (1 - momentum) / (noise * math.sqrt(steps))
