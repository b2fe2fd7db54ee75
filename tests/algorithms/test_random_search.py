from dataclasses import replace

import numpy as np
import pytest

from fednas_flwr.algorithms.stage_strategies import make_retraining
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.models.networks import make_network
from fednas_flwr.protocol.states import load_states
from fednas_flwr.search.bandit import draw_configurations
from fednas_flwr.spaces.genotype import to_json

from .plain import accuracy_of

ROUNDS = 3
UNEQUAL = ["clients=2", "partition=quantity", "partition.fractions=[0.7,0.3]"]


@pytest.fixture(scope="module")
def searched(search):
    # of this seed's candidates the second is best, by a wide margin
    return search("algorithm=random_search", "seed=7", *UNEQUAL, rounds=ROUNDS)


def accuracies(federation):
    return [event["metrics"]["validation_accuracy"] for event in federation.named("round")]


def test_the_candidate_of_best_validation_accuracy_is_derived(searched):
    best = accuracies(searched).index(max(accuracies(searched)))
    assert best == 1
    seed, space = searched.config.seed, searched.strategy.space
    draws = [make_generator(seed, "random_search", number) for number in range(1, ROUNDS + 1)]
    drawn = [space.random_genotype(generator) for generator in draws]
    assert len({to_json(genotype) for genotype in drawn}) == ROUNDS
    assert searched.strategy.derive() == drawn[best]
    assert searched.strategy.values["accuracy"] == max(accuracies(searched))


def test_no_candidate_is_chosen_or_trained_on_test_records(searched):
    assert {
        (exchange.action, getattr(exchange.settings, "local", exchange.settings).split)
        for exchange, _ in searched.asked
        if exchange.action != "query.describe"
    } == {("train.weights", "train"), ("evaluate.model", "validation")}


def test_the_accuracy_is_the_pooled_one_of_the_trained_candidate(searched):
    exchange, _ = searched.asked[-1]
    network = make_network(exchange.settings.network)
    load_states(network, exchange.states)
    assert accuracies(searched)[-1] == pytest.approx(accuracy_of(network.eval(), searched.clients))


def test_without_trials_the_first_candidate_is_taken(search):
    federation = search("algorithm=random_search", *UNEQUAL, "algorithm.trial_rounds=0")
    first = make_generator(federation.config.seed, "random_search", 1)
    assert federation.strategy.derive() == federation.strategy.space.random_genotype(first)
    assert federation.cohort.bytes_sent == 0


@pytest.mark.parametrize("claims", [(-1e300, 1.0, -1e300), (1e300, 7.0, 0.5)])
def test_a_liar_has_one_vote(claims, search):
    """Client 1, with 3 of 10 records, claims what it likes of each candidate."""
    claimed = iter(claims)

    def lying(exchange, client, reply):
        if (exchange.action, client) == ("evaluate.model", 1):
            return replace(reply, metrics={"accuracy": next(claimed)})
        return reply

    federation = search("algorithm=random_search", *UNEQUAL, rounds=ROUNDS, change=lying)
    strategy, scores = federation.strategy, []
    measured = [told for exchange, told in federation.asked if exchange.action == "evaluate.model"]
    for (honest, liar), claim in zip([told.values() for told in measured], claims, strict=True):
        votes = [honest.metrics["accuracy"], min(1.0, max(0.0, claim))]
        scores.append(np.average(votes, weights=[honest.num_examples, liar.num_examples]))
    best = max(range(ROUNDS), key=scores.__getitem__)
    drawn = make_generator(federation.config.seed, "random_search", best + 1)
    assert strategy.derive() == strategy.space.random_genotype(drawn)
    assert strategy.values["accuracy"] == pytest.approx(scores[best])


def test_one_client_of_three_does_not_choose(search):
    """Two agree, although one has harder records; the third claims 1 for what is worst for both."""
    claims = {0: [0.9, 0.95, 0.6], 1: [0.0, 0.0, 1.0], 2: [0.4, 0.45, 0.3]}
    claimed = {client: iter(own) for client, own in claims.items()}

    def claiming(exchange, client, reply):
        if exchange.action != "evaluate.model":
            return reply
        return replace(reply, metrics={"accuracy": next(claimed[client])})

    own = ("algorithm=random_search", "clients=3", "partition=iid")
    federation = search(*own, rounds=3, change=claiming)
    second = make_generator(federation.config.seed, "random_search", 2)
    assert federation.strategy.derive() == federation.strategy.space.random_genotype(second)
    assert np.mean(list(claims.values()), axis=0).argmax() == 2  # the mean would have the third


RANGES = (
    "algorithm.ranges={lr: {low: 1e-3, high: 0.1, log: true}, "
    "weight_decay: {low: 1e-5, high: 1e-1, log: true}, momentum: {low: 0, high: 1, log: false}, "
    "alpha_lr: {low: 0, high: 0, log: false}, alpha_weight_decay: {low: 0, high: 0, log: false}, "
    "dropout: {low: 0, high: 0.2, log: false}}"
)


def test_hyper_parameters_are_drawn_tried_and_retrained_with(search):
    federation = search("algorithm=random_search", *UNEQUAL, RANGES, rounds=ROUNDS)
    config, asked = federation.config, federation.asked
    trained = [e.settings.local for e, _ in asked if e.action == "train.weights"]
    drawn = []
    for number in range(1, ROUNDS + 1):
        generator = make_generator(config.seed, "random_search", number)
        federation.strategy.space.random_genotype(generator)
        drawn += draw_configurations(1, config.algorithm.ranges, generator)
    assert [local.weights.lr for local in trained] == [c.lr for c in drawn]
    assert [local.weights.momentum for local in trained] == [c.momentum for c in drawn]
    best = drawn[accuracies(federation).index(max(accuracies(federation)))]
    found = federation.strategy.configuration()
    assert found == best
    retrained = config, trained[0].network, federation.cohort
    strategy, _ = make_retraining(*retrained, configuration=found)
    rates = {"lr": best.lr, "min_lr": min(best.lr, config.retrain.weights.min_lr)}
    constants = {"momentum": best.momentum, "weight_decay": best.weight_decay}
    assert strategy.weights == replace(config.retrain.weights, **rates, **constants)
    assert strategy.drop_path_prob == best.dropout


def test_without_ranges_retraining_keeps_its_settings_of(searched):
    assert searched.strategy.configuration() is None
