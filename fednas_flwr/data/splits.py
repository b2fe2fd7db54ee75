"""The part of a client's data each record belongs to: train, validation or test.

A part is a function of the record's id and the site's key alone, never of other records, their
order or a run's seed: a record read as training data once is never test data later, and a privacy
ledger can add up what was spent on each part. The main function is :func:`assign_splits`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings.names import SPLITS


def hash_positions(ids: np.ndarray, *, key: bytes) -> np.ndarray:
    """Return float64 ``[N]`` in [0, 1): the keyed blake2b of each id, as a fraction.

    Args:
        ids: ``[N]`` byte strings.
        key: 1 to 64 bytes; to everybody without it the positions are random.

    Raises:
        ValueError: The key is empty or longer than 64 bytes.
    """
    if not 1 <= len(key) <= 64:
        raise ValueError(f"a split key needs 1 to 64 bytes, got {len(key)}.")
    keyed = hashlib.blake2b(key=key, digest_size=8, person=b"fednas split")
    digests = bytearray()
    for record_id in ids.tolist():
        hasher = keyed.copy()
        hasher.update(record_id)
        digests += hasher.digest()
    # 53 bits are what a float64 in [0, 1) holds exactly; with 64 the largest would round to 1.
    return (np.frombuffer(bytes(digests), dtype=">u8") >> np.uint64(11)).astype(float) * 2.0**-53


def assign_splits(ids: np.ndarray, *, key: bytes, fractions: Mapping[str, float]) -> np.ndarray:
    """Return int8 ``[N]``: 0 for train, 1 for validation, 2 for test.

    A record with position ``h`` (see :func:`hash_positions`) is train where ``h < train``,
    validation where ``h < train + validation``, and test otherwise.

    Args:
        ids: ``[N]`` byte strings; equal ids get the same part.
        key: The site's key, 1 to 64 bytes.
        fractions: Share of ``train``, ``validation`` and ``test``, each in [0, 1], summing to 1.

    Returns:
        The parts; their sizes meet the fractions in expectation, not exactly.

    Raises:
        ConfigError: The fractions are not those three or do not sum to 1.

    Example:
        >>> ids = np.array([b"a", b"b", b"c", b"d"])
        >>> shares = {"train": 0.5, "validation": 0.25, "test": 0.25}
        >>> parts = assign_splits(ids, key=b"secret", fractions=shares)
        >>> bool((assign_splits(ids[2:], key=b"secret", fractions=shares) == parts[2:]).all())
        True
    """
    shares = np.array([fractions.get(name, np.nan) for name in SPLITS], dtype=float)
    valid = set(fractions) == set(SPLITS) and bool((shares >= 0).all())
    if not valid or abs(shares.sum() - 1) > 1e-6:
        raise ConfigError(
            f"the fractions of a client's records {dict(fractions)} are not usable: give train, "
            "validation and test, each at least 0, summing to 1."
        )
    edges = np.cumsum(shares)[:2]
    # Rounding must not send a record to a part whose share is 0.
    for position in (1, 0):
        if shares[position + 1 :].sum() == 0:
            edges[position] = 1.0
    return np.searchsorted(edges, hash_positions(ids, key=key), side="right").astype(np.int8)


def assignment_digest(
    ids: np.ndarray, *, key: bytes, fractions: Mapping[str, float], id_column: str
) -> str:
    """Return the blake2b-128, in hex, of what decides which part each of some records is in.

    That is the key and the fractions, with the name of the column that gives ids, whose records may
    come and go without changing sides. Ids that are hashes of records' content may be the same
    records' in another form, so without such a column all ids count, in any order.

    Args:
        ids: ``[N]`` byte strings.
        key: As of :func:`assign_splits`.
        fractions: As of :func:`assign_splits`.
        id_column: ``Records.id_column``.
    """
    shares = [[name, float(fractions[name])] for name in SPLITS]
    digest = hashlib.blake2b(digest_size=16, person=b"fednas parts")
    digest.update(json.dumps([key.hex(), shares, id_column]).encode())
    if not id_column:
        for record_id in sorted(ids.tolist()):
            digest.update(record_id.ljust(32, b"\0"))
    return digest.hexdigest()
