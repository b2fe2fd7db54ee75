import json
import re

import numpy as np
import pytest
import torch

from fednas_flwr.models.metrics import detailed
from fednas_flwr.report.html_report import render_report
from fednas_flwr.report.templates import (
    count,
    duration,
    mean_and_deviation,
    num_bytes,
    percent,
    sentence,
)
from fednas_flwr.runs import events
from fednas_flwr.runs.events import EventLog, latest_rounds, read_events, with_names
from fednas_flwr.runs.numbers import METRICS, read_run
from fednas_flwr.search.objective import Objective

from ..refusals import refuses
from .conftest import ROUND, emit

NAMES = (
    "central_accuracy central_f1 central_auroc central_average_precision central_log_loss "
    "central_r2 central_rmse central_mae accuracy_without_skip accuracy_without_cells "
    "released_auroc client_accuracy personalised_accuracy linear_accuracy linear_f1 "
    "linear_auroc linear_r2 linear_rmse linear_mae trees_accuracy trees_f1 trees_auroc "
    "trees_r2 trees_rmse trees_mae federated_accuracy federated_f1 federated_auroc "
    "federated_r2 federated_rmse federated_mae num_parameters multiply_adds latency_ms "
    "search_seconds retrain_seconds exchanges traffic_mb epsilon clients_lost"
).split()


def test_numbers_of_a_finished_run(make_run):
    run = read_run(make_run("run"))
    assert run.status == "completed"
    assert run.config["algorithm"] == {"name": "fed_darts", "alpha_lr": 3e-4}
    numbers = run.numbers()
    assert [*numbers] == NAMES
    told = {"central_f1": 0.625, "linear_f1": 0.5, "client_accuracy": 0.8, "traffic_mb": 15.0}
    told |= {"search_seconds": 4.5, "retrain_seconds": 3.0}
    assert {name: numbers[name] for name in told} == pytest.approx(told)


def test_every_metric_has_a_label_of_its_own_and_scores_are_the_larger_the_better():
    assert len({metric.label for metric in METRICS}) == len(NAMES)
    scores = {metric.name for metric in METRICS if metric.is_score}
    models = tuple("accuracy central client federated linear personalised released trees".split())
    errors = {metric.name for metric in METRICS if metric.unit == "error"}
    assert errors == {name for name in NAMES if name.endswith(("_rmse", "_mae", "_loss"))}
    assert scores == {n for n in NAMES if n.startswith(models)} - {"clients_lost"} - errors


def test_a_run_that_was_killed_and_resumed(tmp_path):
    failed = {"action": "train.search", "client": 0, "reason": "late"}
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("run_started", resumed=False)
        log.emit("stage_started", stage="search", rounds=3)
        for number in (1, 2):
            log.emit("client_failed", stage="search", round=number, **failed)
            log.emit("round", stage="search", round=number, bytes_sent=10, bytes_received=0)
            log.emit("alphas", round=number, alphas={"normal": [[0.0]]}, ops=["a"], cells={})
    killed = read_run(tmp_path)
    assert (killed.status, killed.reason) == ("unfinished", "")
    assert killed.numbers()["central_accuracy"] is None
    with EventLog(path) as log:
        log.emit("run_started", resumed=True)
        log.emit("stage_started", stage="search", rounds=3)
        for number in (2, 3):
            log.emit("round", stage="search", round=number, bytes_sent=20, bytes_received=5)
            log.emit("alphas", round=number, alphas={"normal": [[9.0]]}, ops=["a"], cells={})
        log.emit("stage_finished", stage="search", seconds=100.0)
        log.emit("run_finished", status="failed", reason="quorum lost")
    run = read_run(tmp_path)
    assert (run.status, run.reason, len(run.attempts())) == ("failed", "quorum lost", 2)
    assert run.traffic("search") == (10 + 20 + 20, 10)
    assert [failure["round"] for failure in run.failures()] == [1]  # round 2 went well in the end
    assert [event["alphas"]["normal"][0][0] for event in run.alphas()] == [0.0, 9.0, 9.0]
    first = killed.attempts()[0]
    lost = first[-1]["elapsed"] - first[1]["elapsed"]
    assert run.stage_seconds() == {"search": pytest.approx(100.0 + lost)}


def test_traffic_is_told_per_client_and_round(tmp_path):

    def shares():
        section = render_report(tmp_path).partition("Bytes in all rounds")[2].partition("</table>")
        return re.findall(r'<td class="num">([^<]*)</td></tr>', section[0])

    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("run_started", resumed=False)
        for number, stage in ((1, "search"), (2, "search"), (1, "retrain")):
            told = ROUND | {"bytes_sent": 100, "bytes_received": 50, "rounds": 2}
            told["clients"] = {str(client): {} for client in range(5 if stage == "search" else 3)}
            log.emit("round", stage=stage, round=number, **told)
    assert shares() == ["30 B", "50 B", "35 B"]


def test_the_newest_schedule_counts_and_what_was_spent_since(make_run):
    folder = make_run("run", private=True)
    assert read_run(folder).numbers()["epsilon"] == pytest.approx(5.1001)
    assert read_run(folder).privacy_spent() == {0: 2.9, 1: 2.9}
    accepted = read_run(folder).privacy
    at_end = {"prv": {"train": 7.5, "validation": 0.1}}  # others have released meanwhile
    emit(folder, "privacy_spent", clients=[{"client": 1, "spent": 2.9, "epsilon": at_end}])
    ended = read_run(folder)
    assert ended.numbers()["epsilon"] == 7.5
    before = accepted["clients"][1]["epsilon"]["prv"]
    assert ended.privacy["clients"][1]["epsilon"]["prv"] == before | {"train": 7.5}
    emit(folder, "privacy", schedule=accepted["schedule"], clients=accepted["clients"][:1])
    resumed = read_run(folder)
    assert resumed.numbers()["epsilon"] == 3.1001
    assert resumed.privacy_spent() == {}


def test_a_client_that_left_counts_once_and_not_if_a_resume_undid_it(tmp_path):
    place = {"stage": "search", "action": "train.search", "reason": "its budget has ended"}
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("run_started", resumed=False)
        for client in (0, 1):
            log.emit("client_left", round=2, client=client, **place)
        log.emit("round", stage="search", round=2)
    assert [e["client"] for e in read_run(tmp_path).departures()] == [0, 1]
    assert read_run(tmp_path).failures() == []
    with EventLog(path) as log:
        log.emit("run_started", resumed=True)
        log.emit("client_left", round=2, client=1, **place)
        log.emit("round", stage="search", round=2)
    assert [e["client"] for e in read_run(tmp_path).departures()] == [1]


def test_a_lead_is_of_the_same_test_records(tmp_path):
    """Two networks differ in 8 records of 400: their intervals overlap, yet the lead is sure."""
    labels = torch.arange(400) % 2
    found, rival = torch.zeros(400, 2), torch.zeros(400, 2)
    right = torch.arange(400) >= 100
    for logits, hits in ((found, right), (rival, right & (torch.arange(400) < 392))):
        logits[torch.arange(400), torch.where(hits, labels, 1 - labels)] = 1.0
    central, linear = (detailed(x, labels, objective=Objective(), seed=3) for x in (found, rival))
    (low, _), (_, high) = (one["intervals"]["accuracy"] for one in (central, linear))
    assert low < high
    told = {"central": central, "linear": linear, "clients": [], "personalised": []}
    emit(tmp_path, "evaluated", **told)
    run = read_run(tmp_path)
    ahead = (run.scores("central")["accuracy"] - linear["accuracy"]) * 400
    low, high = run.lead("the pooled linear model")
    assert ahead == pytest.approx(8)
    assert 0 < 400 * low < ahead < 400 * high
    assert "better than simpler models, by more than chance" in sentence("verdict", run)
    del linear["resamples"]
    emit(tmp_path, "evaluated", **told)
    alone = read_run(tmp_path)
    assert "a lead that chance can explain" in sentence("verdict", alone)
    low, high = alone.lead("the pooled linear model")
    assert [low, high] == [end - linear["accuracy"] for end in central["intervals"]["accuracy"]]
    emit(
        tmp_path, "evaluated", **told | {"linear": linear | {"accuracy": 0.1}}
    )  # below the majority
    assert "better than simpler models, by" in sentence("verdict", read_run(tmp_path))
    unsure = {"linear": None, "central": central | {"log_loss": 0.75}}
    emit(tmp_path, "evaluated", **told | unsure)
    assert "no simpler model was trained." in sentence("verdict", read_run(tmp_path))
    assert "log loss 0.750, or 0.693 if each class" in sentence("attention", read_run(tmp_path))


# --- the file of events


def test_events_come_back_and_reach_the_listeners(tmp_path):
    seen = []
    with EventLog(tmp_path / "new" / "events.jsonl", listeners=[seen.append]) as log:
        log.emit("warning", message="ä <b>")
        log.emit("alphas", round=1, alphas={"normal": torch.tensor([[1.0, 2.0]])})
    events = read_events(tmp_path / "new" / "events.jsonl")
    assert events == seen
    warning, alphas = events
    assert (warning["event"], warning["message"]) == ("warning", "ä <b>")
    assert (alphas["event"], alphas["alphas"]) == ("alphas", {"normal": [[1.0, 2.0]]})
    assert warning["time"].endswith("+00:00")
    assert 0 <= warning["elapsed"] <= alphas["elapsed"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf"), torch.nan])
def test_a_number_that_is_not_finite_becomes_null(tmp_path, value):
    metrics = {"loss": value, "list": [1.0, (value,)]}
    emit(tmp_path, "round", metrics=metrics, array=np.array([value]))

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "events.jsonl").read_text(), parse_constant=refuse)
    assert line["metrics"] == {"loss": None, "list": [1.0, [None]]}
    assert line["array"] == [None]


@pytest.mark.parametrize("lost", [1, 2, 20])
def test_a_torn_line_is_left_out_and_not_glued_to_the_next(tmp_path, lost):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.emit("warning", message="first")
        log.emit("warning", message="torn")
    path.write_bytes(path.read_bytes()[:-lost])
    whole = ["first"] if lost > 1 else ["first", "torn"]  # only the line's end is lost
    assert [event["message"] for event in read_events(path)] == whole
    emit(tmp_path, "warning", message="after")
    assert [event["message"] for event in read_events(path)] == [*whole, "after"]


def test_what_json_cannot_hold_writes_nothing(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        refuses("not JSON serializable", log.emit, "warning", error=TypeError, message=object())
        log.emit("warning", message="fine")
    assert [event["message"] for event in read_events(path)] == ["fine"]


def test_later_rounds_replace_earlier_ones():
    places = [("search", 1), ("search", 2), ("search", 3), ("retrain", 2), ("search", 2)]
    events = [
        {"event": "round", "stage": stage, "round": number, "seconds": seconds}
        for (stage, number), seconds in zip(places, (1.0, 2.0, 3.0, 9.0, 20.0), strict=True)
    ]
    assert latest_rounds(events, "search") == [events[0], events[4], events[2]]


def test_clients_are_printed_by_their_names_and_stay_numbers():
    partition = {"event": "partition", "clients": [0, 2], "names": ["cleveland", "va"]}
    names = events.names_by_client(partition)
    failed = with_names({"event": "client_failed", "client": 2, "round": 2}, names)
    assert f"client {failed['client']} in round {failed['round']}" == "client va in round 2"
    assert failed == {"event": "client_failed", "client": 2, "round": 2}
    assert json.dumps(failed["client"]) == "2"
    shown = with_names({"clients": [{"client": 0, "n": 1}, {"client": 1}, 2]}, names)["clients"]
    assert [str(one["client"]) for one in shown[:2]] + [str(shown[2])] == ["cleveland", "1", "va"]
    assert with_names({"clients": {"0": 1}}, names) == {"clients": {"0": 1}}
    assert events.names_by_client({"event": "partition", "clients": [0]}) == {}


# --- Numbers with their units


SHOWN = {
    count: {
        *((None, "–"), (0, "0"), (9_999, "9999"), (12_345, "12.3 k"), (3_349_000, "3.35 M")),
        *((999_499, "999 k"), (999_500, "1 M"), (-999_500, "-1 M"), (999_600_000, "1 G")),
        *((9.996e11, "1 T"), (9.996e14, "1000 T"), (5e15, "5000 T")),
    },
    num_bytes: {
        *((None, "–"), (512, "512 B"), (7_720_000, "7.72 MB"), (999, "999 B"), (1_000, "1 kB")),
        *((999_499, "999 kB"), (999_500, "1 MB"), (999_600_000, "1 GB"), (9.996e11, "1 TB")),
        (5e15, "5000 TB"),
    },
    duration: {
        *((8.24, "8.2 s"), (59.96, "1:00 min"), (185, "3:05 min")),
        *((3599.6, "1:00 h"), (7800, "2:10 h")),
    },
    percent: {(0.9144, "91.4 %"), (None, "–")},
    mean_and_deviation: {
        *(((), "–"), ((0.5,), "0.500"), ((1.0, 3.0), "2.00 ± 1.41")),
        *(((1e6, 1e6), "1000000 ± 0"), ((0,), "0")),
    },
}


@pytest.mark.parametrize("shown", SHOWN)
def test_numbers_with_their_units(shown):
    assert {(value, shown(value)) for value, _ in SHOWN[shown]} == SHOWN[shown]
