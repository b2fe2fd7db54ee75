"""A run that is stopped ends in one sentence, and goes on from its last checkpoint."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fednas_flwr.cli import RUN_FAILED, STOPPED
from fednas_flwr.reporting.events import read_events

MOMENTS = 50
TIMEOUT_S = 900


def fednas(*arguments: str, largest_file: int = -1) -> subprocess.Popen[str]:
    """Start ``fednas run`` in a process group of its own, as a terminal would."""
    limits = (largest_file, largest_file)
    return subprocess.Popen(
        [sys.executable, "-m", "fednas_flwr.cli", "run", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits),
    )


def complete(*arguments: str) -> float:
    """Return how long a run takes, in seconds, that must complete."""
    started = time.monotonic()
    with fednas(*arguments) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, errors) == (0, "")
    return time.monotonic() - started


def stop_when(moment: Callable[[], bool], *arguments: str) -> None:
    """Press Ctrl-C at a moment, and check that the command ends without a trace."""
    with fednas(*arguments) as process:
        while process.poll() is None and not moment():
            time.sleep(0.005)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    # Python itself ends by the signal where it is starting, or ending.
    assert process.returncode in (0, STOPPED, -signal.SIGINT), errors
    assert "ignored" not in errors
    lines = [line for line in errors.splitlines() if line]
    if process.returncode == STOPPED:
        assert lines[-1] == "fednas: stopped."
        assert all(line.startswith("To go on: fednas run resume=") for line in lines[:-1])


def assert_goes_on(folder: Path, whole: Path) -> None:
    """Continue what a folder holds of a run, to the results of one that nobody stopped."""
    if not (folder / "config.yaml").exists():  # stopped before there was a run
        assert not list(folder.glob("*.*"))
        return
    complete(f"resume={folder}")
    for name in ("genotype.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


@pytest.fixture(scope="module")
def overrides(tiny_overrides: list[str]) -> list[str]:
    return [*tiny_overrides, "clients=2", "search_space.num_cells=1"]


@pytest.fixture(scope="module")
def whole(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The folder of a run that nobody stopped, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, complete(*overrides, f"run_dir={folder}")


@pytest.mark.parametrize("event", ["partition", "round", "exported"])
def test_a_run_that_is_stopped_goes_on(
    overrides: list[str], whole: tuple[Path, float], tmp_path: Path, event: str
) -> None:
    log = tmp_path / "run" / "events.jsonl"

    def told() -> bool:
        return log.exists() and event in [told["event"] for told in read_events(log)]

    stop_when(told, *overrides, f"run_dir={tmp_path / 'run'}")
    assert_goes_on(tmp_path / "run", whole[0])


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(MOMENTS))
def test_a_run_that_is_stopped_at_any_moment_goes_on(
    overrides: list[str], whole: tuple[Path, float], tmp_path: Path, moment: int
) -> None:
    folder, seconds = whole
    end = time.monotonic() + seconds * (moment + 0.5) / MOMENTS
    stop_when(lambda: time.monotonic() >= end, *overrides, f"run_dir={tmp_path / 'run'}")
    assert_goes_on(tmp_path / "run", folder)


@pytest.mark.parametrize("largest_file", [2_500, 20_000, 1_000_000])
def test_a_run_on_a_full_disk_goes_on_when_there_is_room(
    overrides: list[str], whole: tuple[Path, float], tmp_path: Path, largest_file: int
) -> None:
    own = (*overrides, f"run_dir={tmp_path / 'run'}")
    with fednas(*own, largest_file=largest_file) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == RUN_FAILED
    (sentence,) = errors.splitlines()
    assert "File too large" in sentence
    assert f"fednas run resume={tmp_path / 'run'}" in sentence
    assert_goes_on(tmp_path / "run", whole[0])
