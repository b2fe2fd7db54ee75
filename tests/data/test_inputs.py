"""Inputs as public bug reports have them: what is said of each, or how it is read.

Ids beginning with F are those of the list that was collected; the others are of the same kinds.
Where a kind has a test of its own (forms of tables, notation, sites, images, arrays), it is not
repeated here.
"""

import gzip
import re
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from openpyxl import Workbook
from PIL import Image
from pyarrow import parquet

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.oddities import oddities
from fednas_flwr.data.raw import read_raw
from fednas_flwr.data.summary import reading_notes

from ..archives import zipped
from ..data_sets import prepared, save_pixels
from ..refusals import refuses
from .conftest import save_dicom

N = 80
RNG = np.random.default_rng(5)
AGE = RNG.normal(50, 10, N).round(1)
Y = (AGE + RNG.normal(0, 8, N) > 50).astype(int)
DAYS = pd.date_range("2021-01-01", periods=N, freq="9D")
PLAIN = pd.DataFrame({"age": AGE, "lab": AGE * 2, "y": Y})


def said(path, name, **given):
    """What a run says of data before it begins, or the sentence that refuses it."""
    try:
        data = prepared(name, root=path, cache=path.parent / "cache", server_test=False, **given)
        return " | ".join([*reading_notes(data), *oddities(data.train)])
    except ConfigError as error:
        return f"refused: {error}"


def content(change, *, of=PLAIN):
    """A table's file whose content is changed."""

    def write(folder):
        (folder / "t.csv").write_bytes(change(of.to_csv(index=False).encode()))
        return folder / "t.csv"

    return write


def in_json(orient):
    """The table in a form of pandas, with a mark of its encoding."""
    return content(lambda _: PLAIN.to_json(orient=orient).encode("utf-8-sig"))


def column(cells, name="x"):
    """A table with one more column."""
    return content(bytes, of=pd.DataFrame({name: cells, "age": AGE, "y": Y}))


def labels(cells):
    """A table with other labels."""
    return content(bytes, of=pd.DataFrame({"age": AGE, "y": cells}))


def lines(change):
    """A table whose lines are changed."""
    return content(lambda of: "\n".join([*change(of.decode().splitlines()), ""]).encode())


def mostly(usual, other, every):
    return [other if i % every == 0 else cell for i, cell in enumerate(np.broadcast_to(usual, N))]


def parquet_of(names, cells):
    """A Parquet file with two columns more than the label."""

    def write(folder):
        columns = [pa.array(cells), pa.array(AGE), pa.array(Y)]
        parquet.write_table(pa.Table.from_arrays(columns, [*names, "y"]), folder / "t.parquet")
        return folder / "t.parquet"

    return write


def table_of(folder, **columns):
    pd.DataFrame({**columns, "age": AGE, "y": Y}).to_parquet(folder / "t.parquet")
    return folder / "t.parquet"


def in_zip(*files):
    names = (f"folder/{number}.csv" if of else "folder/" for number, of in enumerate(files))
    return zipped(zip(names, files, strict=True))


def sheet(change):
    """An Excel file by the name of a CSV, whose first sheet is not shown."""

    def write(folder):
        book = Workbook()
        book.active.sheet_state = "hidden"
        table = book.create_sheet("data")
        for row in [("age", "lab", "y"), *zip(AGE.tolist(), AGE.tolist(), Y.tolist(), strict=True)]:
            table.append(row)
        change(table)
        book.save(folder / "t.xlsx")
        return (folder / "t.xlsx").rename(folder / "t.csv")

    return write


def hide(table):
    table.row_dimensions[9].hidden = table.column_dimensions["A"].hidden = True


def in_bytes(name, usual, other, *, encoding):
    """A table of words beside numbers, in an encoding."""
    table = pd.DataFrame({name: mostly(usual, other, 2), "age": AGE, "y": Y})
    return content(lambda of: of.decode().encode(encoding), of=table)


def in_front(table):
    table.insert_rows(1)
    table["A1"] = "Ward 3"
    table.parent.create_sheet("legend", 0).append(["age", "in years"])


IN_WORDS = "categories such as .*: write numbers, dates and times plainly"
TWO = r"label y: bad \d+, benign \d+$"
IS = "classes that are numbers: if it is a number to predict, set dataset.task=regression"
OWN_IDS = "patient_id has a value of its own in most rows: if it says whose a record is, name it "
OWN_IDS += "in dataset.id_column"
NOTHING = r"^numbers: x, age \| label y: 0 47, 1 33$"
MAYBE_MISSING = "records, which may mean missing"
TABLES = {
    "F11, F37": (labels(Y + 1), "label y: 1 "),
    "F13": (labels((AGE * 37).astype(int)), "number to predict, y: 1110 to 2749"),
    "F14": (labels([["benign", "benign "][i % 2] if v else "bad" for i, v in enumerate(Y)]), TWO),
    "F20": (column(mostly("a", "b", 3), "age=b"), "categories: age=b"),
    "F22, US dates": (column([d.strftime("%m/%d/%Y") for d in DAYS]), "dates with the month first"),
    "F31, a class": (labels(mostly("ill", "None", 3)), r"refused: .*missing_in=\{y: \[\]\}, and"),
    "no label": (labels([""] * N), r"refused: .*no label \(y\) in row 1"),
    "a number to predict that lacks": (labels(mostly(AGE, "NA", 9)), "are left out .9: 1, 10, 19"),
    "years first": (column(DAYS.strftime("%Y/%m/%d")), "dates: x"),
    "a selection of numbered rows": (column(RNG.permutation(100)[:N]), "x has another whole numb"),
    "mostly zeros": (column(np.where(np.arange(N) % 4, 0, AGE)), r"label y: [^|]*$"),
    "two columns of texts": (
        lines(lambda of: ["a,b,x,y", *(f"a{i},b{i},1,{i % 2}" for i in range(300))]),
        r"refused: column a of .*, and so have b: set dataset.ignore=\[a,b\]; where one says",
    ),
    "few patterns": (
        lines(lambda rows: [rows[0], *(f"{i % 3},1,{i % 2}" for i in range(N))]),
        "most records have the features of others with another label: each counts by itself",
    ),
    "F31, a country": (
        column(mostly("ZA", "NA", 3)),
        r"NA or None in x means that a cell is missing; dataset.missing_in=\{x: \[\]\} takes it",
    ),
    "percent": (column([f"{80 + i % 20}%" for i in range(N)]), IN_WORDS),
    "below a limit": (column(mostly(AGE.astype(str), "<0.5", 4)), IN_WORDS),
    "Arabic digits": (column([chr(0x660 + i % 4) for i in range(N)]), f"x has 4 {IN_WORDS}"),
    "a true minus": (column(mostly(1, "\u22121", 3)), f"x has 2 {IN_WORDS}"),
    "D for an exponent": (column(mostly("1.5D+02", "2.0D+01", 3)), f"x has 2 {IN_WORDS}"),
    "? among grades": (column(mostly(np.arange(N) % 3, "?", 4)), "x holds .: if it means that a"),
    "- among words": (column(mostly("a", "-", 4)), "x holds -: if it means that a cell"),
    "- beside +": (column(mostly("+", "-", 4)), r"label y: [^|]*$"),
    "letters that look alike": (column(mostly("M", "\u041c", 3)), "x holds M and .: join them by"),
    "compact dates": (column([d.strftime("%Y%m%d") for d in DAYS]), "dates written as 20241231"),
    "late dates": (column(mostly(DAYS.strftime("%Y-%m-%d"), "9999-12-31", 5)), "after 2200"),
    "no dates": (column(mostly(DAYS.strftime("%Y-%m-%d"), "1899-12-31", 9)), "1899-12-31 in 9 rec"),
    "-999": (column(mostly(AGE, -999, 9)), f"-999 in 9 {MAYBE_MISSING}.*: x"),
    "a slip": (column(np.where(np.arange(N) == 3, 49e6, AGE)), "4.9e.07 is far from all others: a"),
    "a total among groups": (column(mostly("a", "Total", N)), "x holds Total: if that row adds up"),
    "Julian dates": (column(2459000.5 + np.arange(N) / N), "2459001.5, which float32 blurs: "),
    "quarters": (labels(np.arange(N) % 5 / 4), f"has 5 {IS}"),
    "a long class": (labels(mostly("a", "b" * 201, 2)), "refused: the class=b+.* up to 200 chara"),
    "half grades": (labels(np.repeat(np.arange(6) / 2, [40, 22, 9, 5, 3, 1])), IS),
    "counts": (labels(mostly(mostly(0, 1, 3), 2, 7) + np.repeat([0, 3, 4, 5], [74, 3, 2, 1])), IS),
    "feelings": (labels(np.arange(N) % 3 - 1), "the label holds -1: if it means"),
    "digits": (labels(np.arange(N) % 10), r"label y: [^|]*$"),
    "a pointer": (content(lambda _: b"version https://git-lfs.github.com/spec/v1\n"), "lfs pull"),
    "an empty column": (column([""] * N), "one value, or none, in all records.*: x"),
    "yes and Y": (column([["yes", "Y", "no", "0"][i % 4] for i in range(N)]), "join them by"),
    "a total": (labels([*map(str, Y[:-1]), "Total"]), "one record only has the label Total"),
    "one class": (labels([1] * N), "every record has the label 1"),
    "a row of units": (lines(lambda rows: [rows[0], "years,mg/dl,0/1", *rows[1:]]), "refused: .*1"),
    "a footer": (lines(lambda rows: [*rows, "made by LIMS"]), "row 81 has 1 cells, .*: remove"),
    "coordinates": (column([f"N{i % 40 / 8:.3f}" for i in range(N)]), IN_WORDS),
    "leading zeros": (column([f"{i % 7:03}" for i in range(N)]), "007 or 1E10 in x: if they are"),
    "codes with an E": (column([f"{i % 7}E{i % 4}" for i in range(N)]), "007 or 1E10 in x"),
    "labels that are ids": (labels([f"p{i}" for i in range(N)]), "80 classes in 80 records: is it"),
    "an unknown label": (labels(mostly("a", "?", 3)), r"holds \?: if it means"),
    "no header above ids": (
        lines(lambda rows: [f"p{i},{row}" for i, row in enumerate(rows[1:])]),
        r"refused: .*first line \(p0, .*looks like a record",
    ),
    "JSON by rows": (in_json("index"), "^numbers: age, lab [|]"),
    "JSON by columns": (in_json("columns"), "^numbers: age, lab [|]"),
    "JSON of lists": (in_json("values"), "refused: .*expected records .column: cell"),
    "JSON of structures": (content(lambda _: b'[{"a": {"b": 1}, "y": 0}]'), "refused: .* unnested"),
    "old Excel": (content(lambda _: b"\xd0\xcf\x11\xe0\0"), "as a table: it is .xls, locked, HTML"),
    "a web page": (content(lambda _: PLAIN.to_html().encode()), "refused: .* .xls, locked, HTML"),
    "no mark": (content(lambda of: of.decode().encode("utf-16-le")), "set dataset.encoding=utf-16"),
    "huge": (column(AGE * 1e30), r"refused: .*x of .* is numeric but holds .*e\+31 in row 1,"),
    "too large to differ": (column(2**53 + np.arange(N) % 2), r"records \(as float32\), .*: x"),
    "a date of Excel's": (column(mostly("SEPT2", "2021-03-01T00:00:00", 5)), "x holds 2021-03-01T"),
    "durations": (sheet(lambda of: of.__setitem__("A2", timedelta(hours=36))), r"age, lab \|"),
    "Arrow": (lambda at: table_of(at, x=pd.Series(DAYS.date, dtype="date32[pyarrow]")), "dates: x"),
    "no header, a gap": (lines(lambda rows: [rows[1][4:], *rows[2:]]), "looks like a record"),
    "zeros": (column(mostly(150 + AGE, 0, 4), "bmi"), f"0 in 20 {MAYBE_MISSING}.*: bmi"),
    "forms of one letter": (labels([["\u00e9", "e\u0301", "a"][i % 3] for i in range(N)]), "join"),
    "lists of labels": (labels(["a", "a;b", "b", "a"] * 20), "label holds a;b beside its parts"),
    "lists in brackets": (labels(["[a]", "[a, b]", "[b]", "[a]"] * 20), "holds .a, b. beside its"),
    "thousands by points in numbers to predict": (
        lines(lambda of: ["x;y", *(f"{i},5;{i}.{i:03}" for i in range(1, 81))]),
        "point between thousands.*number to predict, y: 1001 to 80080",
    ),
    "points in numbers to predict": (
        lines(lambda of: ["x;y", *(f"{i};{i}.{i:03}" for i in range(1, 81))]),
        "refused: .* has two readings: 1.001 in column y is 1001 or 1.001",
    ),
    "a word among numbers to predict": (
        labels(["high", *AGE[1:]]),
        "refused: column y of .*t.csv is numeric but holds high in row 1: .* dataset.task=class",
    ),
    "two signs in numbers to predict": (
        labels([f"{x}".replace(".", ".,"[i % 2]) for i, x in enumerate(AGE)]),
        "refused: .* such as .* in 80 rows: set dataset.task=regression if they are numbers to pr",
    ),
    "dates to predict": (labels(DAYS.strftime("%Y-%m-%d")), "refused: .*of a date give its days"),
    "numbers to predict, far from 0": (labels(1e9 + AGE), "predict: .* which float32 blurs"),
    "units in numbers to predict": (labels([f"{x} mg" for x in AGE]), "refused: .*task=regression"),
    "ids that are texts": (column([f"P{i:05d}" for i in range(N)], "patient_id"), OWN_IDS),
    "a sign that is not seen": (column(mostly("a", "a\u200b", 2)), "x holds a and a\u200b: join"),
    "a full stop": (column(mostly("benign", "benign.", 9)), "x holds benign and benign.: join"),
    "-1 among years": (column(mostly(AGE.astype(int), -1, 9)), f"-1 in 9 {MAYBE_MISSING}"),
    "9 beside 1 and 2": (column(mostly(Y + 1, 9, 9)), f"9 in 9 {MAYBE_MISSING}"),
    "-99 below 0": (column(mostly(AGE - 50, -99, 9)), f"-99 in 9 {MAYBE_MISSING}"),
    "two codes": (column(mostly(mostly(AGE, 888, 9), 999, 7)), "888 and 999 in 19 records"),
    "codes of answers": (column(np.resize((1, 2, 3, 4, 77, 88, 99), N)), "77 and 88 and 99 in 33 "),
    "counts with a tail": (column(np.resize((1, 2, 3, 4, 5, 7, 8, 9), N)), NOTHING),
    "large numbers again": (column(np.resize((9e6, 4e7, 5e7), N)), NOTHING),
    "999 to predict": (labels(mostly(AGE, 999, 9)), f"predict: 999 in 9 {MAYBE_MISSING}"),
    "999 once": (column([999, *AGE[1:]]), f"999 in 1 {MAYBE_MISSING}"),
    "9 as a label": (labels(mostly(Y, 9, 9)), "the label holds 9: if it means"),
    "not tested as a label": (labels(mostly("neg", "Not tested", 9)), "holds Not tested: if it"),
    "rows of one person": (
        column([f"p{i // 4}" for i in range(N)], "patient_id"),
        "patient_id has few rows of each value, as a person has: if it says whose",
    ),
    **{
        f"rows of one {name}": (column([i // 3 for i in range(N)], name), f"{name} has few rows of")
        for name in ("Customer_Nbr", "USUBJID", "hadm_id", "userId", "patient number")
    },
    "ids to predict": (labels(range(900, 900 + N)), "predict: y is another whole number in every"),
    "metres and centimetres": (
        column([1.6 + i / 400 if i % 4 else 160 + i / 4 for i in range(N)]),
        "numbers up to 1.7975 and from 160 on: two units.: x",
    ),
    "thousands by points": (
        lines(lambda of: ["pay;n;y", *(f"{i % 9 + 1}.{i:03};1;{i % 2}" for i in range(80))]),
        r"refused: .* has two readings: 1.000 in column pay is 1000 or 1.000",
    ),
    "the header again": (lines(lambda of: [*of[:41], of[0], *of[41:]]), "repeat the header .* .1"),
    "separators last": (lines(lambda of: [f"{row}," for row in of]), "names and cells are left"),
    "a quote of many lines": (
        content(
            bytes, of=PLAIN.assign(lab=np.resize(("a, b c\nd, e f\ng", "h, i j\nk l m\nn"), N))
        ),
        r"^numbers: age . categories: lab \(2 values\)",
    ),
    "quotes that are inches": (
        content(
            lambda of: of.replace(b"inch", b'"15'),
            of=pd.DataFrame({"x": mostly("a", "inch", 40), "age": AGE, "y": Y}),
        ),
        "a cell in quotes holds 39 lines that look like records, from a,.* on: double a quote",
    ),
    "categories of numbers": (
        lambda folder: table_of(folder, x=pd.Categorical(np.resize([0, 1, 2], N))),
        r"x is stored as a category, but holds numbers: set 'dataset.categories={x: \[\]}'",
    ),
    "categories of texts": (
        lambda folder: table_of(folder, x=pd.Categorical(np.resize(["a", "b"], N))),
        r"^numbers: age \| categories: x \(2 values\) \| label y: 0 \d+, 1 \d+$",
    ),
    "LIBSVM": (
        lines(lambda of: [f"{y} 1:{x} 2:{x}" for x, y in zip(AGE, Y, strict=True)]),
        "refused: .*LIBSVM's form: scikit-learn's load_svmlight_file makes arrays",
    ),
    "two separators": (
        content(lambda of: of.replace(b",", b"||")),
        "separator bar, columns without names and cells are left out.*numbers: age, lab",
    ),
    "a title": (lines(lambda of: ["Study,,", *of]), "line Study before the header is.*age, lab"),
    "no title": (lines(lambda of: ["a,b,", *of]), "refused: .*without names .number 3"),
    "another separator": (content(lambda of: of.replace(b",", b"^")), "set dataset.separator"),
    "gzip by another name": (content(gzip.compress), "numbers: age, lab"),
    "zip by another name": (content(in_zip), "numbers: age, lab"),
    "zip of two tables": (
        content(lambda of: in_zip(of, of)),
        "refused: .*archive of 2 files: .*un",
    ),
    "zip of a folder": (content(lambda of: in_zip(b"", of)), "numbers: age, lab"),
    "images in Parquet": (parquet_of(["x", "age"], [b"\x89PN\0"] * N), "refused: .*images as"),
    "images with their paths in Parquet": (
        parquet_of(["x", "age"], [{"bytes": b"\x89PNG\0", "path": "1.png"}] * N),
        "refused: .*column x holds bytes: .*images as files, in a folder per class",
    ),
    "lists in Parquet": (parquet_of(["x", "age"], [[1, 2]] * N), "x left out, which holds lists"),
    "one name twice in Parquet": (parquet_of(["age", "age"], [1] * N), "refused: .*2 columns age"),
    "a corner": (sheet(lambda of: (of.insert_rows(1, 3), of.insert_cols(1, 2))), "age, lab [|]"),
    "an empty sheet": (sheet(lambda of: of.delete_rows(1, N + 1)), "first sheet, data, is empty"),
    "a legend": (sheet(in_front), "line Ward 3 before .*only the sheet data.*numbers: age, lab"),
    "empty rows": (lines(lambda rows: [*rows, ",,", ",,"]), r"empty rows are left out \(2\)"),
    "Cyrillic": (in_bytes("пол", "муж", "жен", encoding="cp1251"), "refused: .*set dataset.encod"),
    "Japanese": (in_bytes("性別", "男性", "女性", encoding="shift_jis"), "refused: .*is unclear"),
    "German": (in_bytes("Größe", "ä", "öß", encoding="cp1252"), "encoding cp1252.*Größe"),
    "two encodings": (content(lambda of: "ö,b\n".encode() + b"5,\xe4\n"), "encoding is unclear"),
    "damaged gzip": (content(lambda of: gzip.compress(of)[:60]), "refused: .*cannot be read"),
    "a sheet that is hidden": (sheet(lambda table: None), "only the sheet data is read, not Sheet"),
    "hidden rows and columns": (sheet(hide), r"hidden rows and columns are read, too \(2\)"),
    "merged cells": (sheet(lambda of: of.merge_cells("A2:A5")), r"value \(1\).*age .3 missing."),
    "formulas that no program computed": (
        sheet(lambda table: setattr(table["A2"], "value", "=B2")),
        r"formulas without a stored value count as missing \(1\).*age .1 missing.",
    ),
    "formulas of another sheet": (
        sheet(lambda table: table.parent.create_sheet("sums").append(["=1+1"])),
        r"only the sheet data is read, not Sheet, sums.*numbers: age, lab",
    ),
    "three hidden columns": (
        sheet(lambda table: table.column_dimensions.group("B", "D", hidden=True)),
        r"hidden rows and columns are read, too \(2\)",
    ),
    "texts as bytes in Parquet": (parquet_of(["x", "age"], [b"a"] * N), "x .1 values.*x"),
    "labels with blanks between": (labels(["a b", "a", "b", "a"] * 20), "a b beside its parts"),
    "a mark within": (lines(lambda rows: [*rows[:9], f"\ufeff{rows[9]}", *rows[10:]]), "refused"),
}


@pytest.mark.parametrize("case", TABLES)
def test_what_is_said_of_a_table(tmp_path, case):
    write, expected = TABLES[case]
    found = said(write(tmp_path), "csv")
    assert re.search(expected, found), found


def test_the_index_of_a_parquet_file_is_a_column(tmp_path):
    PLAIN.set_index("age").to_parquet(tmp_path / "t.parquet")
    assert said(tmp_path / "t.parquet", "csv").startswith("numbers: age, lab")
    PLAIN.sample(frac=1, random_state=0).to_parquet(tmp_path / "t.parquet")  # one without a name
    assert said(tmp_path / "t.parquet", "csv").startswith("numbers: age, lab | ")


@pytest.mark.parametrize("form", ["names of rows", "a named index", "another library"])
def test_a_frame_is_read_as_its_file(tmp_path, form):
    path = tmp_path / ("t.csv" if form == "names of rows" else "t.parquet")
    if form == "names of rows":
        PLAIN.set_axis([f"p{i % 9}" for i in range(N)]).to_csv(path)
        frame = pd.read_csv(path)
    else:
        PLAIN.set_index("age").to_parquet(path)
        frame = pd.read_parquet(path) if form == "a named index" else parquet.read_table(path)
    data = prepared("csv", root=path, cache=tmp_path / "cache", server_test=False)
    for given in (path, frame):
        found = read_raw(given, data.inputs)
        assert found.batch(slice(None)).tolist() == data.train.features.tolist()
        assert found.labels.tolist() == Y.tolist()


def fill(folder, places, save):
    """Eight gray images in two folders."""
    for i in range(8):
        path = folder / "images" / places[i % len(places)].format("ab"[i % 2]) / f"{i}"
        path.parent.mkdir(parents=True, exist_ok=True)
        save(np.random.default_rng(i).integers(0, 255, (8, 8)).astype(np.uint8), path)
    return folder / "images"


def folder_of(suffix, mode="L", format=None, **kept):
    """Images saved in another way, or other files beside them."""

    def write(folder):
        def save(pixels, path):
            Image.fromarray(pixels).convert(mode).save(path.with_suffix(suffix), format=format)

        fill(folder, ("{}",), save)
        for name in kept.values():
            (folder / "images" / "a" / name).write_bytes(b"no image")
        return folder / "images"

    return write


def placed(*places, more="", hidden="", beside=""):
    """Images in other places."""

    def write(folder):
        def save(pixels, path):
            save_pixels(pixels, path.with_suffix(".png"))

        root = fill(folder, places, save)
        (root / more).mkdir(exist_ok=True)
        if beside:
            save_pixels(np.eye(8, dtype=np.uint8), root / beside)
        if hidden:
            (root / hidden).parent.mkdir(parents=True)
            (root / hidden).write_bytes(b"no image")
        return root

    return write


def gaps(folder):
    """Fractions, some of them missing in half of the images."""

    def save(pixels, path):
        missing = np.nan if int(path.name) % 2 else 0
        fractions = np.where(pixels > 200, missing, pixels / 255).astype("f4")
        save_pixels(fractions, path.with_suffix(".tif"))

    return fill(folder, ("{}",), save)


def scans(**tags):
    """DICOM images of 16 bits."""

    def write(folder):
        def save(pixels, path):
            rows = {"Rows": 8 // (len(tags) + 1)}
            save_dicom(path.with_suffix(".dcm"), pixels.astype(np.uint16) * 16, **rows | tags)

        return fill(folder, ("{}",), save)

    return write


IMAGES = {
    "files that are hidden": (folder_of(".png", mac="._1.png", windows="Thumbs.db"), ""),
    "upper case": (folder_of(".PNG"), ""),
    "WebP": (folder_of(".webp", mode="RGB"), "8 colour images: all become gray"),
    "one that is broken": (folder_of(".png", broken="x.png"), "refused: 1 of 9 files cannot be"),
    "inks of a printer": (folder_of(".jpg", mode="CMYK"), "8 colour images: all become gray"),
    "a suffix of few": (folder_of(".jpe"), ""),
    "no suffix": (folder_of("", format="PNG"), "refused: .* has no images.*no suffix: 8"),
    "others beside": (folder_of(".png", one="x.heic", two="y.txt"), r"1 files .* \(.heic: 1\)"),
    "folders in classes": (placed("{}/x"), r"refused: .*; 8 images in .* \(a/x: 4, b/x: 4\)"),
    "train and test in other words": (placed("test_set/{}"), "refused: .*test_set/a: 4"),
    "a folder around": (placed("data/{}"), r"refused: .* \(data/a: 4, data/b: 4\)"),
    "blanks in names": (placed("c", "c "), "the label holds c and c : join them"),
    "a class without images": (placed("{}", more="c"), "no record to train on has the label c"),
    "pixels that are no numbers": (gaps, "refused: 4 of 8 .*it holds pixels that are no numbers"),
    "no window": (scans(), "8 DICOM images have no window"),
    "several frames": (scans(NumberOfFrames=2), "refused: .* got shape .2, 4, 8"),
    "masks beside": (placed("{}", more="c", beside="a/0_seg_mask_1.png"), "1 images such as 0_seg"),
    "a folder of masks": (placed("{}", "Masks"), "4 images such as 1.png may be masks: remove"),
    "people with masks": (folder_of(".png", one="x_mask.txt"), ""),
    "a drive's folders": (placed("{}", "{}/@eaDir", "$RECYCLE.BIN"), ""),
    "a class called train": (placed("{}", "train"), ""),
    "two parts without classes": (placed("train", "val"), "refused: .*train has no images"),
    "such parts in capitals": (placed("Train", "Validation"), "refused: .*Train has no images"),
    "sites": (placed("s/{}", "t/{}"), "refused: .* and partition=sites <site>/<class>/"),
    "a dot": (placed("{}", ".c"), "the folder .c is left out for its dot: rename it"),
    "a tool's folder": (placed("{}", hidden=".venv/lib/x.png"), "^(?!.*left out for its dot)"),
    "an Apple's folder": (placed("{}", hidden=".x/y.nii"), ""),
}


@pytest.mark.parametrize("case", IMAGES)
def test_what_is_said_of_images(tmp_path, case):
    write, expected = IMAGES[case]
    found = said(write(tmp_path), "image_folder", image_size=8, channels=1)
    assert re.match(f"{expected}.*" if expected else "$", found), found


PIXELS = RNG.integers(0, 255, (N, 6, 6)).astype(np.uint8)
OBJECT = "refused: .* it holds objects; save texts by np.array.texts, dtype=str., or is no such fil"
ARRAYS = {
    "names of Keras": ({"train_images": PIXELS, "train_labels": Y}, "are taken as x_train and"),
    "names of scikit-learn": ({"data": PIXELS, "target": Y}, "are taken as x_train and y_train"),
    "truth values": ({"x_train": PIXELS > 99, "y_train": Y == 1}, "bool .* is read as uint8"),
    "axes of one value": ({"x_train": PIXELS[:, None, ..., None], "y_train": Y}, "is read as"),
    "labels in a column": ({"x_train": PIXELS, "y_train": Y[:, None]}, "is read as int64"),
    "labels as bytes": ({"x_train": PIXELS, "y_train": np.array([b"a", b"b"])[Y]}, "is read as"),
    "F11": ({"x_train": PIXELS, "y_train": np.eye(2)[Y]}, "exactly one of 2 labels"),
    "-1 to 1": ({"x_train": PIXELS / 127.5 - 1, "y_train": Y}, "refused: .*shares from 0 to 1"),
    "a label of blanks": ({"X": PIXELS, "y": np.array(["b", " "])[Y]}, "refused: .*the label ,"),
    "an array that nothing reads": ({"X": PIXELS, "y": Y, "patient": Y}, "patient of .* not read"),
    "frames": ({"x_train": np.stack([PIXELS] * 3, 1)[..., None], "y_train": Y}, "80, 3, 6, 6, 1"),
    "no number": ({"x": PIXELS / np.where(Y, 9, np.nan)[:, None, None], "y": Y}, "e in image 0"),
    "12 bits": ({"x_train": PIXELS.astype(int) * 16, "y_train": Y}, "refused: .* from 0 to 4064"),
    "flat": ({"X": PIXELS.repeat(2, 1)[:, :, :4].repeat(2, 2)[:, :8].reshape(N, 64), "y": Y}, "x8"),
    "texts as objects": ({"X": PIXELS, "y": np.array(["a", "b"], dtype=object)[Y]}, OBJECT),
    "0 and 1": ({"x_train": (PIXELS > 99).astype("f4"), "y_train": Y}, "float32 .* as uint8"),
    "texts": ({"x_train": PIXELS.astype(str), "y_train": Y}, "refused: .*features <U3 of shape"),
    "one picture of two classes": (
        {"X": PIXELS.repeat(2, 0), "y": np.arange(2 * N) % 2},
        "80 images occur under more than one label",
    ),
    "two of a kind": ({"x": PIXELS, "X": PIXELS, "y": Y}, "refused: .*a part needs x_train and"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_what_is_said_of_arrays(tmp_path, case):
    arrays, expected = ARRAYS[case]
    np.savez(tmp_path / "a.npz", **arrays)
    found = said(tmp_path / "a.npz", "npz")
    assert re.search(expected, found), found


FORMS = ["truth values", "fractions", "whole floats", "another order of bytes", "RGBA"]


@pytest.mark.parametrize("form", FORMS)
def test_arrays_in_memory_are_read_as_those_in_a_file(tmp_path, form):
    given = {
        "truth values": PIXELS > 99,
        "fractions": np.sqrt(PIXELS / 255),
        "whole floats": PIXELS.astype(float),
        "another order of bytes": PIXELS.astype(">u2"),
        "RGBA": np.stack([PIXELS, PIXELS, PIXELS, np.full_like(PIXELS, 255)], axis=3),
    }[form]
    np.savez(tmp_path / "a.npz", x=given, y=Y.astype(float))
    data = prepared("npz", root=tmp_path / "a.npz", cache=tmp_path, server_test=False)
    assert read_raw(tmp_path / "a.npz", data.inputs).labels.tolist() == Y.tolist()
    assert read_raw(given, data.inputs).batch(slice(None)).tolist() == data.train.features.tolist()


def test_class_names_say_which_class_a_text_is(tmp_path):
    np.savez(tmp_path / "a.npz", X=PIXELS, y=np.array(["cat", "dog"])[Y])
    given = {"root": tmp_path / "a.npz", "cache": tmp_path, "server_test": False}
    data = prepared("npz", class_names=["dog", "cat"], **given)
    assert data.train.labels.tolist() == (1 - Y).tolist()
    assert "has the label cat" in said(tmp_path / "a.npz", "npz", class_names=["dog", "cow"])


LABELS = {
    "no first line of names": (["0.png,a", "1.png,b"], "refused: .* begins with the image 0.png"),
    "an empty name": (["file,y", "0.png,a", ",b"], "refused: .*: an empty cell; give paths"),
    "no suffix": (["file,y", "0,a", "1,b", "2,b"], ""),
    "numbered images": ([",y", "0,a", "1,b", "2,b"], ""),
    "paths of Windows": (["file,y", ".\\0.png,a", "1.png,b", "2.png,b"], ""),
    "no such image": (["file,y", "7,a", "1,b"], "refused: .* names 1 of 2 images that are not in"),
    "numbers of rows": ([",f,y", "0,1.png,a", "1,0.png,b", "2,2.png,b"], "labels.csv: the first"),
    "classes in columns": (["f,a,b", "0,0,1", "1,1,0", "2,0,1"], "labels.csv: b is the label, not"),
    "one image twice": (["file,y", "0.png,a", "0.png,b"], "refused: .* 0.png in more than one row"),
    "some only": (["file,y", "0.png,a", "1.png,b"], "1 images that labels.csv does not name"),
    "not in all rows": (["f,y", "0.png,a", "1.png,", "2.png,b"], "rows without a label .* .1: 2"),
    "paths from the folder": (["f,y", "images/0.png,a", "images/1.png,b", "images/2.png,b"], ""),
    "several labels": (["f,y", "0,a", "1,b", "2,a;b"], "the label holds a;b beside its parts"),
    "parts": (["f,set,y", "0,train,a", "1,train,b", "2,Test,b"], ".*set says Test, train, and is"),
    "flags": (["f,is_test,y", "0,1,a", "1,0,b", "2,0,b"], ".*is_test says 0, 1, and is not read"),
    "a class None": (["f,y", "0,None", "1,b", "2,b"], r"refused: .*set dataset.missing_in=.y: "),
}


@pytest.mark.parametrize("case", LABELS)
def test_what_is_said_of_a_labels_file(tmp_path, case):
    rows, expected = LABELS[case]
    (tmp_path / "images").mkdir()
    for i in range(3):
        save_pixels(PIXELS[i], tmp_path / "images" / f"{i}.png")
    (tmp_path / "images" / "labels.csv").write_text("\n".join(rows) + "\n")
    found = said(tmp_path / "images", "labelled_images", label="last", labels_file="labels.csv")
    assert re.match(f"{expected}.*" if expected else "$", found), found


HEAD = "age,seen,lab,y\n"
ASKED = {  # of a model whose table had these columns
    "a word": (f"{HEAD}old,2021-01-01,3,0\n", "holds old in row 1: write it as"),
    "two readings": (f"{HEAD}5,05/06/2024,3,0\n", "with two readings: write it as"),
    "another sign": ("age;seen;lab;y\n5,5;2021-01-01;3;0\n", "holds 5,5 in row 1: write it"),
    "no header": ("5.5,2021-01-01,3,0\n6.5,2021-01-01,3,0\n", "looks like a record: write it as"),
    "rows with names": (f"{HEAD}a,5,2021-01-01,3,0\n", "5 cells, but the header 4: write it as"),
    "no rows": (HEAD, "has no rows: give a table"),
}


@pytest.mark.parametrize("case", ASKED)
def test_a_model_is_given_no_settings(tmp_path, case):
    table = PLAIN.assign(seen=DAYS.strftime("%Y-%m-%d"))[["age", "seen", "lab", "y"]]
    table.to_csv(tmp_path / "t.csv", index=False)
    data = prepared("csv", root=tmp_path / "t.csv", cache=tmp_path / "c", server_test=False)
    text, expected = ASKED[case]
    path = tmp_path / "label.csv"  # as a setting is called
    path.write_text(text)
    told = refuses(expected, read_raw, path, data.inputs)
    assert "dataset." not in told
    assert told.startswith((str(path), "column age of"))


def test_a_folder_of_sites_is_predicted_as_it_was_read(tmp_path):
    """Two sites with other signs, names and codes, one of them without a column."""
    (root := tmp_path / "sites").mkdir()
    PLAIN.head(40).assign(sex=mostly("f", "m", 2)[:40]).to_csv(root / "a.csv", index=False)
    there = PLAIN.tail(40).rename(columns={"age": "AGE"}).drop(columns="lab")
    there.assign(sex=1).to_csv(root / "b.csv", index=False, sep=";", decimal=",")
    (root / "dataset.yml").write_text("b: {rename: {AGE: age}, map: {sex: {1: m}}}\n")
    given = {"cache": tmp_path / "c", "label": "y", "root": root, "server_test": False}
    joined = prepared("csv", sites=True, **given)
    found = read_raw(root, joined.inputs)
    assert np.array_equal(found.batch(slice(None)), joined.train.features, equal_nan=True)
    assert found.names[0] == "a/0"
    assert found.names[-1] == "b/39"
    assert found.labels.tolist() == Y.tolist()
    assert found.notes == ("b: column lab has no value in any of 40 rows",)
    (root / "dataset.yml").rename(root / "dataset.yaml")
    assert read_raw(root / "a.csv", joined.inputs).notes[-1].endswith("with its folder alone")
    lines = (root / "a.csv").read_text().splitlines()
    (tmp_path / "twice.csv").write_text("".join(f"{line},{line.split(',')[0]}\n" for line in lines))
    (note,) = read_raw(tmp_path / "twice.csv", joined.inputs).notes
    assert note == "a further column age is called age.1"


def test_numbers_on_another_scale_are_told(tmp_path):
    PLAIN.to_csv(tmp_path / "t.csv", index=False)
    data = prepared("csv", root=tmp_path / "t.csv", cache=tmp_path / "c", server_test=False)
    inputs = replace(data.inputs, mean=(50.0, 100.0), std=(10.0, 20.0))
    in_units = PLAIN.assign(lab=PLAIN.lab / 38.67)
    for given in (in_units, in_units[["age", "lab"]].to_numpy()):
        (note,) = read_raw(given, inputs).notes
        assert re.search(r"in another unit or scale: lab \(2.4\d, and not 100\)$", note)
    assert read_raw(PLAIN, inputs).notes == ()
    coded = PLAIN[["age", "lab"]].to_numpy(float, copy=True)
    coded[::3] = -999
    (note,) = read_raw(coded, inputs).notes
    assert note.endswith("scale: age (in 27 records, as -999), lab (in 27 records, as -999)")
    masked = read_raw(np.ma.masked_equal(coded, -999), inputs)
    assert (masked.batch(slice(None)).isnan().sum(), masked.notes) == (54, ())
    refuses("rows or images of several shapes", read_raw, [[1, 2], [3]], inputs)
    refuses("the data holds infinite numbers", read_raw, np.full((3, 2), np.inf), inputs)
    # a frame that is still to be computed is an object, too
    refuses("expected cells .N, 2., .*; or a DataFrame", read_raw, object(), inputs)
    train = data.train
    test = replace(train, features=train.features / 99, ids=np.roll(train.ids, 1))
    notes = oddities(train, test)
    assert notes[0] == "test set: 80 of its 80 records or persons are among those to train on"
    assert notes[1].startswith("test set: numbers far from the usual ones")
    other = replace(train, ids=np.array([b"a"] * N))
    assert oddities(train, other) == []
    (note,) = oddities(train, replace(other, labels=train.labels * 0))
    assert note.startswith("test set: no record has the label 1")


FRAME = PLAIN.assign(sex=np.array(["f", "m"])[Y])
UNLIKE = {  # what is given to a model, and what is said of it
    "nothing": (FRAME.assign(age=np.nan), "column age has no value in any of 80 rows"),
    "other words": (FRAME.assign(sex=mostly("f", "female", 5)), "sex: 16 of 80 cells, such as fem"),
    "the same": (FRAME, ""),
    "a few": (FRAME.head(5).assign(age=np.nan), ""),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_what_is_unlike_training_is_said(tmp_path, case):
    FRAME[["age", "sex", "y"]].to_csv(tmp_path / "t.csv", index=False)
    data = prepared("csv", root=tmp_path / "t.csv", cache=tmp_path / "c", server_test=False)
    frame, expected = UNLIKE[case]
    notes = read_raw(frame, data.inputs).notes
    assert len(notes) == bool(expected)
    assert all(re.search(expected, note) for note in notes)
