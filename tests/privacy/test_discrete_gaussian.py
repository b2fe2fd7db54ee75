import functools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fednas_flwr.privacy.mechanism import noise

from .divergences import continuous_divergence

KEY = bytes(range(32))


def keystream(key=KEY):
    return noise._Keystream(key).words


@functools.cache
def probability(k, sigma):
    """To 1e-15 of itself."""
    terms = (math.exp(-(j**2) / (2 * sigma**2)) for j in range(-40 * sigma, 40 * sigma + 1))
    return math.exp(-(k**2) / (2 * sigma**2)) / math.fsum(terms)


# The algorithms of Canonne, Kamath and Steinke (2020), word for word, on one number at a time. Only
# the order in which words are taken is that of the blocks.


class Reference:
    """Algorithms 1 to 3 in fractions, on the words of a stream."""

    def __init__(self, words):
        self.words: Callable[[int], list[int]] = lambda count: [int(w) for w in words(count)]

    def uniform(self, stops):
        """One integer below each stop (all equal): a word from the last, short run is no use."""
        if not stops:
            return []
        run = 2**64 // stops[0]
        drawn = self.words(len(stops))
        while late := [i for i, word in enumerate(drawn) if word // run >= stops[0]]:
            for i, word in zip(late, self.words(len(late)), strict=True):
                drawn[i] = word
        return [word // run for word in drawn]

    def bernoulli(self, chances):
        drawn = self.uniform([stop for _, stop in chances])
        return [u < numerator for u, (numerator, _) in zip(drawn, chances, strict=True)]

    def bernoulli_exp(self, gammas, k=1):
        """Algorithm 1, lines 1 to 7: gamma (a numerator and a denominator) is at most 1."""
        results = [False] * len(gammas)
        going = list(range(len(gammas)))
        while going:
            true = self.bernoulli([(gammas[i][0], gammas[i][1] * k) for i in going])
            for i, a in zip(going, true, strict=True):
                results[i] = k % 2 == 1 if not a else results[i]
            going = [i for i, a in zip(going, true, strict=True) if a]
            k += 1
        return results

    def bernoulli_exp_one(self, count):
        """With gamma = 1 the first Bernoulli(gamma / 1) is true; no word is spent on it."""
        return self.bernoulli_exp([(1, 1)] * count, k=2)

    def bernoulli_exp_any(self, numerators, denominator):
        """Algorithm 1, lines 9 to 17; the part below 1 comes first."""
        floors = [math.floor(Fraction(n, denominator)) for n in numerators]
        rests = [n - f * denominator for n, f in zip(numerators, floors, strict=True)]
        results = self.bernoulli_exp([(n, denominator) for n in rests])
        left = {i: f for i, f in enumerate(floors) if results[i] and f > 0}
        while left:
            for i, true in zip(list(left), self.bernoulli_exp_one(len(left)), strict=True):
                results[i] = true
                left[i] -= 1
                if not true or not left[i]:
                    del left[i]
        return results

    def discrete_laplace(self, count, t):
        """Algorithm 2 with s = 1, once for each of some attempts."""
        u = self.uniform([t] * count)
        u = [x for x, d in zip(u, self.bernoulli_exp([(x, t) for x in u]), strict=True) if d]
        v, going = [0] * len(u), list(range(len(u)))
        while going:
            true = self.bernoulli_exp_one(len(going))
            going = [i for i, a in zip(going, true, strict=True) if a]
            for i in going:
                v[i] += 1
        signs = [word % 2 == 1 for word in self.words(len(u))]
        both = [(b, x + t * min(n, 62)) for b, x, n in zip(signs, u, v, strict=True)]
        return [-y if b else y for b, y in both if not (b and y == 0)]

    def samples(self, count, sigma):
        """Algorithm 3 with t = sigma."""
        samples: list[int] = []
        while (missing := count - len(samples)) > 0:
            size = min(
                max(noise.LEAST_BLOCK, int(noise.PROPOSALS_PER_SAMPLE * missing)),
                noise.LARGEST_BLOCK,
            )
            proposals = self.discrete_laplace(size, sigma)
            # gamma = (|Y| - sigma^2 / t)^2 / (2 sigma^2)
            distances = [Fraction(abs(y)) - Fraction(sigma**2, sigma) for y in proposals]
            accepted = self.bernoulli_exp_any([int(d**2) for d in distances], 2 * sigma**2)
            samples += [y for y, c in zip(proposals, accepted, strict=True) if c][:missing]
        return samples


@pytest.mark.parametrize(
    "sigma", [2, 3, 1000, 2**24, 2**25 - 1, 3 * 2**24 + 1, noise.LARGEST_SIGMA]
)
def test_it_draws_what_the_algorithms_in_fractions_draw(sigma):
    got = noise.sample_discrete_gaussian(keystream(), 5000, sigma=sigma)
    assert got.dtype == np.int64
    assert got.tolist() == Reference(keystream()).samples(5000, sigma)


def lopsided(chance):
    """A stream that has words of [.34, .5) 2^64 more often: Bernoulli(exp(-1)) is mostly true."""
    random = np.random.default_rng(0)

    def words(count):
        usual = random.integers(0, 2**64, count, dtype=np.uint64)
        true = random.integers(int(0.34 * 2**64), 2**63, count, dtype=np.uint64)
        return np.where(random.random(count) < chance, true, usual)

    return words


@pytest.mark.parametrize("sigma", [2, noise.LARGEST_SIGMA])
def test_also_far_in_the_tails(sigma):
    """Box and Muller's noise ended at 9.4 standard deviations."""
    got = noise.sample_discrete_gaussian(lopsided(0.98), 400, sigma=sigma)
    assert got.tolist() == Reference(lopsided(0.98)).samples(400, sigma)
    assert np.abs(got).max() > 12 * sigma


def test_the_largest_proposals_do_not_overflow():
    """Of the longest runs, 62, the exponent is (62 - 1 + u)^2 / 2 at most."""
    attempts: list[int] = []

    class Noted(Reference):
        def bernoulli_exp_any(self, numerators, denominator):
            attempts.extend(numerators)
            return super().bernoulli_exp_any(numerators, denominator)

    got = noise.sample_discrete_gaussian(lopsided(0.99), 10, sigma=noise.LARGEST_SIGMA)
    assert got.tolist() == Noted(lopsided(0.99)).samples(10, noise.LARGEST_SIGMA)
    assert 2**63 < max(attempts) < 2**64


def test_words_of_the_last_short_run_are_drawn_again():
    """2^64 = 3 x 6148914691236517205 + 1: the last word stands for nothing below 3."""
    stream = keystream()

    def words(count):
        drawn = stream(count).copy()
        drawn[drawn % np.uint64(5) == 0] = np.uint64(2**64 - 1)
        return drawn

    seen: list[np.ndarray] = []

    def noted(count):
        seen.append(words(count))
        return seen[-1]

    got = noise.sample_discrete_gaussian(noted, 4000, sigma=3)
    late = int((seen[0] == np.uint64(2**64 - 1)).sum())
    assert late > 1000
    assert len(seen[1]) == late
    replayed = iter(seen)
    assert got.tolist() == Reference(lambda count: next(replayed)).samples(4000, 3)


@pytest.mark.parametrize("sigma", [2, 3, 7, 40])
def test_frequencies_are_the_discrete_gaussians(sigma):
    count = 400_000
    samples = noise.sample_discrete_gaussian(keystream(), count, sigma=sigma)
    edge = 1
    while count * probability(edge + 1, sigma) > 20:
        edge += 1
    inside = [int((samples == k).sum()) for k in range(-edge, edge + 1)]
    expected = [count * probability(k, sigma) for k in range(-edge, edge + 1)]
    outside = (count - sum(inside), count - sum(expected))
    assert stats.chisquare([*inside, outside[0]], [*expected, outside[1]]).pvalue > 1e-3


def test_however_few_are_wanted_thousands_are_proposed():
    """The time taken tells nothing of one sample alone."""
    drawn: list[int] = []
    stream = keystream()

    def counted(count):
        drawn.append(count)
        return stream(count)

    (sample,) = noise.sample_discrete_gaussian(counted, 1, sigma=2**24)
    assert drawn[0] == noise.LEAST_BLOCK
    assert sample == noise.sample_discrete_gaussian(keystream(), 1000, sigma=2**24)[0]
    assert len(noise.sample_discrete_gaussian(counted, 0, sigma=2**24)) == 0
    many = noise.sample_discrete_gaussian(counted, 3 * noise.LARGEST_BLOCK, sigma=2**24)
    assert len(np.unique(many)) > 0.99 * len(many)
    assert max(drawn) == noise.LARGEST_BLOCK


@pytest.mark.parametrize("sigma", [0, 1, -1, 2**26 + 1, 1.5, 2.0**24, math.nan])
def test_what_does_not_fit_the_words_is_refused(sigma):
    with pytest.raises(ValueError, match="sigma must be a whole number from 2 to 2\\^26"):
        noise.sample_discrete_gaussian(keystream(), 1, sigma=sigma)
    with pytest.raises(ValueError, match="sigma must be a whole number"):
        noise.SecureGenerator().discrete_gaussian((3,), sigma=sigma)


@pytest.mark.parametrize("kernel_std", [0.5, 0.6, 0.8, 0.9])
@pytest.mark.parametrize("sigma", [1, 2, 5])
def test_discrete_noise_is_continuous_noise_rounded_at_random(sigma, kernel_std):
    """By quadrature: how much likelier an integer can be than after continuous noise and K."""
    r, s = kernel_std, math.sqrt(sigma**2 - kernel_std**2)
    x = np.arange(-14 * sigma, 14 * sigma, 1 / 64)  # of analytic functions, exact to 1e-15
    j = np.arange(-30 * sigma, 30 * sigma + 1)
    kernel = np.exp(-((j[:, None] - x) ** 2) / (2 * r**2))
    kernel /= kernel.sum(axis=0)
    density = np.exp(-(x**2) / (2 * s**2)) / (s * math.sqrt(2 * math.pi))
    rounded = (kernel @ density) / 64
    ratios = [
        abs(math.log(rounded[30 * sigma + k] / probability(k, sigma)))
        for k in range(-3 * sigma, 3 * sigma + 1)
    ]
    bound = continuous_divergence(1, kernel_std=kernel_std)
    assert max(ratios) <= bound * (1 + 1e-6) + 1e-13
    if sigma == 1:
        assert max(ratios) > 1e-3 * bound
