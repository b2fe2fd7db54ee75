"""Masks: streams of ChaCha20 under seeds that HKDF-SHA256 derives for one context and purpose.

A seed is used for one stream, a key for one box. Main functions: :func:`derive` and
:func:`add_mask`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

SEED_BYTES = 32
_BLOCK = 2**18  # bytes of a stream that are made at a time: they stay in the cache
_ONCE = bytes(12)  # the nonce of a key that encrypts one message


def derive(secret: bytes, context: bytes, purpose: str) -> bytes:
    """Return 32 bytes that nobody can tell from random ones without the secret.

    Args:
        secret: What two sites share, or a site's own.
        context: Digest of the exchange.
        purpose: What the bytes are for; another one gives independent bytes.
    """
    hkdf = HKDF(algorithm=SHA256(), length=SEED_BYTES, salt=context, info=purpose.encode())
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
