"""The threshold of a request decides what hits are: exactly, with noise, and after training."""

from dataclasses import replace

import pytest
import torch

from fednas_flwr import compose
from fednas_flwr.base.randomness import seeded
from fednas_flwr.client.answer import answer
from fednas_flwr.client.making import make_client
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.networks import describe_network, make_network
from fednas_flwr.privacy.plan import metrics_release
from fednas_flwr.protocol import requests as rq
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.states import network_states, pack
from fednas_flwr.settings.optimizers import SGD

from .conftest import noise_of

PRIVATE = ("privacy=dp", "privacy.epsilon=100", "dataset.ranges={age: [0, 100]}")


@pytest.fixture
def make(tmp_path):
    """A client of a table whose label is ``yes`` from an age of 60 on, its network, a question."""
    lines = [f"{age},{'yes' if age >= 60 else 'no'}" for age in range(100)]
    (tmp_path / "t.csv").write_text("\n".join(["age,died", *lines]) + "\n")

    def make(*overrides):
        config = compose(
            *("algorithm=fedavg", "algorithm.network=linear", "dataset=csv", "clients=1"),
            *(f"dataset.root={tmp_path / 't.csv'}", f"dataset.cache={tmp_path}", "trackers=[]"),
            *("dataset.fractions={train: 0.4, validation: 0.2, test: 0.4}", *overrides),
            *("runtime.device=cpu", f"run_dir={tmp_path / 'run'}"),
        )
        data = make_data(config)
        client = make_client(config, 0, data=data, networks={})
        description = describe_network(config, data[0], None)
        with seeded(3, "network"):
            states = network_states(make_network(description))
        packed = {kind: pack(state) for kind, state in states.items() if state}

        def ask(action, settings):
            header = Header("run", "evaluate", 1, 1, 0, "nonce")
            return answer(client, Request(action, header, settings, packed))

        return client, description, ask

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
def test_private_clients_noise_hits_at_it(make, threshold, monkeypatch):
    client, network, ask = make(*PRIVATE)
    client.guard.commit("run", [replace(metrics_release("evaluate", "test"), noise_multiplier=2.0)])
    seen = noise_of(client.guard, monkeypatch)
    asked = rq.Evaluate(network=network, split="test", data_set="records", threshold=threshold)
    ask("evaluate.model", asked)
    (((_, hits), _, _),) = seen
    assert float(hits) / len(client.data.test) == expected_hits(client, threshold)
