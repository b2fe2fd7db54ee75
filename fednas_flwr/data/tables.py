"""Reader of tables: a label column, numbers, dates, and categories as one-hot.

Numbers stay as they are in the file, NaN where missing: whoever makes batches standardises them,
with statistics that were given or found together (:mod:`fednas_flwr.data.statistics`). Files are
read by :mod:`fednas_flwr.data.table_files`; :func:`encode_rows` is for training and prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednas_flwr.data.images import RecordsPair
from fednas_flwr.data.records import (
    Records,
    canonical,
    encode_label_sets,
    encode_labels,
    label_set,
    label_sets,
    readable,
    record_ids,
)
from fednas_flwr.data.schema import CATEGORY, DATE, NUMBER, Column
from fednas_flwr.data.table_files import (
    SUFFIXES,
    Form,
    Texts,
    among,
    check_columns,
    days_of,
    names_in,
    numbers_of,
    read_texts,
    rows_text,
)
from fednas_flwr.errors import ConfigError, show

_MOST_CATEGORIES = 256
_YES, _NO = ("1", "1.0", "yes", "true"), ("0", "0.0", "no", "false")
_NEARLY = 0.9  # share of numbers from which a column's other texts are taken for mistakes


def load_csv(
    path: Path,
    *,
    label: str | None = "last",
    labels: Sequence[str] = (),
    label_separator: str | None = None,
    id_column: str | None = None,
    numeric: Sequence[str] = (),
    dates: Sequence[str] = (),
    categorical: Sequence[str] = (),
    categories: Mapping[str, Sequence[str]] | None = None,
    ignore: Sequence[str] = (),
    class_names: Sequence[str] = (),
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    missing_values: Sequence[str] = (),
    missing: str = "mean",
    corrupt: str = "refuse",
) -> RecordsPair:
    """Return the records of a table and of its official test part, None where it has none.

    A record's id is the hash of its value in the ``id_column``, or else of its features as they are
    parsed, columns by name: 1.5 and 1.50 are one number, and columns that are no features do not
    count. A number with one more digit, or one more feature, makes another record of it; only an
    ``id_column`` prevents that. All columns but those of fractions are kept as ``Records.columns``.

    Args:
        path: A table's file with a header (``SUFFIXES``), or a folder with train.csv and optionally
            test.csv or the like, whose columns and classes are those of the train part.
        label: Name of the label column, or ``last`` or None for the last one.
        labels: Columns of 0 and 1 (or no and yes, false and true), one per label, where a record
            can have several; in place of ``label``.
        label_separator: Where a record can have several labels, what stands between them in the
            label column: see :func:`~fednas_flwr.data.records.label_sets`.
        id_column: Column that names the person (a patient, a card) whom a row is of, the same in
            every export; no feature.
        numeric: Numeric features; with ``dates`` and ``categorical`` also empty, every column that
            holds only numbers is numeric, only dates a date, and every other categorical.
        dates: Columns of dates, see :func:`~fednas_flwr.data.table_files.days_of`.
        categorical: Categorical features, one feature ``column=value`` per category.
        categories: Values of categorical columns; the values found, sorted, where not given.
        ignore: Columns that are not features.
        class_names: The label's values in class order, or empty for those found, sorted.
        separator: See :class:`~fednas_flwr.data.table_files.Form`.
        encoding: See there.
        decimal: See there.
        missing_values: See there.
        missing: What becomes of missing numbers and dates: ``mean`` puts the mean in their place,
            ``indicator`` also adds a feature that says so.
        corrupt: Rows with a cell that is not as declared here: ``refuse``, or ``skip`` to leave
            out each by itself, see :func:`unreadable_cells`.

    Raises:
        ConfigError: A column or value that does not fit this description.
    """
    form = Form(separator, encoding, decimal, tuple(missing_values), strict=corrupt == "skip")
    train_path, test_path = _parts(path)
    texts, notes = read_texts(train_path, form)
    label_columns = label_columns_of(
        texts, label=label, labels=labels, label_separator=label_separator, class_names=class_names
    )
    read = partial(
        _read_records,
        label_columns=label_columns,
        label_separator=label_separator,
        id_column=id_column,
        missing=missing,
        missing_values=tuple(missing_values),
        skip=form.strict,
    )
    declared = {NUMBER: numeric, DATE: dates, CATEGORY: categorical}
    train = read(
        texts,
        train_path,
        kinds=_declared_kinds(declared, path=train_path),
        categories=categories or {},
        ignore=ignore,
        class_names=class_names,
    )
    train = replace(train, notes=(*notes, *train.notes))
    if test_path is None:
        return train, None
    found = {column.name: column.categories for column in train.schema if column.kind == CATEGORY}
    test = read(
        read_texts(test_path, form)[0],
        test_path,
        kinds={column.name: column.kind for column in train.schema},
        categories=found,
        ignore=(),
        class_names=() if labels else train.class_names,
    )
    return train, replace(test, schema=train.schema)


def label_columns_of(
    texts: Mapping[str, np.ndarray],
    *,
    label: str | None,
    labels: Sequence[str],
    label_separator: str | None,
    class_names: Sequence[str],
) -> tuple[str, ...]:
    """Return the names of a table's label columns: one, or one per label; see :func:`load_csv`.

    Raises:
        ConfigError: The settings contradict one another.
    """
    named = label not in (None, "last")
    given = {"label": named, "label_separator": label_separator, "class_names": class_names}
    for setting in [name for name, value in given.items() if value and labels]:
        raise ConfigError(
            f"dataset.{setting} has no effect with dataset.labels={show(list(labels))}, which "
            "names one column per label: remove one of the two."
        )
    if len(labels) == 1:
        raise ConfigError(
            f"dataset.labels={show(list(labels))} names one column, but is for records that can "
            f"have several labels: set dataset.label={labels[0]}."
        )
    return tuple(labels) or (label if label and named else list(texts)[-1],)


def encode_rows(texts: Mapping[str, np.ndarray], schema: Sequence[Column], *, where: str) -> Texts:
    """Return the features of rows by name, float32 ``[N]`` each, in the order of the schema.

    Args:
        texts: The columns' cells; empty ones are missing, and so are a column's missing values.
        schema: The columns; a category that is none of a column's has no feature.
        where: Where the rows come from, for messages.

    Raises:
        ConfigError: A column lacks, or a cell of a number or date is none.
    """
    check_columns(texts, [column.name for column in schema], where=where)
    numbers, indicators, categories = {}, {}, {}
    for column in schema:
        cells = texts[column.name]
        if column.missing_values:
            cells = np.where(among(cells, column.missing_values), "", cells)
        if column.kind == CATEGORY:
            for value in column.categories:
                categories[f"{column.name}={value}"] = (cells == value).astype(np.float32)
            continue
        numbers[column.name] = _checked_numbers(cells, column=column, where=where)
        if column.indicator:
            indicators[f"{column.name} is missing"] = (cells == "").astype(np.float32)
    return {**numbers, **indicators, **categories}


def _parts(root: Path) -> tuple[Path, Path | None]:
    """Return the files of the train and test parts; a root that is no folder is the train part."""
    if not root.is_dir():
        return root, None
    found = {
        part: [root / f"{part}{s}" for s in SUFFIXES if (root / f"{part}{s}").is_file()]
        for part in ("train", "test")
    }
    if len(found["train"]) != 1 or len(found["test"]) > 1:
        names = ", ".join(path.name for paths in found.values() for path in paths) or "neither"
        raise ConfigError(
            f"dataset.root={root} needs one train.csv and at most one test.csv (or .csv.gz), but "
            f"holds {names}: give such a folder, or a csv file."
        )
    return found["train"][0], found["test"][0] if found["test"] else None


def _read_records(
    texts: Texts,
    path: Path,
    *,
    label_columns: Sequence[str],
    label_separator: str | None,
    id_column: str | None,
    kinds: Mapping[str, str],
    categories: Mapping[str, Sequence[str]],
    ignore: Sequence[str],
    class_names: Sequence[str],
    missing: str,
    missing_values: tuple[str, ...],
    skip: bool,
) -> Records:
    """Return a table's records; see :func:`load_csv`."""
    names = list(texts)
    id_columns = [id_column] if id_column is not None else []
    named = (*label_columns, *id_columns, *kinds, *categories, *ignore)
    check_columns(texts, named, where=str(path))
    excluded = [*label_columns, *id_columns, *ignore]
    for column in kinds:
        if column in excluded:
            raise _two_uses(column, path)
    candidates = [n for n in names if n not in excluded and (n in kinds or not kinds)]
    given = {**kinds, **dict.fromkeys(categories, CATEGORY)}
    notes: tuple[str, ...] = ()
    if skip:
        declared = [n for n in candidates if n in given]
        columns = [Column(n, given[n], tuple(categories.get(n, ()))) for n in declared]
        terms = (label_columns, label_separator, class_names, id_column)
        rows, notes = readable(unreadable_cells(texts, columns, *terms))
        texts = {name: cells[rows] for name, cells in texts.items()}
    kinds = {n: given.get(n) or _kind(texts[n], name=n, path=path) for n in candidates}
    if not kinds:
        raise _no_features(path, label_columns)
    schema = [
        Column(n, kind, (), missing == "indicator", missing_values)
        for n, kind in kinds.items()
        if kind != CATEGORY
    ]
    for n in (n for n, kind in kinds.items() if kind == CATEGORY):
        values = tuple(_categories(texts[n], categories.get(n), name=n, path=path))
        schema.append(Column(n, CATEGORY, values, missing_values=missing_values))
    features = list(encode_rows(texts, schema, where=str(path)).values())
    if not features:
        raise _no_features(path, label_columns)
    labels, classes = read_labels(
        texts, path, columns=label_columns, separator=label_separator, class_names=class_names
    )
    numbers = {n: numbers_of(texts[n]) for n, kind in kinds.items() if kind == NUMBER}
    fractional = {n for n, x in numbers.items() if (x % 1 > 0).any()}
    kept = [n for n in names if n not in label_columns and n not in fractional]
    return Records(
        features=torch.from_numpy(np.stack(features, axis=1)),
        labels=labels,
        ids=given_ids(texts[id_column], name=id_column, path=path)
        if id_column is not None
        else _feature_ids({n: texts[n] for n in kinds if n not in numbers}, numbers),
        class_names=classes,
        columns=names_in(texts, kept),
        schema=tuple(schema),
        label=label_columns[0] if len(label_columns) == 1 else "",
        label_separator=label_separator or "",
        id_column=id_column or "",
        notes=notes,
    )


def unreadable_cells(
    texts: Texts,
    schema: Sequence[Column],
    label_columns: Sequence[str],
    label_separator: str | None,
    class_names: Sequence[str],
    id_column: str | None,
) -> dict[str, np.ndarray]:
    """Return which rows cannot be read, each by itself, bool ``[N]``, by the column that says so.

    A cell is unreadable where it is no number of float32, no date, not among the declared
    categories or classes, no list of them, neither 0 nor 1; or no label or id is there.

    Args:
        texts: The columns' cells.
        schema: Columns of features; of categories those that are declared count.
        label_columns: See :func:`load_csv`.
        label_separator: See there.
        class_names: See there.
        id_column: See there.
    """
    wrong = {}
    for column in schema:
        cells, values = texts[column.name], column.categories
        if column.kind == CATEGORY:
            wrong[column.name] = ~among(cells, {"", *(values or cells.tolist())})
        else:
            wrong[column.name] = (cells != "") & ~np.isfinite(_values(cells, column))
    for name in label_columns:
        cells, classes = texts[name], set(class_names)
        if len(label_columns) > 1:
            cells, classes = _lowered(cells), {*_YES, *_NO}
        sets = [label_set(cell, label_separator) for cell in cells.tolist()]
        classes = classes or {name for own in sets for name in own} - {""}
        wrong[name] = np.array([not classes.issuperset(own) for own in sets], bool)
    if id_column is not None:
        wrong[id_column] = texts[id_column] == ""
    return wrong


def read_labels(
    texts: Texts,
    path: Path,
    *,
    columns: Sequence[str],
    separator: str | None,
    class_names: Sequence[str],
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the labels of a table's rows and the names of its classes; see :func:`load_csv`."""
    if len(columns) > 1:
        marks = [label_marks(texts[name], name=name, where=str(path)) for name in columns]
        return torch.from_numpy(np.stack(marks, axis=1).astype(np.int64)), tuple(columns)
    (column,) = columns
    cells, where = texts[column], f"{path}, column {column},"
    if separator is not None:
        sets = label_sets(cells, separator)
        classes = tuple(class_names) or tuple(sorted({name for own in sets for name in own}))
        if len(classes) < 2:
            raise ConfigError(
                f"{where} separated by {separator} holds {len(classes)} different labels: expected "
                "at least 2; correct dataset.label_separator, or name them in dataset.class_names."
            )
        return encode_label_sets(sets, classes, where=where), classes
    if (cells == "").any():
        row = int(np.argmax(cells == ""))
        raise ConfigError(f"{path} has no label ({column}) in row {row + 1}: fill or remove it.")
    classes = tuple(class_names) or _sorted_classes(cells)
    return encode_labels(cells, classes, where=where), classes


def label_marks(texts: np.ndarray, *, name: str, where: str) -> np.ndarray:
    """Return which rows have a label, bool ``[N]``, given its column of 0 and 1 or the like.

    Raises:
        ConfigError: A cell says neither yes nor no.
    """
    lowered = _lowered(texts)
    marks = among(lowered, _YES)
    wrong = np.flatnonzero(~marks & ~among(lowered, _NO))
    if len(wrong):
        raise ConfigError(
            f"column {name} of {where} is one of dataset.labels but holds "
            f"{rows_text(texts, wrong)}: expected 0 or 1 (or no and yes, false and true)."
        )
    return marks


def _lowered(texts: np.ndarray) -> np.ndarray:
    return np.array([text.lower() for text in texts.tolist()], dtype=object)


def _no_features(path: Path, label_columns: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{path} has no feature columns besides its label {', '.join(label_columns)}: add some."
    )


def _declared_kinds(columns: Mapping[str, Sequence[str]], *, path: Path) -> dict[str, str]:
    """Return the kind of each column of which the settings say it, given the columns by kind."""
    kinds: dict[str, str] = {}
    for kind, names in columns.items():
        for name in names:
            if name in kinds:
                raise _two_uses(name, path)
            kinds[name] = kind
    return kinds


def _two_uses(column: str, path: Path) -> ConfigError:
    return ConfigError(
        f"column {column} of {path} has two uses: name it in only one of dataset.label, "
        "dataset.labels, dataset.id_column, dataset.numeric, dataset.dates, dataset.categorical "
        "and dataset.ignore."
    )


def _kind(texts: np.ndarray, *, name: str, path: Path) -> str:
    """Return what a column holds.

    Raises:
        ConfigError: Nearly all are numbers: the others must be mistakes, or all are categories.
    """
    is_text = (texts != "") & np.isnan(numbers_of(texts))
    if not is_text.any():
        return NUMBER
    if not np.isnan(days_of(texts)[texts != ""]).any():
        return DATE
    if is_text.sum() > (1 - _NEARLY) * (texts != "").sum():
        return CATEGORY
    rows = np.flatnonzero(is_text)
    values = ", ".join(sorted(set(texts[rows].tolist()))[:5])
    raise ConfigError(
        f"column {name} of {path} holds numbers but for {rows_text(texts, rows)}: correct them, "
        f"set dataset.missing_values=[{values}] if they mean that the number is missing, or list "
        "the column in dataset.categorical or dataset.ignore."
    )


def _values(cells: np.ndarray, column: Column) -> np.ndarray:
    """Return the numbers or days in cells, float32 ``[N]``, not finite where they are none."""
    with np.errstate(over="ignore"):
        values: np.ndarray = (days_of if column.kind == DATE else numbers_of)(cells).astype(
            np.float32
        )
    return values


def _checked_numbers(texts: np.ndarray, *, column: Column, where: str) -> np.ndarray:
    """Return float32 ``[N]``, NaN where missing."""
    checked = _values(texts, column)
    unreadable = np.flatnonzero((texts != "") & ~np.isfinite(checked))
    if len(unreadable):
        kind = "numeric" if column.kind == NUMBER else "of dates"
        raise ConfigError(
            f"column {column.name} of {where} is {kind} but holds {rows_text(texts, unreadable)}: "
            "correct it, name it in dataset.missing_values if it means that the value is missing, "
            "or list the column in dataset.categorical or dataset.ignore."
        )
    return checked


def _categories(
    texts: np.ndarray, given: Sequence[str] | None, *, name: str, path: Path
) -> list[str]:
    """Return the values of a categorical column; a missing value belongs to none of them."""
    found = sorted(set(texts.tolist()) - {""})
    if given is not None:
        unknown = sorted(set(found) - set(given))
        if unknown:
            raise ConfigError(
                f"column {name} of {path} holds {unknown[0]}, which is not in "
                f"dataset.categories.{name}: add it there or correct the file."
            )
        return list(given)
    if len(found) > _MOST_CATEGORIES:
        raise ConfigError(
            f"column {name} of {path} has {len(found)} different texts, too many for one-hot "
            f"features (at most {_MOST_CATEGORIES}): list it in dataset.ignore, correct "
            f"it if it should be numeric, or give dataset.categories.{name}."
        )
    return found


def _sorted_classes(texts: np.ndarray) -> tuple[str, ...]:
    """Return the label's values, by number where all are whole numbers."""
    found = sorted(set(texts.tolist()))
    try:
        return tuple(sorted(found, key=int))
    except ValueError:
        return tuple(found)


def given_ids(texts: np.ndarray, *, name: str, path: Path) -> np.ndarray:
    """Return the ids that a column gives."""
    if (texts == "").any():
        row = int(np.argmax(texts == ""))
        raise ConfigError(f"{path} has no id ({name}) in row {row + 1}: fill or remove it.")
    return record_ids(text.encode("utf-8", "surrogatepass") for text in texts.tolist())


def _feature_ids(texts: Mapping[str, np.ndarray], numbers: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return hashes of parsed rows, given the categorical and the numeric columns by name."""
    values = [canonical(numbers[name]) for name in sorted(numbers)]
    others = ["\x1f".join(row) for row in zip(*(texts[n] for n in sorted(texts)), strict=True)]
    if not values:
        return record_ids(other.encode() for other in others)
    rows = np.stack(values, axis=1)
    if not others:
        return record_ids(row.tobytes() for row in rows)
    return record_ids(
        row.tobytes() + other.encode() for row, other in zip(rows, others, strict=True)
    )
