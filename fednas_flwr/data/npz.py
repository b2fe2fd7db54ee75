"""Reader of npz files: plain arrays of images or of table rows, or encoded images.

Nothing is normalised here, and nothing is unpickled.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fednas_flwr.data.decoding import DEFAULT_DECODING, Decoding, decode_images
from fednas_flwr.data.images import RecordsPair, records_from_arrays
from fednas_flwr.data.records import Records, readable
from fednas_flwr.errors import ConfigError


def load_npz(
    path: Path,
    *,
    image_size: int | None,
    channels: int | None,
    class_names: Sequence[str],
    corrupt: str = "refuse",
    intensity: Sequence[float] = (),
) -> RecordsPair:
    """Return the train and test parts of an npz file, see :func:`records_from_npz`.

    Args:
        path: The file.
        image_size: Of encoded images, see :class:`~fednas_flwr.data.decoding.Decoding`.
        channels: See there; None is that of the train part.
        class_names: Names of the classes 0, 1, ..., or empty to name them by their numbers.
        corrupt: See :class:`~fednas_flwr.data.decoding.Decoding`; ``skip`` also leaves out records
            whose label is none of the classes, and rows of a table with an infinite number.
        intensity: See there.

    Raises:
        ConfigError: The file is missing, still compressed, or not of this form.
    """
    if path.suffix == ".xz":
        raise ConfigError(f"dataset.root={path} is still compressed: unpack it with xz -dk first.")
    with _opened(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    return records_from_npz(
        arrays,
        origin=str(path),
        class_names=class_names,
        decoding=Decoding(image_size, channels, corrupt, tuple(intensity)),
    )


def holds_encoded(path: Path) -> bool:
    """Return whether the images of an npz file are encoded, by the names of its arrays.

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
    arrays: Mapping[str, np.ndarray],
    *,
    origin: str,
    class_names: Sequence[str] = (),
    decoding: Decoding = DEFAULT_DECODING,
) -> RecordsPair:
    """Return the train and test parts in named arrays, which take one of two forms.

    Plain: ``x_train``, ``y_train`` and optionally ``x_test``, ``y_test``, with ``x`` uint8
    ``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]``, or numbers ``[N, F]`` for a table.
    ``y`` are class numbers [N], or [N, L] of 0 and 1 where a record can have several labels.
    Encoded: ``train_bytes``, ``train_off``, ``y_train`` and optionally the same with ``test`` or
    ``val``; image ``i`` is the JPEG or PNG in ``bytes[off[i]:off[i + 1]]``.

    Args:
        arrays: By name.
        origin: Where they come from, for messages.
        class_names: See :func:`load_npz`.
        decoding: Of encoded images.

    Raises:
        ConfigError: The arrays are not of this form.
    """
    present, skip = _parts(arrays, origin=origin), decoding.corrupt == "skip"
    parts: list[tuple[np.ndarray | list[tuple[str, bytes]], np.ndarray]] = []
    notes: list[tuple[str, ...]] = []
    for part in present:
        features = _features(arrays, part, origin=origin, decoding=decoding)
        labels, left_out = arrays[f"y_{part}"], tuple[str, ...]()
        if skip and len(features) == len(labels):
            rows, left_out = readable(_unreadable(features, labels, len(class_names)))
            labels = labels[rows]
            features = [features[i] for i in rows] if isinstance(features, list) else features[rows]
        if isinstance(features, np.ndarray) and np.isinf(features).any():
            raise ConfigError(f"{origin} holds infinite features: replace or remove them.")
        parts.append((features, _whole_labels(labels, origin=origin, part=part)))
        notes.append(left_out)
    for part, (features, labels) in zip(present, parts, strict=True):
        if len(features) != len(labels) or (len(labels) == 0 and not skip):
            raise ConfigError(
                f"{origin} holds {len(features)} records and {len(labels)} labels in its part "
                f"{part}: it needs as many labels as records, at least one."
            )
    widths = {labels.shape[1:] for _, labels in parts}
    if len(widths) > 1:
        raise ConfigError(
            f"{origin} holds y of shapes {', '.join(str(y.shape) for _, y in parts)}: expected one "
            "class per record, or the same labels, in all parts."
        )
    several = bool(min(widths))  # labels per record
    num_classes = min(widths)[0] if several else 1 + max(int(y.max(initial=0)) for _, y in parts)
    num_records = sum(len(labels) for _, labels in parts)
    if several and class_names and len(class_names) != num_classes:
        raise ConfigError(
            f"{origin} has {num_classes} labels, but dataset.class_names names {len(class_names)}."
        )
    if not several and not class_names and num_classes > num_records:
        raise ConfigError(
            f"{origin} has the label {num_classes - 1}, but only {num_records} records: expected "
            "class numbers 0, 1, ...; correct it, or name all classes in dataset.class_names."
        )
    names = tuple(class_names) or tuple(str(i) for i in range(num_classes))
    if num_classes > len(names):
        raise ConfigError(
            f"{origin} has the label {num_classes - 1}, but dataset.class_names names only "
            f"{len(names)} classes."
        )
    read: list[Records] = []
    for (features, labels), left_out in zip(parts, notes, strict=True):
        if isinstance(features, np.ndarray):
            records = records_from_arrays(features, labels, names)
            read.append(replace(records, notes=left_out))
            continue
        channels = read[0].features.shape[1] if read else decoding.channels
        decoded = decode_images(
            len(features), features.__getitem__, replace(decoding, channels=channels)
        )
        kept = labels[decoded.kept]
        records = records_from_arrays(decoded.images, kept, names, ids=decoded.ids)
        read.append(replace(records, notes=(*left_out, *decoded.notes)))
    return read[0], read[1] if len(read) == 2 else None


def named(contents: list[bytes], origin: str, index: int) -> tuple[str, bytes]:
    """Return an image of a file with its name, for messages."""
    return f"image {index} of {origin}", contents[index]


def _features(
    arrays: Mapping[str, np.ndarray], part: str, *, origin: str, decoding: Decoding
) -> np.ndarray | list[tuple[str, bytes]]:
    """Return a part's images or rows, or its encoded images with their names."""
    if f"x_{part}" in arrays:
        defaults = asdict(replace(DEFAULT_DECODING, corrupt=decoding.corrupt))
        for name in (name for name, value in asdict(decoding).items() if value != defaults[name]):
            value = getattr(decoding, name)
            raise ConfigError(
                f"dataset.{name}={value} has no effect on {origin}, whose x_{part} holds "
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
