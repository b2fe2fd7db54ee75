"""Records that can have several labels: from raw data to scores, in all forms, and refusals."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from fednas_flwr import load
from fednas_flwr.cli import main
from fednas_flwr.data.prepared import make_data
from fednas_flwr.models.export import onnx_inputs

from ..data_sets import read
from ..finished_runs import looked_at
from ..refusals import refuses_run

NAMES = ("even", "large", "prime")
LINEAR = (
    *("algorithm=fedavg", "algorithm.network=linear", "stages=[retrain,evaluate,export]"),
    *("clients=2", "retrain.rounds=8", "retrain.weights.lr=0.05"),
)


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


def images(folder):
    """An npz file with y [N, 3], of which a network is searched."""
    x, y = digits()
    np.savez(folder / "raw.npz", x_train=x[:900], y_train=y[:900], x_test=x[900:], y_test=y[900:])
    searched = ("algorithm=fed_darts", "rounds=1", "retrain=quickstart", "retrain.rounds=3")
    names = "dataset.class_names=[even,large,prime]"
    return ("dataset=npz", f"dataset.root={folder / 'raw.npz'}", names, "clients=2", *searched)


def written(own, folder):
    """Overrides by which the last half of a table is the server's test set."""
    own[:900].to_csv(folder / "train.csv", index=False)
    own[900:].to_csv(folder / "test.csv", index=False)
    return ("dataset=csv", f"dataset.root={folder}", *LINEAR)


def columns(folder):
    """A table with a column per label, also as yes and no."""
    own = table(*digits())
    own["large"] = np.where(own["large"] == 1, "Yes", "no")
    return (*written(own, folder), "dataset.labels=[even,large,prime]")


def lists(folder):
    """A table with a column of lists; ``prime`` is the positive label."""
    own = written(as_lists(table(*digits()), "; "), folder)
    return (*own, "dataset.label_separator=';'", "evaluation.positive=prime")


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
    assert [{*names} for names in found.labels] == [
        {n for n, p in zip(NAMES, row, strict=True) if p >= 0.5} for row in shares
    ]
    assert [{*names} for names in found.truth or ()] == [
        {n for n, has in zip(NAMES, row, strict=True) if has} for row in y
    ]
    of, kinds = (2, {}) if finished.kind == "lists" else (slice(None), {"average": "macro"})
    expected = {
        "f1": f1_score(y[:, of], shares[:, of] >= 0.5, **kinds),
        "auroc": roc_auc_score(y[:, of], shares[:, of], **kinds),
        "average_precision": average_precision_score(y[:, of], shares[:, of], **kinds),
    }
    assert {name: finished.central[name] for name in expected} == pytest.approx(expected, abs=1e-3)
    for label, row in enumerate(finished.central["per_class"]):
        assert row["auroc"] == pytest.approx(roc_auc_score(y[:, label], shares[:, label]), abs=1e-3)
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
    meta = session.get_modelmeta().custom_metadata_map
    assert json.loads(meta["class_names"]) == list(NAMES)


def test_report_card_and_counts_are_of_labels(finished):
    report = (finished.folder / "report.html").read_text()
    card = (finished.folder / "MODEL_CARD.md").read_text()
    assert "Each label" in report
    assert "mean over the labels of how often each is told right" in report
    assert "A record can have several of the labels even, large, prime, or none" in card
    assert "softmax" not in card
    train = make_data(finished.config)[0].train
    counts = np.sum(finished.partition["counts"], axis=0)
    assert counts.tolist() == train.labels.sum(0).tolist()
    sizes = [sum(split.values()) for split in finished.partition["splits"]]
    assert sum(sizes) == len(train)  # records, not labels
    if finished.kind != "images":
        assert finished.evaluated["linear"]["auroc"] > 0.7
        assert finished.evaluated["trees"]["auroc"] > finished.evaluated["linear"]["auroc"]


def test_private_clients_search_and_train_on_several_labels(finished_run, tmp_path):
    images(tmp_path)
    run = finished_run(
        *("algorithm=dp_fnas", "privacy=dp", "privacy.epsilon=8", "clients=2", "rounds=2"),
        *("dataset=npz", f"dataset.root={tmp_path / 'raw.npz'}", "retrain.rounds=1"),
        "dataset.class_names=[even,large,prime]",
    )
    evaluated = run.the("evaluated")
    assert not run.failed
    assert 0 < evaluated["central"]["accuracy"] < 1


def test_real_sites_say_that_records_can_have_several_labels(run_inline, tmp_path):
    """Two sites and the server's test set have tables with lists."""
    own = as_lists(table(*digits()), "|")
    files = [tmp_path / "0.csv", tmp_path / "1.csv"]
    for site, file in enumerate(files):
        own[site * 400 : site * 400 + 400].to_csv(file, index=False)
    own[800:].to_csv(tmp_path / "new.csv", index=False)
    ran = run_inline(
        *("runtime=deployment", "runtime.superlink=site", "partition=sites", *LINEAR),
        *("dataset=csv", f"dataset.root={tmp_path / 'new.csv'}", "dataset.label_separator='|'"),
        f"dataset.cache={tmp_path / 'cache'}",
        sites=files,
    )
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
def test_several_labels_are_audited(tmp_path, capsys):
    images(tmp_path)
    own = ("algorithm=dp_fnas", "privacy=dp", "privacy.weights.noise_multiplier=1", "dataset=npz")
    data = (f"dataset.root={tmp_path / 'raw.npz'}", "dataset.class_names=[even,large,prime]")
    assert main(["audit", *own, *data]) == 0
    assert "The audit does not refute" in capsys.readouterr().out
