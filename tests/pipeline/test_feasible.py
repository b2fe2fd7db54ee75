"""What the data, the sites or the files rule out is refused before a run begins."""

import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from fednas_flwr import api
from fednas_flwr.base.errors import show
from fednas_flwr.client.making import check_public
from fednas_flwr.data.prepared import make_data, save_partition
from fednas_flwr.data.records import assign_splits
from fednas_flwr.pipeline.feasible import check_buildable, written_bytes
from fednas_flwr.runs.run_folder import create_run_folder

from ..refusals import lacking, refuses
from ..rows import rows, seldom
from ..watched import noting

GROUP_NORM = "search_space.norm=group retrain.norm=group"
NOISED = f"privacy=dp algorithm=dp_fnas {GROUP_NORM}"
PRIVATE = f"{NOISED} privacy.epsilon=50"
TABLE = ("search_space=mlp_small", "search_space.channels=8", "retrain.channels=8")


@pytest.fixture
def table(tmp_path):
    """Overrides of 120 rows of a table with the columns age and size."""
    rng = np.random.default_rng(0)
    lines = [f"{rng.normal(40, 10):.2f},{rng.normal():.2f},{i % 2}" for i in range(120)]
    (tmp_path / "table.csv").write_text("\n".join(["age,size,ill", *lines]))
    return ("dataset=csv", f"dataset.root={tmp_path / 'table.csv'}", *TABLE)


def refused(config):
    """Return the sentence with which a configuration is refused."""
    sentence = refuses("", api.check, config)
    assert "\n" not in sentence
    assert len(sentence) < 600
    return sentence


def saved(path, labels, test_labels, **more):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (len(labels) + len(test_labels), 3, 8, 8)).astype(np.uint8)
    arrays = {"x_train": images[: len(labels)], "y_train": labels}
    arrays |= {"x_test": images[len(labels) :], "y_test": test_labels}
    np.savez(path / "own.npz", **(arrays | more))
    return f"dataset.root={path / 'own.npz'}"


def test_secure_sums_take_no_table_whose_statistics_each_client_tells(compose_config, table):
    own = (*table, "clients=3", "secure_sum={least_sites: 3, colluding: 0}")
    sentence = refused(compose_config(*own))
    assert sentence.startswith("secure_sum=true with a table whose dataset.statistics are not")
    assert "declare them as {column: [mean, std], ...}" in sentence
    api.check(compose_config(*own, "dataset.statistics={age: [40, 10], size: [0, 1]}"))
    api.check(compose_config(*own[:-1]))  # the same table, without secure sums


FAR = [([40, 1e-300], [0, 1], "age"), ([40, 1e-37], [0, 1], "age"), ([40, 1], [1e300, 1], "size")]


@pytest.mark.parametrize(("age", "size", "named"), FAR)
def test_statistics_that_overflow_are_refused(compose_config, table, age, size, named):
    sentence = refused(compose_config(*table, f"dataset.statistics={{age: {age}, size: {size}}}"))
    assert f"feature {named} of client 0 is beyond 1e+18" in sentence
    assert f"dataset.statistics.{named}" in sentence


def test_a_private_table_needs_declared_ranges_or_statistics(compose_config, table):
    sentence = refused(compose_config(*table, "privacy=dp", GROUP_NORM))
    assert "declare dataset.ranges={column: [low, high], ...}" in sentence
    declared = "dataset.ranges={age: [0, 100], size: [-3, 3]}"
    config = compose_config(*table, "privacy=dp", GROUP_NORM, declared)
    check_public(config, make_data(config)[0])


def test_values_of_the_server_that_overflow_are_refused(compose_config, table, tmp_path):
    (tmp_path / "train.csv").write_text((tmp_path / "table.csv").read_text())
    (tmp_path / "test.csv").write_text("age,size,ill\n40,9e28,1\n41,0,0\n")
    own = [o for o in table if "root" not in o]
    statistics = "dataset.statistics={age: [40, 10], size: [0, 1]}"
    config = compose_config(*own, f"dataset.root={tmp_path}", statistics)
    assert "feature size of the server's test set is beyond" in refused(config)


def test_batch_norm_of_a_single_record_is_refused(compose_config, table, tmp_path):
    config = compose_config(*table)
    prepared, _ = make_data(config)
    splits = assign_splits(prepared.train.ids, **config.dataset.division)
    first = np.append(np.flatnonzero(splits == 0)[:20], np.flatnonzero(splits == 1)[:1])
    others = np.setdiff1d(np.arange(len(splits)), first)
    save_partition(tmp_path / "parts.json", [others, np.sort(first)])
    saved = ("clients=2", "partition=saved", f"partition.file={tmp_path / 'parts.json'}")
    sentence = refused(compose_config(*table, *saved))
    assert sentence.startswith("search_space.norm=batch normalises no batch of one record")
    assert "client 1 trains on in search" in sentence
    assert "set search_space.norm=group" in sentence
    for algorithm in ("fed_darts", "random_search", "successive_halving"):  # two have no supernet
        whole = (f"algorithm={algorithm}", "search_space=mlp_small", "algorithm.batch_size=1")
        sentence = refused(compose_config(*table, *whole))
        assert "client 0 trains on in search (batch_size=1)" in sentence
    sentence = refused(compose_config(*table, "retrain.batch_size=1"))
    assert sentence.startswith("retrain.norm=batch")
    assert "batch_size=1" in sentence
    api.check(compose_config("algorithm.batch_size=1"))  # of an image, over its places


@pytest.mark.parametrize("number", [1, 4])
def test_sites_of_few_records(compose_config, table, tmp_path, number):
    file = tmp_path / "table.csv"
    sites = ["site", *["small"] * number, *["large"] * (120 - number)]
    lines = zip(sites, file.read_text().splitlines(), strict=True)
    file.write_text("\n".join(map(",".join, lines)))
    own = (*table, "clients=2", "partition=column", "partition.column=site")
    own += ("dataset.fractions={train:.2,validation:.4,test:.4}",)
    of = f"client small with {number} records has no validation record, by which fed_darts chooses"
    assert refused(compose_config(*own)).startswith(of)
    ranked = "rounds=1 algorithm=successive_halving algorithm.rewarded=local"
    for asked in ("algorithm=zero_cost", ranked):  # neither reads validation records
        config = compose_config(*own, *asked.split())
        if number > 1:
            api.check(config)
        else:
            assert "batch of one record, which client small trains on in" in refused(config)


def test_logistic_regression_on_one_class_is_refused(compose_config, tmp_path):
    root = saved(tmp_path, np.zeros(60, int), np.arange(20) % 2)
    assert "of the class 0" in refused(compose_config(root, "dataset.linear_baseline=true"))
    api.check(compose_config(root))
    api.check(compose_config(root, "dataset.linear_baseline=true", "dataset.server_test=false"))


METRICS = "privacy.metrics_noise_multiplier"
LITTLE = " ".join(f"privacy.{kind}.noise_multiplier=1" for kind in ("retrain", "weights", "alphas"))
NAMES = {
    "FRACTIONS": "dataset.fractions=",
    "HELD_OUT": "dataset=digits algorithm=fedavg algorithm.network=linear clients=2",
    "HEADS": "networks have no auxiliary head: set retrain.auxiliary_weight=0.",
    "LINEAR_DP": "privacy=dp algorithm=fedavg algorithm.network=linear privacy.epsilon=50",
    "WEIGHTS": "privacy.weights.noise_multiplier",
    "RETRAIN": "privacy.retrain.noise_multiplier",
    "AUXILIARY": "stages=[search,retrain] retrain.auxiliary_weight=1",
    "NOBODY": "'~nobody-of-that-name/here'",
    **{"NOISED": NOISED, "PRIVATE": PRIVATE, "METRICS": METRICS, "LITTLE": LITTLE},
}
REFUSED = """
dataset.mean=[0,0,0] dataset.std=[1,1e-300,1] | channel 1 of client 0
$FRACTIONS{train:.99,validation:.005,test:.005}
    | records has no validation record, by which fed_darts chooses | validation=0.005
$FRACTIONS{train:0,validation:.9,test:.1} | client 0 with | records has no train record
search_space=nasbench201_small retrain=small $AUXILIARY | $HEADS
search_space=mbconv_small retrain=mbconv $AUXILIARY | $HEADS
search_space=dp_cells_small retrain=dp_cells $AUXILIARY | $HEADS
$LINEAR_DP $METRICS=.1 $RETRAIN=2 | evaluate takes 1 round, more than | raise $METRICS=0.1 or set
partition=saved partition.file={tmp}/none | partition.file={tmp}/none cannot be read
dataset.cache={tmp}/file | dataset.cache={tmp}/file cannot hold the prepared data
$PRIVATE privacy.sites={tmp}/file | privacy.sites= | cannot be used
$PRIVATE dataset.root=$NOBODY | dataset.root=~nobody-of-that
$PRIVATE dataset.cache=$NOBODY | dataset.cache=~nobody-of-that
$PRIVATE run_dir=$NOBODY | run_dir=~nobody-of-that
$PRIVATE privacy.sites=$NOBODY | privacy.sites=~nobody-of-that
$PRIVATE partition=saved partition.file=$NOBODY | partition.file=~nobody-of-that
$NOISED $RETRAIN=.05 | $RETRAIN=0.05 | not 0.1 to
$PRIVATE $WEIGHTS=1 privacy.weights.max_grad_norm=1e-9
    | $WEIGHTS=1 with max_grad_norm=1e-09: client 0: refused | rule largest_grad_norm
$NOISED $METRICS=.05 $LITTLE | $METRICS=0.05: client 0: refused
$NOISED $WEIGHTS=.2 $RETRAIN=1 | search takes 2 rounds, more than | client 0: 0
$PRIVATE $METRICS=3 $FRACTIONS{train:.5,validation:.499,test:.001}
    | $METRICS=3 | test has no declared record
$HELD_OUT retrain.evaluate_every=1 $FRACTIONS{train:.9,validation:0,test:.1}
    | records has no validation record, on which retrain.evaluate_every=1 measures: set it to 0, or
"""


@pytest.mark.parametrize("row", rows(REFUSED, **NAMES), ids=lambda row: row[0])
def test_what_cannot_be_done_is_refused_by_its_settings(compose_config, tmp_path, row):
    (tmp_path / "file").write_text("")
    overrides, *parts = (cell.replace("{tmp}", str(tmp_path)) for cell in row)
    assert lacking(refused(compose_config(overrides)), *parts) == []


def test_sites_that_have_spent_a_budget_refuse_the_next_run(compose_config, tmp_path, run_inline):
    own = (PRIVATE, "clients=2", f"privacy.sites={tmp_path / 'sites'}")
    config = compose_config(*own)
    api.check(config)
    assert not (tmp_path / "sites").exists()
    run_inline(*own)
    assert "more than what is left of budgets covers (client 0: " in refused(config)
    shutil.rmtree(tmp_path / "sites" / "client-1")  # so that it has a budget again
    api.check(config)  # half of the clients are a quorum
    assert "covers (client 0: " in refused(compose_config(*own, "runtime.quorum=0.51"))


@pytest.mark.parametrize("algorithm", [seldom("zero_cost"), seldom("successive_halving")])
def test_limits_that_no_network_keeps_are_refused(compose_config, algorithm):
    group = "algorithm.limits" if algorithm == "zero_cost" else "algorithm.pool.limits"
    sentence = refused(compose_config(f"algorithm={algorithm}", f"{group}.parameters=1"))
    assert sentence.startswith("no network of search_space=nasbench201 is within the limits")
    assert "exceed parameters=1 (the smallest possible has " in sentence
    api.check(compose_config(f"algorithm={algorithm}", f"{group}.parameters=1000000"))
    small = (f"algorithm={algorithm}", f"{group}.parameters=20000", "retrain.channels=64")
    api.check(compose_config(*small, "stages=[search]"))
    assert "): raise them, or lower" in refused(compose_config(*small))
    timed = (f"{group}.table=phone.json", f"{group}.latency_ms=1")
    sentence = refused(compose_config(f"algorithm={algorithm}", *timed))
    assert sentence.startswith("limits.table=phone.json with search_space=nasbench201")


def test_more_threads_than_cores_can_run_are_refused(compose_config, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    sentence = refused(compose_config("runtime.threads=17"))
    assert sentence.startswith("runtime.threads=17 is out of range: expected at most 16, 8 for")
    api.check(compose_config("runtime.threads=16"))
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    api.check(compose_config("runtime.threads=8"))


@pytest.mark.parametrize("algorithm", ["random_search", seldom("dpnas")])
def test_a_group_norm_of_a_single_value_is_refused(compose_config, algorithm):
    own = [f"algorithm={algorithm}", "search_space=dp_cells", "retrain=dp_cells"]
    own += ["search_space.widths=[2,2,4]"]
    sentence = refused(compose_config(*own, "search_space.head=1"))
    assert "a group norm of the network has one value only" in sentence
    assert "raise its sizes (search_space.widths=[2, 2, 4], search_space.head=1)." in sentence
    api.check(compose_config(*own, "search_space.head=2"))


@pytest.mark.parametrize("run_dir", ["file", "file/run", "/proc/run"])
def test_a_run_folder_that_cannot_be_made_is_refused(compose_config, tmp_path, run_dir):
    (tmp_path / "file").write_text("")
    words = r"^run_dir=.* cannot be used \(.*\): choose another"
    refuses(words, create_run_folder, compose_config(f"run_dir={tmp_path / run_dir}"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


# --- room on the disk


SEARCHED = ("rounds=4", "stages=[search]", "search_space.channels=16")
ROOM = ("retrain.rounds=4", "stages=[retrain,evaluate,export]", "algorithm=fedavg")


@pytest.mark.parametrize("overrides", [SEARCHED, ROOM])
def test_a_run_writes_hardly_more_than_is_estimated(overrides, compose_config, finished_run):
    ran = finished_run(*overrides)
    least = written_bytes(ran.config, check_buildable(ran.config).networks)
    files = [*ran.folder.glob("checkpoints/*"), *ran.folder.glob("model.*")]
    assert len(files) == (6 if overrides == SEARCHED else 8)
    assert 0 < least <= sum(file.stat().st_size for file in files) < 3 * least + 3e5


def test_a_run_that_does_not_fit_on_its_disk_is_refused(compose_config, tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "new"
    config = compose_config(*ROOM, f"run_dir={folder}")
    least = written_bytes(config, check_buildable(config).networks)
    assert least > 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=least - 1))
    asked = noting(monkeypatch, shutil, "disk_usage", lambda _, path: path)
    sentence = refused(config)
    assert asked == [tmp_path]  # the folder of it that exists
    assert sentence.startswith("checkpoints and exported models take at least ")
    free = f"whose disk has {(least - 1) / 1e6:,.1f} MB free"
    assert f"in run_dir={show(str(folder))}, {free}" in sentence
    assert sentence.endswith("choose another folder, or lower the sizes of the networks.")
    assert not folder.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=least))
    api.check(config)
