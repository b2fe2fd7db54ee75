"""What tests of whole runs share."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from fednas_flwr.config import dump_config
from fednas_flwr.federation.client_app import make_client_app
from fednas_flwr.federation.grids import InProcessGrid
from fednas_flwr.federation.run_folder import create_run_folder, open_run_folder
from fednas_flwr.federation.server_app import serve
from fednas_flwr.reporting.events import read_events


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    """``free_ports(number)``: ports of loopback on which nothing listens."""

    def find(number: int) -> list[int]:
        with ExitStack() as stack:
            sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
            for one in sockets:
                stack.enter_context(one)
            return [one.getsockname()[1] for one in sockets]

    return find


@pytest.fixture(scope="session")
def run_inline(
    compose_config: Callable[..., object], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., SimpleNamespace]:
    """``run_inline(*overrides)``: a whole run in this process; its folder, events and error.

    With ``resume=<run folder>`` the run there goes on.
    """

    def ran(*overrides, resume=None):
        if resume is None:
            folder = tmp_path_factory.mktemp("run") / "run"
            config = create_run_folder(compose_config(*overrides, f"run_dir={folder}"))
        else:
            config, folder = open_run_folder(str(resume)), resume
        grid, error = InProcessGrid(make_client_app(dump_config(config)), config.clients), None
        try:
            serve(config, grid, listeners=[], resumed=resume is not None)
        except Exception as raised:
            error = raised
        events = read_events(folder / "events.jsonl")
        return SimpleNamespace(folder=folder, config=config, events=events, error=error)

    return ran
