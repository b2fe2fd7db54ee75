"""The epsilon of a schedule of releases, and the noise that a target epsilon needs.

Four accountants share one signature, ``(releases, delta) -> epsilon``, over releases that are known
in advance: :func:`prv_epsilon` (tight, for reports), :func:`rdp_epsilon`, :func:`gdp_epsilon` (the
paper's formula, an approximation, for comparing with the numbers of papers only) and
``renyi_filter.filter_epsilon`` (the count of enforcement). They are not for requests that depend on
earlier outputs; for those there is ``RenyiFilter``. A record is in one split, so releases compose
per split: :func:`epsilon_per_split`.
"""

import math
from collections.abc import Callable, Collection, Sequence

from fednas_flwr.privacy.mechanism import renyi
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.settings.names import GDP, PRV, RDP


def gdp_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return the paper's epsilon, an approximation that can be below the truth; never enforced.

    ``mu = p * sqrt(T * (exp(1 / s^2) - 1))``: DP-FNAS (Singh et al. 2020), arXiv 2006.10559,
    Theorem 3.1, which prints ``exp(1 / s^2 - 1)``; the formula is that of Bu et al. (2019), arXiv
    1911.11607. It is a central limit for many steps at a small rate: with 10 steps at p = .05 and s
    = 1 it gives .75, but the truth is 1.66. Several mechanisms compose as ``sqrt(sum mu^2)``;
    mu-GDP is converted by ``delta = Phi(mu/2 - eps/mu) - exp(eps) * Phi(-mu/2 - eps/mu)``.

    Args:
        releases: The composition.
        delta: Strictly between 0 and 1.

    Raises:
        ValueError: ``delta`` is out of range.
    """
    renyi.check_delta(delta)
    squares = 0.0
    for release in renyi.merge_releases(releases):
        exponent = release.noise_multiplier**-2
        if exponent > 700:
            return math.inf
        squares += release.sample_rate**2 * release.steps * math.expm1(exponent)
    return gaussian_epsilon(math.sqrt(squares), delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon at ``delta`` of distinguishing N(0, 1) from N(mu, 1).

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
    import torch  # sites that sign for a secure sum do without torch

    points = torch.tensor([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu], dtype=torch.float64)
    log_first, log_second = torch.special.log_ndtr(points).tolist()
    return math.exp(log_first) - math.exp(min(0.0, epsilon + log_second))


Accountant = Callable[[Sequence[Release], float], float]
_HIGH_ORDERS = (36, 40, 44, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512, 1024)
RDP_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 40)),
    *(half / 2 for half in range(10, 22)),
    *range(11, 33),
    *_HIGH_ORDERS,
)
# Limits of the numerical accountant: above this epsilon nothing is private, and below this delta
# the rounding of its Fourier transforms shows. Beyond them the Renyi bound is returned.
_PRV_MAX_EPSILON = 500.0
_PRV_ROUNDING = 1e-10


def rdp_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return an upper bound on epsilon at ``delta``: added Renyi divergences, at the best order.

    The order is chosen after the sum, which is sound because the schedule is fixed in advance.

    Args:
        releases: The composition, in any order; the result is 0 if it is empty.
        delta: Strictly between 0 and 1.

    Raises:
        ValueError: ``delta`` is out of range.

    Example:
        >>> schedule = [Release(noise_multiplier=1.0, sample_rate=0.05, steps=10)]
        >>> round(rdp_epsilon(schedule, 1e-5), 2)
        2.16
    """
    renyi.check_delta(delta)
    if not releases:
        return 0.0
    merged = renyi.merge_releases(releases)
    divergences = {order: sum(renyi.cost(one, order) for one in merged) for order in RDP_ORDERS}
    epsilons = (
        renyi.epsilon_at_order(order=order, divergence=divergence, delta=delta)
        for order, divergence in divergences.items()
    )
    return max(0.0, min(epsilons))


def prv_epsilon(releases: Sequence[Release], delta: float) -> float:
    """Return a tight upper bound on epsilon at ``delta``, by composing privacy losses numerically.

    The function uses dp-accounting's privacy loss distributions, not Opacus' PRV accountant. They
    round the losses up onto a grid (Doroshenko et al. 2022, arXiv 2207.04380), count cut tails as
    infinite loss and take the larger of adding and removing a record, so grid and tails can only
    raise the result. Opacus composes one direction only and adds an error estimate. The grid is
    chosen for an excess of about .1 %; ``delta`` is lowered by 1e-10 for the rounding of the
    Fourier transforms. The result is never above :func:`rdp_epsilon`, which is returned if the
    transforms cannot be used: for epsilon above 500 or ``delta`` below 1e-9.

    Args:
        releases: The composition, in any order, of any mix of mechanisms.
        delta: Strictly between 0 and 1.

    Raises:
        ValueError: ``delta`` is out of range.
    """
    bound = rdp_epsilon(releases, delta)
    if bound == 0 or bound > _PRV_MAX_EPSILON or delta < 10 * _PRV_ROUNDING:
        return bound
    # Imported here because it takes half a second, which a run without privacy should not spend.
    import dp_accounting  # type: ignore[import-untyped,unused-ignore]
    from dp_accounting import pld  # type: ignore[import-untyped,unused-ignore]

    merged = renyi.merge_releases(releases)
    # Rounding adds about grid^2 of variance per step: keep sqrt(steps) * grid far below epsilon,
    # and the grid of one step's losses (up to about 1 / (2 s^2) + 10 / s) below 2 million points.
    grid = 0.015 * bound / math.sqrt(sum(release.steps for release in merged))
    least = min(release.noise_multiplier for release in merged)
    grid = max(grid, (1 / (2 * least**2) + 10 / least) / 2e6)
    accountant = pld.PLDAccountant(value_discretization_interval=grid)
    for release in merged:
        event = dp_accounting.GaussianDpEvent(release.noise_multiplier)
        if release.sample_rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(release.sample_rate, event)
        accountant.compose(event, release.steps)
    return min(bound, float(accountant.get_epsilon(delta - _PRV_ROUNDING)))


def epsilon_per_split(
    entries: Sequence[tuple[Release | None, Collection[str]]],
    delta: float,
    accountant: Accountant = prv_epsilon,
) -> dict[str, float]:
    """Return the epsilon of each split, composed of all releases that read it.

    Args:
        entries: Each release with the names of the splits that it read. None costs infinitely much
            for every split, since it protects another unit, whose parts may be in all of them.
        delta: Strictly between 0 and 1, the same for every split.
        accountant: Function that converts a composition into an epsilon.

    Returns:
        Epsilons by split, in the order of first reading. The client's epsilon is their maximum,
        because a record is in one split only.

    Example:
        >>> step = Release(noise_multiplier=1.0, sample_rate=0.05, steps=10)
        >>> spent = epsilon_per_split([(step, ["train"]), (step, ["train", "test"])], 1e-5)
        >>> spent["train"] > spent["test"]
        True
    """
    renyi.check_delta(delta)
    read: dict[str, list[Release]] = {}
    lost = any(release is None for release, _ in entries)
    for release, splits in entries:
        for split in set(splits):
            read.setdefault(split, []).extend([release] if release is not None else [])
    return {s: math.inf if lost else accountant(found, delta) for s, found in read.items()}


ACCOUNTANTS: dict[str, Accountant] = {PRV: prv_epsilon, RDP: rdp_epsilon, GDP: gdp_epsilon}


def calibrate_noise(
    *,
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    others: Sequence[Release] = (),
    accountant: Accountant,
) -> float:
    """Return the least noise multiplier whose epsilon is at most the target, to .1 %.

    The result always satisfies ``accountant(...) <= target_epsilon``: it is the upper end of a
    bisection whose lower end does not.

    Args:
        target_epsilon: Above 0.
        delta: Strictly between 0 and 1.
        sample_rate: As in :class:`Release`.
        steps: As in :class:`Release`.
        others: Other releases of the same records; they count towards the target.
        accountant: ``filter_epsilon`` if a filter must last to the end of the schedule; not
            :func:`gdp_epsilon`, which is no bound.

    Returns:
        The multiplier, at least .01.

    Raises:
        ValueError: A value is out of range, or a multiplier of 1e5 is still too small.
    """

    def enough(sigma: float) -> bool:
        release = Release(noise_multiplier=sigma, sample_rate=sample_rate, steps=steps)
        return accountant([release, *others], delta) <= target_epsilon

    high = 1.0
    while not enough(high):
        high *= 2
        if high > 1e5:
            raise ValueError(
                f"no noise_multiplier up to {high / 2:g} gives epsilon={target_epsilon:g} at delta="
                f"{delta:g} over {steps} steps at sample_rate={sample_rate:g}."
            )
    low = high / 2
    while low >= 0.01 and enough(low):
        low, high = low / 2, low
    return renyi.least(enough, low, high) if low >= 0.01 else high
