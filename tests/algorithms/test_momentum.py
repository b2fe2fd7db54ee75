"""Where the momentum of local training goes between requests: nowhere, with the model, the server.

Moments that travel are those of one optimiser that is kept, and the server's momentum is FedAvgM's.
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


ARM = "{lr: 0.05, weight_decay: 0, momentum: 0.9, alpha_lr: 0, alpha_weight_decay: 0, dropout: 0}"
BLOCKS = ["search_space=mbconv_small", "search_space.norm=group", "retrain=mbconv"]
CELLS = ["search_space=dp_cells", "search_space.widths=[8]", "retrain=dp_cells"]
MOMENTUM = ["algorithm.weights.momentum=0.9"]


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize(
    ("action", "given"),
    [
        ("train.search", SEARCH),
        ("train.search", ["algorithm=fdnas", *BLOCKS, *MOMENTUM]),
        ("train.candidate", ["algorithm=dpnas", *CELLS, *MOMENTUM]),
        ("train.search", ["algorithm=feathers", f"algorithm.configurations=[{ARM}]"]),
        ("train.weights", ["algorithm=fedavg", "algorithm.network=plain_cnn"]),
    ],
    ids=["fed_darts", "fdnas", "dpnas", "feathers", "fedavg"],
)
def test_every_average_has_the_servers_momentum(action, given, compose_config, federate):
    """v <- m v + (mean of the clients' models - w); w <- w + v, of weights alone: FedAvgM."""
    own = ("training.momentum=server", "retrain.weights.momentum=0.9")
    config = compose_config(*given, *UNEQUAL, *own)
    federation = recorded(federate(config))
    federation.strategy.start(federation.grid, num_rounds=ROUNDS)
    counts, velocity = [len(client.data.train) for client in federation.clients], 0.0
    if config.algorithm.name == "fedavg":
        counts = [len(c.data.train) + len(c.data.validation) for c in federation.clients]
    trained = [asked for asked in federation.asked if asked[0] == action]
    assert len(trained) == ROUNDS
    sents = [sent["weights"]["float32"].double().numpy() for _, _, sent, _ in trained]
    sents.append(federation.strategy.states["weights"]["float32"].double().numpy())

    def mean(replies, state):
        own = [replies[c].states[state]["float32"].double().numpy() for c in (0, 1)]
        return np.average(own, axis=0, weights=counts)

    for (_, asked, _, replies), sent, following in zip(trained, sents[:-1], sents[1:], strict=True):
        assert getattr(asked, "local", asked).weights.momentum == 0
        velocity = 0.9 * velocity + (mean(replies, "weights") - sent)
        np.testing.assert_allclose(following, sent + velocity, atol=1e-5)
    if given is SEARCH:
        found = federation.strategy.states["alphas"]["float32"]
        np.testing.assert_allclose(found, mean(replies, "alphas"), atol=1e-5)


def test_the_servers_momentum_of_a_candidate_begins_with_its_trial(compose_config, federate):
    of_trials = ["algorithm=random_search", "algorithm.trial_rounds=3", "training.momentum=server"]
    federation = recorded(federate(compose_config(*of_trials, *UNEQUAL)))
    federation.strategy.start(federation.grid, num_rounds=2)
    counts = [len(client.data.train) for client in federation.clients]
    actions = [*3 * ["train.weights"], "evaluate.model"]
    assert [action for action, *_ in federation.asked] == 2 * actions
    expected, velocity = np.zeros(0), np.zeros(0)
    for index, (action, settings, sent, replies) in enumerate(federation.asked):
        weights = sent["weights"]["float32"].double().numpy()
        if index % len(actions) == 0:
            expected, velocity = weights, np.zeros(len(weights))
        np.testing.assert_allclose(weights, expected, atol=1e-5)
        if action == "train.weights":
            assert settings.local.weights.momentum == 0
            states = [replies[c].states["weights"]["float32"].double().numpy() for c in (0, 1)]
            velocity = 0.9 * velocity + (np.average(states, axis=0, weights=counts) - weights)
            expected = weights + velocity
