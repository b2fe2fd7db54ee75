"""The data sets there are, where their files lie, and several sites' files as one set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fednas_flwr.data.images import (
    TORCHVISION_SETS,
    RecordsPair,
    load_digits,
    load_torchvision,
)
from fednas_flwr.data.labelled_images import load_images
from fednas_flwr.data.npz import load_npz
from fednas_flwr.data.records import Records, join_sites
from fednas_flwr.data.table_files import SUFFIXES
from fednas_flwr.data.tables import load_csv
from fednas_flwr.errors import ConfigError

_IMAGES = frozenset({"image_size", "channels", "class_names", "corrupt", "intensity"})
_TABLES = frozenset(
    {
        "corrupt",
        *(
            "label",
            "labels",
            "label_separator",
            "id_column",
            "numeric",
            "dates",
            "categorical",
            "categories",
            "ignore",
        ),
        *("separator", "encoding", "decimal", "missing_values", "missing"),
    }
)


@dataclass(frozen=True)
class DataSet:
    """Entry behind the ``name`` in a file of ``conf/dataset``.

    Attributes:
        read: Called with the path that :func:`find_source` returns, and with its settings but
            ``download``, ``statistics`` and ``ranges`` as keyword arguments; returns the train
            part and the official test part, None where there is none.
        settings: Those of ``conf/dataset/_base.yaml`` that have an effect.
        roots: What ``dataset.root`` may be, ``file`` or ``folder``; empty if it is not needed.
        sites: Patterns of the sites in a folder, one of which ``read`` then gets; empty if the set
            cannot be divided by sites.
        folder: Below the root, with its files.
        by_content: Whether the records decide if a cached copy is the same, and not the files.
    """

    read: Callable[..., RecordsPair]
    settings: frozenset[str] = frozenset()
    roots: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()
    folder: str = ""
    by_content: bool = False


def _torchvision(name: str) -> DataSet:
    return DataSet(
        lambda root: load_torchvision(name, root=root, download=False),
        frozenset({"download"}),
        roots=("folder",),
        folder=TORCHVISION_SETS[name][1],
    )


DATA_SETS: dict[str, DataSet] = {
    "digits": DataSet(lambda root: load_digits()),
    **{name: _torchvision(name) for name in TORCHVISION_SETS},
    "image_folder": DataSet(
        load_images,
        _IMAGES | {"id_column", "labels_file", "label", "labels", "label_separator"},
        roots=("folder",),
        sites=("*/",),
    ),
    "npz": DataSet(load_npz, _IMAGES | {"statistics", "ranges"}, roots=("file",), sites=("*.npz",)),
    "csv": DataSet(
        load_csv,
        _TABLES | {"class_names", "statistics", "ranges"},
        roots=("file", "folder"),
        sites=tuple(f"*{suffix}" for suffix in SUFFIXES),
    ),
}


def check_sites(name: str) -> None:
    """Raise ConfigError unless a data set can be divided by sites."""
    if not DATA_SETS[name].sites:
        *others, last = (name for name, entry in DATA_SETS.items() if entry.sites)
        raise ConfigError(
            f"partition=sites does not fit dataset.name={name}: use {', '.join(others)} or {last}."
        )


def load_sites(root: Path, *, name: str, read: Callable[[Path], RecordsPair]) -> Records:
    """Return the records of all sites in a folder, sorted by site name, with a column ``site``.

    Args:
        root: One sub-folder per site for image_folder, one file per site for npz and csv.
        name: Of a data set that can be divided by sites.
        read: Reads one site.

    Raises:
        ConfigError: No sites, sites that do not fit together, or one with its own test part.
    """
    check_sites(name)
    patterns = DATA_SETS[name].sites
    paths = sorted(path for pattern in patterns for path in root.glob(pattern))
    paths = [path for path in paths if path.name[0] not in "._"]
    if not paths:
        raise ConfigError(
            f"dataset.root={root} holds no sites: expected {' or '.join(patterns)} in it."
        )
    sites: dict[str, Records] = {}
    for path in paths:
        train, test = read(path)
        if test is not None:
            raise ConfigError(
                f"the site {path} has a test part of its own, but the part of each record is "
                "fixed by its keyed hash: put all records of the site into one part."
            )
        sites[path.name if path.is_dir() else path.name.split(".")[0]] = train
    if len(sites) != len(paths):
        raise ConfigError(f"two sites in {root} have the same name: {[p.name for p in paths]}.")
    return join_sites(sites)


def find_source(name: str, *, root: Path | None, download: bool, sites: bool) -> Path:
    """Return the folder or file to read, fetched first where that is asked for."""
    entry = DATA_SETS[name]
    if root is None and entry.roots:
        raise ConfigError(f"dataset={name} needs its place on disk: give dataset.root=<path>.")
    root = root or Path()
    if not entry.roots:
        return root
    if folder := entry.folder:
        if download:
            load_torchvision(name, root=root, download=True)
        if not (root / folder).is_dir():
            raise ConfigError(
                f"dataset.root={root} has no folder {folder}: give dataset.root=<folder that "
                f"holds {folder}> or dataset.download=true."
            )
    else:
        kinds = ("folder",) if sites else entry.roots
        found = "folder" if root.is_dir() else "file" if root.is_file() else None
        if found not in kinds:
            expected = " or ".join(kinds)
            raise ConfigError(f"dataset.root={root} is not a {expected}: give an existing one.")
    return root


def fingerprint(name: str, source: Path) -> list[tuple[str, int, int]]:
    """Return path, size in bytes and time of change in ns of every source file."""
    source = source / DATA_SETS[name].folder
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    stats = [(path, path.stat()) for path in files]
    return [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def digest_records(parts: RecordsPair) -> str:
    """Return the blake2b-128, in hex, of all that the parts of a data set hold."""
    digest = hashlib.blake2b(digest_size=16)
    for records in parts:
        if records is None:
            continue
        arrays = [records.features.numpy(), records.labels.numpy(), records.ids]
        arrays += [values.astype(np.str_) for values in records.columns.values()]
        schema = [asdict(column) for column in records.schema]
        names = (records.class_names, list(records.columns), schema)
        shapes = [(str(array.dtype), array.shape) for array in arrays]
        digest.update(json.dumps([names, shapes]).encode())
        for array in arrays:
            digest.update(array.tobytes())
    return digest.hexdigest()
