"""Networks beside a run's own, trained side by side where this machine has cores for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.deploy.grids import LostError
from fednas_flwr.deploy.local_actors import Forks, packed
from fednas_flwr.deploy.server_app import launch
from fednas_flwr.runs.numbers import EVENTS_FILE, is_complete
from fednas_flwr.runs.run_folder import open_run_folder
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.settings import Config, with_runtime

Limits = Mapping[Path, str | None]  # run folders, and the time that each may take


def train_all(config: Config, limits: Limits) -> Iterator[tuple[Path, str]]:
    """Train the runs of some folders; yields each folder when it is done, with why it has failed.

    Args:
        config: Of the run that they stand beside.
        limits: Their folders.
    """
    number = min(len(limits), len(os.sched_getaffinity(0)))
    alone = config.runtime.name != "inline" or config.runtime.device == "cuda"
    if alone or number < 2 or (sent := packed(train)) is None:
        for folder, limit in limits.items():
            yield folder, train(folder, limit)
        return
    with ThreadPoolExecutor(number) as threads, Forks(sent) as forks:

        def trained(folder: Path) -> str:
            reason: str = forks.start()(folder, limits[folder])
            return reason

        folders = {threads.submit(trained, folder): folder for folder in limits}
        try:
            for done in as_completed(folders):
                yield folders[done], done.result()
        except LostError as error:
            raise ConfigError(
                "a process that trains the networks to compare with has ended: the machine may "
                "be out of memory; go on with resume=<run folder>."
            ) from error


def train(folder: Path, limit: str | None) -> str:
    """Begin the run in a folder or go on with it; returns why it has failed, else an empty text."""
    if is_complete(folder):
        return ""
    begun = (folder / EVENTS_FILE).exists()
    try:
        config = with_runtime(open_run_folder(str(folder)), time_limit=limit)
        launch(config, listeners=(), resumed=begun)
    except (ConfigError, QuorumError) as error:
        return str(error)
    return ""
