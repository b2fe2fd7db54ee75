"""What tests with real processes share."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest


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
