"""Cells of one column of a table, as text.

Each distinct text is examined once for all cells that have it (:meth:`Cells.each`), and plain
numbers are read all at once, so that a table of millions of rows takes seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np


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
