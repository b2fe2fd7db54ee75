"""The threshold of a request decides what hits are: exactly, with noise, and after training."""

from dataclasses import replace

import pytest
import torch

from fednas_flwr.client.answer import answer
from fednas_flwr.privacy.plan import metrics_release
from fednas_flwr.protocol import requests as rq
from fednas_flwr.settings.optimizers import SGD

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
