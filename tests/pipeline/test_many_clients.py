"""More clients than anybody wants to see one by one: made when asked, told by quantiles."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fednas_flwr.client.making import make_client, simulated_properties
from fednas_flwr.data.prepared import make_data
from fednas_flwr.deploy import client_app
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.report import plots, score_tables
from fednas_flwr.report.templates import sentence
from fednas_flwr.runs.events import records_of
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.settings.names import QUANTILES

from ..finished_runs import Told
from ..watched import noting

CLIENTS = 300
MANY = (
    f"algorithm=fedavg algorithm.network=linear clients={CLIENTS} sampling.per_round=4 "
    "dataset=digits dataset.server_test=false retrain.rounds=6 retrain.batch_size=8 "
    "dataset.fractions={train:0.5,validation:0.25,test:0.25} stages=[retrain,evaluate,export] "
    "partition=iid runtime.quorum=0.5"
)


@pytest.fixture(scope="module")
def many(quick_run):
    """A whole run, the action and client of every message, and how many clients were alive."""

    def told(_, grid, message):
        return message.metadata.message_type, message.metadata.dst_node_id - 2

    client_app.forget()  # those of tests before
    with pytest.MonkeyPatch.context() as patch:
        asked = noting(patch, InProcessGrid, "answer", told)
        alive = noting(patch, InProcessGrid, "answer", lambda *_: kept()[0])
        done = quick_run(MANY)
    return Told(**vars(done), asked=asked, alive=max(alive))


def kept():
    """How many clients this process keeps, and how many sets of records."""
    return [own.cache_info().currsize for own in (client_app._client, client_app._data)]


@pytest.mark.run
def test_only_clients_whose_turn_it_is_are_made_and_asked(many):
    rounds = many.named("round")
    turns = [("train.weights", client) for event in rounds for client in event["asked"]]
    assert [message for message in many.asked if message[0] != "evaluate.model"] == turns
    assert len(turns) == 6 * 4
    assert len([client for action, client in many.asked if action == "evaluate.model"]) <= 4
    assert many.alive == len({client for _, client in many.asked})
    assert kept() == [0, 0]


@pytest.mark.run
def test_nothing_in_the_record_of_a_round_grows_with_the_clients(many):
    assert max(len(json.dumps(event)) for event in many.events) < 5_000
    told = many.the("partition")
    assert told["summary"]["clients"] == CLIENTS
    assert sum(told["summary"]["records"].values()) == 1797
    assert "splits" not in told
    assert records_of(told) == (CLIENTS, told["summary"]["records"])
    words = "300 clients hold 1,797 records; the smallest has 5, the largest 6."
    assert words in sentence("clients_hold", told, False)
    seen = {client for event in many.named("round") for client in event["asked"]}
    assert read_run(many.folder).settings["clients"] == f"{len(seen)} of {CLIENTS}"


def test_the_server_knows_labels_and_moments_as_clients_tell_them(compose_config, tmp_path):
    rng = np.random.default_rng(0)
    labels, images = rng.integers(0, 2, (40, 3)), rng.integers(0, 255, (40, 3, 8, 8), np.uint8)
    np.savez(tmp_path / "several.npz", x_train=images, y_train=labels)
    rows = [f"{a:.3f},{b:.3f},{int(a > b)}" for a, b in rng.normal(size=(90, 2))]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,label", *rows]))
    for own in (
        (f"dataset.root={tmp_path / 'several.npz'}", "dataset.server_test=false"),
        ("dataset=csv", f"dataset.root={tmp_path / 'table.csv'}", "search_space=mlp_small"),
    ):
        config = compose_config(*own, "clients=9", "sampling.per_round=2")
        prepared, parts = data = make_data(config)
        properties = simulated_properties(config, data)
        for index, part in enumerate(parts):
            client = make_client(config, index, data=data, networks={})
            if client.moments:
                assert properties[index]["moments"] == client.moments
            sizes = {name: len(split) for name, split in vars(client.data).items()}
            assert properties[index]["splits"] == sizes
            labels = prepared.train.labels[torch.from_numpy(part)]
            several = prepared.train.multi_label
            counts = labels.sum(0) if several else torch.bincount(labels, minlength=2)
            assert properties[index]["class_counts"] == counts.tolist()
    assert client.moments


def test_more_results_than_can_be_seen_are_shown_by_quantiles():
    accuracies = [index / 200 for index in range(201)]
    clients = [
        {"client": index, "accuracy": value, "loss": value, "num_examples": 10 + index}
        for index, value in enumerate(accuracies)
    ]
    scores = {"accuracy": 0.7}
    of = {"is_private": False, "is_regression": False}
    copies = {"copies": [{"client": 0, "accuracy": 0.5, "keeps": True}]}
    of |= {"scores": lambda _: scores, "last": lambda _: copies}
    run = SimpleNamespace(client_results=lambda: clients, **of)
    (bars,) = plots.client_accuracy(run)["data"]
    assert bars["x"] == pytest.approx([*QUANTILES, 0.5, 0.7])
    shares = ["0%", "5%", "25%", "50%", "75%", "95%", "100%"]
    assert bars["y"][:-2] == [f"{share} of clients" for share in shares]
    _, head, rows = score_tables.client_table(run)
    assert len(rows) == len(QUANTILES)
    assert rows[0][head.index("accuracy") if "accuracy" in head else 1] == "0.0 %"
    run.client_results = lambda: clients[:100]
    assert len(plots.client_accuracy(run)["data"][0]["y"]) == 102
