"""Where the momentum of local training goes between requests: nowhere, or with the model.

Moments that travel are those of one optimiser that is kept.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.models.networks import supernet_space
from fednas_flwr.protocol.states import MOMENTS, network_states, unpack
from fednas_flwr.search.exact_gradients import BatchGradients

from .plain import make_sgd, step

CONSTANT = ["algorithm.weights.lr=0.05", "algorithm.weights.min_lr=0.05"]
SEARCH = [
    *("algorithm=fed_darts", "algorithm.batch_size=16", "search_space.norm=group", *CONSTANT),
    *("dataset.crop_padding=0", "dataset.flip=false", "algorithm.weights.clip_norm=null"),
    "algorithm.beta_decay=0",
]
UNEQUAL = ["clients=2", "partition=quantity", "partition.fractions=[0.65,0.35]"]
ROUNDS = 3


def recorded(federation):
    """Let the federation keep what is asked of its clients and what they answer: whole states."""
    ask, federation.asked = federation.cohort.ask, []

    def recording(exchange):
        strategy = federation.strategy
        whole = {s: strategy.layouts[s] for s in exchange.layouts if s in strategy.layouts}
        states = exchange.states | {s: strategy.states[s] for s in whole}
        sent = {s: {d: v.clone() for d, v in p.items()} for s, p in states.items()}
        replies = {}
        federation.asked.append((exchange.action, exchange.settings, sent, replies))
        for client, reply in ask(exchange):
            states = dict(reply.states)
            for state in whole.keys() & states.keys():
                trained = unpack(states[state], exchange.layouts[state])
                states[state] = {dtype: v.clone() for dtype, v in sent[state].items()}
                for name, tensor in unpack(states[state], whole[state]).items():
                    tensor.copy_(trained.get(name, tensor))
            replies[client] = replace(reply, states=states)
            yield client, reply

    federation.cohort.ask = recording
    return federation


def test_moments_that_travel_are_those_of_one_optimiser_that_is_kept(compose_config, federate):
    """One client, three rounds: SGD and Adam of torch's, written out, never begun anew."""
    config = compose_config(*SEARCH, "clients=1", "training.momentum=averaged")
    federation = federate(config)
    federation.strategy.start(federation.grid, num_rounds=ROUNDS)
    (client,), settings = federation.clients, config.algorithm
    with seeded(config.seed, "supernet"):
        supernet = supernet_space(config, federation.data[0]).supernet().train()
    weights, alphas = supernet.weights(), supernet.alphas()
    sgd = make_sgd(weights.values(), settings.weights)
    adam = torch.optim.Adam(
        alphas.values(),
        lr=settings.alphas.lr,
        betas=(0.5, 0.999),
        weight_decay=settings.alphas.weight_decay,
    )
    for number in range(1, ROUNDS + 1):
        generator = make_generator(config.seed, "search", number, 0, "search")

        def passes(split, generator=generator):
            while True:
                yield from client.epoch(split, batch_size=16, generator=generator)

        one = client.epoch(client.data.train, batch_size=16, generator=generator)
        for batch, held_out in zip(one, passes(client.data.validation), strict=False):
            gradients, _ = BatchGradients().alpha_gradient_sum(supernet, held_out)
            for kind, alpha in alphas.items():
                alpha.grad = gradients[kind] / len(held_out[1])
            adam.step()
            step(sgd, torch.nn.functional.cross_entropy(supernet(batch[0]), batch[1]))
    expected = network_states(supernet)
    for state in ("weights", "alphas"):
        found = unpack(federation.strategy.states[state], federation.strategy.layouts[state])
        for name, tensor in expected[state].items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6)
    layout = federation.strategy.layouts[MOMENTS]
    moments = unpack(federation.strategy.states[MOMENTS], layout)
    for name, weight in weights.items():
        kept = sgd.state[weight]["momentum_buffer"]
        found = moments[f"weights.momentum_buffer.{name}"]
        torch.testing.assert_close(found, kept, atol=1e-5, rtol=0)
    for kind, alpha in alphas.items():
        assert float(moments[f"alphas.step.{kind}"]) == float(adam.state[alpha]["step"]) > ROUNDS


@pytest.mark.parametrize("of_paths", [False, True])
def test_moments_are_averaged_as_the_weights_are(of_paths, compose_config, federate):
    overrides = SEARCH
    if of_paths:
        overrides = [
            *("algorithm=fdnas", "search_space=mbconv_small", "search_space.width=0.25"),
            *("retrain=mbconv", "algorithm.batch_size=16", "algorithm.local_epochs=1"),
            "algorithm.warm_up_rounds=0",
        ]
    config = compose_config(*overrides, *UNEQUAL, "training.momentum=averaged")
    federation = recorded(federate(config))
    federation.strategy.start(federation.grid, num_rounds=2)
    first, second = federation.asked
    assert not bool(first[2][MOMENTS]["float32"].any())
    counts = [len(client.data.train) for client in federation.clients]
    for state in ("weights", "alphas", MOMENTS):
        own = [first[3][client].states[state]["float32"].double().numpy() for client in (0, 1)]
        mean = np.average(own, axis=0, weights=counts)
        np.testing.assert_allclose(second[2][state]["float32"], mean, rtol=1e-5, atol=1e-7)
        assert not np.array_equal(*own)
