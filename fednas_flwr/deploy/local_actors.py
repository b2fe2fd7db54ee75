"""Clients in processes of this machine, beside the one that began: the grid of ``runtime=inline``.

A run begins in one process. If its clients take longer than starting others would, an interpreter
is started that imports all that clients need and then forks workers, as many as there are cores;
they take over as they appear. Replies have the same bits wherever a client answers.

    python -m fednas_flwr.deploy.local_actors <address>
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import cloudpickle
from flwr.app import Message
from flwr.clientapp import ClientApp

from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import ActorGrid, InProcessGrid, Messages, Worker
from fednas_flwr.settings import Config, dump_config
from fednas_flwr.settings.configuration import load_config
from fednas_flwr.settings.registry import registered, restore

PATIENCE_S = 5.0  # of a run in one process; to start others takes about as long
ALONE = "FEDNAS_ALONE"  # in the environment of processes that must not start others


def environment() -> dict[str, str]:
    """Environment of a process that starts no others and imports what this one can."""
    return {**os.environ, ALONE: "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def packed() -> str | None:
    """The entries from outside the package as text for another process; None if they stay here."""
    try:
        return base64.b64encode(cloudpickle.dumps(registered())).decode()
    except (pickle.PicklingError, TypeError, AttributeError):  # an open file, a lock, ...
        return None


def unpack(text: str) -> None:
    """Take what :func:`packed` returned in another process of this machine."""
    restore(cloudpickle.loads(base64.b64decode(text)))


@contextmanager
def local_grid(config: Config) -> Iterator[InProcessGrid]:
    """The grid of a run on this machine, with further processes where they can help."""
    app = make_client_app(dump_config(config))
    cores = len(os.sched_getaffinity(0))
    number = min(config.clients, cores // config.runtime.threads)
    on_cpu = config.runtime.device == "cpu" or not _has_gpu()
    repeats = getattr(config.privacy, "test_seed", None) is not None  # noise of one process
    if number < 2 or not on_cpu or repeats or ALONE in os.environ or packed() is None:
        yield InProcessGrid(app, config.clients)
        return
    with Processes(config, number) as processes:
        yield LocalGrid(app, config.clients, processes)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


class LocalGrid(ActorGrid):
    """Answers in this process at first, and starts others once that has taken a while."""

    def __init__(self, client_app: ClientApp, num_clients: int, processes: Processes) -> None:
        """Begin without actors."""
        super().__init__(client_app, num_clients, actors=processes, num_actors=0)
        self._number, self._spent_s = processes.number, 0.0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; while there are no actors, that of one client."""
        self._collect()
        self._hand_out()
        message = None if self._dispatcher.num_workers else self._dispatcher.give_up()
        if message is None:
            return super().pull_messages(message_ids)
        started = time.monotonic()
        message.content.update(self._arrays[message.metadata.message_id])
        reply = self.answer(message)
        self._spent_s += time.monotonic() - started
        self._reply(message, reply)
        if self._spent_s > PATIENCE_S and not self._starting:
            for _ in range(self._number):
                self._start_actor()
        found = [self._replies.pop(message_id, None) for message_id in message_ids]
        return [reply for reply in found if reply is not None]


@dataclass(eq=False)
class Actor:
    """A worker in another process, and the reference to what it says next."""

    pipe: Any = None  # once it has connected


class Processes(AbstractContextManager["Processes"]):
    """:class:`~fednas_flwr.deploy.grids.Actors` that are processes of this machine.

    Args:
        config: Of the run, by which a worker builds its clients.
        number: How many.
    """

    def __init__(self, config: Config, number: int) -> None:
        """Start none yet."""
        self.number = number
        self._config = config
        self._waiting: list[Actor] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="fednas-")
        self._server = socket.socket(socket.AF_UNIX)

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # which ends it, and what it has forked
            self._process.wait()
        self._server.close()
        self._folder.cleanup()

    def put(self, value: Any) -> Any:
        """The value itself: it goes through a pipe to each worker."""
        return value

    def start(self) -> tuple[Actor, Actor]:
        """A worker that appears when it is ready."""
        actor = Actor()
        self._waiting.append(actor)
        if self._process is None:
            self._launch()
        self._say(1)
        return actor, actor

    def answer(self, actor: Actor, messages: Messages, *arrays: Any) -> Actor:
        """See :class:`~fednas_flwr.deploy.grids.Actors`."""
        with suppress(OSError):  # a dead process, which its connection's end tells
            actor.pipe.send((messages, *arrays))
        return actor

    def _launch(self) -> None:
        address = str(Path(self._folder.name) / "workers")  # in a folder that nobody else can read
        self._server.bind(address)
        self._server.listen()
        command = [sys.executable, "-m", "fednas_flwr.deploy.local_actors", address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, env=environment(), start_new_session=True
        )
        self._say([dump_config(self._config), packed()])

    def _say(self, value: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def done(self, references: list[Actor], *, timeout: float) -> list[Actor]:
        """Those whose workers have said something, or have died."""
        pipes = {actor.pipe: actor for actor in references if actor.pipe is not None}
        ready = connection.wait([self._server, *pipes], timeout)
        if self._server in ready:
            actor = next(one for one in self._waiting if one.pipe is None)
            actor.pipe = connection.Connection(self._server.accept()[0].detach())
        return [pipes[pipe] for pipe in ready if pipe in pipes]

    def result(self, reference: Actor) -> Any | None:
        """What the worker has sent; None if it has died."""
        try:
            return reference.pipe.recv()
        except (EOFError, OSError):
            reference.pipe.close()
            return None


def _serve(address: str, config_json: str) -> None:
    """Answer calls until the other end is gone."""
    grid = InProcessGrid(make_client_app(config_json), load_config(config_json).clients)
    worker, server = Worker(grid), socket.socket(socket.AF_UNIX)
    server.connect(address)
    pipe = connection.Connection(server.detach())
    with suppress(EOFError, OSError):
        pipe.send(True)  # it is there
        while True:
            pipe.send(worker.answer(*pipe.recv()))


def main() -> None:
    """Fork a worker for each that a line of the standard input asks for; end with that."""
    config_json, own = json.loads(sys.stdin.buffer.readline())
    unpack(own)
    for line in sys.stdin.buffer:
        for _ in range(json.loads(line)):
            if os.fork() == 0:
                os.close(sys.stdin.fileno())
                _serve(sys.argv[1], config_json)
                os._exit(0)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
