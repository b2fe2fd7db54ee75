"""A client's own secret randomness: Gaussian noise and Poisson masks that nobody can foresee.

Whoever knows the bits behind a mask knows who was sampled, and whoever knows the noise can subtract
it; so none of it comes from the run's seed or from torch's Mersenne twister. Every draw is
the keystream of a cipher (AES-256 in counter mode) under a key fresh from the operating system. Not
for anything that must be repeatable. Main class: :class:`SecureGenerator`.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from typing import NoReturn

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

# Fits the cache, and torch stays on one thread, whose pool would not survive a fork.
_PAIRS_PER_CHUNK = 2**14
_GRID_BITS = 24


class SecureGenerator:
    """Draws Gaussian noise and Poisson masks from a keystream that is never used twice.

    Each call takes a new 256-bit key from ``os.urandom``, so nothing is left to be repeated by a
    fork, a thread, a retry or a resumed run, and no call tells anything about another.

    **What is protected.** Low bits of a floating-point sum give the unnoised value away (Mironov
    2012, "On significance of the least significant bits"; averaging several Gaussians, Holohan and
    Braghin 2021 and Opacus, only makes the search longer). Here noise lies on a grid of 2^-25 to
    2^-24 of its standard deviation, and :func:`add_noise` puts the sum on the same grid: the
    result is a rounded Gaussian, and every bit pattern is possible for every sum. Nothing is
    drawn by rejection, so the time taken tells nothing. **What is not:** float64 logarithms and
    cosines are right to their last bits only, which moves the edges of a grid cell by about 2^-25
    of its width; noise ends at 9.4 standard deviations (probability 1e-20); memory is not wiped.

    Args:
        test_seed: For tests only, and only where the site's policy allows it: the draws follow from
            these bytes and from how many draws came before.

    Example:
        >>> SecureGenerator().is_secure
        True
        >>> SecureGenerator(test_seed=b"1").normal((2,), std=1.0).dtype
        torch.float64
    """

    def __init__(self, test_seed: bytes | None = None) -> None:
        """Keep the test seed, if there is one."""
        self._test_seed = test_seed
        self._draws = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()

    @property
    def is_secure(self) -> bool:
        """Whether nobody can repeat the draws; False with a test seed."""
        return self._test_seed is None

    def normal(self, shape: tuple[int, ...], *, std: float) -> torch.Tensor:
        """Return independent Gaussians of mean 0, rounded to multiples of ``noise_grid(std)``.

        Box and Muller (1958) on a 64-bit uniform for the radius and a 53-bit one for the angle.

        Args:
            shape: Shape of the result; may be empty.
            std: Standard deviation, 1e-100 to 1e100.

        Returns:
            A float64 tensor on the CPU.

        Raises:
            ValueError: ``std`` is out of range: no noise is never what a caller should get.
        """
        grid = noise_grid(std)
        count = math.prod(shape)
        stream = _Keystream(self._next_key())
        values = torch.empty(count + count % 2, dtype=torch.float64)
        for start in range(0, count, 2 * _PAIRS_PER_CHUNK):
            chunk = values[start : start + 2 * _PAIRS_PER_CHUNK]
            half = len(chunk) // 2
            words = stream.words(2 * half)
            radius = torch.from_numpy((words[:half] + 0.5) * 2.0**-64).log_().mul_(-2).sqrt_()
            angle = torch.from_numpy((words[half:] >> np.uint64(11)) * (2 * math.pi * 2.0**-53))
            torch.mul(radius, angle.cos(), out=chunk[:half])
            torch.mul(radius, angle.sin_(), out=chunk[half:])
            chunk.mul_(std / grid).round_().mul_(grid)
        return values[:count].reshape(shape)

    def poisson_mask(self, num_records: int, *, probability: float) -> torch.Tensor:
        """Return which records a Poisson sample holds: each independently with ``probability``.

        A 64-bit word below ``floor(probability * 2^64)`` is a hit, so the rate is never above the
        one that is booked, and less than 2^-64 below it.

        Args:
            num_records: Number of records that are there, at least 0.
            probability: Above 0, at most 1.

        Returns:
            A bool tensor of length ``num_records`` on the CPU.

        Raises:
            ValueError: A value is out of range.
        """
        if num_records < 0 or not 0 < probability <= 1:
            raise ValueError(
                f"a mask needs num_records >= 0 and a probability above 0 and at most 1, got "
                f"num_records={num_records!r} and probability={probability!r}."
            )
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
        with self._lock:
            self._draws += 1
            draw = self._draws
        seed = hashlib.sha256(self._test_seed).digest()
        return hashlib.sha256(seed + draw.to_bytes(8, "big")).digest()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickle and copy: a copy with a test seed would repeat its draws."""
        raise TypeError("a SecureGenerator cannot be copied or pickled: make one per process.")


def noise_grid(std: float) -> float:
    """Return the power of two from 2^-25 to 2^-24 of ``std`` that noise of it is a multiple of.

    Raises:
        ValueError: ``std`` is not in 1e-100 to 1e100.
    """
    if not 1e-100 <= std <= 1e100:
        raise ValueError(f"std must be in [1e-100, 1e100], got {std!r}.")
    return math.ldexp(1.0, math.frexp(std)[1] - 1 - _GRID_BITS)


def noise_range(*, num_values: int, num_records: int) -> tuple[float, float]:
    """Return least and largest noise multiplier with which :func:`add_noise` cannot fail.

    Its grid of at most ``2^-24 * s * R`` must stay below ``R / (2 * sqrt(d))``, and a sum of norm
    ``N * R`` within 2^51 cells of at least ``2^-25 * s * R``. Both with a factor of 2 to spare: a
    site may hold more records than it declares.

    Args:
        num_values: d, the values of one release.
        num_records: N, the declared records.
    """
    return num_records * 2.0**-25, 2.0**22 / math.sqrt(max(1, num_values))


def add_noise(
    total: torch.Tensor,
    generator: SecureGenerator,
    *,
    noise_multiplier: float,
    max_grad_norm: float,
) -> torch.Tensor:
    """Return ``total`` plus Gaussian noise of std ``noise_multiplier * max_grad_norm``, on a grid.

    Both are rounded to one grid, so that the result is the rounding of (rounded total + Gaussian):
    post-processing, so what is proved for real numbers holds for the bits that leave. Rounding
    moves two neighbouring totals apart by up to ``sqrt(d) * grid``; the noise is enlarged by at
    least that share of ``max_grad_norm`` (by 1.2e-4 at most for a million values at multiplier 1).

    **Guarantee.** One step of a :class:`~fednas_flwr.privacy.renyi.Release` with this multiplier,
    if adding or removing a record changes ``total`` by an L2 norm of at most ``max_grad_norm`` and
    the release was spent before.

    Args:
        total: The sum of clipped vectors: all d values of one release, in one tensor.
        generator: The client's own.
        noise_multiplier: Above 0.
        max_grad_norm: Above 0.

    Returns:
        A float64 tensor on the CPU, of the shape of ``total``.

    Raises:
        ValueError: There would be no noise; ``total`` is not finite, in which case clipping has
            failed and no noise can hide it; or it is too large for the grid.
    """
    std = noise_multiplier * max_grad_norm
    share = 2 * math.sqrt(total.numel()) * noise_grid(std) / max_grad_norm
    if not (max_grad_norm > 0 and share < 1):  # below 1 the grid at most doubles
        raise ValueError(
            f"max_grad_norm={max_grad_norm!r} must be above 0, and noise_multiplier="
            f"{noise_multiplier!r} far below 2^24 / sqrt({total.numel()})."
        )
    std *= 1 + share
    grid = noise_grid(std)
    noise = generator.normal(tuple(total.shape), std=std)
    cells = total.detach().to("cpu", torch.float64) / grid
    if not bool((cells.abs() < 2.0**51).all()):
        raise ValueError(f"total must be finite and below {2.0**51 * grid:.3g} everywhere.")
    return cells.round().mul_(grid).add_(noise)


class _Keystream:
    """AES-256 in counter mode from block 0: unpredictable 64-bit words without the key."""

    def __init__(self, key: bytes) -> None:
        """Start the stream of a key that is used for nothing else."""
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Return the next ``count`` words of the stream."""
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), dtype="<u8")
