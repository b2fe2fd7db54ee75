"""Reader of npz files: plain arrays of images or of table rows, or encoded images.

Nothing is normalised here, and nothing is unpickled.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.data.decoding import decode_images
from fednas_flwr.data.images import records_from_arrays
from fednas_flwr.data.records import Records, RecordsPair, readable
from fednas_flwr.settings.data_settings import Arrays, Npz


def read_npz(settings: Npz, path: Path) -> RecordsPair:
    """Train and test parts of an npz file, see :func:`records_from_npz`.

    Raises:
        ConfigError: The file is missing, still compressed, or not of this form.
    """
    if path.suffix == ".xz":
        raise ConfigError(f"dataset.root={path} is still compressed: unpack it with xz -dk first.")
    with _opened(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    return records_from_npz(settings, arrays, origin=str(path))


def holds_encoded(path: Path) -> bool:
    """True if the images of an npz file are encoded, by the names of its arrays.

    Raises:
        ConfigError: The file is missing or not of this form.
    """
    with _opened(path) as archive:
        return any(name.endswith("_bytes") for name in archive.files)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            yield archive
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"dataset.root={path} cannot be read as an .npz file of plain arrays: {error}."
        ) from error


def records_from_npz(
    settings: Arrays, arrays: Mapping[str, np.ndarray], *, origin: str
) -> RecordsPair:
    """Train and test parts in named arrays, which take one of two forms.

    Plain: ``x_train``, ``y_train`` and optionally ``x_test``, ``y_test``, with ``x`` uint8
    ``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]``, or numbers ``[N, F]`` for a table.
    ``y`` are class numbers [N], or [N, L] of 0 and 1 where a record can have several labels.
    Encoded: ``train_bytes``, ``train_off``, ``y_train`` and optionally the same with ``test`` or
    ``val``; image ``i`` is the JPEG or PNG in ``bytes[off[i]:off[i + 1]]``.

    Args:
        settings: How they are read. ``class_names`` are of the classes 0, 1, ..., which else are
            named by their numbers; ``corrupt=skip`` also leaves out records whose label is none of
            the classes, and rows of a table with an infinite number; ``channels`` of the test part
            are those of the train part.
        arrays: By name.
        origin: Where they come from, for messages.

    Raises:
        ConfigError: The arrays are not of this form.
    """
    parts = [_part(settings, arrays, name, origin=origin) for name in _parts(arrays, origin=origin)]
    names = _class_names(settings, [part.labels for part in parts], origin=origin)
    train = parts[0].records(settings, names)
    if len(parts) == 1:
        return train, None
    if train.features.dim() == 4:
        settings = replace(settings, channels=train.features.shape[1])
    return train, parts[1].records(settings, names)


@dataclass(frozen=True)
class _Part:
    """Images or rows of one part, or encoded images with their names, and their labels."""

    features: np.ndarray | list[tuple[str, bytes]]
    labels: np.ndarray
    notes: tuple[str, ...]

    def records(self, settings: Arrays, names: tuple[str, ...]) -> Records:
        """The records, decoded."""
        if isinstance(self.features, np.ndarray):
            return replace(records_from_arrays(self.features, self.labels, names), notes=self.notes)
        decoded = decode_images(settings, len(self.features), self.features.__getitem__)
        records = records_from_arrays(
            decoded.images, self.labels[decoded.rows], names, ids=decoded.ids
        )
        return replace(records, notes=(*self.notes, *decoded.notes))


def _part(settings: Arrays, arrays: Mapping[str, np.ndarray], name: str, *, origin: str) -> _Part:
    """One part, without the records that cannot be read."""
    skip = settings.corrupt == "skip"
    features, labels = _features(settings, arrays, name, origin=origin), arrays[f"y_{name}"]
    notes: tuple[str, ...] = ()
    if skip and len(features) == len(labels):
        unreadable = _unreadable(features, labels, len(settings.class_names))
        rows, notes = readable(unreadable)
        labels = labels[rows]
        features = [features[i] for i in rows] if isinstance(features, list) else features[rows]
    if isinstance(features, np.ndarray) and np.isinf(features).any():
        raise ConfigError(f"{origin} holds infinite features: replace or remove them.")
    labels = _whole_labels(labels, origin=origin, part=name)
    if len(features) != len(labels) or (len(labels) == 0 and not skip):
        raise ConfigError(
            f"{origin} holds {len(features)} records and {len(labels)} labels in its part {name}: "
            "it needs as many labels as records, at least one."
        )
    return _Part(features, labels, notes)


def _class_names(settings: Arrays, labels: Sequence[np.ndarray], *, origin: str) -> tuple[str, ...]:
    """Names of the classes, or of the labels that a record can have, of all parts."""
    widths = {y.shape[1:] for y in labels}
    if len(widths) > 1:
        raise ConfigError(
            f"{origin} holds y of shapes {', '.join(str(y.shape) for y in labels)}: expected "
            "one class per record, or the same labels, in all parts."
        )
    names = tuple(settings.class_names)
    (width,) = widths
    if width:
        if names and len(names) != width[0]:
            raise ConfigError(
                f"{origin} has {width[0]} labels, but dataset.class_names names {len(names)}."
            )
        return names or tuple(map(str, range(width[0])))
    largest = max(int(y.max(initial=0)) for y in labels)
    num_records = sum(map(len, labels))
    if not names and largest >= num_records:
        raise ConfigError(
            f"{origin} has the label {largest}, but only {num_records} records: expected class "
            "numbers 0, 1, ...; correct it, or name all classes in dataset.class_names."
        )
    if names and largest >= len(names):
        raise ConfigError(
            f"{origin} has the label {largest}, but dataset.class_names names only {len(names)} "
            "classes."
        )
    return names or tuple(map(str, range(largest + 1)))


def named(contents: list[bytes], origin: str, index: int) -> tuple[str, bytes]:
    """Return an image of a file with its name, for messages."""
    return f"image {index} of {origin}", contents[index]


def _features(
    settings: Arrays, arrays: Mapping[str, np.ndarray], part: str, *, origin: str
) -> np.ndarray | list[tuple[str, bytes]]:
    """A part's images or rows, or its encoded images with their names."""
    if f"x_{part}" in arrays:
        for name in ("image_size", "channels", "intensity"):
            if (value := getattr(settings, name)) is not None:
                raise ConfigError(
                    f"dataset.{name}={show(value)} has no effect on {origin}, whose x_{part} holds "
                    "plain arrays and no encoded images: remove it, or change the arrays."
                )
        return channels_first(arrays[f"x_{part}"], origin=origin)
    contents = cut(arrays[f"{part}_bytes"], arrays[f"{part}_off"], origin=origin)
    return [named(contents, f"{origin}, part {part}", i) for i in range(len(contents))]


def _unreadable(
    features: np.ndarray | list[tuple[str, bytes]], labels: np.ndarray, num_classes: int
) -> dict[str, np.ndarray]:
    """Return which records cannot be read, each by itself, bool ``[N]``, by the reason."""
    unknown: np.ndarray = np.zeros(len(labels), dtype=bool)
    infinite = unknown
    if labels.dtype.kind in "biu" and labels.ndim == 2:
        unknown = (~np.isin(labels, (0, 1))).sum(axis=1) > 0
    elif labels.dtype.kind in "iu" and labels.ndim == 1:
        unknown = (labels < 0) | (labels >= (num_classes or 2**63))
    if isinstance(features, np.ndarray) and features.ndim == 2:
        infinite = np.isinf(features).any(axis=1)
    return {"a label of no class": unknown, "an infinite number": infinite}


def _parts(arrays: Mapping[str, np.ndarray], *, origin: str) -> list[str]:
    """Return ``train`` and, if there is one, the other part, each with all arrays that it needs."""
    needed = {
        part: ({f"x_{part}", f"y_{part}"}, {f"{part}_bytes", f"{part}_off", f"y_{part}"})
        for part in ("train", "test", "val")
    }
    present = [part for part, forms in needed.items() if set.union(*forms) & arrays.keys()]
    for part in present:
        found = sorted(set.union(*needed[part]) & arrays.keys())
        if found not in [sorted(form) for form in needed[part]]:
            raise ConfigError(
                f"{origin} holds {', '.join(found)}: a part needs x_{part} and y_{part}, or "
                f"{part}_bytes, {part}_off and y_{part}; add what is missing, or remove the rest."
            )
    if "train" not in present:
        raise ConfigError(
            f"{origin} holds the arrays {', '.join(arrays)}: it needs x_train and y_train, or "
            "train_bytes, train_off and y_train."
        )
    if len(present) > 2:
        raise ConfigError(
            f"{origin} holds a part test and a part val, but one of them is used: remove the other "
            "(validation records are taken from train by dataset.fractions)."
        )
    return present


def _whole_labels(labels: np.ndarray, *, origin: str, part: str) -> np.ndarray:
    """Return the labels as int64 after checking that they are class numbers, or 0 and 1."""
    if labels.ndim == 2 and labels.shape[1] > 1 and labels.dtype.kind in "biu":
        if not np.isin(labels, (0, 1)).all():
            raise ConfigError(
                f"y_{part} in {origin} holds numbers up to {labels.max()}: expected 0 and 1, one "
                "column per label."
            )
        return labels.astype(np.int64)
    whole = labels.ndim == 1 and np.issubdtype(labels.dtype, np.integer)
    if not whole or (len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < 2**63):
        raise ConfigError(
            f"y_{part} in {origin} is {labels.dtype} of shape {labels.shape}: expected the class "
            "numbers 0, 1, ... as one integer per record, or [N, L] of 0 and 1 for several labels."
        )
    return labels.astype(np.int64)


def channels_first(
    images: np.ndarray, *, origin: str, kinds: Sequence[type] = (np.uint8,)
) -> np.ndarray:
    """Return ``[N, C, H, W]`` of one of the given kinds, or float32 ``[N, F]`` for a table."""
    if images.ndim == 2 and images.dtype.kind in "fiu":
        with np.errstate(over="ignore"):
            return images.astype(np.float32)
    is_image = images.dtype in kinds
    if is_image and images.ndim == 3:
        return images[:, None]
    if is_image and images.ndim == 4:
        first, last = images.shape[1] in (1, 3), images.shape[3] in (1, 3)
        if first != last:
            return images if first else images.transpose(0, 3, 1, 2)
    raise ConfigError(
        f"{origin} holds features {images.dtype} of shape {images.shape}: expected uint8 images "
        "[N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels, or a table [N, F]."
    )


def cut(joined: np.ndarray, offsets: np.ndarray, *, origin: str) -> list[bytes]:
    """Return the images' bytes ``joined[offsets[i]:offsets[i + 1]]``."""
    ends = offsets.astype(np.int64)
    valid = joined.dtype == np.uint8 and len(ends) > 1 and ends[0] >= 0
    if not valid or (np.diff(ends) < 0).any() or ends[-1] > len(joined):
        raise ConfigError(
            f"the offsets in {origin} do not cut its bytes into images: expected N + 1 ascending "
            "numbers, image i being the uint8 bytes[off[i]:off[i + 1]]."
        )
    data = joined.tobytes()
    return [data[start:end] for start, end in zip(ends[:-1], ends[1:], strict=True)]
