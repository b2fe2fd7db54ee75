"""Whole private runs: what is booked and told, who leaves, and what hostile servers get."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from torch.nn import functional

from fednas_flwr import load
from fednas_flwr.algorithms.stage_strategies import make_search
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.cli import main
from fednas_flwr.client import release_guard
from fednas_flwr.client.audit_trail import verify_trail
from fednas_flwr.client.making import PRIVATE_SITE_KEYS, check_public
from fednas_flwr.data.loaders import Split
from fednas_flwr.data.prepared import make_data
from fednas_flwr.deploy import client_app
from fednas_flwr.models.networks import supernet_space
from fednas_flwr.pipeline.beginning import commit, make_cohort
from fednas_flwr.privacy.actions import PRIVATE_ACTIONS
from fednas_flwr.privacy.books.anchor import MOST_BYTES, counter_of
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
from fednas_flwr.privacy.mechanism.accounting import gdp_epsilon, prv_epsilon, rdp_epsilon
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.messages import Header, encode_request
from fednas_flwr.protocol.requests import Commit, Describe, Evaluate
from fednas_flwr.runs.events import read_events
from fednas_flwr.search.optimizer_step import make_adam, make_sgd
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings import dump_config

from ..asked import SUPERNET, smallest
from ..booked import booked, promised_steps
from ..client.conftest import clipped_sum, step_along
from ..data_sets import save_pixels
from ..finished_runs import Told, in_process, named, stop_at
from ..policies import policy_of
from ..refusals import raising, refuses
from ..rows import by_hand, seldom
from ..watched import noting
from .test_schedule import make_schedule

SIZES = ("norm=group", "channels=2", "num_cells=1")
DP = ["algorithm=dp_fnas", "privacy=dp", "algorithm.batch_size=8", "retrain.batch_size=8"]
DP += [*(f"{part}.{size}" for part in ("search_space", "retrain") for size in SIZES), "clients=2"]
DP += ["privacy.retrain.local_steps=3", "privacy.epsilon=1000"]
DP += [f"privacy.{kind}.noise_multiplier=1" for kind in ("weights", "alphas")]
DP += ["retrain.weights.lr=0.05", "retrain.weights.min_lr=0.001", "privacy.retrain.max_grad_norm=1"]
SEARCH = [*DP, "stages=[search]"]


def steps_by_split(entries):
    assert {entry.release.steps for entry in entries} == {1}
    return Counter(split for entry in entries for split in entry.splits)


@pytest.fixture
def start(quick_run, monkeypatch):
    """``start(*overrides)``: a whole run, with the folder of its simulated sites."""
    # PRV takes a tenth of these runs' time; the whole run below has it
    monkeypatch.setitem(release_guard.ACCOUNTANTS, "prv", rdp_epsilon)

    def started(*overrides, **how):
        ran = quick_run(*overrides, **how)
        sites = Path(getattr(ran.config.privacy, "sites", None) or ran.folder / "sites")
        return Told(**vars(ran), sites=sites)

    return started


def write_policy(sites, client, **changes):
    """Write a simulated site's policy before its first run."""
    own = {"epsilon": 1000.0, "least_noise_multiplier": 0.1, "largest_steps": 1000, "records": 40}
    own |= {"fractions": {"train": 0.5, "validation": 0.4, "test": 0.1}}
    section = policy_of(**own | {"actions": list(PRIVATE_ACTIONS)} | changes)
    path = sites / f"client-{client}" / "policy.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"data_sets": {"records": section}}))


# --- one whole run through the command line


@pytest.fixture(scope="module")
def whole(tiny_overrides, tmp_path_factory):
    """A run with retraining, noised metrics and a target epsilon, by the command line."""
    folder = tmp_path_factory.mktemp("whole")
    overrides = [*tiny_overrides, *DP, "stages=[search,retrain,evaluate]", "privacy.epsilon=30"]
    overrides += ["privacy.metrics_noise_multiplier=5", "algorithm.evaluate_every=1"]
    overrides += ["dataset.fractions={train: 0.4, validation: 0.4, test: 0.2}"]
    assert main(["run", *overrides, f"run_dir={folder / 'run'}"]) == 0
    events = read_events(folder / "run" / "events.jsonl")
    folder = folder / "run"
    return Told(folder=folder, sites=folder / "sites", events=events, overrides=overrides)


def test_a_whole_run_books_every_step_of_its_schedule_and_no_other(whole):
    for client in (0, 1):
        rows = booked(whole.sites, client)
        assert steps_by_split(rows) == {
            "train": 2 + 2 * 3,
            "validation": 2 + 2 + 2 * 3,  # alphas, metrics of every round, retraining
            "test": 1,
        }
        promised = promised_steps(whole.the("privacy"))
        keys = [(row.stage, row.action, row.splits) for row in rows]
        assert [row.committed_steps for row in rows] == [promised[key] for key in keys]
        assert Counter(keys) == promised  # retraining has reached its last step
    assert not whole.failed


def test_the_epsilon_that_is_told_is_that_of_the_schedule_and_within_the_target(whole):
    event = whole.the("privacy")
    for client in event["clients"]:
        records = client["records"]
        by_split: dict[str, list] = {}
        for item, told in zip(event["schedule"], client["rates"], strict=True):
            total = sum(records[split] for split in item["splits"])
            rate = 1.0 if item["batch_size"] is None else item["batch_size"] / total
            assert told == pytest.approx(rate)
            for split in item["splits"]:
                release = Release(item["noise_multiplier"], rate, item["steps"])
                by_split.setdefault(split, []).append(release)
        assert set(by_split) == {"train", "validation", "test"}
        for name, accountant in (("prv", prv_epsilon), ("rdp", rdp_epsilon), ("gdp", gdp_epsilon)):
            by_hand = {split: accountant(rs, 1e-5) for split, rs in by_split.items()}
            assert client["epsilon"][name] == pytest.approx(by_hand, rel=1e-6)
        assert max(client["epsilon"]["prv"].values()) <= 30
        assert client["secure_noise"] is True
    spent = whole.the("privacy_spent")
    assert 24 < max(client["spent"] for client in spent["clients"]) <= 30  # most of it is used


def test_only_released_metrics_are_in_the_record_of_a_run(whole):
    rounds = whole.named("round")
    assert {e["stage"] for e in rounds} == {"search", "retrain"}
    for event in rounds:
        measured = {"loss", "accuracy"} if event["stage"] == "search" else set()
        assert {name for m in event["clients"].values() for name in m} == measured
    partition, evaluated = whole.the("partition"), whole.the("evaluated")
    assert partition["counts"] is evaluated["linear"] is None
    tested = {client["num_examples"] for client in evaluated["clients"]}
    assert tested == {split["test"] for split in partition["splits"]}


def test_a_run_that_no_budget_covers_ends_before_anything_is_released(whole, start):
    """The sites' budget is that of one run: the second run adds up and finds nothing left."""
    given = [o for o in whole.overrides if not o.startswith(("privacy.epsilon", "stages"))]
    given += ["privacy.epsilon=500", "privacy.weights.noise_multiplier=0.3", "stages=[search]"]
    before = booked(whole.sites, 0)
    run = start(*given, f"privacy.sites={whole.sites}", fails=True)
    words = "search takes 2 rounds, more than what is left of budgets covers (client 0: "
    assert words in str(run.error)
    assert booked(whole.sites, 0) == before
    for client in run.the("privacy")["clients"]:
        assert client["covers"] == [{"stage": "search", "rounds": 0, "of": 2}]
    assert run.events[-1]["status"] == "failed"
    assert "Nothing was released." in run.events[-1]["reason"]


# --- DP-FNAS


@pytest.mark.parametrize(("local_steps", "fused", "clients"), [(1, False, 1), (2, True, 2)])
def test_every_step_of_the_search_is_booked_on_its_split(start, local_steps, fused, clients):
    own = (f"algorithm.local_steps={local_steps}", f"algorithm.fused={str(fused).lower()}")
    run = start(*SEARCH, *own, f"clients={clients}")
    event = run.the("privacy")
    whole_search = [{"stage": "search", "rounds": 2, "of": 2}]
    assert [client["covers"] for client in event["clients"]] == [whole_search] * clients
    for client in range(clients):
        rows = booked(run.sites, client)
        assert steps_by_split(rows) == {"train": 2 * local_steps, "validation": 2 * local_steps}
        declared = event["clients"][client]["records"]
        for row in rows:
            assert row.release.sample_rate == min(1.0, 8 / declared[row.splits[0]])
    assert len(run.named("round")) == 2


def test_a_killed_run_books_again_under_a_new_name_and_keeps_the_noise_of_retraining(start):
    given = ["stages=[search,retrain]", "privacy.epsilon=40"]  # which is the sites' budget, too
    stop = stop_at("round", stage="retrain")
    killed = start(*DP, *given, "clients=1", listeners=[stop], fails=True)
    assert isinstance(killed.error, KeyboardInterrupt)
    before = booked(killed.sites, 0)
    resumed = start(resume=killed.folder)
    after = booked(killed.sites, 0)
    assert after[: len(before)] == before
    assert steps_by_split(before) == {"train": 2 + 3, "validation": 2 + 3}
    assert steps_by_split(after[len(before) :]) == {"train": 2 * 3, "validation": 2 * 3}
    assert len({row.run for row in before}) == len({row.run for row in after}) - 1 == 1
    events = resumed.named("privacy")
    noise = [event["schedule"][-1]["noise_multiplier"] for event in events]
    assert noise[0] == noise[1]
    assert [item["steps"] for item in events[1]["schedule"]] == [6]  # the search is done
    for split in ("train", "validation"):  # what was repeated is told
        releases = [row.release for row in after if split in row.splits]
        told = events[1]["clients"][0]["epsilon"]["rdp"][split]
        assert told == pytest.approx(rdp_epsilon(releases, 1e-5))


@pytest.mark.parametrize("done", [0, 1])
def test_a_resumed_run_with_rounds_done_goes_on_while_its_budget_lasts(start, tmp_path, done):
    """The budget is for six rounds: when a round is repeated, for four of the five to do."""
    six_rounds = Release(noise_multiplier=1.0, sample_rate=8 / 16, steps=6)  # of the alphas
    budget = 1.002 * filter_epsilon([six_rounds], 1e-5)
    # the checkpoint of a round would have come after its event
    stop = stop_at("round", round=2) if done else stop_at("stage_started")
    given = [*SEARCH, "clients=1", f"privacy.sites={tmp_path}", "rounds=6"]
    write_policy(tmp_path, 0, epsilon=budget)
    killed = start(*given, listeners=[stop], fails=True)
    assert isinstance(killed.error, KeyboardInterrupt)
    before = len(booked(tmp_path, 0))
    if not done:
        write_policy(tmp_path, 0, epsilon=budget / 2)
    resumed = start(resume=killed.folder, fails=True)
    _, event = resumed.named("privacy")
    assert [item["steps"] for item in event["schedule"]] == [6 - done] * 2
    (covers,) = event["clients"][0]["covers"]
    assert covers["rounds"] < covers["of"] == 6 - done
    assert covers["rounds"] == 4 or not done
    after = len(booked(tmp_path, 0)) - before
    if done:
        assert {row.committed_steps for row in booked(tmp_path, 0)[-after:]} == {5}
        assert isinstance(resumed.error, QuorumError)
        assert "the budget is" in str(resumed.error)
        assert 8 <= after < 10
    else:
        assert isinstance(resumed.error, ConfigError)
        assert "Nothing more was released." in str(resumed.error)
        assert after == 0


def test_one_round_is_the_loop_of_single_records(compose_config, federate, monkeypatch, tmp_path):
    """DP-FNAS, Eq. 3 and 4 and Alg. 1, in float64, at p = 1 and without the noise."""
    monkeypatch.setattr(release_guard, "add_noise", lambda total, generator, **terms: total)
    norms = {"weights": 0.8, "alphas": 0.01}
    own = [f"privacy.{state}.max_grad_norm={norm}" for state, norm in norms.items()]
    own += ["clients=3", "partition=quantity", "partition.fractions=[0.5,0.3,0.2]", "rounds=1"]
    own += ["algorithm.batch_size=null", f"privacy.sites={tmp_path}", "dataset.limit_train=40"]
    config = compose_config(*SEARCH, *own)
    fed = federate(config)
    fed.cohort.connect(fed.grid)
    records = [properties["splits"] for properties in fed.cohort.properties.values()]
    schedule = make_schedule(config, records, done={})
    commit = Commit(data_set="records", releases=tuple(schedule))
    list(fed.cohort.ask(Exchange("query.commit", stage="commit", settings=commit)))
    strategy = make_search(config, fed.data[0], fed.cohort, schedule=schedule)
    plain = supernet_space(config, fed.data[0]).supernet()
    strategy.load_into(plain)
    plain.double().train()
    strategy.start(fed.grid, num_rounds=1)
    parameters = {state: list(getattr(plain, state)().values()) for state in norms}
    optimizers = {"weights": make_sgd(parameters["weights"], config.algorithm.weights)}
    optimizers["alphas"] = make_adam(parameters["alphas"], config.algorithm.alphas)
    for state, name in (("weights", "train"), ("alphas", "validation")):

        def gradients_of(x, y, own=parameters[state]):
            unused = {"allow_unused": True, "materialize_grads": True}
            return torch.autograd.grad(functional.cross_entropy(plain(x), y), own, **unused)

        splits = [getattr(client.data, name) for client in fed.clients]
        sums = [clipped_sum(split, gradients_of, norms[state]) for split in splits]
        assert max(largest for _, largest in sums) > norms[state]
        mean = sum(total for total, _ in sums) / sum(counts[name] for counts in records)
        if state == "weights":
            mean *= min(1.0, config.algorithm.weights.clip_norm / mean.norm().item())
        step_along(optimizers[state], parameters[state], mean, 1)
        expected = torch.cat([p.detach().reshape(-1) for p in parameters[state]])
        actual = strategy.states[state]["float32"].double()
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# --- quorum


def test_a_client_whose_budget_ends_leaves_and_the_run_goes_on_by_quorum(start, tmp_path):
    write_policy(tmp_path, 0, epsilon=10.0)
    own = ("rounds=3", "privacy.alphas.noise_multiplier=0.6", "runtime.quorum=0.5")
    run = start(*SEARCH, *own, f"privacy.sites={tmp_path}")
    left = run.the("client_left")
    assert left["client"] == 0
    assert "the budget is 10" in left["reason"]
    assert not run.named("client_failed")  # it was not asked again
    assert len(run.named("round")) == 3
    assert len(booked(tmp_path, 1)) == 6
    told = [client["covers"][0]["rounds"] for client in run.the("privacy")["clients"]]
    assert told == [left["round"] - 1, 3]  # as it was said before the first release
    assert 0 < told[0] * 2 <= len(booked(tmp_path, 0)) < told[0] * 2 + 2
    assert run.events[-1]["status"] == "completed"


@pytest.mark.parametrize("quorum", [0.5, 1.0])
def test_what_a_policy_refuses_is_told_and_a_quorum_goes_on(start, tmp_path, quorum):
    write_policy(tmp_path, 1, least_noise_multiplier=1.5)
    words = "rule least_noise_multiplier: noise_multiplier=1.0"
    own = ("rounds=2", f"runtime.quorum={quorum}", f"privacy.sites={tmp_path}")
    run = start(*SEARCH, *own, fails=quorum == 1.0)
    reasons = {event["reason"] for event in run.named("client_failed")}
    assert any(words in reason for reason in reasons)
    assert {event["client"] for event in run.named("client_failed")} == {1}
    assert [entry for entry in booked(tmp_path, 1) if "alpha" in entry.action] == []
    if quorum == 1.0:
        assert words in str(run.error)
        assert run.events[-1]["status"] == "failed"
    else:
        assert len(run.named("round")) == 2


EPSILON = {name: {"train": 1.0, "validation": 1.0} for name in ("prv", "rdp", "gdp")}


NONSENSE = [
    ("covered_steps", {"search": -1}),  # all that is malformed: tests/server/test_reply_checks
    ("epsilons", EPSILON | {"prv": {"train": 10**400, "validation": 1.0}}),
    ("epsilons", {name: {} for name in EPSILON}),  # nothing of what is committed
    ("epsilons", {name: {"train": 1.0} for name in EPSILON}),
    ("epsilons", EPSILON | {"rdp": {"train": 1.0, "test": 1.0}}),
]


@pytest.mark.parametrize(("name", "wrong"), NONSENSE)
def test_a_client_that_answers_nonsense_leaves(compose_config, tmp_path, monkeypatch, name, wrong):
    def told(guard, _):
        is_first = guard._ledger.path.is_relative_to(tmp_path / "client-0")
        return {"covered_steps": {"search": 1}, "epsilons": EPSILON}[name] if is_first else wrong

    monkeypatch.setattr(release_guard.ReleaseGuard, name, told)
    config = compose_config(*SEARCH, "rounds=1", "runtime.quorum=0.5", f"privacy.sites={tmp_path}")
    grid = in_process(config)
    events = []
    cohort = make_cohort(config, run="run", emit=lambda event, **f: events.append(f))
    cohort.connect(grid)
    records = [properties["splits"] for _, properties in sorted(cohort.properties.items())]
    schedule = make_schedule(config, records, done={})
    commit(cohort, config, [schedule] * config.clients, done={}, resumed=False)
    assert list(cohort.clients) == [0]
    (left,) = (fields for fields in events if "reason" in fields)
    place = (left["client"], left["stage"], left["round"], left["action"])
    assert place == (1, "commit", 0, "query.commit")
    assert name.removesuffix("s") in left["reason"]


@pytest.mark.parametrize(("others", "quorum"), [(1, 0.5), (2, 0.6)])
def test_noise_is_not_calibrated_below_what_most_sites_accept(others, quorum, start, tmp_path):
    """The site that asks for more than the others, also of two, leaves; these go on by theirs."""
    for client, least in enumerate((*[1.5] * others, 90.0)):
        write_policy(tmp_path, client, least_noise_multiplier=least)
    null = [f"privacy.{kind}.noise_multiplier=null" for kind in ("weights", "alphas")]
    own = (f"clients={others + 1}", f"runtime.quorum={quorum}", f"privacy.sites={tmp_path}")
    run = start(*SEARCH, *null, *own, "rounds=1")
    event = run.the("privacy")
    assert {planned["noise_multiplier"] for planned in event["schedule"]} == {1.5}
    reasons = [(event["client"], event["reason"]) for event in run.named("client_failed")]
    assert {client for client, _ in reasons} == {others}
    assert all("least_noise_multiplier" in reason for _, reason in reasons)


FACTS = ["splits", "spent", seldom("budget"), seldom("secure_noise"), seldom("unit")]


@pytest.mark.parametrize("fact", FACTS)
def test_a_client_that_does_not_say_a_fact_stops_no_run(start, tmp_path, lies, fact):
    def silent(reply):
        kept = {name: of for name, of in reply.properties.items() if name != fact}
        return replace(reply, properties=kept)

    lies("query.describe", silent, client=1)
    run = start(*SEARCH, "rounds=1", "runtime.quorum=0.5", f"privacy.sites={tmp_path}")
    assert [client["client"] for client in run.the("privacy_spent")["clients"]] == [0]
    if fact != "spent":
        failed = run.the("client_failed")
        assert failed["client"] == 1
        assert f"does not say its {fact}" in failed["reason"]
        assert booked(tmp_path, 1) == []


def test_an_infinite_epsilon_is_told_as_such(start, monkeypatch):
    monkeypatch.setitem(release_guard.ACCOUNTANTS, "gdp", lambda releases, delta: float("inf"))
    for client in start(*SEARCH, "rounds=1").the("privacy")["clients"]:
        assert client["epsilon"]["gdp"] == {"train": None, "validation": None}


# --- what a site tells


REAL_SITES = ["runtime=deployment", "runtime.superlink=site", "partition=sites", "clients=1"]
REAL_SITES += ["dataset.root=null", "dataset.server_test=false"]


@pytest.fixture
def site(compose_config, start, tmp_path, made_data):
    """``site(*overrides)``: nodes with data, policy, ledger, keys of their own.

    ``policy`` are changes of their policies. ``connected`` gives a cohort, ``run`` makes a run.
    """

    def equip(*more, base=SEARCH, **policy):
        overrides = [*base, *REAL_SITES, *more]
        config = compose_config(*overrides)
        grid = in_process(config)
        for number, context in grid._contexts.items():
            folder = tmp_path / f"node-{number}"
            write_policy(folder, 0, **policy)
            dataset = {"name": "npz", "class_names": ["red", "green", "blue"]}
            (folder / "dataset.yaml").write_text(yaml.safe_dump(dataset))
            own = {"policy": folder / "client-0" / "policy.yaml", "data-path": made_data}
            own |= {"ledger": folder / "ledger" / "rows", "ledger-key": folder / "key"}
            own |= {"dataset": folder / "dataset.yaml", "cache": folder / "cache"}
            context.node_config |= {key: str(path) for key, path in own.items()}
            context.node_config |= {"data-set": "records", "split-key": "ours"}

        def connected():
            cohort = make_cohort(config, run="run")
            cohort.connect(grid)
            return cohort

        def run(**how):
            return start(*([] if "resume" in how else overrides), grid=lambda *_: grid, **how)

        nodes = [context.node_config for context in grid._contexts.values()]
        made = SimpleNamespace(config=config, grid=grid, nodes=nodes, node=nodes[0])
        return SimpleNamespace(**vars(made), connected=connected, run=run)

    return equip


def assert_refused(cohort, words, action, settings, stage="search"):
    """See that a request is refused in these words."""
    with pytest.raises(QuorumError, match=words):
        list(cohort.ask(Exchange(action, stage=stage, settings=settings)))


def booked_at(node):
    with Ledger(Path(node["ledger"]), Path(node["ledger-key"])) as ledger:
        return [row.entry for row in ledger.entries()]


SMALL = ["algorithm=dp_fnas", "privacy=dp", "algorithm.batch_size=8", "stages=[search]"]
SMALL += ["privacy.epsilon=1000"]
PARTS = ("search_space", "retrain")
OF_TABLES = [f"{part}.{size}" for part in PARTS for size in ("norm=group", "channels=8")]
OF_TABLES += ["search_space=mlp_small", "dataset=csv"]


def write_table(path, *, changed):
    """Write a table of patients; ``changed``: exported again with one more decimal and a column."""
    rng = np.random.default_rng(0)
    features, labels = rng.normal(0, 1, (60, 4)), rng.integers(0, 2, 60)
    digits = 4 if changed else 3
    lines = [
        ",".join([f"p{i}", *(f"{x:.{digits}f}" for x in row), *["7"] * changed, f"{label}"])
        for i, (row, label) in enumerate(zip(features, labels, strict=True))
    ]
    head = ["patient", *"abcd", *["ward"] * changed, "ill"]
    path.write_text("\n".join([",".join(head), *lines]) + "\n")


@pytest.mark.parametrize("id_column", ["patient", seldom(None)])
def test_a_new_export_is_charged_to_all_splits_unless_a_column_gives_ids(site, tmp_path, id_column):
    dataset = {"name": "csv", "class_names": ["0", "1"], "label": "ill", "numeric": [*"abcd"]}
    dataset |= {"statistics": {name: [0, 1] for name in "abcd"}, "id_column": id_column}
    for changed in (False, True):
        client_app.forget()
        own = site(*OF_TABLES, base=SMALL, unit="person" if id_column else "record")
        Path(own.node["dataset"]).write_text(yaml.safe_dump(dataset))
        own.node["data-path"] = str(tmp_path / "patients.csv")
        write_table(Path(own.node["data-path"]), changed=changed)
        own.run()
    splits = [row.splits for row in booked_at(own.node)]
    first, second = splits[:4], splits[4:]
    assert first == [("train",), ("validation",)] * 2
    assert second == (first if id_column else [("train", "validation", "test")] * 4)


WRONG_ROWS = [
    *(",1,1,2020-01-01,n,,0", "q1,old,1,2020-01-01,n,,0", "q2,1,1e39,2020-01-01,n,,0"),
    *("q3,1,-inf,,n,,1", "q4,1,1,2020-02-30,n,,1", "q5,1,1,2020-01-01,east,,1"),
    *("q6,1,1,2020-01-01,n,,2", "q7,1,1,2020-01-01,n,,", "q8,1,1,2020-01-01,n\0,,0.0"),
]
FAR_ROWS = ["f1,3e38,,9999-12-31,,,0", f"f2,-3e38,1,0001-01-01,n,{'x' * 300_000},1"]


def write_site(folder, kind, wrong, alone):
    """Return a site's data, ``wrong`` with records that cannot be read, and how it is read."""
    rng, folder = np.random.default_rng(0), folder / f"{kind}-{wrong}-{alone}"
    folder.mkdir()
    x, y = rng.integers(0, 256, (60, 8, 8, 3), np.uint8), np.arange(60) % 3
    if kind == "npz":
        more = [np.zeros((4, 8, 8, 3), np.uint8)] * wrong, [np.array([-1, 3, 99, 2**60])] * wrong
        kept = slice(0, 60 * (not alone))
        x, y = np.concatenate([*more[0], x[kept]]), np.concatenate([*more[1], y[kept]])
        np.savez(folder / "site.npz", x_train=x, y_train=y)
        return folder / "site.npz", {"name": "npz", "class_names": [*"abc"]}
    if kind == "image_folder":
        for i in range(60 * (not alone)):
            save_pixels(x[i], folder / "abc"[y[i]] / f"{i}.png")
        for place in ("a/0.png.png", "a/x.dcm", "b/9.jpg", "d/1.png") if wrong else ():
            (folder / place).parent.mkdir(exist_ok=True)
            (folder / place).write_bytes(b"no image")
        own = {"name": "image_folder", "class_names": [*"abc"], "image_size": 8, "channels": 3}
        return folder, own
    rows = [
        f"p{i},{a:.3f},{b:.3f},2020-01-{1 + i % 28:02},{'ns'[i % 2]},,{i % 2}"
        for i, (a, b) in enumerate(rng.normal(0, 1, (60 * (not alone), 2)))
    ]
    rows = [*WRONG_ROWS[kind == "csv" : 5] * wrong, *rows, *FAR_ROWS * (not alone)]
    rows += WRONG_ROWS[5:] * wrong
    (folder / "site.csv").write_text("\n".join(["patient,x,y,seen,ward,note,ill", *rows]) + "\n")
    own = {"name": "csv", "class_names": ["0", "1"], "label": "ill", "numeric": ["x", "y"]}
    own |= {"dates": ["seen"], "categorical": ["ward"], "categories": {"ward": ["n", "s"]}}
    own |= {"statistics": {"x": [0, 1], "y": [0, 1], "seen": [18000, 100]}}
    return folder / "site.csv", own | {"id_column": None if kind == "csv" else "patient"}


UNREADABLE = [("csv", False), ("npz", True), by_hand("csv", True), by_hand("npz", False)]
UNREADABLE += [seldom("persons", False), seldom("image_folder", True)]
UNREADABLE += [by_hand("persons", True), by_hand("image_folder", False)]


@pytest.mark.parametrize(("kind", "alone"), UNREADABLE)
def test_unreadable_records_change_no_answer(site, tmp_path, monkeypatch, capsys, kind, alone):
    """Nor do they where no other is left (``alone``); the site's log tells how many they are."""
    own = OF_TABLES if kind in ("csv", "persons") else [f"search_space.{size}" for size in SIZES]
    properties, told = [], []
    clients = noting(monkeypatch, client_app, "make_client", lambda client, *_, **__: client)
    for wrong in (False, True):
        client_app.forget()
        made = site(*own, "rounds=1", base=SMALL, unit="person" if kind == "persons" else "record")
        path, dataset = write_site(tmp_path, kind, wrong, alone)
        Path(made.node["dataset"]).write_text(yaml.safe_dump(dataset))
        made.node["data-path"] = str(path)
        said = made.connected().properties[0]
        properties.append({name: of for name, of in said.items() if name != "spent"})
        made.run()
        told.append("left out" in capsys.readouterr().err)
    assert told == [False, True]
    assert properties[0] == properties[1]
    before, after = (client.data for client in (clients[0], clients[-1]))
    for split in ("train", "validation", "test"):
        a, b = getattr(before, split), getattr(after, split)
        assert a.num_units == b.num_units
        assert bool(len(a)) != alone
        assert torch.equal(a.labels[a.rows], b.labels[b.rows])
        assert a.features[a.rows].numpy().tobytes() == b.features[b.rows].numpy().tobytes()
    charged = [row.splits for row in booked_at(made.node)]
    assert charged == [("train",), ("validation",)] * 2  # all three, were it other data


@pytest.mark.run
def test_a_private_sites_own_file_chooses_fixed_features_of_its_images(site):
    """Whatever the run says; the exported model takes the images, and makes the features itself."""
    own = site("rounds=1", "retrain.rounds=1", "search_space.skip=linear", base=DP)
    dataset = Path(own.node["dataset"])
    dataset.write_text(dataset.read_text() + "scattering: {scales: 1, angles: 2}\n")
    model = load(own.run().folder)
    assert model.inputs.shape == (3, 8, 8)
    assert model.inputs.transform == ("scattering", "1", "2")
    assert model.input_shape == (9, 4, 4)
    images = np.random.default_rng(0).integers(0, 255, (5, 3, 8, 8), dtype=np.uint8)
    assert model.predict(images).probabilities.shape == (5, 3)


ASKED_WITHOUT_PRIVACY = smallest()


def test_a_site_with_a_policy_refuses_a_run_without_privacy(site):
    sizes = [f"search_space.{size}" for size in SIZES]
    own = site(base=["algorithm=fnas", "stages=[search]", *sizes])
    run = own.run(fails=True)
    assert "refused by the policy, rule data_sets" in str(run.error)
    assert run.events[-1]["status"] == "failed"
    cohort = own.connected()
    assert "class_counts" not in cohort.properties[0]
    told = dict.fromkeys(ASKED_WITHOUT_PRIVACY, "rule data_sets: data set=null")
    told |= dict.fromkeys(("query.sign_survivors", "query.open_masks"), "no part in secure sums")
    told["evaluate.personalised"] = "private action=evaluate.personalised is unknown"
    for action in told.keys() - {"query.describe", "query.commit"}:
        assert_refused(cohort, told[action], action, ASKED_WITHOUT_PRIVACY[action])
    words = "rule committed values: release=search/train.weight_gra"
    assert_refused(cohort, words, "train.weight_gradient", ASKED)


def test_errors_keep_their_text_at_the_site(start, site, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(Split, "batch", raising(ValueError("patient 4711 has no label")))
    for begin in (partial(start, *SEARCH, "clients=1", f"privacy.sites={tmp_path}"), site().run):
        run = begin(fails=True)
        text = (run.folder / "events.jsonl").read_text() + str(run.error)
        assert "an error at the site" in text
        assert "patient 4711" not in text
        assert "patient 4711" in capsys.readouterr().err


DATA_SET = "records"
TERMS = {"batch_size": 8, "steps": 2, "max_grad_norm": 1.0, "noise_multiplier": 1.0}
PLANNED = PlannedRelease("search", "train.weight_gradient", "weights", ("train",), **TERMS)
OF_SITE = smallest(DATA_SET)
ASKED = OF_SITE["train.weight_gradient"]
NORMED = {"name": "mobilenet_v2"}


def committed(**changes):
    planned = replace(PLANNED)
    for name, value in changes.items():
        object.__setattr__(planned, name, value)  # as no server of this package can
    return Commit(data_set="records", releases=(planned,))


def training(**changes):
    asked = OF_SITE["train.weights"]
    return replace(asked, local=replace(asked.local, **changes))


WITHOUT_DATA = [  # one of each kind: all are in tests/client/test_private_actions.py
    ("train.search", OF_SITE["train.search"], "rule actions: action=train.search"),
    ("query.commit", replace(committed(), data_set="other"), "rule data_sets: data set=other"),
    ("query.commit", committed(noise_multiplier=0.0), "noise_multiplier=0.0, not"),
    ("query.commit", committed(batch_size="8"), "batch_size=8 has the wrong type"),
    ("train.weight_gradient", replace(ASKED, local_steps=3), "rule committed values: steps=3"),
    ("train.weights", training(network={"name": "derived", "norm": "batch"}), "rule no batch_norm"),
    *(
        ("evaluate.model", Evaluate(network=own, split="train", data_set=DATA_SET), "no batch_norm")
        for own in (NORMED, NORMED | {"norm": "batch"})
    ),
    ("train.weights", training(network=["derived"]), "local.network=.* has the wrong type"),
]
BATCH_NORM = ["algorithm=fnas", "stages=[search]", "search_space.norm=batch"]


def test_a_hostile_request_is_refused_before_data_opens(site, compose_config, monkeypatch, capsys):
    """The site keeps a schedule, restarts, and cannot read its records any more."""
    actions = ["query.describe", "query.commit", "train.weight_gradient"]
    own = site(actions=[*actions, "train.weights", "evaluate.model"])
    cohort = own.connected()
    list(cohort.ask(Exchange("query.commit", stage="commit", settings=committed())))

    opened = []

    def make_data(_):
        opened.append(1)
        raise ConfigError("the disk of ward 4711 is gone")

    monkeypatch.setattr(client_app, "make_site_data", make_data)
    client_app.forget()
    for action, asked, words in WITHOUT_DATA:
        assert_refused(cohort, words, action, asked)
    theirs = in_process(compose_config(*BATCH_NORM, *REAL_SITES))
    for context in theirs._contexts.values():
        context.node_config |= own.node
    cohort._grid, about = theirs, Evaluate(network=SUPERNET, split="train", data_set=DATA_SET)
    for action, asked in (("train.weight_gradient", ASKED), ("evaluate.model", about)):
        assert_refused(cohort, "rule no batch_norm", action, asked)
    cohort._grid = own.grid
    assert opened == []
    words = "^((?!4711).)*an error at the site((?!4711).)*$"  # what is allowed needs them
    assert_refused(cohort, words, "train.weight_gradient", ASKED)
    assert opened == [1]
    assert "4711" in capsys.readouterr().err


def test_the_server_has_no_say_in_how_a_private_site_reads_its_data(site):
    """Two runs that would read other records see the same site, and a whole run goes through."""
    wishes = ["dataset.class_names=[a,b]", "dataset.limit_train=3", "dataset.mean=[.1,.2,.3]"]
    wishes += ["dataset.crop_padding=1000000", "dataset.cutout=3"]  # whose cost would tell a lot
    properties = []
    for given in ([], wishes):
        client_app.forget()
        own = site(*given)
        properties.append(own.connected().properties[0])
        named = {key: str(own.node[key]) for key in client_app.SITE_KEYS if key in own.node}
        made = dump_config(own.config), 0, tuple(sorted(named.items())), None
        client = client_app._client.__wrapped__(*made)
        assert client.data.train.mean == (0.5, 0.5, 0.5)
        assert client.augmentation == {"crop_padding": 0, "flip": False, "cutout": 0}
        assert sum(len(s) for s in vars(client.data).values()) == 80
    assert properties[0] == properties[1]
    assert properties[0]["class_names"] == ["red", "green", "blue"]
    assert [event["round"] for event in site().run().named("round")] == [1, 2]


@pytest.mark.parametrize("broken", [False, True])
def test_a_running_site_keeps_to_what_its_policy_says_now(site, broken, capsys):
    own = site()
    cohort, path = own.connected(), Path(own.node["policy"])
    if broken:
        path.unlink()
    else:
        write_policy(path.parent.parent, 0, actions=["query.commit"])
    words = "an error at the site" if broken else "rule actions: action=query.describe"
    assert_refused(cohort, words, "query.describe", Describe())
    assert not broken or "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("key", PRIVATE_SITE_KEYS[1:])
def test_a_private_node_must_name_everything_of_its_own(site, capsys, key):
    own = site()
    del own.node[key]
    told = refuses("", own.connected, error=QuorumError)
    if key == "policy":
        assert "privacy=dp on a node without a policy: start it with" in told
    else:
        assert f"the node has a policy but lacks {key}" in capsys.readouterr().err


UNKNOWN = "dataset.class_names=[a,b] dataset.image_size=null dataset.channels=null"
UNDECLARED = {
    "dataset.class_names=[]": "must give dataset.class_names,",
    f"dataset=image_folder {UNKNOWN}": "image_size, dataset.channels",
    "dataset=npz dataset.root={images} dataset.class_names=[a,b]": "image_size, dataset.channels",
    "dataset=csv dataset.class_names=[a,b]": "numeric or categorical",
    "dataset=csv dataset.class_names=[a,b] dataset.categorical=[sex]": "dataset.categories",
    "dataset=csv dataset.class_names=[a,b] dataset.categories={sex:[]}": "dataset.categories",
}


@pytest.mark.parametrize("overrides", UNDECLARED)
def test_a_real_site_declares_what_records_would_tell(compose_config, tmp_path, overrides):
    """One image in colour, for example, would make all others of a site colour images."""
    images = tmp_path / "images.npz"
    np.savez(images, train_bytes=np.zeros(9, dtype=np.uint8), train_off=[0, 9], y_train=[0])
    config = compose_config(*SEARCH, *REAL_SITES, overrides.replace("{images}", str(images)))
    refuses(UNDECLARED[overrides], check_public, config, SimpleNamespace(uses_own_statistics=False))


def approval(node, awaited=None):
    """The command that a person at a site types."""
    files = {"--policy": node["policy"], "--ledger": node["ledger"], "--key": node["ledger-key"]}
    options = [text for pair in files.items() for text in pair]
    return ["approve", *([awaited] if awaited else []), *options]


@pytest.mark.run
def test_a_run_waits_for_a_person_who_sees_all_that_it_may_release(
    site, compose_config, capsys, prints
):
    """Not approved in time it ends with a sentence; approved, it goes on under the same name."""
    waiting = ("runtime.approval_s=0", "privacy.weights.noise_multiplier=2")
    own = site(*waiting, approve="manual")
    node, run = own.node, own.run(fails=True)
    event = run.the("approval_awaited")
    ((client, awaited),) = [(one["client"], one["schedule"]) for one in event["clients"]]
    assert client == 0
    assert str(run.error).startswith(
        f"client 0: its schedule {awaited} waits for a person's approval: have `fednas approve "
        f"{awaited}` typed at that site, then resume this run (0 of 1 clients have agreed"
    )
    assert str(run.error).endswith("Nothing was released.")
    assert not run.named("privacy")
    assert f"fednas approve {awaited}: run '{event['run']}' waits" in capsys.readouterr().err

    assert str(own.run(resume=run.folder, fails=True).error) == str(run.error)  # too early
    shown = prints(*approval(node))
    budget = "budget records: epsilon 1000 at delta 1e-05 for one record"
    assert all(part in shown for part in (awaited, event["run"], budget, "0 is spent"))
    rows = [line.split("│")[1:-1] for line in shown.splitlines() if "│ search" in line]
    assert {tuple(cell.strip() for cell in row) for row in rows} == {
        ("search", "train.alpha_gradient", "alphas", "validation", "2", "1", "1", "8", "0.5"),
        ("search", "train.weight_gradient", "weights", "train", "2", "2", "1", "8", "0.4"),
    }
    space = supernet_space(run.config, make_data(compose_config(*SEARCH))[0])
    weights = sum(weight.numel() for weight in space.supernet().weights().values())
    assert f"size of the model that is searched: 30 alphas and {weights:,} weights" in shown
    assert "epsilon with all that was booked before (PRV): train " in shown
    refusal = f"no schedule {'0' * 32} waits for approval; there is {awaited}."
    assert refusal in prints(*approval(node, "0" * 32), code=2)

    assert f"approved {awaited}." in prints(*approval(node, awaited))
    own.run(resume=run.folder)
    assert {row.run for row in booked_at(node)} == {event["run"]}
    assert prints(*approval(node)).endswith("nothing waits for approval.\n")
    new = site(*waiting, approve="manual").run(fails=True)
    assert awaited not in str(new.error)  # the next run is another one
    assert "waits for a person's approval" in str(new.error)


def test_a_run_goes_on_once_approved_and_without_a_site_where_nobody_does(
    site, monkeypatch, prints
):
    monkeypatch.setattr("fednas_flwr.pipeline.beginning.APPROVAL_POLL_S", 0.01)
    own = site("clients=3", "runtime.approval_s=3", approve="manual")
    nodes = {node["partition-id"]: node for node in own.nodes}
    folder, asked = Path(nodes[2]["policy"]).parent.parent, []
    write_policy(folder, 0)  # this site needs no person

    def person(event):
        """Approve at site 0, and at no other."""
        if event["event"] == "approval_awaited":
            asked.append({one["client"]: one["schedule"] for one in event["clients"]})
            if 0 in asked[-1]:
                assert main(approval(nodes[0], asked[-1][0])) == 0

    run = own.run(listeners=[person])
    assert [sorted(waiting) for waiting in asked] == [[0, 1], [1]]
    left = run.the("client_left")
    assert left["client"] == 1
    assert "have `fednas approve" in left["reason"]
    event = run.the("privacy")
    assert [client["client"] for client in event["clients"]] == [0, 2]
    for index, node in nodes.items():
        assert len(booked_at(node)) == (0 if index == 1 else 4)
    lines = trail_of(Path(nodes[2]["ledger"]).with_name("audit.jsonl"))
    asked = [line["action"] for line in lines if line["event"] == "asked"]
    assert asked.count("query.commit") == 1  # who has agreed is not asked again
    write_policy(folder, 0, approve="manual")  # from now on: what has run does not wait
    assert prints(*approval(nodes[2])) == "nothing waits for approval.\n"


def trail_of(path):
    """The lines of an audit trail without what differs from run to run."""
    changing = ("time", "mac", "run", "flower_run")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in changing} for line in lines]


def books_of(folder):
    """The sizes of all files of a site, but its counter."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".day"]
    return {path: path.stat().st_size for path in files}


@pytest.mark.run
def test_a_flood_of_requests_fills_no_disk_and_an_honest_run_goes_on_the_next_day(site):
    """Refusals, malformed messages, commitments, what raises at the site: all of one allowance."""
    own = site()
    grid, node = own.grid, own.node
    counter = counter_of(Path(node["ledger-key"]))
    folder = counter.parent
    own.run()  # what is made once is there
    day, taken, refused = map(int, counter.read_text().split())
    (trail,) = folder.rglob("audit.jsonl")
    requests = trail.read_text().count('"event": "asked"')
    assert refused == 0
    assert taken < 4000 * requests  # policy.yaml says about 3 kB
    counter.write_text(f"{day:>12} {MOST_BYTES - 3000:>20} {0:>20}\n")
    (node_id,) = grid._contexts

    def told(action, header, settings):
        content = encode_request(header, settings, {})
        (reply,) = grid.send_and_receive([grid.create_message(content, action, node_id, "")])
        return reply.error.reason if reply.has_error() else "answered"

    sizes, reasons = [], set()
    for number in range(60):
        run = Header(f"flood {number}", "search", 1, 1, 0, f"{number}")
        for action, settings in (
            ("query.describe", Describe()),
            ("query.commit", Commit(data_set="records", releases=())),
            ("query.commit", Commit(data_set="other", releases=())),
            ("train.weight_gradient", ASKED),
        ):
            reasons.add(told(action, run, settings))
        reasons.add(told("query.commit", run, Describe()))  # malformed
        sizes.append(books_of(folder))
    assert sizes[-1] == sizes[20]
    assert "requests have made this site write as much as it writes in a day" in " ".join(reasons)
    others = {"query.describe": Describe(), "query.commit": Commit(data_set="records", releases=())}
    late = {told(action, run, settings) for action, settings in others.items()}
    assert len(late) == 1  # one constant sentence
    assert books_of(folder) == sizes[-1]
    with Ledger(Path(node["ledger"]), Path(node["ledger-key"])) as ledger:
        assert len(ledger.commitments()) < 5
    day, _, refused = counter.read_text().split()
    assert int(refused) > 200
    counter.write_text(f"{int(day) - 1:>12} {MOST_BYTES:>20} {0:>20}\n")
    own.run()


def test_a_sites_audit_trail_tells_all_but_nothing_of_its_records(site, tmp_path):
    """A refusal and a run, at two sites whose records and numbers of them differ."""
    rng = np.random.default_rng(1)
    np.savez(
        tmp_path / "other.npz",
        x_train=rng.integers(0, 255, (70, 3, 8, 8), dtype=np.uint8),
        y_train=rng.integers(0, 3, 70),
    )
    trails, taken = [], []
    for name in ("made", "other"):
        client_app.forget()
        own, books = site(), f"{tmp_path}/{name}"
        own.node |= {"ledger": f"{books}/ledger/rows", "ledger-key": f"{books}/key"}
        if name == "other":
            own.node["data-path"] = str(tmp_path / "other.npz")
        commit = Commit(data_set="other", releases=())
        assert_refused(own.connected(), "rule data_sets", "query.commit", commit, stage="commit")
        own.run()
        path = tmp_path / name / "ledger" / "audit.jsonl"
        assert verify_trail(path, tmp_path / name / "key") == len(trail_of(path))
        trails.append(trail_of(path))
        taken.append(int(counter_of(tmp_path / name / "key").read_text().split()[1]))
    assert trails[0] == trails[1]
    assert taken[0] == taken[1]  # nor does the daily allowance depend on them
    (refused,) = named(trails[0], "refused")
    assert refused["action"] == "query.commit"
    assert "rule data_sets" in refused["reason"]
    asked, released = (named(trails[0], kind) for kind in ("asked", "released"))
    assert len(asked) == len(released) + 1
    gradients = [line for line in released if line["action"] == "train.weight_gradient"]
    assert [line["round"] for line in gradients] == [1, 2]
    assert gradients[0]["noise_multipliers"] == {"weights": 1.0}
    assert 0 < gradients[0]["epsilon_spent"] < gradients[1]["epsilon_spent"]
