"""Where the momentum of local training goes between requests: nowhere, with the model, the server.

Moments that travel are those of one optimiser that is kept, and the server's momentum is FedAvgM's.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fednas_flwr.algorithms.stage_strategies import make_retraining, make_search
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.client.answer import answer
from fednas_flwr.models.networks import describe_network, supernet_space
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.states import MOMENTS, network_states, unpack
from fednas_flwr.search.batch_gradients import BatchGradients
from fednas_flwr.search.optimizer_step import no_moments
from fednas_flwr.server.exchange import Exchange

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
    sgd = torch.optim.SGD(
        weights.values(), lr=0.05, momentum=0.9, weight_decay=settings.weights.weight_decay
    )
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
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(supernet(batch[0]), batch[1]).backward()
            sgd.step()
    expected = network_states(supernet)
    for state in ("weights", "alphas"):
        found = unpack(federation.strategy.states[state], federation.strategy.layouts[state])
        for name, tensor in expected[state].items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6)
    layout = federation.strategy.layouts[MOMENTS]
    moments = unpack(federation.strategy.states[MOMENTS], layout)
    for name, weight in weights.items():
        kept = sgd.state[weight]["momentum_buffer"]
        torch.testing.assert_close(
            moments[f"weights.momentum_buffer.{name}"], kept, atol=1e-5, rtol=0
        )
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
    federation = recorded(
        federate(compose_config(*overrides, *UNEQUAL, "training.momentum=averaged"))
    )
    federation.strategy.start(federation.grid, num_rounds=2)
    first, second = federation.asked
    assert not bool(first[2][MOMENTS]["float32"].any())
    counts = [len(client.data.train) for client in federation.clients]
    for state in ("weights", "alphas", MOMENTS):
        own = [first[3][client].states[state]["float32"].double().numpy() for client in (0, 1)]
        mean = np.average(own, axis=0, weights=counts)
        np.testing.assert_allclose(second[2][state]["float32"], mean, rtol=1e-5, atol=1e-7)
        assert not np.array_equal(*own)


def test_by_default_no_moment_travels_and_every_request_begins_anew(compose_config, federate):
    federation = recorded(federate(compose_config(*SEARCH, *UNEQUAL)))
    federation.strategy.start(federation.grid, num_rounds=2)
    for _, _, sent, replies in federation.asked:
        assert MOMENTS not in sent
        assert all(MOMENTS not in reply.states for reply in replies.values())


def test_the_servers_momentum_is_fedavgm(compose_config, federate):
    """v <- m v + (mean of the clients' models - w); w <- w + v, of weights alone."""
    federation = recorded(federate(compose_config(*SEARCH, *UNEQUAL, "training.momentum=server")))
    strategy = federation.strategy
    before = {s: p["float32"].double().numpy() for s, p in strategy.states.items()}
    strategy.start(federation.grid, num_rounds=ROUNDS)
    counts, velocity = [len(client.data.train) for client in federation.clients], 0.0
    for _, settings, sent, replies in federation.asked:
        assert settings.local.weights.momentum == 0
        np.testing.assert_allclose(sent["weights"]["float32"], before["weights"], atol=1e-5)
        means = {
            state: np.average(
                [replies[c].states[state]["float32"].double().numpy() for c in (0, 1)],
                axis=0,
                weights=counts,
            )
            for state in ("weights", "alphas")
        }
        velocity = 0.9 * velocity + (means["weights"] - before["weights"])
        before = {"weights": before["weights"] + velocity, "alphas": means["alphas"]}
    for state, expected in before.items():
        np.testing.assert_allclose(strategy.states[state]["float32"], expected, atol=1e-5)


ARM = "{lr: 0.05, weight_decay: 0, momentum: 0.9, alpha_lr: 0, alpha_weight_decay: 0, dropout: 0}"
BLOCKS = ["search_space=mbconv_small", "search_space.norm=group", "retrain=mbconv"]
CELLS = ["search_space=dp_cells", "search_space.widths=[8]", "retrain=dp_cells"]
MOMENTUM = ["algorithm.weights.momentum=0.9"]


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize(
    ("action", "given"),
    [
        ("train.search", ["algorithm=fdnas", *BLOCKS, *MOMENTUM]),
        ("train.candidate", ["algorithm=dpnas", *CELLS, *MOMENTUM]),
        ("train.search", ["algorithm=feathers", f"algorithm.configurations=[{ARM}]"]),
        ("train.weights", ["algorithm=fedavg", "algorithm.network=plain_cnn"]),
    ],
    ids=["fdnas", "dpnas", "feathers", "fedavg"],
)
def test_every_average_of_local_training_has_the_servers_momentum(
    action, given, compose_config, federate
):
    """As above, of whatever averages what clients have trained."""
    config = compose_config(
        *given, *UNEQUAL, "training.momentum=server", "retrain.weights.momentum=0.9"
    )
    if config.algorithm.name == "fedavg":
        federation = federate(compose_config(*SEARCH, *UNEQUAL))
        described = describe_network(config, federation.data[0], None)
        federation.strategy, _ = make_retraining(config, described, federation.cohort, None)
    else:
        federation = federate(config)
    recorded(federation)
    federation.strategy.start(federation.grid, num_rounds=ROUNDS)
    counts, velocity = [len(client.data.train) for client in federation.clients], 0.0
    if config.algorithm.name == "fedavg":
        counts = [len(c.data.train) + len(c.data.validation) for c in federation.clients]
    trained = [asked for asked in federation.asked if asked[0] == action]
    assert len(trained) == ROUNDS
    sents = [sent["weights"]["float32"].double().numpy() for _, _, sent, _ in trained]
    sents.append(federation.strategy.states["weights"]["float32"].double().numpy())
    for (_, _, _, replies), sent, following in zip(trained, sents[:-1], sents[1:], strict=True):
        states = [replies[c].states["weights"]["float32"].double().numpy() for c in (0, 1)]
        velocity = 0.9 * velocity + (np.average(states, axis=0, weights=counts) - sent)
        np.testing.assert_allclose(following, sent + velocity, atol=1e-5)


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


def test_fedex_has_no_one_momentum_for_the_server(compose_config):
    with pytest.raises(ConfigError, match="training.momentum=server with algorithm=fedex"):
        compose_config("algorithm=fedex", "training.momentum=server")


def test_a_client_keeps_nothing_between_requests(compose_config, federate):
    """The same request twice, with another one between, gives the same reply."""
    federation = recorded(federate(compose_config(*SEARCH, *UNEQUAL, "training.momentum=averaged")))
    federation.strategy.start(federation.grid, num_rounds=2)
    client, replies = federation.clients[0], []
    for index in (1, 0, 1):
        action, settings, sent, _ = federation.asked[index]
        header = Header("test", "search", index + 1, 1, 0, "nonce")
        replies.append(answer(client, Request(action, header, settings, sent)))
    for state, packed in replies[0].states.items():
        assert all(torch.equal(v, replies[2].states[state][d]) for d, v in packed.items())
    assert torch.equal(
        replies[0].states[MOMENTS]["float32"], federation.asked[1][3][0].states[MOMENTS]["float32"]
    )


def test_moments_of_private_clients_follow_from_releases(compose_config, federate, tmp_path):
    """At q = 1 and lr so small that nothing moves, the buffer is the sum of noised means."""
    config = compose_config(
        *(
            "algorithm=fed_darts",
            "privacy=dp",
            "training.momentum=averaged",
            "clients=1",
            "rounds=2",
        ),
        *("search_space.norm=group", "search_space.channels=2", "search_space.num_cells=1"),
        *("retrain.norm=group", "privacy.epsilon=1000", f"privacy.sites={tmp_path}"),
        "stages=[search]",
    )
    from fednas_flwr.pipeline.schedule import make_schedules
    from fednas_flwr.protocol.requests import Commit

    federation = federate(config)
    federation.cohort.connect(federation.grid)
    records = [properties["splits"] for properties in federation.cohort.properties.values()]
    schedule = make_schedules(config, records, done={})[0]
    commit = Commit(data_set="records", releases=tuple(schedule))
    list(federation.cohort.ask(Exchange("query.commit", stage="commit", settings=commit)))
    strategy = make_search(config, federation.data[0], federation.cohort, None, schedule)
    strategy.start(federation.grid, num_rounds=2)
    assert not [e for e in federation.events if e["event"] == "client_failed"]
    moments = unpack(strategy.states[MOMENTS], strategy.layouts[MOMENTS])
    supernet = supernet_space(config, federation.data[0]).supernet()
    assert list(moments) == list(no_moments(supernet))
    buffers = [t for n, t in moments.items() if n.startswith("weights.momentum_buffer")]
    assert all(bool((buffer != 0).all()) for buffer in buffers)  # noise is on every value
    steps = 2 * config.privacy.local_steps
    assert all(float(t) == steps for n, t in moments.items() if n.startswith("alphas.step"))


def test_another_momentum_is_refused(compose_config):
    with pytest.raises(
        ConfigError, match="training.momentum=kept is unknown: choose one of averaged, rese"
    ):
        compose_config("training.momentum=kept")
