"""Runs whose rounds ask some of the clients: whom, with what average, and at what epsilon."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fednas_flwr.algorithms.stage_strategies import make_sampling
from fednas_flwr.privacy.mechanism.accounting import rdp_epsilon
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.report.templates import sentence
from fednas_flwr.server.exchange import Participants
from fednas_flwr.settings.names import SAMPLINGS

from ..booked import booked, ledger_of
from ..contracts.test_strategies import SETTINGS
from ..finished_runs import copy_without, in_process
from ..refusals import refuses
from ..rows import seldom

SIX = ["clients=6", "sampling.per_round=2", "rounds=4", "retrain.rounds=3"]
FNAS = ["algorithm=fnas", "algorithm.batch_size=8", *SIX]
DP = ["algorithm=dp_fnas", "privacy=dp", "algorithm.batch_size=8", "retrain.batch_size=8"]
DP += ["search_space.norm=group", "retrain.norm=group", "retrain.channels=2"]
DP += ["privacy.retrain.local_steps=3", "privacy.epsilon=30", "search_space.channels=2", *SIX]


def test_every_exchange_of_a_round_asks_the_clients_that_the_seed_has_drawn(finished_run):
    whole = finished_run(*FNAS, "partition=quantity", "partition.min_size=5")
    sampling = make_sampling(whole.config, whole.named("partition")[0]["splits"])
    drawn = {
        (e["stage"], e["round"]): list(sampling.participants(e["stage"], e["round"]).clients)
        for e in whole.named("round")
    }
    asked = {(e["stage"], e["round"]): e["asked"] for e in whole.named("round")}
    assert asked == drawn
    assert len(asked) == 7
    assert len({tuple(clients) for clients in asked.values()}) > 3
    for event in whole.named("round"):
        assert sorted(map(int, event["clients"])) == event["asked"]
        last = (event["stage"], event["round"]) == ("search", 4)  # the supernet is evaluated
        assert event["exchanges"] == 1 + (event["stage"] == "search") + last
    assert len(whole.the("evaluated")["clients"]) <= 2


@pytest.mark.usefixtures("one_cell")
@pytest.mark.parametrize("algorithm", ["feathers", "dpnas", seldom("random_search")])
def test_every_search_asks_the_drawn_clients_only(algorithm, compose_config, federate):
    own = (f"algorithm={algorithm}", "clients=4", "sampling.per_round=2")
    fed = federate(compose_config(*own, *SETTINGS[algorithm]))
    sampled(fed)
    fed.strategy.start(fed.grid, num_rounds=1)
    told = fed.the("round")
    assert told["asked"] == list(fed.cohort.sampling.participants("search", 1).clients)
    assert sorted(map(int, told["clients"])) == told["asked"]
    assert told["exchanges"] >= 1


def test_fedex_draws_hyperparameters_for_the_drawn_clients_only(finished_run):
    fedex = ("algorithm=fedex", "algorithm.network=linear", "algorithm.num_configurations=3")
    own = ("clients=4", "sampling.per_round=2", "retrain.rounds=2", "stages=[retrain]")
    assert [len(event["asked"]) for event in finished_run(*fedex, *own).named("round")] == [2, 2]


def sampled(federation):
    """Connect a federation, and let rounds ask some of its clients; returns all their splits."""
    config, cohort = federation.config, federation.cohort
    cohort.connect(federation.grid)
    splits = [cohort.properties[client]["splits"] for client in range(config.clients)]
    cohort.sampling = make_sampling(config, splits)
    return splits


def retraining(compose_config, federate, *overrides):
    """A federation with FedAvg of a linear model and its sampling."""
    sizes = ("clients=4", "partition=quantity", "partition.fractions=[0.4,0.3,0.2,0.1]")
    config = compose_config("algorithm=fedavg", "algorithm.network=linear", *sizes, *overrides)
    fed = federate(config)
    return fed, sampled(fed)


FEDAVG = "algorithm=fedavg algorithm.network=linear"
DP_FNAS = "algorithm=dp_fnas privacy=dp"


BY_GRADIENTS = f"{FEDAVG} retrain.exchange=gradients retrain.batch_size=20"
WEIGHTS = [
    (FEDAVG, "retrain", [13, 26, 39, 520]),
    (f"{FEDAVG} retrain.evaluate_every=1", "retrain", [10, 20, 30, 400]),
    (BY_GRADIENTS, "retrain", [13, 26, 39, 260]),  # of 8 times the median at most
    (f"{BY_GRADIENTS} privacy=dp", "retrain", [13, 20, 20, 20]),  # what a batch can hold
    ("algorithm=fedex algorithm.network=linear", "retrain", [10, 20, 30, 400]),
    (f"{DP_FNAS} algorithm.batch_size=15", "search", [10, 15, 15, 15]),
    (f"{DP_FNAS} privacy.rate=0.5", "search", [10, 20, 30, 400]),  # a share of all
    (f"{DP_FNAS} privacy.rate=1", "search", [10, 20, 30, 400]),
]


@pytest.mark.parametrize(("overrides", "stage", "sizes"), WEIGHTS)
def test_a_clients_size_is_the_weight_of_its_reply(overrides, stage, sizes, compose_config):
    records = [{"train": 10 * c, "validation": 3 * c, "test": 7} for c in (1, 2, 3, 40)]
    config = compose_config(overrides, "clients=4", "sampling.per_round=2")
    assert make_sampling(config, records).sizes[stage].tolist() == sizes


@pytest.mark.parametrize("by", SAMPLINGS)
def test_a_round_is_the_average_with_the_weights_of_its_draw(by, compose_config, federate):
    own = ("sampling.per_round=3", f"sampling.by={by}", "retrain.rounds=1")
    fed, splits = retraining(compose_config, federate, *own)
    participants = fed.cohort.sampling.participants("retrain", 1)
    alone = {}
    for client in participants.clients:
        single, _ = retraining(compose_config, federate, "retrain.rounds=1")
        asked = Participants((client,))
        single.cohort.sampling = SimpleNamespace(participants=lambda *_, asked=asked: asked)
        single.strategy.start(single.grid, num_rounds=1)
        (alone[client],) = single.strategy.states["weights"].values()
    fed.strategy.start(fed.grid, num_rounds=1)
    (found,) = fed.strategy.states["weights"].values()
    sizes = {c: splits[c]["train"] + splits[c]["validation"] for c in participants.clients}
    expected = sum(sizes[c] * alone[c].double() for c in participants.clients) / sum(sizes.values())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_place_of_a_client_that_fails_is_taken_for_the_round(compose_config, federate):
    own = ("sampling.per_round=3", "sampling.spare=.5", "runtime.quorum=1", "stages=[search]")
    config = compose_config(*FNAS, *own)
    fed, failing = federate(config), set()

    def fail(message, context, call_next):
        client = context.node_config["partition-id"]
        if client in failing and message.metadata.message_type.startswith("train."):
            raise RuntimeError("disk full")
        return call_next(message, context)

    fed.grid = in_process(config, mods=[fail])
    sampled(fed)
    participants = fed.cohort.sampling.participants("search", 1)
    assert (len(participants.clients), len(participants.backups)) == (3, 2)
    failing.update([participants.clients[0], participants.backups[0]])
    fed.strategy.start(fed.grid, num_rounds=1)
    failures = [(e["client"], e["action"]) for e in fed.named("client_failed")]
    left_out = (participants.clients[0], participants.backups[0])
    assert failures == [(client, "train.weight_gradient") for client in left_out]
    told = fed.the("round")
    assert set(map(int, told["clients"])) == {*participants.clients[1:], participants.backups[1]}
    assert set(told["asked"]) == {*participants.clients, participants.backups[1]}


@pytest.fixture(scope="module")
def private(run_inline):
    return run_inline(*DP, "sampling.spare=.5", "privacy.metrics_noise_multiplier=50")


def noise_of(event):
    return {(p["stage"], p["kind"]): p["noise_multiplier"] for p in event["schedule"]}


def test_a_client_commits_to_its_turns_and_books_those_that_come(private):
    told, sites = private.the("privacy"), private.folder / "sites"
    (name,) = {row.run for client in range(6) for row in booked(sites, client)}
    sampling = make_sampling(private.config, [client["records"] for client in told["clients"]])
    asked = {(e["stage"], e["round"]): e["asked"] for e in private.named("round")}
    assert {len(clients) for clients in asked.values()} == {2}
    assert [client["client"] for client in told["clients"]] == list(range(6))
    for client in told["clients"]:
        number = client["client"]
        stages = {"search": range(1, 5), "retrain": range(1, 4), "evaluate": [1]}
        turns = [(stage, number_of) for stage, numbers in stages.items() for number_of in numbers]
        may = Counter(s for s, r in turns if number in sampling.participants(s, r).candidates)
        assert client["turns"] == may
        with ledger_of(sites, number) as ledger:
            text = ledger.committed(name)
        steps = {(p["stage"], p["kind"]): p["steps"] for p in json.loads(text)["releases"]}
        expected = {("search", "weights"): may["search"], ("search", "alphas"): may["search"]}
        expected |= {("retrain", "weights"): 3 * may["retrain"]}
        expected |= {("evaluate", "metrics"): may["evaluate"]}
        steps.pop(("search", "metrics"), None)
        assert steps == {place: n for place, n in expected.items() if n}
        turns = Counter(stage for (stage, _), clients in asked.items() if number in clients)
        taken = Counter((entry.stage, entry.action) for entry in booked(sites, number))
        assert taken["search", "train.weight_gradient:weights"] == turns["search"]
        assert taken["retrain", "train.weights:weights"] == 3 * turns["retrain"]


def test_a_resumed_run_commits_to_the_turns_left(private, run_inline, tmp_path):
    resumed = run_inline(resume=copy_without(private, tmp_path / "run", "retrain-000003.*"))
    again = resumed.events[len(private.events) :]
    (told,) = [event for event in again if event["event"] == "privacy"]
    (last,) = [event for event in again if event["event"] == "round"]
    assert (last["stage"], last["round"]) == ("retrain", 3)
    assert last["asked"] == private.named("round")[-1]["asked"]
    sampling = make_sampling(private.config, [client["records"] for client in told["clients"]])
    for client in told["clients"]:
        number = client["client"]
        places = (("retrain", 3), ("evaluate", 1))
        left = {s for s, r in places if number in sampling.participants(s, r).candidates}
        assert {stage for stage, turns in client["turns"].items() if turns} == left
    before, after = (noise_of(event) for event in (private.named("privacy")[0], told))
    assert after.items() <= before.items()


def test_a_client_pays_for_its_own_turns_with_the_noise_of_all(private):
    told = private.the("privacy")
    noise = noise_of(told)
    epsilons = {}
    for client in told["clients"]:
        turns, records = client["turns"], client["records"]
        steps = {"search": turns.get("search", 0), "retrain": 3 * turns.get("retrain", 0)}
        sizes = {"search": records["train"], "retrain": records["train"] + records["validation"]}
        taken = [(stage, number) for stage, number in steps.items() if number]
        parts = [Release(noise[s, "weights"], min(1, 8 / sizes[s]), n) for s, n in taken]
        expected = rdp_epsilon(parts, client["budget"]["delta"]) if parts else 0.0
        assert client["epsilon"]["rdp"].get("train", 0.0) == pytest.approx(expected, rel=1e-6)
        epsilons[sum(turns.values())] = client["epsilon"]["rdp"].get("train", 0.0)
        assert all(cover["rounds"] >= cover["of"] for cover in client["covers"])
    assert len(set(epsilons.values())) > 1
    text = sentence("promise", told)
    assert "A round asks 2 of the clients" in text
    assert "No amplification by this draw is claimed" in text


TWO = "sampling.per_round=2"
CFDNAS = "algorithm=cfdnas search_space=mbconv_small retrain=mbconv algorithm.num_groups=2"
REFUSED = {
    "sampling.per_round=2.5": "sampling.per_round=2.5 with clients=6: expected a whole",
    "sampling.per_round=7": "sampling.per_round=7 with clients=6: expected a whole",
    f"{TWO} secure_sum=true": "with secure_sum=true: every sum is over",
    f"{TWO} aggregate=median": "aggregate=median with a round of 2 clients",
    f"{TWO} {CFDNAS}": "with algorithm=cfdnas: it divides all clients",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_needs_all_clients_is_refused_in_a_sentence(overrides, compose_config):
    refuses(re.escape(REFUSED[overrides]), compose_config, "clients=6", overrides)


def test_a_share_of_the_clients_is_rounded_up(compose_config):
    for share, asked in {".01": 1, ".5": 3, ".51": 4, "1": 1, "6": 6}.items():
        assert compose_config("clients=6", f"sampling.per_round={share}").asked == asked
    assert compose_config("clients=6", "sampling=null").asked == 6
