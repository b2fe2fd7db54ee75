"""Whether what settings ask for fits into the machine's memory, asked before it is allocated."""

from __future__ import annotations

import os

from fednas_flwr.errors import ConfigError


def machine_memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_fits(num_bytes: int, what: str, remedy: str) -> None:
    """Raise ConfigError for more bytes than the machine has.

    Args:
        num_bytes: An estimate from below.
        what: What takes them; begins the sentence.
        remedy: What to do; ends it.
    """
    if num_bytes > machine_memory():
        raise ConfigError(
            f"{what} takes at least {num_bytes / 2**30:,.0f} GiB of memory, and this machine has "
            f"{machine_memory() / 2**30:,.0f} GiB: {remedy}."
        )
