"""At a private site a record that cannot be read is left out by itself: no other record changes."""

import csv
import io
from dataclasses import replace
from datetime import date, datetime

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from fednas_flwr.data.datasets import prepare
from fednas_flwr.data.decoding import decode_images
from fednas_flwr.data.readers import site_dataset
from fednas_flwr.data.table_files import read_texts
from fednas_flwr.settings.data_settings import ANY_FORM, EncodedImages

from ..refusals import refuses
from ..rows import seldom

HEADER = ["patient", "age", "seen", "ward", "note", "outcome"]
ROWS = [
    ["001", "50", "2024-05-31", "north", "a", "left"],
    ["9007199254740993", "60.5", "1.2.2023", "", "", "died"],
    ["1.0", "", "", "south", "NA", "left"],
    ["p4", "-1e3", "2024-05-31 12:30", "2", "1,5", "2"],
    ["p4", "7", "1999-01-01", "south", 'x "y" z', "died"],
]
TABLE = {"name": "csv", "label": "outcome", "id_column": "patient", "numeric": ["age"]}
TABLE |= {"class_names": ["died", "left", "2"], "dates": ["seen"], "categorical": ["ward"]}
TABLE |= {"categories": {"ward": ["north", "south", "2"]}}
TABLE |= {"statistics": {"age": [50, 20], "seen": [19300, 200]}}
AGES = {"name": "csv", "id_column": None, "numeric": ["age"], "statistics": {"age": [0, 1]}}
# what stands in no cell of its kind
NO_NUMBER = ["old", "1e39", "-1e39", "1e400", "inf", "-Infinity"]
NO_NUMBER += ["1_000", "0x10", "١", "5 0", "1\0"]
NO_DATE = ["old", "2024-13-01", "2024-02-30", "0000-01-01", "12345-01-01", "5", "31.31.2024"]
NO_NAME = ["east", "North", " north", "2.0", "02", "north\0", "north\nsouth", '"', "x" * 300_000]
WRONG = {
    "patient": ["", "NA", "nan ", "\u2028", "\x1f"],
    "age": [*NO_NUMBER, "9" * 200_000, "2024-05-31", "a\nb"],
    "seen": [*NO_DATE, "99999999-12-31", "2024-05-31T25:00"],
    "ward": [name for name in NO_NAME if name != " north"],
    "outcome": ["", "nan", *NO_NAME],
}
# what is unusual and yet readable, in every column
READABLE = {
    "patient": ["1", "1.0", "a\0b", "x" * 300_000, "=1+1"],
    "age": ["", "NA", "1e38", "-0", " 5 ", "5.0000000000000000000001"],
    "seen": ["", "9999-12-31", "0001-01-01", "2024-05-31T12:30:10.123456789"],
    "ward": ["", "None", " north"],
    "note": ["", "x" * 300_000, "a\nb", "\0", "1e39", '"', ",", "1e999", "é\u2028"],
}


def dataset_of(folder, described, *, cache="cache"):
    """What a private site's file says of its data."""
    path = folder / "dataset.yaml"
    path.write_text(yaml.safe_dump(described))
    return site_dataset(path, cache=str(folder / cache))


def read(path, described):
    """A private site's records, read anew."""
    dataset = dataset_of(path.parent, described, cache=f"cache-{path.name}")
    return prepare(replace(dataset.at(str(path)), server_test=False))


def assert_untouched(found, alone, *, left_out, place):
    """The records but the one at ``place`` are bit for bit those of a file that lacks it."""
    assert len(found.train) == len(alone.train) + (not left_out)
    others = np.arange(len(found.train))
    others = others if left_out else np.delete(others, place)
    a, b = found.train, alone.train
    for mine, other in ((a.ids, b.ids), (a.labels.numpy(), b.labels.numpy())):
        assert mine[others].tolist() == other.tolist()
    assert a.features[others].numpy().tobytes() == b.features.numpy().tobytes()
    assert (a.features.shape[1:], found.inputs) == (b.features.shape[1:], alone.inputs)
    told = [note for note in a.notes if "left out" in note and "does not name" not in note]
    assert len(told) == left_out
    if left_out:
        assert f"1 of {len(b) + 1} records" in told[0] or "1 broken images" in told[0]


def write_csv(path, rows, header=HEADER):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def assert_left_out(folder, own, name, good, wrong):
    """In a column beside ages each of the wrong cells, and nothing else, is left out."""

    def with_cells(cells):
        path = folder / f"{len(list(folder.iterdir()))}.csv"
        return read(write_csv(path, [*enumerate(cells)], ["age", name]), own)

    alone = with_cells(good)
    for cell in wrong:
        assert_untouched(with_cells([*good, cell]), alone, left_out=True, place=len(good))
    return alone


def assert_others_untouched(write, rows, new, cells, own, *, place=2):
    """Whatever cell a further row has, the other records are those of a file without it."""
    alone = read(write("alone", rows), own)
    for number, (column, cell, left_out) in enumerate(cells):
        row = [cell if name == column else usual for name, usual in zip(HEADER, new, strict=True)]
        found = read(write(f"{number}", [*rows[:place], row, *rows[place:]]), own)
        assert_untouched(found, alone, left_out=left_out, place=place)
    return alone


CELLS = [(c, cell, True) for c, cells in WRONG.items() for cell in cells]
CELLS += [(c, cell, False) for c, cells in READABLE.items() for cell in cells]


@pytest.mark.parametrize(("id_column", "place"), [("patient", 0), seldom(None, 3)])
def test_a_cell_of_a_csv_changes_no_other_record(tmp_path, id_column, place):
    own = TABLE | {"id_column": id_column}
    own |= {"ignore": ["patient"]} if id_column is None else {}

    def write(name, rows):
        return write_csv(tmp_path / f"{name}.csv", rows)

    new = ["p9", "33", "2020-02-02", "north", "n", "left"]
    cells = [cell for cell in CELLS if id_column or cell[0] != "patient"]
    alone = assert_others_untouched(write, ROWS, new, cells, own, place=place)
    assert len(alone.train) == len(ROWS)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
CELL = TEXT | st.floats().map(str) | st.dates().map(str) | st.integers().map(str)


@given(cells=st.lists(CELL, min_size=6, max_size=6), place=st.integers(0, len(ROWS)))
def test_any_row_of_texts_changes_no_other_record(tmp_path_factory, cells, place):
    folder = tmp_path_factory.mktemp("any")
    alone = read(write_csv(folder / "alone.csv", ROWS), TABLE)
    found = read(write_csv(folder / "with.csv", [*ROWS[:place], cells, *ROWS[place:]]), TABLE)
    assert_untouched(found, alone, left_out=len(found.train) == len(ROWS), place=place)


def test_a_table_is_read_alike_with_and_without_leaving_out(tmp_path):
    texts = [HEADER, *ROWS, ["", "NA", "null", "n/a", "<NA>", "#N/A N/A"], [" ", "-nan", *"    "]]
    buffer = io.StringIO()
    csv.writer(buffer).writerows(texts)
    for number, end in enumerate(("\n", "\r\n", "\r", "\n\n", "\n  \n")):
        path = tmp_path / f"{number}.csv"
        path.write_bytes(buffer.getvalue().replace("\r\n", end).encode())
        form = replace(ANY_FORM, encoding="utf-8", decimal="point")
        if end == "\r":  # pandas finds no header in it
            form = replace(form, separator=",")
        plain = read_texts(path, form)[0]
        read_strictly = read_texts(path, replace(form, corrupt="skip"))[0]
        cells, strictly = ({n: c.tolist() for n, c in t.items()} for t in (plain, read_strictly))
        assert cells == strictly


NOT_OF_ONE_RECORD = [
    (",".join(HEADER) + '\np1,50,2024-05-31,"north,x,left\np2,60,,,x,died\n', "quote in row 1"),
    (",".join(HEADER) + '\np1,50,2024-05-31,"no"rth,x,left\n', "quote in row 1 is open"),
    (",".join(HEADER) + "\np1,50,2024-05-31,north,x,left,\n", "row 1 has 7 cells"),
    (",".join(HEADER) + "\np1,50,,north,x,left\np2,60\n", "row 2 has 2 cells, .* header 6"),
    (",".join(HEADER) + "\np1,50,,north,caf\xe9,left\n", "'utf-8' codec"),
    (",".join(HEADER[:-1]) + "\np1,50,2024-05-31,north,x\n", "no column outcome"),
]


@pytest.mark.parametrize(("text", "message"), NOT_OF_ONE_RECORD)
def test_what_is_not_of_one_record_is_refused(tmp_path, text, message):
    path = tmp_path / "table.csv"
    path.write_bytes(text.encode("latin-1"))
    refuses(message, read, path, TABLE)


def test_a_list_of_labels_is_left_out_by_itself(tmp_path):
    own = AGES | {"label": "found", "label_separator": ";", "class_names": [*"abc"]}
    assert_left_out(tmp_path, own, "found", ["a;b", "", "c", "a"], ["a;d", "d"])


def test_a_number_to_predict_is_left_out_by_itself(tmp_path):
    own = AGES | {"label": "days", "target_range": [0, 60]}
    good = ["1", "2.5", "-3", "1e38", "60.0000001"]  # also far beyond the range
    wrong = [*NO_NUMBER, "", "NA", "nan", "9" * 200_000, "2024-05-31"]
    alone = assert_left_out(tmp_path, own, "days", good, wrong)
    assert alone.train.is_regression
    assert alone.target == pytest.approx((30, 60 / 12**0.5, 0, 60))


def test_no_record_tells_a_private_site_that_numbers_are_predicted(tmp_path):
    own = AGES | {"label": "days"}
    path = tmp_path / "table.csv"
    path.write_text("age,days\n" + "".join(f"{i},{i * 1.1:.1f}\n" for i in range(60)))
    assert not read(path, own).train.is_regression
    dataset = replace(dataset_of(tmp_path, own).at(str(path)), corrupt="refuse", server_test=False)
    refuses("declare dataset.target_range", prepare, dataset)


def test_a_column_per_label_is_left_out_by_itself(tmp_path):
    own = AGES | {"labels": ["a", "b"]}
    path = tmp_path / "alone.csv"
    path.write_text("age,a,b\n1,0,1\n2,yes,no\n")
    alone = read(path, own)
    for number, row in enumerate(["3,2,0", "3,,0", "3,0,maybe", "3,1,0.5", "x,1,0"]):
        path = tmp_path / f"{number}.csv"
        path.write_text(f"age,a,b\n1,0,1\n{row}\n2,yes,no\n")
        assert_untouched(read(path, own), alone, left_out=True, place=1)


EXCEL = [
    ["001", 50, datetime(2024, 5, 31), "north", "a", "left"],
    [12, 60.5, "1.2.2023", None, None, "died"],
    [3.5, None, None, "south", "NA", "left"],
    ["p4", -1000, datetime(2024, 5, 31, 12, 30), 2, True, 2],
]
EXCEL_CELLS = [
    *(("patient", cell, True) for cell in (None, "NA", "")),
    *(("age", cell, True) for cell in ("old", True, 1e39, datetime(2024, 5, 31), "1_0")),
    *(("seen", cell, True) for cell in (5, 5.5, "soon", False)),
    *(("ward", cell, True) for cell in ("east", 3, 2.5, True, datetime(2024, 5, 31), "x" * 9000)),
    *(("outcome", cell, True) for cell in (None, "east", 3, False)),
    *(("patient", cell, False) for cell in (7, 2.5, "x", datetime(2024, 5, 31), True, 2**53)),
    *(("age", cell, False) for cell in (None, "5", 2**60, "NA", 1e-300)),
    *(("seen", c, False) for c in (None, datetime(9999, 12, 31), "0001-01-01", date(1999, 1, 1))),
    *(("ward", cell, False) for cell in (None, 2, "2", 2.0)),
    *(("note", cell, False) for cell in (None, 1, 2.5, "t", datetime(2024, 5, 31), True)),
]


@pytest.mark.run
def test_a_cell_of_excel_changes_no_other_record(tmp_path):
    """Above all no id: pandas would make floats of whole numbers, and texts of dates."""

    def write(name, rows):
        path = tmp_path / f"{name}.xlsx"
        pd.DataFrame(rows, columns=HEADER, dtype=object).to_excel(path, index=False)
        return path

    new = ["p9", 33, datetime(2020, 2, 2), "north", "n", "left"]
    assert_others_untouched(write, EXCEL, new, EXCEL_CELLS, TABLE)


KINDS = [pa.int64(), pa.float64(), pa.date32(), pa.int64(), pa.timestamp("us"), pa.bool_()]
PARQUET = pa.schema(zip(HEADER, KINDS, strict=True))
PARQUET_ROWS = [[2**53 + i, 1.5 * i, 19000 + i, i % 2, 10**15 + i, i % 2 == 0] for i in range(1, 6)]
PARQUET_CELLS = [
    ("patient", None, True),
    *(("age", cell, True) for cell in (np.inf, -np.inf, 1e39)),
    *(("seen", cell, True) for cell in (2**31 - 1, -(2**31))),
    *(("ward", 2, True), ("ward", 2**62 + 1, True), ("outcome", None, True)),
    *(("patient", -(2**63), False), ("ward", None, False)),
    *(("age", cell, False) for cell in (None, np.nan, 1e-300)),
    *(("seen", cell, False) for cell in (None, 2932896, -719162)),  # years 9999 and 1
    *(("note", cell, False) for cell in (None, 2**63 - 1, -(2**62))),
]


def test_a_cell_of_parquet_changes_no_other_record(tmp_path):
    """Above all no id beyond 2^53, which becomes a float beside a missing one; all years."""
    own = TABLE | {"class_names": ["False", "True"], "categories": {"ward": ["0", "1"]}}

    def write(name, rows):
        columns = [
            pa.array(cells, pa.int32() if kind == pa.date32() else kind).cast(kind)
            for kind, cells in zip(KINDS, zip(*rows, strict=True), strict=True)
        ]
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pa.Table.from_arrays(columns, schema=PARQUET), path)
        return path

    new = [77, 2.5, 18000, 1, 10**15, True]
    alone = assert_others_untouched(write, PARQUET_ROWS, new, PARQUET_CELLS, own)
    assert len(np.unique(alone.train.ids)) == 5


def png(value, *, mode="L", size=(8, 8)):
    buffer = io.BytesIO()
    Image.new(mode, size, value).save(buffer, format="PNG")
    return buffer.getvalue()


BROKEN = [b"", b"nothing", png(1)[:40], png(1)[:-30]]
BROKEN += [png(1)[:30] + b"\xff" * 40, b"II*\0" + b"\xff" * 60]
ODD = [png(9, size=(8, 9)), png(9, mode="RGB"), png(9, mode="I;16"), png(9, mode="RGBA")]
IMAGES = {"class_names": ["a", "b"], "image_size": 8, "channels": 1}


def test_an_array_entry_changes_no_other_record(tmp_path):
    rng = np.random.default_rng(0)
    rows, pixels = rng.normal(size=(6, 3)), rng.integers(0, 256, (6, 8, 8), np.uint8)
    labels, marks = np.arange(6) % 2, np.array([[0, 1], [1, 1]] * 3)
    encoded = [png(10 * i) for i in range(6)]
    images = {"name": "npz", "class_names": ["a", "b"]}
    table = images | {"statistics": {f"x{i}": [0, 1] for i in range(3)}}
    kinds = [  # features, labels, what the further record has, how it is read, whether it can be
        *((rows, labels, (row, 1), table, True) for row in ([np.inf, 0, 0], [0, -1e39, 0])),
        (rows, labels, ([np.nan, 0, 0], 1), table, False),
        *((rows, labels, ([0, 0, 0], y), table, True) for y in (-1, 2, 2**62)),
        *((pixels, labels, (pixels[0], y), images, True) for y in (-1, 2, 2**62)),
        *((pixels, marks, (pixels[0], y), images, True) for y in ([0, 2], [-1, 0])),
        *((encoded, labels, (content, 1), IMAGES | {"name": "npz"}, True) for content in BROKEN),
        *((encoded, labels, (content, 1), IMAGES | {"name": "npz"}, False) for content in ODD),
        (encoded, labels, (encoded[0], 2), IMAGES | {"name": "npz"}, True),
    ]

    def written(name, x, y):
        arrays = {"y_train": np.array(y)}
        if isinstance(x, list):
            arrays["train_bytes"] = np.frombuffer(b"".join(x), np.uint8)
            arrays["train_off"] = np.cumsum([0, *map(len, x)])
        else:
            arrays["x_train"] = x
        np.savez(tmp_path / name, **arrays)
        return tmp_path / name

    for number, (x, y, (new, label), own, left_out) in enumerate(kinds):
        alone = read(written(f"{number}-alone.npz", x, y), own)
        more = [*x[:2], new, *x[2:]] if isinstance(x, list) else np.insert(x, 2, new, axis=0)
        found = read(written(f"{number}.npz", more, np.insert(y, 2, label, axis=0)), own)
        assert_untouched(found, alone, left_out=left_out, place=2)


def test_a_file_in_a_folder_changes_no_other_record(tmp_path):
    def fill(name, *, persons):
        for i in range(6):
            path = tmp_path / name / "ab"[i % 2] / (f"p{i}" if persons else "") / f"m{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(10 * i))
        return tmp_path / name

    def put(content):
        return lambda path: path.mkdir() if content is None else path.write_bytes(content)

    good = png(77)
    added = [
        *(("a/new.png", put(content), False, True) for content in (*BROKEN, None)),
        *(("a/new.png", put(content), False, False) for content in (*ODD, good)),
        ("a/new.dcm", put(b"no DICOM"), False, True),
        ("a/new.png", lambda path: path.symlink_to("nowhere"), False, True),
        ("c/new.png", put(good), False, True),
        ("a/p1/new.png", put(b""), True, True),
        ("a/new.png", put(good), True, True),
        ("c/p1/new.png", put(good), True, True),
        ("a/p\udcff/new.png", put(good), True, False),
    ]
    alone = {}
    for persons in (False, True):
        own = IMAGES | {"name": "image_folder"} | ({"id_column": "patient"} if persons else {})
        alone[persons] = own, read(fill(f"alone-{persons}", persons=persons), own)
    for number, (place, write, persons, left_out) in enumerate(added):
        own, without = alone[persons]
        root = fill(f"{number}", persons=persons)
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        write(root / place)
        found = read(root, own)
        files = sorted(path for path in root.rglob("*.png") if path.is_file())
        at = 0 if left_out else files.index(root / place)
        assert_untouched(found, without, left_out=left_out, place=at)


@pytest.mark.parametrize("suffix", [".csv", ".xlsx"])
def test_a_row_of_a_labels_file_changes_no_other_record(tmp_path, suffix):
    own = IMAGES | {"name": "labelled_images", "labels_file": f"labels{suffix}", "label": "found"}
    own |= {"id_column": "patient"}
    header = ["image", "patient", "found"]
    rows = [[f"m{i}.png", f"{i}", "ab"[i % 2]] for i in range(5)]

    def fill(name, rows, new):
        root = tmp_path / name
        root.mkdir()
        for i in range(5):
            (root / f"m{i}.png").write_bytes(png(10 * i))
        (root / "new.png").write_bytes(new)
        table = pd.DataFrame(rows, columns=header, dtype=object)
        path = root / f"labels{suffix}"
        table.to_csv(path, index=False) if suffix == ".csv" else table.to_excel(path, index=False)
        return root

    good = png(77)
    added = [
        *((["none.png", "9", "a"], good, True), ([None, "9", "a"], good, True)),
        *((["new.png", None, "a"], good, True), (["new.png", "9", "c"], good, True)),
        *((["new.png", "9", None], good, True), (["new.png", "9", "a" * 9000], good, True)),
        *((["../new.png", "9", "a"], good, True), (["new.png", "9", "a"], b"", True)),
        *((["new.png", "9", "a"], good, False), (["m1.png", "9", "a"], good, False)),
    ]
    for number, (row, content, left_out) in enumerate(added):
        alone = read(fill(f"{number}-alone", rows, content), own)
        found = read(fill(f"{number}", [*rows[:2], row, *rows[2:]], content), own)
        assert_untouched(found, alone, left_out=left_out, place=2)


@pytest.mark.parametrize("other", ["y", "."])
def test_a_bare_name_that_images_share_is_refused(tmp_path, other):
    for folder in ("x", other):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "m.png").write_bytes(png(1))
    (tmp_path / "labels.csv").write_text("image,found\nm.png,a\n")
    own = IMAGES | {"name": "labelled_images", "labels_file": "labels.csv", "label": "found"}
    refuses("share their names with others: m.png", read, tmp_path, own)


def test_a_site_may_have_no_record_that_can_be_read(tmp_path):
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "x.png").write_bytes(b"")
    np.savez(tmp_path / "x.npz", x_train=np.full((1, 2), np.inf), y_train=[0])
    table = {"name": "npz", "class_names": ["a"], "statistics": {"x0": [0, 1], "x1": [0, 1]}}
    for path, own in (
        (write_csv(tmp_path / "a.csv", [["", *ROWS[0][1:]]]), TABLE),
        (write_csv(tmp_path / "b.csv", []), TABLE),
        (tmp_path / "x.npz", table),
        (tmp_path / "images", IMAGES | {"name": "image_folder"}),
    ):
        prepared = read(path, own)
        assert len(prepared.train) == 0
        assert prepared.train.features.dtype in (torch.uint8, torch.float32)
    assert prepared.input_shape == (1, 8, 8)


def test_a_private_site_cannot_refuse_for_one_record(tmp_path):
    own = TABLE | {"corrupt": "refuse"}
    refuses("corrupt=refuse in .* would end every run", dataset_of, tmp_path, own)


@pytest.mark.parametrize("content", [png(9), b"no image"], ids=["readable", "broken"])
def test_memory_is_refused_whether_or_not_an_image_can_be_read(tmp_path, content):
    settings = dataset_of(tmp_path, IMAGES | {"name": "image_folder", "image_size": 16384})
    assert isinstance(settings, EncodedImages)
    words = "1000 images of 1x16384x16384 pixels"
    refuses(words, decode_images, settings, 1000, lambda i: ("a.png", content))
