"""Whole private runs of FEATHERS, federated DARTS, FDNAS and DPNAS: what is booked and promised."""

import math
from collections import Counter
from statistics import fmean

import pytest

from fednas_flwr.algorithms.feathers.strategy import BOUND_PER_SCALE
from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
from fednas_flwr.privacy.mechanism.accounting import prv_epsilon, rdp_epsilon
from fednas_flwr.settings.optimizers import LEAST_LOSS_BOUND

from ..booked import booked

SIZES = ("norm=group", "channels=2", "num_cells=1")
PRIVATE = [
    *("privacy=dp", "clients=2", "algorithm.batch_size=8", "retrain.batch_size=8"),
    *(f"{part}.{size}" for part in ("search_space", "retrain") for size in SIZES),
    *("privacy.local_steps=2", "privacy.retrain.local_steps=3", "stages=[search,retrain]"),
    *(f"privacy.{kind}.noise_multiplier=null" for kind in ("weights", "alphas")),
]
FEATHERS = [
    *(*PRIVATE, "algorithm=feathers", "algorithm.nas_rounds=2", "algorithm.bandit.beta=1.0"),
    *("algorithm.num_configurations=7", "rounds=3", "retrain.rounds=3", "privacy.epsilon=30"),
]


@pytest.fixture(scope="module")
def run(run_inline):
    """``run(*overrides)``: a whole run inline, and all clients' entries."""

    def ran(*overrides):
        done = run_inline(*overrides)
        done.booked = [booked(done.folder / "sites", k) for k in range(done.config.clients)]
        return done

    return ran


@pytest.fixture(scope="module")
def searched(run):
    return run(*FEATHERS)


def check_books(run, **of_rounds):
    """Check what every whole private run owes; return the promised steps and each client's.

    ``of_rounds`` is the number of rounds of each stage, all of which the budget covers.
    """
    promise, spent = run.the("privacy"), run.the("privacy_spent")
    promised = {
        (i["stage"], f"{i['action']}:{i['kind']}", tuple(i["splits"])): i["steps"]
        for i in promise["schedule"]
    }
    budget, booked_steps = run.config.privacy.epsilon, []
    for told, rows in zip(promise["clients"], run.booked, strict=True):
        booked_steps.append(counts := Counter())
        for row in rows:
            key = row.stage, row.action, row.splits
            counts[key] += row.release.steps
            assert row.committed_steps == promised[key]
        for split in ("train", "validation"):
            releases = [row.release for row in rows if split in row.splits]
            assert filter_epsilon(releases, 1e-5) <= budget
            if counts == promised:
                for name, accountant in (("prv", prv_epsilon), ("rdp", rdp_epsilon)):
                    own = pytest.approx(accountant(releases, 1e-5))
                    assert told["epsilon"][name][split] == own
        assert max(told["epsilon"]["prv"].values()) <= budget
        covers = [{"stage": stage, "rounds": n, "of": n} for stage, n in of_rounds.items()]
        assert told["covers"] == covers
    assert all(0 < client["spent"] <= budget for client in spent["clients"])
    assert not run.failed
    for event in run.named("round"):
        assert all(metrics == {} for metrics in event["clients"].values())
        assert not any("loss" in name for name in event["metrics"])
    return promised, booked_steps


@pytest.mark.run
def test_every_step_of_every_trial_is_booked_and_none_beyond_the_schedule(searched):
    phases = searched.named("explored")
    places = [(e["stage"], e["round"]) for e in phases]
    assert places == [("search", 1), ("search", 3), ("retrain", 1), ("retrain", 3)]
    tried = Counter()
    for event in phases:
        tried[event["stage"]] += event["kappa"]
    expected = {
        ("search", "train.search:weights", ("train",)): 2 * 3,
        ("search", "train.search:alphas", ("validation",)): 2 * 3,
        ("search", "train.probe:weights", ("train",)): 2 * tried["search"],
        ("search", "train.probe:alphas", ("validation",)): 2 * tried["search"],
        ("search", "train.probe:rewards", ("validation",)): tried["search"],
        ("retrain", "train.weights:weights", ("train",)): 3 * 3,
        ("retrain", "train.probe:weights", ("train",)): 3 * tried["retrain"],
        ("retrain", "train.probe:rewards", ("validation",)): tried["retrain"],
    }
    promised, booked_steps = check_books(searched, search=3, retrain=3)
    assert booked_steps == [expected] * 2
    assert set(promised) == set(expected)
    assert all(expected[key] <= promised[key] for key in expected)


@pytest.mark.run
def test_the_server_knows_the_noise_on_its_rewards_and_nothing_else_of_the_records(searched):
    promise = searched.the("privacy")
    (sigma,) = {i["noise_multiplier"] for i in promise["schedule"] if i["kind"] == "rewards"}
    declared = [client["records"]["validation"] for client in promise["clients"]]
    for event in searched.named("explored"):
        bound, noise = event["loss_bound"], event["noise"]
        assert 0 < bound <= searched.config.algorithm.loss_bound
        assert noise == pytest.approx(bound * sigma * math.sqrt(2) / sum(declared))
        assert all(abs(reward) <= bound for reward in event["rewards"].values())
    first, later = (e for e in searched.named("explored") if e["stage"] == "search")
    largest = searched.config.algorithm.loss_bound
    scale = math.sqrt(fmean(reward**2 for reward in first["rewards"].values()))
    assert first["loss_bound"] == largest
    own = max(LEAST_LOSS_BOUND, BOUND_PER_SCALE * scale)
    assert later["loss_bound"] == pytest.approx(min(largest, own))


FDNAS = [
    *("algorithm=fdnas", "search_space=mbconv_small", "retrain=mbconv", "privacy=dp", "clients=2"),
    *("search_space.norm=group", "search_space.width=0.25", "retrain.norm=group"),
    *("algorithm.batch_size=8", "retrain.batch_size=8", "algorithm.warm_up_rounds=1"),
    *("privacy.local_steps=2", "privacy.retrain.local_steps=3", "stages=[search,retrain]"),
    *("rounds=3", "retrain.rounds=2", "privacy.epsilon=30"),
    *(f"privacy.{kind}.noise_multiplier=null" for kind in ("weights", "alphas")),
]


DPNAS = [
    *("algorithm=dpnas", "search_space=dp_cells", "retrain=dp_cells", "privacy=dp", "clients=2"),
    *("search_space.widths=[2,2,4]", "search_space.head=4", "algorithm.warm_up_rounds=1"),
    *("algorithm.trained_candidates=3", "algorithm.rewarded_candidates=4", "rounds=3"),
    *("algorithm.final_candidates=5", "algorithm.local_steps=2", "algorithm.batch_size=8"),
    *("retrain.batch_size=8", "retrain.rounds=2", "privacy.retrain.local_steps=3"),
    *("stages=[search,retrain]", "privacy.epsilon=30", "privacy.weights.noise_multiplier=null"),
]


HALVING = [
    *("algorithm=successive_halving", "algorithm.pool.draws=5", "algorithm.pool.keep=4"),
    *("privacy=dp", "clients=2", "rounds=2", "stages=[search]", "search_space.norm=group"),
    *("privacy.local_steps=3", "algorithm.batch_size=8", "privacy.epsilon=100"),
]
RETRAINED = ("retrain", "train.weights:weights", ("train", "validation"))
BOOKED = {  # the steps by what is released, and the rounds of what is not released in all of them
    "fdnas": (
        FDNAS,
        {
            ("search", "train.search:weights", ("train",)): 3 * 2,
            ("search", "train.search:alphas", ("validation",)): 2 * 2,
            RETRAINED: 2 * 3,
        },
        {"train.search:alphas": {2, 3}},
    ),
    "dpnas": (
        DPNAS,
        {
            ("search", "train.candidate:weights", ("train",)): 3 * 3 * 2,
            ("search", "evaluate.candidates:rewards", ("validation",)): 2 + 1,
            RETRAINED: 2 * 3,
        },
        {"evaluate.candidates:rewards": {2, 3}},
    ),
    "successive_halving": (  # as many releases of weights as steps, one of rewards a rung
        HALVING,
        {
            ("search", "train.weights:weights", ("train",)): 2 * 3,
            ("search", "evaluate.candidates:rewards", ("validation",)): 2,
        },
        {},
    ),
}


@pytest.mark.run
@pytest.mark.parametrize("algorithm", BOOKED)
def test_all_steps_of_the_schedule_are_booked(run, algorithm):
    overrides, expected, of_rounds = BOOKED[algorithm]
    done = run(*overrides)
    rounds = {"search": 3, "retrain": 2} if algorithm != "successive_halving" else {"search": 2}
    promised, booked_steps = check_books(done, **rounds)
    assert promised == expected
    assert booked_steps == [expected] * 2
    for rows in done.booked:
        for action, numbers in of_rounds.items():
            assert {row.round for row in rows if row.action == action} == numbers
    promise, rewarded = done.the("privacy"), done.named("rewarded")
    if algorithm == "successive_halving":
        assert [len(event["rewards"]) for event in rewarded] == [4, 2]
        assert all(event["noise"] > 0 for event in rewarded)
    if algorithm == "dpnas":
        for told, rows in zip(promise["clients"], done.booked, strict=True):
            releases = {
                split: [r.release for r in rows if r.stage == "search" and split in r.splits]
                for split in ("train", "validation")
            }
            own = max(prv_epsilon(of_split, 1e-5) for of_split in releases.values())
            assert told["search_epsilon"] == pytest.approx(own)
            assert own < max(told["epsilon"]["prv"].values())
        assert [len(event["paths"]) for event in rewarded] == [4, 4, 5]
        sigma = next(i["noise_multiplier"] for i in promise["schedule"] if i["kind"] == "rewards")
        declared = sum(client["records"]["validation"] for client in promise["clients"])
        for event in rewarded:
            expected_noise = sigma * math.sqrt(2 * len(event["paths"])) / declared
            assert event["noise"] == pytest.approx(expected_noise)
