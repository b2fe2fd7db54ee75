"""Tests of replies to chosen records: their noise, a unit's influence, and the units drawn.

The commitment says that a release is a sum of contributions, of norm at most 1, of the units that
are drawn, plus N(0, sigma^2 I). Replies to canaries, which are records that the auditor has chosen,
can refute it: :class:`ReleaseTest`. Lengths are in units of the clipping norm. Every limit is wrong
with probability at most ``miss`` if noise is Gaussian and independent; other noise is refuted for
its lack of variance.

The tests are not for choosing noise and do not replace an accountant.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from scipy import stats  # type: ignore[import-untyped,unused-ignore]
from torch import Tensor

SHOWN = 0.999  # probability of finding a fault that an audit claims to find
LEAST_DRAWN, MOST_CANARIES = 16, 2048  # of replies at the run's own rate
ROUNDING = 1e-3
SLACK = 1.1  # of the variance: noise of secure sums slightly exceeds the commitment


def variance_limits(squares: float, count: int, *, miss: float) -> tuple[float, float]:
    """Return a lower and an upper limit of a variance.

    Args:
        squares: Sum of squares of independent values of mean 0.
        count: Number of values, at least 1.
        miss: Error probability of each limit, strictly between 0 and 1.

    Example:
        >>> low, high = variance_limits(250.0, 1000, miss=1e-6)
        >>> 0.2 < low < 0.25 < high < 0.32
        True
    """
    low, high = stats.chi2.isf(miss, count), stats.chi2.ppf(miss, count)
    return float(squares / low), float(squares / high)


def values_for_half(*, miss: float) -> int:
    """Return the least number of values that reveal half the deviation with probability ``SHOWN``.

    Half is revealed by an upper limit (:func:`variance_limits`) below the expected variance.
    """
    count = 2
    while stats.chi2.isf(1 - SHOWN, count) / 4 >= stats.chi2.ppf(miss, count):
        count += 1
    return count


def length_limits(squares: float, count: int, *, miss: float) -> tuple[float, float]:
    """Return a lower and an upper limit of the length of a mean.

    The limits use the tails of the noncentral chi-square distribution (Birgé 2001, Lemma 8.1): with
    squared length L, count c and ``x = log(1 / miss)`` it is above ``c + L + 2 sqrt((c + 2 L) x) +
    2 x`` with probability at most ``miss``, and as rarely below ``c + L - 2 sqrt((c + 2 L) x)``.

    Args:
        squares: Sum of squares of independent values of variance 1.
        count: Number of values, c, at least 1.
        miss: Error probability of each limit, strictly between 0 and 1.

    Returns:
        Limits of the length of the vector of their means, at least 0.

    Example:
        >>> low, high = length_limits(2000.0, 1000, miss=1e-6)
        >>> 20 < low < math.sqrt(1000) < high < 45
        True
    """
    x, twice = math.log(1 / miss), 2 * squares - count
    low = math.sqrt(max(0.0, twice)) - 2 * math.sqrt(x)
    high = math.sqrt(max(0.0, twice + 4 * x)) + 2 * math.sqrt(x)
    lengths = (math.sqrt(max(0.0, (max(0.0, s) ** 2 - count) / 2)) for s in (low, high))
    return next(lengths), next(lengths)


def shows_twice(length: float, count: int, *, miss: float) -> bool:
    """Return True if, with probability ``SHOWN``, twice a length has a lower limit above it.

    Args:
        length: Length of a mean, over the deviation of each value; above 0.
        count: As in :func:`length_limits`.
        miss: Largest chance of a false finding, strictly between 0 and 1.
    """
    square = 4 * length**2
    fewest = count + square - 2 * math.sqrt((count + 2 * square) * math.log(1 / (1 - SHOWN)))
    return length_limits(fewest, count, miss=miss)[0] > length


def shows_quarter(length: float, count: int, *, miss: float) -> bool:
    """Return True if a quarter of a length has an upper limit below half of it.

    Arguments and probability are as in :func:`shows_twice`.
    """
    x, square = math.log(1 / (1 - SHOWN)), length**2 / 16
    most = count + square + 2 * math.sqrt((count + 2 * square) * x) + 2 * x
    return length_limits(most, count, miss=miss)[1] < length / 2


def rate_limit(drawn: float, units: int, *, miss: float) -> float:
    """Return a lower limit of the probability with which each of some units was drawn.

    Clopper and Pearson (1934).

    Args:
        drawn: Number of units that were drawn, rounded down.
        units: Number of units, at least 1.
        miss: Error probability, strictly between 0 and 1.

    Example:
        >>> 0.4 < rate_limit(500, 1000, miss=1e-6) < 0.5
        True
    """
    number = min(max(0, math.floor(drawn)), units)
    return 0.0 if number == 0 else float(stats.beta.ppf(miss, number, units - number + 1))


@dataclass(frozen=True)
class Finding:
    """Findings about one kind of release.

    Attributes:
        release: Key of the planned release: stage, action, kind, splits.
        seen: Measurements, as text for people.
        faults: Deviations from the commitment.
        unseen: Parts that could not be audited, or faults that could have passed.
    """

    release: str
    seen: str
    faults: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Amounts:
    """Numbers of compared replies and of canaries.

    Attributes:
        replies: Replies without canaries.
        planted: Replies with canaries, all of which are drawn.
        units: Canaries of each client in those.
        canaries: Canaries of each client in replies whose units are drawn at the run's rate;
            possibly none.
    """

    replies: int
    planted: int
    units: int
    canaries: int = 0

    @property
    def precision(self) -> float:
        """Square root of the effective number of replies behind a mean's change."""
        return 1 / math.sqrt(1 / self.replies + 1 / self.planted)


@dataclass
class ReleaseTest:
    """Tests of one kind of release.

    Attributes:
        key: Key of the planned release.
        sigma: Committed noise of a reply's values, in units of the clipping norm.
        rate: Committed rate at which each unit is drawn.
        honest: Number of clients whose canaries are in a reply.
        parts: Place of each tensor in a reply's values [d].
        exact: Contribution of one canary before it is clipped [d]; None if it is not known.
        is_gradient: True if it is a sum of clipped gradients.
        is_probe: True if each value is a release, and noise is estimated from replies without
            canaries.
        by_client: True if a client is one unit.
        on_path: True if only the values with which a path computes are released.
        two_steps: Weights of the releases of two steps in the reply to one request; None if it has
            one step, or the weights are unknown.
        miss: Largest probability that a test finds a fault in an honest client.
        faults: Faults that were found.
        unseen: Faults that could have passed.
    """

    key: str
    sigma: float
    rate: float
    honest: int
    parts: Mapping[str, slice]
    exact: Tensor | None
    is_gradient: bool
    is_probe: bool
    by_client: bool
    on_path: bool
    two_steps: tuple[float, float] | None
    miss: float
    faults: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    @property
    def sampled(self) -> int:
        """Number of canaries from which to draw batches at the run's rate; 0 if all are drawn."""
        if not self.is_gradient or self.rate == 1:
            return 0
        return min(MOST_CANARIES, math.ceil(max(LEAST_DRAWN, 20 * self.sigma**2) / self.rate))

    @property
    def _size(self) -> int:
        return max(int(part.stop) for part in self.parts.values())

    def is_shown(self, amounts: Amounts) -> bool:
        """Return True if units that move a release by twice the clipping norm are found.

        For gradients, a sum that is clipped instead of its units must be found, too.
        """
        count = self._size if self.exact is None else len(self.parts)
        if self.is_probe:
            count = self._size * amounts.planted
        most = self._most(amounts)
        summed = self.is_gradient and not self.by_client
        shown = not summed or shows_quarter(most, count, miss=self.miss)
        return shown and shows_twice(most, count, miss=self.miss)

    def _most(self, amounts: Amounts) -> float:
        """Return the largest length by which units move a release, over its values' deviation."""
        size = math.sqrt(amounts.planted * self._size) if self.is_probe else amounts.precision
        return amounts.units * self.honest / self.sigma * size

    def finding(
        self, amounts: Amounts, without: Tensor, planted: Tensor, doubled: Tensor, drawn: Tensor
    ) -> Finding:
        """Test the replies against the commitment.

        Args:
            amounts: Numbers of replies and canaries.
            without: Replies without canaries [replies, d].
            planted: Replies with canaries, where all canaries are drawn [planted, d].
            doubled: Sums of two releases without canaries [n, d]; possibly none.
            drawn: Replies with canaries drawn at the run's rate [n, d]; possibly none.
        """
        noise = _differences(without) / self.sigma
        if not self.is_probe:
            noise = torch.cat([noise, _differences(planted) / self.sigma])
        change = (planted.mean(dim=0) - without.mean(dim=0)) / self.sigma
        # outside a path nothing is released; everything else is, whatever the records are
        moved = noise.any(dim=0) | (change != 0) | (not self.on_path)
        if dead := int(((noise == 0).all(dim=0) & moved).sum()):
            self.faults.append(f"{dead:,} of {int(moved.sum()):,} values have no noise")
        seen = f"noise {self._noise(noise, moved, amounts)}"
        if len(doubled):
            self._repeats(_differences(doubled)[:, moved] / self.sigma)
        elif self.two_steps is not None:
            self.unseen.append("noise of several steps of one request")
        seen += f"; {self._contribution(change, planted, moved, amounts)}"
        if len(drawn):
            seen += f"; {self._rate(drawn, without, amounts)}"
        return Finding(self.key, seen, tuple(dict.fromkeys(self.faults)), tuple(self.unseen))

    def _noise(self, noise: Tensor, moved: Tensor, amounts: Amounts) -> str:
        """Test the noise of each tensor [n, d], in the values that have moved [d]."""
        tested = {name: noise[:, part][:, moved[part]] for name, part in self.parts.items()}
        if self.is_probe and noise.shape[1] == 2:  # is the noise the same in two trials?
            tested["the difference of two trials"] = (noise[:, :1] - noise[:, 1:]) / math.sqrt(2)
        few, pairs = 0, amounts.replies // 2  # without canaries, whose layers may draw of their own
        shares, wrong = [], []
        for name, values in tested.items():
            if not values.numel():
                continue
            squares, alone = float((values**2).sum()), values[:pairs]
            high = variance_limits(squares, values.numel(), miss=self.miss)[1]
            low = variance_limits(float((alone**2).sum()), alone.numel(), miss=self.miss)[0]
            shares.append(math.sqrt(squares / values.numel()))
            few += name in self.parts and values.numel() < values_for_half(miss=self.miss)
            if high < 1 or low > SLACK:
                wrong.append(f"{shares[-1]:.2f} in {name}")
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            self.faults.append(f"noise of {', '.join(wrong[:3])}{more} where 1 was committed to")
        if few:
            self.unseen.append(f"half the noise in {few} of {len(tested)} tensors")
        lowest, highest = min(shares, default=math.inf), max(shares, default=0.0)
        return f"{lowest:.2f} to {highest:.2f} of that committed to in {len(tested)} tensors"

    def _repeats(self, noise: Tensor) -> None:
        """Test the noise of sums of two releases; it more than adds up if both have the same."""
        assert self.two_steps is not None
        alone, same = math.hypot(*self.two_steps) ** 2, sum(self.two_steps) ** 2
        variance, count = float((noise**2).mean()) / alone, noise.numel()
        low, high = variance_limits(variance * count, count, miss=self.miss)
        if high < 1 or low > SLACK:
            self.faults.append(
                f"two steps together have {variance:.2f} of the variance of two noises"
            )
        if variance_limits(same / alone * count, count, miss=self.miss)[0] < 1.1 * SLACK:
            self.unseen.append("noise that is the same in the steps of one request")

    def _contribution(
        self, change: Tensor, planted: Tensor, moved: Tensor, amounts: Amounts
    ) -> str:
        """Test the influence of units on a release [d], over the noise's deviation."""
        most = self._most(amounts)
        scaled = (
            planted.flatten() / self.sigma if self.is_probe else change[moved] * amounts.precision
        )
        length, _ = self._moved(scaled, most)
        if not self.is_shown(amounts):
            self.unseen.append("twice the contribution of a unit")
        if self.exact is None:
            return f"a unit moves it by {length:.2f} of what was committed to"
        directions = [(part, self.exact[part]) for part in self.parts.values()]
        along = [
            float(change[part] @ exact / exact.norm()) * amounts.precision
            for part, exact in directions
            if exact.any()
        ]
        length, high = self._moved(torch.tensor(along, dtype=torch.float64), most)
        whole = float(self.exact.norm())
        if self.is_gradient and not self.by_client and high < min(1.0, whole) * most / 2:
            norms = f"{length * amounts.units:.2f} norms"
            self.faults.append(f"{amounts.units} units move it by {norms}: no sum over units")
        if not whole:
            self.unseen.append("what a unit contributes: no canary moves it")
        if self.is_gradient and whole < 2:
            self.unseen.append(f"no clipping: a canary has {whole:.2g} of the norm")
        return (
            f"a unit, of {whole:.3g} norms before it is clipped, moves it by {length:.2f}, in "
            f"{int((self.exact[moved] != 0).sum()):,} of {int(moved.sum()):,} values"
        )

    def _moved(self, values: Tensor, most: float) -> tuple[float, float]:
        """Test values of variance 1; return by how many norms a unit moves them, and a limit."""
        squares, count = float((values**2).sum()), len(values)
        length = math.sqrt(max(0.0, squares - count)) / most
        low, high = length_limits(squares, count, miss=self.miss)
        if low > most * (1 + ROUNDING):
            self.faults.append(f"a unit moves it by {length:.2f} of the clipping norm")
        return length, high

    def _rate(self, drawn: Tensor, without: Tensor, amounts: Amounts) -> str:
        """Test the number of units in the batches of some replies [n, d]."""
        assert self.exact is not None
        rate, total, n = self.rate, amounts.canaries * self.honest, len(drawn)
        whole = float(self.exact.norm())
        clipped = min(1.0, whole)
        numbers = (drawn - rate * without.mean(dim=0)) @ self.exact / (whole * clipped)
        quantile, noise = float(stats.norm.isf(self.miss)), self.sigma / clipped
        doubt = quantile * noise * math.sqrt(n * (1 + n / len(without)))
        found = float(numbers.sum())
        said = f"{found / (total * n):.3g} for {rate:.3g}"
        if rate_limit(found - doubt, total * n, miss=self.miss) > rate:
            self.faults.append(f"units are drawn at a rate of {said}")
        spread = float(numbers.var()) * (n - 1)
        expected = total * rate * (1 - rate) + noise**2
        if variance_limits(spread / expected, n - 1, miss=self.miss)[1] < 1 / SLACK:
            self.faults.append("the same units are drawn in several steps")
        mean = total * n * rate
        if mean < 2 * (doubt + quantile * math.sqrt(mean)):
            self.unseen.append("twice the rate")
        return f"rate {said}"


def _differences(replies: Tensor) -> Tensor:
    """Return differences of pairs of replies, over sqrt(2): all but noise cancels out."""
    return (replies[1::2] - replies[::2]) / math.sqrt(2)
