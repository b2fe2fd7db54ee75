"""Columns of a file are read at once, and each cell is as if it were read by itself."""

import csv

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.data import table_files
from fednas_flwr.data.cells import Cells, number_of
from fednas_flwr.settings.data_settings import ANY_FORM


@given(st.lists(st.text("0123456789.eE+-_ n\n\u0661", max_size=6) | st.floats().map(repr)))
def test_numbers_are_read_each_by_itself(texts):
    alone = [number_of(text) for text in texts]
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
