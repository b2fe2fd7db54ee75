"""Prepares a data set from its name and settings: records cached on disk and memory-mapped.

The main function is :func:`prepare`. Clients hold the part ``train``; the server holds
``server_test``, a test set declared public. The division of ``train`` over clients comes later.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.files import make_folder, sync, walk
from fednas_flwr.data import records as rd
from fednas_flwr.data.decoding import beside, sites_in
from fednas_flwr.data.features import kept_as, make_transform, transform_of, transformed
from fednas_flwr.data.images import read_torchvision
from fednas_flwr.data.oddities import oddities
from fednas_flwr.data.readers import DATA_SETS, check_sites
from fednas_flwr.data.site_tables import join_tables, read_site_tables
from fednas_flwr.data.statistics import Statistics
from fednas_flwr.settings import Dataset, expanded
from fednas_flwr.settings.data_settings import CSV, EncodedImages, Images, Torchvision, uniform
from fednas_flwr.settings.parser import A_LINE, check_range, is_line, parse

# To be raised whenever the same source would give other prepared records.
_CACHE_VERSION = 17
# Public and fixed: these choices must be the same in every run and on every machine.
_SERVER_TEST_KEY = b"fednas_flwr server test"
_LIMIT_KEY = b"fednas_flwr limit"
_SERVER_TEST_SHARE = 0.2
_ATTEMPTS = 3  # at reading stored records
_ARRAYS = dict.fromkeys(("features", "labels", "ids", "columns"), Any)  # fields of records
# Settings that change no prepared record, and those whose files or description count instead
_LATER = {"fractions", "split_key", "linear_baseline", "statistics", "ranges", "mean", "std"}
_LATER |= {"crop_padding", "flip", "cutout"}
_COUNTED_INSTEAD = {"cache", "root", "download", "scattering", "backbone"}


@dataclass(frozen=True)
class Prepared:
    """A data set ready to be divided over clients.

    Attributes:
        train: Records of the clients.
        server_test: Public test records of the server, or None.
        mean: Means per channel of images scaled to 0..1, or per feature of a table; a single 0 for
            features that are already normalised; empty for a table whose statistics are neither
            declared nor known yet.
        std: Standard deviations like ``mean``, all above 0.
        intensity: Intensities of 16-bit images that become 0 and 255; empty is 0 to 65535.
        transform: Description of the transform that made features of images; empty without one.
        target: As ``Inputs.target``; 0 and 1 until the clients' statistics are known.
    """

    train: rd.Records
    server_test: rd.Records | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    intensity: tuple[float, ...] = ()
    transform: tuple[str, ...] = ()
    target: tuple[float, ...] = ()

    @property
    def num_classes(self) -> int:
        """Number of classes; 1 for a number to predict."""
        return len(self.train.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record: ``(C, H, W)`` or ``(F,)``."""
        return tuple(self.train.features.shape[1:])

    @property
    def inputs(self) -> rd.Inputs:
        """Facts about raw inputs that an exported model must know."""
        train = self.train
        return rd.Inputs(
            shape=train.image_shape or self.input_shape,
            schema=train.schema,
            mean=self.mean,
            std=self.std,
            class_names=train.class_names,
            label=train.label,
            multi_label=train.multi_label,
            target=self.target,
            label_separator=train.label_separator,
            form=train.form,
            id_column=train.id_column,
            intensity=self.intensity,
            transform=self.transform,
            limit=rd.LIMIT if len(self.input_shape) == 1 else 0.0,
        )

    @property
    def uses_own_statistics(self) -> bool:
        """True if statistics follow from the clients' records, which no privacy budget covers."""
        return not self.mean

    def standardised(self, statistics: Statistics) -> Prepared:
        """Return the same data set, standardised by the statistics that clients have found."""
        target = self.target if len(self.target) > 2 else statistics.target
        return replace(self, mean=statistics.mean, std=statistics.std, target=target)


Data = tuple[Prepared, rd.Parts]


def prepare(dataset: Dataset, *, sites: bool = False) -> Prepared:
    """Return the prepared data set; its tensors are in the cache and memory-mapped.

    A cached copy is used if the settings and the size and time of every source file are the same.
    Several processes may prepare at once.

    Args:
        dataset: Settings of the data set.
        sites: True if the root holds one folder (images) or file (npz, csv) per client; the records
            then get a column ``site``.

    Raises:
        ConfigError: A setting is missing, without effect, or not met by the data.
    """
    name, entry, transform = dataset.name, DATA_SETS[dataset.name], transform_of(dataset)

    @functools.cache
    def read(path: Path) -> rd.RecordsPair:
        with _reading(name, path if entry.roots else None):
            train, test = entry.read(dataset, path)
        if test is not None:
            rd.check_alike(f"dataset={name}", train, "its test records", test)
        return train, test

    with _reading(name, dataset.place):
        source = find_source(dataset, sites=sites)
        files: object = fingerprint(name, source)
    if entry.by_content:
        files = digest_records(read(source))
    shaping = {k: v for k, v in asdict(dataset).items() if k not in _LATER | _COUNTED_INSTEAD}
    shaping["transform"] = transform
    key = hashlib.blake2b(
        json.dumps([_CACHE_VERSION, sites, shaping, files]).encode(), digest_size=10
    )
    cache = expanded("dataset.cache", dataset.cache)
    try:
        parts = load_or_build(
            cache / f"{name}-{key.hexdigest()}",
            lambda: _built(dataset, _read_sites(dataset, source, read) if sites else read(source)),
        )
    except OSError as error:
        raise ConfigError(
            f"dataset.cache={cache} cannot hold the prepared data ({error.strerror or error}): "
            "choose another folder, or make room."
        ) from error
    train = parts["train"]
    for name in train.class_names:
        check_range(is_line(name), "the class", name, f"{A_LINE}: rename it in the data")
    mean, std = _normalisation(train, dataset)
    intensity, target = intensity_of(dataset), _target(train, dataset, mean)
    return Prepared(train, parts.get("server_test"), mean, std, intensity, transform, target)


def _target(records: rd.Records, dataset: Dataset, mean: tuple[float, ...]) -> tuple[float, ...]:
    """Return the numbers that standardise a numeric target, see ``Inputs.target``.

    Raises:
        ConfigError: It has no range, although the features' statistics or ranges are declared.
    """
    ends = getattr(dataset, "target_range", None)
    if not records.is_regression:
        return ()
    if ends is None and mean:
        raise ConfigError(
            f"the target {records.label} is a number, and clients tell no statistics of it where "
            "those of the features are declared, as for images: declare dataset.target_range=[low, "
            "high], too, public ends of what is usual (or set dataset.task=classification)."
        )
    return (0.0, 1.0) if ends is None else (*uniform(ends), *ends)


def _built(dataset: Dataset, read: rd.RecordsPair) -> dict[str, rd.Records]:
    """Return the records of clients and server, limited and transformed."""
    train, test = read
    if dataset.server_test and test is None:
        is_test = rd.hash_positions(train.ids, key=_SERVER_TEST_KEY) < _SERVER_TEST_SHARE
        if is_test.all() or not is_test.any():
            oddities(train)  # refuses images that are all one picture
            raise ConfigError(
                f"the {len(train)} records of dataset={dataset.name}, of "
                f"{len(np.unique(train.ids))} different ones or persons, are too few to choose a "
                "server's test set from: set dataset.server_test=false."
            )
        test = rd.select_records(train, np.flatnonzero(is_test))
        train = rd.select_records(train, np.flatnonzero(~is_test))
    parts = {"train": _limited(train, dataset.limit_train)}
    if dataset.server_test and test is not None:
        parts["server_test"] = _limited(test, dataset.limit_test)
    described, shape = transform_of(dataset), tuple(parts["train"].features.shape[1:])
    made = make_transform(described, shape, dataset.transform)
    if made is not None:
        parts = {part: transformed(of, made, kept_as(described)) for part, of in parts.items()}
    return parts


def intensity_of(dataset: Dataset) -> tuple[float, ...]:
    """Return the intensities of 16-bit images that become 0 and 255 (``EncodedImages``), or ()."""
    return tuple(dataset.intensity or ()) if isinstance(dataset, EncodedImages) else ()


def find_source(dataset: Dataset, *, sites: bool) -> Path:
    """Return the folder or file to read; it is downloaded first if the settings say so."""
    name, entry, root = dataset.name, DATA_SETS[dataset.name], dataset.place
    if not entry.roots:
        return root or Path()
    if root is None:
        raise ConfigError(f"dataset={name} needs its place on disk: give dataset.root=<path>.")
    if folder := entry.folder:
        if isinstance(dataset, Torchvision) and dataset.download:
            read_torchvision(dataset, root, download=True)
        if not (root / folder).is_dir():
            raise ConfigError(
                f"dataset.root={root} has no folder {folder}: give dataset.root=<folder that "
                f"holds {folder}> or dataset.download=true."
            )
        return root
    kinds = ("folder",) if sites else entry.roots
    if ("folder" if root.is_dir() else "file" if root.is_file() else None) not in kinds:
        expected = " or ".join(kinds)
        more = ", or set partition=sites" if root.is_dir() and entry.sites else ""
        raise ConfigError(f"dataset.root={root} is not a {expected}: give an existing one{more}.")
    return root


def fingerprint(name: str, source: Path) -> list[tuple[str, int, int]]:
    """Return path, size in bytes and time of change in ns of every source file, if any."""
    entry = DATA_SETS[name]
    if not entry.roots:
        return []
    place = os.path.realpath(source / entry.folder)
    below = [os.path.join(folder, name) for folder, _, names in walk(Path(place)) for name in names]
    stats = [(path, os.stat(path)) for path in sorted(below or [place]) if os.path.isfile(path)]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def digest_records(parts: rd.RecordsPair) -> str:
    """Return the blake2b-128, in hex, of the whole content of a data set's parts."""
    digest = hashlib.blake2b(digest_size=16)
    for records in parts:
        if records is not None:
            arrays = _arrays(records)
            shapes = [(name, str(array.dtype), array.shape) for name, array in arrays.items()]
            digest.update(json.dumps([_description(records), shapes]).encode())
            for array in arrays.values():
                digest.update(array.tobytes())
    return digest.hexdigest()


def _read_sites(
    dataset: Dataset, root: Path, read: Callable[[Path], rd.RecordsPair]
) -> rd.RecordsPair:
    if isinstance(dataset, CSV):
        return join_tables(read_site_tables(dataset, root), dataset, root), None
    return load_sites(root, name=dataset.name, read=read)


def load_sites(root: Path, *, name: str, read: Callable[[Path], rd.RecordsPair]) -> rd.RecordsPair:
    """Return the records of all sites in a folder, sorted by site name, with a column ``site``.

    Args:
        root: Folder with one sub-folder per site for images, one file per site for npz and csv.
        name: Name of a data set that can be divided by sites.
        read: Reader of one site.

    Raises:
        ConfigError: No sites, sites that do not fit together, or one with its own test part.
    """
    check_sites(name)
    paths = sites_in(root, DATA_SETS[name].sites)
    sites: dict[str, rd.Records] = {}
    for site, path in paths.items():
        sites[site], test = read(path)
        if test is not None:
            raise ConfigError(
                f"the site {path} has a test part of its own, but the part of each record is "
                "fixed by its keyed hash: put all records of the site into one part."
            )
    joined = rd.join_sites(sites)
    others = beside(root, paths.values(), "expected nothing but sites")
    return replace(joined, notes=(*others, *joined.notes)), None


def _normalisation(
    records: rd.Records, dataset: Dataset
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std per channel or feature as the settings declare them.

    Both are empty for a table without statistics, which then follow from the clients' records.

    Raises:
        ConfigError: The settings do not fit the records.
    """
    if dataset.transform is not None:
        return (0.0,), (1.0,)  # these features are already normalised
    mean, std = (dataset.mean, dataset.std) if isinstance(dataset, Images) else ([], [])
    statistics, is_table = dataset.column_statistics, records.features.is_floating_point()
    if (mean or std) if is_table else statistics:
        raise ConfigError(
            f"dataset.mean={mean} and dataset.std={std} are for images, dataset.statistics and "
            f"dataset.ranges are for tables: these are {'a table' if is_table else 'images'}, so "
            "remove the others."
        )
    if not is_table:
        channels = records.features.shape[1]
        means, stds = (tuple(values) or (0.5,) * channels for values in (mean, std))
        if not len(means) == len(stds) == channels:
            raise ConfigError(
                f"dataset.mean={mean} and dataset.std={std} do not fit images of {channels} "
                "channels: give one number per channel."
            )
        return means, stds
    if not statistics:
        return (), ()
    numeric = records.feature_names[: records.num_numeric]
    if wrong := sorted(set(statistics) ^ set(numeric)):
        raise ConfigError(
            "dataset.statistics or dataset.ranges must name every numeric column once "
            f"({', '.join(numeric)}): {', '.join(wrong)} is missing or too many."
        )
    one_hot = [(0.0, 1.0)] * (len(records.feature_names) - len(numeric))
    means, stds = zip(*(statistics[name] for name in numeric), *one_hot, strict=True)
    return means, stds


@contextmanager
def _reading(name: str, path: Path | None) -> Iterator[None]:
    """Turn any error of a reader, for a broken or forbidden file, into one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        origin = f"dataset={name}" if path is None else f"dataset.root={path}"
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ConfigError(f"{origin} cannot be read: {reason}.") from error


def _limited(records: rd.Records, limit: int | None) -> rd.Records:
    """Return at most ``limit`` records, those of smallest public keyed hash, in their order."""
    if limit is None or limit >= len(records):
        return records
    order = np.argsort(rd.hash_positions(records.ids, key=_LIMIT_KEY), kind="stable")
    return rd.select_records(records, np.sort(order[:limit]))


def load_or_build(
    folder: Path, build: Callable[[], Mapping[str, rd.Records]]
) -> dict[str, rd.Records]:
    """Load the records in the folder, memory-mapped; build and store them first if it is missing.

    The folder holds .npy files and an index; nothing is pickled. It gets its name only when all of
    it is on disk, so a half-written one is never read. Processes that prepare the same data at once
    end with one of their equal copies.

    Args:
        folder: The folder; its name must change whenever the result of ``build`` does.
        build: Function that makes the records by part, e.g. ``train``.

    Raises:
        OSError: The folder cannot be written.
    """
    for _ in range(_ATTEMPTS):
        records = _read(folder)
        if records is not None:
            return records
        shutil.rmtree(folder, ignore_errors=True)  # half of one is never read: files are checked
        if folder.is_file():
            folder.unlink(missing_ok=True)
        _write(folder, build())
    raise OSError(f"the prepared data in {folder} cannot be read back: remove that folder.")


def _arrays(records: rd.Records) -> dict[str, np.ndarray]:
    """Return the arrays of records by the names of their files."""
    columns = [values.astype(np.str_) for values in records.columns.values()]
    features, labels = records.features.numpy(), records.labels.numpy()
    return {"features": features, "labels": labels, "ids": records.ids} | {
        f"column{i}": values for i, values in enumerate(columns)
    }


def _description(records: rd.Records) -> dict[str, Any]:
    """Return all other fields of records, as JSON values."""
    values = {field.name: getattr(records, field.name) for field in fields(records)}
    texts = {name: value for name, value in values.items() if name not in _ARRAYS}
    columns = {"columns": list(records.columns), "schema": [asdict(c) for c in records.schema]}
    return texts | columns | {"form": asdict(records.form)}


def _write(folder: Path, parts: Mapping[str, rd.Records]) -> None:
    """Write the records beside the folder, flush them to disk, and rename."""
    make_folder(folder.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for part, records in parts.items():
            for name, array in _arrays(records).items():
                np.save(unfinished / f"{part}-{name}.npy", array)
        files = {path.name: _facts(path) for path in sorted(unfinished.iterdir())}
        described = {part: _description(records) for part, records in parts.items()}
        index = unfinished / "index.json"
        index.write_text(json.dumps({"files": files, "parts": described}), encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        os.rename(unfinished, folder)
    except OSError:
        # Renaming to a full folder fails: another process was first, with the same content.
        if not (folder / "index.json").exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read(folder: Path) -> dict[str, rd.Records] | None:
    """Return the records, or None if the folder is missing or a file is not as written."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        if not all(_is_whole(folder / name, facts) for name, facts in index["files"].items()):
            return None
        return {part: _mapped(folder, part, about) for part, about in index["parts"].items()}
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except (ValueError, LookupError, TypeError, AttributeError):  # of another form, so damaged
        return None


def _mapped(folder: Path, part: str, description: dict[str, Any]) -> rd.Records:
    """Map one part's records copy-on-write: torch wants writable memory, files must not change."""

    def array(name: str) -> np.ndarray:
        return np.load(folder / f"{part}-{name}.npy", mmap_mode="c", allow_pickle=False)

    tensors = {name: torch.from_numpy(array(name)) for name in ("features", "labels")}
    columns = {name: array(f"column{i}") for i, name in enumerate(description["columns"])}
    values = {**description, **tensors, "ids": array("ids"), "columns": columns}
    return parse(rd.Records, values, key="records", hints=_ARRAYS)


def _facts(path: Path) -> list[object]:
    """Return a file's time of change in ns, and its hash."""
    with path.open("rb") as file:
        return [path.stat().st_mtime_ns, hashlib.file_digest(file, "blake2b").hexdigest()]


def _is_whole(path: Path, facts: list[object]) -> bool:
    """Return true if a file is as it was written; its bytes are read only if its time differs."""
    return path.stat().st_mtime_ns == facts[0] or _facts(path)[1] == facts[1]
