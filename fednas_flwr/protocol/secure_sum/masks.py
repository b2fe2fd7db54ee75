"""Values on a grid, and masks: streams of ChaCha20 under seeds that HKDF-SHA256 derives.

A :class:`Grid` converts values into whole numbers of cells, which add up exactly modulo a power of
two. All sites of an exchange use one grid. Its cell is a power of two, and the number of cells per
site is limited such that the sum of all fits half of the modulus. The other half is headroom: a
total in it was not made by honest sites.

A seed is derived for one context and purpose and used for one stream, a key for one box. Main
functions: :func:`derive` and :func:`add_mask`.

Seeds are split over sites so that any ``threshold`` of them, and no fewer, can rebuild one: Shamir
(1979, "How to share a secret"), values at x = 1, 2, ... of a random polynomial of degree
``threshold - 1`` over the integers modulo the least prime above 2^256, whose value at 0 is the
secret. Fewer values than the threshold are uniform whatever the secret is: :func:`split` and
:func:`rebuild`.
"""

import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

WIDE_CELL = 2.0**-32  # if no range is known
BITS = {32: np.int32, 64: np.int64}
SECRET_BYTES, PART_BYTES = 32, 33
PRIME = 2**256 + 297
_BLOCK = 2**18  # bytes of a stream that are made at a time, so that they stay in the cache
_ONCE = bytes(12)  # the nonce of a key that encrypts one message


@dataclass(frozen=True)
class Cells:
    """Values with a share of noise, as whole cells of a grid; only masks may be applied to them.

    Rounding, clamping or branching on a site's own noised values could remove its share of the
    noise from the sum; the sum modulo a power of two cannot.

    Attributes:
        values: int64 [n].
    """

    values: np.ndarray


@dataclass(frozen=True)
class Grid:
    """Cells of one exchange.

    Attributes:
        cell: Width of a cell, a power of two.
        bits: 32 or 64; sums are modulo ``2^bits``.
        sites: Largest number of sites in a sum.

    Example:
        >>> grid = Grid.of_range(100.0, sites=8)
        >>> grid.cell, grid.range >= 100
        (9.5367431640625e-07, True)
        >>> total = grid.encode([1.5]) + grid.encode([-0.25])
        >>> grid.decode(total, sites=2)
        array([1.25])
    """

    cell: float
    bits: int
    sites: int

    @classmethod
    def of_range(cls, most: float, *, sites: int) -> "Grid":
        """Return the finest grid modulo 2^32 on which each of ``sites`` sites can have ``+-most``.

        Raises:
            ValueError: ``most`` is not a positive number that floats can divide.
        """
        if not 1e-100 <= most <= 1e100 or not 1 <= sites <= 2**20:
            raise ValueError(f"a grid needs a range of 1e-100 to 1e100, got {most!r} x {sites!r}.")
        return cls(2.0 ** math.ceil(math.log2(most / (2**30 // sites))), 32, sites)

    @property
    def most_cells(self) -> int:
        """Largest magnitude of a site's value, in cells."""
        return int(2 ** (self.bits - 2) // self.sites)

    @property
    def range(self) -> float:
        """Largest magnitude of a site's value."""
        return self.most_cells * self.cell

    def wrap(self, cells: Cells) -> np.ndarray:
        """Return cells modulo two to the power of the grid's width [n].

        Sums of wrapped values are the wrapped sums of the values: nothing is lost if the sum has
        room. The function that adds the noise ensures this (``ReleaseGuard.share``).
        """
        return cells.values.astype(BITS[self.bits])

    def encode(self, values: np.ndarray | list[float]) -> np.ndarray:
        """Return the values rounded to cells, as integers of the grid's width [n].

        Raises:
            ValueError: A value is not finite or beyond the range; the message does not say where.
        """
        cells = np.rint(np.asarray(values, dtype=np.float64) / self.cell)
        if not bool((np.abs(cells) <= self.most_cells).all()):  # also refuses NaN
            raise ValueError(
                f"a value is not finite or beyond {self.range:.4g}, which is what the secure sum "
                f"of {self.sites} sites has room for."
            )
        return cells.astype(BITS[self.bits])

    def decode(self, total: np.ndarray, *, sites: int) -> np.ndarray:
        """Return the sum of ``sites`` sites' values, float64 [n], from its integers.

        Raises:
            ValueError: The sum is beyond what they can have sent.
        """
        signed = total.view(BITS[self.bits])
        low, high = (int(signed.min()), int(signed.max())) if signed.size else (0, 0)
        if max(-low, high) > sites * self.most_cells:
            raise ValueError(
                f"the total of {sites} sites is beyond {sites} times their range: a site has sent "
                "other masks than it should, or values outside of its range."
            )
        return signed.astype(np.float64) * self.cell


def derive(secret: bytes, context: bytes, purpose: str) -> bytes:
    """Return 32 bytes that nobody without the secret can distinguish from random ones.

    Args:
        secret: Secret of two sites, or of one.
        context: Digest of the exchange.
        purpose: Purpose of the bytes; another purpose gives independent bytes.
    """
    hkdf = HKDF(algorithm=SHA256(), length=SECRET_BYTES, salt=context, info=purpose.encode())
    return hkdf.derive(secret)


def add_mask(seed: bytes, vectors: Sequence[np.ndarray], *, sign: int) -> None:
    """Add a seed's stream to integer vectors, in place, modulo two to the power of their width.

    Args:
        seed: 32 bytes; the vectors, in their order, take one stream.
        vectors: Contiguous, int32 or int64 [n].
        sign: 1, or -1 to subtract it.
    """
    # ChaCha20 with a counter of 64 bits from 0 and a nonce of 0: no seed is used twice.
    stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), mode=None).encryptor()
    zeros, block = bytes(_BLOCK), bytearray(_BLOCK)
    for vector in vectors:
        words = vector.view(np.dtype(f"<u{vector.itemsize}"))
        step = _BLOCK // words.itemsize
        for start in range(0, len(words), step):
            part = words[start : start + step]
            stream.update_into(memoryview(zeros)[: part.nbytes], block)
            mask = np.frombuffer(block, dtype=words.dtype, count=len(part))
            (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def seal(key: bytes, message: bytes) -> bytes:
    """Return a message encrypted and authenticated under a key that encrypts nothing else."""
    return ChaCha20Poly1305(key).encrypt(_ONCE, message, None)


def unseal(key: bytes, box: bytes) -> bytes:
    """Return the message in a box.

    Raises:
        ValueError: The box was not made with this key.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_ONCE, box, None)
    except InvalidTag:
        raise ValueError(
            "a sealed part was changed on its way, or is of another exchange."
        ) from None


def split(secret: bytes, points: Iterable[int], *, threshold: int) -> dict[int, bytes]:
    """Return one part of 33 bytes for each point.

    Args:
        secret: 32 bytes.
        points: Different numbers from 1.
        threshold: Number of parts that rebuild the secret, from 1 to the number of points.
    """
    polynomial = [int.from_bytes(secret, "big")]
    polynomial += [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    parts = {}
    for x in points:
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * x + coefficient) % PRIME
        parts[x] = value.to_bytes(PART_BYTES, "big")
    return parts


def rebuild(parts: Mapping[int, bytes]) -> bytes:
    """Return the secret, given at least ``threshold`` of its parts by their points.

    Raises:
        ValueError: The parts give no secret of 32 bytes. Wrong or too few parts can also give
            another secret.
    """
    total = 0
    for x, part in parts.items():
        numerator = denominator = 1
        for other in parts:
            if other != x:
                numerator = numerator * other % PRIME
                denominator = denominator * (other - x) % PRIME
        total += int.from_bytes(part, "big") * numerator * pow(denominator, -1, PRIME)
    secret = total % PRIME
    if not parts or secret >= 2**256:
        raise ValueError("the parts are of no secret: a site has given a wrong one.")
    return secret.to_bytes(SECRET_BYTES, "big")
