"""The folder that holds everything of one run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import yaml

from fednas_flwr.config import Config, dump_config, parse_config
from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.checkpoint import write_atomically

CONFIG_FILE = "config.yaml"
EVENTS_FILE = "events.jsonl"
GENOTYPE_FILE = "genotype.json"
PARTITION_FILE = "partition.json"


def create_run_folder(config: Config, *, parent: Path = Path("runs"), name: str = "") -> Config:
    """Make a new run folder, write config.yaml into it, and return the config with its path.

    Args:
        config: With ``run_dir`` null, a folder ``<time>_<algorithm>_<dataset>_<name>`` is made in
            ``parent``.
        parent: Where unnamed run folders go.
        name: Added to the name of an unnamed folder.

    Raises:
        ConfigError: ``run_dir`` already holds a run.
    """
    if config.run_dir is not None:
        folder = Path(config.run_dir).expanduser().resolve()
        if (folder / CONFIG_FILE).exists():
            raise ConfigError(
                f"run_dir={config.run_dir} already holds a run: continue it with "
                f"resume={config.run_dir}, or choose another folder."
            )
        folder.mkdir(parents=True, exist_ok=True)
    else:
        time = datetime.now().strftime("%Y%m%d-%H%M%S")
        parts = [time, config.algorithm.name, config.dataset.name, name]
        stem = re.sub(r"[^A-Za-z0-9_.=,-]+", "-", "_".join(part for part in parts if part))[:120]
        folder = _first_free(parent.resolve() / stem)
    config = replace(config, run_dir=str(folder))
    text = yaml.safe_dump(json.loads(dump_config(config)), sort_keys=False)
    write_atomically(folder / CONFIG_FILE, text.encode())
    return config


def open_run_folder(path: str) -> Config:
    """Return the config of an existing run, for resuming it.

    Raises:
        ConfigError: The folder holds no run.
    """
    folder = Path(path).expanduser().resolve()
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(f"resume={path}: {file} does not exist; give the folder of a run.")
    return replace(parse_config(yaml.safe_load(file.read_text())), run_dir=str(folder))


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
