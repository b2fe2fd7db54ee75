"""Tables as text: CSV in any common form, Excel, Parquet; only missing cells are interpreted.

What is not said of a file is found in it, and noted: separator, encoding, decimal sign.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import math
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from fednas_flwr.base.errors import ConfigError, listed
from fednas_flwr.settings.data_settings import TableForm
from fednas_flwr.settings.names import TABLE_SUFFIXES

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
_MARKS = {  # the longer ones first: that of UTF-32 begins like that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_COMMA_NUMBER = r"([+-]?\d+),(\d+(?:[eE][+-]?\d+)?)"
_POINT_NUMBER = r"[+-]?\d*\.\d+(?:[eE][+-]?\d+)?"
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?)?", re.ASCII)
_DOTTED_DATE = re.compile(r"\d{1,2}\.\d{1,2}\.\d{4}", re.ASCII)
_EPOCH = datetime(1970, 1, 1)
_LONGEST = 200  # characters of a name by which records are divided

Texts = dict[str, np.ndarray]  # by column, one str per row; empty where missing


# What is not said of a file is found in it.
ANY_FORM = TableForm(None, None, None, [], "refuse")


def suffix_of(path: Path) -> str:
    """Suffix by which a table is read, one of ``TABLE_SUFFIXES``, or an empty text."""
    return next((s for s in TABLE_SUFFIXES if path.name.lower().endswith(s)), "")


def read_texts(path: Path, form: TableForm) -> tuple[Texts, tuple[str, ...]]:
    """Return the cells of a table's file as text, by column, and notes on what was found.

    Raises:
        ConfigError: The file cannot be read as a table, or has no rows.
    """
    notes: tuple[str, ...] = ()
    try:
        if suffix_of(path) in (".xlsx", ".parquet"):
            table = _read_binary(path)
        else:
            table, notes = _read_csv(path, form)
    except (OSError, EOFError, ValueError, ImportError, LookupError, csv.Error) as error:
        kind = {".xlsx": "an Excel", ".parquet": "a Parquet"}.get(suffix_of(path), "a CSV")
        raise ConfigError(
            f"dataset.root={path} cannot be read as {kind} table: {' '.join(str(error).split())}."
        ) from error
    if len(table) == 0 and not form.strict:
        raise ConfigError(f"dataset.root={path} has no rows: give a table with a header.")
    texts = texts_of(table)
    for column in texts.values() if form.missing_values else ():
        column[among(column, form.missing_values)] = ""
    return texts, notes


def texts_of(table: Any) -> Texts:
    """Return a DataFrame's cells as text: whole numbers without a point, empty where missing."""
    return {str(name): _texts(table[name]) for name in table.columns}


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
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="seconds")
    if isinstance(value, float):
        whole = value.is_integer() and abs(value) < 1e15
        return str(int(value)) if whole else repr(float(value))
    return str(value)


def _read_binary(path: Path) -> Any:
    """Return cells as they are stored: no type of a column is inferred from its cells."""
    import pandas as pd

    if suffix_of(path) != ".parquet":
        return pd.read_excel(path, dtype=object)
    import pyarrow as pa
    from pyarrow import parquet

    table = parquet.read_table(path)
    for i, field in enumerate(table.schema):
        if pa.types.is_date(field.type):  # Python has no years beyond 9999
            table = table.set_column(i, field.name, table[i].cast(pa.string()))
    return table.to_pandas(integer_object_nulls=True)  # a float has no whole numbers beyond 2^53


def _read_csv(path: Path, form: TableForm) -> tuple[Any, tuple[str, ...]]:
    import pandas as pd

    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        content = file.read()
    encoding = form.encoding or _encoding(content)
    text = content.decode(encoding).removeprefix("\ufeff")
    if "\0" in text and not form.strict:
        raise ValueError("it holds NUL characters, as no text does")
    separator = form.separator or _separator(text)

    if form.strict:
        _check_form(text, separator)
    table = pd.read_csv(io.StringIO(text), dtype=str, sep=separator)
    has_commas = separator != "," and _has_decimal_commas(table)
    decimal = form.decimal or ("comma" if has_commas else "point")
    if decimal == "comma":
        table = table.replace(f"^{_COMMA_NUMBER}$", r"\1.\2", regex=True)
    remarks = {
        f"separator {SEPARATORS.get(separator, separator)}": separator != ",",
        f"encoding {encoding}": encoding not in ("utf-8", "utf-8-sig"),
        "decimal comma": decimal == "comma",
    }
    unusual = [note for note, holds in remarks.items() if holds]
    return table, (f"{path.name}: {', '.join(unusual)}",) if unusual else ()


def _check_form(text: str, separator: str) -> None:
    """Raise ValueError for an open quote, or a row of another number of cells than the header."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    widths: list[int] = []
    try:
        for row in reader:
            if len(row) > 1 or "".join(row).strip():
                widths.append(len(row))
    except csv.Error as error:
        raise ValueError(f"a quote in row {len(widths)} is open ({error})") from error
    for number, width in enumerate(widths):
        if width != widths[0]:
            raise ValueError(f"row {number} has {width} cells, but the header {widths[0]}")


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


def _separator(text: str) -> str:
    """Return the separator that cuts the header into most cells; a comma where none does."""
    header = text.split("\n", 1)[0]
    cells = {s: len(next(csv.reader([header], delimiter=s), [])) for s in SEPARATORS}
    return max(cells, key=lambda s: cells[s])


def _has_decimal_commas(table: Any) -> bool:
    """Return whether there are numbers with a comma and none with a point."""

    def any_of(pattern: str) -> bool:
        return any(table[name].dropna().str.fullmatch(pattern).any() for name in table.columns)

    return any_of(_COMMA_NUMBER) and not any_of(_POINT_NUMBER)


def among(texts: np.ndarray, values: Collection[str]) -> np.ndarray:
    """Return which texts are among some values, bool ``[N]``."""
    chosen = set(values)
    return np.array([text in chosen for text in texts.tolist()], dtype=bool)


def numbers_of(texts: np.ndarray) -> np.ndarray:
    """Return float64 ``[N]``, each of its own text: NaN where it is missing or no number."""
    return np.array([_number(text) for text in texts.tolist()], dtype=float)


def _number(text: str) -> float:
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def days_of(texts: np.ndarray) -> np.ndarray:
    """Return days since 1970, float64 ``[N]``, NaN where a text is missing or no date.

    Dates are ``2024-05-31``, with or without a time, or ``31.5.2024``, of the years 1 to 9999.
    """
    return np.array([_days(text) for text in texts.tolist()], dtype=float)


def _days(text: str) -> float:
    if _DOTTED_DATE.fullmatch(text):
        text = "-".join(part.zfill(2) for part in reversed(text.split(".")))
    try:
        is_date = _ISO_DATE.fullmatch(text)
        return (datetime.fromisoformat(text) - _EPOCH) / timedelta(days=1) if is_date else math.nan
    except ValueError:
        return math.nan


def names_in(texts: Texts, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the columns by which records can be divided: strings, none of them long."""
    short = [n for n in columns if max(map(len, texts[n]), default=0) <= _LONGEST]
    return {name: texts[name].astype(np.str_) for name in short}


def rows_text(texts: np.ndarray, rows: np.ndarray, *, most: int = 10) -> str:
    """Return cells with their rows, from 1, for a message: ``yes in row 1, no in row 3``."""
    return listed((f"{texts[row]} in row {int(row) + 1}" for row in rows), most)


def check_columns(texts: Mapping[str, np.ndarray], names: Sequence[str], *, where: str) -> None:
    """Raise ConfigError for a column that a table lacks."""
    for name in names:
        if name not in texts:
            raise ConfigError(f"{where} has no column {name}: it has {', '.join(texts)}.")
