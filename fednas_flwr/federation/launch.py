"""Start a run in one of the three runtimes; all end in ``server_app.serve``."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fednas_flwr.config import Config, dump_config
from fednas_flwr.errors import unknown_choice
from fednas_flwr.federation.client_app import make_client_app
from fednas_flwr.federation.clusters import check_cluster
from fednas_flwr.federation.deployment import deploy
from fednas_flwr.federation.grids import InProcessGrid
from fednas_flwr.federation.ray_grid import ray_grid
from fednas_flwr.federation.server_app import serve
from fednas_flwr.reporting.events import Listener


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
    check_cluster(config)
    with ray_grid(make_client_app(dump_config(config)), config.clients, config.runtime) as grid:
        serve(config, grid, listeners=listeners, resumed=resumed)
