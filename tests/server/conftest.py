"""A federation of small real ClientApps whose clients, and whose grid, misbehave on demand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from flwr.clientapp import ClientApp

from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.protocol.messages import Reply, decode_request, encode_reply
from fednas_flwr.protocol.requests import Amount
from fednas_flwr.protocol.states import Layout, pack
from fednas_flwr.server.cohort import Cohort
from fednas_flwr.server.exchange import Exchange

from ..asked import smallest
from ..finished_runs import Told


class Clock:
    """The time of a cohort, which passes where it waits and nowhere else."""

    def __init__(self):
        self.seconds = 0.0

    def monotonic(self):
        return self.seconds

    def sleep(self, seconds):
        self.seconds += seconds


SEARCH = smallest()["train.search"]
SEARCH = replace(SEARCH, local=replace(SEARCH.local, amount=Amount(1, None, 8)))


def damaging(change):
    """Turn ``change(content, ...)`` into a function of the rest that returns what damages so."""

    def of(*values, **named):
        def damage(content):
            change(content, *values, **named)
            return content

        return damage

    return of


@damaging
def set_json(content, value):
    content.config_records["header"]["json"] = value


@damaging
def set_metric(content, name, value):
    content.metric_records["metrics"][name] = value


@damaging
def set_vector(content, state, values, dtype="float32"):
    content.array_records[f"state.{state}"][dtype] = Array(np.asarray(values))


def npy(header):
    body = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


def client_tensors(client):
    generator = torch.Generator().manual_seed(client)
    return {
        state: {name: torch.randn(size, generator=generator) for name, size in of.items()}
        for state, of in {"weights": {"a": (2, 3), "b": (4,)}, "alphas": {"cell": (2, 2)}}.items()
    }


def client_reply(client):
    states = client_tensors(client)
    digests = {name: Layout.of(tensors).digest for name, tensors in states.items()}
    packed = {name: pack(tensors) for name, tensors in states.items()}
    return Reply(10.0 + 7 * client, {"train_loss": 1.0 + client}, packed, digests)


def make_app(damage, claims, properties):
    app = ClientApp()

    @app.query("describe")
    def describe(message, context):
        index = context.node_config["partition-id"]
        header = decode_request("query.describe", message.content).header
        said = {"client": claims.get(index, index)} | properties.get(index, {})
        return Message(encode_reply(header, Reply(100, properties=said)), reply_to=message)

    @app.train("search")
    def search(message, context):
        index = context.node_config["partition-id"]
        header = decode_request("train.search", message.content).header
        content = encode_reply(header, client_reply(claims.get(index, index)))
        if index in damage:
            content = damage[index](content)
        return Message(content, reply_to=message)

    return app


@pytest.fixture
def federation(monkeypatch):
    """``federation(clients, ...)``: a cohort, its grid, events, and clock, and ``ask``.

    ``damage`` changes the content of a client's replies; ``claims`` is who a node says it is,
    ``properties`` what it says besides; ``needed`` and ``alike`` are what connecting asks for.
    ``answering(round)`` are the clients that answer.
    """
    clock = Clock()
    monkeypatch.setattr("fednas_flwr.server.cohort.time", clock)

    def make(
        num_clients=3, *, nodes=None, damage=None, claims=None, properties=None,
        grid=InProcessGrid, connected=True, needed=("client",), alike=(), **settings,
    ):  # fmt: skip
        events: list[dict] = []
        app = make_app(damage or {}, claims or {}, properties or {})
        own = {"quorum_share": 0.5, "deadline_s": 30.0, "connect_s": 30.0, **settings}
        own["emit"] = lambda event, **fields: events.append({"event": event, **fields})
        cohort = Cohort(run="run", num_clients=num_clients, wait=clock.sleep, **own)
        layouts = {name: Layout.of(tensors) for name, tensors in client_tensors(0).items()}

        def ask(server_round=1, **terms):
            terms |= {"stage": "search", "settings": SEARCH, "layouts": layouts}
            return cohort.ask(Exchange("train.search", server_round=server_round, **terms))

        def answering(*numbers, **terms):
            return [client for client, _ in ask(*numbers, **terms)]

        own = grid(app, num_clients if nodes is None else nodes)
        if connected:
            cohort.connect(own, needed=needed, alike=alike)
        how = {"ask": ask, "answering": answering}
        return Told(cohort=cohort, grid=own, events=events, clock=clock, **how)

    return make
