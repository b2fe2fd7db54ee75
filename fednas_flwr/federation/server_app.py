"""The Flower ServerApp: decodes the configuration and runs the stages on the grid it is given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fednas_flwr.builders.configuration import load_config
from fednas_flwr.config import Config
from fednas_flwr.errors import ConfigError
from fednas_flwr.federation.bundle import CONFIG_KEY, RESUMED_KEY
from fednas_flwr.federation.deployment import EventPrinter
from fednas_flwr.federation.flower import told_reconnections
from fednas_flwr.reporting.events import EventLog, Listener
from fednas_flwr.reporting.model_card import write_model_card
from fednas_flwr.reporting.report import write_report
from fednas_flwr.reporting.runs import CONFIG_FILE, EVENTS_FILE
from fednas_flwr.reporting.tensorboard import TensorBoardWriter
from fednas_flwr.stages.pipeline import run_stages
from fednas_flwr.stages.run_folder import create_run_folder, occupied

AWAY_S = 5.0  # of the SuperLink, before it is worth a word

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run a configuration that came with ``flwr run``; the run folder lies on this machine."""
    config = load_config(str(context.run_config[CONFIG_KEY]))
    if config.run_dir is None:
        raise ValueError("the launcher names the run folder")
    resumed = bool(context.run_config[RESUMED_KEY])
    folder = Path(config.run_dir)
    if not resumed and (folder / EVENTS_FILE).exists():
        raise ConfigError(
            f"run_dir={folder} already holds a run on the SuperLink's machine: choose another."
        )
    if not (folder / CONFIG_FILE).exists():  # else the launcher, on this machine, has made it
        config = create_run_folder(config)
    serve(config, grid, listeners=[EventPrinter()], resumed=resumed)


def serve(config: Config, grid: Grid, *, listeners: Iterable[Listener], resumed: bool) -> None:
    """Run all stages, then write report and model card, also of a run that failed.

    Args:
        config: With ``run_dir`` set to an existing folder.
        grid: Flower's way to the clients.
        listeners: Called with every event, e.g. a progress display.
        resumed: Whether the folder held a run that is continued.

    Raises:
        ConfigError: Another process runs in the folder.
    """
    folder = Path(str(config.run_dir))
    with ExitStack() as stack:
        stack.enter_context(occupied(folder))
        listeners = list(listeners)
        if config.tensorboard:
            listeners.append(stack.enter_context(TensorBoardWriter(folder / "tensorboard")))
        log = stack.enter_context(EventLog(folder / EVENTS_FILE, listeners))
        stack.enter_context(telling_reconnections(log))
        try:
            run_stages(config, grid, log, resumed=resumed)
        except BaseException:
            with suppress(Exception):  # what ended the run is what must be told
                write_report(folder)
            raise
    write_report(folder)
    write_model_card(folder)


@contextmanager
def telling_reconnections(log: EventLog) -> Iterator[None]:
    """Write a warning when the SuperLink is reached again, which Flower does not tell otherwise."""

    def tell(away_s: float) -> None:
        if away_s >= AWAY_S:
            log.emit("warning", message=f"the SuperLink was away for {away_s:.0f} s")

    with told_reconnections(tell):
        yield
