"""Raw data, fed to the model of a run through each of its doors, has the reported accuracy."""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch

from fednas_flwr import load
from fednas_flwr.models.export import onnx_inputs

from ..data_sets import colour_digits, digit_files, read, save_pixels
from ..finished_runs import looked_at
from ..patients import patients

FIXED = ("algorithm=fedavg", "algorithm.network=linear", "stages=[retrain,evaluate,export]")
FIXED += ("clients=2", "retrain.rounds=8", "retrain.weights.lr=0.05")
SEARCHED = ("algorithm=fed_darts", "search_space=mlp_small", "retrain=quickstart", "rounds=1")
SEARCHED += ("clients=2", "retrain.rounds=4", "search_space.channels=16", "retrain.channels=16")


def digits(folder):
    """The 8x8 digits as their 0..16 are scaled to bytes; users have them as an array."""
    return SimpleNamespace(overrides=("dataset=digits", *FIXED), raw=None)


def npz(folder):
    """Digits in colours [N, H, W, C], with classes that have names."""
    x, y = colour_digits()
    path = folder / "digits.npz"
    np.savez(path, x_train=x[:900], y_train=y[:900], x_test=x[900:], y_test=y[900:])
    names = "dataset.class_names=[zero,one,two,three,four,five,six,seven,eight,nine]"
    overrides = ("dataset=npz", f"dataset.root={path}", names, "dataset.mean=[.3,.2,.1]")
    return SimpleNamespace(overrides=(*overrides, "dataset.std=[.3,.3,.4]", *FIXED), raw=path)


def numbers(folder):
    """A table without names in an npz file: half of the digits' pixels, some of them missing."""
    records, _ = read("digits", Path())
    x = records.features.flatten(1)[:, ::2].numpy().astype(np.float32)
    x[np.random.default_rng(0).random(x.shape) < 0.02] = np.nan
    y = records.labels.numpy()
    path = folder / "rows.npz"
    np.savez(path, x_train=x[:900], y_train=y[:900], x_test=x[900:], y_test=y[900:])
    return SimpleNamespace(overrides=("dataset=npz", f"dataset.root={path}", *FIXED), raw=path)


def image_folder(folder):
    """Digits as png files of two sizes, some in colours."""
    root = folder / "images"
    for i, (image, label) in enumerate(islice(digit_files(), 1000)):
        save_pixels(image, root / ("train" if i < 700 else "test") / f"digit{label}" / f"{i}.png")
    sizes = ("dataset.image_size=8", "dataset.channels=1")
    sizes += ("dataset.crop_padding=0", "dataset.flip=false", "dataset.cutout=0")
    overrides = ("dataset=image_folder", f"dataset.root={root}", *sizes, *FIXED)
    return SimpleNamespace(overrides=overrides, raw=root / "test")


def csv(folder):
    """A table as people have it: semicolons, decimal commas, missing cells, texts, dates."""
    table = patients()
    root = folder / "patients"
    root.mkdir()
    table[:600].to_csv(root / "train.csv", sep=";", index=False)
    table[600:].to_csv(root / "test.csv", sep=";", index=False)
    overrides = ("dataset=csv", f"dataset.root={root}", "dataset.missing=indicator", *SEARCHED)
    return SimpleNamespace(overrides=overrides, raw=root / "test.csv")


KINDS = {made.__name__: made for made in (digits, npz, numbers, image_folder, csv)}


@pytest.fixture(scope="module", params=KINDS)
def finished(request, finished_run, tmp_path_factory):
    """A finished run on data of one kind, its raw test data and what was reported of it."""
    kind = KINDS[request.param](tmp_path_factory.mktemp(request.param))
    made = looked_at(finished_run(*kind.overrides), raw=kind.raw)
    made.truth = [made.test.class_names[label] for label in made.test.labels.tolist()]
    made.accuracy = made.central["accuracy"]
    return made


def test_python_takes_raw_data(finished):
    model, given = load(finished.folder), finished.test.features.numpy()  # bytes, or numbers
    if finished.raw is not None and finished.raw.suffix == ".csv":
        given = pd.read_csv(finished.raw, sep=";", decimal=",").drop(columns="outcome")
    found = model.predict(given)
    assert np.mean(np.array(found.labels) == finished.truth) == finished.accuracy > 0.5
    assert found.accuracy is None
    np.testing.assert_allclose(found.probabilities.sum(1), 1, rtol=1e-5)
    if finished.test.features.dtype == torch.uint8:
        shares = model.predict(given.astype(np.float64) / 255)
        np.testing.assert_allclose(shares.probabilities, found.probabilities, atol=1e-4)
    if finished.raw is not None:
        own = model.predict(finished.raw)
        np.testing.assert_allclose(own.probabilities, found.probabilities, atol=1e-4)
        assert own.accuracy == finished.accuracy


def test_the_command_takes_raw_data(finished, tmp_path, prints):
    data = finished.raw
    if data is None:
        data = tmp_path / "data.npz"
        np.savez(data, x=finished.test.features.numpy(), y=finished.test.labels.numpy())
    output = tmp_path / "found.csv"
    command = ("predict", finished.folder, data, "--output", output)
    half = ["--threshold", "0.5"] if len(finished.test.class_names) == 2 else []
    printed = prints(*command, *half)
    assert f"{len(finished.test):,} records" in printed
    assert f"accuracy by the labels in {data}: {100 * finished.accuracy:.1f} %" in printed
    table = pd.read_csv(output, dtype={"label": str, "truth": str})
    assert (table["label"] == table["truth"]).mean() == finished.accuracy
    shares = table.filter(like="probability of ")
    assert [n.removeprefix("probability of ") for n in shares] == list(finished.test.class_names)
    # by the threshold of the report, where it has one
    printed = " ".join(prints(*command).split())
    central = finished.central
    of_two = ("sensitivity", "specificity") if half else ()
    for name in ("f1", "auroc", "average_precision", *of_two):
        assert f"{central[name]:.3f}" in printed
    if half:
        called = pd.read_csv(output)["probability of left"] >= central["threshold"]
        assert (pd.read_csv(output)["label"] == np.where(called, "left", "died")).all()
        assert f"the label is left from a probability of {central['threshold']:g} on" in printed


def test_onnxruntime_takes_raw_data(finished):
    session = onnxruntime.InferenceSession(finished.folder / "model.onnx")
    inputs = load(finished.folder).inputs
    if inputs.is_table and finished.raw.suffix == ".csv":
        table = pd.read_csv(finished.raw, sep=";", decimal=",")
        days = (pd.to_datetime(table["seen"], format="%d.%m.%Y") - pd.Timestamp(0)).dt.days
        fed = {
            "age": table[["age"]].to_numpy(np.float32),
            "ward": table[["ward"]].fillna("").to_numpy(object),
            "seen": days.to_numpy(np.float32)[:, None],
        }
    else:
        fed = onnx_inputs(finished.test.features, inputs)
    (labels,) = session.run(["label"], fed)
    assert np.mean(labels == np.array(finished.truth)) == finished.accuracy


def test_what_the_model_takes_is_told(finished):
    card = (finished.folder / "MODEL_CARD.md").read_text()
    assert "## What it takes and gives" in card
    assert all(name in card for name in finished.test.class_names)
    assert all(column.name in card for column in finished.test.schema)


def test_the_model_is_ready_to_publish(finished, tmp_path, prints):
    from huggingface_hub import ModelCard

    hub = tmp_path / "hub"
    prints("export", finished.folder, "--to", hub)
    card = ModelCard.load(hub / "README.md")
    (result,) = (r for r in card.data.eval_results if r.metric_type == "accuracy")
    assert result.metric_value == finished.accuracy
    assert str(finished.folder) not in card.content
    assert str(finished.made_in) not in card.content
    assert "from huggingface_hub import snapshot_download" in card.content
    x = finished.test.features[:5]
    assert torch.equal(load(hub)(x), load(finished.folder)(x))
    assert "must be a new folder" in prints("export", finished.folder, "--to", hub, code=2)


def test_the_model_of_real_sites_takes_raw_data(run_inline, tmp_path):
    """Three sites with files of their own, whose ages differ; the server has a test table."""
    csv(tmp_path)
    table = pd.read_csv(tmp_path / "patients" / "train.csv", sep=";", decimal=",")
    table = table.sort_values("age")
    files = [tmp_path / f"{site}.csv" for site in range(3)]
    for site, file in enumerate(files):
        table[site * 200 : (site + 1) * 200].to_csv(file, index=False, sep=",;\t"[site])
    test = tmp_path / "patients" / "test.csv"
    own = ("runtime=deployment", "runtime.superlink=site", "partition=sites", "dataset=csv")
    own += (f"dataset.root={test}", "dataset.label=outcome", f"dataset.cache={tmp_path / 'cache'}")
    ran = run_inline(*SEARCHED, *own, "clients=3", "rounds=2", sites=files)
    evaluated = ran.the("evaluated")
    assert load(ran.folder).predict(test).accuracy == evaluated["central"]["accuracy"] > 0.6
    statistics = ran.the("statistics")
    assert statistics["mean"][0] == pytest.approx(60, abs=3)  # each site alone: 46, 60, 73
    assert {"sensitivity", "auroc"} <= evaluated["clients"][0].keys()
