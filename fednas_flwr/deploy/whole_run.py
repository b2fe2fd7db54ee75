"""A whole run: its search, the networks compared with it, and the network that it delivers.

Each compared network is a separate run, in a folder inside the run's folder.
"""

import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.processes import LostError, at_once, beside
from fednas_flwr.deploy.server_app import launch
from fednas_flwr.models.prediction import MODEL_FILE
from fednas_flwr.pipeline import baselines
from fednas_flwr.report import html_report, templates
from fednas_flwr.runs import leaderboard, run_folder
from fednas_flwr.runs.events import Event, Listener
from fednas_flwr.runs.numbers import EVENTS_FILE, is_complete, is_whole, read_run
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.settings import Config, names, parser, registry, with_runtime
from fednas_flwr.settings.unused import without_effect

POLL_S = 2.0  # between checks of the progress of networks beside a run
COSTS = {"search": 4.0, "candidates": 5.0, "finalists": 6.0, "delivered": 4.0}  # parts of the time


def run_whole(
    config: Config,
    *,
    listeners: Iterable[Listener],
    resumed: bool,
    tell: Listener = lambda event: None,
) -> None:
    """Run a configuration whose folder exists, including baselines or candidates.

    Baselines are trained after the run, and candidates before the network that it delivers. If one
    of them fails, only its own folder records it. A completed run that is resumed is not begun
    again, as its clients would release their measures once more.

    Args:
        config: Configuration with ``run_dir`` set.
        listeners: Called with every event of the run itself.
        resumed: True if the folder holds a run that is to be continued.
        tell: Called with events about the networks that are trained beside the run's; no file keeps
            them.
    """
    listeners, folder = list(listeners), config.folder
    if config.evaluation.deliver == names.FOUND or "evaluation.deliver" in without_effect(config):
        if not (resumed and is_whole(folder)):
            launch(config, listeners=listeners, resumed=resumed)
        _train_baselines(config, tell)
    elif not (resumed and is_whole(folder)):
        _deliver_best(config, listeners, resumed, tell)


def _deliver_best(config: Config, listeners: list[Listener], resumed: bool, tell: Listener) -> None:
    """Search, train the candidates, then train the one that validation records choose."""
    folder, limit = config.folder, config.runtime.time_limit
    ends_at = math.inf if limit is None else time.monotonic() + parser.seconds(limit)

    def share(step: str) -> float:
        """The seconds that a step may take."""
        to_come = list(COSTS.values())[list(COSTS).index(step) :]
        return (ends_at - time.monotonic()) * COSTS[step] / sum(to_come)

    if not (resumed and read_run(folder).last("derived")):
        search = replace(config, stages=["search"])
        search = with_runtime(search, time_limit=_text(share("search")))
        launch(search, listeners=listeners, resumed=resumed)
        if not read_run(folder).last("derived"):  # out of time
            return
    if not read_run(folder).rounds("retrain"):  # retraining of the chosen candidate
        folders = baselines.prepare_candidates(config, last=False)
        _train_beside(config, folders, share("candidates"), tell)
        folders = baselines.prepare_candidates(config, last=True)
        if folders and (left := share("finalists")) > 0:
            _train_beside(config, folders, left, tell)
    best = leaderboard.chosen(folder)
    if best is None:
        raise ConfigError(
            f"no candidate of {folder} was trained and measured on validation records: see the "
            "reports below it."
        )
    tell({"event": "told", "text": f"delivered: {best.name}"})
    final = with_runtime(baselines.delivered(config, best), time_limit=_text(share("delivered")))
    launch(final, listeners=listeners, resumed=True)


def _text(limit: float) -> str | None:
    """A time limit in the form of the settings, at least 1 s."""
    return None if limit == math.inf else f"{max(1.0, limit):.1f}s"


def _train_beside(config: Config, folders: list[Path], limit: float, tell: Listener) -> None:
    """Train the networks beside the run's that are not done, and emit their test scores."""
    stage, begun, before = folders[0].parent.name, time.monotonic(), _share_done(folders)
    ended = threading.Event()

    def place() -> Event:
        """Their progress, and the seconds left if these are known."""
        share, seconds = _share_done(folders), time.monotonic() - begun
        known = before < share < 1 and limit == math.inf
        left = seconds * (1 - share) / (share - before) if known else None
        return {"event": "beside", "stage": stage, "share": share, "left": left}

    def poll() -> None:
        while not ended.wait(POLL_S):
            tell(place())

    tell({"event": "stage_started", "stage": stage, "rounds": None})
    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        for number, (folder, reason) in enumerate(train_all(config, folders, limit), 1):
            if not reason:
                run = read_run(folder)
                reason = f"{run.score.label} {templates.as_unit(run.test_score(), run.score.unit)}"
            text = f"{folder.name}: {reason}"
            tell(place() | {"position": f"{number}/{len(folders)}", "text": text})
    finally:
        ended.set()
        thread.join()
    tell({"event": "stage_finished", "stage": stage, "seconds": time.monotonic() - begun})


def _share_done(folders: Sequence[Path]) -> float:
    """The share of some runs' rounds of retraining that is done."""
    begun = [read_run(folder) for folder in folders if (folder / EVENTS_FILE).exists()]
    last = [event for run in begun for event in run.rounds("retrain")[-1:]]
    return float(sum(event["round"] / event["rounds"] for event in last) / len(folders))


def train_all(
    config: Config, folders: Sequence[Path], limit: float = math.inf
) -> Iterator[tuple[Path, str]]:
    """Train the runs of some folders, side by side if this machine has enough cores.

    Yields each folder when it is done, with the reason if it has failed.

    Args:
        config: Configuration of the run that they accompany.
        folders: Run folders.
        limit: The seconds that they may take. Each run has an equal share, or more if several run
            at the same time. After that time no run is begun, except the first.
    """
    alone = config.runtime.name != "inline" or config.runtime.device == "cuda"
    sent = None if alone or at_once(len(folders)) < 2 else registry.packed(train)
    together = 1 if sent is None else at_once(len(folders))
    each, ends_at = _text(limit / math.ceil(len(folders) / together)), time.monotonic() + limit
    calls = [(folder, each, ends_at if place else math.inf) for place, folder in enumerate(folders)]
    if sent is None:
        yield from ((call[0], train(*call)) for call in calls)
        return
    try:
        for (folder, *_), reason in beside(sent, calls):
            yield folder, reason
    except LostError as error:
        raise ConfigError(
            "a process that trains the networks to compare with has ended: the machine may "
            "be out of memory; go on with resume=<run folder>."
        ) from error


def train(folder: Path, limit: str | None, ends_at: float) -> str:
    """Begin or continue the run in a folder; return why it failed, else an empty text.

    Args:
        folder: Folder of the run.
        limit: The time that it may take; None is no limit.
        ends_at: Time from which it is too late to begin, by the clock of all processes of this
            machine.
    """
    if is_complete(folder):
        return ""
    if time.monotonic() > ends_at:
        return "left out, as time was over"
    try:
        config = with_runtime(run_folder.open_run_folder(str(folder)), time_limit=limit)
        launch(config, listeners=(), resumed=(folder / EVENTS_FILE).exists())
    except (ConfigError, QuorumError) as error:
        return str(error)
    return ""


def _train_baselines(config: Config, tell: Listener) -> None:
    """Train the networks with which the run's own is compared, and rewrite its report."""
    if config.evaluation.baselines == 0 or "evaluation.baselines" in without_effect(config):
        return
    whole = config.folder
    if not is_complete(whole) or not (number := baselines.num_random(config)):  # or out of time
        return
    if config.runtime.name == "deployment" and not (whole / MODEL_FILE).exists():
        text = (
            f"evaluation.baselines={number}: none are trained from here, since the model lies on "
            f"the SuperLink's machine; type `fednas run resume={whole}` there."
        )
        tell({"event": "told", "text": text})
        return
    if folders := baselines.prepare_baselines(config):
        _train_beside(config, folders, math.inf, tell)
        html_report.write_report(whole)
