"""Reader of images whose labels stand in a table: ``dataset.labels_file`` of an image folder.

The table's first column names the files; as in any table a record has a class or several labels,
and a column may say whose each image is. Main function: :func:`load_images`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednas_flwr.data.decoding import Decoding, decode_images, image_files, source_of
from fednas_flwr.data.images import RecordsPair, load_image_folder
from fednas_flwr.data.records import Records, readable
from fednas_flwr.data.table_files import Form, Texts, check_columns, names_in, read_texts
from fednas_flwr.data.tables import given_ids, label_columns_of, read_labels, unreadable_cells
from fednas_flwr.errors import ConfigError, NoEffectError, show

# UTF-8, with or without its mark: an encoding that is found in the rows would be one of all of them
LABELS_FORM = Form(encoding="utf-8-sig", decimal="point")


def load_images(
    root: Path,
    *,
    labels_file: str | None = None,
    label: str | None = None,
    labels: Sequence[str] = (),
    label_separator: str | None = None,
    class_names: Sequence[str] = (),
    id_column: str | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    corrupt: str = "refuse",
    intensity: Sequence[float] = (),
) -> RecordsPair:
    """Return the images in a folder, labelled by a table or else by the folders' names.

    Args:
        root: Holds the labels file and images, also in sub-folders; or ``train`` and optionally
            ``test``, of which each does. Without a labels file see
            :func:`~fednas_flwr.data.images.load_image_folder`.
        labels_file: Name of the table in that folder. Its first column has the images' paths, from
            the table's folder on, or their bare names where no two images share one.
        label: See :func:`~fednas_flwr.data.tables.load_csv`, like the following three.
        labels: See there.
        label_separator: See there.
        class_names: See there.
        id_column: Column of the table that names the person; without a labels file see
            :func:`~fednas_flwr.data.images.load_image_folder`.
        image_size: See :class:`~fednas_flwr.data.decoding.Decoding`.
        channels: See there; None is that of the train part.
        corrupt: See there and :func:`~fednas_flwr.data.tables.load_csv`; ``skip`` also leaves out
            rows whose image is not there.
        intensity: See there.

    Raises:
        ConfigError: The table does not fit this description, names a file that is not there or
            one twice; or as of images without it.
    """
    decoding = Decoding(image_size, channels, corrupt, tuple(intensity))
    given = {"label": label, "labels": list(labels), "label_separator": label_separator}
    if labels_file is None:
        for setting in [name for name, value in given.items() if value]:
            raise NoEffectError(
                f"dataset.{setting}={show(given[setting])} has no effect without "
                "dataset.labels_file, the table that has this column: set it, or remove this."
            )
        return load_image_folder(
            root,
            class_names=class_names,
            id_column=id_column,
            image_size=image_size,
            channels=channels,
            corrupt=corrupt,
            intensity=intensity,
        )
    if Path(labels_file).name != labels_file:
        raise ConfigError(
            f"dataset.labels_file={labels_file} must be the name of a file in dataset.root, or in "
            "its folders train and test."
        )
    train_root = root / "train" if (root / "train").is_dir() else root
    columns = {"label": label, "labels": labels, "label_separator": label_separator}
    train = _read(train_root / labels_file, columns, id_column, class_names, decoding)
    test_root = root / "test"
    if train_root == root or not test_root.is_dir():
        return train, None
    own = Decoding(image_size, train.features.shape[1], corrupt, tuple(intensity))
    names = () if labels else train.class_names
    return train, _read(test_root / labels_file, columns, id_column, names, own)


def files_of(texts: Texts, path: Path, *, skip: bool = False) -> dict[int, Path]:
    """Return the images of a labels file by their rows, from 0.

    Args:
        texts: Its columns.
        path: Of the file; images are looked for in its folder.
        skip: Whether rows may have none.

    Raises:
        ConfigError: Images are missing, or not to be told apart by their names.
    """
    column = next(iter(texts))
    files = image_files(path.parent)
    by_path = {file.relative_to(path.parent).as_posix(): file for file in files}
    times = Counter(file.name for file in files)
    by_name = {file.name: file for file in files if times[file.name] == 1}
    cells = [Path(text).as_posix() for text in texts[column].tolist()]
    known = by_name | by_path
    missing = [cell or "an empty cell" for cell in cells if cell not in known]
    if skip:  # a name that images share would change its meaning with one of them
        missing = [cell for cell in cells if times[cell] > 1]
    if missing:
        more = ", ..." if len(missing) > 5 else ""
        raise ConfigError(
            f"{path}, column {column}, names {len(missing)} of {len(cells)} images that are not in "
            f"{path.parent}, or share their names with others: {', '.join(missing[:5])}{more}; "
            "give paths from that folder on, and remove rows without an image."
        )
    return {row: known[cell] for row, cell in enumerate(cells) if cell in known}


def _read(
    path: Path,
    terms: Mapping[str, Any],
    id_column: str | None,
    class_names: Sequence[str],
    decoding: Decoding,
) -> Records:
    """Return the images that a labels file names; ``terms`` say which columns hold labels."""
    if not path.is_file():
        raise ConfigError(f"dataset.labels_file: {path} does not exist: correct its name.")
    skip = decoding.corrupt == "skip"
    texts, notes = read_texts(path, replace(LABELS_FORM, strict=skip))
    columns = label_columns_of(texts, **terms, class_names=class_names)
    named = [*columns, *([id_column] if id_column else [])]
    check_columns(texts, named, where=str(path))
    if (first := next(iter(texts))) in named:
        raise ConfigError(
            f"{path} begins with the column {first}, which is to name the images: put the column "
            "with the files' names first."
        )
    found, separator = files_of(texts, path, skip=skip), terms["label_separator"]
    if skip:
        wrong = unreadable_cells(texts, (), columns, separator, class_names, id_column)
        wrong[first] = np.array([row not in found for row in range(len(texts[first]))], dtype=bool)
        rows, left_out = readable(wrong)
        texts, notes = {name: cells[rows] for name, cells in texts.items()}, notes + left_out
        found = {row: found[row] for row in rows.tolist()}
    files = list(found.values())
    if len(set(files)) < len(files) and not skip:
        twice = Counter(files).most_common(1)[0][0]
        raise ConfigError(f"{path} names the image {twice.name} in more than one row: keep one.")
    labels, classes = read_labels(
        texts, path, columns=columns, separator=separator, class_names=class_names
    )
    decoded = decode_images(len(files), source_of(files), decoding)
    left = len(image_files(path.parent)) - len(set(files))
    if left:
        notes = (*notes, f"{left} images that {path.name} does not name are left out")
    ids = decoded.ids
    if id_column is not None:
        ids = given_ids(texts[id_column], name=id_column, path=path)[decoded.kept]
    others = [name for name in list(texts)[1:] if name not in columns]
    return Records(
        features=torch.from_numpy(decoded.images),
        labels=labels[torch.from_numpy(decoded.kept)],
        ids=ids,
        class_names=classes,
        columns={n: cells[decoded.kept] for n, cells in names_in(texts, others).items()},
        label=columns[0] if len(columns) == 1 else "",
        label_separator=separator or "",
        id_column=id_column or "",
        notes=(*notes, *decoded.notes),
    )
