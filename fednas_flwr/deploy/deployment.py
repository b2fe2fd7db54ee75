"""``runtime=deployment``: submission of a run to a SuperLink through Flower's own commands.

The server app prints its events as lines of the run's log. :func:`deploy` reads them there, so that
a person sees the same as in an inline run. Main function: :func:`deploy`.
"""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.deploy.bundle import CONFIG_KEY, RESUMED_KEY, write_bundle
from fednas_flwr.report.html_report import write_report
from fednas_flwr.runs.events import STOPPED, Event, EventLog, Listener, read_events, reason_of
from fednas_flwr.runs.numbers import EVENTS_FILE
from fednas_flwr.runs.run_folder import occupied
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.settings import Config, dump_config, run_settings

BUNDLE = "bundle"  # folder of the Flower app in the run folder; Flower allows no underscore
RUN_CONFIG_FILE = "run-config.toml"
EVENT_MARK = "fednas-event "  # prefix of log lines that are events
SUPERLINK_BACK_S = 600.0  # to wait for a SuperLink that restarts; its runs continue meanwhile
RETRY_S = 2.0
_LOG_LINES_KEPT = 200


def print_event(event: Event) -> None:
    """Write an event as one marked line of the server app's log."""
    sys.stdout.write(f"{EVENT_MARK}{json.dumps(event)}\n")  # one call, so that lines stay whole
    sys.stdout.flush()


def deploy(config: Config, *, listeners: Iterable[Listener], resumed: bool) -> None:
    """Run ``config`` to its end on the SuperLink that ``runtime.superlink`` names.

    Args:
        config: Configuration with ``run_dir`` set to an existing folder; the run folder has the
            same path on the SuperLink's machine.
        listeners: Called with the events that the server app prints.
        resumed: True if the folder holds a run that is to be continued.

    Raises:
        ConfigError: The server app found that a setting does not fit.
        QuorumError: Too few clients answered.
        RuntimeError: A Flower command failed, e.g. because the SuperLink is unknown or was not
            reached for ten minutes; or the run failed, and then the message is the server's error
            and the cause its log.
    """
    folder = config.folder
    bundle = write_bundle(folder / BUNDLE)
    run_config = write_run_config(folder / RUN_CONFIG_FILE, config, resumed=resumed)
    assert isinstance(config.runtime, run_settings.Deployment)
    superlink = str(config.runtime.superlink)
    run_id = str(_flwr_json("run", str(bundle), superlink, "-c", str(run_config))["run-id"])
    listeners = list(listeners)
    events: list[Event] = []
    log: deque[str] = deque(maxlen=_LOG_LINES_KEPT)
    try:
        with closing(_follow(run_id, superlink)) as lines:
            for line in lines:
                event = read_event(line)
                if event is None:
                    log.append(line)
                    continue
                events.append(event)
                for listener in listeners:
                    listener(event)
    except BaseException as error:  # also Ctrl-C: without its launcher nobody would stop the run
        with suppress(RuntimeError):
            _flwr_json("stop", run_id, superlink)
        with suppress(Exception):  # nothing may hide why the run has ended
            _complete(folder, events, reason_of(error))
        raise
    status, details = _status(run_id, superlink)
    otherwise = "" if status == "finished:completed" else f"{details} ({status})"
    _complete(folder, events, otherwise, *listeners)
    if otherwise:
        raise _failure(events, otherwise) from RuntimeError(
            "the server app's log:\n" + "\n".join(log)
        )


def write_run_config(path: Path, config: Config, *, resumed: bool) -> Path:
    """Write Flower's run configuration, flat scalars in TOML, and return its path.

    JSON encoded once more as a JSON string is ASCII with only quotes and backslashes escaped, which
    is also a TOML string.
    """
    values = {CONFIG_KEY: dump_config(config), RESUMED_KEY: resumed}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()))
    return path


def read_event(line: str) -> Event | None:
    """Return the event in a line of the log; None for one of Flower's own lines."""
    with suppress(ValueError):
        if line.startswith(EVENT_MARK):
            return json.loads(line.removeprefix(EVENT_MARK))
    return None


def read_status(listing: dict[str, Any]) -> tuple[str, str]:
    """Return the status, such as ``finished:completed``, and details from ``flwr ls --run-id``."""
    (run,) = listing["runs"]
    details = str(run["status-details"])
    return str(run["status"]), "" if details == "N/A" else details


def _failure(events: list[Event], otherwise: str) -> Exception:
    """Return the server's error as an inline run would raise it; ``otherwise`` if it sent none."""
    reasons = [event["reason"] for event in events if event["event"] == "run_finished"]
    known_here = reasons and reasons[-1] and reasons[-1] not in STOPPED.values()
    reason = str(reasons[-1]) if known_here else otherwise
    kind, _, text = reason.partition(": ")
    known: dict[str, type[Exception]] = {"ConfigError": ConfigError, "QuorumError": QuorumError}
    return known[kind](text) if kind in known else RuntimeError(reason)


def _complete(folder: Path, events: list[Event], reason: str, *listeners: Listener) -> None:
    """Write the events here, too, if the SuperLink's run folder is elsewhere, then a report.

    If a reason is given, and the server was killed before it could write why the run has ended,
    the reason is written.
    """
    file = folder / EVENTS_FILE
    with suppress(ConfigError), occupied(folder):  # occupied if the server still writes
        known = read_events(file) if file.exists() else []
        if elsewhere := events and events[-1] not in known:
            known += events
            with file.open("a") as stream:
                stream.writelines(json.dumps(event) + "\n" for event in events)
        ends = [event for event in known if event["event"] in ("run_started", "run_finished")]
        if cut := (reason and ends and ends[-1]["event"] == "run_started"):
            seconds = known[-1]["elapsed"] - ends[-1]["elapsed"]
            with EventLog(file, listeners) as log:
                log.emit("run_finished", status="failed", reason=reason, seconds=seconds)
        if cut or elsewhere:
            write_report(folder)


def _follow(run_id: str, superlink: str) -> Generator[str]:
    """Yield the lines of a run's log until the run has finished.

    ``flwr log`` starts again if the connection breaks; lines that were seen before are skipped.
    """
    seen, finished = 0, False
    while not finished:
        command = [*_FLWR, "log", run_id, superlink, "--stream"]
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        ) as process:
            assert process.stdout is not None
            try:
                for number, line in enumerate(process.stdout):
                    if number >= seen:
                        seen += 1
                        yield line.rstrip("\n")
            finally:
                process.terminate()
        finished = _status(run_id, superlink)[0].startswith("finished")


def _status(run_id: str, superlink: str) -> tuple[str, str]:
    """Return status and details of a run; wait for a SuperLink that is away, and print that."""
    began, has_warned = time.monotonic(), False
    while True:
        try:
            return read_status(_flwr_json("ls", superlink, "--run-id", run_id))
        except RuntimeError as error:
            if time.monotonic() > began + SUPERLINK_BACK_S:
                raise
            if not has_warned:
                print(f"{error} Waiting {SUPERLINK_BACK_S / 60:.0f} minutes.", file=sys.stderr)
                has_warned = True
            time.sleep(RETRY_S)


def _flwr_json(*arguments: str) -> dict[str, Any]:
    """Run a ``flwr`` command and parse the JSON that it prints.

    Raises:
        RuntimeError: The command failed; the message is Flower's.
    """
    done = subprocess.run(
        [*_FLWR, *arguments, "--format", "json"], capture_output=True, text=True, encoding="utf-8"
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {"success": False, "error-message": done.stdout + done.stderr}
    if done.returncode or not answer.get("success"):
        message = " ".join(str(answer.get("error-message", "no reason was given")).split())
        raise RuntimeError(f"flwr {arguments[0]} failed: {message}")
    return answer


_FLWR = (sys.executable, "-m", "flwr.cli.app")
