"""Start a run in one of the three runtimes; all end in ``server_app.serve``."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fednas_flwr.config import Config, dump_config
from fednas_flwr.errors import unknown_choice
from fednas_flwr.federation import flower
from fednas_flwr.federation.client_app import make_client_app
from fednas_flwr.federation.clusters import check_cluster
from fednas_flwr.federation.deployment import deploy
from fednas_flwr.federation.grids import InProcessGrid
from fednas_flwr.federation.server_app import serve
from fednas_flwr.reporting.events import Listener

SERVER_ENDS_S = 60.0  # for the server to write its report after Ray has stopped


def launch(config: Config, *, listeners: Iterable[Listener], resumed: bool) -> None:
    """Run ``config`` to its end.

    Args:
        config: With ``run_dir`` set to an existing folder.
        listeners: Called with every event.
        resumed: Whether the folder held a run that is continued.

    Raises:
        QuorumError: Too few clients answered.
        RuntimeError: A deployed run failed; the message is the server's error.
    """
    runtimes: dict[str, Callable[..., None]] = {
        "inline": _launch_inline,
        "ray": _launch_ray,
        "deployment": deploy,
    }
    if config.runtime.name not in runtimes:
        raise unknown_choice("runtime.name", config.runtime.name, runtimes)
    runtimes[config.runtime.name](config, listeners=listeners, resumed=resumed)


def _launch_inline(config: Config, *, listeners: Iterable[Listener], resumed: bool) -> None:
    grid = InProcessGrid(make_client_app(dump_config(config)), config.clients)
    serve(config, grid, listeners=listeners, resumed=resumed)


def _launch_ray(config: Config, *, listeners: Iterable[Listener], resumed: bool) -> None:
    """Run Flower's simulation; the first error of the server is raised, not Flower's summary."""
    from flwr.simulation import run_simulation

    check_cluster(config)
    logging.getLogger("flwr").setLevel(logging.CRITICAL)  # what it says at ERROR is raised, too
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    errors: list[BaseException] = []  # of the server, which runs in a thread
    stops: list[BaseException] = []  # of Ray, or Ctrl-C, both in this thread
    ended = threading.Event()
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        flower.stop_pulling(grid, stops)
        try:
            serve(config, grid, listeners=listeners, resumed=resumed)
        except BaseException as error:
            errors.append(error)
        finally:
            ended.set()

    init_args: dict[str, object] = {"log_to_driver": False, "logging_level": "error"}
    if config.runtime.ray_address is not None:
        init_args["address"] = config.runtime.ray_address
    else:
        init_args["include_dashboard"] = False
    backend_config: Any = {
        "init_args": init_args,
        "client_resources": {
            "num_cpus": config.runtime.client_cpus,
            "num_gpus": config.runtime.client_gpus,
        },
    }
    try:
        run_simulation(
            server_app=app,
            client_app=make_client_app(dump_config(config)),
            num_supernodes=config.clients,
            backend_config=backend_config,
        )
    except BaseException as error:
        while error.__cause__ is not None:  # Flower's "crashed" is not what happened
            error = error.__cause__
        stops.append(error)
        ended.wait(timeout=SERVER_ENDS_S)
        raise stops[0] from None
    if errors:
        raise errors[0]
