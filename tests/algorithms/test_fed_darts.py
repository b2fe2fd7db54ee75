"""Federated DARTS and FedNAS against a local loop per client and numpy's weighted average."""

import numpy as np
import pytest
import torch

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.loaders import epoch_batches
from fednas_flwr.protocol.states import MOMENTS

from ..rows import seldom
from .plain import average, copied, first_supernet, make_sgd, rate_of_round, step

ROUNDS = 2
UNEQUAL = ["clients=2", "partition=quantity", "partition.fractions=[0.75,0.25]"]
SGD = "{lr: 0.02, min_lr: 0.004, momentum: 0.9, weight_decay: 3.0e-4, clip_norm: 5.0}"
SETTINGS = [  # batch norm over few records blows up rounding errors
    *("search_space.norm=group", "algorithm.batch_size=16", "algorithm.local_epochs=2"),
    *(f"algorithm.weights={SGD}", "algorithm.alphas={lr: 0.006, weight_decay: 1.0e-3}"),
]


def optimizers_of(supernet, config):
    betas = {"betas": (0.5, 0.999), "weight_decay": 1e-3}
    adam = torch.optim.Adam(supernet.alphas().values(), lr=0.006, **betas)
    return make_sgd(supernet.weights().values(), config.algorithm.weights), adam


def alternate(supernet, client, server_round, config, sgd, adam):
    """DARTS' alternating steps as one would write them in a notebook; in place."""
    beta_decay = config.algorithm.beta_decay * server_round / ROUNDS
    alphas = list(supernet.alphas().values())
    sgd.param_groups[0]["lr"] = rate_of_round(config.algorithm.weights, server_round, ROUNDS)
    generator = make_generator(config.seed, "search", server_round, client.index, "search")

    def passes(split, number):
        for _ in range(number):
            for indices in epoch_batches(len(split), batch_size=16, generator=generator):
                yield split.batch(indices, "cpu")

    def loss(batch):
        return torch.nn.functional.cross_entropy(supernet(batch[0]), batch[1])

    supernet.train()
    for _ in range(2):
        validation_batches = passes(client.data.validation, 1000)
        losses = []
        for train in passes(client.data.train, 1):
            validation = next(validation_batches)
            objective = loss(train) if config.algorithm.name == "fednas" else 0.0
            objective = objective + loss(validation)
            objective = objective + beta_decay * torch.cat(alphas).logsumexp(-1).mean()
            for alpha, gradient in zip(alphas, torch.autograd.grad(objective, alphas), strict=True):
                alpha.grad = gradient
            adam.step()
            own = loss(train)
            losses.append((own.item(), len(train[1])))
            step(sgd, own, clip_norm=5.0)
    return sum(value * count for value, count in losses) / len(client.data.train)


ALGORITHMS = [
    seldom(["fed_darts"]),
    ["fed_darts", "algorithm.beta_decay=5"],
    ["fednas"],
    ["fed_darts", "training.momentum=averaged", "clients=1"],
]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rounds_equal_local_loops_and_a_weighted_average(algorithm, compose_config, federate):
    name, *given = algorithm
    clients = [] if "clients=1" in given else UNEQUAL
    config = compose_config(f"algorithm={name}", *clients, *SETTINGS, *given)
    federation = federate(config)
    supernet = first_supernet(config, federation.data[0])
    state = copied(supernet.state_dict())
    counts = [len(client.data.train) for client in federation.clients]
    assert counts[0] > 2 * sum(counts[1:])
    losses, travel = [], MOMENTS in federation.strategy.states
    sgd, adam = optimizers_of(supernet, config)
    for server_round in range(1, ROUNDS + 1):
        states, local_losses = [], []
        for client in federation.clients:
            supernet.load_state_dict(state)
            if not travel:
                sgd, adam = optimizers_of(supernet, config)
            local_losses.append(alternate(supernet, client, server_round, config, sgd, adam))
            states.append(copied(supernet.state_dict()))
        state = average(states, counts)
        losses.append(np.average(local_losses, weights=counts))

    federation.strategy.start(federation.grid, num_rounds=ROUNDS)
    arrays = federation.strategy.named_arrays().to_torch_state_dict()
    for name, expected in state.items():
        actual = arrays[name if name.startswith("alphas.") else f"weights.{name}"]
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=5e-6)
    assert len([name for name in arrays if not name.startswith(MOMENTS)]) == len(state)
    for name, weight in supernet.weights().items() if travel else ():
        found = arrays[f"{MOMENTS}.weights.momentum_buffer.{name}"]
        torch.testing.assert_close(found, sgd.state[weight]["momentum_buffer"], rtol=0, atol=1e-5)
    for kind, alpha in supernet.alphas().items() if travel else ():
        assert float(arrays[f"{MOMENTS}.alphas.step.{kind}"]) == float(adam.state[alpha]["step"])
    rounds = federation.named("round")
    assert len(federation.named("alphas")) == ROUNDS
    assert [e["metrics"]["train_loss"] for e in rounds] == pytest.approx(losses, rel=1e-4)


FDNAS = ["algorithm=fdnas", "search_space=mbconv_small", "search_space.width=0.25"]
FDNAS += ["retrain=mbconv", "algorithm.batch_size=16", "algorithm.local_epochs=1"]
FDNAS += ["algorithm.warm_up_rounds=0"]


@pytest.mark.parametrize("algorithm", [["algorithm=fed_darts", *SETTINGS], FDNAS])
def test_moments_are_averaged_as_the_weights_are(algorithm, search):
    federation = search(*algorithm, *UNEQUAL, "training.momentum=averaged", rounds=2)
    (first, replies), (second, _) = federation.asked
    assert not first.states[MOMENTS]["float32"].any()
    counts = [len(client.data.train) for client in federation.clients]
    for state in ("weights", "alphas", MOMENTS):
        own = [reply.states[state]["float32"].double().numpy() for reply in replies.values()]
        mean = np.average(own, axis=0, weights=counts)
        np.testing.assert_allclose(second.states[state]["float32"], mean, rtol=1e-5, atol=1e-7)
        assert not np.array_equal(*own)
