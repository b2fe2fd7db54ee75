"""Readers of image sets: scikit-learn's digits, torchvision's sets, a folder per class.

Images become uint8 ``[N, C, H, W]``; nothing is normalised here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.decoding import SUFFIXES, decode_images, part_folders, source_of
from fednas_flwr.data.records import (
    Records,
    RecordsPair,
    canonical,
    encode_labels,
    readable,
    record_ids,
)
from fednas_flwr.data.schema import Column
from fednas_flwr.settings.data_settings import ImageFolder
from fednas_flwr.settings.names import TORCHVISION_SETS


def read_digits() -> RecordsPair:
    """scikit-learn's 1,797 real digits, ``[1, 8, 8]``, with 0..16 rescaled to 0..255."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    return records_from_arrays(images, digits.target, tuple("0123456789")), None


def read_torchvision(name: str, *, root: Path, download: bool) -> RecordsPair:
    """Official train and test parts of a set that torchvision knows.

    Args:
        name: A key of ``TORCHVISION_SETS``.
        root: The folder that torchvision calls root.
        download: Whether missing files may be fetched.

    Raises:
        ConfigError: The files are not there and may not be fetched, or fetching fails.
    """
    from torchvision import datasets

    class_name, folder = TORCHVISION_SETS[name]
    parts = []
    for train in (True, False):
        try:
            source = getattr(datasets, class_name)(root, train=train, download=download)
        except (RuntimeError, OSError) as error:
            raise ConfigError(
                f"dataset={name} cannot be read from {root / folder}: give dataset.root=<folder "
                f"that holds {folder}, its files unpacked> or dataset.download=true ({error})."
            ) from error
        images = np.asarray(source.data)
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        parts.append(records_from_arrays(images, np.asarray(source.targets), tuple(source.classes)))
    return parts[0], parts[1]


def read_image_folder(settings: ImageFolder, root: Path) -> RecordsPair:
    """Images of one folder per class.

    With ``corrupt=skip`` those in a folder of no class, and of no person, are left out, too.

    Args:
        settings: How they are read; without ``class_names`` the classes are the sorted names of
            the train folders, and ``channels`` of the test part are those of the train part.
        root: Holds ``train/<class>/`` and optionally ``test/<class>/``, or ``<class>/`` itself.

    Raises:
        ConfigError: No images, an unreadable one, a folder that is no class, differing sizes, an
            image that is not in a person's folder.
    """
    if not root.is_dir():
        raise ConfigError(f"dataset.root={root} is not a folder: give one with a folder per class.")
    train_root, test_root = part_folders(root)
    names = settings.class_names or [path.name for path in _folders(train_root)]
    train = _read_part(replace(settings, class_names=names), train_root)
    if test_root is None:
        return train, None
    channels = train.features.shape[1]
    return train, _read_part(replace(settings, class_names=names, channels=channels), test_root)


def _read_part(settings: ImageFolder, folder: Path) -> Records:
    """Images of the classes' folders in one folder."""
    names, id_column = tuple(settings.class_names), settings.id_column
    skip = settings.corrupt == "skip"
    files = _images(folder, has_persons=id_column is not None, skip=skip)
    notes: tuple[str, ...] = ()
    if skip:
        depth = 2 if id_column is None else 3
        places = [path.relative_to(folder).parts for path in files]
        stray = np.array([p[0] not in names or len(p) != depth for p in places], dtype=bool)
        rows, notes = readable({"a folder of no class or no person": stray})
        files = [files[i] for i in rows]
    class_folders = np.array([path.relative_to(folder).parts[0] for path in files], np.str_)
    encode_labels(class_folders, names, where=str(folder))
    decoded = decode_images(settings, len(files), source_of(files))
    records = Records(
        features=torch.from_numpy(decoded.images),
        labels=encode_labels(class_folders[decoded.rows], names, where=str(folder)),
        ids=decoded.ids,
        class_names=names,
        notes=(*notes, *decoded.notes),
    )
    if id_column is None:
        return records
    persons = np.array([files[i].parent.name for i in decoded.rows], dtype=np.str_)
    ids = record_ids(text.encode("utf-8", "surrogatepass") for text in persons.tolist())
    return replace(records, ids=ids, columns={id_column: persons}, id_column=id_column)


def _images(root: Path, *, has_persons: bool, skip: bool) -> list[Path]:
    """Return the images in the folders of all classes, or of all persons in them.

    With ``skip`` there may be none, and those in no person's folder are among them.
    """
    class_folders = _folders(root)
    folders = [p for c in class_folders for p in _folders(c)] if has_persons else class_folders
    files = [p for folder in folders for p in sorted(folder.iterdir())]
    files = [path for path in files if path.suffix.lower() in SUFFIXES]
    form = "<class>/<person>/<image>.png" if has_persons else "<class>/<image>.png"
    if not files and not skip:
        raise ConfigError(f"{root} has no images: expected {form}.")
    stray = [p for c in class_folders for p in sorted(c.iterdir()) if has_persons]
    stray = [path for path in stray if path.suffix.lower() in SUFFIXES]
    for path in stray if not skip else ():
        raise ConfigError(f"{path} is in no person's folder: with id_column expected {form}.")
    return files + stray


def _folders(root: Path) -> list[Path]:
    """Return the visible folders in a folder, by name."""
    return sorted(path for path in root.iterdir() if path.is_dir() and path.name[0] not in "._")


def records_from_arrays(
    features: np.ndarray,
    labels: np.ndarray,
    class_names: tuple[str, ...],
    *,
    ids: np.ndarray | None = None,
) -> Records:
    """Return records of labels [N] or [N, L].

    Without given ids these are hashes of pixels, or of a table's numbers.
    """
    features = np.ascontiguousarray(features)
    is_table = features.ndim == 2
    num_features = features.shape[1] if is_table else 0
    if ids is None:
        ids = record_ids(row.tobytes() for row in (canonical(features) if is_table else features))
    return Records(
        features=torch.from_numpy(features),
        labels=torch.from_numpy(labels.astype(np.int64)),
        ids=ids,
        class_names=class_names,
        schema=tuple(Column(f"x{i}") for i in range(num_features)),
    )
