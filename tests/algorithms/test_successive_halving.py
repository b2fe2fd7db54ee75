"""Successive halving: a pool chosen by scores, trained side by side, halved by records."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.algorithms.base import PrivateRound
from fednas_flwr.algorithms.stage_strategies import releases_by_round
from fednas_flwr.algorithms.successive_halving import strategy
from fednas_flwr.algorithms.successive_halving.strategy import SuccessiveHalving, num_left
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.client.answer import answer
from fednas_flwr.models.networks import make_network
from fednas_flwr.protocol import states
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.requests import Train
from fednas_flwr.protocol.states import MOMENTS, Layout, load_states, network_states, pack, unpack
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.search.data_free_scores import AZ_NAS, combine, measure
from fednas_flwr.search.optimizer_step import no_moments
from fednas_flwr.spaces.genotype import from_json, to_json

from ..asked import spied
from ..rows import seldom
from .plain import accuracy_of, make_sgd, step

SEARCH = ["algorithm=successive_halving", "algorithm.pool.draws=9", "algorithm.pool.keep=4"]
SEARCH += ["algorithm.pool.by=[synflow,parameters]", "algorithm.weights.clip_norm=0.5", "clients=2"]
SEARCH += ["algorithm.batch_size=16", "dataset.crop_padding=2", "dataset.flip=true"]
UNEQUAL = ["partition=quantity", "partition.fractions=[0.7,0.3]"]


def searched_by(federation, rounds=4):
    """Run a search; keep what was asked and answered, and the pool's states after each round."""
    strategy, asked, federation.after = federation.strategy, spied(federation), []
    run_round = strategy.run_round

    def remembered(*numbers):
        metrics = run_round(*numbers)
        federation.after.append(([to_json(g) for g in strategy.pool()], tensors(strategy)))
        return metrics

    strategy.run_round = remembered
    strategy.start(federation.grid, num_rounds=rounds)
    federation.asked = [(e.action, e.settings, e.states, replies) for e, replies in asked]
    assert not federation.named("client_failed", "warning")
    return federation


def tensors(strategy):
    named = strategy.named_arrays().to_torch_state_dict()
    return {name: tensor.clone() for name, tensor in named.items()}


@pytest.fixture(scope="module")
def searched(compose_config, federate):
    return searched_by(federate(compose_config(*SEARCH, *UNEQUAL)))


def nine_drawn(searched):
    config, space = searched.config, searched.strategy.space
    generator, drawn = make_generator(config.seed, "successive_halving"), {}
    while len(drawn) < 9:
        genotype = space.random_genotype(generator)
        drawn[to_json(genotype)] = genotype
    return config, space, list(drawn.values())


def ranked(config, space, drawn):
    """The best first, by the scores of the pool."""
    names = ["synflow", "parameters"]
    combined = combine([measure(space, g, names, seed=config.seed) for g in drawn])
    return [drawn[index] for index in sorted(range(9), key=lambda index: -combined[index])]


def test_the_pool_is_the_best_of_all_that_were_drawn(searched):
    first = searched.asked[0][1].local.network["genotypes"]
    pool = [from_json(json.dumps(genotype)) for genotype in first]
    assert pool == ranked(*nine_drawn(searched))[:4]


def test_the_pool_is_the_best_of_a_shortlist(searched, compose_config, federate):
    """The best six by the pool's scores, of which those four stay that synflow prefers."""
    config, space, _ = drawn = nine_drawn(searched)
    best = ranked(*drawn)[:6]
    synflow = [measure(space, own, ["synflow"], seed=config.seed)["synflow"] for own in best]
    kept = [best[place] for place in sorted(range(6), key=lambda place: -synflow[place])[:4]]
    shortlist = "algorithm.pool.shortlist={keep: 6, scores: [synflow]}"
    assert federate(compose_config(*SEARCH, shortlist)).strategy._choose()[:4] == kept


def test_all_train_in_one_exchange_a_round_and_one_more_ends_a_rung(searched):
    asked = [(name, len(sent_genotypes(s))) for name, s, _, _ in searched.asked if s is not None]
    train, measured = "train.weights", "evaluate.candidates"
    rungs = [*((train, 4), (train, 4), (measured, 4), (train, 2), (train, 2), (measured, 2))]
    assert [one for one in asked if one[1]] == rungs
    rounds = searched.named("round")
    assert [event["exchanges"] for event in rounds] == [1, 2, 1, 2]
    assert [event["metrics"]["candidates"] for event in rounds] == [4, 4, 2, 2]
    assert {s.local.split for action, s, _, _ in searched.asked if action == train} == {"train"}


def sent_genotypes(settings):
    local = getattr(settings, "local", None) or getattr(settings, "training", None) or settings
    return (getattr(local, "network", None) or {}).get("genotypes", [])


def member(packed, layout_of, index):
    """Return one member's tensors of a packed state, under its own names."""
    named = unpack(packed, layout_of)
    start = f"members.{index}."
    return {n.removeprefix(start): t for n, t in named.items() if n.startswith(start)}


@pytest.mark.parametrize("momentum", ["reset", seldom("averaged")])
def test_a_member_is_trained_as_it_would_be_alone(momentum, searched, compose_config, federate):
    """Bit by bit: the same batches, its own clipping, its own moments."""
    federation = searched
    if momentum == "averaged":
        config = compose_config(*SEARCH, *UNEQUAL, "training.momentum=averaged")
        federation = searched_by(federate(config))
    assert federation.strategy._momentum() == momentum
    trained = [entry for entry in federation.asked if entry[0] == "train.weights"]
    for number in (1, 2, 3):  # of the third two are left
        _, settings, sent, replies = trained[number - 1]
        described = settings.local.network
        pool = make_network(described)
        layouts = {s: Layout.of(t) for s, t in network_states(pool).items()}
        for client in federation.clients:
            for index, genotype in enumerate(described["genotypes"]):
                alone = {k: v for k, v in described.items() if k != "genotypes"}
                alone |= {"name": "derived", "genotype": genotype}
                kept = ("weights", "buffers")
                states = {s: pack(member(sent[s], layouts[s], index)) for s in kept}
                if momentum == "averaged":
                    moments = unpack(sent[MOMENTS], Layout.of(no_moments(pool)))
                    own = f"weights.momentum_buffer.members.{index}."
                    states[MOMENTS] = pack({n: t for n, t in moments.items() if own in n})
                header = Header("run", "search", number, 1, client.index, "nonce")
                asked = Train(local=replace(settings.local, network=alone))
                expected = answer(client, Request("train.weights", header, asked, states)).states
                for state in ("weights", "buffers"):
                    found = pack(member(replies[client.index].states[state], layouts[state], index))
                    for dtype, vector in expected[state].items():
                        assert torch.equal(found[dtype], vector)


def check_kept(searched, event):
    """Check that the best by an event's rewards are left after its round; return their places."""
    left, _ = searched.after[event["round"] - 1]
    rewards = event["rewards"]
    kept = sorted(range(len(rewards)), key=lambda index: -rewards[index])[: len(left)]
    assert left == [to_json(from_json(json.dumps(event["genotypes"][i]))) for i in kept]
    return kept


def test_the_best_by_pooled_accuracy_stay_with_what_they_have_learnt(searched):
    rewarded = searched.named("rewarded")
    assert [event["round"] for event in rewarded] == [2, 4]
    measured = [entry for entry in searched.asked if entry[0] == "evaluate.candidates"]
    for event, (_, settings, sent, _) in zip(rewarded, measured, strict=True):
        assert event["noise"] == 0
        pool = make_network(settings.network)
        load_states(pool, sent)
        for network, reward in zip(pool.members, event["rewards"], strict=True):
            assert reward == pytest.approx(accuracy_of(network.eval(), searched.clients))
        kept, (_, after) = check_kept(searched, event), searched.after[event["round"] - 1]
        before = network_states(pool)
        for name, tensor in after.items():
            state, _, index, own = name.split(".", 3)
            assert torch.equal(tensor, before[state][f"members.{kept[int(index)]}.{own}"])
    assert to_json(searched.strategy.derive()) == searched.after[-1][0][0]


LOCAL = [*SEARCH, "algorithm.rewarded=local", "algorithm.local_epochs=2", "rounds=2"]
THREE = ["clients=3"]


@pytest.fixture(scope="module")
def searched_locally(compose_config, federate):
    return searched_by(federate(compose_config(*LOCAL, *UNEQUAL)), rounds=2)


def test_by_local_training_a_rung_is_one_exchange_and_the_fastest_stay(searched_locally):
    searched = searched_locally
    rewarded = searched.named("rewarded")
    asked = [entry for entry in searched.asked if entry[1] is not None and sent_genotypes(entry[1])]
    assert [action for action, *_ in asked] == ["evaluate.candidates"] * 2
    assert [len(event["rewards"]) for event in rewarded] == [4, 2]
    for (_, settings, _, replies), event in zip(asked, rewarded, strict=True):
        assert {name for reply in replies.values() for name in reply.states} == {"rewards"}
        own = [replies[client.index].states["rewards"]["float32"] for client in searched.clients]
        records = torch.tensor([len(client.data.train) for client in searched.clients])
        means = torch.stack(own, dim=1).double() @ records.double() / records.sum()
        assert event["rewards"] == pytest.approx(means.tolist(), rel=1e-5)
        check_kept(searched, event)
        assert settings.training.split == "train"
    assert to_json(searched.strategy.derive()) == searched.after[-1][0][0]


def test_rewards_of_local_training_are_those_of_a_plain_loop(searched_locally):
    """Each member from the weights that were sent, on the same batches, annealed by epochs."""
    searched = searched_locally
    _, settings, sent, _ = next(e for e in searched.asked if e[0] == "evaluate.candidates")
    training, client = settings.training, searched.clients[0]
    header = Header("run", "search", 1, 1, client.index, "nonce")
    reply = answer(client, Request("evaluate.candidates", header, settings, sent))
    expected = []
    for index in range(4):
        pool = make_network(training.network)
        load_states(pool, sent)
        network, generator = pool.members[index].train(), client.generator(header, "weights")
        for lr in (0.1, 0.055):  # half-way to .01, by the cosine
            sgd = make_sgd(network.parameters(), searched.config.algorithm.weights, lr)
            losses = []
            for x, y in client.epoch(client.data.train, batch_size=16, generator=generator):
                loss = torch.nn.functional.cross_entropy(network(x), y, reduction="none")
                losses += loss.tolist()
                step(sgd, loss.mean(), clip_norm=0.5)
        expected.append(math.exp(-sum(losses) / len(losses)))
    found = reply.states["rewards"]["float32"].tolist()
    assert found == pytest.approx(expected, rel=1e-4)
    assert len(set(found)) == 4


@pytest.mark.parametrize(("enough", "epochs"), [(3, 1), (6, 2)])
def test_enough_steps_end_local_training(enough, epochs, compose_config, federate, monkeypatch):
    monkeypatch.setattr(strategy, "ENOUGH_STEPS", enough)
    config = compose_config(*LOCAL, *UNEQUAL, "algorithm.batch_size=8")  # 4 and 1 steps an epoch
    searched = searched_by(federate(config), rounds=2)
    asked = [settings for action, settings, *_ in searched.asked if action == "evaluate.candidates"]
    assert [settings.training.amount.epochs for settings in asked] == [epochs] * 2


def test_the_number_of_epochs_that_were_made_is_reported(run_inline, monkeypatch):
    monkeypatch.setattr(strategy, "ENOUGH_STEPS", 1)
    done = run_inline(*LOCAL, "stages=[search]")
    assert read_run(done.folder).settings["algorithm"]["local_epochs"] == 1


def test_a_network_whose_local_training_diverges_is_rewarded_least(compose_config, federate):
    diverging = ["lr=9000", "weight_decay=0", "clip_norm=null"]
    overrides = [f"algorithm.weights.{setting}" for setting in diverging]
    searched = searched_by(federate(compose_config(*LOCAL, *UNEQUAL, *overrides)), rounds=2)
    rewards = [r for e in searched.events if e["event"] == "rewarded" for r in e["rewards"]]
    assert all(0 <= reward <= 1 for reward in rewards)
    assert min(rewards) == 0


def test_a_secure_sum_is_the_mean_of_local_rewards(run_inline, compose_config, federate):
    """Which single clients have, by whose medians candidates are ranked where they can be seen."""
    shared = [*LOCAL, *THREE]
    summed = run_inline(*shared, "stages=[search]", "secure_sum=true").events
    found = next(event["rewards"] for event in summed if event["event"] == "rewarded")
    plain = searched_by(federate(compose_config(*shared)), rounds=2)
    layout = Layout.of({"rewards": torch.zeros(4)})
    replies = plain.asked[0][3].values()
    own = torch.stack([unpack(reply.states["rewards"], layout)["rewards"] for reply in replies])
    weights = torch.tensor([reply.num_examples for reply in replies])
    assert found == pytest.approx((weights @ own / weights.sum()).tolist(), abs=1e-4)
    rewarded = next(event["rewards"] for event in plain.named("rewarded"))
    assert rewarded == pytest.approx(states.median_rewards(own.double()).tolist())


@pytest.mark.parametrize("settings", [SEARCH, LOCAL], ids=["averaged", "local"])
def test_one_client_of_three_does_not_choose(settings, compose_config, federate):
    """Two agree, although one has harder records; the third rewards what is worst for both."""
    claims = torch.tensor([[0.9, 0.95, 0.85, 0.6], [0.0, 0.0, 0.0, 1.0], [0.4, 0.45, 0.35, 0.3]])
    federation = federate(compose_config(*settings, *THREE))

    def claiming(exchange, client, reply):
        if exchange.action != "evaluate.candidates":
            return reply
        own = claims[client][: len(reply.states["rewards"]["float32"])]
        return replace(reply, states={"rewards": {"float32": own}})

    spied(federation, claiming)
    searched_by(federation, rounds=2)
    pool = [json.dumps(genotype) for genotype in federation.named("rewarded")[0]["genotypes"]]
    assert [json.dumps(json.loads(one)) for one in federation.after[0][0]] == [pool[1], pool[0]]
    assert claims.mean(dim=0).argmax() == 3  # the mean would have the last
    assert claims.quantile(0.5, dim=0).argmax() == 3  # and so would a median of raw rewards


SPACES_TOO = [
    ["search_space=darts_small", "algorithm.pool.by=[]"],
    ["search_space=dp_cells_small", "algorithm.pool.by=[synflow]", "retrain=dp_cells"],
    ["search_space=mbconv_small", "search_space.width=0.25", "retrain=mbconv"],
    ["dataset=digits", "dataset.limit_train=60"],
]


@pytest.mark.parametrize("overrides", SPACES_TOO)
def test_it_searches_every_space(overrides, compose_config, federate):
    pool = ["algorithm.pool.draws=3", "algorithm.pool.keep=2", "rounds=1"]
    federation = federate(compose_config(*SEARCH, *pool, *overrides))
    federation.strategy.start(federation.grid, num_rounds=1)
    assert not federation.failed
    federation.strategy.space.check(federation.strategy.derive())


MBCONV = ["search_space=mbconv_small", "search_space.width=0.25", "retrain=mbconv"]
UNSET = ["algorithm.pool.by=null", "algorithm.pool.keep=null", "rounds=1"]


RANKED_BY = [
    ([], AZ_NAS, 8),
    (MBCONV, (), 16),
    (["search_space=darts_small"], (), 16),
    (["algorithm.pool.by=[]"], [], 16),
    ([*MBCONV, "algorithm.pool.by=[synflow]"], ["synflow"], 8),
    ([*MBCONV, "algorithm.pool.draws=5"], (), 5),
    ([*MBCONV, "algorithm.pool.keep=4"], (), 4),
]


@pytest.mark.parametrize(("overrides", "scores", "size"), RANKED_BY)
def test_pools_are_chosen_by_scores_that_rank_their_space(overrides, scores, size, compose_config):
    config = compose_config(*SEARCH, "algorithm.pool.draws=20", *UNSET, *overrides)
    pool, space = config.algorithm.pool, config.search_space.name
    assert (pool.chosen_scores(space), pool.size(space)) == (scores, size)


def test_rungs_are_those_of_the_pool_whose_size_is_not_set(compose_config):
    own = ["algorithm.pool.draws=20", *UNSET, *MBCONV]
    with pytest.raises(ConfigError, match=r"at most 4 rounds .* algorithm.pool.keep=16 "):
        compose_config(*LOCAL, *own, "rounds=5")
    group = ["privacy=dp", "search_space.norm=group", "retrain.norm=group", "rounds=4"]
    named = {}
    for size in ("null", "8", "16"):
        config = compose_config(*SEARCH, *own, *group, f"algorithm.pool.keep={size}")
        rounds = releases_by_round(config, "search", 4)
        named[size] = [[one.noise_name for one in releases] for releases in rounds]
    assert named["null"] == named["16"] == [["weights", "rewards"]] * 4
    assert named["8"][0] == ["weights"]


def test_a_shortlist_is_as_large_as_the_pool_that_it_is_for(compose_config):
    for overrides, size in (([], 8), (MBCONV, 16)):
        own = ("algorithm.pool.draws=20", *UNSET, *overrides)
        shortlist = "algorithm.pool.shortlist={keep: %d, scores: [synflow]}"
        with pytest.raises(ConfigError, match=rf"shortlist.keep={size - 1} .* {size}, the pool's"):
            compose_config(*SEARCH, *own, shortlist % (size - 1))
        config = compose_config(*SEARCH, *own, shortlist % size)
        assert config.algorithm.pool.size(config.search_space.name) == size


def test_a_pool_that_no_score_ranks_is_the_first_drawn(compose_config, federate):
    config = compose_config(*SEARCH, "algorithm.pool.draws=3", *UNSET, *MBCONV)
    federation = federate(config)
    federation.strategy.start(federation.grid, num_rounds=1)
    generator = make_generator(config.seed, "successive_halving")
    drawn = [federation.strategy.space.random_genotype(generator) for _ in range(3)]
    genotypes = federation.named("rewarded")[0]["genotypes"]
    assert [from_json(json.dumps(genotype)) for genotype in genotypes] == drawn


@pytest.fixture(scope="module")
def private(compose_config):
    return compose_config(*SEARCH, "privacy=dp", "search_space.norm=group", "retrain.norm=group")


@given(keep=st.integers(2, 60), eta=st.integers(2, 5), rounds=st.integers(1, 12))
def test_one_network_is_left_and_rungs_divide_by_eta(private, keep, eta, rounds):
    left = [num_left(number, rounds, keep=keep, eta=eta) for number in range(rounds + 1)]
    assert (left[0], left[-1]) == (keep, 1)
    assert left == sorted(left, reverse=True)
    assert set(left) <= {math.ceil(keep / eta**rung) for rung in range(8)}
    first = PrivateRound(private, "search", 1, rounds)
    settings = SimpleNamespace(pool=SimpleNamespace(size=lambda space: keep), eta=eta)
    each = [replace(first, number=number) for number in range(1, rounds + 1)]
    measured = sum(len(SuccessiveHalving.releases(settings, one)) - 1 for one in each)
    assert measured == len(set(left)) - 1
