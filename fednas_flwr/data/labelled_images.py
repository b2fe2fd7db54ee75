"""Reader of images whose labels stand in a table.

The table's first column names the files; as in any table a record has a class or several labels,
and a column may say whose each image is. The main function is :func:`read_labelled_images`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.decoding import decode_images, image_files, part_folders, source_of
from fednas_flwr.data.records import Records, RecordsPair, readable
from fednas_flwr.data.table_files import Form, Texts, check_columns, names_in, read_texts
from fednas_flwr.data.tables import (
    label_column,
    label_columns,
    labelled_records,
    person_ids,
    read_labels,
    unreadable_cells,
)
from fednas_flwr.settings.data_settings import LabelledImages

# UTF-8, with or without its mark: an encoding that is found in the rows would be one of all of them
LABELS_FORM = Form(encoding="utf-8-sig", decimal="point")


def read_labelled_images(settings: LabelledImages, root: Path) -> RecordsPair:
    """Images in a folder, labelled by a table.

    With ``corrupt=skip`` rows whose image is not there are left out, too.

    Args:
        settings: How they are read; ``channels`` of the test part are those of the train part.
        root: Holds the labels file and images, also in sub-folders; or ``train`` and optionally
            ``test``, each with its own.

    Raises:
        ConfigError: The table does not fit the settings, names a file that is not there or one
            twice; or an image cannot be read.
    """
    if Path(settings.labels_file).name != settings.labels_file:
        raise ConfigError(
            f"dataset.labels_file={settings.labels_file} must be the name of a file in "
            "dataset.root, or in its folders train and test."
        )
    train_root, test_root = part_folders(root)
    train = _read_part(settings, train_root)
    if test_root is None:
        return train, None
    names = [] if settings.labels else list(train.class_names)
    channels = train.features.shape[1]
    return train, _read_part(replace(settings, channels=channels, class_names=names), test_root)


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


def _read_part(settings: LabelledImages, folder: Path) -> Records:
    """Images that the labels file in a folder names."""
    path = folder / settings.labels_file
    if not path.is_file():
        raise ConfigError(f"dataset.labels_file: {path} does not exist: correct its name.")
    skip = settings.corrupt == "skip"
    texts, notes = read_texts(path, replace(LABELS_FORM, strict=skip))
    settings = replace(settings, label=label_column(settings, texts))
    columns = label_columns(settings)
    named = columns if settings.id_column is None else [*columns, settings.id_column]
    check_columns(texts, named, where=str(path))
    if (first := next(iter(texts))) in named:
        raise ConfigError(
            f"{path} begins with the column {first}, which is to name the images: put the column "
            "with the files' names first."
        )
    found = files_of(texts, path, skip=skip)
    if skip:
        wrong = unreadable_cells(settings, texts, ())
        wrong[first] = np.array([row not in found for row in range(len(texts[first]))], dtype=bool)
        rows, left_out = readable(wrong)
        texts, notes = {name: cells[rows] for name, cells in texts.items()}, notes + left_out
        found = {row: found[row] for row in rows.tolist()}
    files = list(found.values())
    if len(set(files)) < len(files) and not skip:
        twice = Counter(files).most_common(1)[0][0]
        raise ConfigError(f"{path} names the image {twice.name} in more than one row: keep one.")
    labels, classes = read_labels(settings, texts, path)
    decoded = decode_images(settings, len(files), source_of(files))
    others = len(image_files(path.parent)) - len(set(files))
    if others:
        notes = (*notes, f"{others} images that {path.name} does not name are left out")
    ids = decoded.ids
    if settings.id_column is not None:
        ids = person_ids(settings, texts, path)[decoded.rows]
    further = names_in(texts, [name for name in list(texts)[1:] if name not in columns])
    return labelled_records(
        settings,
        features=torch.from_numpy(decoded.images),
        labels=labels[torch.from_numpy(decoded.rows)],
        ids=ids,
        class_names=classes,
        columns={name: cells[decoded.rows] for name, cells in further.items()},
        notes=(*notes, *decoded.notes),
    )
