"""The machine's memory: whether a run fits, what is told if not, and keeping what is freed."""

import ctypes
import os
import platform
import re
import resource
import sys
from functools import lru_cache

from fednas_flwr.base.errors import ConfigError


def machine_memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_memory() -> dict[str, int]:
    """The most bytes that this process has held so far: ``process``, and ``gpu`` where it used one.

    Tensors of clients that it computes itself are counted, those of other processes are not.
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
        num_bytes: An estimate from below.
        what: What takes them; begins the sentence.
        remedy: What to do; ends it.
    """
    if num_bytes > machine_memory():
        raise ConfigError(
            f"{what} takes at least {num_bytes / 2**30:,.0f} GiB of memory, and this machine has "
            f"{machine_memory() / 2**30:,.0f} GiB: {remedy}."
        )


_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+ ?\w+)", re.IGNORECASE)


def described(error: Exception) -> str:
    """Return an error's kind and text; of a lack of memory, on CPU or GPU, what to do about it."""
    asked = _ASKED.search(str(error))  # torch raises a RuntimeError, numpy a kind of MemoryError
    if asked is None and not isinstance(error, MemoryError):
        return f"{type(error).__name__}: {error}"
    amount = "" if asked is None else f" when {asked[1]} more were needed"
    return (
        f"out of memory{amount}: lower algorithm.batch_size, retrain.batch_size or "
        "privacy.micro_batch_size, or search_space.channels and retrain.channels; "
        "fednas run --dry-run tells what a run takes"
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
