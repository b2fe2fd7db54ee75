"""A client in a process of its own, which kills itself (SIGKILL) at a moment of a message."""

import os
import signal

from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.protocol.secure_sum.sum_site import SumSite

# the method that writes into the journal what is about to be sent
RECORDS = {"train.weights": "begin", "query.sign_survivors": "sign", "query.open_masks": "open"}


def serve(pipe, config, num_clients, action, moment):
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


def die_after(method):
    """Have a method of the site's part of secure sums end with the process."""
    real = getattr(SumSite, method)

    def recorded(*arguments, **named):
        real(*arguments, **named)
        die()

    setattr(SumSite, method, recorded)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
