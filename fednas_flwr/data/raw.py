"""Raw data for a trained model: arrays, DataFrames, files and folders, in batches.

Records are treated as in training, by the same functions, with the model's
:class:`~fednas_flwr.data.records.Inputs`. Labels in the data are also read, by name.
"""

import re
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednas_flwr.base.errors import ConfigError, listed
from fednas_flwr.data import decoding, npz, table_files
from fednas_flwr.data.images import files_of, labels_texts, with_names_first
from fednas_flwr.data.notation import NEARLY, Cells, distinct, places_among
from fednas_flwr.data.oddities import off_scale
from fednas_flwr.data.records import CATEGORY, DATE, NUMBER, Inputs, encode_labels
from fednas_flwr.data.site_tables import site_files
from fednas_flwr.data.tables import encode_rows, label_marks
from fednas_flwr.settings.data_settings import CSV, EncodedImages, TableForm

_FEWEST = 10  # rows needed to judge a column
_UNCOMPARED = ": predictions are not compared with labels"
_SETTING = re.compile(
    rf"dataset\.({'|'.join(f.name for kind in (CSV, EncodedImages) for f in fields(kind))})\b"
)

Label = str | float | tuple[str, ...]  # a record's class or labels, by name, or its number


@dataclass(frozen=True)
class RawData:
    """Records to predict.

    Attributes:
        names: One per record: a file's path, or the row's number from 0.
        labels: As ``Records.labels``, but float64 for numbers to predict; None without labels.
        batch: Function that returns a slice of the records as the model's ``forward`` takes them.
        notes: Sentences about what is odd in the records.
        ids: The person of each record, if the data names it.
    """

    names: list[str]
    labels: Tensor | None
    batch: Callable[[slice], Tensor]
    notes: tuple[str, ...] = ()
    ids: Sequence[str] | None = None

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.names)

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield all records in their order, ``size`` of them at a time."""
        for start in range(0, len(self), size):
            yield self.batch(slice(start, start + size))


def read_raw(data: Any, inputs: Inputs) -> RawData:
    """Return raw data in the form of a model's inputs.

    Args:
        data: For a table: a DataFrame, an array ``[N, columns]`` in the columns' order, or the path
            of a table, of a folder of sites' tables or of an npz file. For images: an array
            ``[N, C, H, W]``, ``[N, H, W]`` or ``[N, H, W, C]``, uint8 from 0 to 255 or float from 0
            to 1; or the path of an image, of a folder (sub-folders named by classes give labels),
            of a table whose first column names images, or of an npz or npy file. An npz file gives
            its array ``x``, or the test part of a data set, or else the train part.
        inputs: The inputs of the model.

    Raises:
        ConfigError: The data is not of this form.
    """
    try:
        return _read(data, inputs)
    except ConfigError as error:  # a model has no settings to change
        said = str(error).removeprefix("dataset.root=")
        if advice := _SETTING.search(said):
            end = max(said.rfind(sign, 0, advice.start()) for sign in (": ", "; "))
            said = f"{said[:end]}: write it as the data that the model was trained on."
        raise ConfigError(said) from error


def _read(data: Any, inputs: Inputs) -> RawData:
    if isinstance(data, str | Path):
        return _read_path(Path(data).expanduser(), inputs)
    data = npz.plain(data.to_pandas() if inputs.is_table and hasattr(data, "to_pandas") else data)
    if hasattr(data, "iloc") and hasattr(data, "columns") and inputs.is_table:
        texts = table_files.texts_of(data)
        if "Unnamed: 0" in texts:  # pandas' name of a first column without a name
            texts.setdefault("column 1", texts["Unnamed: 0"])
        return _rows(texts, inputs, where="the DataFrame")
    return _array(data, inputs, where="the data")


def _read_path(path: Path, inputs: Inputs) -> RawData:
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give the data to predict.")
    if path.suffix in (".npz", ".npy"):
        return _numpy_file(path, inputs)
    if inputs.is_table:
        return _sites(path, inputs) if path.is_dir() else _table(path, inputs.form, inputs)
    if table_files.suffix_of(path):
        form = replace(inputs.form, separator=None, encoding=None, corrupt="refuse")
        target = inputs.label if inputs.target and inputs.label else None
        texts, *_ = labels_texts(path, form, whole=False, target=target)
        texts, _ = with_names_first(texts, path)
        files = list(files_of(texts, path).values())
        labels, notes = _row_labels(texts, inputs, where=str(path))
        batch = _decoded(decoding.source_of(files), len(files), inputs)
        names = next(iter(texts.values())).tolist()
        return RawData(names, labels, batch, tuple(notes), _ids(texts, inputs))
    files = decoding.image_files(path) if path.is_dir() else [path]
    if not files or files[0].suffix.lower() not in decoding.SUFFIXES:
        raise ConfigError(
            f"{path} holds no images: expected an npz or npy file, or files of "
            f"{', '.join(sorted(decoding.SUFFIXES))}."
        )
    names = [str(file.relative_to(path)) if path.is_dir() else str(file) for file in files]
    parents = [set(Path(name).parts[:-1]) & set(inputs.class_names) for name in names]
    others = sum(len(classes) != 1 for classes in parents)
    notes = [*decoding.other_files(path), *decoding.masks_in([Path(name).parts for name in names])]
    if 0 < others < len(parents):
        notes.append(f"{others} of {len(parents)} images are in no class's folder{_UNCOMPARED}")
    elif others and path.is_dir():
        tables = [file for file in path.iterdir() if table_files.suffix_of(file)]
        notes += [f"{table} is not read: give it in place of its folder" for table in tables]
    return RawData(
        names,
        None if others else torch.tensor([inputs.class_names.index(min(of)) for of in parents]),
        _decoded(decoding.source_of(files), len(files), inputs),
        tuple(notes),
    )


def _table(path: Path, form: TableForm, inputs: Inputs, *, lacks: bool = False) -> RawData:
    """Return the rows of a table's file of a given form; with ``lacks``, columns may be missing."""
    encoding = None if form.strict else form.encoding  # sites fix one; prediction takes any
    texts, separator, read = table_files.read_texts(
        path, replace(form, separator=None, encoding=encoding), keep_empty=True
    )
    raw = _rows(texts, replace(inputs, form=form), separator, where=str(path), lacks=lacks)
    twice = (note for note in read if note.startswith("a further column"))
    raw = replace(raw, notes=(*twice, *raw.notes))
    if blank := int(np.logical_and.reduce([cells.missing for cells in texts.values()]).sum()):
        raw = replace(raw, notes=(*raw.notes, f"empty rows, predicted nonetheless: {blank}"))
    return raw if lacks else replace(raw, notes=raw.notes + table_files.settings_beside(path))


def _sites(root: Path, inputs: Inputs) -> RawData:
    """Return the rows of all sites' tables in a folder, named by site; each may lack columns."""
    files = site_files(inputs.form, root).items()
    sites = {site: _table(path, form, inputs, lacks=True) for site, (path, form) in files}
    rows = torch.cat([raw.batch(slice(None)) for raw in sites.values()])
    labels = [raw.labels for raw in sites.values() if raw.labels is not None]
    ids = [person for raw in sites.values() for person in raw.ids or ()]
    return RawData(
        [f"{site}/{name}" for site, raw in sites.items() for name in raw.names],
        torch.cat(labels) if len(labels) == len(sites) else None,
        rows.__getitem__,
        tuple(f"{site}: {note}" for site, raw in sites.items() for note in raw.notes),
        ids if len(ids) == len(rows) else None,
    )


def _numpy_file(path: Path, inputs: Inputs) -> RawData:
    arrays = npz.usual_names(npz.read_arrays(path))
    for part in ("", "_test", "_val", "_train"):
        of = part.removeprefix("_")
        if f"x{part}" in arrays:
            raw = _array(arrays[f"x{part}"], inputs, where=str(path))
        elif f"{of}_bytes" in arrays:
            contents = npz.cut(arrays[f"{of}_bytes"], arrays[f"{of}_off"], origin=str(path))
            decoded = _decoded(partial(npz.named, contents, str(path)), len(contents), inputs)
            raw = RawData(_numbers(contents), None, decoded)
        else:
            continue
        given = arrays.get(f"y{part}")
        labels = None if given is None else _checked_labels(given, inputs)
        differs = given is not None and labels is None
        notes = (f"y{part} of {path} has other labels than the model{_UNCOMPARED}",) * differs
        return replace(raw, labels=labels, notes=(*raw.notes, *notes))
    raise ConfigError(f"{path} holds the arrays {', '.join(arrays)}: expected x.")


def _checked_labels(labels: np.ndarray, inputs: Inputs) -> Tensor | None:
    """Return labels as in ``RawData``; None if they are of another form."""
    names, classes = inputs.class_names, len(inputs.class_names)
    are_numbers = labels.dtype.kind in "iuf" and all(map(str.isdecimal, names))
    if are_numbers and not inputs.multi_label and [*names] != [*map(str, range(classes))]:
        return None  # they may be names of classes, or places of names
    with suppress(ConfigError):  # a text that is no class
        labels = npz.numbered(npz.usual_labels(labels), inputs.class_names, "")
    form = (classes,) if inputs.multi_label else ()
    if labels.dtype.kind not in ("iuf" if inputs.target else "iu") or labels.shape[1:] != form:
        return None
    if inputs.target:
        return torch.from_numpy(labels.astype(float))
    if inputs.multi_label:
        return torch.from_numpy(labels == 1).long()
    fit = all(0 <= label < classes for label in np.unique(labels))
    return torch.from_numpy(labels.astype(np.int64)) if fit else None


def _decoded(
    source: Callable[[int], tuple[str, bytes]], count: int, inputs: Inputs
) -> Callable[[slice], Tensor]:
    def batch(chosen: slice) -> Tensor:
        images = []
        for i in range(*chosen.indices(count)):
            name, content = source(i)
            images.append(decoding.decode_like(content, name, inputs.shape, inputs.intensity))
        return torch.from_numpy(np.stack(images))

    return batch


def _rows(
    texts: table_files.Texts, inputs: Inputs, between: str = "", *, where: str, lacks: bool = False
) -> RawData:
    texts, _ = table_files.without_missing(texts, inputs.form)
    if lacks:
        empty = Cells([""] * len(next(iter(texts.values()))))
        texts = {column.name: empty for column in inputs.schema} | texts
    table_files.check_columns(texts, [column.name for column in inputs.schema], where=where)
    numbers = [column.name for column in inputs.schema if column.kind == NUMBER]
    numbers += [inputs.label] if inputs.target and inputs.label in texts else []
    dates, form = None, inputs.form
    if None in (form.decimal, form.date_order):  # the sites did not agree on it
        dates = [column.name for column in inputs.schema if column.kind == DATE]
    texts, form, _ = table_files.in_common_form(texts, form, numbers, dates, between, where=where)
    rows = torch.from_numpy(encode_rows(texts, inputs.schema, form, where=where))
    labels, of_labels = _row_labels(texts, inputs, where=where)
    scales = off_scale(rows, inputs.schema, inputs.mean, inputs.std)
    notes = (*_unlike_training(texts, inputs), *scales, *of_labels)
    return RawData(_numbers(rows), labels, rows.__getitem__, notes, _ids(texts, inputs))


def _ids(texts: table_files.Texts, inputs: Inputs) -> list[str] | None:
    """Return the person of each row; None if the table does not name it."""
    return texts[inputs.id_column].tolist() if inputs.id_column in texts else None


def _unlike_training(texts: table_files.Texts, inputs: Inputs) -> Iterator[str]:
    """Yield a sentence about every column without a cell, or with many unknown categories."""
    for column in inputs.schema:
        name, cells = column.name, texts[column.name]
        present = cells[~cells.missing]
        unknown = present[places_among(present, column.categories) < 0]
        if not len(present) and len(cells) >= _FEWEST:
            yield f"column {name} has no value in any of {len(cells)} rows"
        words = [word for word in table_files.DOUBTFUL if word in column.categories]
        if words and cells.missing.any() and not cells.hold(words):
            cure = "which the model knows: let pandas read it by keep_default_na=False"
            yield f"column {name} has missing cells, but no {' or '.join(words)}, {cure}"
        many = NEARLY * min(_FEWEST, len(present)), (1 - NEARLY) * len(present)
        if column.kind == CATEGORY and len(unknown) > max(many):
            yield (
                f"column {name}: {len(unknown)} of {len(present)} cells, such as "
                f"{unknown.text(0)}, are none of the categories that the model knows "
                f"({listed(column.categories, 5)})"
            )


def _numbers(records: Sized) -> list[str]:
    """Return names for records without names: their numbers."""
    return [str(i) for i in range(len(records))]


def _row_labels(
    texts: table_files.Texts, inputs: Inputs, *, where: str
) -> tuple[Tensor | None, list[str]]:
    """Return the labels in the label columns, None if one is missing or no class; and a note."""
    names, cells = inputs.class_names, texts.get(inputs.label, Cells([]))
    labels: Tensor | None = None
    if inputs.multi_label and not inputs.label:
        if texts.keys() >= set(names):
            labels = torch.from_numpy(label_marks(texts, names, where=where)).long()
    elif inputs.target and np.isfinite(cells.numbers).all():
        labels = torch.tensor(cells.numbers) if len(cells) else None
    elif inputs.label in texts and not inputs.target:
        with suppress(ConfigError):  # a text that is no class
            separator = inputs.label_separator if inputs.multi_label else None
            labels = encode_labels(cells, names, separator, where=where)
    if labels is not None or not cells.different:
        return labels, []
    found = [*(["no label"] if cells.missing.any() else []), *distinct(cells.different)]
    known = "numbers" if inputs.target else listed(names, 5)
    said = f"column {inputs.label} of {where} holds {listed(found, 3)}, and not only {known}"
    return None, [said + _UNCOMPARED]


def named_labels(labels: Tensor, names: Sequence[str]) -> list[Label]:
    """Return the class or labels of each record, by name, or its number."""
    if labels.is_floating_point():
        return labels.tolist()
    if labels.dim() == 1:
        return [names[place] for place in labels.tolist()]
    return [tuple(n for n, has in zip(names, row, strict=True) if has) for row in labels.tolist()]


def _array(data: Any, inputs: Inputs, *, where: str) -> RawData:
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise ConfigError(f"{where} has rows or images of several shapes: {error}.") from error
    names = [column.name for column in inputs.schema]
    if not inputs.is_table:
        array = _checked_images(array, inputs, where=where)
    elif array.ndim != 2 or array.shape[1] != len(names):
        raise ConfigError(
            f"{where} is {array.dtype} of shape {array.shape}: expected cells "
            f"[N, {len(names)}], whose columns are {', '.join(names[:20])}; or a DataFrame."
        )
    elif array.dtype.kind not in "fiub" or not _are_features(inputs):
        import pandas as pd

        return _rows(table_files.texts_of(pd.DataFrame(array, columns=names)), inputs, where=where)
    else:
        array = array.astype(np.float32)
        if np.isinf(array).any():
            raise ConfigError(f"{where} holds infinite numbers: replace or remove them.")
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    notes = off_scale(tensor, inputs.schema, inputs.mean, inputs.std)
    return RawData(_numbers(tensor), None, tensor.__getitem__, tuple(notes))


def _are_features(inputs: Inputs) -> bool:
    """True if numbers of a table are its features as they stand, which need not become text."""
    form = inputs.form
    read = {*form.missing_in, *form.map, *form.scale}
    others = [c for c in inputs.schema if c.kind != NUMBER or c.indicator or c.name in read]
    return not form.missing_values and not others


def _checked_images(array: np.ndarray, inputs: Inputs, *, where: str) -> np.ndarray:
    """Return uint8 ``[N, C, H, W]``."""
    array = npz.usual_pixels(array)
    if array.shape[1:] != inputs.shape or array.dtype != np.uint8:
        array = npz.channels_first(array, origin=where)
    if array.shape[1:] != inputs.shape:
        raise ConfigError(
            f"{where} holds images {array.dtype} of shape {array.shape}: expected uint8 or float "
            f"[N, {', '.join(map(str, inputs.shape))}]; give files to have them resized."
        )
    return array
