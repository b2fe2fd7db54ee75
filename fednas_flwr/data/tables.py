"""Reader of tables: a label column, numbers, dates, and one-hot categories.

Numbers stay as they are in the file, NaN where missing. They are standardised when batches are
made, by statistics that were given or found by the clients (:mod:`fednas_flwr.data.statistics`).
:mod:`fednas_flwr.data.table_files` reads files; :func:`encode_rows` is for training and prediction.
"""

import operator
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednas_flwr.base.errors import ConfigError, listed
from fednas_flwr.data import notation, records, table_files
from fednas_flwr.data.decoding import beside
from fednas_flwr.data.notation import Cells
from fednas_flwr.data.records import CATEGORY, DATE, KINDS, NUMBER, Column, feature_names
from fednas_flwr.data.statistics import LARGEST_NUMBER
from fednas_flwr.settings.data_settings import ANY_FORM, CSV, LabelTable, TableForm
from fednas_flwr.settings.names import DATE_ORDERS, REGRESSION, TABLE_SUFFIXES

_MOST_CATEGORIES = 256
_SAME_FEATURES = (
    "most records have the features of others with another label: each counts by itself, and their "
    "parts then depend on the whole table: name dataset.id_column to avoid it"
)
_MOSTLY, _SAMPLE = 0.5, 10_000  # share of records, in a sample of that size
_MOST_NUMBERED = 10  # classes that are numbers; more of them may be quantities
_NAMELESS = re.compile(r"column 1|Unnamed: 0(\.\d+)?")  # our name for it, and pandas'
_OF_ROWS = re.compile(r"row[ ._]?names?|index", re.IGNORECASE)  # names in R and pandas
_CODE = re.compile(r"0\d+|\d+[eE]\d+")  # codes that look like numbers, such as 007 and 1E10


def read_table(settings: CSV, path: Path) -> records.RecordsPair:
    """Return the records of a table and of its official test part, None if it has none.

    A record's id is the hash of its value in the ``id_column``, or else of its parsed features,
    columns by name: 1.5 and 1.50 are one number, and columns that are no features do not count. One
    more digit of a number, or one more feature, makes it another record; only an ``id_column``
    prevents that. All columns except those of fractions are kept as ``Records.columns``.

    Args:
        settings: Settings of the table.
        path: A table's file with a header; or a folder with train.csv and optionally test.csv or
            the like, whose columns and classes are those of the train part.

    Raises:
        ConfigError: A column or value does not fit the settings.
    """
    train_path, test_path = _parts(path)
    texts, settings, notes = read_cells(settings, train_path)
    train = records_of(settings, texts, train_path)
    notes += () if settings.strict else table_files.settings_beside(path)
    if path.is_dir() and not settings.strict:  # such as val.csv
        others = [file for file in path.iterdir() if not table_files.suffix_of(file)]
        advice = "if they hold further records, add these to one"
        notes += beside(path, [train_path, *others, test_path or path], advice)
    train = replace(train, notes=(*notes, *train.notes))
    if test_path is None:
        return train, None
    names = {kind: [c.name for c in train.schema if c.kind == kind] for kind in KINDS}
    settings = replace(
        settings,
        **known_labels(settings, train),
        numeric=names[NUMBER],
        dates=names[DATE],
        categorical=names[CATEGORY],
        categories={c.name: list(c.categories) for c in train.schema if c.kind == CATEGORY},
        ignore=[],
    )
    texts, settings, *_ = read_cells(settings, test_path)
    features = [column.name for column in train.schema]
    table_files.check_columns(texts, features, where=str(test_path))
    if train.label:
        cure = "; without labels it is no test set: move it, and give it to fednas predict later"
        table_files.check_columns(texts, [train.label], where=str(test_path), cure=cure)
    in_order = {name: texts[name] for name in (*features, *texts)}
    return train, records_of(settings, in_order, test_path)


def known_labels(settings: Any, train: records.Records) -> dict[str, Any]:
    """Return settings by which a test part has the labels of the train part."""
    if train.is_regression:
        signs = ("decimal", "thousands") if isinstance(settings, TableForm) else ()
        return {"task": REGRESSION} | {name: getattr(train.form, name) for name in signs}
    return {"class_names": [] if getattr(settings, "labels", None) else list(train.class_names)}


def form_of(settings: LabelTable) -> TableForm:
    """Return the form of a table's cells, which is part of the settings."""
    names = {field.name for field in fields(TableForm)}
    return replace(ANY_FORM, **{n: v for n, v in vars(settings).items() if n in names})


def read_cells(settings: CSV, path: Path) -> tuple[table_files.Texts, CSV, tuple[str, ...]]:
    """Return a table's cells in common form, settings including those found in it, and notes."""
    texts, separator, notes = table_files.read_texts(path, settings)
    table_files.check_columns(texts, [*settings.rename], where=str(path))
    texts, doubtful = table_files.without_missing(texts, settings)
    settings = replace(settings, label=label_column(settings, texts))
    if not settings.strict:
        names = [n for n in doubtful if column_kind(texts[n][:1000], settings)[0] == CATEGORY]
        if names:
            literal = f"dataset.missing_in={{{names[0]}: []}} takes it literally"
            said = f"NA or None in {listed(names, 5)} means that a cell is missing"
            notes.append(f"{said}; {literal}")
        texts, more = without_row_numbers(texts, [*named_columns(settings), *settings.numeric])
        notes += more
    no_numbers = {*settings.categorical, *settings.categories, *settings.ignore}
    no_numbers |= {*named_columns(settings)}
    others = {name: cells for name, cells in texts.items() if name not in no_numbers}
    adapted = [*settings.missing_in, *settings.map, *settings.scale]
    table_files.check_columns(texts, [*settings.numeric, *adapted], where=str(path))
    numbers = settings.numeric or [name for name in others if name not in settings.dates]
    target = texts.get(settings.label, Cells([]))
    is_said = settings.strict or settings.task or settings.class_names or settings.label_separator
    many = not is_said and target.are_plain and len(target.different) > _MOST_NUMBERED
    numbers = [*numbers, settings.label] if settings.is_regression or many else numbers
    plain = [n for n in numbers if n not in settings.numeric and texts[n].are_plain]
    coded = [n for n in plain if any(map(_CODE.fullmatch, texts[n][:1000].different))]
    if coded and not settings.strict:
        notes.append(
            f"numbers such as 007 or 1E10 in {listed(coded, 5)}: if they are codes, set "
            f"{table_files.as_categories(coded)}"
        )
    dates = None if settings.strict else list(others)
    texts, settings, unused = table_files.in_common_form(
        texts, settings, numbers, dates, separator, where=str(path)
    )
    if not settings.strict:
        order = (settings.date_order or "").replace("_", " ")
        unusual = [str(table_files.notation_of(settings)), order and f"dates with the {order}"]
        notes += filter(None, unusual)
        if settings.label in texts and not settings.labels and not settings.label_separator:
            texts, more = labelled(texts, settings, path, doubtful)
            notes += more
    return texts, settings, (*found_in(path, notes), *unused)


def labelled(
    texts: table_files.Texts, settings: LabelTable, path: Path, doubtful: Collection[str]
) -> tuple[table_files.Texts, list[str]]:
    """Return the rows with a label, and a note on the others.

    Args:
        texts: A table's cells.
        settings: Its settings.
        path: Path of the table.
        doubtful: Columns with a word that means a missing label but may also be a class.

    Raises:
        ConfigError: No row has a label; or a word may mean a missing label or a class.
    """
    label, missing = settings.label, texts[settings.label].missing
    are_words = label in doubtful and column_kind(texts[label], form_of(settings))[0] == CATEGORY
    if are_words or missing.all():
        more = f"; where a word such as None or NA is a class, set dataset.missing_in={{{label}: []"
        more += "}, and where it says that there is none, dataset.missing_values=[NA,None]"
        _check_filled(texts[label], f"label ({label})", path, more)
    if not missing.any():
        return texts, []
    rows = listed(map(str, texts[label].numbered(np.flatnonzero(missing))), 5)
    note = f"rows without a label ({label}) are left out ({missing.sum()}: {rows})"
    return {name: cells[~missing] for name, cells in texts.items()}, [note]


def found_in(path: Path, notes: Sequence[str]) -> tuple[str, ...]:
    """Return one sentence on what was found in a file, if anything was."""
    return (f"{path.name}: {', '.join(notes)}",) if notes else ()


def without_row_numbers(
    texts: table_files.Texts, used: Sequence[str] = ()
) -> tuple[table_files.Texts, list[str]]:
    """Return the columns without a first one that names or counts the rows, as in pandas and R.

    Names of rows all differ, and are texts or whole numbers, also in a selection of rows.
    """
    (name, cells), *others = texts.items()
    if name in used or not others or len(cells) < 2:
        return texts, []
    if _NAMELESS.fullmatch(name):
        dates = [np.isfinite(notation.days_of(cells, order)) for order in DATE_ORDERS]
        odd = (cells.numbers % 1 > 0) | np.logical_or.reduce(dates) | cells.missing
        said = "which has no name and another text or whole number in every row"
        are = len(cells.different) == len(cells) and not odd.any()
    else:
        said = f"{name}, which counts rows"
        are = bool(_OF_ROWS.fullmatch(name)) and bool((np.diff(cells.numbers) == 1).all())
    return (dict(others), [f"the first column, {said}, is left out"]) if are else (texts, [])


def label_column(settings: LabelTable, texts: table_files.Texts) -> str:
    """Return the name of a table's label column; not for tables with one column per label."""
    return settings.label if settings.names_label or settings.labels else list(texts)[-1]


def inputs_at(settings: CSV, inputs: records.Inputs) -> records.Inputs:
    """Return the inputs of a model with the file's format, label and id column of one site."""
    label = "" if settings.labels else settings.label
    return replace(inputs, form=form_of(settings), label=label, id_column=settings.id_column or "")


def label_columns(settings: LabelTable) -> list[str]:
    """Return the names of a table's label columns: one, or one per label."""
    return settings.labels or [settings.label]


def encode_rows(
    texts: Mapping[str, Cells], schema: Sequence[Column], form: TableForm, *, where: str
) -> np.ndarray:
    """Encode rows as float32 ``[N, F]``, by :func:`~fednas_flwr.data.records.feature_names`.

    Args:
        texts: The columns' cells in common form; empty ones are missing.
        schema: The columns, each with one or more features; an unknown category has no feature.
        form: Format of dates.
        where: Source of the rows, for messages.

    Raises:
        ConfigError: A column is missing, or a cell is not the number or date that it should be.
    """
    table_files.check_columns(texts, [column.name for column in schema], where=where)
    numbers, indicators, categories = [], [], []
    for column in schema:
        cells = texts[column.name]
        if column.kind != CATEGORY:
            numbers.append(_checked_numbers(cells, form, column=column, where=where))
        if column.indicator:
            indicators.append(cells.missing)
        if column.kind == CATEGORY:
            places = notation.places_among(cells, column.categories)
            categories += [places == i for i in range(len(column.categories))]
    columns = [*numbers, *indicators, *categories]
    features = np.empty((len(columns[0]), len(columns)), np.float32)
    for rows in records.chunks(len(features)):  # faster than all at once
        features[rows] = np.stack([column[rows] for column in columns]).T
    return features


def _parts(root: Path) -> tuple[Path, Path | None]:
    """Return the files of the train and test parts; a root that is no folder is the train part."""
    if not root.is_dir():
        return root, None
    names = {part: [f"{part}{suffix}" for suffix in TABLE_SUFFIXES] for part in ("train", "test")}
    files = sorted(root.iterdir())
    found = {part: [f for f in files if f.name.lower() in names[part]] for part in names}
    if len(found["train"]) != 1 or len(found["test"]) > 1:
        held = listed([file.name for file in files if table_files.suffix_of(file)]) or "no table"
        raise ConfigError(
            f"dataset.root={root} holds {held}: expected one train.csv, maybe with one test.csv; "
            "if there is one file per site, set partition=sites."
        )
    return found["train"][0], found["test"][0] if found["test"] else None


def records_of(settings: CSV, texts: table_files.Texts, path: Path) -> records.Records:
    """Return records whose columns are those named in the settings, or found."""
    kinds = {
        **dict.fromkeys(settings.numeric, NUMBER),
        **dict.fromkeys(settings.dates, DATE),
        **dict.fromkeys(settings.categorical, CATEGORY),
    }
    no_features = [*named_columns(settings), *settings.ignore]
    table_files.check_columns(texts, [*no_features, *kinds, *settings.categories], where=str(path))
    takes_all = not kinds
    kinds |= dict.fromkeys(settings.categories, CATEGORY)
    in_order = texts if takes_all or not settings.strict else kinds  # as sites declare them
    names = [n for n in in_order if n not in no_features and (n in kinds or takes_all)]
    declared = [
        Column(n, kinds[n], tuple(settings.categories.get(n, ()))) for n in names if n in kinds
    ]
    unnamed = [n for n in texts if n not in names and n not in no_features]
    notes: tuple[str, ...] = ()
    if unnamed and not settings.strict:
        said = "left out, as no feature in dataset.numeric, dates or categorical: these name all"
        notes = (f"{listed(unnamed, 5)} {said}, if one is set",)
    if settings.corrupt == "skip":
        rows, notes = records.readable(unreadable_cells(settings, texts, declared))
        texts = {name: cells[rows] for name, cells in texts.items()} if notes else texts
    kind_of = {n: kinds.get(n) or _found_kind(texts[n], settings, n, path) for n in names}
    words = [n for n, k in kind_of.items() if k == CATEGORY and not settings.categories.get(n)]
    many = {n: len(notation.distinct(texts[n].different)) for n in words}
    if undeclared := [n for n, number in many.items() if number > _MOST_CATEGORIES]:
        name, ignored = undeclared[0], ",".join([*settings.ignore, *undeclared])
        more = f", and so have {listed(undeclared[1:], 8)}" if undeclared[1:] else ""
        raise ConfigError(
            f"column {name} of {path} has {many[name]} different texts, too many for one-hot "
            f"features (at most {_MOST_CATEGORIES}){more}: set "
            f"dataset.ignore=[{ignored}]; where one says whose a record is, "
            f"dataset.id_column={name}; or correct it if it should be numeric, or give "
            f"dataset.categories.{name}."
        )
    indicator = settings.missing == "indicator"
    schema = [Column(n, kind, (), indicator) for n, kind in kind_of.items() if kind != CATEGORY]
    for n in [n for n, kind in kind_of.items() if kind == CATEGORY]:  # categories last
        values = _categories(texts[n], settings.categories.get(n), name=n, path=path)
        schema.append(Column(n, CATEGORY, values))
    found = _records(settings, texts, path, tuple(schema))
    return replace(found, notes=(*notes, *found.notes))


def named_columns(settings: LabelTable) -> list[str]:
    """Return the names of the columns of labels and persons."""
    return label_columns(settings) + ([] if settings.id_column is None else [settings.id_column])


def _records(
    settings: CSV, texts: table_files.Texts, path: Path, schema: tuple[Column, ...]
) -> records.Records:
    """Return the records of a table whose columns are known."""
    labelled = label_columns(settings)
    if not feature_names(schema):
        raise ConfigError(
            f"{path} has no feature columns besides its label {', '.join(labelled)}: add some, or "
            "set dataset.separator to what is between its cells."
        )
    for name, number in Counter(feature_names(schema)).items():
        if number > 1:
            raise ConfigError(
                f"{path} gives {number} features the name {name}: rename a column, in the file or "
                "by dataset.rename={name: other}."
            )
    features = torch.from_numpy(encode_rows(texts, schema, settings, where=str(path)))
    labels, classes = read_labels(settings, texts, path)
    if settings.id_column is not None:
        same = ids = person_ids(settings, texts, path)
    else:
        same = ids = _feature_ids(texts, schema, features.numpy())
        if not settings.strict and labels.dim() == 1:
            ids = _apart(same, labels.numpy())
    numbers = {c.name: texts[c.name].numbers for c in schema if c.kind == NUMBER}
    fractional = {name for name, x in numbers.items() if (x > np.floor(x)).any()}
    named = [n for n in texts if n not in labelled and n not in fractional]
    return labelled_records(
        settings,
        features=features,
        labels=labels,
        ids=ids,
        notes=() if ids is same else (_SAME_FEATURES,),
        class_names=classes,
        columns=table_files.names_in(texts, named),
        schema=schema,
    )


def labelled_records(settings: LabelTable, **of_records: Any) -> records.Records:
    """Return records with a table's settings of labels and persons."""
    return records.Records(
        **of_records,
        label="" if settings.labels else settings.label,
        label_separator=settings.label_separator or "",
        form=form_of(settings),
        id_column=settings.id_column or "",
    )


def unreadable_cells(
    settings: LabelTable, texts: table_files.Texts, schema: Sequence[Column]
) -> dict[str, np.ndarray]:
    """Return the unreadable rows by column, bool ``[N]`` each; every row is read by itself.

    Depending on its column, a cell is unreadable if it is no number of float32, no date, not among
    the declared categories or classes, no list of these, neither 0 nor 1, or a missing label or id.

    Args:
        settings: Names of the columns of labels and ids, and of the classes.
        texts: The columns' cells.
        schema: Columns of features; only declared categories count.
    """
    wrong, form = {}, form_of(settings)
    for column in schema:
        cells, values = texts[column.name], column.categories
        if column.kind == CATEGORY:
            wrong[column.name] = (
                ~cells.missing & (notation.places_among(cells, values) < 0) & bool(values)
            )
        else:
            wrong[column.name] = ~cells.missing & ~np.isfinite(_values(cells, form, column))
    for name in label_columns(settings):
        cells, classes = texts[name], set(settings.class_names)
        if settings.is_regression:
            wrong[name] = ~np.isfinite(_values(cells, form, Column(name)))
            continue
        if settings.labels:
            cells, classes = cells.changed(str.lower), {*notation.YES_NO}
        wrong[name] = _unknown_labels(cells, classes, settings.label_separator)
    if settings.id_column is not None:
        wrong[settings.id_column] = texts[settings.id_column].missing
    return wrong


def _unknown_labels(cells: Cells, classes: set[str], separator: str | None) -> np.ndarray:
    """Return the rows without a label, or with one that is not among the classes (if any)."""
    names = partial(records.label_names, separator=separator)
    classes = classes or {name for text in cells.different for name in names(text)}
    key = notation.code_key([*classes])
    known = {*map(key, classes)}
    return ~cells.each(lambda text: known.issuperset(map(key, names(text))), bool)


def read_labels(
    settings: LabelTable, texts: table_files.Texts, path: Path
) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return a table's labels, and the names of its classes or of the number to predict."""
    if settings.labels:
        marks = label_marks(texts, settings.labels, where=str(path))
        return torch.from_numpy(marks.astype(np.int64)), tuple(settings.labels)
    column, separator = settings.label, settings.label_separator
    cells, where = texts[column], f"{path}, column {column},"
    if separator is not None:
        names = {n for text in cells.different for n in records.label_names(text, separator)}
        classes = tuple(settings.class_names) or notation.distinct(names)
        if len(classes) < 2:
            raise ConfigError(
                f"{where} separated by {separator} holds {len(classes)} different labels: expected "
                "at least 2; correct dataset.label_separator, or name them in dataset.class_names."
            )
        return records.encode_labels(cells, classes, separator, where=where), classes
    literal = f"; if a word such as None or NA is one, set dataset.missing_in={{{column}: []}}"
    _check_filled(cells, f"label ({column})", path, literal)
    classes = tuple(settings.class_names) or _sorted_classes(cells)
    form, plain, target = form_of(settings), cells, Column(column)
    if not settings.is_regression and form.decimal is not None:
        plain = cells.changed(table_files.notation_of(form).plain, but_stored=True)
    if settings.is_regression or _are_quantities(settings, plain, where):
        other = "set dataset.task=classification if each is a class"
        numbers = _checked_numbers(plain, form, column=target, where=str(path), other=other)
        return torch.from_numpy(numbers), (column,)
    return records.encode_labels(cells, classes, where=where), classes


def _are_quantities(settings: LabelTable, cells: Cells, where: str) -> bool:
    """Return true if labels are numbers to predict, by their values; never at private sites.

    Raises:
        ConfigError: They can be numbers or classes.
    """
    classes, num_rows = notation.distinct(cells.different), len(cells)
    few = len(classes) <= _MOST_NUMBERED or getattr(settings, "corrupt", "") == "skip"
    if few or settings.task or settings.class_names:
        return False
    are = notation.are_numbers(classes)
    many = len(classes) > max(2 * _MOST_NUMBERED, num_rows / 10)
    affixed = sum(bool(notation.AFFIXED.match(name)) for name in classes)
    are_mostly = are.mean() >= notation.NEARLY
    if not are_mostly and not (many and affixed >= notation.NEARLY * len(classes)):
        return False
    if are_mostly and (many or not are.all() or any(float(name) % 1 for name in classes)):
        return True
    raise ConfigError(
        f"{where} holds {len(classes)} different {'whole numbers' if are_mostly else 'texts'} such "
        f"as {listed(classes, 3)} in {num_rows} rows: set dataset.task=regression if they are "
        "numbers to predict (of a date give its days), or dataset.task=classification if each is a "
        "class."
    )


def label_marks(texts: Mapping[str, Cells], names: Sequence[str], *, where: str) -> np.ndarray:
    """Return bool ``[N, L]``, true if a row has a label, from columns of 0 and 1 or the like.

    Raises:
        ConfigError: A cell means neither yes nor no.
    """
    words = {n: {text or table_files.BLANK for text in texts[n].tolist()} for n in names}
    others = {
        n: sorted(word for word in of if word.lower() not in notation.YES_NO)[:10]
        for n, of in words.items()
    }
    unclear = {n: of for n, of in others.items() if of}
    for n in unclear:  # of 1 and 2 alone, 1 may be no
        if "no" not in {notation.YES_NO.get(word.lower()) for word in words[n]}:
            unclear[n] += sorted(words[n].difference(unclear[n]))[:10]
    if unclear:
        name, more = next(iter(unclear)), len(unclear) - 1
        raise ConfigError(
            f"column {name} of {where}{f' (and {more} more)' if more else ''} is one of "
            f"the labels but holds {table_files.counted(texts[name])}: expected 0 or 1 (or no "
            f"and yes, false and true); set {respelling(unclear)} with 1 for what means yes, or "
            "leave such rows out by dataset.corrupt=skip."
        )
    marks = [texts[n].each(lambda t: notation.YES_NO.get(t.lower()) == "yes", bool) for n in names]
    return np.stack(marks, axis=1)


def respelling(words: Mapping[str, Sequence[str]]) -> str:
    """Return an override, to be edited, by which some words in columns become 0."""
    maps = {n: ", ".join(f"{table_files.typed(w)}: 0" for w in of) for n, of in words.items()}
    columns = ", ".join(f"{table_files.typed(name)}: {{{of}}}" for name, of in maps.items())
    return f"'dataset.map={{{columns}}}'"


def column_kind(cells: Cells, form: TableForm) -> tuple[str, np.ndarray]:
    """Return the kind of a column by its cells, and the rows, int64 ``[n]``, that do not fit it.

    These rows are few: with more of them, the column is one of categories.
    """
    present = ~cells.missing
    for kind in (NUMBER, DATE):
        values = cells.numbers if kind == NUMBER else notation.days_of(cells, form.date_order)
        others = np.flatnonzero(present & np.isnan(values))
        if len(others) <= (1 - notation.NEARLY) * present.sum():
            return kind, others
    return CATEGORY, np.array([], dtype=np.int64)


def _found_kind(cells: Cells, form: TableForm, name: str, path: Path) -> str:
    """Return the kind of a column.

    Raises:
        ConfigError: Nearly all cells are numbers or dates: either the others are mistakes, or all
            are categories.
    """
    kind, others = column_kind(cells, form)
    if len(others):
        words = ", ".join(sorted(cells[others].different)[:5])
        raise ConfigError(
            f"column {name} of {path} holds {kind}s but for {table_files.rows_text(cells, others)}:"
            f" correct them, set dataset.missing_values=[{words}] if they mean that the {kind} is "
            f"missing, or set {table_files.as_categories([name])} or dataset.ignore=[{name}]."
        )
    return kind


def _values(cells: Cells, form: TableForm, column: Column) -> np.ndarray:
    """Return the numbers or days in cells, float32 ``[N]``, not finite for other cells."""
    is_date = column.kind == DATE
    with np.errstate(over="ignore"):
        values = notation.days_of(cells, form.date_order) if is_date else cells.numbers
        return values.astype(np.float32)


def _checked_numbers(
    cells: Cells, form: TableForm, *, column: Column, where: str, other: str = ""
) -> np.ndarray:
    """Return float32 ``[N]``, NaN where missing."""
    checked = _values(cells, form, column)
    most = np.finfo(np.float32).max if form.strict else LARGEST_NUMBER
    unreadable = np.flatnonzero(~cells.missing & ~(abs(checked) <= most))
    if len(unreadable):
        kind = "numeric" if column.kind == NUMBER else "of dates"
        other = other or f"set {table_files.as_categories([column.name])} or dataset.ignore"
        raise ConfigError(
            f"column {column.name} of {where} is {kind} but holds "
            f"{table_files.rows_text(cells, unreadable)}: correct it, name it in "
            f"dataset.missing_values if it means that the value is missing, or {other}."
        )
    return checked


def _categories(
    cells: Cells, declared: Sequence[str] | None, *, name: str, path: Path
) -> tuple[str, ...]:
    """Return the values of a categorical column; a missing cell is none of them."""
    if not declared:
        return notation.distinct(cells.different)
    unknown = cells[notation.places_among(cells, declared) < 0].different
    records.check_known(
        unknown, declared, f"column {name} of {path} holds", f"dataset.categories.{name}"
    )
    return tuple(declared)


def _sorted_classes(cells: Cells) -> tuple[str, ...]:
    """Return the label's sorted values, sorted as numbers if all are whole numbers."""
    codes = notation.distinct(cells.different)
    try:
        return tuple(sorted(codes, key=int))
    except ValueError:
        return codes


def person_ids(settings: LabelTable, texts: table_files.Texts, path: Path) -> np.ndarray:
    """Return the ids made from the column of persons."""
    cells = texts[settings.person_column]
    _check_filled(cells, f"id ({settings.id_column})", path)
    return cells.each(records.text_id, records.ID)


def _check_filled(cells: Cells, what: str, path: Path, more: str = "") -> None:
    if cells.missing.any():
        row, *_ = cells.numbered(np.flatnonzero(cells.missing))
        raise ConfigError(f"{path} has no {what} in row {row}: fill or remove it{more}.")


def _apart(ids: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return ids that distinguish records with the same features if features say little.

    With few features of few values, most records share theirs with records of other labels, and
    equal features do not mean the same record. Then the id also depends on the label and on the
    number of equal records before. Adding or removing a record changes no other id, unless it
    changes this choice.
    """
    some = slice(None, None, max(1, len(ids) // _SAMPLE))
    _, first, places = np.unique(ids[some], return_index=True, return_inverse=True)
    mixed = np.bincount(places, labels[some] != labels[some][first][places]) > 0
    if mixed[places].mean() < _MOSTLY:
        return ids
    seen: Counter[bytes] = Counter()
    named = [b"%s %a" % pair for pair in zip(ids.tolist(), labels.tolist(), strict=True)]
    for row, name in enumerate(named):
        named[row] = b"%s %d" % (name, seen[name])
        seen[name] += 1
    return records.record_ids(named)


def _feature_ids(
    texts: Mapping[str, Cells], schema: Sequence[Column], features: np.ndarray
) -> np.ndarray:
    """Return hashes of parsed rows: of encoded numbers, and of the texts in other columns."""
    names = feature_names(schema)
    numbers = [names.index(name) for name in sorted(c.name for c in schema if c.kind == NUMBER)]
    others = sorted(column.name for column in schema if column.kind != NUMBER)
    parts = [texts[name].each(str.encode, object) for name in others]

    def contents(rows: slice) -> Iterable[bytes]:
        words = map(b"\x1f".join, zip(*(part[rows].tolist() for part in parts), strict=True))
        if not numbers:
            return words
        values = np.ascontiguousarray(records.canonical(features[rows, numbers]))
        values = values.view(f"V{4 * len(numbers)}")[:, 0].tolist()
        return map(operator.add, values, words) if others else values

    return records.record_ids(chain.from_iterable(map(contents, records.chunks(len(features)))))
