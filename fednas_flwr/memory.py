"""The machine's memory: whether a run fits into it, and that processes keep what they free."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import lru_cache

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


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT = 2**30  # bytes; an int
_LARGEST_MMAP_THRESHOLD = 2**25  # bytes, before glibc 2.35 or so; from there on it takes _KEPT


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Have this process, and those forked from it, use freed memory again, of up to 1 GiB.

    By default glibc maps a tensor of 128 KiB or more anew, and unmaps it when it is freed: Linux
    fills with zeros, page by page, what every step allocates. The resident set stays at its peak.
    Does nothing where there is no glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_THRESHOLD, _KEPT) or mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, _KEPT)
