"""Tables as text: CSV in any common form, Excel, Parquet; only missing cells are interpreted.

What is not said of a file is found in it, and noted: separator, encoding, lines before the header.
What has two readings is asked for. How numbers and dates are written is for
:mod:`fednas_flwr.data.notation`.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.notation import PLAIN, Notation, Stored, are_numbers, code_key, numbers_of
from fednas_flwr.settings.data_settings import TableForm
from fednas_flwr.settings.names import MISSING_WORDS, TABLE_SUFFIXES

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar", " ": "blanks"}
_MARKS = {  # the longer ones first: that of UTF-32 begins like that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?', re.IGNORECASE)  # as Excel reads and writes it
_LINES, _SAMPLE = 20, 100_000  # the separator is found in so many lines, of so many characters
_LONGEST = 200  # characters of a name by which records are divided

Texts = dict[str, np.ndarray]  # by column, one str per row; empty where missing


def suffix_of(path: Path) -> str:
    """Suffix by which a table is read, one of ``TABLE_SUFFIXES``, or an empty text."""
    return next((s for s in TABLE_SUFFIXES if path.name.lower().endswith(s)), "")


def read_texts(path: Path, form: TableForm) -> tuple[Texts, str, list[str]]:
    """Cells of a table's file as text, by column, its separator if it has one, and notes.

    Blanks around cells and names of columns do not count.

    Raises:
        ConfigError: The file cannot be read as a table, has no rows, or has two readings.
    """
    kind = {".xlsx": "an Excel", ".parquet": "a Parquet"}.get(suffix_of(path), "a CSV")
    try:
        if kind == "a CSV":
            table, separator, notes = _read_csv(path, form)
        else:
            separator = ""
            table, notes = (_read_excel if kind == "an Excel" else _read_parquet)(path, form)
    except (OSError, EOFError, ValueError, ImportError, LookupError, csv.Error) as error:
        raise ConfigError(
            f"dataset.root={path} cannot be read as {kind} table: {' '.join(str(error).split())}."
        ) from error
    if len(table) == 0 and not form.strict:
        raise ConfigError(f"dataset.root={path} has no rows: give a table with a header.")
    texts = texts_of(table, where=str(path))
    return texts, separator, notes


def without_missing(texts: Texts, form: TableForm) -> Texts:
    """The cells under their new names, with an empty text where they say that they are missing.

    Raises:
        ConfigError: Two columns would have one name.
    """
    usual = {*MISSING_WORDS, *form.missing_values}
    renamed: Texts = {}
    for name, cells in texts.items():
        new = form.rename.get(name, name)
        if new in renamed:
            raise ConfigError(
                f"dataset.rename gives two columns the name {new}: choose another for {name}."
            )
        renamed[new] = cells
    for name, cells in renamed.items():
        cells[among(cells, form.missing_in.get(name, usual))] = ""
    return renamed


def in_common_form(texts: Texts, form: TableForm, numbers: Collection[str], *, where: str) -> Texts:
    """The cells with plain numbers, other spellings and units as a form says.

    Args:
        texts: Cells by column.
        form: With its ``decimal`` and ``thousands`` known.
        numbers: Columns of numbers.
        where: Where the cells come from, for messages.

    Raises:
        ConfigError: A cell to be scaled is no number.
    """
    notation = notation_of(form)
    changed = dict(texts)
    for name in numbers if notation != PLAIN else ():
        changed[name] = _each(texts[name], notation.plain)
    for name in form.map.keys() & texts.keys():
        changed[name] = _each(changed[name], _respelled(form.map[name]))
    for name in form.scale.keys() & texts.keys():
        values = numbers_of(changed[name]) * form.scale[name]
        wrong = np.flatnonzero(np.isnan(values) & (changed[name] != ""))
        if len(wrong) and not form.strict:
            raise ConfigError(
                f"dataset.scale.{name} does not fit {where}, which holds "
                f"{rows_text(texts[name], wrong)}: expected numbers."
            )
        scaled = [repr(v) for v in values.tolist()]
        changed[name] = np.where(np.isnan(values), changed[name], np.array(scaled, dtype=object))
    return changed


def _respelled(spellings: Mapping[str, str]) -> Callable[[str], str]:
    key = code_key(list(spellings))
    others = {key(text): other for text, other in spellings.items()}
    return lambda text: others.get(key(text), text)


def _each(cells: np.ndarray, change: Callable[[str], str]) -> np.ndarray:
    return np.array([change(text) for text in cells.tolist()], dtype=object)


def notation_of(form: TableForm) -> Notation:
    """Notation of the numbers in a file; plain where nothing is known."""
    return Notation(form.decimal or "point", form.thousands or "none")


def texts_of(table: Any, *, where: str = "the DataFrame") -> Texts:
    """Return a DataFrame's cells as text: whole numbers without a point, empty where missing.

    Raises:
        ConfigError: Two columns have the same name.
    """
    names = [" ".join(str(name).split()) for name in table.columns]
    for name, number in Counter(names).items():
        if number > 1:
            raise ConfigError(f"{where} has {number} columns {name}: give each a name of its own.")
    return {name: _texts(table.iloc[:, i]) for i, name in enumerate(names)}


def _texts(values: Any) -> np.ndarray:
    import pandas as pd

    if pd.api.types.is_datetime64_any_dtype(values):  # in numpy's form, which has all years
        moments = values.dt.tz_localize(None).to_numpy().astype("datetime64[s]")
        texts: np.ndarray = np.datetime_as_string(moments).astype(object)
    else:
        texts = np.array([_text(value) for value in values.tolist()], dtype=object)
    texts[values.isna().to_numpy()] = ""
    return texts


def _text(value: Any) -> str:
    """Return one cell, whatever the others of its column are."""
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="seconds")
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e15
        return Stored(int(value) if whole else repr(float(value)))
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return Stored(value) if is_number else str(value)


def _read_parquet(path: Path, form: TableForm) -> tuple[Any, list[str]]:
    """Return cells as they are stored: no type of a column is inferred from its cells."""
    import pyarrow as pa
    from pyarrow import parquet

    table = parquet.read_table(path)
    for i, field in enumerate(table.schema):
        if pa.types.is_date(field.type):  # Python has no years beyond 9999
            table = table.set_column(i, field.name, table[i].cast(pa.string()))
    frame = table.to_pandas(integer_object_nulls=True)  # a float has none beyond 2^53
    named = [name for name in frame.index.names if name is not None]
    return (frame.reset_index(named) if named else frame), []


def _read_excel(path: Path, form: TableForm) -> tuple[Any, list[str]]:
    """Return the cells of the first sheet as they are stored, and what is left out."""
    import pandas as pd

    with pd.ExcelFile(path) as book:
        first, *others = book.sheet_names
        table = pd.read_excel(book, first, dtype=object, header=None)
    named, notes = _named(table.dropna(how="all").dropna(how="all", axis=1), form)
    if others:
        notes.append(f"only the sheet {first} is read, not {', '.join(map(str, others))}")
    return named, notes


def _read_csv(path: Path, form: TableForm) -> tuple[Any, str, list[str]]:
    import pandas as pd

    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        content = file.read()
    encoding = form.encoding or _encoding(content)
    text = content.decode(encoding).removeprefix("\ufeff")
    if "\0" in text and not form.strict:
        raise ValueError("it holds NUL characters, as no text does")
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text, separator, notes = _without_preamble(text, form)
    if form.header and form.column_names:  # which may be more, as of rows that have names
        text = text.partition("\n")[2]
    if form.strict:
        _check_widths(text, separator)
    try:
        table = _cells(text, separator)
    except pd.errors.ParserError:
        table = _without_last_separator(text, separator)
        notes.append("the separator at the end of every row is left out")
    if not form.strict and (table.iloc[:, -1] == "").any():
        _check_widths(text, separator)  # pandas fills a short row with empty cells
    found = {
        f"separator {SEPARATORS.get(separator, separator)}": separator != ",",
        f"encoding {encoding}": encoding not in ("utf-8", "utf-8-sig"),
    }
    named, more = _named(table, form)
    return named, separator, [note for note, holds in found.items() if holds] + notes + more


def _cells(text: str, separator: str, width: int | None = None) -> Any:
    """All cells, the header among them, as text; rows may be shorter than the first, not longer."""
    import pandas as pd

    return pd.read_csv(
        io.StringIO(text),
        sep=r"\s+" if separator == " " else separator,
        header=None,
        names=None if width is None else range(width),
        dtype=str,
        na_filter=False,
        skipinitialspace=True,
    )


def _without_preamble(text: str, form: TableForm) -> tuple[str, str, list[str]]:
    """The text from its header on, its separator, and notes on the lines before."""
    separator, notes = form.separator, []
    first, _, rest = text.partition("\n")
    if stated := _SEPARATOR_LINE.fullmatch(first.strip()):
        text, separator = rest, separator or stated[1]
    while text.startswith("#") and not form.column_names:
        first, _, rest = text.partition("\n")
        found = separator or _separator(rest, form)
        cells, width = (len(next(_rows(t, found), [])) for t in (first, rest))
        if cells == width > 1:  # a header, as of "#chromosome,start,end"
            break
        text = rest
        notes.append(f"the line {first.strip()[:60]} before the header is left out")
    return text, separator or _separator(text, form), notes


def _rows(text: str, separator: str) -> Iterator[list[str]]:
    """Rows of cells; blank lines are none."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    lines = io.StringIO(text, newline="")
    spaced = separator == " "
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    for row in reader:
        cells = [cell for cell in row if cell] if spaced else row
        if len(cells) > 1 or "".join(cells).strip():
            yield cells


def _check_widths(text: str, separator: str) -> None:
    """Raise ValueError for an open quote, or a row of another number of cells than the first."""
    number, width = -1, 0
    try:
        for number, row in enumerate(_rows(text, separator)):
            width = width or len(row)
            if len(row) != width:
                raise ValueError(f"row {number} has {len(row)} cells, but the header {width}")
    except csv.Error as error:
        raise ValueError(f"a quote in row {number + 1} is open ({error})") from error


def _without_last_separator(text: str, separator: str) -> Any:
    """The cells where every row but the header ends with a separator.

    Raises:
        ValueError: It is otherwise that rows are longer than the header.
    """
    try:
        _check_widths(text, separator)
        raise ValueError("its rows differ in length")
    except ValueError as differ:
        header, *rows = _rows(text, separator)
        if any(len(row) != len(header) + 1 for row in rows):
            raise
        if any(row[-1] for row in rows):
            names = ", ".join(["row", *header])
            raise ValueError(
                f"{differ}: if the first cell of a row is its name, as R writes it, set "
                f"dataset.column_names=[{names}] and dataset.header=true; else correct the header"
            ) from None
    return _cells(text, separator, len(header) + 1).iloc[:, :-1]


def _named(table: Any, form: TableForm) -> tuple[Any, list[str]]:
    """A table whose columns have names, without the row of names, and notes on names."""
    notes = []
    first = [str(cell).strip() if cell == cell else "" for cell in table.iloc[0].tolist()]
    named = not form.column_names or (not form.strict and set(first) <= {*form.column_names})
    rows = table.iloc[1:] if named else table
    names = list(form.column_names) or [" ".join(name.split()) for name in first]
    if len(names) != table.shape[1]:
        raise ValueError(
            f"dataset.column_names has {len(names)} names for {table.shape[1]} columns"
        )
    asks = form.header is None and not form.column_names and not form.strict
    if asks and _like_a_record(first, rows):
        raise ValueError(
            f"its first line ({', '.join(first[:5])}) looks like a record: if it is one, name the "
            "columns by dataset.column_names=[...]; if it is the header, set dataset.header=true"
        )
    taken: dict[str, int] = {}
    for i, name in enumerate(names):
        name = name or f"column {i + 1}"
        number = taken.setdefault(name, 0)
        taken[name] += 1
        while number and (other := f"{name}.{number}") in names:
            number += 1
        names[i] = other if number else name
        if number:
            notes.append(f"a further column {name} is called {other}")
    rows.columns = names
    return rows, notes


def _like_a_record(first: Sequence[str], rows: Any) -> bool:
    """Return whether each cell of a first row fits its own column, as names do not."""
    sample = rows.head(1000)
    for i, cell in enumerate(first):
        column = np.array([_text(value) for value in sample.iloc[:, i].tolist()], dtype=object)
        column = column[~among(column, ("", *MISSING_WORDS))]
        if not len(column):
            continue
        numbers = are_numbers([cell, *column.tolist()])
        if not (numbers.all() or (cell in column and not numbers[1:].all())):
            return False
    return bool(len(sample))


def _encoding(content: bytes) -> str:
    """Encoding by a file's mark; else UTF-8, or Windows' Western code if it is none."""
    for mark, encoding in _MARKS.items():
        if content.startswith(mark):
            return encoding
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return "cp1252"
    return "utf-8"


def _separator(text: str, form: TableForm) -> str:
    """Return the separator that cuts the first rows into most cells, all alike; else a comma.

    Where rows must not decide, the header alone does.
    """
    lines = 1 if form.strict else _LINES

    sample = "\n".join(text[:_SAMPLE].split("\n", lines)[:lines])

    def cells(separator: str) -> tuple[float, int]:
        try:
            rows = list(_rows(sample, separator))
        except csv.Error:
            return 0, 0
        (width, often), *_ = Counter(map(len, rows)).most_common(1) or [(0, 0)]
        return (often / len(rows) if width > 1 else 0, width)

    best = max((s for s in SEPARATORS if s != " "), key=cells)
    return best if cells(best)[0] or not cells(" ")[0] else " "


def among(texts: np.ndarray, values: Collection[str]) -> np.ndarray:
    """Return which texts are among some values, bool ``[N]``."""
    chosen = set(values)
    return np.array([text in chosen for text in texts.tolist()], dtype=bool)


def names_in(texts: Texts, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the columns by which records can be divided: strings, none of them long."""
    short = [n for n in columns if max(map(len, texts[n]), default=0) <= _LONGEST]
    return {name: texts[name].astype(np.str_) for name in short}


def rows_text(texts: np.ndarray, rows: np.ndarray, *, most: int = 10) -> str:
    """Return cells with their rows, from 1, for a message: ``yes in row 1, no in row 3``."""
    cells = [f"{texts[row]} in row {int(row) + 1}" for row in rows[:most]]
    return ", ".join(cells) + (f" and {len(rows) - most} more" if len(rows) > most else "")


def check_columns(texts: Mapping[str, np.ndarray], names: Sequence[str], *, where: str) -> None:
    """Raise ConfigError for a column that a table lacks."""
    for name in names:
        if name not in texts:
            raise ConfigError(f"{where} has no column {name}: it has {', '.join(texts)}.")
