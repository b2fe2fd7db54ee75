"""Exported models are the same models, and read data as they were trained to.

From a file, and from the same table as a DataFrame.
"""

import json
from dataclasses import replace
from decimal import Decimal

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from fednas_flwr import load
from fednas_flwr.data.records import Column, Inputs
from fednas_flwr.models.export import export_onnx, export_safetensors
from fednas_flwr.models.networks import describe_derived, make_network, make_space
from fednas_flwr.models.prediction import METADATA_KEY, Model

from ..data_sets import prepared
from ..made_networks import Made
from ..refusals import refuses

SHAPE = (3, 10, 12)


def derived(name, norm, *, auxiliary=False, **sizes):
    """Return the description of a random derived network."""
    shapes = {"input_shape": list(SHAPE), "num_classes": 5}
    space = make_space(name, **shapes | {"input_shape": SHAPE}, norm=norm, **sizes)
    genotype = space.random_genotype(torch.Generator().manual_seed(3))
    return describe_derived(genotype, shapes, sizes=sizes, norm=norm, auxiliary=auxiliary)


DESCRIPTIONS = {
    "darts": derived("darts", "batch", auxiliary=True, channels=4, num_cells=5),
    "darts_group": derived("darts", "group", channels=4, num_cells=3),
    "nasbench201": derived("nasbench201", "batch", channels=4, num_cells=1),
    "mbconv": derived("mbconv", "batch", skeleton="small", candidates="proxyless", width=1.0),
    "plain_cnn": {"name": "plain_cnn", "input_shape": list(SHAPE), "num_classes": 5},
}


def trained(description):
    """Return the network with weights and batch statistics that are not the initial ones."""
    torch.manual_seed(0)
    network = make_network(description)
    network.train()
    for _ in range(3):
        network(torch.randn(8, *SHAPE))
    return network


IMAGES = Inputs(SHAPE, (), (0.3, 0.5, 0.6), (0.2, 0.25, 0.3), ("ant", "bee", "cat", "dog", "elk"))
COLUMNS = (
    *(Column("age", indicator=True), Column("site", "category", ("A", "B", "C"))),
    *(Column("seen", "date"), Column("sex", "category", ("f",))),
)
MEAN, STD = (50.0, 19_000.0, 0.0, 0.0, 0.0, 0.0, 0.0), (10.0, 300.0, 1.0, 1.0, 1.0, 1.0, 1.0)
TABLE = Inputs((7,), COLUMNS, MEAN, STD, ("ill", "well"), label="outcome")


def images(count):
    return torch.randint(0, 256, (count, *SHAPE), dtype=torch.uint8)


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_safetensors_gives_the_same_model_back(name, tmp_path):
    description = DESCRIPTIONS[name]
    model = Model(trained(description), IMAGES, description)
    path = export_safetensors(model, tmp_path)
    loaded = load(tmp_path)
    assert not loaded.training
    assert loaded.inputs == IMAGES
    x = images(6)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
        mean, std = (torch.tensor(part)[:, None, None] for part in (IMAGES.mean, IMAGES.std))
        expected = torch.softmax(model.network((x / 255 - mean) / std), 1)
        torch.testing.assert_close(loaded(x), expected, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(loaded(x / 255), expected, rtol=1e-3, atol=1e-5)
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()[METADATA_KEY])
    assert about["network"] == description
    assert about["inputs"]["class_names"][0] == "ant"
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_loading_before_the_export_says_so(tmp_path):
    refuses("has not reached its export", load, tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    refuses(r"does not describe its model \('fednas_model'\): it is of", load, tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    refuses(r"model.safetensors does not .* \(.*header.*\): .* or not whole; copy", load, file)


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_onnx_equals_torch_for_any_batch_size(name, tmp_path):
    model = Model(trained(DESCRIPTIONS[name]), IMAGES)
    path, difference = export_onnx(model, tmp_path)
    assert difference < 1e-4
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(onnx.load(path))
    session = onnxruntime.InferenceSession(path)
    assert [(i.name, i.type) for i in session.get_inputs()] == [("images", "tensor(uint8)")]
    for batch in (1, 3, 9):
        x = images(batch)
        labels, probabilities = session.run(["label", "probabilities"], {"images": x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(probabilities, model(x).numpy(), rtol=1e-3, atol=1e-4)
        assert labels.tolist() == [IMAGES.class_names[i] for i in probabilities.argmax(1)]


@pytest.mark.parametrize("fast", [True, False])
def test_attention_that_is_fused_is_exported_and_goes_on_as_it_was(fast, tmp_path, monkeypatch):
    """As in the frozen transformers of torchvision."""
    monkeypatch.setattr("torch.backends.mha._is_fastpath_enabled", fast)
    layer = nn.TransformerEncoderLayer(120, 2, 16, batch_first=True)
    network = nn.Sequential(nn.Flatten(2), layer, nn.Flatten(), nn.Linear(360, 5))
    _, difference = export_onnx(Model(network.requires_grad_(False), IMAGES), tmp_path)
    assert difference < 1e-4
    assert torch.backends.mha.get_fastpath_enabled() == fast


def test_onnx_of_a_table_has_an_input_for_every_column(tmp_path):
    model = Model(nn.Linear(7, 2), TABLE)
    path, _ = export_onnx(model, tmp_path)
    session = onnxruntime.InferenceSession(path)
    columns = [(i.name, i.type, i.shape) for i in session.get_inputs()]
    number, text = ("tensor(float)", ["batch", 1]), ("tensor(string)", ["batch", 1])
    assert columns == [("age", *number), ("site", *text), ("seen", *number), ("sex", *text)]
    table = pd.DataFrame({"age": [40, None, 61.5], "site": ["C", "never seen", None]})
    table["seen"], table["sex"] = ["2024-05-31", "1.2.2020", None], ["f", "m", ""]
    found = model.predict(table)
    rows = [  # age, seen, age is missing, site=A, B, C, sex=f
        [-1.0, (19_874 - 19_000) / 300, 0, 0, 0, 1, 1],
        [0.0, (18_293 - 19_000) / 300, 1, 0, 0, 0, 0],
        [1.15, 0.0, 0, 0, 0, 0, 0],
    ]
    with torch.no_grad():
        expected = torch.softmax(model.network(torch.tensor(rows)), 1).numpy()
    np.testing.assert_allclose(found.probabilities, expected, rtol=1e-4)
    numbers = {"age": [40, np.nan, 61.5], "seen": [19_874, 18_293, np.nan]}
    texts = {"site": ["C", "never seen", ""], "sex": ["f", "m", ""]}
    fed = {name: np.array(values, np.float32)[:, None] for name, values in numbers.items()}
    fed |= {name: np.array(values, object)[:, None] for name, values in texts.items()}
    answers = session.run(["label", "probabilities"], fed)
    np.testing.assert_allclose(answers[1], expected, rtol=1e-4)
    assert answers[0].tolist() == found.labels


SPELLED = {"smokes": "true,FALSE,x,True", "stage": "1.0,2,1,3", "sex": "M,m,,f"}
READINGS = {
    "scale, missing, map": (
        {"scale": {"age": 0.5}, "missing_in": {"age": ["-9"]}}
        | {"map": {"age": {"7": "41"}, "sex": {"M": "m", "blank": "m"}}},
        SPELLED,
    ),
    "categories that are spellings": (
        {"map": {"stage": {"1": "2", "2": "1"}, "smokes": {"TRUE": "FALSE"}}},
        SPELLED,
    ),
    "missing and blank": (
        {"missing_values": ["?", "7"], "map": {"sex": {"blank": "m"}, "age": {"7": "41"}}},
        SPELLED | {"sex": "?,NA,f,m"},
    ),
    "blanks around": ({"map": {"sex": {"male": "m"}}}, SPELLED | {"sex": " m,m , male ,f"}),
    "a category that is none": ({"map": {"sex": {"m": ""}, "age": {"blank": "30"}}}, SPELLED),
    "notation": ({"decimal": "comma", "missing_values": ["40,5"]}, SPELLED),
}


@pytest.mark.filterwarnings("ignore:column sex")  # that no cell is a known category
@pytest.mark.parametrize(("how", "cells"), READINGS.values(), ids=READINGS)
def test_onnx_reads_cells_as_training_has(how, cells, tmp_path):
    words = {"smokes": ("FALSE", "TRUE"), "stage": ("1", "2"), "sex": ("m",)}
    columns = [Column("age", indicator=True), *(Column(n, "category", v) for n, v in words.items())]
    scaled = {"mean": (20.0, *[0.0] * 6), "std": (10.0, *[1.0] * 6)}
    form = replace(TABLE.form, **how)
    model = Model(nn.Linear(7, 2), replace(TABLE, **scaled, schema=tuple(columns), form=form))
    path, _ = export_onnx(model, tmp_path)
    ages = np.array([40.5, -9, np.nan, 7], np.float32)
    spelled = [f"{age:g}".replace("nan", "") for age in ages]
    if form.decimal == "comma":
        spelled = [age.replace(".", ",") for age in spelled]
    table = pd.DataFrame({name: texts.split(",") for name, texts in cells.items()})
    expected = model.predict(table.assign(age=spelled)).probabilities
    fed = {name: table[[name]].to_numpy(object) for name in cells} | {"age": ages[:, None]}
    _, probabilities = onnxruntime.InferenceSession(path).run(None, fed)
    np.testing.assert_allclose(probabilities, expected, rtol=1e-5)


def test_onnx_that_differs_is_refused_and_leaves_no_file(tmp_path):
    def treacherous(self, x):
        """Answer differently while it is exported."""
        return self.dense(x) * (1.5 if torch.onnx.is_in_onnx_export() else 1.0)

    torch.manual_seed(0)
    (tmp_path / "model.onnx").write_text("of an earlier run")
    with pytest.raises(RuntimeError, match=r"differs from torch by 0\.0"):
        export_onnx(Model(Made(treacherous, dense=nn.Linear(7, 2)), TABLE), tmp_path)
    left = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert left == {"model.onnx": "of an earlier run"}


def test_data_that_a_model_does_not_take(tmp_path):
    pictures = Model(trained(DESCRIPTIONS["plain_cnn"]), IMAGES)
    patients = Model(nn.Linear(7, 2), TABLE)
    (tmp_path / "t.csv").write_text("age,site\n1,A\n")
    (tmp_path / "b.csv").write_text("age,site,seen,sex\nold,A,2020-01-01,f\n")
    (tmp_path / "empty").mkdir()
    for model, data, message in [
        (pictures, np.full((1, *SHAPE), 16.5), "from 16.5 to 16.5: expected uint8 images"),
        (pictures, np.zeros((1, 3, 8, 8), np.uint8), r"\[N, 3, 10, 12\]"),
        (pictures, np.full((1, *SHAPE), 256), "int64 of shape"),
        (pictures, tmp_path / "none.png", "none.png does not exist"),
        (pictures, tmp_path / "empty", "holds no images"),
        (patients, tmp_path / "t.csv", "has no column seen: it has age, site"),
        (patients, tmp_path / "b.csv", "column age .* numeric but holds old in row 1"),
        (patients, np.zeros((2, 7)), r"cells \[N, 4\], whose columns are age, site, "),
        (patients, tmp_path / "empty", "holds nothing of this kind"),
    ]:
        refuses(message, model.predict, data)


@pytest.mark.parametrize("name", ["label", "probabilities", "features", "encoded_1", "<column 1>"])
def test_onnx_gives_every_name_once(name, tmp_path):
    schema = (Column(name), Column("site", "category", ("A", "B")))
    inputs = Inputs((3,), schema, (1.0, 0, 0), (2.0, 1, 1), ("no", "yes"))
    path, _ = export_onnx(Model(nn.Linear(3, 2), inputs), tmp_path)
    session = onnxruntime.InferenceSession(path)
    assert [taken.name for taken in session.get_inputs()] == [name, "site"]
    outputs = [given.name for given in session.get_outputs()]
    assert outputs == [n + "_" * (n == name) for n in ("label", "probabilities")]


@pytest.mark.parametrize(("classes", "positive"), [(2, None), (2, 0), (3, 1)])
def test_onnx_decides_by_the_threshold(classes, positive, tmp_path):
    names = ("a", "b", "c")[:classes]
    inputs = Inputs((2,), (Column("x"), Column("y")), (0.0, 0.0), (1.0, 1.0), names)
    network, table = nn.Linear(2, classes), np.random.default_rng(0).normal(size=(200, 2))
    found = {}
    for one in (inputs, replace(inputs, positive=positive, threshold=0.2)):
        model = Model(network, one)
        session = onnxruntime.InferenceSession(export_onnx(model, tmp_path)[0])
        fed = {"x": table[:, :1].astype(np.float32), "y": table[:, 1:].astype(np.float32)}
        labels, shares = session.run(None, fed)
        assert model.predict(table).labels == labels.tolist()
        found[one.threshold] = labels
    place = 1 if positive is None else positive
    reached = shares[:, place] >= 0.2
    assert ((found[0.2] == names[place]) == reached).all()
    rest = np.where(np.arange(classes) == place, -1, shares).argmax(1)
    assert (found[0.2][~reached] == np.array(names)[rest[~reached]]).all()
    assert (found[0.2] != found[None]).any()


# --- the same reading, of a file and of a DataFrame


N = 60
RNG = np.random.default_rng(1)
READ = {
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


@pytest.mark.parametrize("kind", READ)
def test_a_column_is_read_alike(model_of, kind):
    frame = pd.DataFrame({"x": READ[kind], "age": range(N), "y": [0, 1] * (N // 2)})
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
    refuses("threshold=1.5 is out of range: expected 0 to 1", model.predict, path, threshold=1.5)
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
