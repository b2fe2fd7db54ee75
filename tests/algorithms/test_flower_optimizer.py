"""FedAdam, FedYogi, FedAdagrad and FedProx of a given network, against Flower and torch."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedYogi
from torch.nn import functional as F

from fednas_flwr.algorithms.stage_strategies import make_retraining
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.data.loaders import epoch_batches
from fednas_flwr.deploy.flower_patches import begin_task
from fednas_flwr.models.networks import describe_network, make_network
from fednas_flwr.protocol.states import network_states, pack
from fednas_flwr.settings import Config

from ..asked import spied

UNEQUAL = ["clients=2", "partition=quantity", "partition.fractions=[0.65,0.35]"]
FLOWER = {
    "adam": FedAdam(eta=0.02, tau=0.01, beta_1=0.8, beta_2=0.9),
    "yogi": FedYogi(eta=0.02, tau=0.01, beta_1=0.8, beta_2=0.9),
    "adagrad": FedAdagrad(eta=0.02, tau=0.01),
}
BETAS = ["server_optimizer.beta_1=0.8", "server_optimizer.beta_2=0.9"]
CHOSEN = {
    name: [
        *("algorithm=fedavg", "retrain.batch_size=32", *UNEQUAL, f"server_optimizer={name}"),
        "algorithm.network=plain_cnn",
        *("server_optimizer.lr=0.02", "server_optimizer.tau=0.01"),
        *(BETAS if name != "adagrad" else []),
    ]
    for name in FLOWER
}


@pytest.fixture
def training(compose_config, federate):
    """``training(*overrides)``: a federation whose strategy trains a given network."""

    def made(*overrides, folder=None):
        config = compose_config(*overrides)
        sizes = [o for o in overrides if o.startswith(("clients", "partition"))]
        federation = federate(compose_config(*sizes), checkpoints=folder)
        federation.config = config
        described = describe_network(config, federation.data[0], None)
        federation.strategy, _ = make_retraining(
            config, described, federation.cohort, federation.checkpoints
        )
        federation.description = described
        federation.asked = spied(federation)
        return federation

    return made


def clone(packed):
    return {dtype: vector.clone() for dtype, vector in packed.items()}


@pytest.mark.parametrize(
    ("name", "network"), [("adam", "mobilenet_v2"), ("yogi", "plain_cnn"), ("adagrad", "plain_cnn")]
)
def test_rounds_are_those_of_flowers_strategy(name, network, training):
    federation = training(*CHOSEN[name], f"algorithm.network={network}")
    weights = clone(federation.strategy.states["weights"])
    federation.strategy.start(federation.grid, num_rounds=2)
    begin_task(1)
    flower = FLOWER[name]
    for number, (_, replies) in enumerate(federation.asked, start=1):
        flower.current_arrays = {d: v.numpy() for d, v in weights.items()}
        messages = [
            Message(
                RecordDict(
                    {
                        "arrays": ArrayRecord(
                            {d: Array(v.numpy()) for d, v in reply.states["weights"].items()}
                        ),
                        "metrics": MetricRecord({"num-examples": int(reply.num_examples)}),
                    }
                ),
                dst_node_id=1,
                message_type="train",
            )
            for reply in replies.values()
        ]
        arrays, _ = flower.aggregate_train(number, messages)
        weights = {d: torch.from_numpy(arrays[d].numpy()).float() for d in weights}
    torch.testing.assert_close(federation.strategy.states["weights"], weights, rtol=1e-4, atol=1e-5)
    if "buffers" not in federation.strategy.states:
        assert network == "plain_cnn"
        return
    counts = [reply.num_examples for reply in replies.values()]
    buffers = [reply.states["buffers"]["float32"].double() for reply in replies.values()]
    mean = np.average(np.stack(buffers), axis=0, weights=counts)
    np.testing.assert_allclose(
        federation.strategy.states["buffers"]["float32"], mean, rtol=1e-4, atol=1e-5
    )


def test_fedprox_is_the_term_of_the_paper(training):
    """One client, one round, by autograd: (mu / 2) |w - w_0|^2 beside the loss."""
    federation = training(
        *("algorithm=fedprox", "algorithm.proximal=2", "algorithm.network=plain_cnn"),
        *("clients=1", "retrain.batch_size=16", "retrain.local_epochs=2"),
    )
    config, (client,) = federation.config, federation.clients
    federation.strategy.start(federation.grid, num_rounds=1)
    sgd, trained = config.retrain.weights, {}
    for mu in (2.0, 0.0):
        with seeded(config.seed, "network"):
            network = make_network(federation.description).train()
        start = [weight.detach().clone() for weight in network.parameters()]
        optimizer = torch.optim.SGD(
            network.parameters(), sgd.lr, sgd.momentum, weight_decay=sgd.weight_decay
        )
        split = client.split("train+validation")
        generator = make_generator(config.seed, "retrain", 1, 0, "weights")
        for _ in range(2):
            for rows in epoch_batches(len(split), batch_size=16, generator=generator):
                x, y = split.batch(rows, "cpu")
                optimizer.zero_grad()
                loss = F.cross_entropy(network(x), y)
                for weight, held in zip(network.parameters(), start, strict=True):
                    loss = loss + mu / 2 * (weight - held).square().sum()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), sgd.clip_norm)
                optimizer.step()
        trained[mu] = pack(network_states(network)["weights"])["float32"]
    result = federation.strategy.states["weights"]["float32"]
    torch.testing.assert_close(result, trained[2.0], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(result, trained[0.0], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize(
    "chosen",
    [
        ["algorithm=fedavg", "aggregate=median", "runtime.quorum=1", "server_optimizer=yogi"],
        ["algorithm=fedprox", "aggregate=trimmed_mean", "runtime.quorum=1"],
    ],
)
def test_private_runs_have_them_too(chosen, finished_run):
    """What the server makes of releases, and a term without records, cost nothing."""
    private = ["privacy=dp", "privacy.epsilon=30", "retrain.rounds=2", "clients=5"]
    run = finished_run(*chosen, "algorithm.network=linear", *private)
    assert not run.failed
    assert isinstance(run.config, Config)


def test_secure_sums_have_an_optimizer_of_the_server(finished_run):
    run = finished_run(
        *("algorithm=fedavg", "algorithm.network=linear", "secure_sum=true", "clients=4"),
        *("server_optimizer=adam", "retrain.rounds=2"),
    )
    assert not run.failed
