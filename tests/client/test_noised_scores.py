"""Counts of scores by class: one noised release of each client, for AUROC and a threshold."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fednas_flwr import compose, run
from fednas_flwr.base.errors import BudgetExceededError, ConfigError
from fednas_flwr.base.randomness import seeded
from fednas_flwr.client.answer import answer
from fednas_flwr.client.making import make_client
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.networks import describe_network, make_network
from fednas_flwr.models.noised_scores import BINS, LARGEST
from fednas_flwr.privacy.plan import scores_release
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.requests import CountScores
from fednas_flwr.protocol.states import network_states, pack
from fednas_flwr.runs.numbers import read_run

from ..booked import booked
from .conftest import noise_of

PLAN = replace(scores_release(shared=False), noise_multiplier=2.0)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """300 patients of two wards, 15 % of whom died, mostly the old."""
    rng = np.random.default_rng(0)
    age, dose = rng.uniform(0, 100, 300).round(1), rng.uniform(-1, 1, 300).round(3)
    died = rng.random(300) < 1 / (1 + np.exp((85 - age) / 6))
    lines = [f"{a},{d},{'yes' if y else 'no'}" for a, d, y in zip(age, dose, died, strict=True)]
    path = tmp_path_factory.mktemp("patients") / "patients.csv"
    path.write_text("\n".join(["age,dose,died", *lines]) + "\n")
    return path


@pytest.fixture
def overrides(table):
    return [
        *("algorithm=fedavg", "algorithm.network=linear", "privacy=dp", "clients=2"),
        *("retrain.rounds=2", "runtime.device=cpu", "trackers=[]", "privacy.epsilon=100"),
        *("dataset=csv", f"dataset.root={table}", f"dataset.cache={table.parent / 'cache'}"),
        "dataset.ranges={age: [0, 100], dose: [-1, 1]}",
        "privacy.scores_error=0.01",
    ]


@pytest.fixture
def site(overrides, tmp_path):
    """A simulated private client that has committed to the release, and its request."""
    config = compose(*overrides, f"run_dir={tmp_path / 'run'}")
    data = make_data(config)
    client = make_client(config, 0, data=data, networks={})
    client.guard.commit("run", [PLAN])
    description = describe_network(config, data[0], None)
    with seeded(3, "network"):
        network = make_network(description)
    states = {kind: pack(state) for kind, state in network_states(network).items() if state}
    header = Header("run", "evaluate", 1, 1, 0, "nonce")
    settings = CountScores(network=description, data_set="records")
    return client, network.eval(), Request("evaluate.scores", header, settings, states)


def exact_counts(client, network):
    """The counts of the client's records, one record at a time."""
    counts = torch.zeros(2 * BINS, dtype=torch.float64)
    for split in (client.data.train, client.data.validation):
        for row in range(len(split)):
            x, y = split.batch(torch.tensor([row]), "cpu")
            with torch.no_grad():
                no, yes = network(x)[0].double().tolist()
            place = math.floor((math.asinh(yes - no) / math.asinh(LARGEST) + 1) / 2 * BINS)
            counts[min(max(place, 0), BINS - 1) + BINS * int(y)] += 1
    return counts


def test_a_reply_is_the_exact_counts_and_noise_and_booked_before_that_is_drawn(site, monkeypatch):
    client, network, request = site

    seen = noise_of(client.guard, monkeypatch)
    reply = answer(client, request)
    ((total, terms, booked),) = seen
    assert terms == {"noise_multiplier": 2.0, "max_grad_norm": 1.0}
    assert torch.equal(total, exact_counts(client, network))
    (entry,) = booked
    assert (entry.stage, entry.action) == ("evaluate", "evaluate.scores:scores")
    assert entry.splits == ("train", "validation")
    assert (entry.release.sample_rate, entry.release.steps) == (1.0, 1)
    assert entry.release.noise_multiplier == 2.0
    assert (reply.metrics, reply.properties) == ({}, {})
    declared = client.guard.allowed.by_split
    assert reply.num_examples == declared["train"] + declared["validation"]
    noise = reply.states["scores"]["float32"].double() - total
    assert (noise == 0).sum() <= 1  # one of 128, by rounding: once in 1e5; two: in 1e10
    assert noise.norm().item() < 2.0 * (math.sqrt(2 * BINS) + math.sqrt(2 * 40))  # but once in 2e17


def test_a_record_moves_one_count_by_one_whatever_the_others_are(site, totals):
    client, _, request = site
    client.guard.allowed = replace(client.guard.allowed, epsilon=1e6)
    rows = client.data.train.rows
    for number in range(6):
        held = rows[torch.arange(len(rows)) != number] if number else rows
        train = replace(client.data.train, rows=held)
        changed = replace(client, data=replace(client.data, train=train))
        client.guard.commit(f"run{number}", [PLAN])
        answer(changed, replace(request, header=replace(request.header, run=f"run{number}")))
    (first, _), *others = totals
    for total, _ in others:
        moved = first - total
        assert moved.sum() == moved.abs().sum() == 1


def test_what_was_not_committed_to_or_is_not_covered_is_refused_unread(site, no_record):
    client, _, request = site
    other = replace(request, header=replace(request.header, run="other"))
    with pytest.raises(ConfigError, match="release=evaluate/evaluate.scores/scores/train"):
        answer(client, other)
    with pytest.raises(ConfigError, match="rule data_sets"):
        answer(client, replace(request, settings=replace(request.settings, data_set=None)))
    with pytest.raises(ConfigError, match="of private clients and of two classes"):
        answer(replace(client, guard=None), request)
    inputs = replace(client.inputs, class_names=("a", "b", "c"))
    with pytest.raises(ConfigError, match="of private clients and of two classes"):
        answer(replace(client, inputs=inputs), request)
    for weights in (torch.zeros(0), torch.zeros(2**22)):
        states = {**request.states, "weights": pack({"w": weights})}
        with pytest.raises(ConfigError, match=r"do not fit evaluate\.scores"):
            answer(client, replace(request, states=states))
    client.guard.allowed = replace(client.guard.allowed, epsilon=0.01)
    with pytest.raises(BudgetExceededError):
        answer(client, request)
    assert client.guard._ledger.entries() == []


@pytest.mark.run
@pytest.mark.parametrize("summed", [(), ("secure_sum=true", "clients=4")])
def test_a_run_books_them_once_and_tells_auroc_and_a_threshold(overrides, tmp_path, summed):
    folder = tmp_path / "run"
    run(compose(*overrides, *summed, f"run_dir={folder}"))
    finished = read_run(folder)
    told = finished.scores("released")
    (private,) = [e for e in finished.events if e["event"] == "privacy"]
    plan = private["schedule"][-1]
    assert (plan["kind"], plan["shared"]) == ("scores", bool(summed))
    assert abs(told["prevalence"] - 0.15) < 0.1  # some ten standard errors
    assert told["auroc"] is None or told["error"] <= 0.03
    assert finished.scores("central")["threshold"] == told["threshold"]
    actions = [row.action for row in booked(folder / "sites")]
    assert sum(action.startswith("evaluate.scores") for action in actions) == 1
    assert "noised counts of the clients" in (folder / "report.html").read_text()


@pytest.mark.run
def test_data_of_more_classes_plan_none(overrides, tmp_path, table):
    of_three = tmp_path / "three.csv"
    lines = table.read_text().splitlines()
    lines[1::3] = [line.replace("no", "unknown") for line in lines[1::3]]
    of_three.write_text("\n".join(lines) + "\n")
    folder = tmp_path / "run"
    run(compose(*overrides, f"dataset.root={of_three}", f"run_dir={folder}"))
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (private,) = [event for event in events if event["event"] == "privacy"]
    assert {plan["kind"] for plan in private["schedule"]} == {"weights"}
