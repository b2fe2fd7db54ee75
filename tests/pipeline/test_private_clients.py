"""Whole private runs, of clients, persons and every algorithm: what is booked and promised."""

import math
import re
import shutil
from collections import Counter
from statistics import fmean

import numpy as np
import pytest

from fednas_flwr import compose, run
from fednas_flwr.algorithms.feathers.strategy import BOUND_PER_SCALE
from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
from fednas_flwr.privacy.mechanism.accounting import prv_epsilon, rdp_epsilon
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.settings.names import SPLITS
from fednas_flwr.settings.optimizers import LEAST_LOSS_BOUND
from fednas_flwr.settings.unused import without_effect

from ..booked import booked, decoded_totals, promised_steps
from ..refusals import refuses, refuses_run

SIZES = ("channels=2", "num_cells=1")
CLIENTS = ["privacy=dp", "privacy.unit=client", "privacy.epsilon=200", "clients=4"]
CLIENTS += ["secure_sum=true", "secure_sum={least_sites: 3, colluding: 1}", "retrain.batch_size=8"]
CLIENTS += ["privacy.weights.noise_multiplier=null", "privacy.alphas.noise_multiplier=null"]
CLIENTS += ["rounds=2", "retrain.rounds=2", "retrain.local_epochs=2"]
CLIENTS += ["dataset.fractions={train: 0.4, validation: 0.3, test: 0.3}"]
SEARCH = [f"{part}.{size}" for part in ("search_space", "retrain") for size in SIZES]
SEARCH += ["algorithm.local_epochs=2", "algorithm.batch_size=8"]
RUNS = {
    "fed_darts": [*SEARCH, "algorithm.rule=mixed_level"],
    "feathers": [*SEARCH, "algorithm.num_configurations=3", "algorithm.nas_rounds=2"],
    "fedavg": ["algorithm.network=linear"],
}
# What two rounds release, by algorithm: action, kind, steps, whether noise is shared. The first one
# explores, by three trials at most.
SEARCHED = [("train.search", "weights", 2, True), ("train.search", "alphas", 2, True)]
RETRAINED = ("train.weights", "weights", 2, True)
PROBED = ("train.probe", "rewards", 3, False)
PLANS = {"fed_darts": [*SEARCHED, RETRAINED], "fedavg": [RETRAINED]}
PLANS["feathers"] = [*SEARCHED, PROBED, RETRAINED, PROBED]


@pytest.mark.parametrize("algorithm", RUNS)
def test_clients_release_one_update_an_exchange(algorithm, run_inline):
    ran = run_inline(*CLIENTS, f"algorithm={algorithm}", *RUNS[algorithm])
    private = ran.the("privacy")
    schedule = private["schedule"]
    assert {tuple(planned["splits"]) for planned in schedule} == {SPLITS}
    assert {planned["batch_size"] for planned in schedule} == {None}
    assert [(p["action"], p["kind"], p["steps"], p["shared"]) for p in schedule] == PLANS[algorithm]
    for client in private["clients"]:
        assert (client["unit"], client["records"]) == ("client", dict.fromkeys(SPLITS, 1))
        assert set(client["rates"]) == {1.0}
        assert len(set(client["epsilon"]["prv"].values())) == 1  # of all splits alike
    entries = booked(ran.folder / "sites")
    assert {entry.splits for entry in entries} == {SPLITS}
    assert {entry.action for entry in entries} == {
        f"{action}:{kind}{' (noise of 2 sites)' if shared else ''}"
        for action, kind, _, shared in PLANS[algorithm]
    }
    for event in ran.events:
        assert not event.get("metrics", {}).keys() & {"train_loss", "validation_loss"}
    card = re.sub(r"\s+", " ", (ran.folder / "MODEL_CARD.md").read_text())
    assert "per client, zeroed out" in card
    assert "whose updates are replaced by zeros" in card
    assert "The noise of train." in card
    assert "per record" not in card


TELLING_MORE = [
    ("secure_sum=false", "secure_sum=null: each client would add all noise"),
    ("algorithm=dp_fnas", "unit=client with algorithm=dp_fnas is not possible"),
    ("algorithm=dpnas search_space=dp_cells retrain=dp_cells", "algorithm=dpnas is not"),
    ("training.momentum=averaged", "averaged: the moments would be further releases"),
    ("privacy.metrics_noise_multiplier=9", "no metric of a whole client is defined"),
    ("retrain.exchange=gradients", "updates of several steps are released"),
    ("privacy.delta=.3", "privacy.delta=0.3 with 4 clients: expected below 1 / 4"),
    ("privacy.unit=person", "privacy.unit=person"),
]


@pytest.mark.parametrize(("overrides", "said"), TELLING_MORE)
def test_what_tells_more_than_an_update_is_refused(overrides, said, compose_config):
    names = {override.partition("=")[0] for override in overrides.split()}
    base = [o for o in CLIENTS if o.partition("=")[0] not in names]
    refuses_run(said, compose_config, *base, *SEARCH * ("algorithm" not in names), overrides)


def test_steps_of_records_have_no_effect(compose_config):
    idle = without_effect(compose_config(*CLIENTS, *SEARCH))
    steps = {"local_steps", "retrain.local_steps", "micro_batch_size", "fewest_records"}
    assert {f"privacy.{name}" for name in steps} <= idle.keys()
    assert not {"algorithm.local_epochs", "retrain.local_epochs"} & idle.keys()


# --- of which the unit is a person


OF_TABLE = ("search_space=mlp_small", "search_space.channels=8", "retrain.channels=8")
PERSONS = 60


@pytest.fixture
def overrides(tmp_path):
    """Settings of a private search on a table of 60 patients with one to four rows each."""
    rng = np.random.default_rng(0)
    rows = [
        f"p{patient},{rng.normal():.4f},{rng.normal() + patient % 2:.4f},{patient % 2}"
        for patient in range(PERSONS)
        for _ in range(1 + patient % 4)
    ]
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(["patient,a,b,ill", *rows]) + "\n")
    own = ["algorithm=dp_fnas", "privacy=dp", *OF_TABLE, "search_space.norm=group"]
    own += ["retrain.norm=group", "rounds=1", "retrain.rounds=1", "clients=2", "runtime.device=cpu"]
    own += ["algorithm.batch_size=6", "retrain.batch_size=6", "privacy.epsilon=100", "trackers=[]"]
    own += ["privacy.metrics_noise_multiplier=5", "privacy.micro_batch_size=4"]
    own += ["dataset=csv", f"dataset.root={path}", f"dataset.cache={tmp_path / 'cache'}"]
    own += ["dataset.id_column=patient", "dataset.statistics={a: [0, 1], b: [0, 1]}"]
    return [*own, "dataset.server_test=false"]


@pytest.mark.run
def test_persons_are_drawn_declared_and_promised(overrides, tmp_path):
    folder = run(compose(*overrides, f"run_dir={tmp_path / 'run'}")).folder
    (private,) = read_run(folder).of_kind("privacy")
    assert [client["unit"] for client in private["clients"]] == ["person", "person"]
    declared = [client["records"] for client in private["clients"]]
    # rounded down for each split, of 30 persons each
    assert [sum(records.values()) for records in declared] == [30, 30]
    rates = {row.action: row.release.sample_rate for row in booked(folder / "sites")}
    assert rates["train.weight_gradient:weights"] == pytest.approx(6 / declared[0]["train"])
    card = re.sub(r"\s+", " ", (folder / "MODEL_CARD.md").read_text())
    assert "per person, add/remove" in card
    assert "per record" not in card
    assert "One person with all records of one client" in card
    assert "A person contributes the mean of their records" in card


@pytest.fixture
def by_unit(overrides, tmp_path):
    """``by_unit(unit, name)``: a run of that name, whose sites all runs share, per that unit."""

    def ran(unit, name):
        own = [text for text in overrides if not text.startswith("dataset.id_column")]
        own = [*own, "dataset.ignore=[patient]"] if unit == "record" else overrides
        places = (f"privacy.sites={tmp_path / 'sites'}", f"run_dir={tmp_path / name}")
        return run(compose(*own, *places))

    return ran


@pytest.mark.run
def test_the_policy_and_the_data_must_name_the_same_unit(by_unit, tmp_path):
    by_unit("person", "run")
    refuses("policy has unit: person, but the data does not say", by_unit, "record", "other")
    for policy in tmp_path.glob("sites/*/policy.yaml"):
        policy.write_text(policy.read_text().replace("unit: person", "unit: record"))
    refuses("policy has unit: record, but dataset.id_column says", by_unit, "person", "third")
    assert not (tmp_path / "other").exists()
    assert not (tmp_path / "third").exists()


@pytest.mark.run
def test_another_unit_keeps_the_budget_and_a_new_one_says_its_gap(by_unit, tmp_path):
    """Releases per record promise nothing to persons, whatever the policy says afterwards."""
    first, sites = by_unit("record", "run"), tmp_path / "sites"
    assert "under budgets other than" not in (first.folder / "MODEL_CARD.md").read_text()
    policies = list(sites.glob("*/policy.yaml"))
    for policy in policies:
        text = policy.read_text().replace("unit: record", "unit: person")
        policy.write_text(re.sub(r"records: \d+", f"records: {PERSONS // 2}", text))
    refuses("more than what is left of budgets covers", by_unit, "person", "second")
    kept = shutil.copytree(sites, tmp_path / "kept")
    for policy in policies:
        policy.write_text(policy.read_text() + "    account: per-person\n")
    card = re.sub(r"\s+", " ", (by_unit("person", "third").folder / "MODEL_CARD.md").read_text())
    assert "per person, add/remove" in card
    assert (
        "have also released under budgets other than this run's, per record. Where that was of "
        "the same records, epsilon leaves it out." in card
    )
    for client in range(2):  # the refused run has booked nothing
        assert {row.unit for row in booked(kept, client)} == {"record"}
    assert {row.account: row.unit for row in booked(sites)}["per-person"] == "person by patient"


# --- of FEATHERS, FDNAS, DPNAS and halving: what is booked and promised


IMAGE_SIZES = ("norm=group", "channels=2", "num_cells=1")
PRIVATE = [f"{part}.{size}" for part in ("search_space", "retrain") for size in IMAGE_SIZES]
PRIVATE += ["privacy=dp", "clients=2", "algorithm.batch_size=8", "retrain.batch_size=8"]
PRIVATE += ["privacy.local_steps=2", "privacy.retrain.local_steps=3", "stages=[search,retrain]"]
PRIVATE += [f"privacy.{kind}.noise_multiplier=null" for kind in ("weights", "alphas")]
FEATHERS = [*PRIVATE, "algorithm=feathers", "algorithm.nas_rounds=2", "algorithm.bandit.beta=1.0"]
FEATHERS += ["algorithm.num_configurations=7", "rounds=3", "retrain.rounds=3", "privacy.epsilon=30"]


@pytest.fixture(scope="module")
def run_booked(run_inline):
    """``run_booked(*overrides)``: a whole run inline, and all clients' entries."""

    def ran(*overrides):
        done = run_inline(*overrides)
        done.booked = [booked(done.folder / "sites", k) for k in range(done.config.clients)]
        return done

    return ran


@pytest.fixture(scope="module")
def searched(run_booked):
    return run_booked(*FEATHERS)


def check_books(ran, **of_rounds):
    """Check what every whole private run owes; return the promised steps and each client's.

    ``of_rounds`` is the number of rounds of each stage, all of which the budget covers.
    """
    promise, spent = ran.the("privacy"), ran.the("privacy_spent")
    promised = promised_steps(promise)
    budget, booked_steps = ran.config.privacy.epsilon, []
    for told, rows in zip(promise["clients"], ran.booked, strict=True):
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
                    assert told["epsilon"][name][split] == pytest.approx(accountant(releases, 1e-5))
        assert max(told["epsilon"]["prv"].values()) <= budget
        covers = [{"stage": stage, "rounds": n, "of": n} for stage, n in of_rounds.items()]
        assert told["covers"] == covers
    assert all(0 < client["spent"] <= budget for client in spent["clients"])
    costs = [[client["epsilon"] for client in event["clients"]] for event in (promise, spent)]
    assert costs[0] == costs[1]  # as no other run has released anything
    assert not ran.failed
    for event in ran.named("round"):
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


FDNAS = ["algorithm=fdnas", "search_space=mbconv_small", "retrain=mbconv", "privacy=dp"]
FDNAS += ["clients=2", "search_space.norm=group", "search_space.width=0.1", "retrain.norm=group"]
FDNAS += ["algorithm.batch_size=8", "retrain.batch_size=8", "algorithm.warm_up_rounds=1"]
FDNAS += ["privacy.local_steps=2", "privacy.retrain.local_steps=3", "stages=[search,retrain]"]
FDNAS += ["rounds=3", "retrain.rounds=2", "privacy.epsilon=30"]
FDNAS += [f"privacy.{kind}.noise_multiplier=null" for kind in ("weights", "alphas")]


DPNAS = ["algorithm=dpnas", "search_space=dp_cells", "retrain=dp_cells", "privacy=dp", "clients=2"]
DPNAS += ["search_space.widths=[2,2,4]", "search_space.head=4", "algorithm.warm_up_rounds=1"]
DPNAS += ["algorithm.trained_candidates=3", "algorithm.rewarded_candidates=4", "rounds=3"]
DPNAS += ["algorithm.final_candidates=5", "algorithm.local_steps=2", "algorithm.batch_size=8"]
DPNAS += ["retrain.batch_size=8", "retrain.rounds=2", "privacy.retrain.local_steps=3"]
DPNAS += ["stages=[search,retrain]", "privacy.epsilon=30", "privacy.weights.noise_multiplier=null"]


HALVING = ["algorithm=successive_halving", "algorithm.pool.draws=5", "algorithm.pool.keep=4"]
HALVING += ["privacy=dp", "clients=2", "rounds=2", "stages=[search]", "search_space.norm=group"]
HALVING += ["privacy.local_steps=3", "algorithm.batch_size=8", "privacy.epsilon=100"]
HALVING += [f"search_space.{size}" for size in SIZES]
BOOKED_RETRAINING = ("retrain", "train.weights:weights", ("train", "validation"))
SEARCH_WEIGHTS = ("search", "train.search:weights", ("train",))
SEARCH_ALPHAS = ("search", "train.search:alphas", ("validation",))
CANDIDATES = ("search", "train.candidate:weights", ("train",))
REWARDS = ("search", "evaluate.candidates:rewards", ("validation",))
TRAINED = ("search", "train.weights:weights", ("train",))
BOOKED = {  # the steps by what is released
    "fdnas": (FDNAS, {SEARCH_WEIGHTS: 3 * 2, SEARCH_ALPHAS: 2 * 2, BOOKED_RETRAINING: 2 * 3}),
    "dpnas": (DPNAS, {CANDIDATES: 3 * 3 * 2, REWARDS: 2 + 1, BOOKED_RETRAINING: 2 * 3}),
    # as many releases of weights as steps, one of rewards a rung
    "successive_halving": (HALVING, {TRAINED: 2 * 3, REWARDS: 2}),
}
LATER = {"fdnas": SEARCH_ALPHAS, "dpnas": REWARDS}  # what the first round does not release


@pytest.mark.run
@pytest.mark.parametrize("algorithm", BOOKED)
def test_all_steps_of_the_schedule_are_booked(run_booked, algorithm):
    overrides, expected = BOOKED[algorithm]
    done = run_booked(*overrides)
    rounds = {"search": 3, "retrain": 2} if algorithm != "successive_halving" else {"search": 2}
    promised, booked_steps = check_books(done, **rounds)
    assert promised == expected
    assert booked_steps == [expected] * 2
    for rows in done.booked if algorithm in LATER else ():
        assert {row.round for row in rows if row.action == LATER[algorithm][1]} == {2, 3}
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


def test_the_total_of_updates_carries_the_noise_that_is_booked(run_inline):
    """Of clients that move nothing, totals are the noise alone."""
    with decoded_totals() as totals:
        own = ("algorithm=fedavg", "algorithm.network=resnet8_4", "stages=[retrain]")
        still = ("retrain.weights.lr=1e-30", "retrain.weights.min_lr=0", "retrain.rounds=4")
        ran = run_inline(*CLIENTS, *own, *still)
    assert len(totals) == 4
    (planned,) = ran.the("privacy")["schedule"]
    sigma, norm = planned["noise_multiplier"], planned["max_grad_norm"]
    # 4 clients took part; each adds 1 / 2 of the variance, as only 2 honest ones are relied on.
    assert np.concatenate(totals).std() == pytest.approx(sigma * norm * np.sqrt(4 / 2), rel=0.05)
