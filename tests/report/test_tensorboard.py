from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fednas_flwr.report.trackers import TRACKERS
from fednas_flwr.runs.events import read_events

from ..processes import told
from .conftest import ROUND


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
    code += (
        "import sys\nprint([name for name in ('torch', 'flwr', 'pandas') if name in sys.modules])"
    )
    assert told("-c", code).strip() == "[]"


def test_what_clients_of_a_private_run_measured_is_called_noised(make_run):
    folder = make_run("run", private=True)
    read = written(folder, read_events(folder / "events.jsonl"))
    tags = set(read.Tags()["scalars"])
    assert {"search/validation_loss_noised", "search/alpha_entropy", "retrain/mb_sent"} <= tags
    assert not {"search/validation_loss", "evaluate/linear_accuracy"} & tags
    assert read.Scalars("search/validation_loss_noised")[-1].value == -2.0
