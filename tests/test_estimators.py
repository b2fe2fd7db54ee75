"""Estimators: scikit-learn's conventions, and the same run as the command line."""

import pickle
import re
import shutil
import warnings
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import SkipTest

import numpy as np
import pandas as pd
import pyarrow
import pytest
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits
from sklearn.utils.estimator_checks import estimator_checks_generator

from fednas_flwr import FedClassifier, FedRegressor, compose, estimators, load, run
from fednas_flwr.api import check
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.runs.run_folder import read_config_file
from fednas_flwr.settings import dump_config
from fednas_flwr.settings.configuration import parse_config

from .finished_runs import stop_at
from .refusals import refuses
from .rows import by_hand

TINY = ["algorithm.draws=2", "retrain.rounds=4"]


TYPED = ["experiment=search/data_free", "algorithm.shortlist=null", "retrain=recommended"]
TYPED += ["evaluation.baselines=0", "trackers=[]", "dataset=csv", "dataset.label=died"]
TYPED += ["search_space=mlp_small", "partition=column", "partition.column=hospital", "clients=3"]
TYPED += ["dataset.task=classification", "dataset.missing_in={died:[],hospital:[]}", *TINY]


def patients(number=200):
    """Patients of three hospitals, of whom the old die."""
    rng = np.random.default_rng(0)
    age = rng.integers(20, 90, number)
    pressure = np.where(rng.random(number) < 0.1, np.nan, rng.normal(120, 15, number))
    table = pd.DataFrame({"age": age, "pressure": pressure})
    table["sex"] = pd.Categorical(rng.choice(["f", "m"], number))
    table["hospital"] = rng.choice(["north", "south", "west"], number)
    table["ward"] = [["icu", 3, 4.5][i % 3] for i in range(number)]
    return table.assign(died=age + rng.normal(0, 5, number) > 60)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Fitted to a table of three hospitals."""
    folder = tmp_path_factory.mktemp("estimator")
    own = [*TINY, f"dataset.cache={folder / 'cache'}", f"run_dir={folder / 'run'}"]
    model = FedClassifier(clients="hospital", preset="fast", settings=own)
    return model.fit(patients(), label="died")


def config_of(model):
    return parse_config(read_config_file(str(model.run_folder)))


def test_a_fit_is_a_run_of_the_command_line(fitted):
    config = config_of(fitted)
    assert (config.clients, config.partition.name) == (3, "column")
    own = (f"dataset.root={config.dataset.root}", f"dataset.cache={config.dataset.cache}")
    assert dump_config(config) == dump_config(compose(*TYPED, *own, f"run_dir={fitted.run_folder}"))
    assert (fitted.run_folder / "model.onnx").exists()


@pytest.mark.run
def test_no_records_stay_behind_unless_a_run_can_go_on_with_them(fitted, tmp_path, monkeypatch):
    root = Path(config_of(fitted).dataset.root)
    assert [path.name for path in root.parents[1].iterdir()] == ["self-tests"]
    assert str(root.parents[1]) not in Path("/proc/self/maps").read_text()  # nor in memory
    stop = [stop_at("round", stage="retrain")]
    monkeypatch.setattr(estimators, "run", partial(run, listeners=stop))
    table = patients().assign(label=1, site=2)  # features, whose names are taken
    with pytest.raises(KeyboardInterrupt) as stopped:
        fit(tmp_path, table[["age", "label", "site"]], table["died"], groups=table["hospital"])
    assert stopped.value.__notes__ == [f"to go on: fednas run resume={tmp_path / 'run'}"]
    model = run(tmp_path / "run").model
    assert [column.name for column in model.inputs.schema] == ["age", "label", "site"]
    refuses("run_dir=", fit, tmp_path, table[["age"]], table["died"])
    assert len([*(tmp_path / "cache").glob("fit-*/records")]) == 1


def test_codes_of_missing_cells_are_codes_of_features_alone(tmp_path):
    """Arrays are read as in training, of whose columns one is left out, and 0 is a class."""
    table = patients()[["age", "pressure"]].fillna(0).to_numpy()
    X, y = np.insert(table, 0, 7.0, axis=1), patients()["died"].astype(int)
    how = ["dataset.missing_values=[0]", "dataset.missing=indicator", "dataset.ignore=['0']"]
    model = fit(tmp_path, X, y, *how)
    assert model.classes_.tolist() == [0, 1]
    found = model.predict_proba(X)
    frame = pd.DataFrame(table, columns=["1", "2"]).replace(0, np.nan)
    loaded = load(model.run_folder)
    assert found.tolist() == loaded.predict(frame).probabilities.tolist()
    assert found.tolist() == loaded.predict(table).probabilities.tolist()
    refuses(r"expected cells \[N, 2\], whose columns are 1, 2", loaded.predict, X)


def test_records_of_a_fit_that_time_cuts_short_stay(tmp_path):
    table = patients()
    said = f"the time limit has cut the fit short: fednas run resume={tmp_path / 'run'}"
    with pytest.warns(match=said), suppress(ConfigError):  # where no time was left for a model
        fit(tmp_path, table[["age"]], table["died"], time_limit="0.01s")
    assert read_run(tmp_path / "run").status == "cut short"
    assert len([*(tmp_path / "cache").glob("fit-*/records")]) == 1


def test_predictions_are_the_targets_own_values(fitted):
    table = patients()
    assert fitted.classes_.dtype == bool
    assert fitted.feature_names_in_.tolist() == ["age", "pressure", "sex", "ward"]
    shares = fitted.predict_proba(table)
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-6)
    assert (fitted.predict(table) == (shares[:, 1] > shares[:, 0])).all()
    assert fitted.score(table, table["died"]) > 0.8
    bare = table.drop(columns=["died", "hospital"])
    assert (fitted.predict_proba(bare) == shares).all()
    of_arrow = pyarrow.Table.from_pandas(bare.astype({"ward": str}))  # as polars'
    assert (fitted.predict_proba(of_arrow) == shares).all()
    refuses("yet now missing:\n- age", fitted.predict, bare.drop(columns="age"), error=ValueError)
    other = bare.rename(columns=str.upper)
    refuses("unseen at fit time:\n- AGE", fitted.predict, other, error=ValueError)


def test_what_a_run_shows_is_there(fitted, tmp_path):
    board = fitted.leaderboard()
    assert board["network"][0] == "found"
    assert 0.7 < board["accuracy"][0] <= 1
    assert "<h1>died, records, 3 hospitals</h1>" in fitted.report().read_text()
    important = fitted.importance(patients(), label="died")
    assert important.index[0] == "age"
    assert important["importance"].is_monotonic_decreasing
    assert tmp_path / "to" / "model.onnx" in fitted.export(tmp_path / "to")


def test_a_pickle_predicts_without_the_run_folder(fitted, tmp_path):
    content = pickle.dumps(fitted)
    assert b"Network" not in content  # bytes of a file, no classes of torch
    away = shutil.move(fitted.run_folder, tmp_path)
    try:
        again = pickle.loads(content)
        table = patients(20)
        assert (again.predict_proba(table) == fitted.predict_proba(table)).all()
        assert not hasattr(clone(again), "classes_")
        refuses("is gone: only predictions work without it", again.leaderboard)
    finally:
        shutil.move(away, fitted.run_folder_)


def fit(tmp_path, X, y, *settings, groups=None, **keys):
    own = [*TINY, f"dataset.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}", *settings]
    return FedClassifier(preset="fast", settings=own, **keys).fit(X, y, groups=groups)


@pytest.mark.run
def test_arrays_and_groups(tmp_path, capsys):
    table = patients()
    X, groups = table[["age", "pressure"]].to_numpy(), table["hospital"]
    X[:, 1], sex = np.arange(len(X)), table["sex"].astype(str).replace("m", "null")  # a class, too
    with pytest.warns(UserWarning, match="1 has another whole number in every|holds null") as told:
        model = fit(tmp_path, X, sex, groups=groups, verbose=True)
    assert len(told) == 2
    assert f"run folder: {tmp_path / 'run'}" in capsys.readouterr().out
    assert (config_of(model).clients, model.n_features_in_) == (3, 2)
    assert model.classes_.tolist() == ["f", "null"]
    assert model.importance(table[["age", "pressure"]].to_numpy(), sex).shape == (2, 2)
    X = np.random.default_rng(0).random((len(X), 20)) > 0.5
    model = fit(tmp_path / "bools", X, table["died"])
    assert (model.predict(X) == model.predict(X.astype(int))).all()


@pytest.mark.run
def test_images(tmp_path):
    digits = load_digits()
    images, labels = digits.images.astype("uint8") * 15, digits.target
    small = ("search_space.channels=2", "search_space.num_cells=1", "retrain.rounds=6")
    model = fit(tmp_path, images, labels, *small, clients=2)
    assert (config_of(model).dataset.name, config_of(model).clients) == ("npz", 2)
    assert model.classes_.tolist() == list(range(10))
    assert model.predict(images[:30]).dtype == labels.dtype
    assert model.score(images[:200], labels[:200]) > 0.5


def test_targets_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="y has one class, 7: a classifier needs two or more"):
        FedClassifier().fit(np.eye(4), [7] * 4)
    images, numbers = load_digits().images[:20], np.arange(20)
    with pytest.raises(ValueError, match="y has one class, 7"):  # of objects that are numbers
        FedClassifier().fit(np.eye(4), np.array([7] * 4, dtype=object))
    mixed = np.array([0, "x"] * 2, dtype=object)
    refuses("mixes numbers and texts", FedClassifier().fit, np.eye(4), mixed, error=ValueError)
    known = pd.Series([True] * 4, dtype="boolean")
    refuses("one class, True", FedClassifier().fit, np.eye(4), known, error=ValueError)
    X, times, known = np.eye(4), pd.Series(pd.to_timedelta(range(4), unit="D")), [0, 1] * 2
    refuses("y holds times .*: give a number", FedRegressor().fit, X, times, error=ValueError)
    refuses("Expected a 2-dim", FedRegressor().fit, times, known, error=ValueError)
    table, as_text = pd.DataFrame(X, columns=["", *"abc"]), "experiment=search/data_free"
    words = "has a column without a name: name it, or remove it"
    refuses(words, FedClassifier(settings=as_text).fit, table, known)
    words = r"images \(shape \(20, 8, 8\)\) take no groups"
    for model, groups in ((FedRegressor(), None), (FedClassifier(), numbers)):
        refuses(words, model.fit, images, numbers, groups=groups, error=ValueError)


def test_settings_reach_the_run(tmp_path):
    ranges = "dataset.ranges={age: [0, 100], pressure: [50, 200]}"
    known = (ranges, "dataset.ignore=[sex,ward]", "retrain.rounds=1")
    keys = {"clients": "hospital", "epsilon": 8, "time_limit": "10min"}
    own = [f"dataset.cache={tmp_path}", f"run_dir={tmp_path / 'run'}", *TINY, *known]
    model = FedClassifier(preset="fast", random_state=7, metric="auroc", settings=own, **keys)
    model.fit(patients(), label="died")
    config = config_of(model)
    assert (config.seed, config.privacy.name, config.privacy.epsilon) == (7, "dp", 8)
    assert (config.runtime.time_limit, config.evaluation.metric) == ("10min", "auroc")
    assert model.leaderboard()["epsilon"][0] <= 8


def test_records_without_a_class_or_a_group_are_refused():
    X, y, fit = np.eye(60), np.array(["a", "b"] * 30, dtype=object), FedClassifier().fit
    refuses("no class in record 1", fit, X, np.where(y == "b", None, y), error=ValueError)
    refuses(r"site is empty in \d+ rows", fit, X, y, groups=[None, "a", "b"] * 20)
    for name, told in {"a\nb": "a printable line of up to", "b ": "outer blanks: change"}.items():
        refuses(told, fit, X, np.where(y == "b", name, y), error=ValueError)
    refuses(r"site is empty in 1\d rows", fit, X, y, groups=[None, "NA", "b"] * 20)
    for names in (["true", "TRUE", "False"], ["1", "1.0", "2"]):
        refuses("some are read as one: give them", fit, X, np.resize(names, 60), error=ValueError)


@pytest.fixture
def asked(monkeypatch):
    """The configurations, and the records, of runs that are not made."""
    kept = []

    def read(config, quiet):
        kept.append((config, pd.read_parquet(config.dataset.root)))
        raise InterruptedError

    monkeypatch.setattr(estimators, "run", read)
    return kept


SIGNS = [("a\\b", "${x}"), ("a'b", 'a"b'), ("a=b", "a,b\\"), ("\\${x}", "b"), ("last", "w")]
SIGNS += [(" a\tb", "c\nd ")]


@pytest.mark.parametrize(("label", "site"), SIGNS)
def test_names_of_any_signs_are_taken(label, site, tmp_path, asked):
    table = patients().rename(columns={"died": label, "hospital": site})
    model = FedClassifier(clients=site, preset="fast", settings=[f"dataset.cache={tmp_path}"])
    refuses("", model.fit, table, label=label, error=InterruptedError)
    ((config, records),) = asked
    label, site = (" ".join(name.split()) for name in (label, site))
    assert (config.dataset.label, config.partition.column) == (label, site)
    assert site in records
    assert records.columns[-1] == label  # as the name "last" stands for the last column


@pytest.mark.parametrize("draws_of", [np.random.RandomState, np.random.default_rng])
def test_columns_of_levels_and_what_draws_seeds_are_taken(tmp_path, asked, draws_of):
    levels = patients()[["age"]].set_axis(pd.MultiIndex.from_tuples([("a", "b")]), axis=1)
    for draws in map(draws_of, (0, 0, 1)):
        own = {"preset": "fast", "settings": [f"dataset.cache={tmp_path}"], "random_state": draws}
        refuses("", FedClassifier(**own).fit, levels, patients()["died"], error=InterruptedError)
    one, again, other = (config.seed for config, _ in asked)
    assert one == again != other
    assert [*asked[0][1]] == ["('a', 'b')", "label"]
    assert np.isnan(estimators.plain(np.ma.array([[1, 2]], mask=[[0, 1]]))).tolist() == [[0, 1]]


def test_columns_of_types_of_pandas_are_what_they_say(tmp_path):
    drawn = np.random.default_rng(0)
    code = drawn.integers(0, 3, 90)
    stay = pd.to_timedelta(code * 12, unit="h")
    X = pd.DataFrame({"code": pd.Categorical(code, [0, 1, 2, 5]), "stay": stay})
    X["x"] = pd.arrays.SparseArray(drawn.normal(size=90))
    X["gone"] = pd.Categorical([None] * 90)
    X["wave"], X["long"] = code + 1j, [2**70 + int(i) for i in code]
    own = ["retrain.rounds=2", "algorithm.draws=2", f"dataset.cache={tmp_path}"]
    with warnings.catch_warnings(action="ignore"):
        model = FedClassifier(preset="fast", settings=own).fit(X, np.array([0, 1, 0])[code])
        assert len(model.predict(X)) == 90
    columns = {column.name: column for column in load(model.run_folder).inputs.schema}
    assert columns["code"].categories == ("0", "1", "2", "5")
    assert columns["wave"].categories == ("(1+1j)", "(2+1j)", "1j")
    assert [columns[name].kind for name in ("stay", "x")] == ["number", "number"]


OTHERWISE = ["dataset.map={sex: {1: low}}", "dataset.scale={sex: 2}", "dataset.rename={sex: s}"]
PRIVATE = ["privacy=dp", "privacy.epsilon=8", "dataset.ranges={age: [0, 99]}"]


@pytest.mark.parametrize("settings", [[], ["dataset.missing_values=[-9]"], OTHERWISE, PRIVATE])
def test_categories_of_numbers_are_taken_where_nothing_else_is_said(settings, tmp_path, asked):
    X = patients()[["age"]].assign(sex=pd.Categorical(np.resize([0, 1, -9], 200)))
    model = FedClassifier(preset="fast", settings=[*settings, f"dataset.cache={tmp_path}"])
    refuses("", model.fit, X, patients()["died"], error=InterruptedError)
    codes = {0: ["-9", "0", "1"], 1: ["0", "1"]}.get(len(settings), [])
    assert asked[0][0].dataset.categories.get("sex", []) == codes


def test_another_algorithm_takes_the_place_of_a_presets(tmp_path, asked):
    settings = [f"dataset.cache={tmp_path}", "algorithm=fedavg", "algorithm.network=linear"]
    model = FedClassifier(preset="fast", settings=settings)
    with pytest.warns(match="without effect"):
        refuses("", model.fit, patients(), label="died", error=InterruptedError)
    assert asked[0][0].algorithm.network == "linear"


WRONG = [
    ({"clients": "ward 3"}, "died", "X has no column ward 3: it has age, "),
    ({}, "dead", "X has no column dead: it has age, "),
    ({"preset": "slow"}, "died", "preset=slow is unknown: choose one of best, default, fast"),
    ({}, None, "the target y is None: give y, or label"),
    ({"time_limit": "soon"}, "died", "runtime.time_limit=soon"),
    ({"time_limit": 600}, "died", "runtime.time_limit=600 .* expected a time .*: 45s, 30min"),
]


@pytest.mark.parametrize(("keys", "label", "message"), WRONG)
def test_what_is_wrong_is_told_in_one_sentence(keys, label, message, tmp_path):
    refuses(message, FedClassifier(**keys).fit, patients(), error=ValueError, label=label)
    fit = FedClassifier(preset="fast", settings=[f"dataset.cache={tmp_path}"]).fit
    died = patients()["died"]
    refuses("has a column died beside y", fit, patients(), died, error=ValueError, label="died")
    odd = patients().astype({"age": object})
    odd.loc[0, "age"] = "old"
    refuses("^column age of the data .* old in row 1: .*ies={age: ", fit, odd, label="died")
    twice = pd.concat([patients()[["age"]], patients()[["age", "died"]]], axis=1)
    refuses("several columns age", FedClassifier().fit, twice, error=ValueError, label="died")


@pytest.mark.parametrize("preset", estimators.PRESETS)
@pytest.mark.parametrize("epsilon", [False, True])
def test_every_preset_is_a_run_with_and_without_privacy(preset, epsilon, tmp_path, monkeypatch):
    def checked(config, quiet):
        check(config)
        assert epsilon or preset == "fast" or config.retrain.rounds is None  # as records need
        alone = epsilon and preset == "default" and config.dataset.name == "csv"
        assert not alone or (config.retrain.weights.momentum == 0) != config.dataset.is_regression
        assert ("search" in config.stages) != alone
        assert getattr(config.algorithm, "network", "") == ("mlp_64" if alone else "")
        raise InterruptedError

    monkeypatch.setattr(estimators, "run", checked)
    own = [f"dataset.cache={tmp_path}"] + epsilon * ["dataset.ranges={age: [0, 100]}"]
    model = FedClassifier(preset=preset, epsilon=8 if epsilon else None, settings=own)
    refuses("", model.fit, patients()[["age", "died"]], error=InterruptedError, label="died")
    known = ["dataset.ranges={pressure: [0, 300]}", "dataset.target_range=[0, 100]"]
    numbers = FedRegressor(preset=preset, epsilon=model.epsilon, settings=own[:1] + epsilon * known)
    refuses("", numbers.fit, patients()[["age", "pressure"]], error=InterruptedError, label="age")
    of_images = FedClassifier(preset=preset, epsilon=model.epsilon, settings=own[:1])
    images = np.random.default_rng(0).integers(0, 256, (40, 1, 32, 32), np.uint8)
    refuses("", of_images.fit, images, ["a", "b"] * 20, error=InterruptedError)


def test_settings_are_taken_as_they_are_given(tmp_path, asked):
    table, own = patients(), {"preset": "fast", "settings": [f"dataset.cache={tmp_path}"]}
    records = table[["age", "hospital"]].rename(columns={"hospital": "label"})
    model = FedClassifier(clients="label", random_state=np.int64(0), **own)
    refuses("", model.fit, records, table["sex"], error=InterruptedError)
    ((config, written),) = asked
    assert {*written[config.dataset.label]} == {"f", "m"}
    assert {*written[config.partition.column]} == {*table["hospital"]}
    assert (config.seed, config.dataset.task) == (0, "classification")  # however many there are
    refuses("clients=0", FedClassifier(clients=0, **own).fit, records, table["sex"])


@pytest.mark.run
def test_a_number_is_predicted_in_its_own_unit(tmp_path):
    table = load_diabetes(as_frame=True).frame
    own = ["algorithm.draws=2", f"dataset.cache={tmp_path}", f"run_dir={tmp_path / 'run'}"]
    model = FedRegressor(clients=3, preset="fast", settings=own).fit(table, label="target")
    assert model.predict(table).dtype == float
    assert model.score(table, table["target"]) > 0.2  # R2; a linear model has .5
    assert {"bmi", "s5"} & {*model.importance(table, label="target").index[:3]}


OF_TARGETS = "regressor|supervised"
CHECKED = [(FedClassifier, "", 50), (FedRegressor, OF_TARGETS, 5), by_hand(FedRegressor, "", 50)]


@pytest.mark.run
@pytest.mark.parametrize(("estimator", "named", "fewest"), CHECKED)
def test_scikit_learns_own_checks(estimator, named, fewest, tmp_path, monkeypatch):
    """For the second estimator those that do not concern what it shares with the first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDNAS_CACHE", str(tmp_path / "cache"))
    checks = estimator_checks_generator(estimator(preset="fast", settings=TINY))
    own = [pair for pair in checks if re.search(named, pair[1].func.__name__)]
    assert len(own) > fewest
    for model, passes in own:
        with warnings.catch_warnings(action="ignore"), suppress(SkipTest):
            passes(model)
