"""Enforcement of a fixed privacy budget if each request is chosen after seeing earlier releases.

A server may choose the noise, rate and number of steps of every request from earlier releases.
Totals that are converted to epsilon afterwards, at whichever order is best, do not cover this. A
filter does, because its orders are fixed before the first request. One filter guards one split of
one data set. Main class: :class:`RenyiFilter`.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import add

from fednas_flwr.base.errors import BudgetExceededError
from fednas_flwr.privacy.mechanism import renyi
from fednas_flwr.settings.names import LARGEST_EPSILON, LEAST_EPSILON

Reading = tuple[renyi.Release, Collection[str]]  # a release and the splits that it reads


def default_orders(*, epsilon: float, delta: float) -> tuple[float, ...]:
    """Return the two orders that lose least at a budget, chosen from the budget alone.

    ``a = 1 + sqrt(log(1/delta)) / r`` with ``r = sqrt(log(1/delta) + epsilon) -
    sqrt(log(1/delta))`` is the best order for a Gaussian mechanism that uses up the budget
    (``epsilon = r^2 + 2 r sqrt(log(1/delta))``). Subsampling favours lower orders, hence the second
    one, halfway to 1. Together they cost 5 to 20 % of epsilon over the best order known afterwards,
    and more if epsilon is below .5 or steps are few and have little noise. A site that knows a
    schedule beforehand may choose other orders for it, at any time before the first release.
    """
    log_delta = math.log(1 / delta)
    root = math.sqrt(log_delta + epsilon) - math.sqrt(log_delta)
    order = 1 + math.sqrt(log_delta) / root
    return tuple(min(max(value, 1.05), 2048.0) for value in (order, (1 + order) / 2))


class RenyiFilter:
    """A filter that affords releases until their Renyi divergences fill a budget (epsilon, delta).

    Every release adds its divergence to the total of each order. Order a may carry a total of up to
    ``B(a)``, which converts to ``epsilon`` at ``delta / n`` for n orders. A release is afforded as
    long as at least one order stays within its budget.

    **Guarantee.** All releases spent through one filter are together (epsilon, delta)-private for
    one record of its split added or removed, whatever rule chooses the next request or stops, as
    long as that rule sees nothing of the split except the releases.

    With one order this is the Renyi filter of Feldman and Zrnic (2021), arXiv 2008.11193, and
    Lecuyer (2021), arXiv 2103.01379: at an order fixed in advance ``M = exp((a - 1) * (L - S))``,
    with the privacy loss L and the total S so far, is a supermartingale that starts at 1. With
    several orders, which of them survives depends on the outputs, so "some order is within its
    budget" is not enough at the full delta (filters on a whole privacy profile are not free:
    arXiv 2602.15815). Each order therefore gets a share of delta. Proof: on the outcomes where a
    is the first order within its budget, ``S <= B(a)`` gives ``max(0, 1 - exp(epsilon - L)) <=
    (delta / n) * M``; the mean of M over any outcomes is at most 1; the n shares sum to delta.

    What breaks it: orders chosen after a release; noise drawn that was not spent before; a record
    in two splits; two filters over the same records, each with the whole budget.

    It is not thread-safe: its ledger spends inside one transaction.

    Args:
        epsilon: The budget, .001 to 1e6.
        delta: The budget's delta, strictly between 0 and 1.
        orders: Orders above 1, fixed before anything is spent; None takes :func:`default_orders`.
        totals: Divergence spent so far at each order; None means zeros.

    Attributes:
        totals: The sum of the divergences at each order.

    Example:
        >>> site = RenyiFilter(epsilon=2.0, delta=1e-5)
        >>> site.spend(renyi.Release(noise_multiplier=2.0, sample_rate=0.01, steps=1000))
        >>> site.affords(renyi.Release(noise_multiplier=0.5, sample_rate=1.0, steps=1))
        False
        >>> again = RenyiFilter(epsilon=2.0, delta=1e-5, orders=site.orders, totals=site.totals)
        >>> again.spent() == site.spent()
        True
    """

    def __init__(
        self,
        *,
        epsilon: float,
        delta: float,
        orders: Sequence[float] | None = None,
        totals: Sequence[float] | None = None,
    ) -> None:
        """Start, or continue from ``totals``."""
        self.epsilon, self.delta = float(epsilon), float(delta)
        self.orders = tuple(
            default_orders(epsilon=epsilon, delta=delta) if orders is None else orders
        )
        self.totals = tuple(totals or [0.0] * len(self.orders))
        self._offsets = [
            renyi.epsilon_at_order(order=order, divergence=0.0, delta=delta / len(self.orders))
            for order in self.orders
        ]
        self.budgets = tuple(self.epsilon - offset for offset in self._offsets)

    def affords(self, *releases: renyi.Release) -> bool:
        """True if all of ``releases`` fit into the remaining budget; nothing is spent."""
        return self._fits(self._after(*releases))

    def spend(self, release: renyi.Release) -> None:
        """Add ``release`` to every total; call it before the noise is drawn.

        Raises:
            BudgetExceededError: The release does not fit; nothing is spent.
        """
        totals = self._after(release)
        if not self._fits(totals):
            raise BudgetExceededError(
                f"noise_multiplier={release.noise_multiplier:g} at sample_rate="
                f"{release.sample_rate:g} for {release.steps} steps would need epsilon="
                f"{self._epsilon(totals):.4g} at delta={self.delta:g}; the budget is "
                f"{self.epsilon:.4g}, of which {self.spent():.4g} is spent."
            )
        self.totals = totals

    def spent(self) -> float:
        """Return the least epsilon with which these orders would have afforded what was spent.

        It is at most the budget. It measures how much of the promise was used, and is not a
        guarantee of its own for someone who stops when it looks good.
        """
        return self._epsilon(self.totals) if any(self.totals) else 0.0

    def _after(self, *releases: renyi.Release) -> tuple[float, ...]:
        """Return the totals as they would be after ``releases``."""
        totals = self.totals
        for release in releases:
            totals = tuple(map(add, totals, (renyi.cost(release, order) for order in self.orders)))
        return totals

    def _fits(self, totals: Sequence[float]) -> bool:
        """Return True if at least one order is within its budget."""
        return any(t <= budget for t, budget in zip(totals, self.budgets, strict=True))

    def _epsilon(self, totals: Sequence[float]) -> float:
        """Return the least epsilon to which an order converts, not below 0."""
        return max(0.0, min(t + o for t, o in zip(totals, self._offsets, strict=True)))


def covered_steps(
    left: Mapping[str, RenyiFilter], stages: Mapping[str, Sequence[Reading]]
) -> dict[str, int]:
    """Return the steps of each stage of a schedule that the remaining budgets cover.

    Args:
        left: Each split's filter in its current state.
        stages: The releases of each stage, in order, with their splits. The releases of a stage
            step together: after k of the T steps of the longest one, a release with t steps has
            taken ``floor(k * t / T)``. Stages after one that is not covered to its end get 0.
    """
    covered: dict[str, int] = {}
    before: list[Reading] = []
    for stage, entries in stages.items():
        steps = range(1, max(release.steps for release, _ in entries) + 1)
        covered[stage] = bisect_left(steps, True, key=partial(_ends_before, left, before, entries))
        before += entries
    return covered


def _ends_before(
    left: Mapping[str, RenyiFilter],
    before: Sequence[Reading],
    entries: Sequence[Reading],
    steps: int,
) -> bool:
    """Return True if a budget ends before ``steps`` steps of a stage that follows others."""
    longest = max(release.steps for release, _ in entries)
    taken = [
        (replace(release, steps=release.steps * steps // longest), splits)
        for release, splits in entries
        if release.steps * steps >= longest
    ]
    return not all(
        budget.affords(*(release for release, splits in [*before, *taken] if split in splits))
        for split, budget in left.items()
    )


def filter_epsilon(releases: Sequence[renyi.Release], delta: float) -> float:
    """Return the least budget, to .1 %, whose :class:`RenyiFilter` affords all of ``releases``.

    This is an accountant for planning: under enforcement, noise calibrated with it lasts to the
    last step, while noise calibrated with a tighter accountant is refused earlier. The result is
    infinite if no budget up to 1e6 suffices.

    Raises:
        ValueError: ``delta`` is out of range.
    """
    renyi.check_delta(delta)
    if not releases:
        return 0.0

    def lasts(epsilon: float) -> bool:
        return RenyiFilter(epsilon=epsilon, delta=delta).affords(*merged)

    merged = renyi.merge_releases(releases)
    most = LARGEST_EPSILON
    return renyi.least(lasts, LEAST_EPSILON, most) if lasts(most) else math.inf
