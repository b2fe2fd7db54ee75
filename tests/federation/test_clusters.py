"""A Ray that is silent or too small is refused in one sentence before a run begins."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import pytest

from fednas_flwr import api
from fednas_flwr.config import Config
from fednas_flwr.errors import ConfigError
from fednas_flwr.federation.clusters import check_cluster

Compose = Callable[..., Config]


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a host that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed() -> str:
    """The address of a port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["silent", "closed"])
def test_a_cluster_that_does_not_answer_is_refused(
    compose_config: Compose, request: pytest.FixtureRequest, kind: str
) -> None:
    address = request.getfixturevalue(kind)
    config = compose_config("runtime=ray", f"runtime.ray_address='{address}'")
    with pytest.raises(ConfigError, match=f"^runtime.ray_address={address}: no Ray cluster answer"):
        api.check([config])


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:port", "127.0.0.1:99999999"])
def test_what_is_no_address_is_refused(compose_config: Compose, address: str) -> None:
    config = compose_config("runtime=ray", f"runtime.ray_address='{address}'")
    with pytest.raises(ConfigError, match=f"^runtime.ray_address={address}: "):
        check_cluster(config)


@pytest.mark.parametrize("kind", ["client_cpus", "client_gpus"])
def test_clients_that_fit_on_no_machine_are_refused(compose_config: Compose, kind: str) -> None:
    config = compose_config("runtime=ray", f"runtime.{kind}=5000")
    with pytest.raises(ConfigError, match=rf"runtime.{kind}=5000.*there are {os.cpu_count()} CPUs"):
        check_cluster(config)
    check_cluster(compose_config(f"runtime.{kind}=5000"))  # inline
    check_cluster(compose_config("runtime=ray"))
