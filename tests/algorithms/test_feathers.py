"""FEATHERS: trials leave nothing behind, rewards are the clients' means, the best arm searches."""

from dataclasses import replace

import pytest
import torch

from fednas_flwr.algorithms.stage_strategies import make_retraining
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.client.handlers import ANSWERS
from fednas_flwr.models.metrics import evaluate
from fednas_flwr.models.networks import describe_network
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.requests import Amount, Probe, Search, Trial
from fednas_flwr.protocol.states import load_states
from fednas_flwr.search.bandit import Bandit, draw_configurations
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.settings.optimizers import Adam, Range

from ..asked import filled
from ..refusals import refuses

SETTINGS = ["algorithm=feathers", "algorithm.num_configurations=6", "algorithm.nas_rounds=2"]
SETTINGS += ["algorithm.bandit.beta=1.5", "clients=2", "partition=quantity"]
SETTINGS += ["partition.fractions=[0.7,0.3]"]
ROUNDS = 3


@pytest.fixture(scope="module")
def searched(search):
    return search(*SETTINGS, rounds=ROUNDS)


def explored(federation):
    return federation.named("explored")


def of_action(federation, action):
    return [exchange for exchange, _ in federation.asked if exchange.action == action]


def test_explorations_alternate_with_search_from_the_same_state_and_are_told(searched):
    assert [event["round"] for event in explored(searched)] == [1, 3]
    assert len(of_action(searched, "train.search")) == ROUNDS
    tried = [len(exchange.settings.trials) for exchange in of_action(searched, "train.probe")]
    assert tried == [event["kappa"] for event in explored(searched)]
    assert max(tried) > 1
    metrics = [event["metrics"] for event in searched.named("round")]
    told = {event["round"]: event for event in explored(searched)}
    assert [m["lr"] for m in metrics] == [told[r]["configuration"]["lr"] for r in (1, 1, 3)]
    for event in told.values():
        assert event["bytes_received"] < 1000 < event["bytes_sent"]  # no weights come back
        assert event["seconds"] > 0
    trials, *_ = of_action(searched, "train.probe")
    search, *_ = of_action(searched, "train.search")
    for state, packed in trials.states.items():
        for dtype, vector in packed.items():
            assert torch.equal(search.states[state][dtype], vector)
    tried = [str(trial.weights) for trial in trials.settings.trials]
    assert len(set(tried)) == len(tried)


@pytest.mark.parametrize("stage", ["search", "retrain"])
def test_trials_side_by_side_give_what_they_give_in_sequence(compose_config, federate, stage):
    """To the last bit: nothing of a trial, its random draws included, reaches the next."""
    retrained = ["stages=[retrain]", "genotype=x", "retrain.norm=group"]
    config = compose_config(*SETTINGS, *(retrained if stage == "retrain" else []))
    federation = federate(config)
    client, strategy = federation.clients[0], federation.strategy
    if stage == "retrain":
        genotype = strategy.space.random_genotype(make_generator(2, "genotype"))
        described = describe_network(config, federation.data[0], genotype)
        strategy, _ = make_retraining(config, described, federation.cohort)
    assert strategy.stage == stage
    chosen = strategy.configurations[:3]
    local = strategy._local(chosen[0])
    trials = [Trial(c.sgd(strategy.clip_norm), c.adam(), c.dropout) for c in chosen]
    trials[1] = replace(trials[1], drop_path_prob=0.5)

    def rewards(chosen):
        header = Header("test", stage, 1, 1, client.index, "nonce")
        own = {"search": local, "training": None}
        if stage == "retrain":
            own = {"search": None, "training": local}
        probe = Probe(**own, trials=chosen, loss_bound=5.0)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            request = Request("train.probe", header, probe, strategy.states)
            reply = ANSWERS["train.probe"](client, request, probe)
        assert set(reply.states) == {"rewards"}
        assert not reply.metrics
        return reply.states["rewards"]["float32"].tolist()

    together = rewards(trials)
    assert together == [reward for trial in trials for reward in rewards([trial])]
    assert len(set(together)) == 3


def loss_of(client, supernet):
    """Return the validation loss after one pass over the train records set all statistics."""
    norms = [m for m in supernet.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over batches
    generator = make_generator(client.seed, "search", 1, client.index, "statistics")
    supernet.train()
    with torch.no_grad():
        for x, _ in client.epoch(client.data.train, batch_size=32, generator=generator):
            supernet(x)
    for norm in norms:
        norm.momentum = 0.1
    assert norms
    return evaluate(supernet, client.data.validation, client.device).loss


def test_rewards_are_mean_decreases_by_validation_size(searched):
    """Each client's own search, made by train.search, measured before and after."""
    config, strategy = searched.config, searched.strategy
    event = explored(searched)[0]
    exchange, *_ = of_action(searched, "train.probe")
    drawn = sorted(map(int, event["rewards"]))
    generator = make_generator(config.seed, "bandit", "search", 1)
    assert drawn == Bandit.of(6, config.algorithm.bandit).draw(event["kappa"], generator)
    decreases, sizes = [], []
    for client in searched.clients:
        header = Header("test", "search", 1, 1, client.index, "nonce")
        probe = exchange.settings
        trial = probe.trials[0]
        local = replace(probe.search, weights=trial.weights, alphas=trial.alphas)
        request = Request("train.search", header, Search(local=local), exchange.states)
        assert local.amount == Amount(1, None, 32)
        supernet = client.network({"name": "supernet"}, exchange.states)
        before = loss_of(client, supernet)
        load_states(supernet, ANSWERS["train.search"](client, request, request.settings).states)
        decreases.append(before - loss_of(client, supernet))
        sizes.append(len(client.data.validation))
    mean = sum(d * n for d, n in zip(decreases, sizes, strict=True)) / sum(sizes)
    assert event["rewards"][str(drawn[0])] == pytest.approx(mean, abs=1e-6)
    rewards = {int(arm): reward for arm, reward in event["rewards"].items()}
    learnt = Bandit.of(6, config.algorithm.bandit).updated(rewards)
    assert event["estimates"] == pytest.approx(learnt.estimates_N.tolist())
    assert strategy.configurations[event["best"]] == strategy.configurations[learnt.best()]


def test_a_rounds_regulariser_and_annealed_rate_are_those_of_its_trials(search):
    changed = ["algorithm.beta_decay=0.8", "algorithm.annealed=true"]
    federation = search(*SETTINGS, *changed, rounds=ROUNDS)
    searched = [exchange.settings.local for exchange in of_action(federation, "train.search")]
    expected = pytest.approx([0.8 * number / ROUNDS for number in range(1, ROUNDS + 1)])
    assert [local.alternating.beta_decay for local in searched] == expected
    best = {event["round"]: event["configuration"]["lr"] for event in explored(federation)}
    rates = pytest.approx([best[1], 0.75 * best[1], 0.25 * best[3]])  # (1 + cos) / 2
    assert [local.weights.lr for local in searched] == rates
    assert [event["metrics"]["lr"] for event in federation.named("round")] == rates
    probes = of_action(federation, "train.probe")
    for event, exchange in zip(explored(federation), probes, strict=True):
        weight = exchange.settings.search.alternating.beta_decay
        assert weight == pytest.approx(0.8 * event["round"] / ROUNDS)
        tried = [federation.strategy.configurations[int(arm)].lr for arm in event["rewards"]]
        of_trials = [trial.weights.lr for trial in exchange.settings.trials]
        share = {1: 1, 3: 0.25}[event["round"]]
        assert of_trials == pytest.approx([share * rate for rate in tried])


def test_the_best_configuration_searches(searched):
    generator = make_generator(searched.config.seed, "configurations")
    drawn = draw_configurations(6, searched.config.algorithm.ranges, generator)
    best = {event["round"]: drawn[event["best"]] for event in explored(searched)}
    for exchange in of_action(searched, "train.search"):
        chosen = best[1 if exchange.server_round < 3 else 3]
        local = exchange.settings.local
        assert local.weights.lr == chosen.lr
        assert local.weights.min_lr == chosen.lr
        assert local.alphas == Adam(lr=chosen.alpha_lr, weight_decay=chosen.alpha_weight_decay)


def test_nonsense_from_a_client_does_not_choose(compose_config, federate, answers):
    federation = federate(compose_config(*SETTINGS))

    def lying(honest, client, request, asked):
        reply = honest(client, request, asked)
        return filled(reply, 1e15, ["rewards"]) if client.index else reply

    answers("train.probe", lying)
    words = "client 1: rewards has a norm of 1.73e.15, where an honest"
    refuses(words, federation.strategy.start, federation.grid, num_rounds=1, error=QuorumError)
    assert not explored(federation)


@pytest.mark.parametrize(("scale", "expected"), [(0.0, 5.0), (0.1, 0.4), (1e-9, 1e-3), (9.0, 5.0)])
def test_the_bound_of_noised_rewards_follows_their_size(scale, expected, compose_config, federate):
    strategy = federate(compose_config(*SETTINGS, "algorithm.loss_bound=5")).strategy
    strategy.bandit = replace(strategy.bandit, scale=scale)
    assert strategy._bound() == 5.0
    strategy.is_private = True
    assert strategy._bound() == pytest.approx(expected)


def test_a_given_list_takes_the_place_of_the_drawn_one(compose_config, federate):
    one = "{lr: 0.05, weight_decay: 0.0, momentum: 0.9, alpha_lr: 0.01, alpha_weight_decay: 0.0, "
    config = compose_config(*SETTINGS, f"algorithm.configurations=[{one} dropout: 0.0}}]")
    (configuration,) = federate(config).strategy.configurations
    assert configuration.lr == 0.05


RANGES = {
    "lr": Range(1e-4, 1e-1, log=True),
    "weight_decay": Range(1e-5, 1e-1, log=True),
    "momentum": Range(0.0, 1.0, log=False),
    "alpha_lr": Range(1e-5, 1e-2, log=True),
    "alpha_weight_decay": Range(1e-5, 1e-1, log=True),
    "dropout": Range(0.0, 0.2, log=False),
}


def test_drawn_configurations_follow_their_ranges():
    drawn = draw_configurations(4000, RANGES, make_generator(1, "drawn"))
    for name, distribution in RANGES.items():
        values = torch.tensor([getattr(c, name) for c in drawn], dtype=torch.float64)
        assert float(values.min()) >= distribution.low * (1 - 1e-12)
        assert float(values.max()) < distribution.high
        # The median is the middle, in logarithms where the range has them.
        middle = distribution.at(0.5)
        assert abs(float((values < middle).double().mean()) - 0.5) < 5 * (0.25 / 4000) ** 0.5
    refuses("ranges", draw_configurations, 1, {"lr": RANGES["lr"]}, make_generator(1, "drawn"))
