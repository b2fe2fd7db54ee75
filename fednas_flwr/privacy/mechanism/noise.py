"""A client's own secret randomness: Gaussian noise and Poisson masks that nobody can foresee.

Noise is the discrete Gaussian, ``P(k) = exp(-k^2 / (2 sigma^2)) / sum_j exp(-j^2 / (2 sigma^2))``
over the integers k, sampled exactly in integers alone, from a stream of random words: Canonne,
Kamath and Steinke (2020), arXiv 2004.00010, Algorithms 1 to 3, for whole sigma and in blocks of
numpy's 64-bit words. No decision is made in floating point.

Someone who knows the bits behind a mask knows who was sampled, and someone who knows the noise can
subtract it. Neither therefore comes from the run's seed or from torch's Mersenne twister. Every
draw is the keystream of a cipher (AES-256 in counter mode) under a fresh key from the operating
system. This is not for anything that must be repeatable. Main class: :class:`SecureGenerator`; main
function: :func:`add_noise`.
"""

import hashlib
import math
import os
from collections.abc import Callable
from itertools import count
from typing import NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

# Returns the next words of a stream, uint64 [count], uniform and independent of all others.
Words = Callable[[int], np.ndarray]

LEAST_BLOCK, LARGEST_BLOCK = 2**13, 2**16  # proposals that are made together
PROPOSALS_PER_SAMPLE = 2.2
LARGEST_SIGMA = 2**26
LARGEST_GEOMETRIC = 62  # (62 * 2^26)^2 still fits into a word
_GRID_BITS = 24
LEAST_SIGMA = 6  # cells, with which no digit of an epsilon tells a sum of shares from its Gaussian


def sample_discrete_gaussian(words: Words, count: int, *, sigma: int) -> np.ndarray:
    """Return independent samples of the discrete Gaussian, int64 [count].

    Algorithm 3 with t = sigma: discrete Laplace proposals Y of scale sigma, of which
    ``exp(-(|Y| - sigma)^2 / (2 sigma^2))`` are accepted.

    Given uniform words, the samples are exact within 61 standard deviations; beyond them
    (probability below 1e-800) proposals are cut off, as a word is finite. A stream under a 256-bit
    key is further from uniform than that.

    Proposals are made in blocks of thousands, however few samples are requested. The time taken
    depends on the random words alone, and on counts over a block rather than on a single sample.

    Args:
        words: Stream of random words.
        count: At least 0.
        sigma: Scale in cells of the grid, from 2 to 2^26.

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
        proposals = _discrete_laplace(words, size, sigma)
        distances = np.abs(np.abs(proposals) - sigma).view(np.uint64)
        accepted = proposals[_bernoulli_exp(words, distances * distances, 2 * sigma**2)][:missing]
        samples[filled : filled + len(accepted)] = accepted
        filled += len(accepted)
    return samples


def _discrete_laplace(words: Words, size: int, sigma: int) -> np.ndarray:
    """Make ``size`` attempts at a discrete Laplace of scale sigma by Algorithm 2.

    A 0 with a minus sign is dropped, so that 0 is not twice as likely.
    """
    share = 2**64 // sigma
    rests = _words_below(words, size, sigma * share) // np.uint64(share)
    rests = rests[np.flatnonzero(_bernoulli_exp_fraction(words, rests, sigma))]
    magnitudes = (rests + np.uint64(sigma) * _geometric(words, len(rests))).view(np.int64)
    negative = (words(len(rests)) & np.uint64(1)).astype(bool)
    return np.where(negative, -magnitudes, magnitudes)[(magnitudes > 0) | ~negative]


def _geometric(words: Words, count: int) -> np.ndarray:
    """Return the number of successes of Bernoulli(exp(-1)) before the first failure, uint64."""
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


def _bernoulli_exp_one(words: Words, count: int) -> np.ndarray:
    """Return Bernoulli(exp(-1)); its first Bernoulli(x / k), with k = 1, is always true."""
    return _bernoulli_exp_fraction(words, np.ones(count, dtype=np.uint64), 1, 2)


def _bernoulli_exp_fraction(
    words: Words, numerators: np.ndarray, denominator: int, k: int = 1
) -> np.ndarray:
    """Return Bernoulli(exp(-x)) for x below 1, bool: True if the first failure is odd.

    That is the least k for which Bernoulli(x / k) fails. A word below ``share * denominator * k``
    is below ``share * numerator`` with exactly that probability.
    """
    odd, going = np.empty(len(numerators), dtype=bool), np.arange(len(numerators))
    while len(going):
        odd[going] = k % 2 == 1  # unless it continues
        share = 2**64 // (denominator * k)
        drawn = _words_below(words, len(going), share * denominator * k)
        true = np.flatnonzero(drawn < numerators * np.uint64(share))
        going, numerators = going[true], numerators[true]
        k += 1
    return odd


def _words_below(words: Words, count: int, limit: int) -> np.ndarray:
    """Return words that are uniform below a limit of at most 2^64; others are drawn again."""
    drawn = words(count)
    if limit < 2**64:
        while len(late := np.flatnonzero(drawn >= np.uint64(limit))):
            drawn = drawn.copy()
            drawn[late] = words(len(late))
    return drawn


class SecureGenerator:
    """Draws Gaussian noise and Poisson masks from a keystream that is never used twice.

    Each call takes a new 256-bit key from ``os.urandom``. A fork, a thread, a retry or a resumed
    run can therefore repeat nothing, and no call reveals anything about another.

    **What is protected.** Low bits of a floating-point sum reveal the unnoised value (Mironov 2012,
    "On significance of the least significant bits"), and so does noise that can take only some
    values: the radius of Box and Muller (1958), made of a 64-bit word, is a discrete set in the
    tail, and another one beside another sum. Here noise is an exact discrete Gaussian on a grid of
    2^-25 to 2^-24 of its standard deviation, and :func:`add_noise` puts the sum on the same grid:
    every multiple of the grid is possible for every sum, with the probability from which the
    guarantee is computed. **What is not:** noise is drawn by rejection, and the time that this
    takes reveals a little about thousands of draws together (:func:`sample_discrete_gaussian`), but
    nothing about the sum; memory is not wiped.

    Args:
        test_seed: For tests only, and only if the site's policy allows it: the draws follow from
            these bytes and from the number of earlier draws.

    Example:
        >>> SecureGenerator().is_secure
        True
        >>> SecureGenerator(test_seed=b"1").discrete_gaussian((2,), sigma=1000).dtype
        torch.int64
    """

    def __init__(self, test_seed: bytes | None = None) -> None:
        """Keep the test seed, if there is one."""
        self._test_seed = test_seed
        self._draws = count(1)  # each number is given once, whatever thread asks
        self._pid = os.getpid()

    @property
    def is_secure(self) -> bool:
        """True if nobody can reproduce the draws; False with a test seed."""
        return self._test_seed is None

    def discrete_gaussian(self, shape: tuple[int, ...], *, sigma: int) -> torch.Tensor:
        """Return independent samples of the discrete Gaussian of mean 0.

        Args:
            shape: Shape of the result; may be empty.
            sigma: Scale, from 2 to 2^26; very nearly the standard deviation.

        Returns:
            An int64 tensor on the CPU.

        Raises:
            ValueError: ``sigma`` is out of range; a caller must never get no noise.
        """
        stream = _Keystream(self._next_key())
        samples = sample_discrete_gaussian(stream.words, math.prod(shape), sigma=sigma)
        return torch.from_numpy(samples).reshape(shape)

    def poisson_mask(self, num_records: int, *, probability: float) -> torch.Tensor:
        """Return a Poisson sample's mask: each record is in it independently with ``probability``.

        A 64-bit word below ``floor(probability * 2^64)`` is a hit, so the rate is never above the
        one that is booked, and less than 2^-64 below it.

        Args:
            num_records: Number of records that are present, at least 0.
            probability: Above 0, at most 1.

        Returns:
            A bool tensor of length ``num_records`` on the CPU.
        """
        if probability == 1:
            return torch.ones(num_records, dtype=torch.bool)
        words = _Keystream(self._next_key()).words(num_records)
        return torch.from_numpy(words < np.uint64(int(probability * 2.0**64)))

    def _next_key(self) -> bytes:
        """Return a key that no other draw has."""
        if self._test_seed is None:
            return os.urandom(32)
        if os.getpid() != self._pid:
            raise RuntimeError("a test seed would repeat its draws in a forked process.")
        seed = hashlib.sha256(self._test_seed).digest()
        return hashlib.sha256(seed + next(self._draws).to_bytes(8, "big")).digest()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickle and copy: a copy with a test seed would repeat its draws."""
        raise TypeError("a SecureGenerator cannot be copied or pickled: make one per process.")


def noise_grid(std: float) -> float:
    """Return the grid of noise of this ``std``: a power of two from 2^-25 to 2^-24 of ``std``.

    Raises:
        ValueError: ``std`` is not in 1e-100 to 1e100.
    """
    if not 1e-100 <= std <= 1e100:
        raise ValueError(f"std must be in [1e-100, 1e100], got {std!r}.")
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


def share_sigma(sigma: float, honest: int) -> int:
    """Return the sigma of each site's noise, in cells, such that h shares carry ``sigma`` or more.

    Args:
        sigma: Sigma that the total must carry, in cells, above 0.
        honest: h, at least 1.
    """
    return max(LEAST_SIGMA, math.floor(sigma / math.sqrt(honest)) + 2)  # rounded up by at least 1


def add_noise(
    total: torch.Tensor,
    generator: SecureGenerator,
    *,
    noise_multiplier: float,
    max_grad_norm: float,
) -> torch.Tensor:
    """Return ``total`` plus Gaussian noise of std ``noise_multiplier * max_grad_norm``, on a grid.

    Both are whole numbers of cells of one grid, so that what leaves is a function of (rounded total
    + discrete Gaussian). Rounding moves two neighbouring totals apart by up to 1 cell in each of d
    values; so ``sigma >= noise_multiplier * (max_grad_norm / grid + sqrt(d)) + 1`` cells: noise is
    enlarged by ``noise_multiplier * sqrt(d)`` cells for rounding (by 6e-5 at most for a million
    values at multiplier 1) and by 1 for being discrete (``tests/privacy/divergences.py``; ``(a +
    1)^2`` is above ``a^2 + 4^2`` from a = 8 on).

    **Guarantee.** One step of a :class:`~fednas_flwr.privacy.mechanism.renyi.Release` with this
    multiplier, if adding or removing a record changes ``total`` by an L2 norm of at most
    ``max_grad_norm`` and the release was spent before. That is proved of continuous noise and holds
    of the discrete one up to an epsilon of 6e-137 per value. With all records in the batch it holds
    without that: the Renyi divergence of order a is at most ``a / (2 noise_multiplier^2)``
    (Canonne, Kamath and Steinke 2020, arXiv 2004.00010, Theorem 4).

    Args:
        total: The sum of clipped vectors: all d values of one release, in one tensor.
        generator: The client's own generator.
        noise_multiplier: Above 0.
        max_grad_norm: Above 0.

    Returns:
        A float64 tensor on the CPU, of the shape of ``total``.

    Raises:
        ValueError: There would be no noise; ``total`` is not finite, in which case clipping has
            failed and no noise can hide it; or it is too large for the grid.
    """
    grid, root = noise_grid(noise_multiplier * max_grad_norm), math.sqrt(total.numel())
    if not (max_grad_norm > 0 and 2 * root * grid < max_grad_norm):  # sigma fits: 2^25 + 2^24
        raise ValueError(
            f"max_grad_norm={max_grad_norm!r} must be above 0, and noise_multiplier="
            f"{noise_multiplier!r} far below 2^24 / sqrt({total.numel()})."
        )
    # Down and then up by 2: up by at least 1, however the floating-point product is rounded.
    sigma = math.floor(noise_multiplier * (max_grad_norm / grid + root)) + 2
    return _noised_cells(total, generator, sigma=sigma, cell=grid).double().mul_(grid)


def add_shared_noise(
    total: torch.Tensor,
    generator: SecureGenerator,
    *,
    noise_multiplier: float,
    max_grad_norm: float,
    cell: float,
    honest: int,
) -> torch.Tensor:
    """Return ``total`` plus one client's share of a secure sum's noise, in whole cells of its grid.

    The sum over ``honest`` clients or more carries what :func:`add_noise` adds to one: sigma cells
    of ``noise_multiplier * (max_grad_norm / cell + sqrt(d))``, each a share of
    ``sigma / sqrt(honest) + 1`` or more.

    **Guarantee.** Someone who sees such a sum, and knows all other clients' totals and the noise of
    those beyond ``honest``, sees one step of a
    :class:`~fednas_flwr.privacy.mechanism.renyi.Release` with this multiplier, as in
    :func:`add_noise`: the shares add up to at least ``sqrt(sigma^2 + 4^2)``, and to a discrete
    Gaussian up to ``sum_divergence`` in ``tests/privacy/divergences.py``. Someone who sees this
    client's value alone sees one with ``noise_multiplier / sqrt(honest)``.

    Args:
        total: The sum of clipped vectors: all d values of one release, in one tensor.
        generator: The client's own generator.
        noise_multiplier: Noise multiplier of the sum, above 0.
        max_grad_norm: Above 0.
        cell: Cell of the sum's grid, a power of two.
        honest: Number of clients that are sure to add their shares, at least 2.

    Returns:
        Whole cells, an int64 tensor on the CPU, of the shape of ``total``.

    Raises:
        ValueError: A value is out of range, or ``total`` is not finite or too large for the grid.
    """
    needed = noise_multiplier * (max_grad_norm / cell + math.sqrt(total.numel()))
    if not (0 < needed < 1.1 * 2.0**26 and max_grad_norm > 0 and honest >= 2):
        raise ValueError(
            f"noise_multiplier={noise_multiplier!r} over max_grad_norm={max_grad_norm!r} on cells "
            f"of {cell!r}, shared by {honest!r} clients, is out of range."
        )
    return _noised_cells(total, generator, sigma=share_sigma(needed, honest), cell=cell)


def _noised_cells(
    total: torch.Tensor, generator: SecureGenerator, *, sigma: int, cell: float
) -> torch.Tensor:
    """Return ``total`` in whole cells plus discrete Gaussian noise of ``sigma`` cells, int64."""
    noise = generator.discrete_gaussian(tuple(total.shape), sigma=sigma)
    cells = total.detach().to("cpu", torch.float64) / cell
    if not bool((cells.abs() < 2.0**51).all()):
        raise ValueError(f"total must be finite and below {2.0**51 * cell:.3g} everywhere.")
    return cells.round().to(torch.int64) + noise


class _Keystream:
    """AES-256 in counter mode from block 0: unpredictable 64-bit words without the key."""

    def __init__(self, key: bytes) -> None:
        """Start the stream of a key that is used for nothing else."""
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Return the next ``count`` words of the stream."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), dtype="<u8")
