"""What MLflow and Weights & Biases are sent; with the real packages where they are installed."""

from __future__ import annotations

from contextlib import contextmanager, suppress

import pytest

from fednas_flwr.api import check, compose
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.report.trackers import check_trackers, tracking
from fednas_flwr.runs.events import read_events

from ..processes import told

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


@pytest.mark.parametrize("fails", [False, True])
def test_numbers_of_every_round_and_how_the_run_ended(make_run, fails):
    folder = make_run("run", **({"until": "search", "reason": "disk full"} if fails else {}))
    events = read_events(folder / "events.jsonl")
    sent, settings, ended = {}, {}, []

    @contextmanager
    def kept(run_folder, of_run):
        """Keeps what would be sent."""
        settings.update(of_run)
        try:
            yield lambda group, values, step: sent.update({(group, step): dict(values)})
        except OSError:
            ended.append("failed")
            raise
        ended.append("finished")

    with suppress(OSError), tracking(kept, folder) as listen:
        for event in events:
            listen(event)
        if fails:
            raise OSError("disk full")
    for event in [e for e in events if e["event"] == "round"]:
        of_round = sent[event["stage"], event["round"]]
        known = {name: v for name, v in event["metrics"].items() if v is not None}
        assert (known | {"seconds": event["seconds"]}).items() <= of_round.items()
    assert ("evaluate", 0) in sent or fails
    assert settings["algorithm.name"] == "fed_darts"
    assert ended == ["failed" if fails else "finished"]


def test_a_tracker_that_is_not_installed_is_refused_before_the_run(monkeypatch, tmp_path):
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
def test_the_packages_take_it(make_run, tmp_path, name, kind):
    pytest.importorskip(name)
    environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db", "WANDB_MODE": "offline"}
    told("-c", REPLAYED, name, make_run("run"), env=environment, cwd=tmp_path)
    assert list(tmp_path.rglob(kind))
