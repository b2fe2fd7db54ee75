"""A Flower Grid whose clients run in actors of Ray: ``runtime=ray``.

Main function: :func:`ray_grid`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from flwr.app import Error, Message
from flwr.clientapp import ClientApp

from fednas_flwr.config.runtime import Runtime
from fednas_flwr.federation import flower
from fednas_flwr.federation.clusters import places
from fednas_flwr.federation.grids import InProcessGrid

POLL_S = 0.1


class Worker:
    """Answers one message after the other, in a process of its own; any client's."""

    def __init__(self, grid: InProcessGrid) -> None:
        """Take the grid whose clients it stands for."""
        flower.begin_task(grid.server_node_id)
        self._grid = grid

    def answer(self, message: Message) -> Message:
        """Return the reply of the client that a message is for."""
        return self._grid.answer(message)


class RayGrid(InProcessGrid):
    """Hands each message to the next actor that is free; replies come as they are ready.

    An actor that dies gives an error in place of its reply, and another takes its place.

    Args:
        client_app: Answers every message.
        num_clients: Number of nodes; node ``i + 2`` has ``partition-id = i``.
        num_actors: How many clients answer at a time.
        resources: What Ray reserves for each, as ``ray.remote`` takes it.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        *,
        num_actors: int,
        resources: dict[str, float],
    ) -> None:
        """Start the actors."""
        super().__init__(client_app, num_clients)
        ray = self._ray = import_module("ray")
        self._start = ray.remote(**resources)(Worker).remote
        self._clients = ray.put(InProcessGrid(client_app, num_clients))
        self._idle = [self._start(self._clients) for _ in range(num_actors)]
        self._running: dict[Any, tuple[Any, str, Message]] = {}  # by what Ray will have: by whom
        self._replies: dict[str, Message] = {}
        self._lock = threading.Lock()  # groups of clients are asked by threads of their own

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages, begin with those that an actor is free for, and return their ids."""
        with self._lock:
            ids = super().push_messages(messages)
            self._hand_out()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; waits a tenth of a second for the first."""
        message_ids = list(message_ids)
        with self._lock:
            running = list(self._running)
        if running and not any(message_id in self._replies for message_id in message_ids):
            self._ray.wait(running, timeout=POLL_S)
        with self._lock:
            self._collect()
            self._hand_out()
            found = [self._replies.pop(i, None) for i in message_ids]
        return [reply for reply in found if reply is not None]

    def _hand_out(self) -> None:
        """Give queued messages to free actors, in the order of pushing."""
        while self._idle and self._messages:
            message_id = next(iter(self._messages))
            message, actor = self._messages.pop(message_id), self._idle.pop()
            self._running[actor.answer.remote(message)] = actor, message_id, message

    def _collect(self) -> None:
        """Keep the replies that are ready, and free their actors."""
        running = list(self._running)
        done = self._ray.wait(running, num_returns=len(running), timeout=0)[0] if running else []
        for reference in done:
            actor, message_id, message = self._running.pop(reference)
            try:
                self._replies[message_id] = self._ray.get(reference)
            except self._ray.exceptions.RayActorError:
                reason = "the client's process has died, perhaps for want of memory"
                error = Error(flower.CLIENT_RAISED, reason)
                self._replies[message_id] = Message(error, reply_to=message)
                actor = self._start(self._clients)
            self._idle.append(actor)


@contextmanager
def ray_grid(client_app: ClientApp, num_clients: int, runtime: Runtime) -> Iterator[RayGrid]:
    """Start Ray, or join the cluster that ``runtime`` names, and leave it at the end.

    As many clients answer at a time as the machines hold ``client_cpus`` and ``client_gpus``.

    Args:
        client_app: Answers every message.
        num_clients: Number of clients.
        runtime: What one client takes, and where.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray: Any = import_module("ray")
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if runtime.ray_address is None:
        settings["include_dashboard"] = False
    ray.init(address=runtime.ray_address, **settings)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        at_once = places(runtime, tuple((n.get("CPU", 0), n.get("GPU", 0)) for n in nodes))
        yield RayGrid(
            client_app,
            num_clients,
            num_actors=min(num_clients, at_once),
            resources={"num_cpus": runtime.client_cpus, "num_gpus": runtime.client_gpus},
        )
    finally:
        ray.shutdown()
