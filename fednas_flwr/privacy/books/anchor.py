"""The parts of a ledger outside its folder: secret key, high-water mark and daily allowance.

The mark records the last row of the ledger, sealed with the key, so that a ledger that was rolled
back, truncated or deleted is noticed. It is a sqlite file, because its write lock is also the lock
of the ledger and is released when a process is killed. ``ledger`` uses all of this module;
everything else that is sealed with the key uses its functions for keys and seals.

The allowance counts the bytes that requests make a site write, jointly for all of its books. Rows
and commitments of the ledger, lines of the audit trail, rows of the journal of secure sums, kept
models and the site's log all count against it before they are written (:func:`take`). Every amount
follows from requests and the policy alone, never from records.
"""

import fcntl
import hashlib
import hmac
import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fednas_flwr.base import files
from fednas_flwr.base.errors import DamagedError, DayFullError

KEY_BYTES = 32
WAIT_S = 60.0  # time to wait for other processes
_SCHEMA = "CREATE TABLE IF NOT EXISTS mark (sequence INTEGER, mac TEXT, seal TEXT)"
# Errors from a full or failing disk, missing rights or another process; all others are damage.
_NOT_DAMAGE = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
)


class Mark:
    """The mark next to a key, ``<key>.mark``; both are created if neither exists.

    The mark is created before the key, so that a key without a mark never results from a crash.

    Args:
        key_path: The key, a file of 64 hex digits that only its owner can read.

    Attributes:
        connection: Connection in autocommit; a transaction on it holds the only write lock.

    Raises:
        RuntimeError: There is a key but no mark.
    """

    def __init__(self, key_path: Path) -> None:
        self.key_path, self.path = key_path, key_path.with_name(key_path.name + ".mark")
        new = not key_path.exists()
        if not new and not self.path.exists():
            raise damaged(f"the mark {self.path} is missing")
        self._key = b""
        self.connection = connect(self.path)
        if new:
            try:
                self.connection.execute(_SCHEMA)
            except BaseException:
                self.connection.close()
                raise

    def is_empty(self) -> bool:
        """Return True if no row of the ledger was ever marked."""
        return self.connection.execute("SELECT 1 FROM mark WHERE sequence > 0").fetchone() is None

    def load_key(self) -> None:
        """Read the key; on a new site without any mark, create it. The lock must be held."""
        new = self.connection.execute("SELECT 1 FROM mark").fetchone() is None
        if new and not self.key_path.exists():
            files.make_key(self.key_path, KEY_BYTES)
        self._key = read_key(self.key_path)
        if new:
            self.move(0, self.genesis())

    def position(self) -> tuple[int, str]:
        """Return the number and HMAC of the last row of the ledger.

        Raises:
            RuntimeError: The mark was not written with this key.
        """
        row = self.connection.execute("SELECT sequence, mac, seal FROM mark").fetchone()
        if row is None or not equal(row[2], self.hmac("mark", row[1], row[0])):
            raise damaged(f"the mark {self.path} was edited, or {self.key_path} is not its key")
        return row[0], row[1]

    def move(self, sequence: int, mac: str) -> None:
        """Set the mark; it takes effect once committed."""
        self.connection.execute("DELETE FROM mark")
        self.connection.execute(
            "INSERT INTO mark VALUES (?, ?, ?)", (sequence, mac, self.hmac("mark", mac, sequence))
        )

    def hmac(self, purpose: str, previous: object, content: object) -> str:
        """Return the HMAC-SHA256 of some content after ``previous`` in a chain, as hex digits."""
        return seal(self._key, purpose, previous, content)

    def genesis(self) -> str:
        """Return the stand-in for the HMAC of row 0."""
        return self.hmac("genesis", "", "fednas ledger 1")


def seal(key: bytes, purpose: str, previous: object, content: object) -> str:
    """Return the HMAC-SHA256 of some content after ``previous`` in a chain, as hex digits."""
    text = json.dumps([purpose, previous, content], default=lambda blob: [blob.hex()])
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def equal(found: object, expected: str) -> bool:
    """Compare two HMACs in constant time."""
    if not isinstance(found, str):
        return False
    return hmac.compare_digest(found.encode(errors="surrogatepass"), expected.encode())


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection in autocommit; every commit is on disk when it returns."""
    files.make_folder(path.parent)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    connection = sqlite3.connect(path, WAIT_S, isolation_level=None, check_same_thread=False)
    deadline = time.monotonic() + WAIT_S
    try:
        while True:
            try:
                # The write-ahead log needs one sync per commit; sqlite itself does not wait here.
                connection.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        connection.execute("PRAGMA synchronous = EXTRA")  # FULL, and the folder of any journal
    except BaseException:
        connection.close()
        raise
    return connection


def damaged(what: str) -> DamagedError:
    """Return the error for files that can no longer be trusted."""
    return DamagedError(
        f"{what}: the ledger is damaged and nothing is released; restore its newest files or "
        "count its budgets as spent."
    )


@contextmanager
def plain_errors(path: Path) -> Iterator[None]:
    """Turn errors of sqlite and of the system into one sentence about the ledger at ``path``."""
    try:
        yield
    except (OSError, sqlite3.DatabaseError, UnicodeDecodeError) as error:  # of a planted file, too
        if not isinstance(error, OSError) and _code(error) not in _NOT_DAMAGE:
            raise damaged(f"{path} or its mark cannot be read ({error})") from error
        sentence = f"the ledger {path} or its mark cannot be used, nothing is released: {error}."
        raise OSError(sentence) from error


def _code(error: Exception) -> int:
    """Return sqlite's primary code of an error."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def read_key(path: Path) -> bytes:
    """Return the key in a file that only its owner can read."""
    if not path.exists():
        raise damaged(f"the key {path} is missing")
    return files.read_key(path, KEY_BYTES)


MOST_BYTES = 2**28  # per day (UTC), see policy.yaml


@contextmanager
def locked(path: Path, *, flags: int = 0) -> Iterator[int]:
    """Yield an open file, created if missing, that no other process has locked meanwhile."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def counter_of(key_path: Path) -> Path:
    """Return the counter of a site, a file next to the key of its ledger."""
    return key_path.with_name(f"{key_path.name}.day")


def take(counter: Path, num_bytes: int, *, now: float | None = None, beyond: int = 0) -> None:
    """Count bytes that are about to be written, or raise.

    The count is not synced. A power cut may lose it, which no server can cause.

    Args:
        counter: Result of :func:`counter_of`, in a folder that exists; created if missing.
        num_bytes: Number of bytes, at least as many as will be written.
        now: Seconds since 1970; None reads the clock.
        beyond: Bytes that may be taken to report that the allowance is spent.

    Raises:
        DayFullError: The bytes exceed the rest of this day's allowance; the refusal is counted.
    """
    day = int((time.time() if now is None else now) // 86_400)
    with locked(counter) as descriptor:
        try:
            known, used, refused = map(int, os.pread(descriptor, 99, 0).split())
        except ValueError:  # the file is new
            known = used = refused = 0
        used, refused = (used, refused) if known == day else (0, 0)
        fits = used + num_bytes <= MOST_BYTES + beyond
        used, refused = (used + num_bytes, refused) if fits else (used, refused + 1)
        os.pwrite(descriptor, f"{day:>12} {used:>20} {refused:>20}\n".encode(), 0)  # in place
    if not fits:
        raise DayFullError(
            "refused: requests have made this site write as much as it writes in a day (UTC): ask "
            "again tomorrow."
        )
