"""Sites of a run have names, and decide how many clients there are."""

from dataclasses import replace

import numpy as np
import pytest

from fednas_flwr.api import compose
from fednas_flwr.data.prepared import make_data
from fednas_flwr.deploy.dry_run import SteppedGrid, begun
from fednas_flwr.pipeline.baselines import _planned_retraining, prepare_candidates
from fednas_flwr.pipeline.beginning import begin
from fednas_flwr.report.html_report import write_report
from fednas_flwr.report.model_card import write_model_card
from fednas_flwr.report.templates import sentence
from fednas_flwr.runs.events import read_events
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.runs.run_folder import open_run_folder

from ..finished_runs import Told
from ..refusals import refuses
from ..report.conftest import emit

SITES = ("cleveland", "hungarian", "va")
SHORT = ("algorithm=fedavg", "retrain.rounds=1", "evaluation.baselines=0", "trackers=[]")


def table(site, rows=60):
    rng = np.random.default_rng(len(site))
    lines = [f"{rng.normal():.3f},{rng.normal():.3f},{i % 2}" for i in range(rows)]
    return "\n".join(["age,chol,sick", *lines, ""])


@pytest.fixture
def folder(tmp_path):
    """Tables of three hospitals."""
    root = tmp_path / "hospitals"
    root.mkdir()
    for site in SITES:
        (root / f"{site}.csv").write_text(table(site))
    return root


def test_rounds_of_small_clients_have_several_passes(folder, quick_run):
    """Those of the run, and of candidates: a pass has two steps, and of the linear model one."""
    data = overrides(folder, "partition=sites", "retrain=recommended")
    config = compose(*data, "algorithm=fedavg", "algorithm.network=linear")
    with begun(config, SteppedGrid) as (began, grid):
        assert began.config.retrain.local_epochs == 3
        event = read_run(began.folder).last("partition")
        larger = [{name: 20 * number for name, number in site.items()} for site in event["splits"]]
        resumed = replace(began.config, retrain=config.retrain)  # which keeps to what was told
        again = begin(resumed, grid, began.log, {}, earlier=[event | {"splits": larger}])
        assert again.config.retrain.local_epochs == 1
        for before, after in {"age,chol": "chol,age", ",1\n": ",0\n"}.items():
            (folder / "va.csv").write_text(table("va").replace(before, after, 1))
            words = "^resume=.*: the data has changed since this run began, in records, labels or"
            refuses(words, begin, resumed, grid, began.log, {}, earlier=[event])
        (folder / "va.csv").write_text(table("va"))
    linear = ("algorithm=fedavg", "algorithm.network=linear", "stages=[retrain]")
    trained = quick_run(*data, *linear, "trackers=[]", "retrain.rounds=null")
    assert read_run(trained.folder).settings["retrain"]["local_epochs"] == 3
    assert "of 3 passes" in write_report(trained.folder).read_text()
    search = ("algorithm=zero_cost", "algorithm.draws=2", "search_space=mlp_small", "rounds=1")
    sizes = ("search_space.channels=8", "retrain.channels=8", "retrain.rounds=null")
    found = quick_run(*data, *search, *sizes, "stages=[search]", "trackers=[]")
    config = replace(found.config, evaluation=replace(found.config.evaluation, baselines=1))
    candidates = prepare_candidates(config, last=False)
    passes = {made.name: open_run_folder(str(made)).retrain.local_epochs for made in candidates}
    assert passes.pop("linear") == 1
    assert set(passes.values()) == {3}
    emit(found.folder, **event | {"splits": larger})  # the run is resumed with other records
    assert _planned_retraining(config, [1]).local_epochs == 3


def test_unlike_clients_train_all_networks_by_gradients(quick_run, monkeypatch, tmp_path):
    monkeypatch.setattr("fednas_flwr.algorithms.fedavg.strategy.LOCAL_STEPS", 4)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 16, 16), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=np.arange(40) % 2)
    data = ("dataset=npz", f"dataset.root={tmp_path / 'a.npz'}", "clients=2", "trackers=[]")
    unlike = ("partition=label_groups", "partition.groups=[[0],[1]]")
    search = ("algorithm=zero_cost", "algorithm.draws=2", "rounds=1", "retrain=recommended")
    small = ("search_space.channels=4", "retrain.channels=4", "retrain.rounds=null")
    of_each = ("partition.clients_per_group=[1,1]", "retrain.batch_size=8")
    found = quick_run(*data, *unlike, *search, *small, *of_each, "stages=[search,retrain]")
    record = read_run(found.folder)
    assert record.last("derived")["network"]["norm"] == "group"
    assert {event["exchanges"] for event in record.rounds("retrain")} == {2}
    config = replace(found.config, evaluation=replace(found.config.evaluation, baselines=1))
    for candidate in map(open_run_folder, map(str, prepare_candidates(config, last=False))):
        assert (candidate.retrain.exchange, candidate.retrain.norm) == ("gradients", "group")
    text = " with an exchange of gradients in every step"
    assert text in sentence("stage_started", record.last("stage_started"))
    assert text in write_report(found.folder).read_text()


def test_clients_tell_statistics_of_a_table_for_which_none_are_stated(folder):
    linear = ("partition=sites", "algorithm=fedavg", "algorithm.network=linear")
    for stated in ((), ("dataset.statistics={age: [0, 1], chol: [0, 1]}",)):
        with begun(compose(*overrides(folder, *linear, *stated)), SteppedGrid) as (began, _):
            assert (began.cohort.statistics is None) == bool(stated)


@pytest.fixture
def one_table(folder):
    """The same in one table, by the column ward."""
    lines = ["ward,age,chol,sick"]
    for site in SITES:
        lines += [f"{site},{row}" for row in table(site).splitlines()[1:]]
    path = folder.parent / "one.csv"
    path.write_text("\n".join(lines))
    return path


def overrides(root, *more):
    return ["dataset=csv", f"dataset.root={root}", f"dataset.cache={root.parent / 'cache'}", *more]


def test_clients_follow_from_what_divides_the_data(folder, one_table):
    space = "search_space=mlp_small"
    assert compose(*overrides(folder, "partition=sites", space)).clients == 3
    by_ward = ("partition=column", "partition.column=ward", space)
    config = compose(*overrides(one_table, *by_ward))
    assert config.clients == len(make_data(config)[1]) == 3
    assert compose(*overrides(one_table, "partition=iid", space, "clients=4")).clients == 4
    named = compose(*overrides(one_table, *by_ward, "clients=4"))
    refuses("makes 3 clients, one per value of ward, but clients=4", make_data, named)
    nowhere = compose(*overrides(folder / "none", "partition=sites", space))
    assert nowhere.clients == 3
    refuses("is not a folder: give an existing one", make_data, nowhere)


@pytest.mark.run
def test_a_run_names_its_sites_everywhere(folder, tmp_path, prints):
    run = tmp_path / "run"
    settings = ("partition=sites", "search_space=mlp_small", "rounds=1", *SHORT[1:])
    printed = prints("run", *overrides(folder, *settings, f"run_dir={run}"))
    assert "3 clients: cleveland, hungarian, va\n" in printed
    assert "client parts" not in printed
    assert "On the clients' own test parts: from" in printed
    told = Told(events=read_events(run / "events.jsonl"))
    assert told.the("partition")["names"] == list(SITES)
    tested = told.the("evaluated")["clients"]
    assert [client["client"] for client in tested] == [0, 1, 2]  # the names stand once
    page, card = write_report(run).read_text(), write_model_card(run).read_text()
    assert '"x":["cleveland","hungarian","va"]' in page
    assert "<td>hungarian</td>" in page
    assert "3 clients (cleveland, hungarian, va), split by sites," in card


@pytest.mark.run
@pytest.mark.parametrize(("declared", "names"), [(False, None), (True, list(SITES))])
def test_values_of_a_private_column_are_told_if_declared(one_table, run_inline, declared, names):
    wards = f"dataset.categories={{ward: [{', '.join(SITES)}]}}"
    own = ["privacy=dp", "algorithm=fedavg", "algorithm.network=linear", "privacy.epsilon=50"]
    own += ["partition=column", "partition.column=ward", "clients=3", *[wards] * declared]
    own += ["dataset.ranges={age: [-4, 4], chol: [-4, 4]}", "retrain.channels=null"]
    ran = run_inline(*overrides(one_table, *own, "retrain.rounds=1"))
    assert ran.the("partition").get("names") == names
