import gzip
from datetime import date

import numpy as np
import pandas as pd
import pytest

from fednas_flwr.data import records

from ..data_sets import read
from ..refusals import refuses


def test_columns_are_detected(table_csv):
    table, test = read("csv", table_csv, id_column="patient")
    assert test is None
    assert table.by_person
    assert not read("csv", table_csv)[0].by_person
    names = ("age", "pressure", "smokes=no", "smokes=yes", "site=A", "site=B")
    assert (table.feature_names, table.num_numeric) == (names, 2)
    expected = [[50, 1.5, 0, 1, 1, 0], [60, np.nan, 1, 0, 0, 1]]
    expected += [[70, 2.5, 0, 0, 1, 0], [40, 3.5, 0, 1, 0, 1]]
    np.testing.assert_array_equal(table.features.numpy(), np.float32(expected))
    assert (table.labels.tolist(), table.class_names) == ([0, 1, 1, 0], ("0", "1"))
    assert table.id_column == "patient"
    assert table.ids.tolist() == records.record_ids([b"p1", b"p2", b"p1", b"p3"]).tolist()
    # all but the label and fractions can make a partition
    assert set(table.columns) == {"patient", "age", "smokes", "site"}
    assert table.columns["site"].tolist() == ["A", "B", "A", "B"]


def test_a_table_is_the_same_whatever_parts_it_is_encoded_in(table_csv, monkeypatch):
    whole, _ = read("csv", table_csv)
    for size in (1, 3):
        monkeypatch.setattr(records, "_CHUNK", size)
        parts, _ = read("csv", table_csv)
        np.testing.assert_array_equal(parts.features.numpy(), whole.features.numpy())
        assert parts.ids.tolist() == whole.ids.tolist()


def test_columns_are_chosen(table_csv):
    table_csv.write_text(table_csv.read_text().replace("p1,70,,2.5,A,1\n", ""))
    chosen = {"label": "smokes", "class_names": ("yes", "no", "unknown"), "numeric": ("age",)}
    chosen |= {"categorical": ("site",), "categories": {"site": ("B", "C", "A")}}
    table, _ = read("csv", table_csv, **chosen)
    assert table.feature_names == ("age", "site=B", "site=C", "site=A")
    assert table.features[1].tolist() == [60, 1, 0, 0]
    assert (table.labels.tolist(), table.class_names) == ([0, 1, 0], ("yes", "no", "unknown"))


@pytest.mark.parametrize("kind", ["numeric", "categorical"])
def test_a_column_whose_categories_are_given_is_a_feature(kind, table_csv):
    listed = {"numeric": ("age",), "categorical": ("smokes",)}[kind]
    table, _ = read("csv", table_csv, **{kind: listed}, categories={"site": ("A", "B", "C")})
    assert {column.name for column in table.schema} == {*listed, "site"}


def test_ignored_columns_and_numeric_categories(table_csv):
    ages = {"age": ("40", "50", "60", "70")}
    table, _ = read("csv", table_csv, ignore=("patient", "smokes", "site"), categories=ages)
    assert table.feature_names == ("pressure", "age=40", "age=50", "age=60", "age=70")
    found, _ = read("csv", table_csv, ignore=("patient", "smokes", "site"), categories={"age": ()})
    assert found.schema == table.schema
    assert "patient" in table.columns


def test_declared_columns_of_a_site_are_in_the_declared_order(table_csv):
    how = {"corrupt": "skip", "encoding": "utf-8", "decimal": "point", "thousands": "none"}
    how |= {"label": "ill", "class_names": ("0", "1"), "numeric": ("pressure", "age")}
    table, _ = read("csv", table_csv, **how, categories={"site": ("A", "B")})
    assert [column.name for column in table.schema] == ["pressure", "age", "site"]


ROWS = "a,b,y\n1.5,x,0\n2,z,1\n0,,1\n"
SAME = {
    "order of columns and rows, labels": "b,y,a\n,0,0\nz,0,2\nx,1,1.5\n",
    "one more decimal, which is 0": "a,b,y\n1.50,x,0\n2.0,z,1\n0.00,,1\n",
    "another notation": "a,b,y\n+15e-1,x,0\n2e0,z,1\n-0,,1\n",
}
OTHER = {
    "one more digit": ROWS.replace("1.5", "1.51"),
    "one more feature": "a,b,c,y\n1.5,x,1,0\n2,z,1,1\n0,,1,1\n",
}


def ids_of(path, text, **settings):
    path.write_text(text)
    return sorted(read("csv", path, label="y", **settings)[0].ids.tolist())


@pytest.mark.parametrize("text", SAME.values(), ids=SAME)
def test_an_id_is_of_a_rows_parsed_features(tmp_path, text):
    assert ids_of(tmp_path / "two.csv", text) == ids_of(tmp_path / "one.csv", ROWS)


@pytest.mark.parametrize("text", OTHER.values(), ids=OTHER)
def test_other_features_make_other_records_unless_a_column_gives_ids(tmp_path, text):
    one, two = ids_of(tmp_path / "one.csv", ROWS), ids_of(tmp_path / "two.csv", text)
    assert one != two

    def named(text):
        lines = zip("npqr", text.splitlines(), strict=True)
        return "\n".join(f"{name},{line}" for name, line in lines)

    one, two = (ids_of(tmp_path / "t.csv", named(t), id_column="n") for t in (ROWS, text))
    assert one == two == sorted(records.record_ids([b"p", b"q", b"r"]).tolist())


def test_a_column_that_is_no_feature_changes_no_id(tmp_path):
    features = {"numeric": ("a",), "categorical": ("b",)}
    more = OTHER["one more feature"]
    one, two = (ids_of(tmp_path / "t.csv", text, **features) for text in (ROWS, more))
    assert one == two


def test_compressed_with_mark_and_text_labels(tmp_path):
    text = "\ufeffa,kind\n1,pear\n2,apple\n3,pear\n"
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(text.encode()))
    table, _ = read("csv", tmp_path / "t.csv.gz")
    assert (table.feature_names, table.class_names) == (("a",), ("apple", "pear"))
    assert table.labels.tolist() == [1, 0, 1]


def test_whole_number_labels_are_in_order_of_number(table_of):
    assert table_of("a,y\n1,10\n2,9\n3,-1\n").class_names == ("-1", "9", "10")


UNFIT_TABLES = [
    ({"label": "sick"}, "no column sick: it has patient, age"),
    ({"numeric": ("weight",)}, "no column weight"),
    ({"categories": {"sites": ()}}, "no column sites"),
    ({"numeric": ("age", "ill")}, "dataset.labels, .* holds ill more than once"),
    ({"numeric": ("age",), "categorical": ("age",)}, r"dataset.ignore=.* age more than once"),
    ({"numeric": ("smokes",)}, "smokes of .* is numeric but holds yes in row 1"),
    ({"categories": {"site": ("A",)}}, "holds B, which is not in dataset.categories.site"),
    ({"class_names": ("0",)}, "column ill, has the label 1"),
    ({"id_column": "smokes"}, r"no id \(smokes\) in row 3"),
    ({"ignore": ("patient", "age", "smokes", "pressure", "site")}, "no feature columns"),
]


@pytest.mark.parametrize(("settings", "message"), UNFIT_TABLES)
def test_tables_that_do_not_fit(table_csv, settings, message):
    refuses(message, read, "csv", table_csv, **settings)


UNUSABLE = [
    ("", "cannot be read as a CSV"),
    ("a,y\n", "no rows"),
    ("a,y\n1,2\n1,2,3,4\n", "cannot be read as a CSV"),
    ("a,y\n1,0\ninf,1\n", "column a of .* holds inf in row 2"),
    ("a,y\n1,0\n1e300,1\n", "column a of .* holds 1e300 in row 2"),
    ("a,y\n" + "".join(f"t{i},0\n" for i in range(300)), "300 different texts"),
]


@pytest.mark.parametrize(("text", "message"), UNUSABLE)
def test_files_that_cannot_be_used(tmp_path, table_of, text, message):
    assert "\n" not in refuses(message, table_of, text)
    refuses("cannot be read as a CSV", read, "csv", tmp_path / "missing.csv")


def test_a_folder_has_an_official_test_part(tmp_path):
    (tmp_path / "train.csv").write_text("a,colour,y\n1,red,no\n2,blue,yes\n3,red,no\n")
    # columns by name, and no blue in it
    (tmp_path / "test.csv.gz").write_bytes(gzip.compress(b"y,colour,more,a\nyes,red,x,4\n"))
    train, test = read("csv", tmp_path)
    assert (len(train), len(test)) == (3, 1)
    assert test.feature_names == train.feature_names == ("a", "colour=blue", "colour=red")
    assert test.class_names == train.class_names == ("no", "yes")
    assert (test.features.tolist(), test.labels.tolist()) == ([[4.0, 0.0, 1.0]], [1])
    (tmp_path / "test.csv.gz").rename(tmp_path / "val.csv.gz")
    for hidden in ("._train.csv", "~$train.xlsx"):  # of systems
        (tmp_path / hidden).write_text("x")
    alone, none = read("csv", tmp_path)
    assert none is None
    assert alone.notes[0].startswith("val.csv.gz in ")
    assert alone.ids.tolist() == train.ids.tolist()


UNFIT_FOLDERS = [
    ({}, "holds no table: expected one train.csv"),
    ({"test.csv": "a,y\n1,0\n"}, "holds test.csv"),
    ({"train.csv": "a,y\n1,0\n", "train.csv.gz": ""}, "holds train.csv, train.csv.gz"),
    ({"train.csv": "a,y\n1,0\n2,1\n", "test.csv": "b,y\n1,0\n"}, "test.csv has no column a"),
    ({"train.csv": "a,y\n1,0\n2,1\n", "test.csv": "a\n1\n"}, "column y: it has a; without labels"),
    ({"train.csv": "a,y\n1,0\n2,1\n", "test.csv": "a,y\n1,2\n"}, "test.csv.* has the label 2"),
    ({"train.csv": "a,y\nr,0\ns,1\n", "test.csv": "a,y\nt,0\n"}, "test.csv holds t, which"),
    ({"train.csv": "a,y\n1,0\n2,1\n", "test.csv": "a,y\nx,0\n"}, "test.csv is numeric but"),
]


@pytest.mark.parametrize(("files", "message"), UNFIT_FOLDERS)
def test_folders_that_do_not_fit(tmp_path, files, message):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    refuses(message, read, "csv", tmp_path)


PATIENTS = "name;age;blood;seen;sex;ill\nAsa;50,5;1,25;2024-05-31;f;ja\nOle;61;;31.05.2024;m;nein\n"


def write_forms(folder):
    """The same table as semicolons with decimal commas, as UTF-16, tabs, and of other programs."""
    names = {"german": "g.csv", "utf-16": "u.csv", "tabs": "t.tsv"}
    names |= {"excel": "e.xlsx", "parquet": "p.parquet", "feather": "f.feather"}
    names |= {"stata": "s.dta", "json": "j.json", "json lines": "j.jsonl.xz"}
    names |= {"json columns": "c.json"}
    paths = {form: folder / name for form, name in names.items()}
    text = PATIENTS.replace("Asa", "Åsa")
    paths["german"].write_text(text, encoding="cp1252")
    paths["utf-16"].write_text(text, encoding="utf-16")
    paths["tabs"].write_text(text.replace(";", "\t").replace(",", "."))
    table = pd.DataFrame({"name": ["Åsa", "Ole"], "age": [50.5, 61.0], "blood": [1.25, None]})
    table = table.assign(seen=pd.Timestamp("2024-05-31"), sex=["f", "m"], ill=["ja", "nein"])
    table.to_excel(paths["excel"], index=False)
    table.to_parquet(paths["parquet"])
    table.to_feather(paths["feather"])
    table.to_stata(paths["stata"], write_index=False, version=118)
    dates = {"orient": "records", "date_format": "iso"}
    table.to_json(paths["json"], indent=2, **dates)
    table.to_json(paths["json lines"], lines=True, **dates)
    table.to_json(paths["json columns"], date_format="iso")
    return paths


FORMS = "german utf-16 tabs excel parquet feather stata json".split()


@pytest.mark.parametrize("form", [*FORMS, "json lines", "json columns"])
def test_a_table_is_read_as_it_is(tmp_path, form):
    table, _ = read("csv", write_forms(tmp_path)[form], id_column="name")
    assert table.feature_names == ("age", "blood", "seen", "sex=f", "sex=m")
    days = (date(2024, 5, 31) - date(1970, 1, 1)).days
    expected = [[50.5, 1.25, days, 1, 0], [61, np.nan, days, 0, 1]]
    np.testing.assert_array_equal(table.features.numpy(), np.float32(expected))
    assert table.class_names == ("ja", "nein")
    assert table.columns["name"].tolist() == ["Åsa", "Ole"]
    told = {"german": "g.csv: separator semicolon, encoding cp1252, decimal comma"}
    told |= {"utf-16": "u.csv: separator semicolon, encoding utf-16, decimal comma"}
    told |= {"tabs": "t.tsv: separator tab"}
    assert table.notes == ((told[form],) if form in told else ())


def test_a_folder_may_hold_a_table_of_stata(tmp_path):
    (tmp_path / "of").mkdir()
    write_forms(tmp_path)["stata"].rename(tmp_path / "of" / "train.dta")
    assert read("csv", tmp_path / "of", id_column="name")[0].class_names == ("ja", "nein")


def test_a_private_site_reads_no_json_and_the_first_sheet(tmp_path):
    """A record with one more key, or cell, would be one more column of all."""
    strict = {"corrupt": "skip", "encoding": "utf-8", "decimal": "point", "thousands": "none"}
    for path in (write_forms(tmp_path)[form] for form in ("json", "json lines")):
        words = "private sites, and dataset.corrupt=skip, read none: give CSV"
        refuses(words, read, "csv", path, **strict)
    with pd.ExcelWriter(tmp_path / "e.xlsx") as book:  # whose sheet no width decides
        pd.DataFrame({"a": [1, 2], "y": [0, 1]}).to_excel(book, sheet_name="first", index=False)
        pd.DataFrame({"b": [1], "c": [2], "y": [0]}).to_excel(book, sheet_name="next", index=False)
    assert read("csv", tmp_path / "e.xlsx", **strict)[0].feature_names == ("a",)


def test_a_form_that_is_given_is_not_looked_for(tmp_path, table_of):
    path = tmp_path / "u.csv"
    path.write_text("a;b,y\n1;2,0\n3;4,1\n", encoding="utf-16-le")
    table, _ = read("csv", path, separator=",", encoding="utf-16-le")
    assert table.feature_names == ("a;b=1;2", "a;b=3;4")
    path.write_text("a b\ty\n1 2\t0\n3 4\t1\n")
    assert read("csv", path, separator="tab")[0].feature_names == ("a b=1 2", "a b=3 4")
    text = "a;y\n1,5;0\n2,5;1\n"
    assert table_of(text).features.flatten().tolist() == [1.5, 2.5]
    assert table_of(text, decimal="point").feature_names == ("a=1,5", "a=2,5")


def test_columns_beside_those_that_are_named_are_told(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,y\n1,2,p\n3,4,q\n")
    table, _ = read("csv", tmp_path / "t.csv", categorical=("a",))
    assert table.notes[-1].startswith("b left out, as no feature in dataset.numeric, dates or")


def test_a_column_of_numbers_with_a_few_texts_is_an_error_that_names_them(tmp_path):
    path = tmp_path / "t.csv"
    cells = [str(i) for i in range(40)]
    cells[6], cells[30] = "unknown", "?"
    path.write_text("age,y\n" + "".join(f"{cell},{i % 2}\n" for i, cell in enumerate(cells)))
    message = r"age .* but for unknown in row 7, \? in row 31: .*missing_values=\[\?, unknown\]"
    refuses(message, read, "csv", path)
    table, _ = read("csv", path, missing_values=("?", "unknown"))
    assert table.feature_names == ("age",)
    assert np.flatnonzero(np.isnan(table.features[:, 0].numpy())).tolist() == [6, 30]
    assert len(read("csv", path, categorical=("age",))[0].feature_names) == 40
    for kind, words in (
        ("numeric", "is numeric but holds unknown in row 7, . in"),
        ("dates", "is of dates but holds 0 in row 1, 1 in row 2"),
    ):
        refuses(f"age of .* {words}", read, "csv", path, **{kind: ("age",)})


def test_an_indicator_says_which_numbers_are_missing(table_csv):
    table, _ = read("csv", table_csv, ignore=("patient", "smokes", "site"), missing="indicator")
    names = ("age", "pressure", "age is missing", "pressure is missing")
    assert (table.feature_names, table.num_numeric) == (names, 2)
    assert table.features[:, 2:].tolist() == [[0, 0], [0, 1], [0, 0], [0, 0]]
    plain, _ = read("csv", table_csv, ignore=("patient", "smokes", "site"))
    assert table.ids.tolist() == plain.ids.tolist()


LABELLED = "age,a,b,found\n50,1,no,['x'; 'y']\n60,0,YES,\n70,1.0,true,y\n40,False,0, z ;x\n"


@pytest.fixture
def labelled(tmp_path):
    path = tmp_path / "labelled.csv"
    path.write_text(LABELLED)
    return path


def test_a_column_per_label_makes_several_labels(labelled):
    table, _ = read("csv", labelled, labels=("b", "a"), ignore=("found",))
    assert table.multi_label
    assert (table.feature_names, table.class_names) == (("age",), ("b", "a"))
    assert table.labels.tolist() == [[0, 1], [1, 0], [1, 1], [0, 0]]
    assert set(table.columns) == {"age", "found"}


def test_a_column_of_lists_makes_several_labels(labelled):
    chosen = {"label_separator": ";", "ignore": ("a", "b")}
    table, _ = read("csv", labelled, **chosen)
    assert table.class_names == ("x", "y", "z")
    assert table.labels.tolist() == [[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 1]]
    named, _ = read("csv", labelled, class_names=("z", "w", "y", "x"), **chosen)
    assert named.labels.tolist() == [[0, 0, 1, 1], [0, 0, 0, 0], [0, 0, 1, 0], [1, 0, 0, 1]]


UNREADABLE_LABELS = [
    ({"labels": ("a", "c")}, "has no column c"),
    ({"labels": ("a", "age")}, "holds 50 .1., 60 .1.*: expected 0 or 1"),
    ({"labels": ("a",)}, "names one column.*set dataset.label=a"),
    ({"labels": ("a", "b"), "label": "found"}, "dataset.label has no effect with dataset.lab"),
    ({"labels": ("a", "b"), "label_separator": ";"}, "dataset.label_separator has no effect"),
    ({"labels": ("a", "b"), "class_names": ("a", "b")}, "dataset.class_names has no effect"),
    ({"labels": ("a", "b"), "numeric": ("a",)}, "dataset.labels, .* holds a more than once"),
    ({"label_separator": ";", "class_names": ("x", "y")}, "label z, which is not in"),
    ({"label": "age", "label_separator": ";", "class_names": ("50",)}, "at least 2"),
]


@pytest.mark.parametrize(("settings", "message"), UNREADABLE_LABELS)
def test_labels_that_cannot_be_read_are_refused(settings, message, labelled):
    refuses(message, read, "csv", labelled, **settings)


FEW_PATTERNS = [(2, {"categorical": ["x"]}), (8, {"task": "regression"})]


@pytest.mark.parametrize(("labels", "settings"), FEW_PATTERNS)
def test_of_few_patterns_a_row_that_is_removed_changes_no_others_id(tmp_path, labels, settings):
    rows = [f"{i % 3},{i % labels}" for i in range(60)]
    ids = []
    for kept in (rows, rows[:7] + rows[8:]):
        (tmp_path / "t.csv").write_text("\n".join(["x,y", *kept]))
        train, _ = read("csv", tmp_path / "t.csv", **settings)
        pairs = zip(train.features.tolist(), train.labels.tolist(), train.ids, strict=True)
        ids.append({(*map(str, pair),) for pair in pairs})
    assert len(ids[0]) == 60
    assert len(ids[0] - ids[1]) == 1
    assert ids[1] < ids[0]


def test_rows_are_numbered_as_in_the_file(tmp_path):
    rows = ["50,", *(f"{40 + i},{i % 2}" for i in range(30)), ",", "inf,1"]
    (tmp_path / "t.csv").write_text("\n".join(["x,y", *rows]))
    refuses("holds inf in row 33: ", read, "csv", tmp_path / "t.csv")
