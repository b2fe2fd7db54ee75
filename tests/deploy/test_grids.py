"""Who answers which messages: nobody idle, clients where they were, none lost but by a worker."""

import itertools
import threading
import time
from contextlib import closing
from random import Random

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fednas_flwr.deploy import grids
from fednas_flwr.deploy.grids import AHEAD, DIED, LostError, WorkerGrid

from ..refusals import raising

CLIENTS = 40


def asked(grid, clients):
    messages = [Message(RecordDict(), client + 2, "query.told") for client in clients]
    return list(grid.push_messages(messages))


def told(grid, ids):
    """What the reply to each message tells, in their order."""
    replies: dict[str, Message] = {}
    while len(replies) < len(ids):
        for reply in grid.pull_messages(ids):
            replies[reply.metadata.reply_to_message_id] = reply
    return [
        reply.error.reason if reply.has_error() else str(reply.content["told"]["worker"])
        for reply in map(replies.__getitem__, ids)
    ]


def worker_of(name, act):
    """A worker that tells its name, after it has acted on the client that is asked."""

    def answer(taken):
        for message, _ in taken:
            act(message.metadata.dst_node_id - 2)
        content = RecordDict({"told": ConfigRecord({"worker": name})})
        return [Message(content, reply_to=message) for message, _ in taken]

    return answer


@pytest.fixture
def make():
    made: list[WorkerGrid] = []

    def make(number, act=lambda client: None):
        names = itertools.count()
        start = lambda: worker_of(next(names), act)  # noqa: E731
        grid = WorkerGrid(ClientApp(), CLIENTS, number=number, start=start)
        grid.begin()
        made.append(grid)
        return grid

    yield make
    for grid in made:
        grid.close()
        for thread in grid.threads:
            thread.join()


def test_a_client_goes_back_to_its_worker(make):
    both = threading.Barrier(2)  # no worker takes two of a round
    grid = make(2, lambda client: both.wait())
    first = told(grid, asked(grid, [0, 1]))
    assert sorted(first) == ["0", "1"]
    for _ in range(10):
        assert told(grid, asked(grid, [1, 0])) == first[::-1]


def test_no_client_waits_for_its_worker_while_another_is_idle(make):
    both = threading.Barrier(2)
    grid = make(2, lambda client: both.wait(timeout=60))  # breaks unless both work at a time
    assert sorted(told(grid, asked(grid, [0] * 2))) == ["0", "1"]


def test_messages_leave_the_queue_nearly_in_order(make):
    order: list[int] = []
    grid = make(1, order.append)
    told(grid, asked(grid, [0]))
    told(grid, asked(grid, [*range(1, AHEAD), 0]))
    assert order[1] == 0  # its own, near the head
    order.clear()
    told(grid, asked(grid, [*range(AHEAD, 2 * AHEAD), 0]))
    assert order[0] == AHEAD


def test_what_an_exchange_has_given_up_is_not_answered_in_the_next(make):
    acted, begun, go_on = list[int](), threading.Event(), threading.Event()

    def act(client):
        acted.append(client)
        begun.set()
        go_on.wait(timeout=60)

    grid = make(1, act)
    late = asked(grid, [0, 1, 2])
    begun.wait(timeout=60)
    grid.forget(late)
    ids = asked(grid, [3])
    go_on.set()
    assert told(grid, ids) == ["0"]
    assert acted == [0, 3]
    assert list(grid.pull_messages(late)) == []


def test_a_worker_that_dies_costs_the_reply_that_it_worked_on(make, monkeypatch):
    monkeypatch.setattr(grids, "SHORT_S", 0.0)

    def act(client):
        if client == 3:
            raise LostError
        if client == 5:
            raise ZeroDivisionError("no record")

    grid = make(2, act)
    replies = told(grid, asked(grid, list(range(8))))
    assert [replies[3], replies[5]] == [DIED, "ZeroDivisionError: no record"]
    assert {*replies} <= {DIED, "ZeroDivisionError: no record", "0", "1", "2"}
    assert len({*told(grid, asked(grid, list(range(6, CLIENTS))))}) <= 2


def test_several_short_messages_are_taken_at_once_and_lost_together(make, monkeypatch):
    monkeypatch.setattr(grids, "SHORT_S", 60.0)  # so that any pace here is short

    def act(client):
        if client == 2 * AHEAD + 2:
            raise LostError

    grid = make(1, act)
    told(grid, asked(grid, [0]))  # so it knows how long one takes
    replies = told(grid, asked(grid, list(range(CLIENTS))))
    lost = [index for index, reply in enumerate(replies) if reply == DIED]
    assert lost == list(range(2 * AHEAD, 3 * AHEAD))


def test_workers_that_die_at_their_start_cost_a_reply_each():
    with closing(WorkerGrid(ClientApp(), CLIENTS, number=2, start=raising(LostError))) as grid:
        grid.begin()
        assert told(grid, asked(grid, [0, 1, 2])) == [DIED] * 3
        assert grid.num_workers == 0


@pytest.mark.parametrize("seed", range(10))
def test_every_message_is_answered_or_lost_once(make, seed, monkeypatch):
    monkeypatch.setattr(grids, "POLL_S", 0.001)
    monkeypatch.setattr(grids, "SHORT_S", 0.0)
    rng, acted = Random(seed), list[int]()
    dying = {client for client in range(CLIENTS) if rng.random() < 0.2}

    def act(client):
        acted.append(client)
        time.sleep(rng.random() / 1000)
        if client in dying:
            raise LostError

    grid, waiting, ids = make(3, act), list(range(CLIENTS)), list[str]()
    while waiting:
        number = rng.randint(1, 8)
        ids += asked(grid, waiting[:number])
        del waiting[:number]
        grid.pull_messages([])
    assert {client for client, reply in enumerate(told(grid, ids)) if reply == DIED} == dying
    assert sorted(acted) == list(range(CLIENTS))
