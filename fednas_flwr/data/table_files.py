"""Tables as text: CSV in any common form, and the formats of other programs.

Only missing cells are interpreted. Separator, encoding and lines before the header are found in the
file, unless they are set, and noted. If there are two readings, an error asks the user.
:mod:`fednas_flwr.data.notation` handles the notation of numbers and dates.
"""

import bz2
import codecs
import csv
import gzip
import io
import lzma
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import compress
from numbers import Number
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fednas_flwr.base.errors import ConfigError, listed
from fednas_flwr.base.foreign import load_json
from fednas_flwr.data import notation
from fednas_flwr.data.notation import Cells, number_of
from fednas_flwr.settings.data_settings import TableForm
from fednas_flwr.settings.names import MISSING_WORDS, TABLE_SUFFIXES

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar", " ": "blanks"}
_MARKS = {  # longer marks first: UTF-32's begins like UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?', re.IGNORECASE)  # as Excel reads and writes it
_LIBSVM = re.compile(rb"[-+]?[\d.]+( +\d+:\S+)+ *[\r\n]")  # places and numbers
_FEWEST_LINES = 3  # lines in a cell that look like records; an address has fewer
_LINES = 20  # first lines, in which the separator is found
# Rare in Western texts: long runs beyond ASCII, and letters before signs, as in UTF-8
_NOT_WESTERN = re.compile(rb"[\x80-\xff]{3,}|[\xc0-\xff][\x80-\xbf]")
# A cell of Excel whose formula was not computed; an empty text would be a value
_UNCOMPUTED = re.compile(rb"""<c (?![^>]*t="str")[^>]*><f[^<]*(</f>)?(<v ?/>|<v></v>)?</c>""")
_OTHERS = "give CSV, .xlsx or Parquet, arrays in .npz, or images as files, in a folder per class"
DOUBTFUL = ("NA", "None")  # words that count as missing, and may be a country or a class
SITES_FILE = "dataset.yaml"  # settings for reading the sites' tables beside it
BLANK = "blank"  # an empty cell, in ``map``
_LONGEST = 200  # characters in a name by which records are divided
_HEAD = 1_000_000  # first bytes, in which the header begins
_FIRST = 1000  # cells that show whether a first row is a header

Texts = dict[str, Cells]  # by column
Form = TypeVar("Form", bound=TableForm)


def suffix_of(path: Path) -> str:
    """Return the suffix that decides how a table is read, of ``TABLE_SUFFIXES``, or empty text."""
    return next((s for s in TABLE_SUFFIXES if path.name.lower().endswith(s)), "")


def read_texts(
    path: Path, form: TableForm, *, keep_empty: bool = False
) -> tuple[Texts, str, list[str]]:
    """Return a table's cells as text, by column, its separator if it has one, and notes.

    Blanks around cells and names of columns do not count.

    Args:
        path: Path of the file.
        form: Format of its cells.
        keep_empty: True to keep rows without any cell, so that rows can be counted in the file.

    Raises:
        ConfigError: The file cannot be read as a table, has no rows, or has two readings.
    """
    kind = "a CSV"
    try:
        content = path.read_bytes()
        if content.startswith(b"version https://git-lfs"):
            raise ValueError("it is a pointer of Git LFS: fetch the file by git lfs pull")
        content = _PACKED.get(content[:3], bytes)(content)
        head = content[:_HEAD].removeprefix(codecs.BOM_UTF8)
        first = b"".join(head.split(maxsplit=2)[:2])  # JSON may have many lines
        kind, reader = _READERS.get(first[:4], _READERS.get(first[:2], ("a CSV", _read_csv)))
        texts, separator, notes = reader(content, form)
    except Exception as error:  # a damaged file can raise anything in a parser of many formats
        raise ConfigError(
            f"dataset.root={path} cannot be read as {kind} table: "
            f"{' '.join(str(error).split()).rstrip('.')}."
        ) from error
    if texts and not form.strict and not keep_empty:
        empty = np.logical_and.reduce([cells.missing for cells in texts.values()])
        if empty.any():
            texts = {name: cells[~empty] for name, cells in texts.items()}
            notes.append(f"empty rows are left out ({empty.sum()})")
    if not form.strict and not any(map(len, texts.values())):
        raise ConfigError(f"dataset.root={path} has no rows: give a table with a header.")
    return texts, separator, notes


def without_missing(texts: Texts, form: TableForm) -> tuple[Texts, list[str]]:
    """Return the cells under their new column names, with an empty text where they are missing.

    Also return the columns with a word that means missing by default, but may be a country or a
    class.

    Raises:
        ConfigError: Two columns would have the same name.
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
    words = [word for word in DOUBTFUL if word not in form.missing_values]
    doubtful = [n for n, of in renamed.items() if n not in form.missing_in and of.hold(words)]
    texts = {n: cells.without(form.missing_in.get(n, usual)) for n, cells in renamed.items()}
    return texts, doubtful


def in_common_form(
    texts: Texts,
    form: Form,
    numbers: Collection[str],
    dates: Collection[str] | None,
    separator: str,
    *,
    where: str,
) -> tuple[Texts, Form, list[str]]:
    """Return the cells with plain numbers and a form's spellings and units, the form, and notes.

    There is a note on each spelling in its ``map`` that no cell has.

    Args:
        texts: Cells by column.
        form: Format of the cells; unknown signs of numbers and the order of dates are found.
        numbers: Columns of numbers.
        dates: Columns that may hold dates; None if nothing is to be found.
        separator: Separator of the cells; empty if there is none.
        where: Source of the cells, for messages.

    Raises:
        ConfigError: There are two readings, or a cell to be scaled is no number.
    """
    signs = notation_of(form)
    if dates is not None:
        signs = notation.find_notation({n: texts[n] for n in numbers}, form, separator, where=where)
        order = form.date_order or notation.find_order({n: texts[n] for n in dates}, where=where)
        decimal, thousands = signs.decimal, signs.thousands
        form = replace(form, decimal=decimal, thousands=thousands, date_order=order)
    changed = dict(texts)
    for name in numbers if signs != notation.PLAIN else ():
        changed[name] = texts[name].changed(signs.plain, but_stored=True)
    notes: list[str] = []
    for name in form.map.keys() & texts.keys():
        cells, spellings = changed[name], form.map[name]
        codes = [code for code in spellings if code != BLANK]
        found = {*notation.places_among(cells, codes).tolist()}
        idle = [code for i, code in enumerate(codes) if i not in found and not form.strict]
        notes += [unused(name, code) for code in idle]
        changed[name] = cells.changed(_respelled(spellings))
    for name in form.scale.keys() & texts.keys():
        cells = changed[name]
        wrong = np.flatnonzero(np.isnan(cells.numbers) & ~cells.missing)
        if len(wrong) and not form.strict:
            raise ConfigError(
                f"dataset.scale.{name} does not fit {where}, which holds "
                f"{rows_text(texts[name], wrong)}: expected numbers."
            )
        changed[name] = cells.changed(partial(_scaled, factor=form.scale[name]))
    return changed, form, notes


def settings_beside(path: Path) -> tuple[str, ...]:
    """Return a sentence on sites' settings beside a table that is read alone, if there are any."""
    beside = (path if path.is_dir() else path.parent) / SITES_FILE
    return (f"{beside} is read with its folder alone",) if beside.is_file() else ()


def unused(column: str, code: str) -> str:
    """Return a sentence on a spelling in ``map`` that no cell has."""
    return f"dataset.map.{column} names {code}, which no cell is"


def _scaled(text: str, factor: float) -> str:
    number = number_of(text) * factor
    return text if math.isnan(number) else repr(number)


def _respelled(spellings: Mapping[str, str]) -> Callable[[str], str]:
    key = notation.code_key([text for text in spellings if text != BLANK])
    others = {key(text): other for text, other in spellings.items() if text != BLANK}
    return lambda text: others.get(key(text), text) if text else spellings.get(BLANK, "")


def notation_of(form: TableForm) -> notation.Notation:
    """Return the notation of the numbers in a file; plain if nothing is known."""
    return notation.Notation(form.decimal or "point", form.thousands or "none")


def texts_of(table: Any, *, where: str = "the DataFrame") -> Texts:
    """Return a DataFrame's cells as text: whole numbers without a point, empty where missing.

    Raises:
        ConfigError: Two columns have the same name.
    """
    table = table.reset_index([n for n in table.index.names if n not in (None, *table.columns)])
    names = [" ".join(str(name).split()) for name in table.columns]
    if "" in names:
        raise ConfigError(f"{where} has a column without a name: name it, or remove it.")
    for name, number in Counter(names).items():
        if number > 1:
            raise ConfigError(f"{where} has {number} columns {name}: give each a name of its own.")
    return {name: _cells_of(table.iloc[:, i]) for i, name in enumerate(names)}


def _cells_of(values: Any) -> Cells:
    missing = values.isna().to_numpy()
    if values.dtype.kind == "M":  # in numpy's form, which covers all years
        moments = values.dt.tz_localize(None).to_numpy().astype("datetime64[s]")
        return Cells(np.where(missing, "", np.datetime_as_string(moments)).tolist())
    cells = values.tolist()
    texts = ["" if gone else _text(value) for value, gone in zip(cells, missing, strict=True)]
    stored = [isinstance(cell, Number | timedelta) and not isinstance(cell, bool) for cell in cells]
    return Cells(texts, np.array(stored, dtype=bool))


def _text(value: Any) -> str:
    """Return one cell, independent of the others in its column."""
    if isinstance(value, bytes):  # as from Spark
        if b"\0" in value:
            raise ValueError(f"its cells hold bytes that are no text: {_OTHERS}")
        value = value.decode(errors="replace")
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, datetime):
        return value.replace(tzinfo=None).isoformat(timespec="seconds")
    if isinstance(value, timedelta):
        value = value / timedelta(days=1)  # days, as dates are
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(float(value))
    return str(value)


def _read_arrow(content: bytes, form: TableForm) -> tuple[Texts, str, list[str]]:
    """Return cells as they are stored, without inferring a column's type from its cells."""
    import pyarrow as pa
    from pyarrow import feather, parquet

    stored, is_parquet = pa.BufferReader(content), content.startswith(b"PAR1")
    table = parquet.ParquetFile(stored).read() if is_parquet else feather.read_table(stored)
    nested = [i for i, field in enumerate(table.schema) if pa.types.is_nested(field.type)]
    names = ", ".join(table.column_names[i] for i in nested)
    if any("binary" in str(table.schema[i].type) for i in nested):
        raise ValueError(f"its column {names} holds bytes: {_OTHERS}")
    for i in reversed(nested):
        table = table.remove_column(i)
    for i, field in enumerate(table.schema):
        if pa.types.is_date(field.type):  # Python has no years beyond 9999
            table = table.set_column(i, field.name, table[i].cast(pa.string()))
    notes = [f"{names} left out, which holds lists or structures"] if nested else []
    stored = (table.schema.metadata or {}).items()  # pandas' own types of Arrow's are no others
    plain = {key: re.sub(rb'"[^"]*\[pyarrow\]"', b'"object"', value) for key, value in stored}
    table = table.replace_schema_metadata(plain)
    frame = table.to_pandas(integer_object_nulls=True)  # floats are not exact beyond 2^53
    about = {} if form.strict else table.schema.pandas_metadata or {}
    kinds = {column["field_name"]: column["pandas_type"] for column in about.get("columns", ())}
    texts = texts_of(frame, where="it")
    for field in table.schema if not form.strict else ():
        coded = kinds.get(field.name) == "categorical" or pa.types.is_dictionary(field.type)
        different = texts[field.name].different if coded and field.name in texts else ()
        coded = bool(different) and notation.are_numbers(different).all()
        if coded and field.name not in getattr(form, "categories", ()):
            cure = f"set {as_categories([field.name])} if they are codes"
            notes.append(f"{field.name} is stored as a category, but holds numbers: {cure}")
    return texts, "", notes


def _read_json(content: bytes, form: TableForm) -> tuple[Texts, str, list[str]]:
    """Return the cells of a list of records, of columns, or of a record in each line.

    Raises:
        ValueError: It is not of this form; or it is at a private site, where a record could add a
            column.
    """
    import pandas as pd

    if form.strict:
        raise ValueError(f"private sites, and dataset.corrupt=skip, read none: {_OTHERS}")
    try:
        found = load_json(content)
    except ValueError:
        found = [load_json(line) for line in content.splitlines() if line]
    table = pd.DataFrame(found, dtype=object)
    table = table.T if _are_places(table.columns) else table  # records by number
    nested = table.map(lambda cell: isinstance(cell, list | dict)).any(axis=None)
    if nested or _are_places(table.columns) or not _are_places(table.index):
        raise ValueError("expected records {column: cell, ...} in a list or in lines, unnested")
    return texts_of(table, where="it"), "", []


def _are_places(names: Any) -> bool:
    """Return true if rows or columns are numbered, as those without names are."""
    return all(str(name).isdecimal() for name in names)


def _read_stata(content: bytes, form: TableForm) -> tuple[Texts, str, list[str]]:
    import pandas as pd

    return texts_of(pd.read_stata(io.BytesIO(content)), where="it"), "", []


def _read_none(content: bytes, form: TableForm) -> tuple[Texts, str, list[str]]:
    """Refuse a format that is known by its first bytes."""
    raise ValueError(f"it is .xls, locked, HTML or ARFF, which are not read: {_OTHERS}")


def _unzipped(content: bytes) -> bytes:
    """Return the only file in a zip archive; an Excel file, also an archive, stays as it is."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = [n for n in archive.namelist() if not n.startswith("__MACOSX/") and n[-1] != "/"]
        if any(re.fullmatch(r"xl/worksheets/.*\.xml", name) for name in names):
            return content
        if len(names) != 1:
            cure = "save a sheet (.ods) as .xlsx, tensors (.pt) as arrays in .npz; unpack tables"
            raise ValueError(f"it is a zip archive of {len(names)} files: {cure}")
        return archive.read(names[0])


def _read_excel(content: bytes, form: TableForm) -> tuple[Texts, str, list[str]]:
    """Return the cells of one sheet, as they are stored, and notes.

    It is the first visible sheet with three columns or more; a legend has fewer.
    """
    import pandas as pd

    options = {"read_only": False}  # read-only mode does not report what is hidden or merged
    with pd.ExcelFile(io.BytesIO(content), engine="openpyxl", engine_kwargs=options) as book:
        sheets = book.book.worksheets
        shown = [sheet for sheet in sheets if sheet.sheet_state == "visible"] or sheets
        sheet = next((one for one in shown if form.strict or one.max_column > 2), shown[0])
        as_stored: dict[str, Any] = {"dtype": object, "keep_default_na": False, "na_values": [""]}
        table = pd.read_excel(book, sheet.title, header=None, **as_stored)
    table = table.dropna(how="all", axis=1)
    if table.empty:
        raise ValueError(f"its first sheet, {sheet.title}, is empty")
    filled = table.notna().any(axis=1)
    table = table[filled.cummax() & filled[::-1].cummax()]
    texts, notes = _named([_cells_of(table.iloc[:, i]) for i in range(table.shape[1])], form)
    if others := [other.title for other in sheets if other is not sheet]:
        notes.append(f"only the sheet {sheet.title} is read, not {', '.join(others)}")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        part = f"xl/worksheets/sheet{sheets.index(sheet) + 1}.xml"
        known = part in archive.namelist()
        uncomputed = len(_UNCOMPUTED.findall(archive.read(part))) if known else 0
    hidden = sum(side.hidden for row, side in sheet.row_dimensions.items() if row <= sheet.max_row)
    for side in sheet.column_dimensions.values():  # one for several equal columns
        hidden += side.hidden * max(0, min(side.max, sheet.max_column) + 1 - side.min)
    found = {
        "hidden rows and columns are read, too": hidden,
        "of merged cells the first alone has a value": len(sheet.merged_cells.ranges),
        "formulas without a stored value count as missing": uncomputed,
    }
    return texts, "", notes + [f"{words} ({number})" for words, number in found.items() if number]


def _read_csv(content: bytes, form: TableForm) -> tuple[Texts, str, list[str]]:
    encoding = _encoding(content, form)
    if encoding != "utf-8" or (form.encoding and not content.isascii()):
        content = content.decode(encoding).encode()
    content = content.removeprefix(codecs.BOM_UTF8)
    if b"\0" in content and not form.strict:
        wide = "utf-16-be" if content.startswith(b"\0") else "utf-16-le"
        raise ValueError(f"it holds NUL characters: set dataset.encoding={wide}, or {_OTHERS}")
    if _LIBSVM.match(content) and not form.strict:
        raise ValueError("it is in LIBSVM's form: scikit-learn's load_svmlight_file makes arrays")
    if b"\r" in content:
        content = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    head = content[:_HEAD].decode(errors="ignore")
    rest, separator, notes = _without_preamble(head, form)
    if form.header and form.column_names:  # there may be more names, for rows that have names
        rest = rest.partition("\n")[2]
    content = content[len(head.encode()) - len(rest.encode()) :]
    width = rest.partition("\n")[0].count(separator) + 1  # or fewer, with quotes
    columns = _even_columns(content, separator, width, form)
    if columns is None:
        columns, more = _uneven_columns(content.decode(), separator, form)
        notes += more
    if re.search(rb"\n[ \t]*\n", content):  # blank lines, which count as rows of the file
        filled = np.flatnonzero([bool(line.strip()) for line in content.splitlines()])
        if len(filled) == len(columns[0]):
            columns = [Cells(cells.texts, rows=filled) for cells in columns]
    if b'"' in content and not form.strict:
        notes += _swallowed(columns, separator)
    found = {
        f"separator {SEPARATORS.get(separator, separator)}": separator != ",",
        f"encoding {encoding}": encoding not in (form.encoding or "utf-8", "utf-8-sig"),
    }
    texts, of_names = _named(columns, form)
    return texts, separator, [n for n, holds in found.items() if holds] + notes + of_names


# By the first bytes of a file, regardless of its name
_PACKED = {
    b"\x1f\x8b\x08": gzip.decompress,
    b"BZh": bz2.decompress,
    b"\xfd7z": lzma.decompress,
    b"PK\3": _unzipped,
}
_READERS = {
    b"PK\3\4": ("an Excel", _read_excel),
    b"PAR1": ("a Parquet", _read_arrow),
    b"ARRO": ("a Feather", _read_arrow),
    **dict.fromkeys((b"<sta", b"r\2\1\0", b"s\2\1\0"), ("a Stata", _read_stata)),
    **dict.fromkeys((b'{"', b"[{", b"[["), ("a JSON", _read_json)),
    **{of: ("a", _read_none) for of in (b"\xd0\xcf\x11\xe0", b"<htm", b"<tab", b"@rel", b"@REL")},
}


def _even_columns(
    content: bytes, separator: str, width: int, form: TableForm
) -> list[Cells] | None:
    """Return the cells of a file whose rows all have ``width`` cells; None if that is not sure."""
    import pyarrow as pa
    from pyarrow import csv as arrow

    quotes = b'"' in content
    odd = b"\0" in content or (quotes and (form.strict or b' "' in content))
    if odd or width == 1 or separator == " " or not separator.isascii():
        return None
    try:
        table = arrow.read_csv(
            pa.BufferReader(content),
            read_options=arrow.ReadOptions(autogenerate_column_names=True),
            parse_options=arrow.ParseOptions(
                delimiter=separator, quote_char='"' if quotes else False, newlines_in_values=quotes
            ),
            convert_options=arrow.ConvertOptions(
                column_types={f"f{i}": pa.string() for i in range(width)},
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
    except pa.ArrowInvalid:
        return None
    are_texts = all(pa.types.is_string(kind) for kind in table.schema.types)
    odd = quotes and table.columns[-1].null_count > 0
    return [Cells(column) for column in table.columns] if are_texts and not odd else None


def _uneven_columns(text: str, separator: str, form: TableForm) -> tuple[list[Cells], list[str]]:
    """Return the cells of any file, and notes.

    Raises:
        ValueError: A quote is open, or a row is longer or shorter than the header.
    """
    rows: list[list[str]] = []
    try:
        rows.extend(_rows(text, separator))
    except csv.Error as error:
        raise ValueError(f"a quote in row {len(rows)} is open ({error})") from error
    if not rows:
        raise ValueError("it is empty")
    widths = list(map(len, rows))
    if {*widths} == {widths[0]}:
        return [Cells(cells) for cells in zip(*rows, strict=True)], []
    number = next(i for i, width in enumerate(widths) if width != widths[0])
    differ = f"row {number} has {widths[number]} cells, but the header {widths[0]}"
    if form.strict or {*widths[1:]} != {widths[0] + 1}:
        raise ValueError(f"{differ}: remove titles, comments and footers, or correct that row")
    if any(row[-1] for row in rows[1:]):
        names = ", ".join(["row", *rows[0]])
        raise ValueError(
            f"{differ}: if the first cell of a row is its name, as R writes it, set "
            f"dataset.column_names=[{names}] and dataset.header=true; else correct the header"
        )
    columns = zip(*rows, strict=False)  # without the cell after the last separator
    return [Cells(c) for c in columns], ["the separator at the end of every row is left out"]


def _swallowed(columns: Sequence[Cells], separator: str) -> list[str]:
    """Return a note on a cell in quotes whose lines have the width of records, if there is one."""
    for text in (text for cells in columns for text in cells.different if "\n" in text):
        lines = text.splitlines()[1:-1]
        are_rows = [line.count(separator) == len(columns) - 1 > 0 for line in lines]
        if all(are_rows) and len(are_rows) >= _FEWEST_LINES:
            return [
                f"a cell in quotes holds {len(lines)} lines that look like records, from "
                f"{lines[0][:40]} on: double a quote that is part of a text"
            ]
    return []


def _without_preamble(text: str, form: TableForm) -> tuple[str, str, list[str]]:
    """Return the text from its header on, its separator, and notes on the lines before."""
    separator, notes = "\t" if form.separator == "tab" else form.separator, []
    first, _, rest = text.partition("\n")
    if stated := _SEPARATOR_LINE.fullmatch(first.strip()):
        text, separator = rest, separator or stated[1]
    while text.startswith("#") and not form.column_names:
        first, _, rest = text.partition("\n")
        found = separator or _separator(rest, form)
        cells, width = (len(next(_rows(t, found), [])) for t in (first, rest))
        if cells == width > 1:  # a header such as "#chromosome,start,end"
            break
        text = rest
        notes.append(f"the line {first.strip()[:60]} before the header is left out")
    return text, separator or _separator(text, form), notes


def _rows(text: str, separator: str) -> Iterator[list[str]]:
    """Yield rows of cells, without blank lines."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    lines = io.StringIO(text, newline="")
    spaced = separator == " "
    reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
    for row in reader:
        cells = [cell for cell in row if cell] if spaced else row
        if len(cells) > 1 or "".join(cells).strip():
            yield cells


def _named(columns: Sequence[Cells], form: TableForm) -> tuple[Texts, list[str]]:
    """Return columns by name, without the row of names, and notes on names and titles before it.

    Args:
        columns: The cells of all rows.
        form: Format of the file.
    """
    notes, first = [], [cells.text(0).strip() for cells in columns]
    free = not (form.strict or form.column_names or form.header)
    while free and len(columns) > 2 and sum(map(bool, first)) < 2 and len(columns[0]) > 2:
        if title := "".join(first)[:60]:
            notes.append(f"the line {title} before the header is left out")
        columns = [cells[1:] for cells in columns]
        first = [cells.text(0).strip() for cells in columns]
    named = not form.column_names or (not form.strict and set(first) <= {*form.column_names})
    columns = [cells[int(named) :].stripped() for cells in columns]
    names = [" ".join(n.strip("\u200b\ufeff").split()) for n in form.column_names or first]
    if len(names) != len(columns):
        raise ValueError(f"dataset.column_names has {len(names)} names for {len(columns)} columns")
    if named and not form.strict and all(map(Cells.hold, columns, ([name] for name in first))):
        is_name = [c.each(name.__eq__, bool) for c, name in zip(columns, first, strict=True)]
        others = np.flatnonzero(~np.logical_and.reduce(is_name))
        notes.append(f"rows that repeat the header are left out ({len(columns[0]) - len(others)})")
        columns = [cells[others] for cells in columns]
    asks = form.header is None and not form.column_names and not form.strict
    if asks and _like_a_record(first, columns):
        raise ValueError(
            f"its first line ({', '.join(first[:5])}) looks like a record: if it is one, name the "
            "columns by dataset.column_names=[...]; if it is the header, set dataset.header=true"
        )
    if not form.strict:
        kept = [bool(name) or not c.missing.all() for name, c in zip(names, columns, strict=True)]
        nameless = [i + 1 for i, name in enumerate(names) if kept[i] and not name and i]
        if nameless:
            raise ValueError(
                f"it has columns without names (number {listed(nameless)}): if the first line is a "
                "title or a record, remove it or set dataset.column_names=[...]; else name them"
            )
        if not all(kept):
            notes.append("columns without names and cells are left out")
            names, columns = list(compress(names, kept)), list(compress(columns, kept))
    taken: dict[str, int] = {}
    for i in range(len(names)):
        name = names[i] or f"column {i + 1}"
        number = taken.setdefault(name, 0)
        taken[name] += 1
        while number and (other := f"{name}.{number}") in names:
            number += 1
        names[i] = other if number else name
        if number:
            notes.append(f"a further column {name} is called {other}")
    return dict(zip(names, columns, strict=True)), notes


def _like_a_record(first: Sequence[str], columns: Sequence[Cells]) -> bool:
    """Return true if the cells of a first row fit their columns, unlike names of columns.

    If all cells of a column differ, as with names of persons, one more text shows nothing.
    """
    fitting = False
    for cell, cells in zip(first, columns, strict=True):
        known = cells[:_FIRST].without(MISSING_WORDS)
        texts, are = known.different, notation.are_numbers([cell, *known.different])
        fits = bool(texts) and bool(are.all() or (cell in texts and not are[1:].all()))
        differ = not are[1:].all() and len(texts) > notation.NEARLY * len(known)
        if texts and cell and not fits and not differ:
            return False
        fitting |= fits
    return fitting


def _encoding(content: bytes, form: TableForm) -> str:
    """Return the encoding: by the file's mark, else UTF-8 if valid, the set one, or cp1252.

    Raises:
        ValueError: It is none of these.
    """
    wide = (form.encoding or "").lower().startswith(("utf-16", "utf16", "utf-32", "utf32"))
    if form.encoding and (form.strict or b"\0" in content or (content.isascii() and not wide)):
        return form.encoding
    for mark, encoding in _MARKS.items():
        if content.startswith(mark):
            return encoding
    try:
        _ = content.isascii() or content.decode("utf-8")
    except UnicodeDecodeError:
        odd = sum(map(len, _NOT_WESTERN.findall(content)))
        is_odd = 2 * odd > len(content.translate(None, bytes(range(128))))
        if not form.encoding and (is_odd or "\ufffd" in content.decode("cp1252", "replace")):
            cure = "set dataset.encoding or use UTF-8" if b"\0" not in content else _OTHERS
            raise ValueError(f"its encoding is unclear: {cure}") from None
        return form.encoding or "cp1252"
    return "utf-8"


def _separator(text: str, form: TableForm) -> str:
    """Return the separator that cuts the first rows into most cells, equally many; else a comma.

    If rows must not decide, the header alone does.
    """
    lines = 1 if form.strict else _LINES
    sample = "\n".join(text.split("\n", lines)[:lines])

    def cells(separator: str) -> tuple[float, int]:
        rows: list[list[str]] = []
        with suppress(csv.Error):  # for a quoted cell that continues after these lines
            rows.extend(_rows(sample, separator))
        (width, often), *_ = Counter(map(len, rows)).most_common(1) or [(0, 0)]
        return (often / len(rows) if width > 1 else 0, width)

    best = max((s for s in SEPARATORS if s != " "), key=cells)
    return best if cells(best)[0] or not cells(" ")[0] else " "


def names_in(texts: Texts, columns: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the columns by which records can be divided: strings, none of them long."""
    short = [n for n in columns if max(map(len, texts[n].different), default=0) <= _LONGEST]
    return {name: texts[name].each(str, np.str_) for name in short}


def typed(name: str) -> str:
    """Return a column's name or a cell as a key of a mapping in a typed override."""
    return re.sub(r"([\\()\[\]{}:=, ])", r"\\\1", name)


def as_categories(names: Sequence[str]) -> str:
    """Return the override by which columns have the categories that are found in them."""
    return f"'dataset.categories={{{', '.join(f'{typed(name)}: []' for name in names)}}}'"


def counted(cells: Cells) -> str:
    """Return the distinct cells with their counts, for a message: ``1 (20), blank (5)``."""
    counts = Counter(text or BLANK for text in cells.tolist()).most_common()
    return listed([f"{text} ({number:,})" for text, number in counts], 5)


def rows_text(cells: Cells, rows: np.ndarray, *, most: int = 10) -> str:
    """Return cells with their file's rows, from 1, for a message: ``yes in row 1, no in row 3``."""
    numbered = zip(rows[:most].tolist(), cells.numbered(rows[:most]), strict=True)
    named = [f"{cells.text(row)} in row {number}" for row, number in numbered]
    return ", ".join(named) + (f" and {len(rows) - most} more" if len(rows) > most else "")


def check_columns(
    texts: Collection[str], names: Sequence[str], *, where: str, cure: str = ""
) -> None:
    """Raise ConfigError, ending with ``cure``, for a column that a table lacks."""
    for name in names:
        if name not in texts:
            raise ConfigError(f"{where} has no column {name}: it has {', '.join(texts)}{cure}.")
