"""A model reads data as it was trained to: from a file, and from the same table as a DataFrame."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fednas_flwr.base.errors import ConfigError
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


def model_of(path, tmp_path, **given):
    data = prepared("csv", root=path, cache=tmp_path / "cache", server_test=False, **given)
    inputs = data.inputs
    if not inputs.mean:
        size = data.input_shape[0]
        inputs = type(inputs)(**{**vars(inputs), "mean": (0.1,) * size, "std": (3.0,) * size})
    torch.manual_seed(0)
    network = nn.Linear(data.input_shape[0], data.num_classes)
    network.weight.data /= 1000  # dates are large numbers
    return Model(network, inputs)


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_is_read_alike(tmp_path, kind):
    frame = pd.DataFrame({"x": COLUMNS[kind], "age": range(N), "y": [0, 1] * (N // 2)})
    frame.to_csv(tmp_path / "t.csv", index=False)
    given = {"categorical": ["x"], "numeric": ["age"]} if kind in CATEGORIES else {}
    model = model_of(tmp_path / "t.csv", tmp_path, **given)
    of_file = model.predict(tmp_path / "t.csv")
    of_frame = model.predict(pd.read_csv(tmp_path / "t.csv"))
    np.testing.assert_array_equal(of_file.probabilities, of_frame.probabilities)
    assert len(np.unique(of_file.probabilities, axis=0)) > 20
    assert of_file.truth == of_frame.truth is not None


@pytest.mark.parametrize("kind", LABELS)
def test_labels_are_read_alike(tmp_path, kind):
    frame = pd.DataFrame({"age": range(N), "y": LABELS[kind] * (N // 2)})
    frame.to_csv(tmp_path / "t.csv", index=False)
    model = model_of(tmp_path / "t.csv", tmp_path)
    of_file = model.predict(tmp_path / "t.csv")
    assert of_file.truth == model.predict(pd.read_csv(tmp_path / "t.csv")).truth
    assert set(of_file.truth or ()) == set(model.class_names)


def test_the_signs_of_a_file_are_kept_with_the_model(tmp_path):
    text = "pay;y\n1.234,5;0\n12,25;1\n975;1\n"
    (tmp_path / "t.csv").write_text(text)
    model = model_of(tmp_path / "t.csv", tmp_path)
    plain = pd.DataFrame({"pay": [1234.5, 12.25, 975.0], "y": [0, 1, 1]})
    ours = model.predict(tmp_path / "t.csv")
    np.testing.assert_array_equal(ours.probabilities, model.predict(plain).probabilities)
    (tmp_path / "one.csv").write_text("pay;y\n1.234;0\n")  # which has two readings by itself
    one = model.predict(tmp_path / "one.csv").probabilities
    np.testing.assert_array_equal(one, model.predict(pd.DataFrame({"pay": [1234]})).probabilities)


def test_unknown_categories_are_a_warning(tmp_path):
    (tmp_path / "t.csv").write_text("ward,y\nnorth,0\nsouth,1\n")
    model = model_of(tmp_path / "t.csv", tmp_path)
    with pytest.warns(UserWarning, match="column ward: 2 of 2 cells, such as zzz"):
        found = model.predict(pd.DataFrame({"ward": ["zzz", "zzz"]}))
    assert found.notes
    assert model.predict(pd.DataFrame({"ward": ["north", None]})).notes == ()


def test_labels_that_are_no_classes_are_a_warning(tmp_path):
    (tmp_path / "t.csv").write_text("age,y\n1,benign\n2,malignant\n")
    model = model_of(tmp_path / "t.csv", tmp_path)
    with pytest.warns(UserWarning, match="holds labels such as 0, 1, and not only benign, mal"):
        found = model.predict(pd.DataFrame({"age": [1, 2], "y": [0, 1]}))
    assert found.truth is None


@pytest.mark.parametrize(("positive", "expected"), [(None, "b"), (0, "a")])
def test_a_threshold_is_of_the_positive_class(tmp_path, positive, expected):
    (tmp_path / "t.csv").write_text("age,y\n1,a\n20,b\n300,a\n")
    model = model_of(tmp_path / "t.csv", tmp_path)
    found = model.predict(tmp_path / "t.csv", threshold=0.0, positive=positive)
    assert set(found.labels) == {expected}
    never = model.predict(tmp_path / "t.csv", threshold=1.0, positive=positive)
    assert set(never.labels) == {"a", "b"} - {expected}


def test_a_threshold_of_three_classes_needs_a_positive_one(tmp_path):
    (tmp_path / "t.csv").write_text("age,y\n1,a\n20,b\n300,c\n")
    model = model_of(tmp_path / "t.csv", tmp_path)
    with pytest.raises(ConfigError, match="this one has 3 classes: leave it out"):
        model.predict(tmp_path / "t.csv", threshold=0.5)
    never = model.predict(tmp_path / "t.csv", threshold=1.0, positive=0)
    most = model.predict(tmp_path / "t.csv").probabilities[:, 1:].argmax(1)
    assert never.labels == ["bc"[place] for place in most]


def test_two_columns_of_one_name_are_one_sentence(tmp_path):
    (tmp_path / "t.csv").write_text("age,y\n1,0\n2,1\n")
    model = model_of(tmp_path / "t.csv", tmp_path)
    frame = pd.DataFrame([[1, 2]], columns=["age", "age"])
    refuses("the DataFrame has 2 columns age", model.predict, frame, error=ValueError)


def test_predictions_keep_the_ids(tmp_path):
    (tmp_path / "t.csv").write_text("label,age,y\np1,1,0\np7,2,1\n")
    model = model_of(tmp_path / "t.csv", tmp_path, id_column="label")
    table = model.predict(tmp_path / "t.csv").table()
    assert list(table)[:3] == ["label_", "record", "label"]
    assert table["label_"].tolist() == ["p1", "p7"]
    assert "label_" not in model.predict(pd.DataFrame({"age": [1]})).table()
