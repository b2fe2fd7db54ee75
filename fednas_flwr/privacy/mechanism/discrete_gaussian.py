"""Exact samples of the discrete Gaussian, in integers alone, from a stream of random words.

``P(k) = exp(-k^2 / (2 sigma^2)) / sum_j exp(-j^2 / (2 sigma^2))`` over the integers k: Canonne,
Kamath and Steinke (2020), arXiv 2004.00010, Algorithms 1 to 3, for whole sigma and in blocks of
numpy's 64-bit words. No decision is made in floating point. Not for choosing sigma, which is
:func:`~fednas_flwr.privacy.mechanism.noise.add_noise`'s affair. Main functions:
:func:`sample_discrete_gaussian` and :func:`continuous_divergence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# Gives the next words of a stream, uint64 [count], each uniform and independent of all others.
Words = Callable[[int], np.ndarray]

LEAST_BLOCK, LARGEST_BLOCK = 2**13, 2**16  # proposals that are made together
PROPOSALS_PER_SAMPLE = 2.2
LARGEST_SIGMA = 2**26
LARGEST_GEOMETRIC = 62  # (62 * 2^26)^2 still fits a word
KERNEL_STD = 4.0


def sample_discrete_gaussian(words: Words, count: int, *, sigma: int) -> np.ndarray:
    """Return independent samples of the discrete Gaussian, int64 [count].

    Algorithm 3 with t = sigma: discrete Laplace proposals Y of scale sigma, of which
    ``exp(-(|Y| - sigma)^2 / (2 sigma^2))`` are accepted.

    Exact, given uniform words, within 61 standard deviations: beyond them (probability below
    1e-800) proposals are cut off, as a word is finite. A stream under a 256-bit key is further
    from uniform than that.

    Proposals are made in blocks of thousands, however few samples are wanted: the time taken
    depends on the random words alone, and on counts over a block rather than on a single sample.

    Args:
        words: The stream.
        count: At least 0.
        sigma: In cells of the grid, from 2 to 2^26.

    Raises:
        ValueError: ``sigma`` is not a whole number in its range: the products would not fit.
    """
    if not isinstance(sigma, int) or not 2 <= sigma <= LARGEST_SIGMA:
        raise ValueError(f"sigma must be a whole number from 2 to 2^26, got {sigma!r}.")
    samples = np.empty(count, dtype=np.int64)
    filled = 0
    while filled < count:
        missing = count - filled
        size = min(max(LEAST_BLOCK, int(PROPOSALS_PER_SAMPLE * missing)), LARGEST_BLOCK)
        accepted = _accepted(words, size, sigma)[:missing]
        samples[filled : filled + len(accepted)] = accepted
        filled += len(accepted)
    return samples


def continuous_divergence(num_values: int, *, kernel_std: float = KERNEL_STD) -> float:
    """Return a bound on what discrete noise can tell beyond continuous noise: an epsilon.

    Formulas for the Poisson-sampled Gaussian mechanism speak of continuous noise. They hold for
    discrete noise of sigma cells if they are evaluated at a std of ``sqrt(sigma^2 - r^2)`` cells, r
    being ``kernel_std``, up to this: every outcome of ``num_values`` noised integers is as likely,
    up to a factor of ``exp(+-divergence)``, as if they had carried continuous noise and then passed
    through a random rounding K. As that is post-processing, an (epsilon, delta) of the continuous
    mechanism becomes (epsilon + 2 divergence, delta exp(divergence)), and a Renyi divergence of
    order a grows by at most ``(2 a - 1) / (a - 1) divergence``.

    Proof. K maps x to k with probability ``exp(-(k - x)^2 / (2 r^2)) / Z(x)``, over the integers.
    By Poisson's summation ``Z(x) = r sqrt(2 pi) (1 + 2 sum_n q^(n^2) cos(2 pi n x))``, n from 1,
    with ``q = exp(-2 pi^2 r^2)``: constant up to a factor of 1 +- e, where
    ``e = 2 q / (1 - q^3)``. Were it constant, K of a Gaussian of mean mu (an integer) and variance
    ``sigma^2 - r^2`` would have probabilities in proportion to the integral of the product of two
    Gaussian densities, which is in proportion to ``exp(-(k - mu)^2 / (2 sigma^2))``: the discrete
    Gaussian (for lattices the argument is Peikert's, 2010, "An efficient and parallel Gaussian
    sampler for lattices", Theorem 3.1). So the two differ by factors of at most (1 + e) / (1 - e),
    the normalisation included. Values are noised independently, hence the factors of a vector
    multiply; mixtures of batches and releases that depend on earlier ones keep them.

    Args:
        num_values: Of all releases together, at least 0.
        kernel_std: r, in cells, at least .5.

    Returns:
        3e-137 per value at r = 4, which changes no digit of an epsilon.

    Raises:
        ValueError: An argument is out of range.
    """
    if num_values < 0 or not kernel_std >= 0.5:
        raise ValueError(
            f"num_values must be at least 0 and kernel_std at least .5, got {num_values!r} and "
            f"{kernel_std!r}."
        )
    q = math.exp(-2 * math.pi**2 * kernel_std**2)
    e = 2 * q / (1 - q**3)
    return num_values * (math.log1p(e) - math.log1p(-e))


def _accepted(words: Words, size: int, sigma: int) -> np.ndarray:
    """Return the accepted proposals of a block, int64."""
    proposals = _discrete_laplace(words, size, sigma)
    distances = np.abs(np.abs(proposals) - sigma).view(np.uint64)
    keep = _bernoulli_exp(words, distances * distances, 2 * sigma**2)
    accepted: np.ndarray = proposals[keep]
    return accepted


def _discrete_laplace(words: Words, size: int, sigma: int) -> np.ndarray:
    """Make ``size`` attempts at a discrete Laplace of scale sigma by Algorithm 2.

    A 0 with a minus is dropped, so that 0 is not twice as likely.
    """
    share = 2**64 // sigma
    rests = _words_below(words, size, sigma * share) // np.uint64(share)
    rests = rests[np.flatnonzero(_bernoulli_exp_fraction(words, rests, sigma))]
    magnitudes = (rests + np.uint64(sigma) * _geometric(words, len(rests))).view(np.int64)
    negative = (words(len(rests)) & np.uint64(1)).astype(bool)
    keep = (magnitudes > 0) | ~negative
    proposals: np.ndarray = np.where(negative, -magnitudes, magnitudes)[keep]
    return proposals


def _geometric(words: Words, count: int) -> np.ndarray:
    """Return how many Bernoulli(exp(-1)) come true before the first one that does not, uint64."""
    numbers, going = np.zeros(count, dtype=np.uint64), np.arange(count)
    while len(going):
        going = going[_bernoulli_exp_one(words, len(going))]
        numbers[going] += np.uint64(1)
    return np.minimum(numbers, np.uint64(LARGEST_GEOMETRIC))


def _bernoulli_exp(words: Words, numerators: np.ndarray, denominator: int) -> np.ndarray:
    """Return Bernoulli(exp(-x)) for ``x = numerators / denominator``, bool: Algorithm 1."""
    whole, rests = np.divmod(numerators, np.uint64(denominator))
    keep = _bernoulli_exp_fraction(words, rests, denominator)
    going = np.flatnonzero(keep & (whole > 0))
    whole = whole[going]
    while len(going):
        true = _bernoulli_exp_one(words, len(going))
        keep[going[~true]] = False
        more = true & (whole > 1)
        going, whole = going[more], whole[more] - np.uint64(1)
    return keep


def _bernoulli_exp_fraction(words: Words, numerators: np.ndarray, denominator: int) -> np.ndarray:
    """Return Bernoulli(exp(-x)) for x below 1: whether the first k that fails is odd."""
    return _first_failure_is_odd(words, numerators, denominator, 1)


def _bernoulli_exp_one(words: Words, count: int) -> np.ndarray:
    """Return Bernoulli(exp(-1)), where the first Bernoulli(x / k), of k = 1, is always true."""
    return _first_failure_is_odd(words, np.ones(count, dtype=np.uint64), 1, 2)


def _first_failure_is_odd(
    words: Words, numerators: np.ndarray, denominator: int, k: int
) -> np.ndarray:
    """Return whether the least k for which Bernoulli(x / k) fails is odd, bool.

    A word below ``share * denominator * k`` is below ``share * numerator`` with just that
    probability.
    """
    odd, going = np.empty(len(numerators), dtype=bool), np.arange(len(numerators))
    while len(going):
        odd[going] = k % 2 == 1  # unless it goes on
        share = 2**64 // (denominator * k)
        drawn = _words_below(words, len(going), share * denominator * k)
        true = np.flatnonzero(drawn < numerators * np.uint64(share))
        going, numerators = going[true], numerators[true]
        k += 1
    return odd


def _words_below(words: Words, count: int, limit: int) -> np.ndarray:
    """Return words that are uniform below a limit of at most 2^64: others are drawn again."""
    drawn = words(count)
    if limit < 2**64:
        while len(late := np.flatnonzero(drawn >= np.uint64(limit))):
            drawn = drawn.copy()
            drawn[late] = words(len(late))
    return drawn
