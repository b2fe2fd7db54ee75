"""The folder that holds all files of one run."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from fednas_flwr.base.errors import ConfigError, MissingSettingError, show
from fednas_flwr.base.files import write_atomically
from fednas_flwr.base.foreign import check_resolved, dump_yaml, read_yaml
from fednas_flwr.runs.numbers import CONFIG_FILE, is_complete
from fednas_flwr.settings import Config, configuration, dump_config, expanded

GENOTYPE_FILE = "genotype.json"
PARTITION_FILE = "partition.json"
GROUPS_FILE = "groups.json"
LATENCY_FILE = "latency.json"
LOCK_FILE = ".lock"
RUNS = Path("runs")  # parent of run folders, below the folder of the command


def check_free(config: Config, *, runs: Path = RUNS) -> None:
    """Raise ConfigError if no run folder can be made, or ``run_dir`` already holds a run."""
    folder = _folder("run_dir", config.run_dir or str(runs))
    with _usable("run_dir", folder):
        if config.run_dir is not None and (folder / CONFIG_FILE).exists():
            raise ConfigError(
                f"run_dir={config.run_dir} already holds a run: continue it with "
                f"resume={config.run_dir}, or choose another folder."
            )
    check_writable("run_dir", folder)


def check_writable(setting: str, folder: Path) -> None:
    """Raise ConfigError for a folder that cannot be written or made."""
    with _usable(setting, folder):
        there = _existing(folder)
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{there} is no folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{there} cannot be written")


def free_bytes(config: Config) -> int:
    """Return the free bytes on the disk of a run's folder, which need not exist yet."""
    return shutil.disk_usage(_existing(_folder("run_dir", config.run_dir or str(RUNS)))).free


def check_room(config: Config, num_bytes: int) -> None:
    """Raise ConfigError if a new run certainly writes more than fits on its disk.

    Args:
        config: Settings of the run; a resumed run replaces its own checkpoints.
        num_bytes: A lower estimate of the bytes that the run writes.
    """
    folder, free = _folder("run_dir", config.run_dir or str(RUNS)), free_bytes(config)
    if num_bytes <= free or (folder / CONFIG_FILE).exists():
        return
    raise ConfigError(
        f"checkpoints and exported models take at least {num_bytes / 1e6:,.1f} MB in "
        f"run_dir={show(str(folder))}, whose disk has {free / 1e6:,.1f} MB free: make room, choose "
        "another folder, or lower the sizes of the networks."
    )


def create_run_folder(config: Config, *, runs: Path = RUNS) -> Config:
    """Make a new run folder, write config.yaml into it, and return the config with its path.

    With ``run_dir`` null the folder is ``<runs>/<time>_<algorithm>_<dataset>``; if that exists,
    ``_2`` and so on is added.

    Raises:
        ConfigError: ``run_dir`` already holds a run, or cannot be written.
    """
    check_free(config, runs=runs)
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    stem = f"{now}_{config.algorithm.name}_{config.dataset.name}"
    folder = _folder("run_dir", config.run_dir or str(runs / stem))
    with _usable("run_dir", folder):
        if config.run_dir is not None:
            folder.mkdir(parents=True, exist_ok=True)
        else:
            others = (folder.with_name(f"{folder.name}_{number}") for number in count(2))
            for candidate in chain([folder], others):
                with suppress(FileExistsError):
                    candidate.mkdir(parents=True)
                    break
            folder = candidate
        config = replace(config, run_dir=str(folder))
        write_atomically(folder / CONFIG_FILE, dump_yaml(json.loads(dump_config(config))))
    return config


def open_run_folder(path: str) -> Config:
    """Return the config of an existing run, for resuming it.

    Raises:
        ConfigError: The folder holds no run, or one that another version started, or its
            configuration is damaged.
    """
    folder = _folder("resume", path)
    tree = read_config_file(path)
    try:
        config = configuration.parse_config(tree)
    except MissingSettingError as error:
        raise ConfigError(
            f"resume={path}: it was started by another version, which had no setting "
            f"`{error.key}`; it cannot be continued."
        ) from error
    except ConfigError as error:
        raise ConfigError(f"resume={path}: {error}") from error
    return replace(config, run_dir=str(folder))


def read_config_file(path: str) -> dict[str, Any]:
    """Return the settings in the folder of a run, unchecked.

    Raises:
        ConfigError: The folder holds no run, or its file is no mapping in YAML.
    """
    file = _folder("resume", path) / CONFIG_FILE
    if not file.exists():
        raise ConfigError(f"resume={path}: {file} does not exist; give the folder of a run.")
    tree = read_yaml(file, f"resume={path}: {file}")
    if not isinstance(tree, dict):
        raise ConfigError(f"resume={path}: {file} is no mapping of settings: give another folder.")
    check_resolved(tree)
    return tree


def check_whole(config: Config) -> None:
    """Raise ConfigError for the folder of a group: alone it would continue with all clients."""
    whole = config.folder.parents[1]
    if (whole / GROUPS_FILE).is_file():
        raise ConfigError(
            f"resume={config.run_dir}: it is a group of another run; go on with resume={whole}."
        )


def find_unfinished(config: Config) -> Config | None:
    """Return the newest run of this configuration that has not completed, or None.

    It is searched in ``run_dir``, else in ``runs``; the place of the run folder may differ.
    """
    folders = [_folder("run_dir", config.run_dir)] if config.run_dir else RUNS.resolve().glob("*")
    files = [file for folder in folders if (file := folder / CONFIG_FILE).is_file()]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            found = open_run_folder(str(file.parent))
        except ConfigError:  # by another version
            continue
        if replace(found, run_dir=config.run_dir) == config and not is_complete(file.parent):
            return found
    return None


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Lock a run's folder, so that no second process can continue a run in progress.

    Raises:
        ConfigError: Another process of this machine has locked it, or it cannot be written.
    """
    with ExitStack() as stack:
        with _usable("run_dir", folder):
            file = stack.enter_context((folder / LOCK_FILE).open("w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"the run in {folder} is going on in another process: wait for its end, or stop it."
            ) from error
        yield


def _folder(setting: str, path: str) -> Path:
    return expanded(setting, path).resolve()


def _existing(folder: Path) -> Path:
    """Return the folder, or the deepest existing folder of its path."""
    return next(path for path in (folder, *folder.parents) if path.exists())


@contextmanager
def _usable(setting: str, folder: Path) -> Iterator[None]:
    """Turn an error in the block into one sentence on why a folder cannot be used."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{setting}={show(str(folder))} cannot be used ({error.strerror or error}): choose "
            "another folder."
        ) from error
