"""``retrain.evaluate_every``: validation records of retraining are measured on, or trained on."""

import pytest
import torch

from fednas_flwr.client.making import make_client
from fednas_flwr.data.loaders import Split
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.metrics import evaluate
from fednas_flwr.models.networks import make_network
from fednas_flwr.models.prediction import read_model

from ..rows import seldom
from ..watched import noting

LINEAR = ("dataset=digits", "algorithm=fedavg", "algorithm.network=linear", "clients=2")
LINEAR += ("stages=[retrain,evaluate,export]", "retrain.rounds=3", "retrain.batch_size=64")


@pytest.mark.parametrize("exchange", ["models", seldom("gradients")])
@pytest.mark.parametrize("every", [seldom(0), 1, seldom(2)])
def test_validation_records_are_measured_on_or_trained_on(every, exchange, quick_run, monkeypatch):
    def rows(_, split, indices, device):
        """How many records the data set has, and which of them are in the batch."""
        return len(split.features), {*split.rows[indices].tolist()}

    read = noting(monkeypatch, Split, "batch", rows)
    own = (f"retrain.evaluate_every={every}", f"retrain.exchange={exchange}")
    run = quick_run(*LINEAR, *own, "dataset.linear_baseline=false")
    rounds = [e for e in run.events if e["event"] == "round" and e["stage"] == "retrain"]
    measured = ["validation_loss" in e["metrics"] for e in rounds]
    assert measured == {0: [False] * 3, 1: [True] * 3, 2: [False, True, True]}[every]
    data = make_data(run.config)
    clients = [make_client(run.config, i, data=data, networks={}).data for i in range(2)]
    train = {r for c in clients for r in c.train.rows.tolist()}
    held = {r for c in clients for r in c.validation.rows.tolist()}
    # a batch with records of both parts is one of training; the checks before look at all records
    batches = [rows for size, rows in read if size == len(data[0].train) and len(rows) <= 64]
    assert any(train & rows and held & rows for rows in batches) == (every == 0)
    assert ("overfitting is invisible" in (run.folder / "report.html").read_text()) == (every == 0)
    if every == 0:
        return
    network = read_model(run.folder / "model.safetensors", make_network).network
    parts = [evaluate(network, c.validation, torch.device("cpu")) for c in clients]
    total = sum(p.num_examples for p in parts)
    for name in ("loss", "accuracy"):
        mean = sum(p.num_examples * getattr(p, name) for p in parts) / total
        assert rounds[-1]["metrics"][f"validation_{name}"] == pytest.approx(mean, rel=1e-5)
