"""Readers of image sets: scikit-learn's digits, torchvision's sets, a folder per class.

Every reader returns ``(train, test)`` with ``test`` None where the source has no official test
part. Images become uint8 ``[N, C, H, W]``; nothing is normalised here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fednas_flwr.data.decoding import SUFFIXES, Decoding, decode_images, source_of
from fednas_flwr.data.records import Records, canonical, encode_labels, readable, record_ids
from fednas_flwr.data.schema import Column
from fednas_flwr.errors import ConfigError

RecordsPair = tuple[Records, Records | None]

# torchvision's class, and the folder below root in which it keeps its files
TORCHVISION_SETS = {
    "mnist": ("MNIST", "MNIST/raw"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
}


def load_digits() -> RecordsPair:
    """Return scikit-learn's 1,797 real digits, ``[1, 8, 8]``, with 0..16 rescaled to 0..255."""
    from sklearn import datasets

    digits = datasets.load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[:, None]
    return records_from_arrays(images, digits.target, tuple("0123456789")), None


def load_torchvision(name: str, *, root: Path, download: bool) -> RecordsPair:
    """Return the official train and test parts of a set that torchvision knows.

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


def load_image_folder(
    root: Path,
    *,
    image_size: int | None = None,
    channels: int | None = None,
    class_names: Sequence[str],
    id_column: str | None = None,
    corrupt: str = "refuse",
    intensity: Sequence[float] = (),
) -> RecordsPair:
    """Return the images of one folder per class.

    Args:
        root: Holds ``train/<class>/`` and optionally ``test/<class>/``, or ``<class>/`` itself.
        image_size: See :class:`~fednas_flwr.data.decoding.Decoding`.
        channels: See there; None is that of the train part.
        class_names: The classes in order, or empty for the sorted names of the train folders.
        id_column: If given, images lie in ``<class>/<person>/``, and the records get a column of
            this name with their persons.
        corrupt: See :class:`~fednas_flwr.data.decoding.Decoding`; ``skip`` also leaves out those
            in a folder of no class, and of no person.
        intensity: See there.

    Raises:
        ConfigError: No images, an unreadable one, a folder that is no class, differing sizes, an
            image that is not in a person's folder.
    """
    if not root.is_dir():
        raise ConfigError(f"dataset.root={root} is not a folder: give one with a folder per class.")
    train_root = root / "train" if (root / "train").is_dir() else root
    names = tuple(class_names) or tuple(path.name for path in _folders(train_root))

    def read(folder: Path, channels: int | None) -> Records:
        files = _images(folder, has_persons=id_column is not None, skip=corrupt == "skip")
        notes: tuple[str, ...] = ()
        if corrupt == "skip":
            depth, places = 2 + bool(id_column), [path.relative_to(folder).parts for path in files]
            stray = np.array([p[0] not in names or len(p) != depth for p in places], dtype=bool)
            rows, notes = readable({"a folder of no class or no person": stray})
            files = [files[i] for i in rows]
        class_folders = np.array([path.relative_to(folder).parts[0] for path in files], np.str_)
        encode_labels(class_folders, names, where=str(folder))
        decoded = decode_images(
            len(files),
            source_of(files),
            Decoding(image_size, channels, corrupt, tuple(intensity)),
        )
        images, ids = torch.from_numpy(decoded.images), decoded.ids
        labels = encode_labels(class_folders[decoded.kept], names, where=str(folder))
        notes += decoded.notes
        if id_column is None:
            return Records(images, labels, ids, names, notes=notes)
        persons = np.array([files[i].parent.name for i in decoded.kept], dtype=np.str_)
        ids = record_ids(text.encode("utf-8", "surrogatepass") for text in persons.tolist())
        columns = {id_column: persons}
        return Records(images, labels, ids, names, columns, id_column=id_column, notes=notes)

    test_root = root / "test"
    has_test = train_root != root and test_root.is_dir()
    train = read(train_root, channels)
    return train, read(test_root, train.features.shape[1]) if has_test else None


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
