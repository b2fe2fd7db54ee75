"""A model reads data as it was trained to: from a file, and from the same table as a DataFrame."""

from dataclasses import replace
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import torch

from fednas_flwr import load
from fednas_flwr.models.export import export_safetensors
from fednas_flwr.models.networks import make_network
from fednas_flwr.models.prediction import Model

from ..data_sets import prepared
from ..refusals import refuses

N = 60
RNG = np.random.default_rng(1)
COLUMNS = {
    "codes as floats": [f"{code}.0" for code in RNG.integers(1, 5, N)],
    "codes with a zero": [f"0{code}" for code in RNG.integers(1, 5, N)],
    "truth": RNG.choice(["TRUE", "FALSE"], N).tolist(),
    "texts with blanks": RNG.choice(["a ", " a", "b"], N).tolist(),
    "numbers": RNG.normal(size=N).round(3).tolist(),
    "whole": RNG.integers(0, 9, N).tolist(),
    "dates": [f"2024-0{1 + i % 9}-{10 + i % 19}" for i in range(N)],
    "US dates": [f"0{1 + i % 9}/{10 + i % 19}/2024" for i in range(N)],
    "zones": [f"2024-05-{10 + i % 19}T12:00:00+01:00" for i in range(N)],
    "gaps": [None if i % 7 == 0 else float(i) for i in range(N)],
}
CATEGORIES = ("codes as floats", "codes with a zero", "truth")
LABELS = {
    "numbers": [0, 1],
    "floats": ["0.0", "1.0"],
    "truth": ["TRUE", "FALSE"],
    "texts": [" benign", "malignant "],
}


@pytest.fixture
def model_of(tmp_path):
    """``model_of(table, ...)``: a model of a text or frame, and its file."""

    def made(table, **given):
        text = table if isinstance(table, str) else table.to_csv(index=False)
        (path := tmp_path / "t.csv").write_text(text)
        data = prepared("csv", root=path, cache=tmp_path / "cache", server_test=False, **given)
        inputs, size = data.inputs, data.input_shape[0]
        if not inputs.mean:
            mean = data.train.features.nanmean(0)
            std = (data.train.features - mean).square().nanmean(0).sqrt()
            inputs = replace(inputs, mean=tuple(mean.tolist()), std=tuple(std.tolist()))
        torch.manual_seed(0)
        network = torch.nn.Linear(size, data.num_classes)
        network.weight.data /= 1000  # dates are large numbers
        return Model(network, inputs), path

    return made


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_is_read_alike(model_of, kind):
    frame = pd.DataFrame({"x": COLUMNS[kind], "age": range(N), "y": [0, 1] * (N // 2)})
    given = {"categorical": ["x"], "numeric": ["age"]} if kind in CATEGORIES else {}
    model, path = model_of(frame, **given)
    of_file, of_frame = model.predict(path), model.predict(pd.read_csv(path))
    np.testing.assert_array_equal(of_file.probabilities, of_frame.probabilities)
    assert len(np.unique(of_file.probabilities, axis=0)) > 20
    assert of_file.truth == of_frame.truth is not None


@pytest.mark.parametrize("kind", LABELS)
def test_labels_are_read_alike(model_of, kind):
    model, path = model_of(pd.DataFrame({"age": range(N), "y": LABELS[kind] * (N // 2)}))
    of_file = model.predict(path)
    assert of_file.truth == model.predict(pd.read_csv(path)).truth
    assert set(of_file.truth or ()) == set(model.class_names)


def test_the_signs_of_a_file_are_kept_with_the_model(model_of, tmp_path):
    model, path = model_of("pay;y\n1.234,5;0\n12,25;1\n975;1\n1,234;1\n")
    plain = pd.DataFrame({"pay": [1234.5, 12.25, 975.0, Decimal("1.234")], "y": [0, 1, 1, 1]})
    (tmp_path / "one.csv").write_text("pay;y\n1.234;0\n")  # which has two readings by itself
    for file, frame in ((path, plain), (tmp_path / "one.csv", pd.DataFrame({"pay": [1234]}))):
        shares = (model.predict(data).probabilities for data in (file, frame))
        np.testing.assert_array_equal(*shares)


SITE = """
{name: csv, id_column: null, label: ill, class_names: [a, b], numeric: [age, chol],
separator: ";", decimal: comma, rename: {Alter: age}, scale: {chol: 38.67},
missing_in: {age: ["0"]}}
"""


def test_a_kept_model_reads_the_tables_of_its_site(model_of, tmp_path):
    inputs = replace(model_of("age,chol,y\n50,200,a\n70,240,b\n")[0].inputs, label="")
    description = {"name": "linear", "input_shape": [2], "num_classes": 2}
    (kept := tmp_path / "state" / "models" / "1f").mkdir(parents=True)
    model = Model(make_network(description), inputs, description)
    model.network[1].weight.data.normal_(generator=torch.Generator().manual_seed(0))
    export_safetensors(model, kept)
    (tmp_path / "dataset.yaml").write_text(SITE)
    (table := kept.parent / "p.csv").write_text("Alter;chol;ill\n50;5,0;a\n0;6,2;b\n")
    expected = model.predict(pd.DataFrame({"age": [50, None], "chol": [5 * 38.67, 6.2 * 38.67]}))
    found = load(kept).predict(table)
    np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-6)
    assert found.truth == ["a", "b"]


def test_unknown_categories_are_a_warning(model_of):
    model, _ = model_of("ward,y\nnorth,0\nsouth,1\n")
    with pytest.warns(UserWarning, match="column ward: 2 of 2 cells, such as zzz"):
        found = model.predict(pd.DataFrame({"ward": ["zzz", "zzz"]}))
    assert found.notes
    assert model.predict(pd.DataFrame({"ward": ["north", None]})).notes == ()
    model, path = model_of("ward,y\nNA,0\nsouth,1\n", missing_in={"ward": []})
    with pytest.warns(UserWarning, match="ward has missing cells, but no NA, which the model"):
        model.predict(pd.read_csv(path))


def test_labels_that_are_no_classes_are_a_warning(model_of):
    model, _ = model_of("age,y\n1,benign\n2,malignant\n")
    with pytest.warns(UserWarning, match="holds 0, 1, and not only benign, mal"):
        found = model.predict(pd.DataFrame({"age": [1, 2], "y": [0, 1]}))
    assert found.truth is None


@pytest.mark.parametrize(("positive", "expected"), [(None, "b"), (0, "a")])
def test_a_threshold_is_of_the_positive_class(model_of, positive, expected):
    model, path = model_of("age,y\n1,a\n20,b\n300,a\n")
    model.inputs = replace(model.inputs, positive=positive)
    for threshold, labels in ((0.0, {expected}), (1.0, {"a", "b"} - {expected})):
        assert set(model.predict(path, threshold=threshold).labels) == labels


def test_a_threshold_of_three_classes_needs_a_positive_one(model_of):
    model, path = model_of("age,y\n1,a\n20,b\n300,c\n")
    refuses("this one has 3 classes: leave it out", model.predict, path, threshold=0.5)
    model.inputs = replace(model.inputs, positive=0)
    most = model.predict(path).probabilities[:, 1:].argmax(1)
    assert model.predict(path, threshold=1.0).labels == ["bc"[place] for place in most]


def test_two_columns_of_one_name_are_one_sentence(model_of):
    model, _ = model_of("age,y\n1,0\n2,1\n")
    frame = pd.DataFrame([[1, 2]], columns=["age", "age"])
    refuses("the DataFrame has 2 columns age", model.predict, frame, error=ValueError)


def test_predictions_keep_the_ids(model_of):
    model, path = model_of("label,age,y\np1,1,0\np7,2,1\n", id_column="label")
    table = model.predict(path).table()
    assert list(table)[:3] == ["label_", "record", "label"]
    assert table["label_"].tolist() == ["p1", "p7"]
    assert "label_" not in model.predict(pd.DataFrame({"age": [1]})).table()


def test_an_empty_row_keeps_its_number(model_of):
    model, path = model_of(pd.DataFrame({"x": range(N), "age": range(N), "y": [0, 1] * (N // 2)}))
    path.write_text("x,age\n1,2\n,\n3,4\n")
    with pytest.warns(UserWarning, match="empty rows, predicted nonetheless: 1"):
        of_file, of_frame = model.predict(path), model.predict(pd.read_csv(path))
    assert of_file.names == of_frame.names == ("0", "1", "2")
    np.testing.assert_array_equal(of_file.probabilities, of_frame.probabilities)


def test_a_model_of_wide_characters_reads_others(model_of):
    table = "x,größe,y\n" + "".join(f"{row},{row},{row % 2}\n" for row in range(N))
    model, path = model_of(table)
    known = model.predict(path).probabilities
    form = replace(model.inputs.form, encoding="utf-16")
    model = Model(model.network, replace(model.inputs, form=form))
    for encoding in ("utf-16", "utf-8"):
        path.write_bytes(table.encode(encoding))
        np.testing.assert_array_equal(model.predict(path).probabilities, known)
