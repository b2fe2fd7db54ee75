"""Reader of npz files: plain arrays of images or of table rows, or encoded images.

Nothing is normalised here, and nothing is unpickled.
"""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednas_flwr.base.errors import ConfigError, listed, show
from fednas_flwr.data.images import decoded_fields, records_from_arrays
from fednas_flwr.data.notation import Cells
from fednas_flwr.data.records import Records, RecordsPair, encode_labels, readable
from fednas_flwr.settings.data_settings import Arrays, Dataset, ImageFolder, LabelledImages, Npz

_Features = np.ndarray | list[tuple[str, bytes]]  # images or rows, or encoded images with names
_PARTS = ("train", "test", "val")
_WORDS = {  # in the names of arrays, such as X, train_images and X_test
    **dict.fromkeys(("x", "image", "images", "data"), "x"),
    **dict.fromkeys(("y", "label", "labels", "target", "targets"), "y"),
}


def read_npz(settings: Npz, path: Path) -> RecordsPair:
    """Return the train and test parts of an npz file, see :func:`records_from_npz`.

    Raises:
        ConfigError: The file is missing, still compressed, or not of this form.
    """
    if path.suffix == ".xz":
        raise ConfigError(f"dataset.root={path} is still compressed: unpack it with xz -dk first.")
    return records_from_npz(settings, read_arrays(path, "dataset.root="), origin=str(path))


def read_arrays(path: Path, setting: str = "") -> dict[str, np.ndarray]:
    """Return the arrays in an npz file by their names; the array of an npy file is ``x``.

    Raises:
        ConfigError: The file, which ``setting`` names, is missing or not of this form.
    """
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return {"x": loaded} if isinstance(loaded, np.ndarray) else dict(loaded.items())
    except (OSError, EOFError, ValueError, TypeError, zipfile.BadZipFile) as error:
        objects = "it holds objects; save texts by np.array(texts, dtype=str), or is no such file"
        reason = objects if "pickle" in str(error) else error
        raise ConfigError(
            f"{setting}{path} cannot be read as an .npz file of plain arrays: {reason}."
        ) from error


def reads_encoded(settings: Dataset) -> bool:
    """Return true if a data set's images are encoded; for npz files the names of arrays decide."""
    if not isinstance(settings, Npz) or settings.place is None:
        return isinstance(settings, ImageFolder | LabelledImages)
    with zipfile.ZipFile(settings.place) as archive:
        return any(name.endswith("_bytes.npy") for name in archive.namelist())


def records_from_npz(
    settings: Arrays, arrays: Mapping[str, np.ndarray], *, origin: str
) -> RecordsPair:
    """Return the train and test parts in named arrays, which have one of two forms.

    Plain: ``x_train``, ``y_train`` and optionally ``x_test``, ``y_test``, with ``x`` uint8
    ``[N, H, W]``, ``[N, H, W, C]`` or ``[N, C, H, W]``, or numbers ``[N, F]`` for a table.
    ``y`` are class numbers [N], or [N, L] of 0 and 1 if a record can have several labels. Other
    forms that have a single reading are accepted, with a note: see :func:`usual_names`,
    :func:`usual_pixels` and :func:`usual_labels`.
    Encoded: ``train_bytes``, ``train_off``, ``y_train`` and optionally the same with ``test`` or
    ``val``; image ``i`` is the JPEG or PNG in ``bytes[off[i]:off[i + 1]]``.

    Args:
        settings: Settings of the data set. ``class_names`` name the classes 0, 1, ..., which
            otherwise are named by their numbers. ``corrupt=skip`` also leaves out records whose
            label is none of the classes, and rows of a table with an infinite number. ``channels``
            of the test part are those of the train part.
        arrays: Arrays by name.
        origin: Source of the arrays, for messages.

    Raises:
        ConfigError: The arrays are not of this form.
    """
    remarks, arrays = list[str](), {name: np.asarray(plain(of)) for name, of in arrays.items()}
    if settings.corrupt != "skip":
        before, arrays = [*arrays], usual_names(arrays)
        renamed = {old: new for old, new in zip(before, arrays, strict=True) if old != new}
        if renamed:
            remarks = [f"{' and '.join(renamed)} are taken as {' and '.join(renamed.values())}"]
        said = {name: usual_labels(y) for name, y in arrays.items() if name.startswith("y_")}
        texts = [y.tolist() for y in said.values() if y.dtype.kind == "U" and y.ndim == 1]
        found = sorted({text for of in texts for text in of} - {""})
        settings = replace(settings, class_names=settings.class_names or found)
        changed = {n: numbered(y, settings.class_names, origin) for n, y in said.items()}
        changed |= {name: usual_pixels(x) for name, x in arrays.items() if name.startswith("x_")}
        for name, array in changed.items():
            if array is not arrays[name]:
                forms = (f"{of.dtype} {list(of.shape)}" for of in (arrays[name], array))
                remarks.append(f"{name}: {' is read as '.join(forms)}")
        arrays = {**arrays, **changed}
    needed = _parts(arrays, origin=origin)
    if others := sorted(arrays.keys() - {name for names in needed.values() for name in names}):
        remarks.append(f"{listed(others)} of {origin} are not read")
    parts = [_part(settings, arrays, name, origin=origin) for name in needed]
    class_names = _class_names(settings, [labels for _, labels, _ in parts], origin=origin)
    read: list[Records] = []
    for features, labels, notes in parts:
        if isinstance(features, list):
            source, marks = features.__getitem__, torch.from_numpy(labels)
            fields = decoded_fields(settings, source, marks, notes, {})
            read.append(Records(**fields, class_names=class_names))
            settings = replace(settings, channels=read[0].features.shape[1])
        else:
            read.append(replace(records_from_arrays(features, labels, class_names), notes=notes))
    read[0] = replace(read[0], notes=(*remarks, *read[0].notes))
    return read[0], read[1] if len(read) > 1 else None


def plain(data: Any) -> Any:
    """Return a tensor or a masked array of numbers as a plain array, NaN where it is masked.

    Frames of other libraries, and those of several levels of columns, become plain frames.
    """
    if isinstance(data, torch.Tensor):
        data = data.detach().cpu()
        return (data.float() if data.dtype == torch.bfloat16 else data).numpy()
    if isinstance(data, np.ma.MaskedArray) and (data.dtype.kind in "fiub" or np.any(data.mask)):
        return np.ma.filled(data.astype(float), np.nan)
    columns: Any = getattr(data, "columns", None)
    if columns is not None and hasattr(data, "__arrow_c_stream__") and not hasattr(data, "iloc"):
        import pyarrow

        return pyarrow.table(data).to_pandas()
    if getattr(columns, "nlevels", 1) > 1:
        return data.set_axis(columns.to_flat_index().map(str), axis=1)
    return data


def usual_names(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays by the documented names, if their own names have one reading.

    ``X`` and ``y``, ``images`` and ``labels``, ``X_train``, ``test_labels`` and the like belong to
    the part in their name, or to the train part if they name none.
    """
    usual: dict[str, str] = {}
    for name in arrays:
        words = name.lower().split("_")
        kinds = [_WORDS[word] for word in words if word in _WORDS]
        parts = [word for word in words if word in _PARTS]
        if len(kinds) == 1 and len(kinds + parts) == len(words) and len(parts) < 2:
            usual[name] = "_".join((*kinds, *(parts or _PARTS[:1])))
    is_clear = len({*usual.values()}) == len(usual) and "y_train" in usual.values()
    return {usual.get(name, name) if is_clear else name: array for name, array in arrays.items()}


def usual_pixels(array: np.ndarray) -> np.ndarray:
    """Return images as uint8 from 0 to 255 if they have one reading, else the array itself.

    Whole pixels from 0 to 255 of any type, truth values, and fractions from 0 to 1 become uint8.
    An opaque alpha channel is removed, and so are axes of length one.
    """
    if array.ndim < 3 or array.dtype.kind not in "biuf" or not array.size:
        return array if array.size else array.astype(np.uint8)
    sides = [side for side in array.shape[1:] if side > 1]
    if array.ndim > 4 and (array.shape[-1] > 1 or len(sides) == 2):  # else several gray frames
        array = array.reshape([len(array), *sides])
    kind, low, high = array.dtype.kind, array.min(), array.max()
    whole = kind in "iu" or (kind == "f" and (array % 1 == 0).all())
    if kind == "f" and 0 <= low <= high <= 1:
        array = np.rint(array * 255).astype(np.uint8)
    elif array.dtype != np.uint8 and whole and 0 <= low <= high <= 255:
        array = array.astype(np.uint8)
    elif kind == "b":
        array = array * np.uint8(255)
    is_opaque = array.ndim == 4 and array.shape[3] == 4 and (array[..., 3] == 255).all()
    return array[..., :3] if is_opaque else array


def usual_labels(labels: np.ndarray) -> np.ndarray:
    """Return labels in a single column as ``[N]``, and texts without the blanks around them."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind == "S":
        labels = np.char.decode(labels)
    if labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels.flat):
        labels = labels.astype(str)
    return np.char.strip(labels) if labels.dtype.kind == "U" else labels


def numbered(labels: np.ndarray, names: Sequence[str], origin: str) -> np.ndarray:
    """Return texts, truth values or whole floats as class numbers; other labels as they are."""
    kind = labels.dtype.kind
    if kind == "U" and names and labels.ndim == 1:
        return encode_labels(Cells(labels.tolist()), names, where=origin).numpy()
    if kind == "b" or (kind == "f" and (labels % 1 == 0).all()):
        return labels.astype(np.int64)
    return labels


def _part(
    settings: Arrays, arrays: Mapping[str, np.ndarray], part: str, *, origin: str
) -> tuple[_Features, np.ndarray, tuple[str, ...]]:
    """Return features and labels of one part, without unreadable records, and notes."""
    labels, skip = arrays[f"y_{part}"], settings.corrupt == "skip"
    features: _Features
    if f"x_{part}" in arrays:
        for name in ("image_size", "channels", "intensity"):
            if (value := getattr(settings, name)) is not None:
                raise ConfigError(
                    f"dataset.{name}={show(value)} has no effect on {origin}, whose x_{part} holds "
                    "plain arrays and no encoded images: remove it, or change the arrays."
                )
        features = channels_first(arrays[f"x_{part}"], origin=origin)
    else:
        contents = cut(arrays[f"{part}_bytes"], arrays[f"{part}_off"], origin=origin)
        features = [named(contents, f"{origin}, part {part}", i) for i in range(len(contents))]
    if len(features) != len(labels) or (len(labels) == 0 and not skip):
        raise ConfigError(
            f"{origin} holds {len(features)} records and {len(labels)} labels in its part {part}: "
            "it needs as many labels as records, at least one."
        )
    several, kind = labels.ndim == 2 and labels.shape[1] > 1, labels.dtype.kind
    is_whole = kind in "biu" if several else kind in "iu" and labels.ndim == 1
    most = 2 if several else (skip and len(settings.class_names)) or 2**63
    unknown: Any = np.logical_or(labels < 0, labels >= most) if is_whole else None
    if not is_whole or (unknown.any() and not skip):
        span = f" from {labels.min()} to {labels.max()}" if is_whole else ""
        span = " with NaN" if kind == "f" and np.isnan(labels).any() else span
        raise ConfigError(
            f"y_{part} in {origin} is {labels.dtype} of shape {labels.shape}{span}: expected the "
            "class numbers 0, 1, ... as one integer per record, or [N, L] of 0 and 1 for several "
            "labels."
        )
    unknown = unknown.any(axis=1) if several else unknown
    infinite: Any = np.zeros(len(labels), dtype=bool)
    if isinstance(features, np.ndarray) and features.ndim == 2:
        infinite = np.isinf(features).any(axis=1)
    if not skip:
        if infinite.any():
            raise ConfigError(f"{origin} holds infinite features: replace or remove them.")
        return features, labels.astype(np.int64), ()
    rows, notes = readable({"a label of no class": unknown, "an infinite number": infinite})
    read = [features[i] for i in rows] if isinstance(features, list) else features[rows]
    return read, labels[rows].astype(np.int64), notes


def _class_names(settings: Arrays, labels: Sequence[np.ndarray], *, origin: str) -> tuple[str, ...]:
    """Return the names of the classes, or of the labels that a record can have, in all parts."""
    if len({y.shape[1:] for y in labels}) > 1:
        raise ConfigError(
            f"{origin} holds y of shapes {', '.join(str(y.shape) for y in labels)}: expected "
            "one class per record, or the same labels, in all parts."
        )
    names = tuple(settings.class_names)
    several = labels[0].shape[1] if labels[0].ndim == 2 else 0
    largest = max(int(y.max(initial=0)) for y in labels)
    num_records = sum(map(len, labels))
    if not (names or several) and largest >= num_records:
        raise ConfigError(
            f"{origin} has the label {largest}, but only {num_records} records: expected class "
            "numbers 0, 1, ...; correct it, or name all classes in dataset.class_names."
        )
    if names and (len(names) != several if several else len(names) <= largest):
        has = f"{several} labels" if several else f"the label {largest}"
        raise ConfigError(f"{origin} has {has}, but dataset.class_names names {len(names)}.")
    return names or tuple(map(str, range(several or largest + 1)))


def named(contents: list[bytes], origin: str, index: int) -> tuple[str, bytes]:
    """Return an image of a file with its name, for messages."""
    return f"image {index} of {origin}", contents[index]


def _parts(arrays: Mapping[str, np.ndarray], *, origin: str) -> dict[str, set[str]]:
    """Return ``train`` and, if there is one, the other part, each with the names of its arrays."""
    present = {}
    for part in _PARTS:
        forms = {f"x_{part}", f"y_{part}"}, {f"{part}_bytes", f"{part}_off", f"y_{part}"}
        names = set.union(*forms) & arrays.keys()
        if names or part == "train":
            present[part] = names
            if names not in forms:
                raise ConfigError(
                    f"{origin} holds {', '.join(sorted(arrays))}: a part needs x_{part} "
                    f"and y_{part}, or {part}_bytes, {part}_off and y_{part}; add what is missing, "
                    "or remove the rest."
                )
    if len(present) > 2:
        del present["val"]  # dataset.fractions takes validation records from train
    return present


def channels_first(images: np.ndarray, *, origin: str) -> np.ndarray:
    """Return uint8 ``[N, C, H, W]``, or float32 ``[N, F]`` for a table."""
    if images.ndim == 2 and images.dtype.kind in "fiu":
        with np.errstate(over="ignore"):
            return images.astype(np.float32)
    is_image = images.dtype == np.uint8
    if is_image and images.ndim == 3:
        return images[:, None]
    if is_image and images.ndim == 4:
        first, last = images.shape[1] in (1, 3), images.shape[3] in (1, 3)
        if first != last:
            return images if first else images.transpose(0, 3, 1, 2)
    is_number = images.dtype.kind in "fiu" and images.size
    span = f" from {images.min():.9g} to {images.max():.9g}" if is_number else ""
    if is_number and not np.isfinite(images).all():
        span = f", not finite in image {np.argwhere(~np.isfinite(images))[0, 0]}"
    raise ConfigError(
        f"{origin} holds features {images.dtype} of shape {images.shape}{span}: expected uint8 "
        "images [N, H, W], [N, H, W, C] or [N, C, H, W] with 1 or 3 channels, whole numbers from 0 "
        "to 255 or shares from 0 to 1, or a table [N, F]."
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
