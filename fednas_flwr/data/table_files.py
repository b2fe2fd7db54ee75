"""Tables as text: CSV in any common form, Excel, Parquet; only missing cells are interpreted.

What is not said of a file is found in it, and told as a note: separator, encoding, decimal sign.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fednas_flwr.errors import ConfigError

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".xlsx", ".parquet")
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

Texts = dict[str, np.ndarray]  # by column, one str per row; empty where missing


@dataclass(frozen=True)
class Form:
    """Format of a CSV file; None is found in the file.

    Attributes:
        separator: Between cells, one character.
        encoding: As Python names it.
        decimal: ``point`` or ``comma``.
        missing_values: Texts that mean that a cell is missing, besides empty cells and pandas' own
            (NA, null, nan, ...).
    """

    separator: str | None = None
    encoding: str | None = None
    decimal: str | None = None
    missing_values: Sequence[str] = ()


def suffix_of(path: Path) -> str:
    """Return the suffix by which a table is read, one of ``SUFFIXES``, or an empty text."""
    return next((s for s in SUFFIXES if path.name.lower().endswith(s)), "")


def read_texts(path: Path, form: Form) -> tuple[Texts, tuple[str, ...]]:
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
    if len(table) == 0:
        raise ConfigError(f"dataset.root={path} has no rows: give a table with a header.")
    texts = texts_of(table)
    for column in texts.values() if form.missing_values else ():
        column[np.isin(column.astype(np.str_), list(form.missing_values))] = ""
    return texts, notes


def texts_of(table: Any) -> Texts:
    """Return a DataFrame's cells as text: whole numbers without a point, empty where missing."""
    return {str(name): _texts(table[name]) for name in table.columns}


def _texts(values: Any) -> np.ndarray:
    import pandas as pd

    if pd.api.types.is_datetime64_any_dtype(values):
        values = values.dt.strftime("%Y-%m-%dT%H:%M:%S")
    elif pd.api.types.is_float_dtype(values):
        return np.array([_number_text(value) for value in values.tolist()], dtype=object)
    missing = values.isna().to_numpy()
    texts = np.array([str(value) for value in values.tolist()], dtype=object)
    texts[missing] = ""
    return texts


def _number_text(value: float) -> str:
    import pandas as pd

    if pd.isna(value):
        return ""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(value)


def _read_binary(path: Path) -> Any:
    import pandas as pd

    if suffix_of(path) == ".parquet":
        return pd.read_parquet(path)
    return pd.read_excel(path)


def _read_csv(path: Path, form: Form) -> tuple[Any, tuple[str, ...]]:
    import pandas as pd

    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        content = file.read()
    encoding = form.encoding or _encoding(content)
    text = content.decode(encoding).removeprefix("\ufeff")
    if "\0" in text:
        raise ValueError("it holds NUL characters, as no text does")
    separator = form.separator or _separator(text)

    table = pd.read_csv(io.StringIO(text), dtype=str, sep=separator)
    has_commas = separator != "," and _has_decimal_commas(table)
    decimal = form.decimal or ("comma" if has_commas else "point")
    if decimal == "comma":
        table = table.replace(f"^{_COMMA_NUMBER}$", r"\1.\2", regex=True)
    found = {
        f"separator {SEPARATORS.get(separator, separator)}": separator != ",",
        f"encoding {encoding}": encoding not in ("utf-8", "utf-8-sig"),
        "decimal comma": decimal == "comma",
    }
    unusual = [note for note, holds in found.items() if holds]
    return table, (f"{path.name}: {', '.join(unusual)}",) if unusual else ()


def _encoding(content: bytes) -> str:
    """Return what a file's mark says; else UTF-8, or Windows' Western code if it is none."""
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


def numbers_of(texts: np.ndarray) -> np.ndarray:
    """Return float64 ``[N]``, NaN where a text is missing or no number."""
    import pandas as pd

    numbers: np.ndarray = pd.to_numeric(pd.Series(texts), errors="coerce").to_numpy(dtype=float)
    return numbers


def days_of(texts: np.ndarray) -> np.ndarray:
    """Return days since 1970, float64 ``[N]``, NaN where a text is missing or no date.

    Dates are ``2024-05-31``, with or without a time, or ``31.5.2024``.
    """
    import pandas as pd

    found = pd.Series(texts)
    iso = found.str.fullmatch(r"\d{4}-\d{2}-\d{2}([T ]\d{2}:\d{2}(:\d{2}(\.\d+)?)?)?")
    dotted = found.str.fullmatch(r"\d{1,2}\.\d{1,2}\.\d{4}")
    days = np.full(len(texts), np.nan)
    for rows, form in ((iso, "ISO8601"), (dotted, "%d.%m.%Y")):
        chosen = rows.to_numpy(dtype=bool)
        if chosen.any():
            times = pd.to_datetime(found[chosen], format=form, errors="coerce")
            since = (times - pd.Timestamp(0)) / pd.Timedelta(days=1)
            days[chosen] = since.to_numpy(dtype=float)
    return days


def rows_text(texts: np.ndarray, rows: np.ndarray, *, most: int = 10) -> str:
    """Return cells with their rows, from 1, for a message: ``yes in row 1, no in row 3``."""
    told = [f"{texts[row]} in row {int(row) + 1}" for row in rows[:most]]
    return ", ".join(told) + (f" and {len(rows) - most} more" if len(rows) > most else "")


def check_columns(texts: Mapping[str, np.ndarray], names: Sequence[str], *, where: str) -> None:
    """Raise ConfigError for a column that a table lacks."""
    for name in names:
        if name not in texts:
            raise ConfigError(f"{where} has no column {name}: it has {', '.join(texts)}.")
