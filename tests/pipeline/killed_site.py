"""A client in a process of its own, which kills itself (SIGKILL) at a moment of a message."""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.protocol.secure_sum.sum_site import SumSite

RECORDS = {
    "train.weights": "begin",
    "query.sign_survivors": "sign",
    "query.open_masks": "open",
}  # the method that writes into the journal what is about to be sent


def serve(pipe: Connection, config: str, num_clients: int, action: str, moment: str) -> None:
    """Answer messages; at the first one of an action, die. Without an action, never."""
    grid = InProcessGrid(make_client_app(config), num_clients)
    if moment == "recorded":
        die_after(RECORDS[action])
    while True:
        message = pipe.recv()
        dies = message.metadata.message_type == action
        if dies and moment == "asked":
            die()
        reply = grid.answer(message)
        if dies and moment == "answered":
            die()
        pipe.send(reply)
        if dies and moment == "sent":
            die()


def die_after(method: str) -> None:
    """Have a method of the site's part of secure sums end with the process."""
    real = getattr(SumSite, method)

    def recorded(*arguments: Any, **named: Any) -> None:
        real(*arguments, **named)
        die()

    setattr(SumSite, method, recorded)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
