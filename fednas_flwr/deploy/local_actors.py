"""Processes of this machine beside the one that began a run: for clients, or networks beside it.

A run begins in one process. If its clients take longer than starting others would, an interpreter
is started that imports all that clients need and then forks workers, as many as there are cores;
they take over as they appear. Replies have the same bits wherever a client answers.

    python -m fednas_flwr.deploy.local_actors
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import cache, partial
from multiprocessing import connection, reduction
from typing import Any

import cloudpickle
import torch
from flwr.app import Message

from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid, LostError, Taken, Worker, WorkerGrid
from fednas_flwr.settings import Config, dump_config
from fednas_flwr.settings.configuration import load_config
from fednas_flwr.settings.registry import registered, restore

PATIENCE_S = 5.0  # of a run in one process; to start others takes about as long
ALONE = "FEDNAS_ALONE"  # in the environment of processes that must not start others


def packed(function: Callable[..., Any]) -> bytes | None:
    """A function of the package, with what is registered, for :class:`Forks`; None if it stays."""
    try:
        sent: bytes = cloudpickle.dumps((registered(), function))
    except (pickle.PicklingError, TypeError, AttributeError):  # an open file, a lock, ...
        return None
    return sent


class Forks(AbstractContextManager["Forks"]):
    """Processes that call a function, forked from one that has imported torch, computed nothing.

    They end with the context, or as soon as this process is gone.

    Args:
        sent: The function, by :func:`packed`.
    """

    def __init__(self, sent: bytes) -> None:
        """Start none yet."""
        self._sent, self._lock = sent, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = False

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        with self._lock:
            self._has_ended = True
            if self._process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def start(self) -> Callable[..., Any]:
        """Fork a process; the function as it is called there, once that is ready.

        Raises:
            LostError: The process has died, as the function raises, too.
        """
        pipe, its = multiprocessing.Pipe()
        with self._lock, its, _lost_if_broken():
            if self._has_ended:
                raise LostError
            if self._process is None or self._process.poll() is not None:
                self._launch()
            reduction.send_handle(self._control, its.fileno(), 0)
        with _lost_if_broken():
            pipe.recv()
        return partial(_call, pipe)

    def _launch(self) -> None:
        self._control, control = multiprocessing.Pipe()
        path = os.pathsep.join(filter(None, sys.path))  # it imports what this one can
        with control:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fednas_flwr.deploy.local_actors"],
                stdin=control.fileno(),
                env={**os.environ, ALONE: "1", "PYTHONPATH": path},
                start_new_session=True,
            )
        self._control.send_bytes(self._sent)


@contextmanager
def _lost_if_broken() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        raise LostError from error


def _call(pipe: Any, *asked: Any) -> Any:
    with _lost_if_broken():
        pipe.send(asked)
        return pipe.recv()


def _serve(handle: int, function: Callable[..., Any]) -> None:
    """Answer calls until the other end is gone."""
    pipe = connection.Connection(handle)
    with suppress(EOFError):
        pipe.send(True)  # it is there
        while True:
            pipe.send(function(*pipe.recv()))


def main() -> None:
    """Fork a process for each pipe that comes through the standard input; end with that."""
    control = connection.Connection(sys.stdin.fileno())
    entries, function = pickle.loads(control.recv_bytes())
    restore(entries)
    fork = multiprocessing.get_context("fork").Process
    with suppress(EOFError, OSError):
        while True:
            handle = reduction.recv_handle(control)
            fork(target=_serve, args=(handle, function)).start()
            os.close(handle)
    os.killpg(0, signal.SIGKILL)


def side_by_side(config: Config) -> int:
    """How many clients a run on this machine computes at a time, in processes of their own or 1."""
    number = min(config.clients, len(os.sched_getaffinity(0)) // config.runtime.threads)
    on_cpu = config.runtime.device == "cpu" or not torch.cuda.is_available()
    repeats = getattr(config.privacy, "test_seed", None) is not None  # noise of one process
    return 1 if not on_cpu or repeats or ALONE in os.environ else max(1, number)


@contextmanager
def local_grid(config: Config) -> Iterator[InProcessGrid]:
    """The grid of a run on this machine, with further processes where they can help."""
    text = dump_config(config)
    app, number = make_client_app(text), side_by_side(config)
    sent = packed(partial(_answer, text))
    if number == 1 or sent is None:
        yield InProcessGrid(app, config.clients)
        return
    with Forks(sent) as forks:
        grid = LocalGrid(app, config.clients, number=number, start=forks.start)
        with closing(grid):
            yield grid


def _answer(config_json: str, taken: Taken) -> list[Message]:
    messages, arrays = zip(*taken, strict=True)
    return _worker(config_json).answer(messages, *arrays)


@cache
def _worker(config_json: str) -> Worker:
    clients = load_config(config_json).clients
    return Worker(InProcessGrid(make_client_app(config_json), clients))


class LocalGrid(WorkerGrid):
    """Answers in this process at first, and starts others once that has taken a while."""

    alone = True
    _spent_s = 0.0

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; while there are no workers, that of one client."""
        if not self.num_workers and (taken := self._next(0.0)):
            started = time.monotonic()
            self._keep(taken, self._answer_here)
            self._spent_s += time.monotonic() - started
            if self._spent_s > PATIENCE_S and not self.threads:
                self.begin()
        return super().pull_messages(message_ids)

    def _answer_here(self, taken: Taken) -> list[Message]:
        for message, arrays in taken:
            message.content.update(arrays)
        return [self.answer(message) for message, _ in taken]


if __name__ == "__main__":
    main()
