"""The folder that holds everything of one run."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import yaml

from fednas_flwr.builders.configuration import parse_config
from fednas_flwr.config import Config, dump_config
from fednas_flwr.errors import ConfigError, MissingSettingError
from fednas_flwr.files import write_atomically
from fednas_flwr.reporting.runs import CONFIG_FILE, is_complete

GENOTYPE_FILE = "genotype.json"
PARTITION_FILE = "partition.json"
GROUPS_FILE = "groups.json"
LATENCY_FILE = "latency.json"
LOCK_FILE = ".lock"
RUNS = Path("runs")  # where run folders are made, below the folder of the command


def check_free(config: Config) -> None:
    """Raise ConfigError when ``run_dir`` already holds a run."""
    if config.run_dir is not None and _config_file(config.run_dir).exists():
        raise ConfigError(
            f"run_dir={config.run_dir} already holds a run: continue it with "
            f"resume={config.run_dir}, or choose another folder."
        )


def create_run_folder(config: Config) -> Config:
    """Make a new run folder, write config.yaml into it, and return the config with its path.

    With ``run_dir`` null the folder is ``runs/<time>_<algorithm>_<dataset>``.

    Raises:
        ConfigError: ``run_dir`` already holds a run.
    """
    check_free(config)
    if config.run_dir is not None:
        file = _config_file(config.run_dir)
        file.parent.mkdir(parents=True, exist_ok=True)
    else:
        stem = f"{_now()}_{config.algorithm.name}_{config.dataset.name}"
        file = _first_free(RUNS.resolve() / stem) / CONFIG_FILE
    config = replace(config, run_dir=str(file.parent))
    write_atomically(file, yaml.safe_dump(json.loads(dump_config(config)), sort_keys=False))
    return config


def sweep_folder(run_dir: str | None) -> Path:
    """Return the folder for the run folders of a sweep: ``run_dir``, or ``runs/<time>_sweep``."""
    return Path(run_dir or RUNS / f"{_now()}_sweep").expanduser().resolve()


def open_run_folder(path: str) -> Config:
    """Return the config of an existing run, for resuming it.

    Raises:
        ConfigError: The folder holds no run, or one that another version started.
    """
    file = _config_file(path)
    if not file.is_file():
        raise ConfigError(f"resume={path}: {file} does not exist; give the folder of a run.")
    try:
        config = parse_config(yaml.safe_load(file.read_text()))
    except MissingSettingError as error:
        raise ConfigError(
            f"resume={path}: it was started by another version, which had no setting "
            f"`{error.key}`; it cannot be continued."
        ) from error
    return replace(config, run_dir=str(file.parent))


def check_whole(config: Config) -> None:
    """Raise ConfigError for the folder of a group: alone it would go on with all clients."""
    whole = Path(str(config.run_dir)).parents[1]
    if (whole / GROUPS_FILE).is_file():
        raise ConfigError(
            f"resume={config.run_dir}: it is a group of another run; continue that with "
            f"resume={whole}."
        )


def find_unfinished(config: Config) -> Config | None:
    """Return the newest run of this configuration that has not completed, None if there is none.

    Looked for in ``run_dir``, else in ``runs``; where the run folder is does not count.
    """
    folders = [Path(config.run_dir)] if config.run_dir else RUNS.resolve().glob("*")
    files = [file for folder in folders if (file := _config_file(str(folder))).is_file()]
    for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
        try:
            found = open_run_folder(str(file.parent))
        except ConfigError:  # of another version
            continue
        if replace(found, run_dir=config.run_dir) == config and not is_complete(file.parent):
            return found
    return None


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """Hold a run's folder: no second process can continue a run that is going on.

    Raises:
        ConfigError: Another process of this machine holds it.
    """
    with (folder / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"the run in {folder} is going on in another process: wait for its end, or stop it."
            ) from error
        yield


def _config_file(run_dir: str) -> Path:
    return Path(run_dir).expanduser().resolve() / CONFIG_FILE


def _now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def _first_free(folder: Path) -> Path:
    """Make and return ``folder``, or ``folder_2`` and so on where that exists."""
    number = 1
    while True:
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}_{number}")
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            number += 1
