"""Networks that are trained side by side: the same bits as one after the other, and no orphans."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fednas_flwr.deploy import whole_run
from fednas_flwr.runs.numbers import is_complete, read_run
from fednas_flwr.runs.run_folder import create_run_folder

pytestmark = pytest.mark.run
LINEAR = ("algorithm=fedavg", "algorithm.network=linear", "stages=[retrain,evaluate,export]")
LINEAR += ("dataset.linear_baseline=false",)


@pytest.fixture
def folders(compose_config, tmp_path):
    def make(*names, rounds=1):
        made = []
        for seed, name in enumerate(names):
            config = compose_config(*LINEAR, f"retrain.rounds={rounds}", f"seed={seed % 2}")
            create_run_folder(replace(config, run_dir=str(tmp_path / name)))
            made.append(tmp_path / name)
        return made

    return make


@pytest.mark.parametrize("cores", [1, 2])
def test_however_many_are_trained_at_once_are_the_same(cores, folders, compose_config, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    config = compose_config(*LINEAR)
    first = folders("a", "b", "c", "d", "e")  # more than are trained at once
    assert dict(whole_run.train_all(config, first)) == dict.fromkeys(first, "")
    again = folders("f", "g")
    assert [whole_run.train(folder, None, math.inf) for folder in again] == ["", ""]
    for one, other in zip(first[:2], again, strict=True):
        assert (one / "model.onnx").read_bytes() == (other / "model.onnx").read_bytes()


def test_those_that_are_trained_at_once_share_the_time(compose_config, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    calls: list[tuple] = []
    monkeypatch.setattr(whole_run, "beside", lambda sent, asked: calls.extend(asked) or [])
    list(whole_run.train_all(compose_config(*LINEAR), [Path(name) for name in "abcde"], limit=60))
    assert [limit for _, limit, _ in calls] == ["30.0s"] * 5  # three at a time, then two


def test_one_that_fails_says_why_and_the_others_go_on(folders, compose_config, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    whole, broken = folders("whole", "broken")
    text = (broken / "config.yaml").read_text()
    (broken / "config.yaml").write_text(text.replace("network: linear", "network: cubic"))
    done = dict(whole_run.train_all(compose_config(*LINEAR), [whole, broken]))
    assert done[whole] == ""
    assert "cubic" in done[broken]
    assert is_complete(whole)


def test_whoever_waits_is_told_how_far_the_networks_are(folders, compose_config, monkeypatch):
    monkeypatch.setattr(whole_run, "POLL_S", 0.01)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    told, made, launch = [], folders("a", "b", rounds=3), whole_run.launch

    def wait(event):
        """Go on once somebody has looked after this event."""
        seen = len(told)
        while event["event"] == "round" and len(told) < seen + 2:
            time.sleep(0.01)

    monkeypatch.setattr(
        whole_run, "launch", lambda *args, **named: launch(*args, **named | {"listeners": [wait]})
    )
    whole_run._train_beside(compose_config(*LINEAR), made, math.inf, told.append)
    assert (told[0]["event"], told[-1]["event"]) == ("stage_started", "stage_finished")
    shares = [event["share"] for event in told[1:-1]]
    assert shares == sorted(shares)
    assert (shares[-1], told[-2]["left"]) == (1.0, None)
    assert {1 / 6, 1 / 3, 2 / 3} <= {*shares}  # while a network is trained, too
    texts = [(event["position"], event["text"]) for event in told if "text" in event]
    assert [place for place, _ in texts] == ["1/2", "2/2"]
    assert texts[0][1] == f"a: accuracy {100 * read_run(made[0]).test_score():.1f} %"


def test_no_process_outlives_the_one_that_has_started_it(folders):
    names = [str(folder) for folder in folders("a", "b", rounds=100_000)]
    script = (
        "import json, os, sys; from pathlib import Path; from fednas_flwr.deploy import whole_run;"
        "from fednas_flwr import compose;"
        "os.sched_getaffinity = lambda process: {0, 1};"
        "names = json.loads(sys.argv[1]);"
        "list(whole_run.train_all(compose(), list(map(Path, names))))"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, json.dumps(names)])
    while not all((Path(name) / "events.jsonl").exists() for name in names):
        assert parent.poll() is None
        time.sleep(0.1)
    while not all(read_run(Path(name)).rounds("retrain") for name in names):
        time.sleep(0.1)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while _alive(Path(names[0])) or _alive(Path(names[1])):
        time.sleep(0.1)


def _alive(folder):
    """The processes that have a file of the folder open."""
    found = []
    for place in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(place)
        except OSError:
            continue
        if target.startswith(f"{folder}/"):
            found.append(target)
    return found
