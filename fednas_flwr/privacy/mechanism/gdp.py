"""The paper's accountant: Gaussian differential privacy by a central limit theorem.

For comparing with the numbers of papers only. It is an approximation and no bound, so it neither
enforces a budget nor calibrates noise. Main function: :func:`gdp_epsilon`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fednas_flwr.privacy.mechanism.renyi import Release, check_delta, merge_releases


def gdp_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return the paper's epsilon: an approximation, below the truth at times, never enforced.

    ``mu = p * sqrt(T * (exp(1 / s^2) - 1))``: DP-FNAS (Singh et al. 2020), arXiv 2006.10559,
    Theorem 3.1, which prints ``exp(1 / s^2 - 1)``; the formula is that of Bu et al. (2019), arXiv
    1911.11607. It is a central limit for many steps at a small rate: with 10 steps at p = .05 and
    s = 1 it says .75 where the truth is 1.66. Several mechanisms compose as ``sqrt(sum mu^2)``;
    mu-GDP is converted by ``delta = Phi(mu/2 - eps/mu) - exp(eps) * Phi(-mu/2 - eps/mu)``.

    Args:
        releases: The composition.
        delta: Strictly between 0 and 1.

    Raises:
        ValueError: ``delta`` is out of range.
    """
    check_delta(delta)
    squares = 0.0
    for release in merge_releases(releases):
        exponent = release.noise_multiplier**-2
        if exponent > 700:
            return math.inf
        squares += release.sample_rate**2 * release.steps * math.expm1(exponent)
    return gaussian_epsilon(math.sqrt(squares), delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the epsilon at ``delta`` of telling N(0, 1) from N(mu, 1): no approximation.

    Dong, Roth and Su (2019), arXiv 1905.02383, Corollary 2.13.
    """
    if mu == 0 or _gdp_delta(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while _gdp_delta(high, mu) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _gdp_delta(middle, mu) > delta else (low, middle)
    return high


def _gdp_delta(epsilon: float, mu: float) -> float:
    """Return delta at ``epsilon`` of mu-Gaussian differential privacy."""
    points = torch.tensor([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu], dtype=torch.float64)
    log_first, log_second = torch.special.log_ndtr(points).tolist()
    return math.exp(log_first) - math.exp(min(0.0, epsilon + log_second))
