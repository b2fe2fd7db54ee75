"""The Flower ServerApp: finds the configuration and runs the stages on the grid it is given.

``fednas run runtime=deployment`` sends the configuration. ``flwr run`` sends at most overrides,
with which the configuration is composed here for the nodes of the federation. :func:`launch` starts
a run in any of the three runtimes; all end in :func:`serve`.
"""

import shlex
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.deploy import client_app, deployment, flower_patches, local_actors
from fednas_flwr.deploy.bundle import CONFIG_KEY, OVERRIDES_KEY, RESUMED_KEY, typed_in
from fednas_flwr.deploy.grids import check_cluster, ray_grid
from fednas_flwr.pipeline import feasible, stages
from fednas_flwr.report import html_report, model_card
from fednas_flwr.report.trackers import TRACKERS, check_trackers
from fednas_flwr.runs import run_folder
from fednas_flwr.runs.events import EventLog, Listener
from fednas_flwr.runs.numbers import CONFIG_FILE, EVENTS_FILE, is_whole
from fednas_flwr.settings import Config, configuration, dump_config, run_settings
from fednas_flwr.settings.hydra_config import compose_tree, user_settings

APPEAR_S, SETTLE_S, POLL_S = 60.0, 3.0, 0.1  # for a federation's nodes
SITES = "partition=sites"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the configuration that came with ``flwr run``; the run folder is on this machine."""
    if not context.run_config[CONFIG_KEY]:
        _run_overrides(grid, str(context.run_config[OVERRIDES_KEY]))
        return
    # sent by `fednas run runtime=deployment`, which shows the events that are printed
    config = configuration.load_config(str(context.run_config[CONFIG_KEY]))
    resumed, folder = bool(context.run_config[RESUMED_KEY]), config.folder
    if not resumed and (folder / EVENTS_FILE).exists():
        raise ConfigError(
            f"run_dir={folder} already holds a run on the SuperLink's machine: choose another."
        )
    if not (folder / CONFIG_FILE).exists():  # else the launcher, on this machine, has created it
        config = run_folder.create_run_folder(config)
    serve(config, grid, listeners=[deployment.print_event], resumed=resumed)


def _run_overrides(grid: Grid, text: str) -> None:
    """Run ``conf/`` with overrides and a client for each node, and print the progress.

    Raises:
        ConfigError: An override is wrong, or the federation has another number of nodes.
    """
    from fednas_flwr.report.terminal import ProgressDisplay, print_summary

    config, resumed = configure(text, num_nodes=count_nodes(grid))
    folder = config.folder
    flower_patches.send_along(grid, {CONFIG_KEY: dump_config(config)})
    print(f"run folder: {folder}", flush=True)
    if not (resumed and is_whole(folder)):
        with ProgressDisplay() as display:
            serve(config, grid, listeners=[display], resumed=resumed)
    print_summary(folder)


def configure(text: str, *, num_nodes: int) -> tuple[Config, bool]:
    """Return the configuration of a run that ``flwr run`` has started; True if it is resumed.

    Its folder exists, below ``runs`` of :func:`typed_in`.

    Args:
        text: Overrides of ``fednas run``, separated by spaces and quoted as in a shell; or
            ``resume=<run folder>`` alone.
        num_nodes: Number of clients in the federation.

    Raises:
        ConfigError: An override is wrong, ``clients`` is another number, a runtime other than
            Flower's is chosen, or data, device or folder do not allow the run.
    """
    try:
        overrides = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"overrides={show(text)} cannot be read: {error}.") from error
    resumed = [override for override in overrides if override.startswith("resume=")]
    if resumed:
        if len(overrides) > 1:
            raise ConfigError(f"{resumed[0]} takes no other override: the run has its own.")
        config = run_folder.open_run_folder(resumed[0].removeprefix("resume="))
        run_folder.check_whole(config)
    else:
        typed = user_settings(overrides).typed
        if "runtime" in typed:
            raise ConfigError(
                "runtime is chosen by Flower's federation, on which the run already is: leave it "
                "out."
            )
        if "clients" not in typed:
            overrides = [*overrides, f"clients={num_nodes}"]
        if SITES in overrides:  # nodes that hold the data are sites of a deployment
            overrides = [*overrides, "runtime=deployment", "runtime.superlink=flwr"]
        config = configuration.parse_config(compose_tree(overrides), user=user_settings(overrides))
    if config.clients != num_nodes:
        raise ConfigError(
            f"clients={config.clients}, but the federation has {num_nodes} nodes: leave clients "
            f"out, or set the nodes by `flwr run . --federation-config "
            f"num-supernodes={config.clients}`."
        )
    if config.runtime.name != "deployment":
        feasible.check_run(config)
    if resumed:
        return config, True
    return run_folder.create_run_folder(config, runs=typed_in() / run_folder.RUNS), False


def count_nodes(grid: Grid) -> int:
    """Return the number of nodes of a federation once it has stayed the same for 3 s.

    Raises:
        ConfigError: No node has appeared within a minute.
    """
    count, since, deadline = 0, time.monotonic(), time.monotonic() + APPEAR_S
    while time.monotonic() < (since + SETTLE_S if count else deadline):
        if (found := len(list(grid.get_node_ids()))) != count:
            count, since = found, time.monotonic()
        time.sleep(POLL_S)
    if not count:
        raise ConfigError(
            f"no node of the federation has appeared within {APPEAR_S:g} s: start the sites first."
        )
    return count


def serve(config: Config, grid: Grid, *, listeners: Iterable[Listener], resumed: bool) -> None:
    """Run all stages, then write report and model card, also for a run that failed.

    Args:
        config: Configuration with ``run_dir`` set to an existing folder.
        grid: Flower's connection to the clients.
        listeners: Called with every event, e.g. a progress display.
        resumed: True if the folder holds a run that is to be continued.

    Raises:
        ConfigError: Another process runs in the folder.
    """
    folder = config.folder
    with ExitStack() as stack:
        stack.callback(client_app.forget)
        stack.enter_context(run_folder.occupied(folder))
        listeners = list(listeners)
        check_trackers(config.trackers)
        listeners += [stack.enter_context(TRACKERS[name](folder)) for name in config.trackers]
        log = stack.enter_context(EventLog(folder / EVENTS_FILE, listeners))
        try:
            stages.run_stages(config, grid, log, resumed=resumed)
        except BaseException:
            with suppress(Exception):  # the error that ended the run must be reported
                html_report.write_report(folder)
            raise
    html_report.write_report(folder)
    model_card.write_model_card(folder)


def launch(config: Config, *, listeners: Iterable[Listener], resumed: bool) -> None:
    """Run ``config`` to its end.

    Args:
        config: Configuration with ``run_dir`` set to an existing folder.
        listeners: Called with every event.
        resumed: True if the folder holds a run that is to be continued.

    Raises:
        QuorumError: Too few clients answered.
        RuntimeError: A deployed run failed; the message is the server's error.
    """
    runtime = config.runtime
    if isinstance(runtime, run_settings.Deployment):
        deployment.deploy(config, listeners=listeners, resumed=resumed)
        return
    grids = local_actors.local_grid(config)
    if isinstance(runtime, run_settings.RayRuntime):
        check_cluster(config)
        grids = ray_grid(client_app.make_client_app(dump_config(config)), config.clients, runtime)
    with grids as grid:
        serve(config, grid, listeners=listeners, resumed=resumed)
