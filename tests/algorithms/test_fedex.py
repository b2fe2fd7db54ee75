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
from fednas_flwr.search import proxyless
from fednas_flwr.search.bandit import Theta, Trial, draw_configurations
from fednas_flwr.spaces.genotype import save_genotype

from .plain import average, copied, first_supernet, make_sgd, step

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


# --- FDNAS against local loops and a weighted average


SMALL = ["algorithm=fdnas", "search_space=mbconv_small", "retrain=mbconv", "clients=2"]
SMALL += ["search_space.width=0.25", "search_space.norm=group", "search_space.candidates=fdnas"]
SMALL += ["partition=quantity", "partition.fractions=[0.75,0.25]", "algorithm.batch_size=16"]
SMALL += ["algorithm.local_epochs=2", "algorithm.warm_up_rounds=1", "algorithm.alphas.lr=0.1"]


def local_epochs(supernet, client, generator, algorithm, *, warm_up):
    """Two passes of ProxylessNAS, written out with torch's own backward."""
    weights, alphas = list(supernet.weights().values()), supernet.alphas()["blocks"]
    sgd = make_sgd(weights, algorithm.weights, nesterov=True)
    adam = torch.optim.Adam([alphas], lr=algorithm.alphas.lr, betas=(0.0, 0.999))
    supernet.train()

    def batches(split):
        while True:
            yield from client.epoch(split, batch_size=16, generator=generator)

    for _ in range(2):
        validation = batches(client.data.validation)
        for x, y in client.epoch(client.data.train, batch_size=16, generator=generator):
            if not warm_up:
                batch = next(validation)
                paths = proxyless.draw_paths(alphas, number=2, generator=generator)
                gates, _ = proxyless.gate_gradient(supernet, batch, paths)
                alphas.grad = proxyless.alpha_gradient(gates, alphas, paths)
                old = alphas.detach().clone()
                adam.step()
                with torch.no_grad():
                    alphas.copy_(proxyless.rescale(alphas, old, paths))
            drawn = proxyless.uniform_alphas(alphas.detach()) if warm_up else alphas
            path = proxyless.draw_paths(drawn, number=1, generator=generator).tolist()
            step(sgd, torch.nn.functional.cross_entropy(supernet.body(x, paths=path), y))


@pytest.mark.parametrize("warm_up", [True, False])
def test_a_round_is_local_epochs_and_a_weighted_average(warm_up, search):
    """One round: a second one would start from other last digits, which group norm amplifies."""
    federation = search(*SMALL, f"algorithm.warm_up_rounds={int(warm_up)}")
    config, algorithm = federation.config, federation.config.algorithm
    supernet = first_supernet(config, federation.data[0])
    state = copied(supernet.state_dict())
    counts = [len(client.data.train) for client in federation.clients]
    assert counts[0] > 2 * counts[1]
    states = []
    for client in federation.clients:
        supernet.load_state_dict(state)
        generator = make_generator(config.seed, "search", 1, client.index, "search")
        local_epochs(supernet, client, generator, algorithm, warm_up=warm_up)
        states.append(copied(supernet.state_dict()))
    arrays = federation.strategy.named_arrays().to_torch_state_dict()
    for name, mean in average(states, counts).items():
        actual = arrays[name if name.startswith("alphas.") else f"weights.{name}"]
        torch.testing.assert_close(actual.double(), mean, rtol=1e-5, atol=1e-6)


def test_alphas_move_after_the_warm_up_only(search):
    dense = search(*SMALL, rounds=3)
    assert not dense.failed
    first, second, third = (event["metrics"] for event in dense.named("round"))
    assert "validation_loss" not in first
    assert "validation_loss" in second
    assert first["alpha_entropy"] > second["alpha_entropy"] > third["alpha_entropy"]
    assert first["alpha_entropy"] == pytest.approx(np.log(6), abs=1e-4)  # 1e-3 * randn
