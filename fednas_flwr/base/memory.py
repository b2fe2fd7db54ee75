"""The machine's memory: checks that a run fits, errors if not, and reuse of freed memory."""

import ctypes
import os
import platform
import re
import resource
import sys
import traceback
from functools import lru_cache

from fednas_flwr.base.errors import ConfigError

OWN = "fednas_own"  # name of a module that --with runs


def machine_memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory() -> dict[str, int]:
    """Return the peak memory of this process in bytes: ``process``, and ``gpu`` if it used one.

    It includes tensors of clients computed in this process, not those of other processes.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    peak = {"process": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        peak["gpu"] = torch.cuda.max_memory_allocated()
    return peak


def check_fits(num_bytes: int, what: str, remedy: str) -> None:
    """Raise ConfigError for more bytes than the machine has.

    Args:
        num_bytes: A lower estimate of the bytes needed.
        what: What needs them; begins the sentence.
        remedy: Advice that ends the sentence.
    """
    if num_bytes > machine_memory():
        raise ConfigError(
            f"{what} takes at least {num_bytes / 2**30:,.0f} GiB of memory, and this machine has "
            f"{machine_memory() / 2**30:,.0f} GiB: {remedy}."
        )


_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+ ?\w+)", re.IGNORECASE)


def described(error: Exception) -> str:
    """Return an error's type and text, and its place in a file of the user's own.

    For a lack of memory, on CPU or GPU, return the remedy.
    """
    asked = _ASKED.search(str(error))  # torch raises a RuntimeError, numpy a kind of MemoryError
    if asked is None and not isinstance(error, MemoryError):
        frames = traceback.walk_tb(error.__traceback__)
        own = [(f.f_code.co_filename, n) for f, n in frames if f.f_globals.get("__name__") == OWN]
        place = " (line {1} of {0})".format(*own[-1]) if own else ""
        return f"{type(error).__name__}: {error}{place}"
    amount = "" if asked is None else f" when {asked[1]} more were needed"
    return (
        f"out of memory{amount}: lower algorithm.batch_size, retrain.batch_size or "
        "privacy.micro_batch_size, or search_space.channels and retrain.channels; "
        "fednas run --dry-run tells what a run takes"
    )


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
_KEPT = 2**30  # bytes; an int
_LARGEST_MMAP_THRESHOLD = 2**25  # bytes, before glibc 2.35 or so; later ones accept _KEPT


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Make this process, and those forked from it, reuse freed memory of up to 1 GiB.

    By default glibc maps every tensor of 128 KiB or more anew and unmaps it when it is freed, so
    that Linux zeroes all memory that a step allocates, page by page. With reuse the resident set
    stays at its peak. Does nothing without glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_THRESHOLD, _KEPT) or mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    mallopt(_TRIM_THRESHOLD, _KEPT)
