"""Counts of scores by class: one noised release of each client, for AUROC and a threshold."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fednas_flwr import compose, run
from fednas_flwr.client.answer import answer
from fednas_flwr.models.noised_scores import BINS, LARGEST
from fednas_flwr.pipeline import stages
from fednas_flwr.privacy.plan import metrics_release, scores_release
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.requests import CountScores
from fednas_flwr.protocol.states import pack
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.settings.optimizers import SGD

from ..booked import booked
from ..refusals import refuses
from .conftest import check_refusals, check_release

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
def site(overrides, of_table):
    """A simulated private client that has committed to the release, and its request."""
    made = of_table(*overrides)
    made.client.guard.commit("run", [PLAN])
    asked = CountScores(network=made.description, data_set="records")
    return made.client, made.network, made.request("evaluate.scores", asked)


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


def test_a_reply_is_the_exact_counts_and_noise_and_booked(site, noised):
    client, network, request = site
    counted = {"action": "evaluate.scores:scores", "splits": ("train", "validation")}
    exact = exact_counts(client, network)
    reply, total = check_release(client, request, noised, norm=1.0, exact=exact, **counted)
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
    words = "of private clients and of two classes"
    refuses(words, answer, replace(client, guard=None), request)
    inputs = replace(client.inputs, class_names=("a", "b", "c"))
    refuses(words, answer, replace(client, inputs=inputs), request)
    for weights in (torch.zeros(0), torch.zeros(2**22)):
        states = {**request.states, "weights": pack({"w": weights})}
        refuses(r"do not fit evaluate\.scores", answer, client, replace(request, states=states))
    check_refusals(client, request, "evaluate/evaluate.scores/scores/train")


@pytest.mark.run
@pytest.mark.parametrize("summed", [(), ("secure_sum=true", "clients=4")])
def test_a_run_books_them_once_and_tells_auroc_and_a_threshold(
    overrides, tmp_path, summed, monkeypatch
):
    folder, noises, real = tmp_path / "run", list[float](), stages.scores_of_counts

    def told_of(counts, *, noise):
        noises.append(noise)
        return real(counts, noise=noise)

    monkeypatch.setattr(stages, "scores_of_counts", told_of)
    config = compose(*overrides, *summed, f"run_dir={folder}")
    run(config)
    finished = read_run(folder)
    told = finished.scores("released")
    (private,) = [e for e in finished.events if e["event"] == "privacy"]
    plan = private["schedule"][-1]
    assert (plan["kind"], plan["shared"]) == ("scores", bool(summed))
    sums = config.secure_sum
    honest = sums.least(4) - sums.colluding if sums else 1  # whose noise is planned
    assert noises == [pytest.approx(plan["noise_multiplier"] * math.sqrt(config.clients / honest))]
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


# --- the threshold of a request decides what hits are


PRIVATE = ("privacy=dp", "privacy.epsilon=100", "dataset.ranges={age: [0, 100]}")


@pytest.fixture
def make(tmp_path, of_table):
    """A client of a table whose label is ``yes`` from an age of 60 on, its network, a question."""
    lines = [f"{age},{'yes' if age >= 60 else 'no'}" for age in range(100)]
    (tmp_path / "t.csv").write_text("\n".join(["age,died", *lines]) + "\n")

    def make(*overrides):
        made = of_table(
            *("algorithm=fedavg", "algorithm.network=linear", "dataset=csv", "clients=1"),
            *(f"dataset.root={tmp_path / 't.csv'}", f"dataset.cache={tmp_path}", "trackers=[]"),
            *("dataset.fractions={train: 0.4, validation: 0.2, test: 0.4}", *overrides),
            "runtime.device=cpu",
        )
        client = made.client
        return client, made.description, lambda *asked: answer(client, made.request(*asked))

    return make


def expected_hits(client, threshold):
    """The share of test records that are right where all are positive, or none is."""
    test = client.data.test
    _, labels = test.batch(torch.arange(len(test)), "cpu")
    yes = float((labels == 1).double().mean())
    assert 0.2 < yes < 0.45
    return pytest.approx(yes if threshold == 0 else 1 - yes)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_exact_clients_count_hits_at_it(make, threshold):
    client, network, ask = make()
    asked = rq.Evaluate(network=network, split="test", threshold=threshold)
    expected = expected_hits(client, threshold)
    assert ask("evaluate.model", asked).metrics["accuracy"] == expected
    step = SGD(0.1, 0.0, 0.0, 0.0, None)
    local = rq.LocalTraining(network, "train", rq.Amount(1, None, None), step, 0.0, 0.0)
    trained = ask("evaluate.personalised", rq.Personalise(local=local, threshold=threshold))
    assert trained.metrics["accuracy"] == expected


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_private_clients_noise_hits_at_it(make, threshold, noised):
    client, network, ask = make(*PRIVATE)
    client.guard.commit("run", [replace(metrics_release("evaluate", "test"), noise_multiplier=2.0)])
    asked = rq.Evaluate(network=network, split="test", data_set="records", threshold=threshold)
    ask("evaluate.model", asked)
    (((_, hits), _, _),) = noised
    assert float(hits) / len(client.data.test) == expected_hits(client, threshold)
