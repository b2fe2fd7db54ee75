import json

import numpy as np
import pytest
import torch

from fednas_flwr.runs.events import (
    EventLog,
    latest_rounds,
    names_by_client,
    read_events,
    with_names,
)


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
    with EventLog(tmp_path / "events.jsonl") as log:
        log.emit("round", metrics={"loss": value, "list": [1.0, (value,)]}, array=np.array([value]))

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
    with EventLog(path) as log:
        log.emit("warning", message="after")
    assert [event["message"] for event in read_events(path)] == [*whole, "after"]


def test_what_json_cannot_hold_writes_nothing(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        with pytest.raises(TypeError, match="not JSON serializable"):
            log.emit("warning", message=object())
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
    names = names_by_client(partition)
    failed = with_names({"event": "client_failed", "client": 2, "round": 2}, names)
    assert f"client {failed['client']} in round {failed['round']}" == "client va in round 2"
    assert failed == {"event": "client_failed", "client": 2, "round": 2}
    assert json.dumps(failed["client"]) == "2"
    shown = with_names({"clients": [{"client": 0, "n": 1}, {"client": 1}, 2]}, names)["clients"]
    assert [str(one["client"]) for one in shown[:2]] + [str(shown[2])] == ["cleveland", "1", "va"]
    assert with_names({"clients": {"0": 1}}, names) == {"clients": {"0": 1}}
    assert names_by_client({"event": "partition", "clients": [0]}) == {}
