"""What looks wrong is said; clean data are left alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fednas_flwr.data.oddities import oddities, off_declared, off_scale
from fednas_flwr.data.records import CATEGORY, Column

from ..data_sets import records_of

N = 200
RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 2, N)


def table(columns, labels=LABELS):
    schema, features = [], []
    for name, cells in sorted(columns.items(), key=lambda item: item[1].dtype.kind == "U"):
        if cells.dtype.kind == "U":
            values = tuple(sorted(set(cells.tolist())))
            schema.append(Column(name, CATEGORY, values))
            features += [cells == value for value in values]
        else:
            schema.append(Column(name))
            features.append(cells)
    rows = np.stack(features, axis=1).astype(np.float32)
    texts = {name: cells.astype(str) for name, cells in columns.items()}
    return records_of(rows, labels, schema=tuple(schema), label="y", columns=texts)


def images(pixels, labels=LABELS, classes=2):
    return records_of(pixels, labels, class_names=tuple(map(str, range(classes))))


CLEAN = {
    "age": RNG.normal(50, 10, N).round(1),
    "income": RNG.integers(1, 40, N) * 100,
    "lab": RNG.normal(size=N),
    "ward": np.array(["a", "b", "c"])[RNG.integers(0, 3, N)],
    "risk": LABELS + RNG.normal(size=N) / 2,
    "flow number": np.arange(N) // 3,
}


def test_clean_tables_get_no_note():
    assert oddities(table(CLEAN)) == []


ODD = {
    "counts rows": ({"n": np.arange(N)}, "n has another whole number in every row"),
    "case_id": ({"case_id": RNG.permutation(10 * N)[:N]}, "case_id has another whole"),
    "huge": ({"x": 9007199254740000 + 7.0 * np.arange(N)}, "x has another whole number"),
    "texts": ({"who": np.array([f"p{i}" for i in range(N)])}, "who has a value of its own"),
    "leak": ({"diagnosis": np.array(["well", "ill"])[LABELS]}, "diagnosis alone tells the label"),
    "parts": ({"set": np.array(["train", "Test"])[RNG.integers(0, 2, N)]}, "set may say which"),
    "a flag of parts": ({"is_test": RNG.integers(0, 2, N)}, "is_test may say which records are"),
}


@pytest.mark.parametrize(("columns", "note"), ODD.values(), ids=ODD)
def test_odd_columns_are_named(columns, note):
    found = oddities(table({**CLEAN, **columns}))
    assert len(found) == 1
    assert note in found[0]
    assert "dataset.ignore" in found[0]


def test_a_long_table_that_is_sorted_by_class_is_looked_at_evenly():
    labels = np.repeat([0, 1], 15_000)
    (note,) = oddities(table({"score": labels + 0.5}, labels))
    assert note.startswith("score alone tells the label")


def test_odd_labels_are_told():
    (note,) = oddities(table(CLEAN, LABELS + 1))
    assert note.startswith("no record to train on has the label 0: do labels begin at 1?")
    (note,) = oddities(table(CLEAN, np.arange(N) % 40))
    assert "40 classes that are numbers" in note
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(LABELS)).numpy()
    pixels = RNG.integers(0, 256, (N, 1, 4, 4)).astype(np.uint8)
    one_hot[0] = 1
    assert oddities(images(pixels, one_hot)) == []


def test_odd_images_are_told():
    pixels = RNG.integers(0, 256, (N, 1, 4, 4)).astype(np.uint8)
    assert oddities(images(pixels)) == []
    for shift in (0, 100):  # dark, and of one shade, as 16 bits of a camera that use few of them
        (note,) = oddities(images(pixels // 16 + np.uint8(shift)))
        assert note.startswith(f"the pixels are from {shift} to {shift + 15} of 255")


RARE = np.zeros(N)
RARE[::70] = 1  # three of 200 in training
AROUND = np.where(np.arange(N) % 5 < 3, 0, RNG.normal(0, 10, N))  # three fifths are 0


@pytest.mark.parametrize(
    ("known", "given", "far"),
    [
        (RARE, np.where(np.arange(N) % 40 < 2, 2, 0), 0),  # as counts that are seldom not 0
        (RARE, np.where(np.arange(N) % 40 < 2, -999, 0), 10),
        (AROUND, np.where(np.arange(N) % 20 == 4, 500, AROUND), 10),
        (RARE, np.where(np.arange(N) % 2, 1, 0), 0),
        (AROUND, AROUND, 0),
    ],
)
def test_numbers_are_far_by_what_is_usual_of_those_that_are_not_the_same(known, given, far):
    rows = torch.tensor(given[:, None])
    found = next(off_scale(rows, [Column("x")], [known.mean()], [known.std()]), "")
    assert (f"x (in {far} records, as " in found) == bool(far) == bool(found)


@pytest.mark.parametrize(("outside", "told"), [(0, 0), (20, 0), (21, 1), (200, 1)])
def test_a_test_set_is_held_against_what_is_declared(outside, told):
    days = torch.where(torch.arange(N) < outside, 60.0, 30.0)
    test = replace(table({"age": CLEAN["age"]}), labels=days, class_names=())
    target = (25.0, 14.4, 0.0, 50.0)
    found = list(off_declared(test, (50.0,), (10.0,), target))
    where = f"is outside dataset.target_range=[0, 50] in {outside} of its 200 records"
    assert found == [f"the number to predict {where}"] * told
    (words,) = off_declared(test, (5.0,), (1.0,), ())
    assert "as in another unit or scale: age (" in words
    assert not list(off_declared(test, (), (), ()))
