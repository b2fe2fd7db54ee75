"""A whole run: its search, what its network is compared with, and the network that it delivers.

What is compared is a run of its own, in a folder of the run's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.deploy.server_app import launch
from fednas_flwr.models.prediction import MODEL_FILE
from fednas_flwr.pipeline.baselines import (
    delivered,
    num_random,
    prepare_baselines,
    prepare_candidates,
)
from fednas_flwr.report.html_report import write_report
from fednas_flwr.report.templates import percent
from fednas_flwr.runs.events import Listener
from fednas_flwr.runs.leaderboard import chosen
from fednas_flwr.runs.numbers import EVENTS_FILE, is_complete, is_whole, read_run
from fednas_flwr.runs.run_folder import open_run_folder
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.settings import Config, with_runtime
from fednas_flwr.settings.names import FOUND
from fednas_flwr.settings.parser import seconds
from fednas_flwr.settings.unused import without_effect

Tell = Callable[[str], None]
SEARCH_COST, SHORT_COST, LONG_COST, DELIVERED_COST = 4.0, 1.0, 3.0, 4.0  # parts of the time


def run_whole(
    config: Config, *, listeners: Iterable[Listener], resumed: bool, tell: Tell = lambda line: None
) -> None:
    """Run a configuration whose folder exists, with all that belongs to it.

    Baselines are trained after the run, and candidates before the network that it delivers. One
    that fails says so in its own folder, and no more. A run that is resumed once it has completed
    is not begun again: its clients would release their measures once more.

    Args:
        config: With ``run_dir`` set.
        listeners: Called with every event of the run itself.
        resumed: True if the folder held a run that is continued.
        tell: Called with a line for each network that is trained beside the run's.
    """
    listeners, folder = list(listeners), Path(str(config.run_dir))
    if config.evaluation.deliver == FOUND or "evaluation.deliver" in without_effect(config):
        if not (resumed and is_whole(folder)):
            launch(config, listeners=listeners, resumed=resumed)
        _train_baselines(config, tell)
    elif not (resumed and is_whole(folder)):
        _deliver_best(config, listeners, resumed, tell)


@dataclass
class _Budget:
    """What is left of a run's ``time_limit``, shared out by what the steps to come cost."""

    config: Config
    to_come: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        limit = self.config.runtime.time_limit
        self._ends_at = None if limit is None else time.monotonic() + seconds(limit)

    def limited(self, config: Config) -> Config:
        """Return the configuration of the next step with its share of the time, at least 1 s."""
        share = self.to_come[0] / sum(self.to_come)
        del self.to_come[0]
        if self._ends_at is None:
            return with_runtime(config, time_limit=None)
        left = max(1.0, share * (self._ends_at - time.monotonic()))
        return with_runtime(config, time_limit=f"{left:.1f}s")


def _deliver_best(config: Config, listeners: list[Listener], resumed: bool, tell: Tell) -> None:
    """Search, train the candidates, and then the one that validation records choose."""
    folder, budget = Path(str(config.run_dir)), _Budget(config)
    shorts = num_random(config) + 3
    later = [*[SHORT_COST] * shorts, LONG_COST, LONG_COST, DELIVERED_COST]
    if not (resumed and read_run(folder).last("derived")):
        budget.to_come = [SEARCH_COST, *later]
        search = budget.limited(replace(config, stages=["search"]))
        launch(search, listeners=listeners, resumed=resumed)
        if not read_run(folder).last("derived"):  # out of time
            return
    for last in (False, True):
        folders = prepare_candidates(config, last=last)
        for place, beside in enumerate(folders):
            long = [LONG_COST] * (len(folders) - place if last else 2)
            short = [] if last else [SHORT_COST] * (len(folders) - place)
            budget.to_come = [*short, *long, DELIVERED_COST]
            _train_beside(beside, budget.limited(open_run_folder(str(beside))), tell)
    best = chosen(folder)
    if best is None:
        raise ConfigError(f"no candidate of {folder} could be trained: see the reports below it.")
    tell(f"delivered: {best.name}")
    budget.to_come = [DELIVERED_COST]
    launch(budget.limited(delivered(config, best)), listeners=listeners, resumed=True)


def _train_beside(folder: Path, config: Config, tell: Tell) -> None:
    """Train a network beside the run's, unless that is done, and tell its test accuracy."""
    if not is_complete(folder):
        begun = (folder / EVENTS_FILE).exists()
        try:
            launch(config, listeners=(), resumed=begun)
        except (ConfigError, QuorumError) as error:
            tell(f"{folder.parent.name} {folder.name}: {error}")
            return
    tell(f"{folder.parent.name} {folder.name}: {percent(read_run(folder).accuracy())}")


def _train_baselines(config: Config, tell: Tell) -> None:
    """Train the networks that the run's own is compared with, and write its report anew."""
    if config.evaluation.baselines == 0 or "evaluation.baselines" in without_effect(config):
        return
    whole = Path(str(config.run_dir))
    if not is_complete(whole) or not (number := num_random(config)):  # or out of time
        return
    if config.runtime.name == "deployment" and not (whole / MODEL_FILE).exists():
        tell(
            f"evaluation.baselines={number}: none are trained from here, since the model lies on "
            "the "
            f"SuperLink's machine; type `fednas run resume={whole}` there."
        )
        return
    folders = prepare_baselines(config)
    for folder in folders:
        _train_beside(folder, open_run_folder(str(folder)), tell)
    if folders:
        write_report(whole)
