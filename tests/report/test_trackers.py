"""What MLflow and Weights & Biases are sent; with the real packages where they are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fednas_flwr.api import check, compose
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.report.trackers import Tracker, check_trackers
from fednas_flwr.runs.events import read_events

REPLAYED = """
import sys
from pathlib import Path
from fednas_flwr.runs.events import read_events
from fednas_flwr.report.trackers import TRACKERS
folder = Path(sys.argv[2])
with TRACKERS[sys.argv[1]](folder) as tracker:
    for event in read_events(folder / "events.jsonl"):
        tracker(event)
"""


class Kept(Tracker):
    """Keeps what would be sent."""

    def begin(self, run_folder: Path, settings: Any) -> None:
        self.settings, self.sent, self.ended = dict(settings), {}, None

    def send(self, group: str, values: Any, step: int) -> None:
        self.sent[group, step] = dict(values)

    def end(self, *, failed: bool) -> None:
        self.ended = failed


@pytest.mark.parametrize("fails", [False, True])
def test_numbers_of_every_round_and_how_the_run_ended(
    make_run: Callable[..., Path], fails: bool
) -> None:
    folder = make_run("run", **({"until": "search", "reason": "disk full"} if fails else {}))
    events = read_events(folder / "events.jsonl")
    with Kept(folder) as tracker:
        for event in events:
            tracker(event)
    rounds = [e for e in events if e["event"] == "round"]
    for event in rounds:
        sent = tracker.sent[event["stage"], event["round"]]
        known = {name: v for name, v in event["metrics"].items() if v is not None}
        assert known.items() <= sent.items()
        assert sent["seconds"] == event["seconds"]
    assert ("evaluate", 0) in tracker.sent or fails
    assert tracker.settings["algorithm.name"] == "fed_darts"
    assert tracker.ended is fails


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fednas_flwr.report.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'fednas-flwr\[mlflow\]'"):
        check(compose("trackers=[mlflow]", f"run_dir={tmp_path / 'run'}"))
    with pytest.raises(ConfigError, match="choose one of mlflow, tensorboard, wandb"):
        compose("trackers=[tensorboardx]")
    with pytest.raises(ConfigError, match="more than once"):
        compose("trackers=[wandb,wandb]")
    check_trackers([])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("mlflow", "*.db"), ("wandb", "*.wandb")])
def test_the_packages_take_it(
    make_run: Callable[..., Path], tmp_path: Path, name: str, kind: str
) -> None:
    pytest.importorskip(name)
    environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, "-c", REPLAYED, name, str(make_run("run"))],
        env=os.environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob(kind))
