"""Federated DARTS and FedNAS against a local loop per client and numpy's weighted average."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.data.loaders import epoch_batches
from fednas_flwr.models.networks import supernet_space

from ..rows import seldom
from .plain import average, copied, make_sgd, rate_of_round, step

ROUNDS = 2
UNEQUAL = ["clients=2", "partition=quantity", "partition.fractions=[0.75,0.25]"]
SGD = "{lr: 0.02, min_lr: 0.004, momentum: 0.9, weight_decay: 3.0e-4, clip_norm: 5.0}"
SETTINGS = [  # batch norm over few records blows up rounding errors
    *("search_space.norm=group", "algorithm.batch_size=16", "algorithm.local_epochs=2"),
    *(f"algorithm.weights={SGD}", "algorithm.alphas={lr: 0.006, weight_decay: 1.0e-3}"),
]


def alternate(supernet, client, server_round, config, lr):
    """DARTS' alternating steps as one would write them in a notebook; in place."""
    beta_decay = config.algorithm.beta_decay * server_round / ROUNDS
    weights, alphas = list(supernet.weights().values()), list(supernet.alphas().values())
    sgd = make_sgd(weights, config.algorithm.weights, lr)
    adam = torch.optim.Adam(alphas, lr=0.006, betas=(0.5, 0.999), weight_decay=1e-3)
    generator = make_generator(config.seed, "search", server_round, client.index, "search")

    def passes(split, number):
        for _ in range(number):
            for indices in epoch_batches(len(split), batch_size=16, generator=generator):
                yield split.batch(indices, "cpu")

    def loss(batch):
        return F.cross_entropy(supernet(batch[0]), batch[1])

    supernet.train()
    for _ in range(2):
        validation_batches = passes(client.data.validation, 1000)
        losses = []
        for train in passes(client.data.train, 1):
            validation = next(validation_batches)
            objective = loss(train) if config.algorithm.name == "fednas" else 0.0
            objective = objective + config.algorithm.validation_weight * loss(validation)
            objective = objective + beta_decay * torch.cat(alphas).logsumexp(-1).mean()
            for alpha, gradient in zip(alphas, torch.autograd.grad(objective, alphas), strict=True):
                alpha.grad = gradient
            adam.step()
            own = loss(train)
            losses.append((own.item(), len(train[1])))
            step(sgd, own, clip_norm=5.0)
    return sum(value * count for value, count in losses) / len(client.data.train)


@pytest.mark.parametrize(
    "algorithm",
    [
        seldom(["fed_darts"]),
        ["fed_darts", "algorithm.beta_decay=5"],
        pytest.param(["fednas"], marks=pytest.mark.slow),
        ["fednas", "algorithm.validation_weight=3"],
    ],
)
def test_rounds_equal_local_loops_and_a_weighted_average(algorithm, compose_config, federate):
    name, *given = algorithm
    config = compose_config(f"algorithm={name}", *UNEQUAL, *SETTINGS, *given)
    federation = federate(config)
    with seeded(config.seed, "supernet"):
        supernet = supernet_space(config, federation.data[0]).supernet()
    state = copied(supernet.state_dict())
    counts = [len(client.data.train) for client in federation.clients]
    assert counts[0] > 2 * counts[1]
    losses = []
    for server_round in range(1, ROUNDS + 1):
        lr = rate_of_round(config.algorithm.weights, server_round, ROUNDS)
        states, local_losses = [], []
        for client in federation.clients:
            supernet.load_state_dict(state)
            local_losses.append(alternate(supernet, client, server_round, config, lr))
            states.append(copied(supernet.state_dict()))
        state = average(states, counts)
        losses.append(np.average(local_losses, weights=counts))

    federation.strategy.start(federation.grid, num_rounds=ROUNDS)
    arrays = federation.strategy.named_arrays().to_torch_state_dict()
    for name, expected in state.items():
        actual = arrays[name if name.startswith("alphas.") else f"weights.{name}"]
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=5e-6)
    assert len(arrays) == len(state)
    rounds = federation.named("round")
    assert [e["metrics"]["train_loss"] for e in rounds] == pytest.approx(losses, rel=1e-4)
