"""Readers of image sets: scikit-learn's digits, torchvision's sets, a folder per class.

Every reader returns ``(train, test)`` with ``test`` None where the source has no official test
part. Images become uint8 ``[N, C, H, W]``; nothing is normalised here.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from fednas_flwr.data.records import Records, canonical, encode_labels, record_ids
from fednas_flwr.errors import ConfigError
from fednas_flwr.memory import check_fits

RecordsPair = tuple[Records, Records | None]

# torchvision's class, and the folder below root in which it keeps its files
TORCHVISION_SETS = {
    "mnist": ("MNIST", "MNIST/raw"),
    "fashion_mnist": ("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
}
_SUFFIXES = {".png", ".jpg", ".jpeg"}


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
    image_size: int | None,
    channels: int | None,
    class_names: Sequence[str],
    id_column: str | None = None,
) -> RecordsPair:
    """Return the png and jpg images of one folder per class.

    Args:
        root: Holds ``train/<class>/`` and optionally ``test/<class>/``, or ``<class>/`` itself.
        image_size: Side in pixels to which images are resized (bilinear), or None to keep theirs.
        channels: 1 or 3, or None for that of the first image.
        class_names: The classes in order, or empty for the sorted names of the train folders.
        id_column: If given, images lie in ``<class>/<person>/``, and the records get a column of
            this name with their persons.

    Raises:
        ConfigError: No images, an unreadable one, a folder that is no class, differing sizes, an
            image that is not in a person's folder.
    """
    if not root.is_dir():
        raise ConfigError(f"dataset.root={root} is not a folder: give one with a folder per class.")
    train_root = root / "train" if (root / "train").is_dir() else root
    names = tuple(class_names) or tuple(path.name for path in _folders(train_root))

    def read(folder: Path) -> Records:
        files = _images(folder, has_persons=id_column is not None)
        class_folders = [path.relative_to(folder).parts[0] for path in files]
        labels = encode_labels(np.array(class_folders), names, where=str(folder))
        images, ids = decode_images(
            len(files),
            lambda i: (str(files[i]), files[i].read_bytes()),
            image_size=image_size,
            channels=channels,
        )
        if id_column is None:
            return Records(torch.from_numpy(images), labels, ids, names)
        persons = np.array([path.parent.name for path in files])
        ids = record_ids(person.encode() for person in persons.tolist())
        columns = {id_column: persons}
        return Records(torch.from_numpy(images), labels, ids, names, columns, id_column=id_column)

    test_root = root / "test"
    has_test = train_root != root and test_root.is_dir()
    return read(train_root), read(test_root) if has_test else None


def _images(root: Path, *, has_persons: bool) -> list[Path]:
    """Return the images in the folders of all classes, or of all persons in them."""
    class_folders = _folders(root)
    folders = [p for c in class_folders for p in _folders(c)] if has_persons else class_folders
    files = [p for folder in folders for p in sorted(folder.iterdir())]
    files = [path for path in files if path.suffix.lower() in _SUFFIXES]
    form = "<class>/<person>/<image>.png" if has_persons else "<class>/<image>.png"
    if not files:
        raise ConfigError(f"{root} has no png or jpg images: expected {form}.")
    for path in (p for c in class_folders for p in c.iterdir() if has_persons):
        if path.suffix.lower() in _SUFFIXES:
            raise ConfigError(f"{path} is in no person's folder: with id_column expected {form}.")
    return files


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
    """Return records; without given ids these are hashes of pixels, or of a table's numbers."""
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
        feature_names=tuple(f"x{i}" for i in range(num_features)),
        num_numeric=num_features,
    )


def decode_images(
    count: int,
    source: Callable[[int], tuple[str, bytes]],
    *,
    image_size: int | None,
    channels: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 ``[count, C, H, W]`` from encoded images, each given with its name, and ids.

    An id is the hash of an image's own pixels, before it is resized, without transparency: it is
    the same for a file that was compressed anew without loss, in any format, and for shades of gray
    stored as colours.
    """
    from PIL import Image

    images = np.empty((0, 0, 0, 0), dtype=np.uint8)
    ids: list[bytes] = []
    for i in range(count):
        name, content = source(i)
        try:
            with Image.open(io.BytesIO(content)) as opened:
                if opened.mode.startswith(("I", "F")):
                    raise ConfigError(
                        f"{name} has more than 8 bits per pixel (mode {opened.mode}), which would "
                        "be cut off: rescale the images to 8 bits first."
                    )
                is_gray = opened.mode in ("1", "L", "LA")
                channels = channels or (1 if is_gray else 3)
                own = opened.convert("L" if is_gray else "RGB")
                image = opened.convert("L" if channels == 1 else "RGB")
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # of Pillow
            raise ConfigError(f"{name} cannot be read as an image: {error}.") from error
        ids.extend(record_ids([_own_pixels(np.asarray(own))]))
        if image_size is not None and image.size != (image_size, image_size):
            image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
        pixels = np.asarray(image).reshape(image.height, image.width, channels)
        if i == 0:
            check_fits(
                count * pixels.size,
                f"{count} images of {channels}x{image.height}x{image.width} pixels",
                "set a smaller dataset.image_size",
            )
            images = np.empty((count, channels, image.height, image.width), dtype=np.uint8)
        elif pixels.shape[:2] != images.shape[2:]:
            raise ConfigError(
                f"{name} is {image.width}x{image.height}, the first image "
                f"{images.shape[3]}x{images.shape[2]}: set dataset.image_size."
            )
        images[i] = pixels.transpose(2, 0, 1)
    return images, np.array(ids, dtype="S32")


def _own_pixels(pixels: np.ndarray) -> bytes:
    """Return the bytes of an image ``[H, W]`` or ``[H, W, 3]`` channel by channel, gray as one."""
    if pixels.ndim == 3 and (pixels == pixels[:, :, :1]).all():
        pixels = pixels[:, :, 0]
    return np.moveaxis(pixels, -1, 0).tobytes() if pixels.ndim == 3 else pixels.tobytes()
