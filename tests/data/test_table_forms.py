"""Tables as programs and people leave them: read as they are meant, told, or asked about."""

import pandas as pd
import pytest

from fednas_flwr.data.table_files import read_texts
from fednas_flwr.settings.data_settings import TableForm

from ..data_sets import read
from ..refusals import refuses

PLAIN = "age,group,y\n50.5,a,0\n61,b,1\n40,a,1\n"
ROWS = PLAIN.splitlines()
NAMELESS = "has no name and another text or whole number in every row, is left out"


def beside(*cells):
    """The table with one more column before the others."""
    return "\n".join(f"{cell},{row}" for cell, row in zip(cells, ROWS, strict=True))


ALIKE = {  # text of a file, and the note on it
    "blanks after commas": (PLAIN.replace(",", ", "), ""),
    "blanks around labels": (PLAIN.replace(",1\n", ", 1 \n"), ""),
    "a separator after every row": (
        "\n".join([ROWS[0], *(f"{row}," for row in ROWS[1:])]),
        "the separator at the end of every row is left out",
    ),
    "carriage returns": (PLAIN.replace("\n", "\r"), ""),
    "sep=": ("sep=;\n" + PLAIN.replace(",", ";"), "separator semicolon"),
    "a comment": ("# exported 2024, site 3\n" + PLAIN, "the line # exported 2024, site 3"),
    "blanks as separator": (PLAIN.replace(",", "  "), "separator blanks"),
    "a nameless row number": (beside("", "1", "2", "3"), NAMELESS),
    "pandas' row numbers, shuffled": (beside("Unnamed: 0", "1", "2", "0"), NAMELESS),
    "nameless names of rows": (beside("", "car 1", "car 2", "car 3"), NAMELESS),
    "row names that count": (
        beside("rownames", "1", "2", "3"),
        "the first column, rownames, which counts rows, is left out",
    ),
    "rows without a label": (PLAIN + "1.5,b,\n", r"without a label (y) are left out (1: 4)"),
}


@pytest.mark.parametrize(("text", "note"), ALIKE.values(), ids=ALIKE)
def test_forms_of_one_table_are_read_alike(tmp_path, text, note):
    (tmp_path / "plain.csv").write_text(PLAIN)
    (tmp_path / "t.csv").write_text(text, newline="")
    plain, _ = read("csv", tmp_path / "plain.csv")
    other, _ = read("csv", tmp_path / "t.csv")
    assert plain.notes == ()
    assert (note in "".join(other.notes)) if note else not other.notes
    for name in ("feature_names", "class_names"):
        assert getattr(other, name) == getattr(plain, name)
    for name in ("ids", "features"):
        assert getattr(other, name).tolist() == getattr(plain, name).tolist()


DAYS = "".join(f"2021-02-{1 + i % 27:02},{i % 2}\n" for i in range(20))
ASKED = {
    "no header": ("\n".join(ROWS[1:]), r"line \(50.5, a, 0\) looks like a record.*header=true"),
    "names of rows, as R writes them": (
        "\n".join([ROWS[0], *(f"r{i},{row}" for i, row in enumerate(ROWS[1:]))]),
        r"row 1 has 4 cells.*as R writes it.*column_names=\[row, age, group, y\]",
    ),
    "a longer row": (PLAIN + "1,a,1,7\n", "row 4 has 4 cells, but the header 3"),
    "a title": ("Report 7\n" + PLAIN, "row 1 has 3 cells, but the header 1"),
    "a bad date": (f"when,y\n{DAYS}2021-02-30,1\n", "holds dates but for 2021-02-30 in row 21"),
    "a bad date after blanks": (f'when,y\n \n{DAYS}\n2021-02-30,"1"\n', "2021-02-30 in row 23"),
    "two features of one name": ("sex,sex=m,y\nm,1,0\nf,0,1\nm,1,1\n", "2 features the name sex=m"),
}


@pytest.mark.parametrize(("text", "message"), ASKED.values(), ids=ASKED)
def test_what_has_no_one_reading_is_asked_about(table_of, text, message):
    refuses(message, table_of, text)


def test_settings_answer_what_was_asked(table_of):
    rows = "50.5,a,0\n61,b,1\n"
    table = table_of(rows, column_names=["age", "group", "y"])
    assert (len(table), table.feature_names) == (2, ("age", "group=a", "group=b"))
    assert table_of(rows, header=True).feature_names == ("50.5", "a=b")
    named = {"header": True, "column_names": ["row", "age", "y"], "ignore": ["row"]}
    assert table_of("age,y\nr1,50,0\nr2,60,1\n", **named).features[:, 0].tolist() == [50, 60]
    rows = "age,country,y\n1,NA,None\n2,ZA,ill\n3,NA,ill\n"
    table = table_of(rows, missing_in={"country": [], "y": []})
    assert table.feature_names == ("age", "country=NA", "country=ZA")
    assert table.class_names == ("None", "ill")
    rows = "id;pay;y\n1;1.234;0\n2;975;1\n"
    assert table_of(rows, thousands="point").features[0, 1] == 1234
    assert table_of(rows, decimal="point").features[0, 1] == pytest.approx(1.234)


def test_columns_are_renamed_or_refused(table_of):
    rows = "a,b,y\n1,2,0\n3,4,1\n"
    assert table_of(rows, rename={"a": "age"}).feature_names == ("age", "b")
    refuses("rename gives two columns the name b", table_of, rows, rename={"a": "b"})
    refuses("t.csv has no column c", table_of, rows, rename={"c": "d"})


def test_decimal_commas_change_neither_labels_nor_ids_nor_categories(table_of):
    chosen = {"id_column": "who", "categorical": ["ward"], "numeric": ["pay"]}
    rows = "who;pay;ward;found\n1,1;1,5;2,1;1,3\n1,2;2,25;2,2;2\n"
    table = table_of(rows, label_separator=",", **chosen)
    assert table.class_names == ("1", "2", "3")
    assert table.feature_names == ("pay", "ward=2,1", "ward=2,2")
    assert table.features[:, 0].tolist() == [1.5, 2.25]
    assert table.columns["who"].tolist() == ["1,1", "1,2"]


def test_sheets_that_are_not_read_are_named(tmp_path):
    with pd.ExcelWriter(tmp_path / "t.xlsx") as book:
        frame = pd.DataFrame({"age ": [50.5, 61], "y": ["a", "b "]})
        frame.to_excel(book, sheet_name="ward", index=False)
        frame.to_excel(book, sheet_name="codes", index=False)
    table, _ = read("csv", tmp_path / "t.xlsx")
    assert (table.feature_names, table.class_names) == (("age",), ("a", "b"))
    assert table.notes == ("t.xlsx: only the sheet ward is read, not codes",)


def test_cells_and_rows_of_a_sheet_are_those_of_a_csv_file(tmp_path):
    frame = pd.DataFrame({"x": [50.5, None, 3.5, None], "of": ["NA", None, "null", None]})
    frame.to_excel(tmp_path / "t.xlsx", index=False)
    frame.to_csv(tmp_path / "t.csv", index=False)
    paths = (tmp_path / "t.xlsx", tmp_path / "t.csv")
    sheet, file = (read_texts(path, TableForm(), keep_empty=True)[0] for path in paths)
    for name, cells in sheet.items():  # but for empty rows at the end
        assert cells.texts.to_pylist() == file[name][:3].texts.to_pylist()


def test_a_title_with_an_empty_row_below_it_is_left_out(tmp_path):
    rows = pd.DataFrame([["Ward", None, None], [None] * 3, ["x", "of", "y"], [1, 2, 3]])
    rows.to_excel(tmp_path / "t.xlsx", index=False, header=False)
    rows.to_csv(tmp_path / "t.csv", index=False, header=False)
    for name in ("t.xlsx", "t.csv"):
        texts, _, notes = read_texts(tmp_path / name, TableForm())
        assert ([*texts], len(texts["x"])) == (["x", "of", "y"], 1)
        assert notes == ["the line Ward before the header is left out"]
