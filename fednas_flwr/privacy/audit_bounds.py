"""Statistics of releases: how much noise they carry, how much one unit moves them, who is drawn.

A release is committed to as a sum of contributions, of norm 1 at most, of the units that are drawn,
plus N(0, sigma^2 I). Replies to records that the auditor has chosen can refute it. Lengths are in
units of the clipping norm. Every limit is wrong with probability ``miss`` at most if noise is
Gaussian and independent; other noise is refuted for its lack of variance.

Not for choosing noise, and no substitute for an accountant.
"""

from __future__ import annotations

import math

from scipy import stats  # type: ignore[import-untyped,unused-ignore]

SHOWN = 0.999  # probability with which a fault is found that an audit is said to find


def variance_limits(squares: float, count: int, *, miss: float) -> tuple[float, float]:
    """Return a lower and an upper limit of a variance.

    Args:
        squares: Sum of squares of independent values of mean 0.
        count: Number of values, at least 1.
        miss: Of each limit, strictly between 0 and 1.

    Example:
        >>> low, high = variance_limits(250.0, 1000, miss=1e-6)
        >>> 0.2 < low < 0.25 < high < 0.32
        True
    """
    low, high = stats.chi2.isf(miss, count), stats.chi2.ppf(miss, count)
    return float(squares / low), float(squares / high)


def values_for_half(*, miss: float) -> int:
    """Return the least number of values that show half the deviation, as often as ``SHOWN``.

    Half is shown by an upper limit (:func:`variance_limits`) below the variance that is expected.
    """
    count = 2
    while stats.chi2.isf(1 - SHOWN, count) / 4 >= stats.chi2.ppf(miss, count):
        count += 1
    return count


def length_limits(squares: float, count: int, *, miss: float) -> tuple[float, float]:
    """Return a lower and an upper limit of the length of a mean.

    By the tails of the noncentral chi-square distribution of Birgé (2001), Lemma 8.1: with squared
    length L, count c and ``x = log(1 / miss)`` it is above ``c + L + 2 sqrt((c + 2 L) x) + 2 x``
    with probability ``miss`` at most, and as rarely below ``c + L - 2 sqrt((c + 2 L) x)``.

    Args:
        squares: Sum of squares of independent values of variance 1.
        count: Number of values, c, at least 1.
        miss: Of each limit, strictly between 0 and 1.

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
    """Return whether twice a length has a lower limit above it, as often as ``SHOWN``.

    Args:
        length: Of a mean, over the deviation of each value; above 0.
        count: As of :func:`length_limits`.
        miss: Largest chance of a false finding, strictly between 0 and 1.
    """
    square = 4 * length**2
    fewest = count + square - 2 * math.sqrt((count + 2 * square) * math.log(1 / (1 - SHOWN)))
    return length_limits(fewest, count, miss=miss)[0] > length


def shows_quarter(length: float, count: int, *, miss: float) -> bool:
    """Return whether a quarter of a length has an upper limit below half of it.

    Arguments and how often: as of :func:`shows_twice`.
    """
    x, square = math.log(1 / (1 - SHOWN)), length**2 / 16
    most = count + square + 2 * math.sqrt((count + 2 * square) * x) + 2 * x
    return length_limits(most, count, miss=miss)[1] < length / 2


def rate_limit(drawn: float, units: int, *, miss: float) -> float:
    """Return a lower limit of the probability by which each of some units was drawn.

    Clopper and Pearson (1934).

    Args:
        drawn: How many were, rounded down.
        units: How many there were, at least 1.
        miss: Strictly between 0 and 1.

    Example:
        >>> 0.4 < rate_limit(500, 1000, miss=1e-6) < 0.5
        True
    """
    number = min(max(0, math.floor(drawn)), units)
    return 0.0 if number == 0 else float(stats.beta.ppf(miss, number, units - number + 1))
