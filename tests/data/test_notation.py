"""Numbers, dates and codes as people write them: one reading, or a question.

Columns of a file are read at once, and each cell is as if it were read by itself.
"""

import csv
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data import notation, table_files
from fednas_flwr.data.notation import PLAIN, Cells, Notation, days_of, distinct, find_notation
from fednas_flwr.settings.data_settings import ANY_FORM
from fednas_flwr.settings.names import DECIMALS, THOUSANDS

SIGNS = {"none": "", "point": ".", "comma": ",", "blank": " ", "apostrophe": "'"}
NOTATIONS = [Notation(d, t) for d in DECIMALS for t in THOUSANDS if d != t]


def cells(*texts):
    return Cells(texts)


def found(*columns, points_are_decimal=True, **given):
    named = {f"c{i}": column for i, column in enumerate(columns)}
    separator = "," if points_are_decimal else ";"
    return find_notation(named, replace(ANY_FORM, **given), separator, where="t.csv")


def written(number, notation):
    signs = {",": SIGNS[notation.thousands], ".": SIGNS[notation.decimal]}
    return "".join(signs.get(sign, sign) for sign in f"{number:,.2f}")


@pytest.mark.parametrize("notation", NOTATIONS, ids=str)
@given(number=st.floats(-1e9, 1e9))
def test_a_number_is_read_as_it_was_written(notation, number):
    text = written(number, notation)
    assert notation.reads(text)
    assert float(notation.plain(text)) == float(f"{number:.2f}")


@pytest.mark.parametrize("notation", NOTATIONS, ids=str)
def test_a_notation_is_found(notation):
    column = cells(*(written(x, notation) for x in (1234567.25, 12.5, -3.75, 1000)), "")
    assert found(column) == notation
    assert found(column, cells("7", "12", "", "0", "5")) == notation


TWO_READINGS = [
    (["1,234", "975"], True, "dataset.thousands=comma or dataset.decimal=comma"),
    (["1.234", "975"], False, "dataset.thousands=point or dataset.decimal=point"),
]


@pytest.mark.parametrize(("column", "points_are_decimal", "settings"), TWO_READINGS)
def test_two_readings_are_asked_for(column, points_are_decimal, settings):
    with pytest.raises(ConfigError, match=f"two readings: {column[0]} in column c0 .*{settings}"):
        found(cells(*column), points_are_decimal=points_are_decimal)
    assert found(cells(*column), decimal="comma", thousands="point") == Notation("comma", "point")
    assert found(cells("1.234", "975")) == PLAIN
    assert found(cells("1,234", "975"), cells("1,234.5")).thousands == "comma"


def test_columns_in_two_notations_are_refused():
    with pytest.raises(ConfigError, match="column c1 .1,5. in another way than those of c0"):
        found(cells("1.25", "2.5"), cells("1,5", "2,25"))
    assert found(cells("a,b", "c"), cells("1.5")) == PLAIN
    assert found(Cells(["1.234", "975"], np.array([True, True])), points_are_decimal=False) == PLAIN


def test_dates():
    texts = cells("2024-05-31", "2024-05-31T12:00:00+01:00", "2024-05-31 12:00Z", "31.5.2024", "")
    day = days_of(cells("2024-05-31"), None)[0]
    assert days_of(texts, None)[:4].tolist() == [day, day + 0.5, day + 0.5, day]
    assert math.isnan(days_of(texts, None)[4])
    for order, text in (("day_first", "31/5/2024"), ("month_first", "05/31/2024")):
        assert notation.find_order({"when": cells(text, "1/2/2024")}, where="t.csv") == order
        assert days_of(cells(text), order).tolist() == [day]
        assert math.isnan(days_of(cells(text), None)[0])
    assert notation.find_order({"a": cells("1/2", "x")}, where="t.csv") is None
    for column in (cells("1/2/2024"), cells("31/5/2024", "5/31/2024")):
        with pytest.raises(ConfigError, match="two readings: set dataset.date_order="):
            notation.find_order({"when": column}, where="t.csv")
    for text in ("2021-02-30", "0000-01-01", "31/5/2024", "12:00", "2024-5-3"):
        assert math.isnan(days_of(cells(text), None)[0])


def test_codes_that_mean_the_same_are_one():
    assert distinct(["1.0", "2", "1", "2.0", ""]) == ("1", "2")
    assert distinct(["True", "TRUE", "false"]) == ("TRUE", "false")
    assert distinct(["01", "1", "2"]) == ("01", "1", "2")
    assert distinct(["01", "02"]) == ("01", "02")
    assert distinct(["yes", "Yes"]) == ("Yes", "yes")
    key = notation.code_key(("01", "02"))
    assert key("1.0") == key("01") != key("02")
    key = notation.code_key(("0", "0.0"))  # declared as two
    assert key("0") != key("0.0")


# --- cells


@given(st.lists(st.text("0123456789.eE+-_ n\n\u0661", max_size=6) | st.floats().map(repr)))
def test_numbers_are_read_each_by_itself(texts):
    alone = [notation.number_of(text) for text in texts]
    np.testing.assert_array_equal(Cells(texts).numbers, np.array(alone, dtype=float))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20), st.integers(0, 25))
def test_numbers_of_a_whole_column_are_those_of_python(numbers, digits):
    texts = [f(x) for x in numbers for f in (repr, f"{{:.{digits}f}}".format, "{:+.20e}".format)]
    column = Cells([*texts, ""])
    assert column.are_plain
    assert column.numbers[:-1].tolist() == list(map(float, texts))


def test_what_is_asked_of_a_text_is_asked_of_every_cell():
    column = Cells(["b", "", "a", "b"], np.array([False, False, True, False]))
    assert column.missing.tolist() == [False, True, False, False]
    assert column.each(len, int).tolist() == [1, 0, 1, 1]
    assert column.changed(str.upper).tolist() == ["B", "", "A", "B"]
    assert column.changed(str.upper, but_stored=True).tolist() == ["B", "", "a", "B"]
    assert column[column.missing].tolist() == [""]
    assert column.written.tolist() == ["b", "", "b"]
    assert column.without(["a"]).different == ["b"]
    assert Cells(["-9.0", "-9.5", "-9"]).without(["-9.00"]).different == ["-9.5"]
    assert Cells([" a\u00a0", "\t", "1"]).stripped().tolist() == ["a", "", "1"]


CELL = st.text("ab01.,\"\n '#;\u00e4", max_size=4)


@given(st.lists(st.lists(CELL, min_size=3, max_size=3), min_size=1, max_size=6), st.booleans())
def test_an_even_file_is_read_as_any_other(tmp_path_factory, rows, is_quoted):
    path = tmp_path_factory.mktemp("tables") / "t.csv"
    quoting = csv.QUOTE_ALL if is_quoted else csv.QUOTE_MINIMAL
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=quoting).writerows([["x", "y", "z"], *rows])

    def read():
        try:
            texts, *more = table_files.read_texts(path, ANY_FORM)
        except ValueError as error:
            return str(error)
        return {name: cells.tolist() for name, cells in texts.items()}, more

    found = read()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_files, "_even_columns", lambda *_: None)
        assert read() == found
