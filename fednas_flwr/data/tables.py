"""Reader of CSV tables: a label column, numeric columns, and categorical columns as one-hot.

Numbers stay as they are in the file, NaN where missing: whoever makes batches standardises them,
with statistics that were given or with a client's own (:mod:`fednas_flwr.data.loaders`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednas_flwr.data.images import RecordsPair
from fednas_flwr.data.records import Records, canonical, encode_labels, record_ids
from fednas_flwr.errors import ConfigError

_MOST_CATEGORIES = 256


def load_csv(
    path: Path,
    *,
    label: str | None = "last",
    id_column: str | None = None,
    numeric: Sequence[str] = (),
    categorical: Sequence[str] = (),
    categories: Mapping[str, Sequence[str]] | None = None,
    ignore: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> RecordsPair:
    """Return the records of a table and of its official test part, None where it has none.

    A record's id is the hash of its value in the ``id_column``, or else of its features as they are
    parsed, columns by name: 1.5 and 1.50 are one number, and columns that are no features do not
    count. A number with one more digit, or one more feature, makes another record of it; only an
    ``id_column`` prevents that. All columns but those of fractions are kept as ``Records.columns``.

    Args:
        path: A csv file with a header, or a folder with train.csv and optionally test.csv, whose
            columns and classes are those of train.csv; each may be compressed (.gz).
        label: Name of the label column, or ``last`` or None for the last one.
        id_column: Column that names the person (a patient, a card) whom a row is of, the same in
            every export; no feature.
        numeric: Numeric features; with ``categorical`` also empty, every column that holds only
            numbers is numeric and every other categorical.
        categorical: Categorical features, one feature ``column=value`` per category.
        categories: Values of categorical columns; the values found, sorted, where not given.
        ignore: Columns that are not features.
        class_names: The label's values in class order, or empty for those found, sorted.

    Raises:
        ConfigError: A column or value that does not fit this description.
    """
    train_path, test_path = _parts(path)
    table = _read_table(train_path)
    label = table.columns[-1] if label in (None, "last") else label
    train, found = _read_records(
        table,
        train_path,
        label=label,
        id_column=id_column,
        numeric=numeric,
        categorical=categorical,
        categories=categories or {},
        ignore=ignore,
        class_names=class_names,
    )
    if test_path is None:
        return train, None
    test, _ = _read_records(
        _read_table(test_path),
        test_path,
        label=label,
        id_column=id_column,
        numeric=train.feature_names[: train.num_numeric],
        categorical=list(found),
        categories=found,
        ignore=(),
        class_names=train.class_names,
    )
    return train, test


def _parts(root: Path) -> tuple[Path, Path | None]:
    """Return the files of the train and test parts; a root that is no folder is the train part."""
    if not root.is_dir():
        return root, None
    found = {
        part: [path for path in (root / f"{part}.csv", root / f"{part}.csv.gz") if path.is_file()]
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
    table: Any,
    path: Path,
    *,
    label: str,
    id_column: str | None,
    numeric: Sequence[str],
    categorical: Sequence[str],
    categories: Mapping[str, Sequence[str]],
    ignore: Sequence[str],
    class_names: Sequence[str],
) -> tuple[Records, dict[str, list[str]]]:
    """Return a table's records, and the values of its categorical columns; see :func:`load_csv`."""
    names = list(table.columns)
    id_columns = [id_column] if id_column is not None else []
    for column in (label, *id_columns, *numeric, *categorical, *categories, *ignore):
        if column not in names:
            raise ConfigError(f"{path} has no column {column}: it has {', '.join(names)}.")

    texts = {name: table[name].to_numpy(dtype=object, na_value="") for name in names}
    if (texts[label] == "").any():
        row = int(np.argmax(texts[label] == ""))
        raise ConfigError(f"{path} has no label ({label}) in row {row + 1}: fill or remove it.")
    excluded = [label, *id_columns, *ignore]
    for column in (*numeric, *categorical):
        if column in excluded or (column in numeric and column in categorical):
            raise ConfigError(
                f"column {column} of {path} has two uses: name it in only one of dataset.label, "
                "dataset.id_column, dataset.numeric, dataset.categorical and dataset.ignore."
            )
    candidates = [n for n in names if n not in excluded]
    if numeric or categorical:
        candidates = [n for n in candidates if n in numeric or n in categorical]
    one_hot = {*categorical, *categories}
    numbers = {n: _numbers(texts[n]) for n in candidates if n not in one_hot}
    if not (numeric or categorical):
        numbers = {n: x for n, x in numbers.items() if not np.isnan(x[texts[n] != ""]).any()}

    columns = [_numeric_column(texts[n], x, name=n, path=path) for n, x in numbers.items()]
    feature_names = list(numbers)
    found = {
        name: _categories(texts[name], categories.get(name), name=name, path=path)
        for name in candidates
        if name not in numbers
    }
    for name, values in found.items():
        columns.extend((texts[name] == value).astype(np.float32) for value in values)
        feature_names.extend(f"{name}={value}" for value in values)
    if not columns:
        raise ConfigError(f"{path} has no feature columns besides its label {label}: add some.")

    classes = tuple(class_names) or _sorted_classes(texts[label])
    fractional = {n for n, x in numbers.items() if (x % 1 > 0).any()}
    kept = [n for n in names if n != label and n not in fractional]
    records = Records(
        features=torch.from_numpy(np.stack(columns, axis=1)),
        labels=encode_labels(texts[label], classes, where=f"{path}, column {label},"),
        ids=_given_ids(texts[id_column], name=id_column, path=path)
        if id_column is not None
        else _feature_ids({name: texts[name] for name in found}, numbers),
        class_names=classes,
        columns={n: texts[n].astype(np.str_) for n in kept},
        feature_names=tuple(feature_names),
        num_numeric=len(numbers),
        id_column=id_column or "",
    )
    return records, found


def _read_table(path: Path) -> Any:
    """Return the file as a pandas table of text, NaN where empty."""
    import pandas as pd

    try:
        table = pd.read_csv(path, dtype=str, encoding="utf-8-sig")
    except (OSError, EOFError, ValueError) as error:
        raise ConfigError(f"dataset.root={path} cannot be read as a CSV table: {error}.") from error
    if len(table) == 0:
        raise ConfigError(f"dataset.root={path} has no rows: give a CSV table with a header.")
    return table


def _numbers(texts: np.ndarray) -> np.ndarray:
    """Return float64 ``[N]``, NaN where a text is missing or no number."""
    import pandas as pd

    numbers: np.ndarray = pd.to_numeric(pd.Series(texts), errors="coerce").to_numpy(dtype=float)
    return numbers


def _numeric_column(texts: np.ndarray, numbers: np.ndarray, *, name: str, path: Path) -> np.ndarray:
    """Return float32 ``[N]``, NaN where missing."""
    with np.errstate(over="ignore"):
        column = numbers.astype(np.float32)
    unreadable = np.flatnonzero((texts != "") & ~np.isfinite(column))
    if len(unreadable):
        row = int(unreadable[0])
        raise ConfigError(
            f"column {name} of {path} is numeric but holds {texts[row]} in row {row + 1}: correct "
            "it, or list the column in dataset.categorical or dataset.ignore."
        )
    return column


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


def _given_ids(texts: np.ndarray, *, name: str, path: Path) -> np.ndarray:
    """Return the ids that a column gives."""
    if (texts == "").any():
        row = int(np.argmax(texts == ""))
        raise ConfigError(f"{path} has no id ({name}) in row {row + 1}: fill or remove it.")
    return record_ids(text.encode() for text in texts.tolist())


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
