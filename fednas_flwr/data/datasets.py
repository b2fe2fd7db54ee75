"""From a data set's name and settings to prepared records, cached on disk and memory-mapped.

The main function is :func:`prepare`. The part that clients hold is ``train``; ``server_test`` is
a test set declared public that the server holds. How clients divide ``train`` is decided later.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fednas_flwr.data.cache import load_or_build
from fednas_flwr.data.images import RecordsPair
from fednas_flwr.data.records import Records, select_records
from fednas_flwr.data.scattering import make_transform, transformed
from fednas_flwr.data.schema import Inputs
from fednas_flwr.data.sources import DATA_SETS, digest_records, find_source, fingerprint, load_sites
from fednas_flwr.data.splits import hash_positions
from fednas_flwr.errors import ConfigError, NoEffectError, show, unknown_choice

__all__ = ["Prepared", "Records", "prepare"]

# Changes whenever the same source would give other prepared records.
_CACHE_VERSION = 6
# Public and fixed: these choices must be the same in every run and at everybody's.
_SERVER_TEST_KEY = b"fednas_flwr server test"
_LIMIT_KEY = b"fednas_flwr limit"
_SERVER_TEST_SHARE = 0.2
_DEFAULTS = {"corrupt": "refuse", "missing": "mean"}
_NOT_READ = ("download", "statistics", "ranges")  # settings that no reader takes


@dataclass(frozen=True)
class Prepared:
    """A data set ready to be divided over clients.

    Attributes:
        train: What the clients hold.
        server_test: Public test records of the server, or None.
        mean: Per channel of images scaled to 0..1, or per feature of a table; a single 0 for
            features that are normalised already; empty of a table whose statistics are not
            declared, and not known yet.
        std: As ``mean``; all above 0.
        intensity: Of images of more than 8 bits, see :class:`~fednas_flwr.data.decoding.Decoding`.
        scattering: Scales and angles of the transform that made features of images; else empty.
        from_ranges: Whether mean and std of all numbers of a table follow from declared ranges.
    """

    train: Records
    server_test: Records | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    intensity: tuple[float, ...] = ()
    scattering: tuple[int, ...] = ()
    from_ranges: bool = False

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.train.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record: ``(C, H, W)`` or ``(F,)``."""
        return tuple(self.train.features.shape[1:])

    @property
    def inputs(self) -> Inputs:
        """Facts about raw inputs that an exported model must know."""
        train = self.train
        return Inputs(
            shape=train.image_shape or self.input_shape,
            schema=train.schema,
            mean=self.mean,
            std=self.std,
            class_names=train.class_names,
            label=train.label,
            multi_label=train.multi_label,
            label_separator=train.label_separator,
            intensity=self.intensity,
            scattering=self.scattering,
        )

    @property
    def uses_own_statistics(self) -> bool:
        """True if statistics follow from the clients' records, which no privacy budget covers."""
        return not self.mean


def prepare(
    *,
    cache: Path,
    name: str,
    root: Path | None = None,
    download: bool = False,
    sites: bool = False,
    server_test: bool = True,
    limit_train: int | None = None,
    limit_test: int | None = None,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    image_size: int | None = None,
    channels: int | None = None,
    class_names: Sequence[str] = (),
    labels_file: str | None = None,
    label: str = "last",
    labels: Sequence[str] = (),
    label_separator: str | None = None,
    id_column: str | None = None,
    numeric: Sequence[str] = (),
    dates: Sequence[str] = (),
    categorical: Sequence[str] = (),
    categories: Mapping[str, Sequence[str]] | None = None,
    ignore: Sequence[str] = (),
    statistics: Mapping[str, Sequence[float]] | None = None,
    ranges: Mapping[str, Sequence[float]] | None = None,
    corrupt: str = "refuse",
    intensity: Sequence[float] | None = None,
    separator: str | None = None,
    encoding: str | None = None,
    decimal: str | None = None,
    missing_values: Sequence[str] = (),
    missing: str = "mean",
    scattering: Mapping[str, int] | None = None,
) -> Prepared:
    """Return the prepared data set; its tensors lie in the cache and are memory-mapped.

    A cached copy is used when the settings and the size and time of every source file are the
    same; several processes may prepare at once.

    Args:
        cache: Folder for prepared tensors, made where missing.
        name: One of ``DATA_SETS``.
        root: File (npz, csv) or folder of the source (a csv's may be one); not used by digits.
        download: If true, torchvision may fetch missing files.
        sites: ``root`` holds one folder (image_folder) or file (npz, csv) per client; the
            records get a column ``site``.
        server_test: Whether the server holds a test set: the official one, or else the fifth of
            the records that a public keyed hash of their ids chooses. Without it an official
            test part stays unused, and all other records go to clients.
        limit_train: At most so many client records, those of smallest keyed hash.
        limit_test: The same for the server's test records.
        mean: Per channel, of images scaled to 0..1. The default, .5, is no property of the data.
        std: Standard deviations per channel, like ``mean``.
        image_size: See :func:`~fednas_flwr.data.images.load_image_folder`.
        channels: See there.
        class_names: See there and :func:`~fednas_flwr.data.tables.load_csv`.
        labels_file: See :func:`~fednas_flwr.data.labelled_images.load_images`.
        label: See :func:`~fednas_flwr.data.tables.load_csv`.
        labels: See there.
        label_separator: See there.
        id_column: See there.
        numeric: See there.
        dates: See there.
        categorical: See there.
        categories: See there.
        ignore: See there.
        statistics: ``{column: [mean, std]}`` of every numeric column of a table, by which all
            clients standardise; without it the clients find them together.
        ranges: ``{column: [low, high]}`` in its place, of all or some columns, see
            :func:`declared_statistics`.
        corrupt: See there, :func:`~fednas_flwr.data.tables.load_csv` and
            :func:`~fednas_flwr.data.npz.load_npz`.
        intensity: See there.
        separator: See :class:`~fednas_flwr.data.table_files.Form`.
        encoding: See there.
        decimal: See there.
        missing_values: See there.
        missing: See :func:`~fednas_flwr.data.tables.load_csv`.
        scattering: ``scales`` and ``angles`` of the transform that makes features of images, see
            :class:`~fednas_flwr.data.scattering.Scattering`; None keeps the images.

    Raises:
        ConfigError: A setting that is unknown, missing, without effect, or not met by the data.
    """
    if name not in DATA_SETS:
        raise unknown_choice("dataset.name", name, DATA_SETS)
    entry = DATA_SETS[name]
    settings = {
        "download": download,
        "image_size": image_size,
        "channels": channels,
        "class_names": list(class_names),
        "labels_file": labels_file,
        "label": None if label == "last" else label,
        "labels": list(labels),
        "label_separator": label_separator,
        "id_column": id_column,
        "numeric": list(numeric),
        "dates": list(dates),
        "categorical": list(categorical),
        "categories": {k: list(v) for k, v in (categories or {}).items()},
        "ignore": list(ignore),
        "statistics": dict(statistics or {}),
        "ranges": dict(ranges or {}),
        "corrupt": corrupt,
        "intensity": list(intensity or ()),
        "separator": separator,
        "encoding": encoding,
        "decimal": decimal,
        "missing_values": list(missing_values),
        "missing": missing,
    }
    for setting, value in settings.items():
        if value and value != _DEFAULTS.get(setting) and setting not in entry.settings:
            raise NoEffectError(
                f"dataset.{setting}={show(value)} has no effect with dataset.name={name}: "
                "remove it."
            )
    for setting, limit in (("limit_train", limit_train), ("limit_test", limit_test)):
        if limit is not None and limit < 1:
            raise ConfigError(f"dataset.{setting}={limit} must be at least 1, or null for all.")
    if channels not in (None, 1, 3):
        raise ConfigError(f"dataset.channels={channels} must be 1 or 3, or null for the images'.")
    if image_size is not None and image_size < 1:
        raise ConfigError(f"dataset.image_size={image_size} must be at least 1, or null.")

    @functools.cache
    def read(path: Path) -> RecordsPair:
        taken = {k: v for k, v in settings.items() if k in entry.settings and k not in _NOT_READ}
        with _reading(name, path if entry.roots else None):
            train, test = entry.read(path, **taken)
        if test is not None:
            _check_test(name, train, test)
        return train, test

    def build() -> dict[str, Records]:
        train, test = (load_sites(source, name=name, read=read), None) if sites else read(source)
        if server_test and test is None:
            is_test = hash_positions(train.ids, key=_SERVER_TEST_KEY) < _SERVER_TEST_SHARE
            if is_test.all() or not is_test.any():
                raise ConfigError(
                    f"the {len(train)} records of dataset={name} are too few to choose a server's "
                    "test set from: set dataset.server_test=false."
                )
            test = select_records(train, np.flatnonzero(is_test))
            train = select_records(train, np.flatnonzero(~is_test))
        parts = {"train": _limited(train, limit_train)}
        if server_test and test is not None:
            parts["server_test"] = _limited(test, limit_test)
        if scattering is not None:
            transform = make_transform(parts["train"], **scattering)
            parts = {part: transformed(records, transform) for part, records in parts.items()}
        return parts

    with _reading(name, root):
        source = find_source(name, root=root, download=download, sites=sites)
        files: object = fingerprint(name, source) if entry.roots else []
    choices = [_CACHE_VERSION, name, sites, server_test, limit_train, limit_test]
    shaping = {k: v for k, v in settings.items() if k not in _NOT_READ}
    if scattering is not None:
        shaping |= {f"scattering.{size}": value for size, value in scattering.items()}
    if entry.by_content:
        files = digest_records(read(source))
    key = hashlib.blake2b(json.dumps([choices, shaping, files]).encode(), digest_size=10)
    try:
        parts = load_or_build(cache / f"{name}-{key.hexdigest()}", build)
    except OSError as error:
        raise ConfigError(
            f"dataset.cache={cache} cannot hold the prepared data ({error.strerror or error}): "
            "choose another folder, or make room."
        ) from error
    train = parts["train"]
    if scattering is not None:  # normalised as they are
        means: tuple[float, ...] = (0.0,)
        stds: tuple[float, ...] = (1.0,)
    else:
        declared = declared_statistics(statistics or {}, ranges or {})
        means, stds = normalisation(train, mean=mean, std=std, statistics=declared)
    return Prepared(
        train,
        parts.get("server_test"),
        means,
        stds,
        intensity=tuple(intensity or ()),
        scattering=(scattering["scales"], scattering["angles"]) if scattering is not None else (),
        from_ranges=bool(ranges) and not statistics,
    )


def declared_statistics(
    statistics: Mapping[str, Sequence[float]], ranges: Mapping[str, Sequence[float]]
) -> dict[str, Sequence[float]]:
    """Return ``{column: [mean, std]}`` of what is declared of columns; reads no record.

    Of a range they are those of numbers that are equally likely everywhere in it: ``(low + high) /
    2`` and ``(high - low) / sqrt(12)``. Numbers beyond it stay as they are.

    Raises:
        ConfigError: A range is not one, or a column has both.
    """
    for column, ends in ranges.items():
        if len(ends) != 2 or not 0 < ends[1] - ends[0] < math.inf:
            raise ConfigError(
                f"dataset.ranges.{column}={list(ends)} must be finite [low, high], low below high."
            )
        if column in statistics:
            raise ConfigError(
                f"dataset.ranges.{column} has no effect beside dataset.statistics.{column}: "
                "remove one of the two."
            )
    found = {
        c: [(low + high) / 2, (high - low) / math.sqrt(12)] for c, (low, high) in ranges.items()
    }
    return {**statistics, **found}


def normalisation(
    records: Records,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    statistics: Mapping[str, Sequence[float]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std per channel or feature as the settings declare them.

    Both are empty of a table without ``statistics``, which then follow from the clients' records.

    Raises:
        ConfigError: The settings do not fit the records.
    """
    if records.features.dtype.is_floating_point:
        return _table_statistics(records, statistics, mean=mean, std=std)
    if statistics:
        raise ConfigError(
            "dataset.statistics is for tables, and so are ranges: give those of images as "
            "dataset.mean and dataset.std."
        )
    return _image_statistics(records, mean=mean, std=std)


@contextmanager
def _reading(name: str, path: Path | None) -> Iterator[None]:
    """Turn whatever a reader makes of a broken or forbidden file into one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        origin = f"dataset={name}" if path is None else f"dataset.root={path}"
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{origin} cannot be read: {reason}.") from error


def _check_test(name: str, train: Records, test: Records) -> None:
    """Refuse a test part that no network of the training part could be measured on."""

    def kind(records: Records) -> str:
        return f"{records.features.dtype} of shape {tuple(records.features.shape[1:])}"

    if kind(train) != kind(test):
        raise ConfigError(
            f"the test records of dataset={name} are {kind(test)}, its training records "
            f"{kind(train)}: store both parts in one form."
        )
    if train.class_names != test.class_names:
        raise ConfigError(f"the test records of dataset={name} have other classes than training's.")
    if train.multi_label != test.multi_label:
        raise ConfigError(
            f"of dataset={name}, one of the training and the test records have a class each, the "
            "others several labels: write both in one form."
        )


def _limited(records: Records, limit: int | None) -> Records:
    """Return the records of smallest public keyed hash, at most ``limit``, in their order."""
    if limit is None or limit >= len(records):
        return records
    order = np.argsort(hash_positions(records.ids, key=_LIMIT_KEY), kind="stable")
    return select_records(records, np.sort(order[:limit]))


def _image_statistics(
    records: Records, *, mean: Sequence[float], std: Sequence[float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std per channel."""
    channels = records.features.shape[1]
    means, stds = tuple(mean) or (0.5,) * channels, tuple(std) or (0.5,) * channels
    if len(means) != channels or len(stds) != channels or min(stds) <= 0:
        raise ConfigError(
            f"dataset.mean={list(mean)} and dataset.std={list(std)} do not fit images of "
            f"{channels} channels: give one number per channel, each std above 0."
        )
    return means, stds


def _table_statistics(
    records: Records,
    statistics: Mapping[str, Sequence[float]],
    *,
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std per feature, 0 and 1 for one-hot ones; empty where none are given."""
    if mean or std:
        raise ConfigError(
            f"dataset.mean={list(mean)} and dataset.std={list(std)} are for images: give a "
            "table's as dataset.statistics={column: [mean, std]}."
        )
    if not statistics:
        return (), ()
    numeric = records.feature_names[: records.num_numeric]
    if set(statistics) != set(numeric):
        wrong = sorted(set(statistics) ^ set(numeric))
        raise ConfigError(
            "dataset.statistics or dataset.ranges must name every numeric column once "
            f"({', '.join(numeric)}): {', '.join(wrong)} is missing or too many."
        )
    for column, pair in statistics.items():
        if len(pair) != 2 or not pair[1] > 0:
            raise ConfigError(
                f"dataset.statistics.{column}={list(pair)} must be [mean, std] with std above 0."
            )
    one_hot = len(records.feature_names) - records.num_numeric
    means = (*(float(statistics[n][0]) for n in numeric), *(0.0,) * one_hot)
    stds = (*(float(statistics[n][1]) for n in numeric), *(1.0,) * one_hot)
    return means, stds
