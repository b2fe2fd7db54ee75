"""The schedule that a private run commits to, and the noise that is left for retraining."""

import math
from types import SimpleNamespace

import pytest
import torch

from fednas_flwr.algorithms.base import local_steps as steps_of
from fednas_flwr.algorithms.stage_strategies import make_search
from fednas_flwr.pipeline.schedule import check_covered, for_data, make_schedules
from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
from fednas_flwr.search.bandit import Bandit
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree

from ..refusals import refuses


def make_schedule(*args, **settings):
    """The releases of a client that is asked in every round."""
    return make_schedules(*args, **settings)[0]


RECORDS = [
    {"train": 4000, "validation": 3000, "test": 900},
    {"train": 900, "validation": 5000, "test": 0},
]
DP_FNAS = ["algorithm=dp_fnas", "privacy=dp", "search_space.norm=group", "retrain.norm=group"]
DP_FNAS += ["clients=2", "rounds=6", "retrain.rounds=5", "retrain.batch_size=16"]
DP_FNAS += ["privacy.rate=null", "privacy.search_share=0.5", "privacy.retrain.local_steps=4"]
DP_FNAS += ["privacy.retrain.max_grad_norm=1"]
DP_FNAS += [f"privacy.{kind}.noise_multiplier=1" for kind in ("weights", "alphas")]
GIVEN = "privacy.retrain.noise_multiplier=3.5"  # calibrating takes a second


@pytest.fixture
def planned(compose_config):
    """``planned(*overrides)``: the first client's releases, with a round of each to spare."""

    def releases(*overrides, **how):
        return make_schedule(
            compose_config(*overrides), RECORDS, **{"spare": True, "done": {}} | how
        )

    return releases


def cost(schedule, split):
    """Return the largest cost of a split over the clients, as enforcement counts it."""
    items = [item for item in schedule if split in item.splits]
    by_client = ([item.release(declared) for item in items] for declared in RECORDS)
    return max(filter_epsilon(releases, 1e-5) for releases in by_client)


def steps_of_releases(config, done):
    """Steps by release; ``done`` is None in calibration, which spares an interrupted round."""
    schedule = make_schedule(config, RECORDS, done=done or {}, spare=done is None)
    return {(i.stage, i.action, i.kind, *i.splits): i.steps for i in schedule}


SEARCH = {
    ("search", "train.weight_gradient", "weights", "train"): 6,
    ("search", "train.alpha_gradient", "alphas", "validation"): 6,
}
FUSED = {
    ("search", "train.gradients", "weights", "train"): 18,
    ("search", "train.gradients", "alphas", "validation"): 18,
}
RETRAINED = ("retrain", "train.weights", "weights", "train", "validation")
RETRAIN = {RETRAINED: 20}
MEASURED = ("search", "evaluate.model", "metrics", "validation")
METRICS = "privacy.metrics_noise_multiplier=20"
WARM = ["algorithm=fdnas", "search_space=mbconv_small", "retrain=mbconv", "stages=[search]"]
WARM += ["privacy.local_steps=1", "algorithm.warm_up_rounds=7"]
ON_PATHS = ("search", "train.search", "weights", "train")
TESTED = {("evaluate", "evaluate.model", "metrics", "test"): 1}


HALFWAY = [METRICS, "stages=[search,retrain]", "algorithm.evaluate_every=2"]
BRIEF = "algorithm.warm_up_rounds=4"
STEPS_LEFT = [
    ([], {}, SEARCH | RETRAIN),
    (["algorithm.fused=true", "algorithm.local_steps=3"], {}, FUSED | RETRAIN),
    ([METRICS], {}, SEARCH | {MEASURED: 1} | RETRAIN | TESTED),
    ([METRICS, "algorithm.evaluate_every=4"], {}, SEARCH | {MEASURED: 2} | RETRAIN | TESTED),
    (HALFWAY, {"search": 4}, dict.fromkeys(SEARCH, 2) | {MEASURED: 1} | RETRAIN),
    ([], {"search": 6, "retrain": 3}, {RETRAINED: 8}),
    (["stages=[search]"], {}, SEARCH),
    (["algorithm=fedavg", "algorithm.network=plain_cnn"], {}, RETRAIN),
    (WARM, {}, {ON_PATHS: 6}),
    (["stages=[search]", BRIEF], {}, {key: 2 if "alphas" in key else 6 for key in SEARCH}),
    ([*WARM, BRIEF], {}, {ON_PATHS: 6, ("search", "train.search", "alphas", "validation"): 2}),
]


@pytest.mark.parametrize(("overrides", "done", "expected"), STEPS_LEFT)
def test_as_many_steps_as_the_rounds_still_to_do_take(compose_config, overrides, done, expected):
    steps = steps_of_releases(compose_config(*DP_FNAS, GIVEN, *overrides), done)
    assert steps == expected
    stages = list(dict.fromkeys(stage for stage, *_ in steps))  # covered steps count in this order
    assert stages == [s for s in ("search", "retrain", "evaluate") if s in stages]


@pytest.mark.parametrize("steps", [1, 2])
def test_noise_is_shared_in_single_steps_alone(compose_config, steps):
    own = ("secure_sum=true", "clients=4", f"algorithm.local_steps={steps}", "stages=[search]")
    schedule = make_schedule(compose_config(*DP_FNAS, GIVEN, *own), RECORDS * 2, done={})
    shared = {(p.kind, p.shared) for p in schedule}
    assert shared == {("weights", steps == 1), ("alphas", steps == 1)}


BATCHES = [
    (["privacy.rate=0.125"], 500.0),
    (["privacy.rate=1"], 4000.0),
    (["privacy.rate=null", "algorithm.batch_size=20"], 20.0),
    (["privacy.rate=null", "algorithm.batch_size=null"], 4000.0),
]


@pytest.mark.parametrize(("overrides", "batch"), BATCHES)
def test_a_searchs_batch_is_a_share_of_the_records_or_a_number(compose_config, overrides, batch):
    schedule = make_schedule(compose_config(*DP_FNAS, GIVEN, *overrides), RECORDS, done={})
    (weights,) = (p for p in schedule if (p.stage, p.kind) == ("search", "weights"))
    assert weights.expected_batch(RECORDS[0]) == batch
    assert weights.rate(RECORDS[0]) == batch / 4000


def test_each_stage_is_told_the_terms_of_its_own_releases(compose_config, federate, tmp_path):
    sites = f"privacy.sites={tmp_path}"
    config = compose_config(*DP_FNAS, GIVEN, "privacy.metrics_noise_multiplier=20", sites)
    schedule = make_schedule(config, RECORDS, done={})
    assert config.private_data_set == "records"
    assert compose_config("algorithm=fnas").private_data_set is None
    federation = federate(config)
    strategy = make_search(config, federation.data[0], federation.cohort, schedule=schedule)
    for item in schedule:
        if item.stage == "search":
            assert strategy.noise_multiplier(item.kind) == item.noise_multiplier
    assert strategy.noise_multiplier("rewards") is None


def test_retraining_gets_the_least_noise_with_which_every_split_keeps_the_target(planned):
    """For the client and split that have least left, with a round of each stage to spare."""
    schedule = planned(*DP_FNAS, "privacy.epsilon=5", "privacy.metrics_noise_multiplier=20")
    assert 0.98 * 5 < max(cost(schedule, split) for split in ("train", "validation")) <= 5


def test_a_resumed_run_retrains_with_the_noise_that_it_began_with(compose_config):
    config = compose_config(*DP_FNAS)
    times = ({}, {"search": 6, "retrain": 4})
    last = [make_schedule(config, RECORDS[:1], done=done)[-1] for done in times]
    assert last[0].noise_multiplier == last[1].noise_multiplier
    given = compose_config(*DP_FNAS, GIVEN)
    assert make_schedule(given, RECORDS, done={})[-1].noise_multiplier == 3.5


NULL = [f"privacy.{state}.noise_multiplier=null" for state in ("weights", "alphas")]


@pytest.mark.parametrize("metrics", ["null", "20"])
def test_noise_of_a_search_that_is_not_given_keeps_its_share_of_the_target(planned, metrics):
    """Weights and alphas each on its split, however far the run is; retraining gets the rest."""
    own = f"privacy.metrics_noise_multiplier={metrics}"
    given = (*DP_FNAS, *NULL, "privacy.epsilon=6", "privacy.search_share=0.4", own)
    schedule = planned(*given)
    search = [item for item in schedule if item.stage == "search"]
    for split in ("train", "validation"):
        assert 0.99 * 2.4 < cost(search, split) <= 2.4
    assert 0.98 * 6 < max(cost(schedule, split) for split in ("train", "validation")) <= 6
    for item, again in zip(search, planned(*given, done={"search": 3}, spare=False), strict=False):
        assert item.noise_multiplier == again.noise_multiplier

    for split in ("train", "validation"):
        assert 0.99 * 6 < cost(planned(*given, "stages=[search]"), split) <= 6


def test_noise_can_have_an_epsilon_of_its_own(compose_config, planned):
    """Each kind alone then costs that, as the papers count; the run costs more."""
    own = [f"privacy.{kind}.epsilon=2" for kind in ("weights", "alphas", "retrain")]
    schedule = planned(*DP_FNAS, *NULL, *own, "privacy.epsilon=100")
    for item in schedule:
        assert 0.99 * 2 < max(cost([item], split) for split in item.splits) <= 2
    assert 2.02 < max(cost(schedule, split) for split in ("train", "validation")) < 4
    words = r"noise_multiplier=1.0 with epsilon=2.0: .* one of them"
    refuses(words, compose_config, *DP_FNAS, "privacy.weights.epsilon=2")


def test_noise_that_can_or_cannot_be_calibrated(compose_config):
    fixed = compose_config(*DP_FNAS, *NULL, GIVEN, "algorithm=fedavg", "algorithm.network=linear")
    assert [item.stage for item in make_schedule(fixed, RECORDS, done={})] == ["retrain"]
    dear = compose_config(*DP_FNAS, *NULL, GIVEN, "privacy.metrics_noise_multiplier=0.2")
    words = "epsilon=8: metrics alone cost .* of 4 on the v.* for a"
    refuses(words, make_schedule, dear, RECORDS, done={})


def test_a_search_that_costs_all_of_the_target_is_refused_naming_the_split(compose_config):
    given = ["privacy.weights.noise_multiplier=100", "privacy.alphas.noise_multiplier=0.3"]
    config = compose_config(*DP_FNAS, *given, "privacy.epsilon=0.5")
    words = "epsilon=0.5: alphas alone cost .* on the validation records.* for retrain"
    refuses(words, make_schedule, config, RECORDS, done={})


FEATHERS = ["algorithm=feathers", "privacy=dp", "search_space.norm=group", "retrain.norm=group"]
FEATHERS += ["clients=2", "rounds=5", "algorithm.nas_rounds=2", "algorithm.num_configurations=8"]
FEATHERS += ["algorithm.bandit.beta=1.5", "retrain.rounds=4", "retrain.batch_size=16"]
FEATHERS += ["privacy.local_steps=3", "privacy.retrain.local_steps=4", "privacy.rate=null"]


TRIALS_LEFT = [
    ({}, (5, 4), (3, 2)),
    ({"search": 2, "retrain": 3}, (3, 1), (2, 0)),
    (None, (6, 5), (4, 3)),  # calibration: an interrupted one to spare
]


@pytest.mark.parametrize(("done", "rounds", "phases"), TRIALS_LEFT)
def test_every_step_of_trials_of_feathers_is_committed_to(compose_config, done, rounds, phases):
    noises = [f"privacy.{k}.noise_multiplier=2" for k in ("weights", "alphas", "rewards")]
    config = compose_config(*FEATHERS, *noises, GIVEN)
    found = steps_of_releases(config, done)
    search, retrain = (3 * number for number in phases)  # round(1.5 ln 8) trials
    expected = {
        ("search", "train.search", "weights", "train"): 3 * rounds[0],
        ("search", "train.search", "alphas", "validation"): 3 * rounds[0],
        ("search", "train.probe", "weights", "train"): 3 * search,
        ("search", "train.probe", "alphas", "validation"): 3 * search,
        ("search", "train.probe", "rewards", "validation"): search,
        ("retrain", "train.weights", "weights", "train"): 4 * rounds[1],
        ("retrain", "train.probe", "weights", "train"): 4 * retrain,
        ("retrain", "train.probe", "rewards", "validation"): retrain,
    }
    assert found == {place: steps for place, steps in expected.items() if steps}
    for stage, local_steps in (("search", 3), ("retrain", 4)):
        assert steps_of(config, stage) == local_steps


@pytest.mark.parametrize("algorithm", ["feathers", "dpnas"])
def test_a_search_shares_the_target_between_rewards_and_the_rest(planned, algorithm):
    given = ["privacy.epsilon=4", "privacy.rewards_share=0.25", "privacy.search_share=0.5"]
    schedule = planned(*{"feathers": FEATHERS, "dpnas": DPNAS}[algorithm], *NULL, *given)
    rewards = [item for item in schedule if item.kind == "rewards"]
    assert len({item.noise_multiplier for item in rewards}) == 1
    assert 0.99 * 1 < cost(rewards, "validation") <= 1
    assert 0.99 * 2 < cost([item for item in schedule if item.stage == "search"], "train") <= 2
    costs = [cost(schedule, split) for split in ("train", "validation")]
    assert 0.98 * 4 < max(costs) <= 4
    # retraining of FEATHERS does not read what its rewards cost
    assert algorithm == "dpnas" or 0.98 * 4 < min(costs)


TOO_LITTLE = [
    (["privacy.epsilon=.001", "stages=[retrain]", "genotype=a.json"], "privacy.epsilon=0.001"),
    (["privacy.retrain.epsilon=.001"], "privacy.retrain.epsilon=0.001"),
    ([NULL[0], "privacy.weights.epsilon=.002"], "privacy.weights.epsilon=0.002"),
]


@pytest.mark.parametrize(("given", "key"), TOO_LITTLE)
def test_an_epsilon_that_no_noise_keeps_is_refused_by_its_setting(compose_config, given, key):
    config = compose_config(*DP_FNAS, "privacy.delta=1e-300", *given)
    words = f"^{key}: no noise keeps .* raise {key.split('=')[0]}"
    refuses(words, make_schedule, config, RECORDS, done={})


def test_sentences_on_the_noise_of_scores(compose_config):
    own = ("privacy.scores_error=.1", "privacy.metrics_noise_multiplier=null")
    little = compose_config(*DP_FNAS, "privacy.delta=1e-300", "privacy.epsilon=.001", *own)
    words = "=0.001: no noise keeps scores to the 0.00025.* privacy.scores_error=null"
    refuses(words, make_schedule, little, RECORDS, done={})
    covers = {0: {"stage": "evaluate", "rounds": 0, "of": 1}}
    refuses("raise privacy.scores_error=0.1 or set", check_covered, little.dp, covers, 1)


# What the four arms of experiment=feathers/fraud_private earned in the first phase of a run at
# epsilon 2 per mechanism, with noise of .004: the first is much too slow.
EARNED = (0.08, 0.39, 0.43, 0.47)


@pytest.mark.parametrize(("epsilon", "found"), [(0.2, 0.4), (1.0, 0.65)])
def test_the_bandit_of_the_fraud_experiment_sees_through_the_noise_of_its_budget(epsilon, found):
    """With 3 of 4 arms tried at most 3/4 can choose the best; blind, a quarter would."""
    overrides = ["experiment=feathers/fraud_private", f"privacy.epsilon={epsilon}"]
    config = parse_config(compose_tree(overrides))
    records = {"train": 1625, "validation": 406, "test": 0}
    schedule = make_schedule(config, [records] * config.clients, done={})
    sigma = next(i.noise_multiplier for i in schedule if i.kind == "rewards")
    total = math.sqrt(config.clients) / (config.clients * records["validation"])
    noise = config.algorithm.loss_bound * sigma * total  # of the clients' mean
    generator = torch.Generator().manual_seed(1)
    new, chosen = Bandit.of(len(EARNED), config.algorithm.bandit), []
    for _ in range(400):
        arms = new.draw(new.num_trials(), generator)
        noises = noise * torch.randn(len(arms), generator=generator)
        rewards = {a: EARNED[a] + n for a, n in zip(arms, noises.tolist(), strict=True)}
        chosen.append(new.updated(rewards, noise=noise).best())
    assert chosen.count(0) < 0.02 * len(chosen)
    assert found * len(chosen) < chosen.count(3) <= 0.8 * len(chosen)


def test_rewards_take_all_that_given_noise_of_alphas_leaves(planned):
    given = ["privacy.epsilon=4", "privacy.rewards_share=0.01", "privacy.alphas.noise_multiplier=2"]
    schedule = planned(*FEATHERS, *given)
    assert 0.04 < cost([item for item in schedule if item.kind == "alphas"], "validation")
    assert 0.98 * 4 < cost(schedule, "validation") <= 4


DPNAS = ["algorithm=dpnas", "search_space=dp_cells", "retrain=dp_cells", "privacy=dp", "clients=2"]
DPNAS += ["rounds=6", "algorithm.warm_up_rounds=2", "algorithm.trained_candidates=3"]
DPNAS += ["algorithm.local_steps=2", "algorithm.batch_size=16", "retrain.rounds=4"]
DPNAS += ["retrain.batch_size=16", "privacy.retrain.local_steps=5"]


ROUNDS_DONE = [
    ({}, 36, 5, 20),  # 4 of 6 rounds teach, the last one also chooses
    ({"search": 1}, 30, 5, 20),
    ({"search": 5, "retrain": 2}, 6, 2, 10),
    ({"search": 6}, 0, 0, 20),
    (None, 42, 7, 25),  # to spare: a round that teaches and chooses
]


@pytest.mark.parametrize(("done", "steps", "measured", "retrained"), ROUNDS_DONE)
def test_steps_and_rewards_are_committed_to(compose_config, done, steps, measured, retrained):
    config = compose_config(*DPNAS, GIVEN, "privacy.rewards.noise_multiplier=20")
    found = steps_of_releases(config, done)
    expected = {
        ("search", "train.candidate", "weights", "train"): steps,
        ("search", "evaluate.candidates", "rewards", "validation"): measured,
        ("retrain", "train.weights", "weights", "train", "validation"): retrained,
    }
    assert found == {place: number for place, number in expected.items() if number}


# --- counts of scores


COUNTED = (*DP_FNAS[:3], "retrain.rounds=1", "privacy.scores_error=0.01", GIVEN)


def counts_of(config, records):
    """The release of counts of scores in the schedule of the first client, None without one."""
    schedule = make_schedule(config, records, done={})
    found = [release for release in schedule if release.kind == "scores"]
    return found[0] if found else None


@pytest.mark.parametrize("summed", [False, True])
def test_noise_of_counts_follows_from_the_error_of_all_clients(compose_config, summed):
    """By hand: 4 x 50,000 records, 10 % of the rarer class, sqrt(12 / 16) of .01."""
    records = [{"train": 40_000, "validation": 10_000, "test": 0}] * 4
    more = ["secure_sum=true"] if summed else []
    release = counts_of(compose_config(*COUNTED, "clients=4", *more), records)
    total = 0.01 * 0.1 * 200_000 * math.sqrt(0.75)
    assert release.noise_multiplier == pytest.approx(total / (1 if summed else 2))
    assert (release.shared, release.steps, release.batch_size) == (summed, 1, None)
    assert release.splits == ("train", "validation")


def test_counts_of_few_records_cost_a_quarter_of_epsilon_at_most(compose_config):
    config = compose_config(*COUNTED, "clients=2", "privacy.epsilon=8")
    records = [{"train": 100, "validation": 20, "test": 0}] * 2
    assert 1.9 < filter_epsilon([counts_of(config, records).release(records[0])], 1e-5) <= 2
    many = [{"train": 10**6, "validation": 10**5, "test": 0}] * 2
    assert counts_of(config, many).noise_multiplier > 500


def test_no_counts_are_planned_for_baselines_units_of_clients_or_other_classes(compose_config):
    config = compose_config(*COUNTED, "clients=2")
    assert counts_of(config, RECORDS) is not None
    by_client = ("privacy.unit=client", "secure_sum=true", "clients=4")
    of_experiment = compose_config("experiment=search/recommended_private", *by_client)
    assert counts_of(of_experiment, RECORDS * 2) is None
    for names, several in ((("a", "b"), True), (("a", "b", "c"), False)):
        train = SimpleNamespace(class_names=names, multi_label=several)
        data = SimpleNamespace(train=train, transform=())
        assert counts_of(for_data(config, data, least_noise=[]), RECORDS) is None


IMAGES = ("algorithm=fedavg", "algorithm.network=linear", "privacy=dp", "clients=4")


@pytest.fixture
def of_features(compose_config):
    """``of_features(*overrides)``: the schedule of private clients with features of images."""
    train = SimpleNamespace(class_names=("a", "b", "c"), multi_label=False)

    def planned(*overrides, shape=(40,), transform=("backbone", "a", "32", "hash"), least=()):
        config = compose_config(*(() if "search_space" in overrides[0] else IMAGES), *overrides)
        data = SimpleNamespace(train=train, transform=transform, input_shape=shape)
        config = for_data(config, data, least_noise=least)
        return make_schedule(config, RECORDS * 2, done={}, least_noise=least)

    return planned


def test_the_mean_of_pooled_features_costs_a_share_of_epsilon_where_noise_is_free(of_features):
    for epsilon, share in ((1.0, 0.3), (8.0, 0.3), (8.0, 0.05)):
        given = (f"privacy.epsilon={epsilon}", f"privacy.statistics_share={share}")
        release, _ = of_features(*given)
        assert (release.kind, release.shared) == ("statistics", False)
        cost = filter_epsilon([release.release(RECORDS[0])], 1e-5)
        assert 0.95 * share * epsilon < cost <= share * epsilon
    assert of_features("secure_sum=true")[0].shared
    assert of_features("privacy.statistics_noise_multiplier=7")[0].noise_multiplier == 7
    accepted = of_features("privacy.epsilon=8", least=[0.1, 30.0, 30.0])
    assert accepted[0].noise_multiplier == 30  # as most sites ask for
    refuses(
        "no noise keeps statistics to the 0.0009.* privacy.statistics_share=0",
        of_features,
        "privacy.epsilon=0.003",
    )


def test_no_mean_is_planned_of_other_data_or_where_it_is_not_wanted(of_features):
    for overrides, data in (
        (("privacy.epsilon=8",), {"shape": (8, 4, 4)}),  # a map, or scattering
        (("privacy.epsilon=8",), {"transform": ()}),
        (("privacy.statistics_share=0",), {}),
        (("privacy.retrain.noise_multiplier=3",), {}),
        (("privacy.retrain.epsilon=3",), {}),
        (("privacy.unit=client", "secure_sum=true"), {}),
    ):
        assert [release.kind for release in of_features(*overrides, **data)] == ["weights"]


def test_a_search_keeps_its_share_beside_the_mean_of_features(of_features):
    """What statistics cost is taken from retraining, which fills epsilon up."""
    search = ("search_space.norm=group", "algorithm=dp_fnas", "privacy=dp", "retrain.norm=group")
    search += ("clients=4", "rounds=4", "privacy.epsilon=8")
    (*before, retrain), (mean, *after) = (
        of_features(*search, f"privacy.statistics_share={share}") for share in (0, 0.3)
    )
    assert mean.kind == "statistics"
    assert after[:-1] == before
    assert after[-1].noise_multiplier > retrain.noise_multiplier
    whole = [release.release(RECORDS[0]) for release in (mean, *after) if "train" in release.splits]
    assert filter_epsilon(whole, 1e-5) <= 8


def test_no_noise_is_calibrated_below_what_most_sites_accept(compose_config):
    """Of two sites the lower: the one that asks for more leaves."""
    config = compose_config(*DP_FNAS, "privacy.epsilon=1e3", "clients=3")
    for least_noise, expected in (([8.0, 2.0], 2.0), ([9.0, 1.0, 8.0], 8.0)):
        schedule = make_schedule(config, RECORDS, done={}, least_noise=least_noise)
        assert schedule[-1].noise_multiplier == expected
