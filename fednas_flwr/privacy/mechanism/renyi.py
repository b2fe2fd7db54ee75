"""The cost of one private release, in Renyi differential privacy.

A release is a Poisson-subsampled Gaussian mechanism; neighbours differ by one record added or
removed. Renyi divergences add up over releases, even adaptively chosen ones, which is why
enforcement uses them (``renyi_filter``). For tight conversions of whole schedules there is
``accounting``. Main functions: :func:`renyi_divergence`, :func:`epsilon_at_order` and, for another
unit of privacy, :func:`counted`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fednas_flwr.settings import names, parser
from fednas_flwr.settings.optimizers import Count, NoiseMultiplier, ShareAbove0

_ROUNDING = 1 + 1e-9
_MAX_POINTS = 2**15


@dataclass(frozen=True)
class Release(parser.Checked):
    """A repeated Poisson-subsampled Gaussian mechanism, which one row of a ledger books.

    Each step draws every record with probability ``sample_rate``, sums vectors of L2 norm at most
    R and adds Gaussian noise of standard deviation ``noise_multiplier * R``.

    Args:
        noise_multiplier: Standard deviation of the noise over the clipping norm, .001 to 1e6.
        sample_rate: Probability of each record in each step, above 0; 1 means the full batch.
        steps: Number of repetitions, at least 1.

    Raises:
        ConfigError: A value is outside its range.

    Example:
        >>> Release(noise_multiplier=1.0, sample_rate=0.01, steps=100).steps
        100
    """

    noise_multiplier: NoiseMultiplier
    sample_rate: ShareAbove0
    steps: Count


def poisson_rate(batch_size: float | None, num_records: int) -> float:
    """Return ``min(1, B / N)``, the rate at which Poisson batches have the expected size B.

    Args:
        batch_size: B, at least 1. A value below 1 is the rate itself, except that with fewer than 1
            / B records one is expected. None takes all records.
        num_records: N, as declared. The rate is public and must not depend on the data.
    """
    if batch_size is None or batch_size >= max(1, num_records):
        return 1.0
    return max(batch_size, 1 / num_records) if batch_size < 1 else batch_size / num_records


def merge_releases(releases: Sequence[Release]) -> list[Release]:
    """Return the same composition with the steps of equal mechanisms added up."""
    steps: dict[tuple[float, float], int] = {}
    for release in releases:
        key = (release.noise_multiplier, release.sample_rate)
        steps[key] = steps.get(key, 0) + release.steps
    return [
        Release(noise_multiplier=noise, sample_rate=rate, steps=count)
        for (noise, rate), count in steps.items()
    ]


@lru_cache(maxsize=4096)  # bounded, as strangers choose the arguments
def renyi_divergence(*, noise_multiplier: float, sample_rate: float, order: float) -> float:
    """Return an upper bound on the Renyi divergence of one step, equal to it to nine digits.

    ``D = log(A) / (order - 1)`` with ``A = E[(1 - p + p * exp((2 z - 1) / (2 s^2)))^order]`` over
    ``z ~ N(0, s^2)``: Mironov, Talwar and Zhang (2019), arXiv 1908.10530, section 3, who also show
    that this direction is the larger one of the two, and that one dimension is the worst case.
    Their series lose all digits at small rates, where ``A - 1`` is tiny; here ``A - 1`` itself is
    integrated by the trapezoidal rule, as the mean of ``(1 + x)^order - 1 - order * x``, which is
    never negative and has the same value because ``E[x] = 0``. The integrand is analytic for ``|Im
    z| < pi s^2``, so with this width the rule's error is about ``exp(-70)`` of the result.

    Args:
        noise_multiplier: s, as in :class:`Release`.
        sample_rate: p, as in :class:`Release`.
        order: Above 1.

    Edge cases: a rate of 1 gives the Gaussian mechanism's ``order / (2 s^2)``. It bounds every
    other rate, exceeding it by at most ``-log(p) * order / (order - 1)``, and replaces the integral
    if there is so little noise that it would need more than 32,768 points.
    """
    s, p = noise_multiplier, sample_rate
    width = min(s, s * s) / 4
    if p == 1 or (order + 28 * s) / width > _MAX_POINTS:
        return order / (2 * s * s) * _ROUNDING
    z = np.arange(-14 * s, order + 14 * s, width)
    log_weight = -0.5 * (z / s) ** 2 + _log_excess((2 * z - 1) / (2 * s * s), p, order)
    peak = float(log_weight.max())
    log_mass = peak + math.log(np.exp(log_weight - peak).sum() * width / s / math.sqrt(2 * math.pi))
    return float(np.logaddexp(0.0, log_mass)) / (order - 1) * _ROUNDING


def cost(release: Release, order: float) -> float:
    """Return the divergence of all steps of a release at one order."""
    return release.steps * renyi_divergence(
        noise_multiplier=release.noise_multiplier, sample_rate=release.sample_rate, order=order
    )


def _log_excess(u: np.ndarray, p: float, order: float) -> np.ndarray:
    """Return ``log((1 + x)^order - 1 - order * x)`` for ``x = p * (exp(u) - 1)``."""
    log_growth = np.logaddexp(math.log1p(-p), math.log(p) + u)  # log(1 + x) for large x
    x = p * np.expm1(np.minimum(u, 500.0))
    with np.errstate(all="ignore"):  # each line is used only where it is valid
        near = 1 + (order - 4) / 5 * x
        near = 1 + (order - 3) / 4 * x * near
        near = order * (order - 1) / 2 * x**2 * (1 + (order - 2) / 3 * x * near)
        middle = np.expm1(order * np.log1p(x)) - order * x
        log_line = np.where(u < 500, np.log1p(order * x), math.log(order * p) + u)
        far = order * log_growth + np.log(-np.expm1(log_line - order * log_growth))
        close = np.log(np.where(np.abs(order * x) < 1e-2, near, middle))
    return np.where(order * log_growth > 30, far, close)


def epsilon_at_order(*, order: float, divergence: float, delta: float) -> float:
    """Return the epsilon at ``delta`` that a Renyi divergence of one order implies.

    ``divergence + log(1 - 1/order) - log(delta * order) / (order - 1)``: Canonne, Kamath and
    Steinke (2020), arXiv 2004.00010, Proposition 12. It may be negative, which means less than 0.
    """
    return divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)


def least(enough: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least value that is enough, from ``low``, which is not, to ``high``; to .1 %."""
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def check_delta(delta: float) -> None:
    """Raise ``ValueError`` unless ``delta`` lies strictly between 0 and 1."""
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie strictly between 0 and 1, got {delta!r}.")


def booked_unit(unit: names.Unit, id_column: str) -> str:
    """Return a unit as a ledger books it: persons with the column that identifies them."""
    return f"{unit} by {id_column}" if unit == names.PERSON else unit


def kind_of(booked: str) -> str:
    """Return the member of ``UNITS`` that a booked unit is."""
    return booked.partition(" ")[0]


def protects(booked: str, unit: str) -> bool:
    """True if a release that protects a booked unit also bounds leakage about another one."""
    return booked == unit or names.UNITS.index(kind_of(booked)) > names.UNITS.index(kind_of(unit))


def counted(release: Release, booked: str, unit: str) -> Release | None:
    """Return the release with the cost of ``release`` for one ``unit``; None costs infinitely much.

    A release hides whether one unit was there: a record, a person with all records, or the client.
    For a unit that is

    - the same: the cost is unchanged;
    - **coarser**, or made of other parts (persons by another column): infinitely much. Nothing
      bounds how many of the one are in the other, so noise for one hides none of the other;
    - **finer** (client > person > record): adding a record to a person who has others replaces that
      person's contribution v by w, both of norm R. These are up to ``2 R`` apart, so the release
      counts with half its noise multiplier, and twice if it samples.

    Proof of the last: let N(x) be the noise around x and p the sampling rate, with the same coin on
    both sides. ``P = (1-p) N(0) + p N(v)`` and ``Q = (1-p) N(0) + p N(w)`` share a part, so by
    advanced joint convexity (Balle, Barthe and Gaboardi 2018, arXiv 1807.01647, Theorem 2) each
    hockey-stick divergence of order above 1, in both directions, is at most that of ``A = (1-p)
    N(0) + p N(2 R)`` from ``B = N(0)``. Hence the trade-off function of (P, Q) is above the largest
    convex one below those of (A, B) and (B, A), and so above that of ``(A x B, B x A)``: two steps
    at 2 R. With p = 1 one step is enough, since (P, Q) are two Gaussians ``2 R`` apart.

    Args:
        release: Release with the noise and steps that were booked.
        booked: Unit that it protects, from :func:`booked_unit`.
        unit: Unit to count for, in the same form.
    """
    half = release.noise_multiplier / 2
    if booked == unit:
        return release
    if not protects(booked, unit) or half < names.LEAST_NOISE_MULTIPLIER:
        return None
    steps = release.steps * (1 if release.sample_rate == 1 else 2)
    return Release(noise_multiplier=half, sample_rate=release.sample_rate, steps=steps)
