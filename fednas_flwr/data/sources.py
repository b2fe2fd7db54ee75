"""Where the files of a data set lie, and several sites' files as one set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fednas_flwr.data.images import TORCHVISION_SETS, RecordsPair, load_torchvision
from fednas_flwr.data.records import Records, join_sites
from fednas_flwr.errors import ConfigError


def load_sites(root: Path, *, name: str, read: Callable[[Path], RecordsPair]) -> Records:
    """Return the records of all sites in a folder, sorted by site name, with a column ``site``.

    Args:
        root: One sub-folder per site for image_folder, one file per site for npz and csv.
        name: image_folder, npz or csv.
        read: Reads one site.

    Raises:
        ConfigError: No sites, sites that do not fit together, or one with its own test part.
    """
    patterns = {"image_folder": ("*/",), "npz": ("*.npz",), "csv": ("*.csv", "*.csv.gz")}
    if name not in patterns:
        raise ConfigError(
            f"partition=sites does not fit dataset.name={name}: use image_folder, npz or csv."
        )
    paths = sorted(path for pattern in patterns[name] for path in root.glob(pattern))
    paths = [path for path in paths if path.name[0] not in "._"]
    if not paths:
        raise ConfigError(
            f"dataset.root={root} holds no sites: expected {' or '.join(patterns[name])} in it."
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
    if name == "digits":
        return Path()
    if root is None:
        raise ConfigError(f"dataset={name} needs its place on disk: give dataset.root=<path>.")
    root = Path(root).expanduser()
    if name in TORCHVISION_SETS:
        folder = TORCHVISION_SETS[name][1]
        if download:
            load_torchvision(name, root=root, download=True)
        if not (root / folder).is_dir():
            raise ConfigError(
                f"dataset.root={root} has no folder {folder}: give dataset.root=<folder that "
                f"holds {folder}> or dataset.download=true."
            )
    else:
        kinds = ["folder"] if sites or name == "image_folder" else ["file"]
        kinds += ["folder"] if name == "csv" and not sites else []
        found = "folder" if root.is_dir() else "file" if root.is_file() else None
        if found not in kinds:
            expected = " or ".join(kinds)
            raise ConfigError(f"dataset.root={root} is not a {expected}: give an existing one.")
    return root


def fingerprint(name: str, source: Path) -> list[tuple[str, int, int]]:
    """Return path, size in bytes and time of change in ns of every source file."""
    if name in TORCHVISION_SETS:
        source = source / TORCHVISION_SETS[name][1]
    files = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    stats = [(path, path.stat()) for path in files]
    return [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
