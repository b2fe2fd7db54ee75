"""A site's own record of requests, releases and refusals, for its auditors.

The trail is a file of JSON lines. Each line ends with the HMAC of itself and of the line before it,
under the key of the site's ledger. A mark next to that key, outside the trail's folder, holds the
number and HMAC of the last line. Someone who can write the trail, but can neither read the key nor
write the mark, cannot edit, remove, move or insert a line, nor cut off lines at the end, unnoticed:
:func:`verify_trail` finds it, and nothing leaves the site any more. Someone who can restore old
copies of both together can.

No line holds a number that depends on records. For a reply it holds only the names of what the
reply carries, and for an error that is no refusal only its kind.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any, NamedTuple

from fednas_flwr.base.errors import ConfigError, DamagedError, DayFullError
from fednas_flwr.base.files import make_folder, make_key, write_atomically
from fednas_flwr.base.memory import described
from fednas_flwr.privacy.books import anchor
from fednas_flwr.privacy.books.anchor import KEY_BYTES, counter_of, equal, read_key, seal, take
from fednas_flwr.privacy.books.ledger import Ledger

if TYPE_CHECKING:  # these import torch
    from fednas_flwr.client.release_guard import ReleaseGuard
    from fednas_flwr.protocol.messages import Reply, Request

LONGEST_TEXT = 500  # characters that are kept of a text from a server
LONGEST_LOG = 4000  # characters of an error in the site's own log
LONGEST_END = 20_000  # bytes beyond the daily allowance, for lines that say that it is spent
# Bytes per request besides its fields and settings: HMACs and names in the line of its reply, a row
# in the journal of secure sums, the result of a self-test.
REQUEST_BYTES = 2000
_LINE = re.compile(rb'(\{"number": ([1-9][0-9]*), .*), "mac": "([0-9a-f]{64})"\}\n')


class _End(NamedTuple):
    """A place in a trail.

    Attributes:
        number: Number of the line, from 1; 0 before the first.
        mac: The line's HMAC.
        previous: HMAC of the line before it.
    """

    number: int
    mac: str
    previous: str


@dataclass(frozen=True)
class AuditTrail:
    """The trail of one site; processes of several runs may write to it at the same time.

    Each line is on disk before the call returns; a request whose line cannot be written is not
    answered. Lines count against the site's daily allowance. When that is spent, requests are
    refused without a line; the last lines say so.

    Args:
        path: The trail's file, created if missing; None keeps no trail.
        key_path: The ledger's key, created with the ledger if missing.
        ledger: The ledger; with None the trail gets a key of its own.
        superlink: Address of the server from which the site's node fetches work; empty if not
            known.
    """

    path: Path | None
    key_path: Path = Path()
    ledger: Path | None = None
    superlink: str = ""

    def asked(self, request: Request, *, flower_run: int, kept_bytes: int = 0) -> None:
        """Record a request before anything is done about it.

        Args:
            request: The request.
            flower_run: Flower's number of the run.
            kept_bytes: Size of what the site may keep of the request besides its settings.

        Raises:
            DayFullError: The site's daily allowance does not cover it.
        """
        settings = json.dumps(asdict(request.settings), sort_keys=True)
        fields = {
            **_place(request),
            "superlink": self.superlink,
            "flower_run": str(flower_run),
            "settings_sha256": hashlib.sha256(settings.encode()).hexdigest(),
        }
        self._take(len(settings) + kept_bytes + 2 * len(json.dumps(fields)) + REQUEST_BYTES)
        self._append("asked", **fields)

    def released(self, request: Request, reply: Reply, *, guard: ReleaseGuard | None) -> None:
        """Record a reply before it leaves.

        Args:
            request: The request; if there is a guard, as it was admitted.
            reply: The reply; the names of its states, metrics and properties are recorded.
            guard: A private client's guard; its budget's payments so far, for all runs, are
                recorded.
        """
        private = {}
        if guard is not None and self.path is not None:
            carried = {*reply.states, *(["metrics"] if reply.metrics else [])}
            noise = {
                kind: planned.noise_multiplier
                for kind, planned in sorted(request.releases.items())
                if kind in carried or request.summed is not None  # a masked reply shows no kind
            }
            private = {"noise_multipliers": noise, "epsilon_spent": guard.spent()}
        names = {kind: sorted(getattr(reply, kind)) for kind in ("states", "metrics", "properties")}
        self._append("released", **_place(request) | names | private)

    def refused(
        self, action: str, request: Request | None, error: Exception, *, shown: bool, private: bool
    ) -> str:
        """Record an error unless the daily allowance is spent; return the sentence for the server.

        Args:
            action: The action that was requested.
            request: The request; None if it could not be read.
            error: The error.
            shown: True if the server may read the error's text. Other texts go to the site's own
                log and take a fixed amount of the allowance, since they may quote records.
            private: True if the site's records are private; then only a refusal is recorded in
                full.
        """
        place = {"action": action} if request is None else _place(request)
        reason = str(error) if shown and private else type(error).__name__
        fixed = 13 * LONGEST_TEXT + (0 if shown else LONGEST_LOG)  # some characters take 12 in JSON
        with suppress(DayFullError):
            self._take(len(json.dumps(place)) + fixed, beyond=LONGEST_END)
            self._append("refused", **place, reason=reason)
            if not shown:
                print("".join(format_exception(error))[-LONGEST_LOG:], file=sys.stderr)
        return described(error) if shown else "an error at the site, whose own log says which"

    def _take(self, num_bytes: int, *, beyond: int = 0) -> None:
        if self.path is not None:
            self.key_path.parent.mkdir(parents=True, exist_ok=True)
            take(counter_of(self.key_path), num_bytes, beyond=beyond)

    def _append(self, event: str, **fields: Any) -> None:
        if self.path is None:
            return
        cut = {k: v[:LONGEST_TEXT] if isinstance(v, str) else v for k, v in fields.items()}
        make_folder(self.path.parent)
        with anchor.locked(self.path, flags=os.O_APPEND) as descriptor:
            key, mark = self._key(), _mark_path(self.path, self.key_path)
            last = _last(descriptor, self.path, mark, key)
            time = datetime.now(UTC).isoformat(timespec="seconds")
            line = {"number": last.number + 1, "time": time, "event": event, **cut}
            text = json.dumps(line).removesuffix("}")
            end = _End(last.number + 1, seal(key, "audit line", last.mac, text), last.mac)
            os.write(descriptor, f'{text}, "mac": "{end.mac}"}}\n'.encode())
            os.fsync(descriptor)
            write_atomically(mark, json.dumps([*end, seal(key, "audit mark", "", [*end])]))

    def _key(self) -> bytes:
        """Return the key; on a new site it is created."""
        if not self.key_path.exists():
            if self.ledger is None:
                make_key(self.key_path, KEY_BYTES)
            else:
                Ledger(self.ledger, self.key_path).close()
        return read_key(self.key_path)


def trail_of(node: Mapping[str, str]) -> AuditTrail:
    """Return the trail of a node: at its ``audit``, else next to its ledger, else none.

    A node that names only one of ledger and key keeps no trail: it refuses everything.
    """
    if not {"audit", "ledger"} & node.keys() or ("ledger" in node) != ("ledger-key" in node):
        return AuditTrail(None)
    ledger = Path(node["ledger"]) if "ledger" in node else None
    path = Path(node.get("audit") or Path(node["ledger"]).with_name("audit.jsonl"))
    key_path = Path(node.get("ledger-key", f"{path}.key"))
    return AuditTrail(path, key_path, ledger=ledger, superlink=node.get("superlink", ""))


def verify_trail(path: Path, key_path: Path) -> int:
    """Return the number of lines of a trail after checking every line and the mark.

    Args:
        path: The trail.
        key_path: The key of the site's ledger; the mark is next to it.

    Raises:
        ConfigError: There is no such file or key.
        DamagedError: A line is not as it was written, or lines are missing; the message says which.
    """
    for name, file in (("audit trail", path), ("key", key_path)):
        if not file.is_file():
            raise ConfigError(f"there is no {name} {file}; give the file of a site.")
    key = read_key(key_path)
    marked, end = _read_mark(_mark_path(path, key_path), key), _genesis(key)
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        place = _follow(line, end.number, end.mac, key)
        if place is None:
            raise DamagedError(
                f"line {number} of {path} is not the one that was written after line {number - 1}: "
                "lines were edited, removed or moved from there on, or the key is another trail's."
            )
        end = place
    if marked.mac not in (end.mac, end.previous):  # after a crash the mark may be one behind
        raise _wrong_end(path, end.number, marked)
    return end.number


def _place(request: Request) -> dict[str, Any]:
    place = asdict(request.header)
    del place["nonce"]
    return {"action": request.action, **place}


def _last(descriptor: int, path: Path, mark: Path, key: bytes) -> _End:
    """Return the end of an open trail, after cutting off a line that a crash left incomplete.

    Raises:
        DamagedError: The trail does not end where the mark says.
    """
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, 2**16, max(0, size - 2**16))
    whole = tail[: tail.rfind(b"\n") + 1]
    marked = _read_mark(mark, key)
    if not whole:
        if marked.number:
            raise _wrong_end(path, 0, marked)
        return marked
    line = whole.splitlines(keepends=True)[-1]
    marked_end = _follow(line, marked.number - 1, marked.previous, key)
    # or a crash came before the mark was moved
    end = marked_end or _follow(line, marked.number, marked.mac, key)
    if end is None:
        matched = _LINE.fullmatch(line)
        raise _wrong_end(path, int(matched[2]) if matched else marked.number, marked)
    if len(whole) < len(tail):
        os.ftruncate(descriptor, size - len(tail) + len(whole))
    return end


def _wrong_end(path: Path, number: int, marked: _End) -> DamagedError:
    """Return the error for a trail whose last line, with this number, is not the marked one."""
    return DamagedError(
        f"the audit trail {path} ends at line {number} and its mark names line {marked.number}: "
        "lines were cut off or edited, or the mark was removed or rolled back; nothing leaves."
    )


def _follow(line: bytes, number: int, mac: str, key: bytes) -> _End | None:
    """Return the place of a line; None if it was not written after the line with ``mac``."""
    matched = _LINE.fullmatch(line)
    if matched is None or int(matched[2]) != number + 1:
        return None
    try:
        seal_of_line = seal(key, "audit line", mac, matched[1].decode())
    except UnicodeDecodeError:
        return None
    return _End(number + 1, seal_of_line, mac) if equal(matched[3].decode(), seal_of_line) else None


def _genesis(key: bytes) -> _End:
    return _End(0, seal(key, "audit line", "", "fednas audit trail 1"), "")


def _mark_path(path: Path, key_path: Path) -> Path:
    return key_path.with_name(f"{key_path.name}.{path.name}.mark")


def _read_mark(mark: Path, key: bytes) -> _End:
    """Return the end that a mark names; without a mark, the place before the first line."""
    if not mark.exists():
        return _genesis(key)
    try:
        *place, sealed = json.loads(mark.read_bytes())
    except (ValueError, TypeError):
        place, sealed = [], ""
    if not equal(sealed, seal(key, "audit mark", "", place)):
        raise DamagedError(f"the mark {mark} was edited, or the key beside it is another one's.")
    return _End(*place)
