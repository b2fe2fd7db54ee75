import copy
import functools
import math
import os
import pickle
import select
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from fednas_flwr.privacy.mechanism import noise
from fednas_flwr.privacy.mechanism.noise import SecureGenerator, _Keystream, noise_grid
from fednas_flwr.privacy.policy import noise_range

from ..refusals import refuses
from ..watched import noting
from .divergences import KERNEL_STD, continuous_divergence, sum_divergence


def seeded():
    return SecureGenerator(test_seed=b"only for tests")


def normals(generator, count):
    return generator.discrete_gaussian((count,), sigma=2**24) / 2**24


def noised(total, generator=None, *, sigma=1.0, norm=1.0):
    """Return the total with noise from a seed, or from another generator."""
    return noise.add_noise(total, generator or seeded(), noise_multiplier=sigma, max_grad_norm=norm)


def test_the_keystream_is_aes_of_a_counter():
    # FIPS 197, appendix C.3: the cipher itself, then blocks 0, 1, 2, ... through another mode.
    key = bytes(range(32))
    block_cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    plain = bytes.fromhex("00112233445566778899aabbccddeeff")
    assert block_cipher.update(plain).hex() == "8ea2b7ca516745bfeafc49904b496089"
    expected = block_cipher.update(b"".join(block.to_bytes(16, "big") for block in range(8)))
    stream = _Keystream(key)
    got = np.concatenate([stream.words(count) for count in (2, 6, 8)])
    assert got.astype("<u8").tobytes() == expected


def test_masks_compare_the_whole_word(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(count)))
    words = [int(word) for word in _Keystream(bytes(range(32))).words(50)]
    for probability in (0.3, words[7] / 2**64, 1 - 2**-53, 2**-60):
        mask = SecureGenerator().poisson_mask(50, probability=probability)
        assert mask.tolist() == [word < int(probability * 2**64) for word in words]


def test_a_word_at_the_threshold_is_no_hit(monkeypatch):
    edge = np.array([2**63 - 1, 2**63, 2**63 + 1], dtype=np.uint64)
    monkeypatch.setattr(_Keystream, "words", lambda self, count: edge[:count])
    assert SecureGenerator().poisson_mask(3, probability=0.5).tolist() == [True, False, False]


@pytest.mark.parametrize("std", [1.0, 0.999, 1e-3, 3.7e5, 1e-100, 1e100])
def test_noise_lies_on_a_grid_fine_enough_for_its_std(std):
    grid = noise_grid(std)
    assert 2**-25 <= grid / std <= 2**-24
    assert math.frexp(grid)[0] == 0.5
    drawn = noised(torch.zeros(1000), norm=std)
    cells = drawn / grid
    assert torch.equal(cells, cells.round())
    assert cells.unique().numel() > 990
    assert 0.9 * std < float(drawn.std()) < 1.1 * std


def test_masks_at_their_ends_and_noise_of_any_shape():
    generator = SecureGenerator()
    assert generator.poisson_mask(1000, probability=1.0).all()
    assert not generator.poisson_mask(1000, probability=1e-18).any()
    assert generator.poisson_mask(0, probability=0.5).shape == (0,)
    for shape in ((), (0, 3), (3, 5, 7)):
        assert generator.discrete_gaussian(shape, sigma=2**24).shape == shape


def test_only_a_test_seed_repeats():
    assert torch.equal(normals(seeded(), 9), normals(seeded(), 9))
    one, two = seeded(), seeded()
    for generator in (one, two):
        generator.poisson_mask(5, probability=0.5)
    second = normals(one, 9)
    assert torch.equal(second, normals(two, 9))
    assert not torch.equal(second, normals(seeded(), 9))
    assert not torch.equal(normals(SecureGenerator(test_seed=b"another"), 9), normals(seeded(), 9))
    assert not seeded().is_secure
    assert not SecureGenerator(test_seed=b"").is_secure
    assert SecureGenerator().is_secure
    state = torch.get_rng_state()
    torch.manual_seed(0)
    first = SecureGenerator().discrete_gaussian((9,), sigma=2**24)
    torch.manual_seed(0)
    assert not torch.equal(first, SecureGenerator().discrete_gaussian((9,), sigma=2**24))
    torch.set_rng_state(state)


def test_no_key_is_used_twice(monkeypatch):
    keys = noting(monkeypatch, _Keystream, "__init__", lambda _, stream, key: key)
    for generator in (SecureGenerator(), seeded()):
        for _ in range(50):
            generator.discrete_gaussian((2,), sigma=2**24)
            generator.poisson_mask(2, probability=0.5)
    assert len(set(keys)) == len(keys) == 200
    assert {len(key) for key in keys} == {32}


def test_threads_draw_different_noise():
    for generator in (SecureGenerator(), seeded()):

        def draw(_, source=generator):
            return source.discrete_gaussian((4,), sigma=2**24).numpy().tobytes()

        with ThreadPoolExecutor(8) as threads:
            assert len(set(threads.map(draw, range(400)))) == 400


def forked(draw):
    """Return what ``draw`` gives in a process forked from this one."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():  # the test process has threads (Python 3.12 and later warn)
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os.write(writing, draw())
        finally:
            os._exit(0)
    os.close(writing)
    ready = select.poll()
    ready.register(reading, select.POLLIN)
    answer = os.read(reading, 4096) if ready.poll(20_000) else b""
    os.close(reading)
    os.waitpid(child, 0)
    return answer


def test_a_forked_process_draws_its_own_noise():
    generator = SecureGenerator()
    generator.discrete_gaussian((3,), sigma=2**24)

    def draw():
        mask = generator.poisson_mask(256, probability=0.5).numpy().tobytes()
        return generator.discrete_gaussian((16,), sigma=2**24).numpy().tobytes() + mask

    drawn = [forked(draw), forked(draw), draw()]
    assert [len(part) for part in drawn] == [16 * 8 + 256] * 3
    assert len({part[:128] for part in drawn}) == 3
    assert len({part[128:] for part in drawn}) == 3


def test_a_test_seed_does_not_survive_a_fork():
    generator = seeded()

    def draw():
        try:
            generator.discrete_gaussian((3,), sigma=2**24)
        except RuntimeError as error:
            return str(error).encode()
        return b"drew"

    assert forked(draw) == b"a test seed would repeat its draws in a forked process."
    generator.discrete_gaussian((3,), sigma=2**24)  # the parent goes on


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_neither_copied_nor_pickled(duplicate):
    for generator in (SecureGenerator(), seeded()):
        refuses("cannot be copied or pickled", duplicate, generator, error=TypeError)


def test_added_noise_is_the_rounded_total_plus_noise_of_the_booked_std():
    total = torch.linspace(-3, 3, 60_000, dtype=torch.float32).reshape(100, 600)
    found = noised(total, sigma=2.0, norm=0.3)
    assert found.shape == total.shape
    assert found.dtype == torch.float64
    added = (found - total).flatten()
    assert stats.kstest(added.numpy() / 0.6, "norm").pvalue > 1e-3
    assert float(added.std()) == pytest.approx(0.6, rel=4 / math.sqrt(2 * 60_000))


def test_added_noise_hides_the_low_bits_of_the_total():
    for value in (0.0, 1 / 3, math.pi * 1e-9, -7.123456789e3):
        cells = noised(torch.full((2000,), value, dtype=torch.float64), sigma=0.5) / noise_grid(0.5)
        assert torch.equal(cells, cells.round())
    # Totals that round to one cell are told apart by nothing.
    assert torch.equal(*(noised(torch.tensor([x]), sigma=0.5) for x in (1.0, 1.0 + 1e-9)))


MULTIPLIERS = [(1.0, 10), (0.9999999, 9), (30.0, 4096), (1.0, 10**6), (1e6, 1), (None, 1)]


@pytest.mark.parametrize(("noise_multiplier", "count"), MULTIPLIERS)
@pytest.mark.parametrize("norm", [0.25, 0.3, 1e-5])
def test_noise_is_enlarged_by_what_rounding_adds(noise_multiplier, count, norm, monkeypatch):
    """In fractions: (sigma^2 - 4^2) grid^2 covers the multiplier times the rounded sensitivity.

    None is a multiplier that needs hardly less than a whole number of cells.
    """
    if noise_multiplier is None:
        cells = norm / noise_grid(1.5 * norm) + 1
        noise_multiplier = (math.ceil(1.5 * cells) - 1e-8) / cells
    generator = seeded()
    asked = noting(monkeypatch, generator, "discrete_gaussian", lambda *_, sigma: sigma)
    noised(torch.zeros(count), generator, sigma=noise_multiplier, norm=norm)
    (sigma,) = asked
    cells = Fraction(norm) / Fraction(noise_grid(noise_multiplier * norm))
    root = Fraction(math.nextafter(math.sqrt(count), math.inf))
    needed = Fraction(noise_multiplier) * (cells + root)
    assert sigma**2 - KERNEL_STD**2 >= needed**2
    assert sigma <= needed * (1 + Fraction(1, 2**50)) + 2


def test_neighbouring_totals_are_rounded_apart_by_no_more_than_is_covered():
    """The worst case: one total just below the middle of every cell, the other just above."""
    count, norm = 10_000, 1.0
    grid = noise_grid(1.0)
    step = norm / math.sqrt(count) / grid  # in cells, of each value
    below = torch.full((count,), 0.5 - (step - math.floor(step)) / 2, dtype=torch.float64) * grid
    above = below + step * grid
    assert float((above - below).norm()) == pytest.approx(norm, rel=1e-9)
    assert norm < float((noised(above) - noised(below)).norm()) <= norm + math.sqrt(count) * grid


@pytest.mark.parametrize("norm", [1e-6, 0.3, 1.0, 1e30])
@pytest.mark.parametrize(("num_values", "num_records"), [(1, 1), (7, 10**6), (3000, 2**24)])
def test_within_its_range_noise_can_always_be_added(num_values, num_records, norm):
    """Also at both ends and to twice the declared records; far outside it cannot."""
    low, high = noise_range(num_values=num_values, num_records=num_records)
    largest = torch.zeros(num_values, dtype=torch.float64)
    largest[0] = 2 * num_records * norm
    for sigma in (max(low, 1e-3), low * 1.001 + 1e-3, high * 0.999, high):
        noised(largest, sigma=sigma, norm=norm)
    refuses("total must be finite", noised, largest, error=ValueError, sigma=low / 4, norm=norm)
    refuses("must be above 0", noised, largest, error=ValueError, sigma=4 * high, norm=norm)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e18])
def test_a_total_that_noise_cannot_hide_is_refused(value):
    refuses("total must be finite", noised, torch.tensor([0.0, value]), error=ValueError)


UNUSABLE = [*((1.0, norm) for norm in (0.0, -1.0, math.nan, math.inf, 1e-101))]
UNUSABLE += [(0.0, 1.0), (-1.0, 1.0), (-1.0, -1.0), (math.nan, 1.0), (1e7, 1.0)]


@pytest.mark.parametrize(("sigma", "norm"), UNUSABLE)
def test_noise_without_a_usable_scale_is_refused(sigma, norm):
    words = "std must be" if sigma == 1 else "must be"
    refuses(words, noised, torch.zeros(3), error=ValueError, sigma=sigma, norm=norm)


# --- shared: sums of discrete Gaussians against their exact probabilities, in 60 digits


def gaussian(variance, reach):
    """Return the probabilities of the discrete Gaussian of -reach to reach."""
    weights = [(-Decimal(k * k) / (2 * variance)).exp() for k in range(-reach, reach + 1)]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize(("sigma", "sites"), [(1, 2), (1, 3), (1, 5), (2, 2), (2, 4)])
def test_a_sum_of_shares_is_a_discrete_gaussian_up_to_the_bound(sigma, sites):
    with localcontext() as context:
        context.prec = 60
        reach, inside = 26 * sigma, 5 * sigma  # beyond 26 sigma is less than 1e-140
        one = gaussian(Decimal(sigma**2), reach)
        total = one
        for _ in range(sites - 1):
            total = np.convolve(total, one, "same")  # of -reach to reach
        expected = gaussian(Decimal(sites * sigma**2), reach)
        near = range(-inside, inside + 1)
        worst = max(abs((total[k + reach] / expected[k + reach]).ln()) for k in near)
    bound = sum_divergence(1, sigma=sigma, sites=sites)
    assert 0 < float(worst) <= bound * (1 + 1e-9)
    if sites == 2:
        assert bound < 5 * float(worst)  # it is no wild overestimate


@pytest.mark.parametrize("honest", [1, 2, 6, 7, 99])
@pytest.mark.parametrize("sigma", [0.1, 5.0, 3e5, 1e6 + 0.5])
def test_honest_shares_carry_the_whole_noise(sigma, honest):
    share = noise.share_sigma(sigma, honest)
    assert honest * share**2 > sigma**2
    assert share <= max(6, sigma / math.sqrt(honest) + 2)


def test_shared_noise_is_drawn_as_far_as_its_grid_reaches():
    def added(sigma, *, total=0.0, norm=1.0, **terms):
        terms = {"cell": 1.0, "honest": 2, "noise_multiplier": sigma, "max_grad_norm": norm} | terms
        values, generator = torch.full((1,), total), SecureGenerator(test_seed=b"1")
        return noise.add_shared_noise(values, generator, **terms)

    assert added(1.0, cell=2.0**-20).abs().max() > 0
    for good in (1e-3, 1.0, 2.0**25):
        assert added(good).isfinite().all()
    for wrong in (0.0, -1.0, math.nan, 2.0**27):
        refuses(r"shared by 2 clients, is out of range", added, wrong, error=ValueError)
    refuses("out of range", added, 1.0, error=ValueError, cell=2.0**-40)
    refuses("shared by 1 clients", added, 1.0, error=ValueError, honest=1)
    for norm in (0.0, -1.0):
        refuses(f"max_grad_norm={norm}", added, 1.0, error=ValueError, norm=norm)
    for bad in (math.nan, math.inf, 1e30):
        refuses("finite", added, 1.0, error=ValueError, total=bad, cell=2.0**-20)


# --- Discrete Gaussian noise against the published algorithms in fractions


def keystream(key=bytes(range(32))):
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
            size = max(noise.LEAST_BLOCK, int(noise.PROPOSALS_PER_SAMPLE * missing))
            size = min(size, noise.LARGEST_BLOCK)
            proposals = self.discrete_laplace(size, sigma)
            # gamma = (|Y| - sigma^2 / t)^2 / (2 sigma^2)
            distances = [Fraction(abs(y)) - Fraction(sigma**2, sigma) for y in proposals]
            accepted = self.bernoulli_exp_any([int(d**2) for d in distances], 2 * sigma**2)
            samples += [y for y, c in zip(proposals, accepted, strict=True) if c][:missing]
        return samples


SIGMAS = [2, 3, 1000, 2**24, 2**25 - 1, 3 * 2**24 + 1, noise.LARGEST_SIGMA]


@pytest.mark.parametrize("sigma", SIGMAS)
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
    near = range(-3 * sigma, 3 * sigma + 1)
    ratios = [abs(math.log(rounded[30 * sigma + k] / probability(k, sigma))) for k in near]
    bound = continuous_divergence(1, kernel_std=kernel_std)
    assert max(ratios) <= bound * (1 + 1e-6) + 1e-13
    if sigma == 1:
        assert max(ratios) > 1e-3 * bound
