"""A run that is stopped ends in one sentence, and goes on from its last checkpoint."""

import os
import signal
import subprocess
import time

import pytest

from fednas_flwr.base.processes import ALONE
from fednas_flwr.cli import RUN_FAILED, STOPPED
from fednas_flwr.runs.events import read_events
from fednas_flwr.runs.numbers import read_run

from ..finished_runs import assert_same_files
from ..processes import started
from ..rows import by_hand

MOMENTS = 50
TIMEOUT_S = 900


def complete(*arguments):
    """Return how long a run takes in one process, in seconds, that must complete."""
    begun = time.monotonic()
    with started("run", *arguments, env={ALONE: "1"}) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (0, "")
    return time.monotonic() - begun


def stop_when(moment, *arguments, by=signal.SIGINT):
    """Press Ctrl-C at a moment, or kill, and check that the command ends without a trace."""
    with started("run", *arguments) as process:
        while process.poll() is None and not moment():
            time.sleep(0.005)
        if process.poll() is None:
            os.killpg(process.pid, by)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    # Python itself ends by the signal where it is starting, or ending.
    assert process.returncode in (0, STOPPED, -by), errors
    assert "ignored" not in errors
    lines = [line for line in errors.splitlines() if line]
    if process.returncode == STOPPED:
        assert lines[-1] == "fednas: stopped."
        assert all(line.startswith("to go on: fednas run resume=") for line in lines[:-1])


def events_of(folder):
    """The events of a run, none if it has not begun."""
    log = folder / "events.jsonl"
    return read_events(log) if log.exists() else []


def assert_goes_on(folder, whole):
    """Continue what a folder holds of a run, to the results of one that nobody stopped."""
    if not (folder / "config.yaml").exists():  # stopped before there was a run
        assert not list(folder.glob("*.*"))
        return
    before = events_of(folder)
    complete(f"resume={folder}")
    assert_same_files(folder, whole)
    runs = read_run(folder), read_run(whole)
    assert runs[0].events[: len(before)] == before
    for stage in ("search", "retrain"):
        one, other = ([event["metrics"] for event in run.rounds(stage)] for run in runs)
        assert one == other


@pytest.fixture(scope="module")
def overrides(tiny_overrides):
    return [*tiny_overrides, "clients=2", "search_space.num_cells=1"]


@pytest.fixture(scope="module")
def whole(overrides, tmp_path_factory):
    """The folder of a run that nobody stopped, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, complete(*overrides, f"run_dir={folder}")


@pytest.mark.run
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("event", [by_hand("partition"), "round", by_hand("exported")])
def test_a_run_that_is_stopped_or_killed_goes_on(overrides, whole, tmp_path, event, by):
    folder = tmp_path / "run"

    def told():
        return event in [told["event"] for told in events_of(folder)]

    stop_when(told, *overrides, f"run_dir={folder}", by=by)
    if by == signal.SIGINT and event == "round":
        assert STOPPED == 130
        ended = events_of(folder)[-1]
        assert ended["event"] == "run_finished"
        assert ended["status"] == "completed" or ended["reason"] == "stopped by Ctrl-C"
    assert_goes_on(folder, whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_run_that_is_stopped_at_any_moment_goes_on(overrides, whole, tmp_path, moment):
    folder, seconds = whole
    end = time.monotonic() + seconds * (moment + 0.5) / MOMENTS
    stop_when(lambda: time.monotonic() >= end, *overrides, f"run_dir={tmp_path / 'run'}")
    assert_goes_on(tmp_path / "run", folder)


@pytest.mark.run
@pytest.mark.parametrize("largest_file", [by_hand(3_500), 20_000, by_hand(50_000)])
def test_a_run_on_a_full_disk_goes_on_later(overrides, whole, tmp_path, largest_file):
    own = (*overrides, f"run_dir={tmp_path / 'run'}")
    with started("run", *own, largest_file=largest_file) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == RUN_FAILED
    (sentence,) = errors.splitlines()
    assert "File too large" in sentence
    assert f"fednas run resume={tmp_path / 'run'}" in sentence
    assert_goes_on(tmp_path / "run", whole[0])


def descendants(pid):
    """Return ids and command lines of the processes that a process and those of it have started."""
    listed = subprocess.run(["ps", "-wweo", "pid=,ppid=,args="], capture_output=True, text=True)
    rows = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    found, parents = [], {pid}
    while parents:
        children = [(int(own), args) for own, parent, args in rows if int(parent) in parents]
        found += children
        parents = {own for own, _ in children}
    return found


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("victim", ["ray::InProcessGrid", "raylet/raylet", "gcs/gcs_server"])
@pytest.mark.parametrize("stage", ["search", "retrain"])
def test_a_run_outlives_processes_of_ray(overrides, whole, tmp_path, stage, victim):
    folder = tmp_path / "run"
    own = ("runtime=ray", "runtime.client_cpus=0.5", "runtime.quorum=1", f"run_dir={folder}")

    def begun():
        return any(e["event"] == "round" and e["stage"] == stage for e in events_of(folder))

    with started("run", *overrides, *own) as process:
        while process.poll() is None and not begun():
            time.sleep(0.005)
        victims = [pid for pid, command in descendants(process.pid) if victim in command]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert victims
    assert "Traceback" not in errors
    if process.returncode == RUN_FAILED:
        sentence = errors.splitlines()[-1]
        assert sentence.startswith("fednas: QuorumError: ")
        assert "the client's process has died" in sentence
        assert sentence.endswith(f"fednas run resume={folder}")
        complete(f"resume={folder}")
    else:  # workers go on without what has started them, and idle ones are not missed
        assert process.returncode == 0
    assert_same_files(folder, whole[0])
