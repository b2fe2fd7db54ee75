"""What MLflow and Weights & Biases are sent; with the real packages where they are installed."""

from contextlib import contextmanager, suppress

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fednas_flwr.api import check, compose
from fednas_flwr.report.trackers import TRACKERS, check_trackers, tracking
from fednas_flwr.runs.events import read_events

from ..processes import told
from ..refusals import refuses
from .conftest import ROUND

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
    config = compose("trackers=[mlflow]", f"run_dir={tmp_path / 'run'}")
    refuses(r"pip install 'fednas-flwr\[mlflow\]'", check, config)
    refuses("choose one of mlflow, tensorboard, wandb", compose, "trackers=[tensorboardx]")
    refuses("more than once", compose, "trackers=[wandb,wandb]")
    check_trackers([])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("mlflow", "*.db"), ("wandb", "*.wandb")])
def test_the_packages_take_it(make_run, tmp_path, name, kind):
    pytest.importorskip(name)
    environment = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/runs.db", "WANDB_MODE": "offline"}
    told("-c", REPLAYED, name, make_run("run"), env=environment, cwd=tmp_path)
    assert list(tmp_path.rglob(kind))


# --- TensorBoard


def written(folder, events):
    """Return what TensorBoard reads of the events."""
    with TRACKERS["tensorboard"](folder) as writer:
        for event in events:
            writer(event)
    read = EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return read


def test_every_metric_is_a_scalar_over_rounds(make_run):
    folder = make_run("run")
    read = written(folder, read_events(folder / "events.jsonl"))
    tags = set(read.Tags()["scalars"])
    assert {"search/train_loss", "search/skip_share", "retrain/mb_sent"} <= tags
    loss = [(scalar.step, round(scalar.value, 3)) for scalar in read.Scalars("search/train_loss")]
    assert loss == [(1, 2.0), (2, 1.0), (3, 0.667)]
    assert read.Scalars("evaluate/linear_accuracy")[0].value == 0.75
    assert read.Scalars("evaluate/central_f1")[0].value == 0.625


def test_a_number_that_is_missing_is_left_out(tmp_path):
    event = {"event": "round", "time": "2026-01-01T00:00:00+00:00", "stage": "search", "round": 1}
    read = written(tmp_path, [ROUND | event | {"metrics": {"train_loss": None}}])
    assert read.Tags()["scalars"] == ["search/seconds", "search/mb_sent", "search/mb_received"]


def test_reports_do_not_load_torch():
    modules = ("comparison", "model_card", "terminal", "html_report", "trackers")
    code = "".join(f"import fednas_flwr.report.{name}\n" for name in modules)
    code += "import sys\nprint([n for n in ('torch', 'flwr', 'pandas') if n in sys.modules])"
    assert told("-c", code).strip() == "[]"


def test_what_clients_of_a_private_run_measured_is_called_noised(make_run):
    folder = make_run("run", private=True)
    read = written(folder, read_events(folder / "events.jsonl"))
    tags = set(read.Tags()["scalars"])
    assert {"search/validation_loss_noised", "search/alpha_entropy", "retrain/mb_sent"} <= tags
    assert not {"search/validation_loss", "evaluate/linear_accuracy"} & tags
    assert read.Scalars("search/validation_loss_noised")[-1].value == -2.0
