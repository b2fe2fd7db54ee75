"""Secrets split over sites so that any ``threshold`` of them, and no fewer, can rebuild one.

Shamir (1979, "How to share a secret"): values at x = 1, 2, ... of a random polynomial of degree
``threshold - 1`` over the integers modulo the least prime above 2^256, whose value at 0 is the
secret. Fewer values than the threshold are uniform whatever the secret is.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping

PRIME = 2**256 + 297
SECRET_BYTES, PART_BYTES = 32, 33


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
