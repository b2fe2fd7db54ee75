"""The schedule that a private run commits to, and the noise that is left for retraining."""

from __future__ import annotations

import pytest

from fednas_flwr.errors import ConfigError
from fednas_flwr.federation.commitment import make_schedule, private_settings
from fednas_flwr.privacy.renyi import Release, poisson_rate
from fednas_flwr.privacy.renyi_filter import RenyiFilter, filter_epsilon

RECORDS = [
    {"train": 4000, "validation": 3000, "test": 900},
    {"train": 900, "validation": 5000, "test": 0},
]
DP_FNAS = [
    *("algorithm=dp_fnas", "privacy=dp", "search_space.norm=group", "retrain.norm=group"),
    *("clients=2", "rounds=6", "retrain.rounds=5", "retrain.batch_size=16"),
    "privacy.retrain.local_steps=4",
]
GIVEN = "privacy.retrain.noise_multiplier=3.5"  # calibrating takes a second


def steps_by_kind(config, done=None):
    return {
        (item["stage"], item["verb"], item["kind"]): item["steps"]
        for item in make_schedule(config, RECORDS, done=done or {})
    }


SEARCH = {
    ("search", "train.weight_gradient", "weights"): 6,
    ("search", "train.alpha_gradient", "alphas"): 6,
}
FUSED = {("search", "train.gradients", kind): 18 for kind in ("weights", "alphas")}
RETRAIN = {("retrain", "train.weights", "weights"): 20}
MEASURED = ("search", "evaluate.model", "metrics")
TESTED = {("evaluate", "evaluate.model", "metrics"): 1}


@pytest.mark.parametrize(
    ("overrides", "done", "expected"),
    [
        ([], {}, SEARCH | RETRAIN),
        (["algorithm.fused=true", "algorithm.local_steps=3"], {}, FUSED | RETRAIN),
        (["privacy.metrics_noise_multiplier=20"], {}, SEARCH | {MEASURED: 1} | RETRAIN | TESTED),
        (
            ["privacy.metrics_noise_multiplier=20", "algorithm.evaluate_every=4"],
            {},
            SEARCH | {MEASURED: 2} | RETRAIN | TESTED,
        ),
        (
            [
                *("privacy.metrics_noise_multiplier=20", "stages=[search,retrain]"),
                "algorithm.evaluate_every=2",
            ],
            {"search": 4},
            {kind: 2 for kind in SEARCH} | {MEASURED: 1} | RETRAIN,
        ),
        ([], {"search": 6, "retrain": 3}, {("retrain", "train.weights", "weights"): 8}),
        (["stages=[search]"], {}, SEARCH),
        (["algorithm=fedavg", "algorithm.network=plain_cnn"], {}, RETRAIN),
    ],
)
def test_as_many_steps_as_the_rounds_still_to_do_take(compose_config, overrides, done, expected):
    steps = steps_by_kind(compose_config(*DP_FNAS, GIVEN, *overrides), done)
    assert steps == expected
    stages = list(dict.fromkeys(stage for stage, *_ in steps))  # covered steps count in this order
    assert stages == [s for s in ("search", "retrain", "evaluate") if s in stages]


def test_every_release_names_splits_and_terms_and_each_stage_is_told_its_own(compose_config):
    config = compose_config(*DP_FNAS, GIVEN, "privacy.metrics_noise_multiplier=20")
    schedule = make_schedule(config, RECORDS, done={})
    splits = {(i["stage"], i["kind"]): i["splits"] for i in schedule}
    assert splits == {
        ("search", "weights"): ["train"],
        ("search", "alphas"): ["validation"],
        ("search", "metrics"): ["validation"],
        ("retrain", "weights"): ["train", "validation"],
        ("evaluate", "metrics"): ["test"],
    }
    for stage, kinds in {
        "search": {"weights", "alphas", "metrics"},
        "retrain": {"weights"},
        "evaluate": {"metrics"},
    }.items():
        settings = private_settings(config, schedule, stage)
        assert settings["data_set"] == "records"
        assert set(settings["releases"]) == kinds
        for item in schedule:
            if item["stage"] == stage:
                terms = settings["releases"][item["kind"]]
                assert terms == {term: item[term] for term in terms}
                assert len(terms) == 3
    assert private_settings(compose_config("algorithm=fnas"), [], "search") is None


def test_retraining_gets_the_least_noise_with_which_every_split_keeps_the_target(compose_config):
    """For the client and split that have least left, with a round of each stage to spare."""
    target = 5.0
    given = [f"privacy.epsilon={target}", "privacy.metrics_noise_multiplier=20"]
    config = compose_config(*DP_FNAS, *given)
    schedule = make_schedule(config, RECORDS, done={"search": -1, "retrain": -1})
    spent = []
    for declared in RECORDS:
        for split in ("train", "validation"):
            releases = []
            for item in schedule:
                if split in item["splits"]:
                    size, records = item["batch_size"], sum(declared[s] for s in item["splits"])
                    rate = 1.0 if size is None else size / records
                    sigma = item["noise_multiplier"]
                    releases.append(
                        Release(noise_multiplier=sigma, sample_rate=rate, steps=item["steps"])
                    )
            budget = RenyiFilter(epsilon=target, delta=1e-5)
            for release in releases:  # step by step, as the ledger books them
                for _ in range(release.steps):
                    budget.spend(
                        Release(
                            noise_multiplier=release.noise_multiplier,
                            sample_rate=release.sample_rate,
                            steps=1,
                        )
                    )
            spent.append(budget.spent())

    assert 0.98 * target < max(spent) <= target


def test_a_resumed_run_retrains_with_the_noise_that_it_began_with(compose_config):
    config = compose_config(*DP_FNAS)
    sigmas = [
        make_schedule(config, RECORDS[:1], done=done)[-1]["noise_multiplier"]
        for done in ({}, {"search": 6, "retrain": 4})
    ]
    assert len(set(sigmas)) == 1
    given = compose_config(*DP_FNAS, GIVEN)
    assert make_schedule(given, RECORDS, done={})[-1]["noise_multiplier"] == 3.5


NULL = [f"privacy.{state}.noise_multiplier=null" for state in ("weights", "alphas")]


def cost(schedule, split):
    """Return the largest cost of a split over the clients, as enforcement counts it."""
    costs = []
    for declared in RECORDS:
        releases = []
        for item in schedule:
            if split in item["splits"]:
                rate = poisson_rate(item["batch_size"], sum(declared[s] for s in item["splits"]))
                releases.append(Release(item["noise_multiplier"], rate, item["steps"]))
        costs.append(filter_epsilon(releases, 1e-5))
    return max(costs)


@pytest.mark.parametrize("metrics", ["null", "20"])
def test_noise_of_a_search_that_is_not_given_keeps_its_share_of_the_target(compose_config, metrics):
    """The same for weights and alphas, however far the run is; retraining gets the rest."""
    given = ["privacy.epsilon=6", "privacy.search_share=0.4"]
    given.append(f"privacy.metrics_noise_multiplier={metrics}")
    config = compose_config(*DP_FNAS, *NULL, *given)
    schedule = make_schedule(config, RECORDS, done={"search": -1, "retrain": -1})
    search = [item for item in schedule if item["stage"] == "search"]
    sigma = search[0]["noise_multiplier"]
    assert search[1]["noise_multiplier"] == sigma
    assert 0.99 * 2.4 < max(cost(search, split) for split in ("train", "validation")) <= 2.4
    both = max(cost(schedule, split) for split in ("train", "validation"))
    assert 0.98 * 6 < both <= 6
    resumed = make_schedule(config, RECORDS, done={"search": 3})
    assert resumed[0]["noise_multiplier"] == sigma

    alone = compose_config(*DP_FNAS, *NULL, *given, "stages=[search]")
    schedule = make_schedule(alone, RECORDS, done={"search": -1})
    assert 0.99 * 6 < max(cost(schedule, split) for split in ("train", "validation")) <= 6


def test_noise_is_given_for_both_states_or_for_none(compose_config):
    with pytest.raises(ConfigError, match=r"alphas.noise_multiplier=1.0: give both, or null for"):
        compose_config(*DP_FNAS, NULL[0])
    fixed = compose_config(*DP_FNAS, *NULL, GIVEN, "algorithm=fedavg", "algorithm.network=linear")
    assert [item["stage"] for item in make_schedule(fixed, RECORDS, done={})] == ["retrain"]
    dear = compose_config(*DP_FNAS, *NULL, GIVEN, "privacy.metrics_noise_multiplier=0.2")
    with pytest.raises(ConfigError, match="privacy.epsilon=8: metrics alone cost .* of 4 on the v"):
        make_schedule(dear, RECORDS, done={})


def test_a_search_that_costs_all_of_the_target_is_refused_naming_the_split(compose_config):
    config = compose_config(*DP_FNAS, "privacy.epsilon=0.5", "privacy.alphas.noise_multiplier=0.3")
    with pytest.raises(ConfigError, match="privacy.epsilon=0.5: search and metrics alone cost"):
        make_schedule(config, RECORDS, done={})
