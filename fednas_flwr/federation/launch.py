"""Start a run in one of the three runtimes; all end in ``server_app.serve``."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fednas_flwr
from fednas_flwr.config import Config, dump_config
from fednas_flwr.errors import unknown_choice
from fednas_flwr.federation.client_app import CONFIG_KEY, make_client_app
from fednas_flwr.federation.grids import InProcessGrid
from fednas_flwr.federation.server_app import serve
from fednas_flwr.reporting.events import Listener

BUNDLE = "fednas_bundle"  # folder of the Flower app in the run folder
LAUNCHED = "fednas_launched"  # name of its Python package


def launch(config: Config, *, listeners: Iterable[Listener], resumed: bool) -> None:
    """Run ``config`` to its end.

    Args:
        config: With ``run_dir`` set to an existing folder.
        listeners: Called with every event; in a deployment the server process has its own.
        resumed: Whether the folder held a run that is continued.

    Raises:
        QuorumError: Too few clients answered.
        RuntimeError: A deployed run failed; its log was shown before.
    """
    runtimes: dict[str, Callable[[Config, Iterable[Listener], bool], None]] = {
        "inline": _launch_inline,
        "ray": _launch_ray,
        "deployment": _launch_deployment,
    }
    if config.runtime.name not in runtimes:
        raise unknown_choice("runtime.name", config.runtime.name, runtimes)
    runtimes[config.runtime.name](config, listeners, resumed)


def _launch_inline(config: Config, listeners: Iterable[Listener], resumed: bool) -> None:
    grid = InProcessGrid(make_client_app(dump_config(config)), config.clients)
    serve(config, grid, listeners=listeners, resumed=resumed)


def _launch_ray(config: Config, listeners: Iterable[Listener], resumed: bool) -> None:
    """Run Flower's simulation; the first error of the server is raised, not Flower's summary."""
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    errors: list[BaseException] = []
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            serve(config, grid, listeners=listeners, resumed=resumed)
        except BaseException as error:
            errors.append(error)

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
    run_simulation(
        server_app=app,
        client_app=make_client_app(dump_config(config)),
        num_supernodes=config.clients,
        backend_config=backend_config,
    )
    if errors:
        raise errors[0]


def _launch_deployment(config: Config, listeners: Iterable[Listener], resumed: bool) -> None:
    """Hand the run to a SuperLink: ``flwr run`` on a bundle that only names our two apps.

    The sites run the package that they have installed; no code of ours travels.
    """
    folder = Path(str(config.run_dir))
    bundle = write_bundle(folder / BUNDLE)
    run_config = bundle / "run-config.toml"
    run_config.write_text(f"{CONFIG_KEY} = {json.dumps(dump_config(config))}\n")
    superlink = [config.runtime.superlink] if config.runtime.superlink else []
    flwr = [sys.executable, "-m", "flwr.cli.app"]
    started = subprocess.run(
        [*flwr, "run", str(bundle), *superlink, "--stream", "-c", str(run_config)],
        env=os.environ | {"FLWR_TELEMETRY_ENABLED": os.environ["FLWR_TELEMETRY_ENABLED"]},
    )
    listing = subprocess.run(
        [*flwr, "ls", str(bundle), *superlink, "--format", "json"], capture_output=True, text=True
    )
    status = _newest_status(listing.stdout)
    if started.returncode or status != "finished:completed":
        raise RuntimeError(f"the deployed run ended with status {status}; its log stands above.")


def write_bundle(folder: Path) -> Path:
    """Write the Flower app that names the installed package's apps, and return its folder."""
    package = folder / LAUNCHED
    package.mkdir(parents=True, exist_ok=True)
    license_text = "Apache License 2.0; the code that runs is the installed package fednas_flwr.\n"
    (folder / "LICENSE").write_text(license_text)
    (package / "__init__.py").write_text('"""Names the apps of the installed fednas_flwr."""\n')
    for side in ("server", "client"):
        (package / f"{side}_app.py").write_text(
            f'"""The {side} app of the installed package."""\n\n'
            f"from fednas_flwr.federation.{side}_app import app\n\n"
            '__all__ = ["app"]\n'
        )
    (folder / "pyproject.toml").write_text(
        f"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{LAUNCHED.replace("_", "-")}"
version = "{fednas_flwr.__version__}"
description = "A run of fednas_flwr"
license = {{file = "LICENSE"}}
dependencies = []

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fednas"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "{LAUNCHED}.server_app:app"
clientapp = "{LAUNCHED}.client_app:app"

[tool.flwr.app.config]
{CONFIG_KEY} = ""
"""
    )
    return folder


def _newest_status(listing: str) -> str:
    runs = json.loads(listing).get("runs", []) if listing.strip() else []
    return str(runs[0]["status"]) if runs else "unknown"
