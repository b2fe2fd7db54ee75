"""Daily allowance of bytes that requests make a site write: one counter for all of its books.

Rows and commitments of the ledger, lines of the audit trail, rows of the journal of secure sums,
kept models and the site's own log all take from it before they are written. Every amount follows
from requests and the policy alone, never from records. Main function: :func:`take`.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from fednas_flwr.base.errors import DayFullError

MOST_BYTES = 2**28  # a day (UTC), see policy.yaml
_DAY_S = 86_400


def counter_of(key_path: Path) -> Path:
    """Return the counter of a site, a file beside the key of its ledger."""
    return key_path.with_name(f"{key_path.name}.day")


def take(counter: Path, num_bytes: int, *, now: float | None = None, beyond: int = 0) -> None:
    """Count bytes that are about to be written, or raise.

    A power cut may lose the count, which no server can cause: it is not synced.

    Args:
        counter: From :func:`counter_of`, in a folder that exists; created if missing.
        num_bytes: At least as many as will be written.
        now: Seconds since 1970; None asks the clock.
        beyond: Bytes that may be taken when the allowance is spent, to say so.

    Raises:
        DayFullError: They are more than what is left of this day; the refusal is counted.
    """
    day = int((time.time() if now is None else now) // _DAY_S)
    descriptor = os.open(counter, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            known, used, refused = map(int, os.pread(descriptor, 99, 0).split())
        except ValueError:  # it is new
            known = used = refused = 0
        used, refused = (used, refused) if known == day else (0, 0)
        fits = used + num_bytes <= MOST_BYTES + beyond
        used, refused = (used + num_bytes, refused) if fits else (used, refused + 1)
        os.pwrite(descriptor, f"{day:>12} {used:>20} {refused:>20}\n".encode(), 0)  # in place
    finally:
        os.close(descriptor)
    if not fits:
        raise DayFullError(
            "refused: requests have made this site write as much as it writes in a day (UTC): ask "
            "again tomorrow."
        )
