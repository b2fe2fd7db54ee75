"""Masks: streams of ChaCha20 under seeds that HKDF-SHA256 derives for one context and purpose.

A seed is used for one stream, a key for one box. Main functions: :func:`derive` and
:func:`add_mask`.

Seeds are split over sites so that any ``threshold`` of them, and no fewer, can rebuild one: Shamir
(1979, "How to share a secret"), values at x = 1, 2, ... of a random polynomial of degree
``threshold - 1`` over the integers modulo the least prime above 2^256, whose value at 0 is the
secret. Fewer values than the threshold are uniform whatever the secret is: :func:`split` and
:func:`rebuild`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SECRET_BYTES, PART_BYTES = 32, 33
PRIME = 2**256 + 297
_BLOCK = 2**18  # bytes of a stream that are made at a time: they stay in the cache
_ONCE = bytes(12)  # the nonce of a key that encrypts one message


def derive(secret: bytes, context: bytes, purpose: str) -> bytes:
    """Return 32 bytes that nobody can tell from random ones without the secret.

    Args:
        secret: Secret of two sites, or of one.
        context: Digest of the exchange.
        purpose: Purpose of the bytes; another one gives independent bytes.
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
            if sign > 0:
                part += mask
            else:
                part -= mask


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
        points: Different numbers of 1 to 2^31.
        threshold: Number of parts that rebuild the secret, at least 1.
    """
    points = list(points)
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= len(set(points)) == len(points):
        raise ValueError(f"{threshold} of {len(points)} points cannot hold {len(secret)} bytes.")
    if not all(1 <= x <= 2**31 for x in points):
        raise ValueError(f"points must be from 1 to 2^31, got {points}.")
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
    """Return the secret of which these are at least ``threshold`` parts, by their points.

    Raises:
        ValueError: They are parts of no secret of 32 bytes. Wrong or too few parts can also give
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
