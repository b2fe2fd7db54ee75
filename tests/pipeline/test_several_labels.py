"""Records with several labels or a number to predict: from raw data to scores; refusals."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn import metrics

from fednas_flwr import load
from fednas_flwr.cli import main
from fednas_flwr.data.loaders import make_client_data
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.export import onnx_inputs
from fednas_flwr.pipeline.feasible import check_buildable
from fednas_flwr.runs.numbers import read_run

from ..data_sets import read
from ..finished_runs import looked_at
from ..refusals import refuses, refuses_run

NAMES = ("even", "large", "prime")
SCORES = {"auroc": metrics.roc_auc_score, "average_precision": metrics.average_precision_score}
LINEAR = ("algorithm=fedavg", "algorithm.network=linear", "stages=[retrain,evaluate,export]")
LINEAR += ("clients=2", "retrain.rounds=8", "retrain.weights.lr=0.05")


def digits():
    """Return the digits [N, 8, 8] and which of three properties each has [N, 3]; 1 has none."""
    records, _ = read("digits", Path())
    y = records.labels.numpy()
    marks = [y % 2 == 0, y > 4, np.isin(y, (2, 3, 5, 7))]
    return records.features[:, 0].numpy(), np.stack(marks, axis=1).astype(np.int64)


def table(x, y):
    """Return the mean brightness of each row and column of an image, and the labels' columns."""
    sums = np.concatenate([x.mean(1), x.mean(2)], axis=1).round(3)
    columns = {f"p{i}": sums[:, i] for i in range(16)}
    return pd.DataFrame(columns | {n: y[:, i] for i, n in enumerate(NAMES)})


def as_lists(own, separator):
    """Return the same table with the labels in one column."""
    found = [[n for n in NAMES if row[n]] for _, row in own.iterrows()]
    return own.drop(columns=list(NAMES)).assign(findings=[separator.join(names) for names in found])


def arrays(folder):
    """An npz file with y [N, 3]."""
    x, y = digits()
    np.savez(folder / "raw.npz", x_train=x[:900], y_train=y[:900], x_test=x[900:], y_test=y[900:])
    names = "dataset.class_names=[even,large,prime]"
    return ("dataset=npz", f"dataset.root={folder / 'raw.npz'}", names)


def images(folder):
    """The same, of which a network is searched."""
    searched = ("algorithm=fed_darts", "rounds=1", "retrain=quickstart", "retrain.rounds=3")
    return (*arrays(folder), "clients=2", *searched)


def halves(folder, table):
    """Overrides by which the last quarter of a table is the server's test set."""
    first = 3 * len(table) // 4
    table[:first].to_csv(folder / "train.csv", index=False)
    table[first:].to_csv(folder / "test.csv", index=False)
    return ("dataset=csv", f"dataset.root={folder}")


def columns(folder):
    """A table with a column per label, also as yes and no."""
    own = table(*digits())
    own["large"] = np.where(own["large"] == 1, "Yes", "no")
    return (*halves(folder, own), *LINEAR, "dataset.labels=[even,large,prime]")


def lists(folder):
    """A table with a column of lists; ``prime`` is the positive label."""
    own = halves(folder, as_lists(table(*digits()), "; "))
    return (*own, *LINEAR, "dataset.label_separator=';'", "evaluation.positive=prime")


def named(has):
    """Return the names of the labels that each record has."""
    return [{n for n, own in zip(NAMES, row, strict=True) if own} for row in has]


KINDS = {made.__name__: made for made in (images, columns, lists)}


@pytest.fixture(scope="module", params=KINDS)
def finished(request, finished_run, tmp_path_factory):
    """A finished run on data of one kind, its raw test data and what was reported of it."""
    folder = tmp_path_factory.mktemp(request.param)
    run = finished_run(*KINDS[request.param](folder))
    raw = folder / ("raw.npz" if request.param == "images" else "test.csv")
    return looked_at(run, kind=request.param, raw=raw)


def test_python_says_what_is_reported(finished):
    y = finished.test.labels.numpy()
    found = load(finished.folder).predict(finished.raw)
    shares = found.probabilities
    own = load(finished.folder).predict(finished.test.features.numpy())
    np.testing.assert_allclose(own.probabilities, shares, atol=1e-5)
    assert shares.sum(1).min() < 0.9  # no softmax
    accuracy = ((shares >= 0.5) == (y == 1)).mean()
    assert found.accuracy == pytest.approx(accuracy)
    assert finished.central["accuracy"] == pytest.approx(accuracy)
    assert accuracy > 0.6
    assert [{*names} for names in found.labels] == named(shares >= 0.5)
    assert [{*names} for names in found.truth or ()] == named(y == 1)
    of, kinds = (2, {}) if finished.kind == "lists" else (slice(None), {"average": "macro"})
    expected = {"f1": metrics.f1_score(y[:, of], shares[:, of] >= 0.5, **kinds)}
    for name, score in SCORES.items():
        expected[name] = score(y[:, of], shares[:, of], **kinds)
    assert {name: finished.central[name] for name in expected} == pytest.approx(expected, abs=1e-3)
    for label, row in enumerate(finished.central["per_class"]):
        auroc = metrics.roc_auc_score(y[:, label], shares[:, label])
        assert row["auroc"] == pytest.approx(auroc, abs=1e-3)
        assert row["count"] == y[:, label].sum()
    assert (finished.central["sensitivity"] is not None) == (finished.kind == "lists")
    assert "confusion" not in finished.central


def test_onnxruntime_gives_labels_and_probabilities(finished):
    session = onnxruntime.InferenceSession(finished.folder / "model.onnx")
    fed = onnx_inputs(finished.test.features, load(finished.folder).inputs)
    labels, shares = session.run(["labels", "probabilities"], fed)
    assert labels.dtype == np.int64
    accuracy = (labels == finished.test.labels.numpy()).mean()
    assert accuracy == pytest.approx(finished.central["accuracy"])
    own = load(finished.folder).predict(finished.raw).probabilities
    np.testing.assert_allclose(shares, own, atol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == list(NAMES)


def test_report_card_and_counts_are_of_labels(finished):
    report = (finished.folder / "report.html").read_text()
    card = (finished.folder / "MODEL_CARD.md").read_text()
    assert "Each label" in report
    assert "mean over the labels of how often each is told right" in report
    assert "A record can have several of the labels even, large, prime, or none" in card
    assert "softmax" not in card
    train = make_data(finished.config)[0].train
    assert np.sum(finished.partition["counts"], axis=0).tolist() == train.labels.sum(0).tolist()
    sizes = [sum(split.values()) for split in finished.partition["splits"]]
    assert sum(sizes) == len(train)  # records, not labels
    if finished.kind != "images":
        assert finished.evaluated["linear"]["auroc"] > 0.7
        assert finished.evaluated["trees"]["auroc"] > finished.evaluated["linear"]["auroc"]


def test_private_clients_search_and_train_on_several_labels(finished_run, tmp_path):
    private = ("algorithm=dp_fnas", "privacy=dp", "privacy.epsilon=8", "clients=2", "rounds=1")
    few = ("dataset.limit_train=200", "retrain.rounds=1", "evaluation.baselines=0")
    run = finished_run(*private, *arrays(tmp_path), *few)
    assert not run.failed
    assert 0 < run.the("evaluated")["central"]["accuracy"] < 1


def test_real_sites_say_that_records_can_have_several_labels(run_inline, tmp_path):
    """Two sites and the server's test set have tables with lists."""
    own = as_lists(table(*digits()), "|")
    files = [tmp_path / "0.csv", tmp_path / "1.csv"]
    for site, file in enumerate(files):
        own[site * 400 : site * 400 + 400].to_csv(file, index=False)
    own[800:].to_csv(tmp_path / "new.csv", index=False)
    own = ("runtime=deployment", "runtime.superlink=site", "partition=sites", "dataset=csv")
    own += (f"dataset.root={tmp_path / 'new.csv'}", f"dataset.cache={tmp_path / 'cache'}")
    ran = run_inline(*LINEAR, *own, "dataset.label_separator='|'", sites=files)
    found = load(ran.folder).predict(tmp_path / "new.csv")
    assert found.inputs.multi_label
    evaluated = ran.the("evaluated")
    assert found.accuracy == pytest.approx(evaluated["central"]["accuracy"])
    assert evaluated["central"]["accuracy"] > 0.6
    assert all(client["auroc"] > 0.6 for client in evaluated["clients"])


REFUSED = {
    "partition=dirichlet": "partition=dirichlet divides records by the class of each",
    "partition=label_groups": "partition=label_groups divides records by the class",
    "training.class_factors={even: .5}": "training.class_factors=.*is for records of one class",
    "evaluation.positive=odd": "evaluation.positive=odd is unknown",
    "dataset.class_names=[even,odd]": "has 3 labels, but dataset.class_names names 2",
    "dataset.labels=[a,b]": "dataset.labels is a setting of dataset=csv",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_is_for_one_class_is_refused(override, compose_config, tmp_path):
    given = [o for o in images(tmp_path) if o.split("=")[0] != override.split("=")[0]]
    refuses_run(REFUSED[override], compose_config, *given, override)


@pytest.mark.run
def test_several_labels_are_audited(tmp_path, prints):
    own = (*LINEAR, "privacy=dp", "privacy.retrain.noise_multiplier=1", "clients=1")
    own += ("privacy.epsilon=1000", "retrain.rounds=1")
    own += ("dataset.labels=[even,large,prime]", "dataset.statistics={p0: [5, 5], p1: [5, 5]}")
    own += halves(tmp_path, table(*digits())[["p0", "p1", *NAMES]])
    assert "The audit does not refute" in prints("audit", *own)


# --- targets that are numbers


STAYS = 1200
RANGES = ("dataset.ranges={age:[0,100],crp:[0,60]}", "dataset.target_range=[0,12]")
LINEAR_OF_THREE = (*LINEAR, "clients=3")
DP_CELLS = ("search_space=dp_cells_small", "search_space.widths=[4,4,4]", "retrain=dp_cells")
DP_CELLS += tuple(f"algorithm.{kind}_candidates=2" for kind in ("trained", "rewarded", "final"))
TINY = ("clients=2", "rounds=1", "retrain=quickstart", "retrain.rounds=1")
OF_TABLES = ("algorithm=random_search", "experiment=search/recommended", "algorithm=fed_darts")
OF_TABLES += ("algorithm=feathers", "algorithm=fnas")
SMALL = ("search_space=mlp_small", "search_space.channels=8", "retrain.channels=8")


def stays():
    """Length of stay in days, with one decimal, by age, ward and CRP, which is missing at times."""
    rng = np.random.default_rng(0)
    age, crp = rng.integers(20, 95, STAYS), rng.exponential(12, STAYS).round(1)
    ward = rng.choice(["surgery", "icu", "eye"], STAYS)
    days = 2 + 0.05 * age + 0.05 * crp + (ward == "icu") * (2 + 0.15 * crp)
    days += rng.normal(0, 1, STAYS)
    crp[rng.random(STAYS) < 0.05] = np.nan
    table = pd.DataFrame({"age": age, "ward": ward, "crp": crp})
    return table.assign(days=days.clip(0.1, None).round(1))


@pytest.fixture(scope="module", params=["found", "given", "huber"])
def of_numbers(request, finished_run, tmp_path_factory):
    """A of_numbers run: mean and deviation found by the clients, or of a given range."""
    folder = tmp_path_factory.mktemp(request.param)
    more = {
        "found": (),
        "given": (*RANGES, "partition=dirichlet"),
        "huber": ("training.loss=huber", "partition=label_groups", "retrain.evaluate_every=2"),
    }
    run = finished_run(*halves(folder, stays()), *LINEAR_OF_THREE, *more[request.param])
    return looked_at(run, kind=request.param, raw=folder / "test.csv")


def test_predictions_are_in_the_targets_unit_as_are_their_scores(of_numbers):
    truth = pd.read_csv(of_numbers.raw)["days"].to_numpy()
    found = load(of_numbers.folder).predict(of_numbers.raw)
    assert found.truth == pytest.approx(truth)
    y = np.array(found.labels)
    expected = {"r2": metrics.r2_score(truth, y), "mae": metrics.mean_absolute_error(truth, y)}
    expected["rmse"] = metrics.root_mean_squared_error(truth, y)
    told = {name: of_numbers.central[name] for name in expected}
    assert told == pytest.approx(expected, rel=1e-4)
    assert expected["r2"] > 0.6
    for name, value in expected.items():
        low, high = of_numbers.central["intervals"][name]
        assert low < value < high
    assert "accuracy" not in of_numbers.central
    assert of_numbers.evaluated["metric"] == "r2"
    for simpler in ("linear", "trees"):
        assert of_numbers.evaluated[simpler]["r2"] > 0.6
        assert of_numbers.evaluated[simpler].keys() == expected.keys() | {"intervals", "resamples"}
    pairs = [(pytest.approx(a), pytest.approx(b, rel=1e-3)) for a, b in zip(truth, y, strict=True)]
    assert [tuple(pair) for pair in of_numbers.central["pairs"]] == pairs


def test_what_standardises_is_of_all_clients_or_public(of_numbers):
    target = load(of_numbers.folder).inputs.target
    if of_numbers.kind == "given":
        assert target == pytest.approx((6, 12**0.5, 0, 12))
        return
    prepared, parts = make_data(of_numbers.config)
    assert list(target) == of_numbers.statistics["target"]
    division = of_numbers.config.dataset.division
    train = [make_client_data(prepared, part, **division).train for part in parts]
    numbers = torch.cat([split.labels[split.rows] for split in train]).double()
    assert target == pytest.approx((float(numbers.mean()), float(numbers.std(correction=0))))


def test_onnxruntime_predicts_as_python_does(of_numbers):
    session = onnxruntime.InferenceSession(of_numbers.folder / "model.onnx")
    model = load(of_numbers.folder)
    (numbers,) = session.run(["prediction"], onnx_inputs(of_numbers.test.features, model.inputs))
    assert [output.name for output in session.get_outputs()] == ["prediction"]
    assert numbers.dtype == np.float32
    np.testing.assert_allclose(numbers, model.predict(of_numbers.raw).labels, rtol=1e-4, atol=1e-4)
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == ["days"]


def test_the_command_writes_numbers_and_prints_scores(of_numbers, tmp_path, prints):
    output = tmp_path / "found.csv"
    printed = prints("predict", of_numbers.folder, of_numbers.raw, "--output", output)
    assert f"{of_numbers.central['rmse']:.4g}" in printed
    assert "accuracy" not in printed
    table = pd.read_csv(output)
    assert list(table) == ["record", "prediction", "truth"]
    found = metrics.r2_score(table["truth"], table["prediction"])
    assert found == pytest.approx(of_numbers.central["r2"], abs=1e-4)


def test_report_and_card_are_of_numbers(of_numbers):
    report = (of_numbers.folder / "report.html").read_text()
    card = (of_numbers.folder / "MODEL_CARD.md").read_text()
    assert "Predicted over true" in report
    assert "R² is the share of the target" in report
    assert f"{of_numbers.central['rmse']:.4g}" in report
    assert "RMSE from" in report or "RMSE" in card
    assert ("a number from 0 to 12" if of_numbers.kind == "given" else "days, a number.") in card
    for word in ("ccuracy per client", "F1", "softmax", "lassifier", "log loss"):
        assert word not in report + card
    assert all({"r2", "rmse", "mae"} <= client.keys() for client in of_numbers.evaluated["clients"])
    rounds = of_numbers.named("round")
    assert all("train_closeness" in e["metrics"] for e in rounds)
    assert not any("accuracy" in name for e in rounds for name in e["metrics"])


@pytest.mark.run
def test_only_the_delivered_network_of_a_whole_run_has_the_importance_of_columns(tmp_path):
    given = (*halves(tmp_path, stays()[:200]), *TINY, *SMALL, "evaluation.baselines=1")
    folder = tmp_path / "baselines" / "mine"  # by which it is none of another run
    few = ("algorithm=successive_halving", "algorithm.pool.draws=2")
    assert main(["run", *few, *given, f"run_dir={folder}"]) == 0
    record = read_run(folder)
    assert record.scores("central")["importance"]["columns"]
    assert {"importance" in one.scores("central") for one in record.baselines()} == {False}


FEW = ("algorithm.draws=4", "algorithm.shortlist.keep=2")
PRIVATELY = [
    ("experiment=search/recommended_private", "privacy.metrics_noise_multiplier=5", *FEW),
    ("algorithm=dp_fnas", "dataset.target_range=[0,5]"),
    ("experiment=search/halving_private", "algorithm.pool.draws=4"),
]


@pytest.mark.parametrize("overrides", PRIVATELY, ids=["recommended", "dp_fnas", "halving"])
def test_private_clients_learn_within_the_declared_range(overrides, finished_run, tmp_path):
    private = ("privacy=dp", "privacy.epsilon=8", "evaluation.baselines=0")
    given = (*halves(tmp_path, stays()[:400]), *RANGES, *TINY, *SMALL, *private)
    run = finished_run(*overrides[:1], *given, *overrides[1:])
    assert not run.failed
    model, evaluated = load(run.folder), run.the("evaluated")
    low, high = model.inputs.target[2:]
    assert ("is outside dataset.target_range=" in str(run.named("data"))) == (high == 5)
    numbers = model.predict(tmp_path / "test.csv").labels
    assert low <= min(numbers) <= max(numbers) <= high
    assert np.isfinite(evaluated["central"]["rmse"])
    for client in evaluated["clients"]:
        assert client["rmse"] >= 0
        assert "accuracy" not in client


def test_secure_sums_tell_the_errors_of_all_records(finished_run, tmp_path):
    private = ("privacy=dp", "privacy.epsilon=8", "privacy.metrics_noise_multiplier=1")
    own = (*halves(tmp_path, stays()), *RANGES, *LINEAR_OF_THREE, "retrain.rounds=2")
    evaluated = finished_run(*own, *private, "secure_sum=true").the("evaluated")
    assert evaluated["total"]["sites"] == 3
    assert 0 <= evaluated["total"]["rmse"] < 12  # noise may leave nothing of it
    assert "accuracy" not in evaluated["total"]


def photographs(folder):
    """Images in a folder whose table tells how bright each is, and overrides to read them."""
    rng = np.random.default_rng(0)
    brightness = rng.uniform(20, 200, 160).round(1)
    for i, value in enumerate(brightness):
        pixels = (value + rng.normal(0, 10, (8, 8))).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    table = pd.DataFrame({"file": [f"{i}.png" for i in range(160)], "light": brightness})
    table.to_csv(folder / "labels.csv", index=False)
    plain = ("dataset.image_size=null", "dataset.flip=false", "dataset.crop_padding=0")
    more = ("dataset.channels=1", "dataset.target_range=[0,255]", *plain)
    return table, ("dataset=labelled_images", f"dataset.root={folder}", *more)


def test_numbers_are_predicted_of_images(finished_run, tmp_path):
    table, of_images = photographs(tmp_path)
    run = finished_run(*of_images, *LINEAR_OF_THREE)
    assert run.the("evaluated")["central"]["r2"] > 0.8
    with pytest.warns(UserWarning, match=r"labels\.csv is not read: give it in place"):
        found = load(run.folder).predict(tmp_path)
    truth = table.set_index("file")["light"].loc[list(found.names)]
    assert metrics.r2_score(truth, found.labels) > 0.8


MBCONV = ("search_space=mbconv_small", "search_space.width=0.25", "retrain=mbconv_small")
IN_GROUPS = ("algorithm.num_groups=2", "algorithm.group_rounds=1")
ALGORITHMS = [
    ("algorithm=dpnas", *DP_CELLS),
    ("algorithm=dpnas", *DP_CELLS, "privacy=dp", "privacy.epsilon=8"),
    ("algorithm=fdnas", *MBCONV),
    ("algorithm=cfdnas", *MBCONV, "clients=4", "rounds=2", *IN_GROUPS),
    ("algorithm=fedex",),
    ("algorithm=fedprox", "algorithm.network=resnet8_4"),
    ("algorithm=random_search", "evaluation.personalised=true"),
    ("experiment=search/recommended", "evaluation.metric=rmse", "algorithm.pool.draws=8"),
    *((name,) for name in OF_TABLES[2:]),
]


@pytest.mark.parametrize("overrides", ALGORITHMS, ids=lambda overrides: overrides[0].split("=")[1])
def test_all_algorithms_predict_numbers(overrides, finished_run, tmp_path):
    given = (*photographs(tmp_path)[1], "clients=2", "rounds=1", "retrain.rounds=1")
    if overrides[0] in OF_TABLES:
        given = (*halves(tmp_path, stays()[:200]), *TINY, *SMALL)
    run = finished_run(*overrides[:1], *given, *overrides[1:])
    assert not run.failed
    if overrides[0] in OF_TABLES:
        assert np.isfinite(run.named("evaluated")[-1]["central"]["rmse"])
        return
    models = [file.parent for file in run.folder.rglob("model.onnx")]  # of each group its own
    assert models
    for folder in models:
        assert np.isfinite(load(folder).predict(tmp_path / "labels.csv").labels).all()


OF_NUMBERS = "metric=r2 is for records with a number to predict, not of one class each"
NUMERIC = "column ward of .* is numeric but"
REFUSED_OF_NUMBERS = {
    "evaluation.positive=icu": "positive=icu is for records with classes, not with a number",
    "evaluation.metric=auroc": "metric=auroc is for records with classes, not with a",
    "dataset.label=ward evaluation.metric=r2": OF_NUMBERS,
    "dataset.label=ward training.loss=huber": "loss=huber is for records with a number",
    "dataset.label=ward dataset.task=regression": NUMERIC,
    "dataset.label=ward dataset.target_range=[0,1]": NUMERIC,
    "dataset.task=regression dataset.class_names=[a,b]": "class_names.* is for classes",
    "dataset.task=classification dataset.target_range=[0,1]": "another of dataset.task",
    RANGES[0]: r"declare dataset.target_range=\[low, high\], too",
}


@pytest.mark.run
@pytest.mark.parametrize("overrides", REFUSED_OF_NUMBERS)
def test_what_does_not_fit_is_refused(overrides, compose_config, tmp_path):
    given = halves(tmp_path, stays())
    refuses_run(REFUSED_OF_NUMBERS[overrides], compose_config, *given, overrides)


@pytest.mark.run
@pytest.mark.parametrize("number", [12, 80])
def test_whole_numbers_that_may_be_classes_are_asked_about(number, compose_config, tmp_path):
    given = halves(tmp_path, stays().assign(days=np.arange(STAYS) % number))
    words = f"{number} different whole numbers .* in 900 rows: set dataset.task=regr"
    refuses(words, check_buildable, compose_config(*given, *LINEAR_OF_THREE))
    for task, is_number in (("regression", True), ("classification", False)):
        config = compose_config(*given, *LINEAR_OF_THREE, f"dataset.task={task}")
        assert make_data(config)[0].train.is_regression == is_number
        assert torch.is_floating_point(make_data(config)[0].train.labels) == is_number


DAYS = [
    (np.arange(STAYS) % 10, False),
    (np.arange(STAYS) % 4 / 2, False),
    (np.arange(STAYS) % 400, True),
    (np.arange(STAYS) % 30 / 10, True),
]


@pytest.mark.run
@pytest.mark.parametrize(("days", "is_number"), DAYS, ids=["few", "few halves", "many", "decimals"])
def test_the_kind_of_the_label_tells_the_task(days, is_number, compose_config, tmp_path):
    given = halves(tmp_path, stays().assign(days=days))
    assert make_data(compose_config(*given, *LINEAR_OF_THREE))[0].train.is_regression == is_number
