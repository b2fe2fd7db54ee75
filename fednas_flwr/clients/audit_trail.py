"""A site's own record of who asked for what, what left and what was refused, for its auditors.

JSON lines; each names the SHA-256 of the line before it, so that a line which is edited, removed
or put in breaks the chain. Lines cut off at the end are told by nothing in the file: whoever
checks notes number and hash of the last line, which :func:`verify_trail` returns, and finds them
again later.

No line holds a number that depends on records: of a reply stand only the names of what it
carries, of an error that is no refusal only its kind.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fednas_flwr.clients.release import ReleaseGate
from fednas_flwr.errors import ConfigError, DamagedError
from fednas_flwr.exchange.messages import Reply, Request
from fednas_flwr.exchange.requests import encode

GENESIS = "0" * 64  # stands for the hash of the line before the first
LONGEST_TEXT = 500  # characters kept of what a server sent


class AuditTrail:
    """The trail of one site; processes of several runs may write to it at once.

    Each line is on disk before the call returns, and the request is not answered if it cannot be.

    Args:
        path: Its file, made when missing; None keeps no trail.
        superlink: Address of the server that the site's node asks for work; empty if not known.
    """

    def __init__(self, path: Path | None, superlink: str = "") -> None:
        """See the class."""
        self._path, self._superlink = path, superlink

    def asked(self, request: Request, *, flower_run: int) -> None:
        """Note a request before anything is done about it."""
        settings = json.dumps(encode(request.settings), sort_keys=True)
        self._append(
            "asked",
            **_place(request),
            superlink=self._superlink,
            flower_run=str(flower_run),
            settings_sha256=hashlib.sha256(settings.encode()).hexdigest(),
        )

    def released(self, request: Request, reply: Reply, *, gate: ReleaseGate | None) -> None:
        """Note a reply before it leaves.

        Args:
            request: What it answers; with a gate, its terms are those of the releases.
            reply: Named are its states, metrics and facts.
            gate: Of a private client; what its budget has paid by now, for all runs, is noted.
        """
        if self._path is None:
            return
        private = {}
        if gate is not None:
            noise = gate.noise_multipliers(request.header, request.verb)
            kinds = {*reply.states, *(["metrics"] if reply.metrics else [])} & set(noise)
            noise = {kind: noise[kind] for kind in sorted(kinds)}
            private = {"noise_multipliers": noise, "epsilon_spent": gate.spent()}
        names = {"states": sorted(reply.states), "metrics": sorted(reply.metrics)}
        self._append("released", **_place(request), **names, facts=sorted(reply.facts), **private)

    def refused(self, verb: str, request: Request | None, reason: str) -> None:
        """Note an error; ``reason`` may only be what the server may read."""
        place = {"verb": verb} if request is None else _place(request)
        self._append("refused", **place, reason=reason)

    def _append(self, event: str, **fields: Any) -> None:
        if self._path is None:
            return
        cut = {k: v[:LONGEST_TEXT] if isinstance(v, str) else v for k, v in fields.items()}
        with _locked(self._path) as descriptor:
            number, previous = _last(descriptor, self._path)
            time = datetime.now(UTC).isoformat(timespec="seconds")
            line = {"number": number + 1, "time": time, "event": event, **cut, "previous": previous}
            os.write(descriptor, json.dumps(line).encode() + b"\n")
            os.fsync(descriptor)


def verify_trail(path: Path) -> tuple[int, str]:
    """Return the number of lines of a trail and the hash of the last one.

    Raises:
        ConfigError: There is no such file.
        DamagedError: A line is not the one that was written; the sentence names it.
    """
    if not path.is_file():
        raise ConfigError(f"there is no audit trail {path}; give the file of a site.")
    number, previous = 0, GENESIS
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if _numbered(line) != (number, previous):
            raise DamagedError(
                f"line {number} of {path} is not the one that was written after line {number - 1}: "
                "the trail was edited or damaged from there on."
            )
        previous = _hash(line)
    return number, previous


def _place(request: Request) -> dict[str, Any]:
    place = asdict(request.header)
    del place["nonce"]
    return {"verb": request.verb, **place}


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Yield the open file while no other process writes to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _last(descriptor: int, path: Path) -> tuple[int, str]:
    """Return number and hash of the last line, after cutting off one that a crash has torn.

    Raises:
        DamagedError: The last line is none of a trail.
    """
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, 2**16, max(0, size - 2**16))
    whole = tail[: tail.rfind(b"\n") + 1]
    if len(whole) < len(tail):
        os.ftruncate(descriptor, size - len(tail) + len(whole))
    if not whole:
        return 0, GENESIS
    line = whole.splitlines(keepends=True)[-1]
    number = _numbered(line)[0]
    if number is None:
        raise DamagedError(f"the last line of the audit trail {path} was edited: nothing leaves.")
    return number, _hash(line)


def _numbered(line: bytes) -> tuple[int | None, str | None]:
    """Return a line's number and what it says of the line before; None where it says nothing."""
    try:
        values = json.loads(line)
        number, previous = values["number"], values["previous"]
    except (ValueError, TypeError, KeyError):
        return None, None
    return (number if type(number) is int and line.endswith(b"\n") else None), previous


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
