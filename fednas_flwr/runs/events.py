"""The record of one run: events.jsonl, one JSON object per line, written as things happen.

Progress display, TensorBoard, report and comparison are made from the lines of this file alone.
`EventLog` writes it, `read_events` reads it, and `latest_rounds` picks the rounds that count after
a resume.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fednas_flwr.base.foreign import load_json
from fednas_flwr.base.memory import peak_memory

Event = dict[str, Any]
Listener = Callable[[Event], None]
# Ways in which a run is stopped from outside. Flower ends the app of a stopped run by SystemExit
# or, if another thread of it asks first, by refusing its token.
STOPPED = {KeyboardInterrupt: "stopped by Ctrl-C", SystemExit: "ended by Flower or a signal"}
REFUSED = re.compile(r"Client error '401 Unauthorized' for url '\S+/v1/runtime/")


def reason_of(error: BaseException) -> str:
    """Return the reason of a run's end, for the event ``run_finished``."""
    kind = SystemExit if REFUSED.match(str(error)) else type(error)
    return STOPPED.get(kind) or f"{type(error).__name__}: {error}"


class EventLog(AbstractContextManager["EventLog"]):
    """Log that appends events to a file and passes each one to the listeners.

    A line is written with one flushed call, so that a killed process leaves at most one torn line,
    the last one. A log opened on such a file starts on a fresh line. A listener that raises stops
    the caller, after the line has been written.

    Args:
        path: The file to append to; it and its folder are created if missing.
        listeners: Functions called in this order with every event as it is in the file.
    """

    def __init__(self, path: Path, listeners: Iterable[Listener] = ()) -> None:
        """Open the file for appending."""
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = path.open("ab")
        if torn:
            self._file.write(b"\n")
        self._listeners = tuple(listeners)
        self._start = time.monotonic()

    def emit(self, event: str, **fields: object) -> None:
        """Write one event, with the time (ISO, UTC) and the seconds since the log was opened.

        Args:
            event: The kind of event, e.g. ``round``.
            **fields: Its content: numbers, strings, lists, mappings, paths, numpy arrays and torch
                tensors, nested to any depth. A number that is not finite becomes null.
        """
        line: Event = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "elapsed": round(time.monotonic() - self._start, 3),
            "event": event,
            **_plain(fields),
        }
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        for listener in self._listeners:
            listener(line)

    @contextmanager
    def attempt(self, *, resumed: bool, circumstances: Mapping[str, object]) -> Iterator[None]:
        """Write the start of a run and its end, with the reason if the block raises.

        Args:
            resumed: True if it continues an earlier attempt.
            circumstances: Versions and machine.
        """
        started = time.monotonic()
        self.emit("run_started", resumed=resumed, **circumstances)
        status, reason = "completed", None
        try:
            yield
        except BaseException as error:
            status, reason = "failed", reason_of(error)
            raise
        finally:
            ended = {"status": status, "reason": reason, "seconds": time.monotonic() - started}
            self.emit("run_finished", **ended, memory=peak_memory())

    def close(self) -> None:
        """Close the file; emitting afterwards raises ValueError."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()


def read_events(path: Path) -> list[Event]:
    """Return the events of a file in the order of writing.

    Lines that are not a whole JSON object, such as a killed process leaves, or are nested too
    deeply, are left out.

    Raises:
        FileNotFoundError: There is no such file.
    """
    events = []
    for line in path.read_bytes().split(b"\n"):
        try:
            event = load_json(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event:
            events.append(event)
    return events


def latest_rounds(events: Iterable[Event], stage: str | None, kind: str = "round") -> list[Event]:
    """Return events of a kind by ascending round, one per round, of one stage or (None) of all.

    A resumed run repeats the rounds after its checkpoint; the later of two lines counts.
    """
    rounds = {
        event["round"]: event
        for event in events
        if event["event"] == kind and stage in (None, event.get("stage"))
    }
    return [rounds[number] for number in sorted(rounds)]


class NamedClient(int):
    """A client's number that prints as its name; in JSON it is the number."""

    name: str

    def __str__(self) -> str:
        """Return the name."""
        return self.name


def names_by_client(partition: Event) -> dict[int, str]:
    """Return the clients' names by number, from the ``partition`` event; empty without names."""
    return dict(zip(partition.get("clients") or [], partition.get("names") or [], strict=False))


def with_names(event: Event, names: Mapping[int, str]) -> Event:
    """Return an event whose clients print as their names."""

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(item) for item in value]
        if isinstance(value, dict):
            return {**value, "client": named(value["client"])} if "client" in value else value
        if not isinstance(value, int) or value not in names:
            return value
        client = NamedClient(value)
        client.name = names[value]
        return client

    return {key: named(event[key]) if key in ("client", "clients") else event[key] for key in event}


def records_of(partition: Event) -> tuple[int, dict[str, int]]:
    """Return the numbers of clients and of records by split in a ``partition`` event."""
    if summary := partition.get("summary"):
        return summary["clients"], summary["records"]
    splits = partition.get("splits") or []
    parts = list(splits[0]) if splits else []
    return len(splits), {part: sum(split[part] for split in splits) for part in parts}


def _plain(value: Any) -> Any:
    """Return the value in types of JSON, non-finite numbers as None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
