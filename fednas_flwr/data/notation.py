"""Cells of a table's column as text, and the notation of numbers, dates and codes in them.

Each distinct text is examined once for all cells that have it (:meth:`Cells.each`), and plain
numbers are read all at once, so that a table of millions of rows takes seconds.

:func:`find_notation` and :func:`find_order` decide from all cells of a file on decimal signs,
thousands, and the order of day and month; an error asks the user if two readings remain. The result
is kept with the model, which reads files in the same way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Annotated, Any

import numpy as np

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings.data_settings import TableForm
from fednas_flwr.settings.names import DATE_ORDERS, DECIMALS, THOUSANDS
from fednas_flwr.settings.parser import Checked, OneOf

NEARLY = 0.9  # from this share of numbers or dates on, a column's other texts count as mistakes
_SIGNS = {
    "none": "",
    "point": r"\.",
    "comma": ",",
    "blank": "[ \u00a0\u2009\u202f]",
    "apostrophe": "['\u2019]",
}
_FIRST = 1000  # cells that mostly suffice to find the notation
_THOUSAND_POINTS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+", re.ASCII)
_TIME = r"(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?"
_ISO_DATE = re.compile(rf"(\d{{4}}-\d{{2}}-\d{{2}}{_TIME})(?:Z|[+-]\d{{2}}:?\d{{2}})?", re.ASCII)
_DOTTED_DATE = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{4})", re.ASCII)
_YEAR_FIRST = re.compile(r"(\d{4})/(\d{1,2})/(\d{1,2})(?!\d)", re.ASCII)
_SLASHED_DATE = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})", re.ASCII)
AFFIXED = re.compile(  # as 80%, $1,200, <0.5, 3 days, 12:30, 1/2/24, May 31, 2024 and USD 5
    r"(?i)((jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec|mon|tue|wed|thu|fri|sat|sun)[a-z]*\W+"
    r"|([a-z]{3}|rs|kr)\.? |(us|r)\$ ?)*[^A-Za-z\d]{0,2}\d"
)
YES_NO = {  # meaning of words and numbers for yes and no, in small letters
    **dict.fromkeys(("yes", "y", "true", "1", "1.0", "j", "ja"), "yes"),
    **dict.fromkeys(("no", "n", "false", "0", "0.0", "nein"), "no"),
}
_EPOCH = datetime(1970, 1, 1)


def number_of(text: str) -> float:
    """Return the number in a text in plain notation, NaN if it is not a number."""
    try:
        return float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return math.nan


def _whole(text: str) -> str:
    """Return a number without a fraction of one or two zeros; any other text as it is."""
    return re.sub(r"\.00?$", "", text)


class Cells:
    """Cells of a column, as text; empty where they are missing.

    Attributes:
        texts: The cells as pyarrow's chunked array of strings, null where missing.
        stored: bool ``[N]``: true for cells that were stored as numbers, so that the notation of
            the file does not apply; None if there are none.
        rows: int64 ``[N]``: the rows in the file, from 0; None if these are all rows.
    """

    def __init__(
        self, texts: Any, stored: np.ndarray | None = None, rows: np.ndarray | None = None
    ) -> None:
        """Keep the cells, given as texts in their order or as an array like ``texts``."""
        import pyarrow as pa

        if not isinstance(texts, pa.ChunkedArray):
            texts = pa.chunked_array([pa.array([t or None for t in texts], pa.string())])
        self.texts, self.stored, self.rows = texts, stored, rows

    def __len__(self) -> int:
        """Return the number of cells, N."""
        return len(self.texts)

    def __getitem__(self, rows: slice | np.ndarray) -> Cells:
        """Return cells by row numbers or bool ``[N]``; or of a slice, as a file of its own."""
        stored = None if self.stored is None else self.stored[rows]
        if isinstance(rows, slice):
            first = self.rows[rows.start - 1] + 1 if self.rows is not None and rows.start else 0
            counted = None if self.rows is None else self.rows[rows] - first
            return Cells(self.texts[rows], stored, counted)
        known = np.arange(len(self)) if self.rows is None else self.rows
        return Cells(self.texts.take(np.arange(len(self))[rows]), stored, known[rows])

    @property
    def written(self) -> Cells:
        """The cells without those that were stored as numbers."""
        return self if self.stored is None else self[~self.stored]

    def text(self, row: int) -> str:
        """Return the cell of a row."""
        return self.texts[row].as_py() or ""

    def numbered(self, rows: np.ndarray) -> list[int]:
        """Return the numbers, from 1, that the rows have in the file."""
        return [row + 1 for row in (rows if self.rows is None else self.rows[rows]).tolist()]

    def tolist(self) -> list[str]:
        """Return the cells as a list."""
        return self.each(str, object).tolist()

    @cached_property
    def missing(self) -> np.ndarray:
        """Mask of the cells that are missing, bool ``[N]``."""
        return self.texts.is_null().to_numpy()

    @cached_property
    def _encoded(self) -> tuple[list[str], np.ndarray]:
        """The distinct texts and an empty one, and the position of each cell's text among them."""
        encoded = self.texts.dictionary_encode().combine_chunks()
        different = encoded.dictionary.to_pylist()
        return [*different, ""], encoded.indices.fill_null(len(different)).to_numpy()

    @property
    def different(self) -> Sequence[str]:
        """The distinct texts, without the empty one."""
        return self._encoded[0][:-1]

    def each(self, function: Callable[[str], Any], dtype: Any) -> np.ndarray:
        """Return a function's value for each cell, ``[N]`` or ``[N, ...]``."""
        texts, places = self._encoded
        return np.array([function(text) for text in texts], dtype)[places]

    def changed(self, function: Callable[[str], str], *, but_stored: bool = False) -> Cells:
        """Return the cells changed by a function; ``but_stored`` keeps those stored as numbers."""
        changed = self.each(function, object)
        if but_stored and self.stored is not None:
            changed[self.stored] = self.each(str, object)[self.stored]
        return Cells(changed.tolist(), self.stored, self.rows)

    @cached_property
    def _cast(self) -> np.ndarray | None:
        """The numbers, if all cells are numbers (as Python reads them) or missing; else None."""
        import pyarrow as pa

        try:
            cast: np.ndarray = self.texts.cast(pa.float64()).to_numpy()
        except pa.ArrowInvalid:
            return None
        return cast

    @cached_property
    def numbers(self) -> np.ndarray:
        """float64 ``[N]``, each from its own text; NaN where that is missing or no number."""
        return self.each(number_of, float) if self._cast is None else self._cast

    @cached_property
    def are_plain(self) -> bool:
        """True if all cells are finite numbers in plain notation, or missing."""
        numbers = self._cast
        num_present = len(self) - self.texts.null_count
        return numbers is not None and bool(np.isfinite(numbers).sum() == num_present)

    def stripped(self) -> Cells:
        """Return the cells without the blanks around them."""
        from pyarrow import compute

        if self.are_plain:
            return self
        return Cells(compute.utf8_trim_whitespace(self.texts), self.stored, self.rows).without([""])

    def without(self, words: Collection[str]) -> Cells:
        """Return the cells with those that are among some words made missing.

        If a word is a number such as -9, cells such as -9.0 and -9.00 are missing, too.
        """
        from pyarrow import compute

        if codes := {_whole(word) for word in words if not math.isnan(number_of(word))}:
            words = [*words, *(text for text in self.different if _whole(text) in codes)]
        found = self._among(words)
        if found is None:
            return self
        return Cells(compute.if_else(found, None, self.texts), self.stored, self.rows)

    def hold(self, words: Collection[str]) -> bool:
        """Return true if a cell is among some words."""
        return self._among(words) is not None

    def _among(self, words: Collection[str]) -> Any:
        """Return the mask of cells that are among some words; None if none is."""
        import pyarrow as pa
        from pyarrow import compute

        if self.are_plain:
            words = [word for word in words if not math.isnan(number_of(word))]
        found = compute.is_in(self.texts, pa.array(words, pa.string())) if words else None
        return found if found is not None and compute.any(found).as_py() else None


@dataclass(frozen=True)
class Notation(Checked):
    """Notation of the numbers in a file.

    Attributes:
        decimal: Sign before the fraction.
        thousands: Sign between groups of three digits.
    """

    decimal: Annotated[str, OneOf(DECIMALS)] = "point"
    thousands: Annotated[str, OneOf(THOUSANDS)] = "none"

    @cached_property
    def _number(self) -> re.Pattern[str]:
        decimal, between = _SIGNS[self.decimal], _SIGNS[self.thousands]
        grouped = rf"\d{{1,3}}(?:{between}\d{{3}})+|" if between else ""
        whole = rf"({grouped}\d+|(?={decimal}\d))"
        return re.compile(rf"([+-]?){whole}(?:{decimal}(\d*))?([eE][+-]?\d+)?", re.ASCII)

    def reads(self, text: str) -> bool:
        """Return true if a text is a number in this notation."""
        return self._number.fullmatch(text) is not None

    def plain(self, text: str) -> str:
        """The number with a decimal point and without groups; any other text as it is."""
        parts = self._number.fullmatch(text)
        if parts is None:
            return text
        sign, whole, fraction, exponent = parts.groups()
        whole = re.sub(r"[^0-9]", "", whole)
        return f"{sign}{whole}{'' if fraction is None else '.' + fraction}{exponent or ''}"

    def __str__(self) -> str:
        """Return what is unusual about it, for notes; empty if nothing is."""
        unusual = [f"decimal {self.decimal}"] if self.decimal != "point" else []
        unusual += [f"{self.thousands} between thousands"] if self.thousands != "none" else []
        return ", ".join(unusual)


PLAIN = Notation()
_NOTATIONS = [Notation(d, t) for t in THOUSANDS for d in DECIMALS if t != d]


def find_notation(
    columns: Mapping[str, Cells], form: TableForm, separator: str, *, where: str
) -> Notation:
    """Return the one notation in which all columns of numbers are numbers.

    Args:
        columns: Cells of the columns that may hold numbers, by name.
        form: Format of the file, with the signs that are known.
        separator: Separator of the cells, empty if there is none: between semicolons, 1.234 may be
            a whole number.
        where: Source of the columns, for messages.

    Raises:
        ConfigError: Several notations give different numbers, or none fits all columns.
    """
    allowed = [
        n
        for n in _NOTATIONS
        if form.decimal in (None, n.decimal) and form.thousands in (None, n.thousands)
    ]
    left, dubious = allowed, False
    signed: dict[str, list[str]] = {}
    for name, cells in columns.items():
        texts = _telling(cells.written, allowed)
        found = [text for text in texts if not text.isdecimal()]
        complete = _reading_all(found)
        fitting = [n for n in allowed if n in complete] or [
            n for n in allowed if sum(map(n.reads, texts)) >= NEARLY * len(texts)
        ]
        if not found or not fitting:
            continue
        both = [n for n in left if n in fitting]
        if not both:
            first = min(text for text in cells.written.different if not text.isdecimal())
            raise ConfigError(
                f"{where} writes the numbers of column {name} ({first}) in another way than "
                f"those of {', '.join(signed)}: bring them to one form, or set "
                f"'dataset.categories={{{name}: []}}' or dataset.ignore=[{name}]."
            )
        left, signed[name] = both, found
        by_point = len(found) < len(texts) or separator == ";"  # as where commas are decimal signs
        by_point = by_point and all(map(_THOUSAND_POINTS.fullmatch, found))
        dubious |= by_point and separator not in ("", ",")
    if PLAIN in left and not dubious:
        return PLAIN
    for name, found in signed.items():
        readings = {tuple(map(n.plain, found)): n for n in reversed(left)}
        if len(readings) > 1:
            one, other, *_ = reversed(readings.values())
            text = min(t for t in found if one.plain(t) != other.plain(t))
            raise ConfigError(
                f"{where} has two readings: {text} in column {name} is {one.plain(text)} or "
                f"{other.plain(text)}; set {_setting(one)} or {_setting(other)}."
            )
    return left[0]


def _telling(cells: Cells, allowed: Sequence[Notation]) -> Sequence[str]:
    """Return the distinct texts that decide a column's notation, maybe only of its first cells."""
    if cells.are_plain:
        first = cells[:_FIRST].different
        signed = [text for text in first if not text.isdecimal()]
        fitting = [n for n in _reading_all(signed) if n in allowed] if signed else []
        if fitting and all(notation.decimal == "point" for notation in fitting):
            return first
    return cells.different


def _reading_all(texts: Sequence[str]) -> list[Notation]:
    """Return the notations in which all texts are numbers, ignoring signs that no text has."""
    joined = "\n".join(texts)
    there = {sign for sign in THOUSANDS if _SIGNS[sign] and re.search(_SIGNS[sign], joined)}
    reads: dict[Notation, bool] = {}
    for notation in _NOTATIONS:
        alike = notation if notation.thousands in there else Notation(notation.decimal)
        if alike not in reads:
            reads[alike] = all(map(alike.reads, texts))
        reads[notation] = reads[alike]
    return [notation for notation, does in reads.items() if does]


def _setting(notation: Notation) -> str:
    """Return the shortest setting that chooses this notation."""
    if notation.thousands == "none":
        return f"dataset.decimal={notation.decimal}"
    return f"dataset.thousands={notation.thousands}"


def are_numbers(texts: Iterable[str]) -> np.ndarray:
    """Return bool ``[N]``: true for texts that are numbers in plain notation."""
    return np.array([not math.isnan(number_of(text)) for text in texts], dtype=bool)


def find_order(columns: Mapping[str, Cells], *, where: str) -> str | None:
    """Return the order of day and month in dates such as 05/31/2024; None if no column has any.

    Raises:
        ConfigError: Every number is at most 12, or columns differ.
    """
    days = np.zeros(2, dtype=int)  # dates whose first, and whose second, number can only be a day
    example = ""
    for cells in columns.values():
        if cells.are_plain:
            continue
        numbers = cells.each(_slashed, int)
        dates = numbers[:, 0] >= 0
        if dates.any() and dates.sum() >= NEARLY * (~cells.missing).sum():
            example = cells.text(int(dates.argmax()))
            days += (numbers > 12).sum(axis=0)
    if not example:
        return None
    if min(days) > 0 or max(days) == 0:
        raise ConfigError(
            f"{where} holds dates such as {example} with two readings: set "
            f"dataset.date_order={' or '.join(DATE_ORDERS)}."
        )
    return DATE_ORDERS[int(days.argmax())]


def _slashed(text: str) -> tuple[int, int]:
    """Return the first two numbers of a date such as 05/31/2024; -1 for other texts."""
    date = _SLASHED_DATE.fullmatch(text)
    return (int(date[1]), int(date[2])) if date else (-1, -1)


def days_of(cells: Cells, order: str | None) -> np.ndarray:
    """Return days since 1970, float64 ``[N]``, NaN where a text is missing or not a date.

    Dates are ``2024-05-31`` or ``2024/5/31``, with or without a time and a zone (the local day
    counts); ``31.5.2024``; or, if an order is given, ``31/5/2024`` or ``5/31/2024``. Years are 1 to
    9999.
    """
    return cells.each(lambda text: _days(text, order), float)


def iso_date(text: str, order: str | None) -> str:
    """Return 31.5.2024, 2024/5/31 or, if an order is given, 5/31/2024 as 2024-05-31."""
    if plain := _YEAR_FIRST.match(text):
        year, month, day = plain.groups()
        return f"{year}-{month:0>2}-{day:0>2}{text[plain.end() :]}"
    dotted = _DOTTED_DATE.fullmatch(text) or (_SLASHED_DATE.fullmatch(text) if order else None)
    if not dotted:
        return text
    day, month, year = dotted.groups()
    if "/" in text and order != DATE_ORDERS[0]:
        day, month = month, day
    return f"{year}-{month:0>2}-{day:0>2}"


def _days(text: str, order: str | None) -> float:
    iso = _ISO_DATE.fullmatch(iso_date(text, order))
    try:
        since = datetime.fromisoformat(iso[1]) - _EPOCH if iso else None
    except ValueError:
        since = None
    return math.nan if since is None else since / timedelta(days=1)


def distinct(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct codes among some texts, sorted; 1 and 1.0 are one, as are TRUE and True.

    The shortest of several spellings stands for all. If both 1 and 01 occur, no numbers are merged.
    """
    found = sorted(set(texts) - {""}, key=lambda text: (len(text), text))
    key = merging_key(found)
    codes: dict[object, str] = {}
    for text in found:
        first = codes.setdefault(key(text), text)
        if key is number_of and re.sub(r"\.0*$", "", first) != re.sub(r"\.0*$", "", text):
            return tuple(sorted(found))
    return tuple(sorted(codes.values()))


def code_key(codes: Sequence[str]) -> Callable[[str], object]:
    """Return the function by which a text is compared with some codes that are already distinct."""
    key = merging_key(codes)
    return key if len({key(code) for code in codes}) == len(codes) else str


def places_among(cells: Cells, codes: Sequence[str]) -> np.ndarray:
    """Return int64 ``[N]``: the position of each cell among some codes, -1 if it is not there."""
    key = code_key(codes)
    places = {key(code): i for i, code in enumerate(codes)}
    return cells.each(lambda text: places.get(key(text), -1), np.int64)


def merging_key(codes: Sequence[str]) -> Callable[[str], object]:
    """Return a function that is equal for codes that are one: equal numbers, or true and TRUE."""
    if codes and are_numbers(codes).all():
        return number_of
    return str.lower if {code.lower() for code in codes} <= {"true", "false"} else str
