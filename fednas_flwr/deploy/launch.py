"""Start a run in one of the three runtimes; all end in ``server_app.serve``."""

from __future__ import annotations

from collections.abc import Iterable

from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.deployment import deploy
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.deploy.ray_clusters import check_cluster
from fednas_flwr.deploy.ray_grid import ray_grid
from fednas_flwr.deploy.server_app import serve
from fednas_flwr.runs.events import Listener
from fednas_flwr.settings import Config, dump_config
from fednas_flwr.settings.run_settings import Deployment, RayRuntime


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
    runtime = config.runtime
    if isinstance(runtime, Deployment):
        deploy(config, listeners=listeners, resumed=resumed)
        return
    app = make_client_app(dump_config(config))
    if isinstance(runtime, RayRuntime):
        check_cluster(config)
        with ray_grid(app, config.clients, runtime) as grid:
            serve(config, grid, listeners=listeners, resumed=resumed)
        return
    serve(config, InProcessGrid(app, config.clients), listeners=listeners, resumed=resumed)
