"""Source of every random number of a run: ``(seed, round, client, purpose)``.

A seed is a hash of these parts, so that no draw depends on process state or on the order in which
clients run. Privacy noise and Poisson masks never come from here.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive_seed(seed: int, *purpose: int | str) -> int:
    """Return a 63-bit seed that depends on all parts of ``(seed, *purpose)`` and their order.

    Example:
        >>> derive_seed(1, "search", 2) == derive_seed(1, "search", 2)
        True
        >>> derive_seed(1, "search", 2) == derive_seed(1, 2, "search")
        False
    """
    parts = repr((int(seed), *purpose)).encode()
    return int.from_bytes(hashlib.blake2b(parts, digest_size=8).digest(), "big") >> 1


def make_generator(seed: int, *purpose: int | str) -> torch.Generator:
    """Return a CPU generator seeded by :func:`derive_seed`."""
    return torch.Generator().manual_seed(derive_seed(seed, *purpose))


def seed_all(seed: int) -> None:
    """Seed torch's global generators; torch.manual_seed is slow where there is only a CPU."""
    (torch if torch.accelerator.is_available() else torch.default_generator).manual_seed(seed)


@contextmanager
def seeded(seed: int, *purpose: int | str) -> Iterator[None]:
    """Seed torch's global generators inside the block and restore them after it.

    For code that cannot take a generator: module initialisation, dropout, drop-path.
    """
    with torch.random.fork_rng():
        seed_all(derive_seed(seed, *purpose))
        yield
