"""FedEx: what every client trains with, what moves theta, and a whole run on a given genotype."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.client.handlers import ANSWERS
from fednas_flwr.models.metrics import evaluate
from fednas_flwr.models.networks import supernet_space
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.search.bandit import Theta, Trial, draw_configurations
from fednas_flwr.spaces.genotype import save_genotype

DATA = ["clients=3", "partition=quantity", "partition.fractions=[0.6,0.25,0.15]"]
SETTINGS = ["algorithm=fedex", "algorithm.num_configurations=5", "retrain.batch_size=16", *DATA]
GIVEN = [*SETTINGS, "algorithm.network=plain_cnn"]


def rounds_of(federation):
    return [event["metrics"] for event in federation.named("round")]


def test_every_client_trains_with_its_draw_and_its_loss_moves_theta(search):
    """Both rounds again, from the actions, numpy's average and the pure theta."""
    federation = search(*GIVEN, rounds=2)
    config, strategy = federation.config, federation.strategy
    generator = make_generator(config.seed, "configurations")
    configurations = draw_configurations(5, config.algorithm.ranges, generator)
    theta, drawn_ever = Theta.of(5), set()
    rounds = zip(federation.asked, rounds_of(federation), strict=True)
    for number, ((asked, _), told) in enumerate(rounds, start=1):
        trials, weights = [], []
        for client in federation.clients:
            arm = theta.draw(make_generator(config.seed, "theta", number, client.index))
            drawn_ever.add(arm)
            own = asked.settings_of[client.index]
            assert own.local.weights == configurations[arm].sgd(5.0)
            assert own.local.drop_path_prob == configurations[arm].dropout
            header = Header("test", "retrain", number, 1, client.index, "nonce")
            request = Request("train.weights", header, own, asked.states)
            torch.manual_seed(0)
            reply = ANSWERS["train.weights"](client, request, own)
            network = client.network(federation.description, reply.states)
            loss = evaluate(network, client.data.validation, client.device).loss
            assert reply.metrics["validation_loss"] == pytest.approx(loss)
            assert reply.num_examples == len(client.data.train)
            trials.append(Trial(arm, loss, reply.num_examples))
            weights.append(reply.states["weights"]["float32"].double().numpy())
        counts = [trial.weight for trial in trials]
        mean = np.average(weights, axis=0, weights=counts)
        after = [*(e.states for e, _ in federation.asked[1:]), strategy.states][number - 1]
        np.testing.assert_allclose(after["weights"]["float32"], mean, atol=1e-5)
        theta = theta.updated(trials)
        loss = np.average([trial.loss for trial in trials], weights=counts)
        assert told["validation_loss"] == pytest.approx(loss, rel=1e-5)
        assert told["theta_entropy"] == pytest.approx(theta.entropy(), rel=1e-4)
        assert told["lr"] == configurations[theta.best()].lr
    assert len(drawn_ever) > 1
    found = strategy.theta.probabilities()
    torch.testing.assert_close(found, theta.probabilities(), rtol=1e-4, atol=1e-9)


def test_a_client_without_validation_records_speaks_for_no_configuration(search, answers):
    def lacking(honest, client, request, asked):
        validation = client.data.validation
        kept = validation.rows if client.index == 1 else validation.rows[:0]
        data = replace(client.data, validation=replace(validation, rows=kept))
        return honest(replace(client, data=data), request, asked)

    answers("train.weights", lacking)
    federation = search(*GIVEN)
    event = federation.the("round")
    (loss,) = [m["validation_loss"] for m in event["clients"].values() if "validation_loss" in m]
    assert federation.strategy.values["theta"]["loss_sum"] == pytest.approx(loss)


@pytest.mark.parametrize("nonsense", [1e30, None])
def test_nonsense_from_a_client_counts_at_most_the_bound(search, lies, nonsense):
    def lying(reply):
        metrics = {n: v for n, v in reply.metrics.items() if n != "validation_loss"}
        told = {} if nonsense is None else {"validation_loss": nonsense}
        return replace(reply, metrics=metrics | told)

    lies("train.weights", lying)
    federation = search(*GIVEN)
    theta = federation.strategy.values["theta"]
    assert all(map(math.isfinite, theta["log_theta"]))
    assert 0 <= theta["loss_sum"] <= federation.config.algorithm.loss_bound


@pytest.mark.run
def test_a_run_tunes_a_given_genotype(compose_config, federate, finished_run, tmp_path):
    config, given = compose_config(), tmp_path / "found.json"
    space = supernet_space(config, federate(config).data[0])
    save_genotype(given, space.random_genotype(torch.Generator()))
    run = finished_run(*SETTINGS, f"genotype={given}")
    assert run.the("derived")["genotype"] == json.loads(given.read_text())
    assert {event["stage"] for event in run.named("round")} == {"retrain"}
    for metrics in rounds_of(run):
        assert {"validation_loss", "theta_entropy", "lr"} <= set(metrics)
    assert (run.folder / "model.safetensors").exists()
