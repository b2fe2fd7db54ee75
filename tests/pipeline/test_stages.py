"""What is kept where a stage fails, and who is asked to test."""

import json
import math

import numpy as np
import pytest
from safetensors.torch import load_file

from fednas_flwr.client.handlers import ANSWERS
from fednas_flwr.data.prepared import make_data, save_partition
from fednas_flwr.data.records import assign_splits
from fednas_flwr.settings.registry import TABLES

from ..refusals import raising
from ..report.conftest import emit


def test_a_network_is_exported_although_its_test_fails(run_inline, monkeypatch):
    monkeypatch.setitem(TABLES["metric"], "mine", lambda probabilities, labels: math.nan)
    done = run_inline(fails=True)
    assert "the metric mine of your own fails" in str(done.error)
    assert done.named("run_finished")[-1]["status"] == "failed"
    assert done.named("exported")[-1]["files"] == ["model.safetensors", "model.onnx"]
    assert load_file(done.folder / "model.safetensors")
    assert "evaluated" not in [event["event"] for event in done.events]


def test_a_training_loss_that_is_not_finite_ends_the_run(run_inline, monkeypatch):
    monkeypatch.setitem(TABLES["loss"], "odd", lambda logits, labels: logits.sum() * math.nan)
    done = run_inline("training.loss=odd", fails=True)
    assert "train_loss=nan is not finite: lower the learning rate" in str(done.error)
    assert done.named("run_finished")[-1]["status"] == "failed"
    assert not (done.folder / "genotype.json").exists()


def test_a_client_that_was_expelled_stays_out_of_a_resumed_run(run_inline):
    first = run_inline("clients=3", "runtime.quorum=0.6", "rounds=1", "retrain.rounds=1")
    evaluated = first.the("evaluated")
    assert 1 in [result["client"] for result in evaluated["clients"]]
    place = {"stage": "retrain", "round": 1, "action": "train.weights", "client": 1}
    emit(first.folder, "client_left", **place, reason="nonsense", expelled=True)
    evaluated = run_inline(resume=first.folder).named("evaluated")[-1]
    assert 1 not in [result["client"] for result in evaluated["clients"]]


def test_clients_without_test_records_are_not_asked_to_test(finished_run, compose_config, tmp_path):
    config = compose_config()
    prepared, _ = make_data(config)
    splits = assign_splits(prepared.train.ids, **config.dataset.division)
    without = np.flatnonzero(splits != 2)[:30]
    others = np.setdiff1d(np.arange(len(splits)), without)
    save_partition(tmp_path / "parts.json", [without, others[::2], others[1::2]])
    own = ("partition=saved", f"partition.file={tmp_path / 'parts.json'}", "rounds=1")
    more = ("retrain.rounds=1", "evaluation.personalised=true", "runtime.quorum=1")
    done = finished_run(*own, *more)
    for kind in ("clients", "personalised"):
        assert [own["client"] for own in done.the("evaluated")[kind]] == [1, 2]
    assert not done.named("client_failed", "warning")


@pytest.mark.parametrize("fraction", ["0", ".0001"])
def test_a_run_without_test_records_completes(finished_run, fraction):
    train = 0.6 if fraction == "0" else 0.5999
    fractions = json.dumps({"train": train, "validation": 0.4, "test": float(fraction)})
    done = finished_run(f"dataset.fractions={fractions}".replace('"', ""), "rounds=1")
    assert done.named("evaluated")[-1]["clients"] == []
    assert not done.named("client_failed", "warning")


def test_clients_find_the_statistics_of_a_table_together(finished_run, run_inline, tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{rng.normal(40 + 20 * (i % 2), 10):.2f},{'nN'[i % 2]},{i % 3}" for i in range(200)]
    (tmp_path / "table.csv").write_text("\n".join(["age,ward,ill", *rows]))
    own = ("dataset=csv", f"dataset.root={tmp_path / 'table.csv'}", "dataset.ignore=[ward]")
    own += ("partition=column", "partition.column=ward", "clients=2", "search_space=mlp_small")
    small = ("search_space.channels=8", "retrain.channels=8", "rounds=1", "retrain.rounds=1")
    done = finished_run(*own, *small)
    assert "the column of clients holds N and n" in str(done.named("data")[0]["odd"])
    prepared, _ = make_data(done.config)
    splits = assign_splits(prepared.train.ids, **done.config.dataset.division)
    ages = prepared.train.features[splits == 0, 0].double().numpy()
    found = done.named("statistics")[-1]
    assert found["mean"] == pytest.approx([ages.mean()])
    assert found["std"] == pytest.approx([ages.std()])
    assert done.named("exported")[-1]["inputs"]["mean"] == found["mean"]
    # a run that goes on keeps those that it began with, whatever the clients tell now
    events = done.folder / "events.jsonl"
    lines = events.read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["event"] in ("run_started", "statistics")]
    changed = [line.replace(str(found["mean"][0]), "55.5") for line in kept]
    events.write_text("\n".join(changed) + "\n")
    assert run_inline(resume=done.folder).named("exported")[-1]["inputs"]["mean"] == [55.5]


def test_clients_that_cannot_test_the_network_do_not_end_the_run(run_inline, monkeypatch, tmp_path):
    """Nor does it that there is no git, which would tell the commit."""
    monkeypatch.setenv("PATH", str(tmp_path))

    monkeypatch.setitem(ANSWERS, "evaluate.model", raising(ValueError("the disk is full")))
    own = ("algorithm=fedavg", "algorithm.network=linear", "retrain.rounds=1")
    done = run_inline(*own, "stages=[retrain,evaluate,export]")
    assert done.named("evaluated")[-1]["clients"] == []
    assert "the disk is full" in done.named("warning")[-1]["message"]
    assert (done.events[0]["event"], done.events[0]["commit"]) == ("run_started", None)
    assert done.named("run_finished")[-1]["status"] == "completed"
