"""Flower Grids whose clients run here, or in actors of Ray or other processes of this machine.

In actors of Ray, what the messages of one exchange share, their arrays, is put into Ray's object
store once, unless it is small: it travels once to each machine. Machines do not add up their
actors' replies before these travel, since adding a float reply costs the server 1.6 ms, and on the
integer grid, where any order gives the same bits, it would cost 22 ms. The server adds replies in
the order of clients.

Main functions: :class:`InProcessGrid`, :func:`ray_grid`, and :func:`check_cluster`, which is asked
before a run begins whether its Ray cluster or SuperLink is there.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fednas_flwr.base.errors import ConfigError, show, unknown_choice
from fednas_flwr.deploy import flower_patches
from fednas_flwr.protocol.messages import payload_bytes
from fednas_flwr.settings import Config
from fednas_flwr.settings.run_settings import Deployment, RayRuntime

SERVER_NODE_ID = 1


class InProcessGrid(Grid):
    """Calls the ClientApp when a reply is pulled, one client per pull, in the order of pushing.

    So the server reduces each reply before the next one exists. A client cannot be interrupted: a
    deadline takes effect between clients.

    Args:
        client_app: Answers every message.
        num_clients: Number of nodes; node ``i + 2`` has ``partition-id = i``.
    """

    server_node_id = SERVER_NODE_ID

    def __init__(self, client_app: ClientApp, num_clients: int) -> None:
        """See the class."""
        flower_patches.begin_task(SERVER_NODE_ID)
        self._client_app = client_app
        self._run = Run.create_empty(run_id=1)
        self._messages: dict[str, Message] = {}
        self._num_messages = 0
        self._contexts = {
            SERVER_NODE_ID + 1 + index: Context(
                run_id=1,
                node_id=SERVER_NODE_ID + 1 + index,
                node_config={"partition-id": index, "num-partitions": num_clients},
                state=RecordDict(),
                run_config={},
            )
            for index in range(num_clients)
        }

    def set_run(self, run: Run) -> None:
        """Take Flower's description of the run."""
        self._run = run

    @property
    def run(self) -> Run:
        """Flower's description of the run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages and return their ids."""
        numbered = {self.number(message): message for message in messages}
        self._messages |= numbered
        return list(numbered)

    def number(self, message: Message) -> str:
        """Give a message its id, and return that."""
        self._num_messages += 1
        flower_patches.set_message_id(message, str(self._num_messages))
        return str(self._num_messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let the first client that still has to answer do so, and return its reply."""
        for message_id in message_ids:
            message = self._messages.pop(message_id, None)
            if message is not None:
                return [self.answer(message)]
        return []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies to all messages; ``timeout`` cannot interrupt a client."""
        ids = list(self.push_messages(messages))
        return [reply for message_id in ids for reply in self.pull_messages([message_id])]

    def answer(self, message: Message) -> Message:
        """Return the reply of the client that a message is for."""
        context = self._contexts[message.metadata.dst_node_id]
        try:
            return self._client_app(message, context)
        except Exception as error:  # as Flower's other runtimes do
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(flower_patches.CLIENT_RAISED, reason), reply_to=message)


FLOWERS_OWN = {"local", "supergrid"}  # in the file that Flower writes where there is none
CONNECTS_S, ANSWERS_S = 4.0, 12.0

Nodes = tuple[tuple[float, float], ...]  # CPUs and GPUs of each machine


def places(runtime: RayRuntime, nodes: Nodes) -> int:
    """Return the number of clients that a cluster's machines hold at a time by ``runtime``."""

    def fits(cpus: float, gpus: float) -> int:
        by_gpus = gpus / runtime.client_gpus if runtime.client_gpus else math.inf
        return math.floor(min(cpus / runtime.client_cpus, by_gpus) + 1e-9)

    return sum(fits(cpus, gpus) for cpus, gpus in nodes)


# In a process of its own: Ray waits for a silent cluster for ever.
_ASK = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="critical")
nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
print(json.dumps([[node.get("CPU", 0), node.get("GPU", 0)] for node in nodes]))
"""


def check_cluster(config: Config) -> None:
    """Raise ConfigError for an unknown SuperLink, or a Ray that has no place for a client."""
    runtime = config.runtime
    if isinstance(runtime, Deployment):
        _check_superlink(str(runtime.superlink))
    if not isinstance(runtime, RayRuntime):
        return
    address = runtime.ray_address
    nodes = this_node() if address is None else _nodes(address)
    if not places(runtime, nodes):
        there = "; ".join(f"{c:g} CPUs and {g:g} GPUs" for c, g in nodes[:4])
        raise ConfigError(
            f"runtime.client_cpus={runtime.client_cpus:g} with "
            f"runtime.client_gpus={runtime.client_gpus:g}: no machine of the cluster holds such a "
            f"client (there are {there}); lower what one client takes."
        )


def _check_superlink(name: str) -> None:
    """Refuse a SuperLink that Flower's configuration does not name, or would not when made."""
    path = Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))["superlink"].items()
        known = {one for one, entry in entries if isinstance(entry, dict)}
    except FileNotFoundError:
        known = FLOWERS_OWN
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"runtime.superlink={show(name)}: {path} has no table of SuperLinks that can be read "
            f"({error}): correct it."
        ) from error
    if name not in known:
        told = str(unknown_choice("runtime.superlink", name, known)).removesuffix(".")
        raise ConfigError(f"{told}, or add [superlink.{show(name)}] with its address to {path}.")


def this_node() -> Nodes:
    """CPUs and GPUs of this machine."""
    import torch

    return ((os.cpu_count() or 1, torch.cuda.device_count()),)


@cache
def _nodes(address: str) -> Nodes:
    """Return CPUs and GPUs of every node of the cluster at an address."""
    silent = ConfigError(
        f"runtime.ray_address={show(address)}: no Ray cluster answers there; start it, correct the "
        "address, or set runtime.ray_address=null for one on this machine."
    )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host:
            socket.create_connection((host, int(port)), timeout=CONNECTS_S).close()
        done = subprocess.run(
            [sys.executable, "-c", _ASK, address],
            capture_output=True,
            text=True,
            timeout=ANSWERS_S,
            check=True,
        )
    except (OSError, ValueError, OverflowError, subprocess.SubprocessError) as error:
        raise silent from error
    return tuple((float(cpus), float(gpus)) for cpus, gpus in json.loads(done.stdout))


SHORT_S = 0.2  # longest work of several messages that a worker is handed at once
AHEAD = 4  # messages per worker, from the head of the queue, among which it finds its clients'
SHARE = 2  # handfuls per worker that the queue is divided into, so that all end at about one time
KEPT = 0.7  # of the longest time that an action has taken, one answer later


class Dispatcher:
    """A queue of messages, and the workers that answer them; any hashable names a worker.

    A message goes to the worker that answered its client before if that one is free, since the
    client's records and networks are in its memory, else to any free one: no message waits for one
    worker while another is idle. Messages leave the queue nearly in order, so that the server need
    not hold many replies. A worker is handed as many messages at once as take ``SHORT_S``, and no
    more than a share of the queue; where messages take longer, another worker might be idle
    earlier, so that it is handed one.
    """

    def __init__(self) -> None:
        """Start without workers and messages."""
        self._queue: dict[str, Message] = {}
        self._held: dict[Any, list[Message]] = {}
        self._before: dict[int, Any] = {}  # who was last dealt a message of a client's node
        self._seconds: dict[str, float] = {}  # that an action's messages have lately taken

    def queue(self, message: Message) -> None:
        """Put a message, which has its id, at the end of the queue."""
        self._queue[message.metadata.message_id] = message

    def join(self, worker: Any) -> None:
        """Let a worker take part."""
        self._held[worker] = []

    @property
    def num_workers(self) -> int:
        """How many take part."""
        return len(self._held)

    def deal(self) -> list[tuple[Any, list[Message]]]:
        """Return the messages to hand to each idle worker now, at least one each."""
        idle = {worker: held for worker, held in self._held.items() if not held}
        most = math.ceil(len(self._queue) / (SHARE * max(len(self._held), 1)))
        for room in (1, most):  # nobody stays idle while another is handed a second one
            for own in (True, False):
                for worker, held in idle.items():
                    while len(held) < room and (message := self._first(worker, own=own)):
                        del self._queue[message.metadata.message_id]
                        held.append(message)
                        self._before[message.metadata.dst_node_id] = worker
        return [(worker, held) for worker, held in idle.items() if held]

    def finish(self, worker: Any, seconds: Sequence[float]) -> list[Message]:
        """Return the messages that a worker held, and has answered in so many seconds each."""
        held, self._held[worker] = self._held[worker], []
        for message, taken in zip(held, seconds, strict=True):
            action = message.metadata.message_type
            self._seconds[action] = max(taken, KEPT * self._seconds.get(action, 0.0))
        return held

    def lose(self, worker: Any) -> list[Message]:
        """Return the messages that a worker held when it died."""
        return self._held.pop(worker)

    def give_up(self) -> Message | None:
        """Take the first message from the queue, if there is one."""
        first = next(iter(self._queue), "")
        return self._queue.pop(first, None)

    def _first(self, worker: Any, *, own: bool) -> Message | None:
        """Return the first message that a worker has time for, with ``own`` of its clients."""
        held = self._held[worker]
        left = SHORT_S - sum(map(self._expected, held))
        for message in islice(self._queue.values(), AHEAD * len(self._held)):
            if own and self._before.get(message.metadata.dst_node_id) != worker:
                continue
            if not held or self._expected(message) <= left:
                return message
        return None

    def _expected(self, message: Message) -> float:
        """Return the seconds that a message may take."""
        return self._seconds.get(message.metadata.message_type, math.inf)


POLL_S = 0.1
STORED_BYTES = 100_000  # arrays of fewer travel with each message, which Ray does faster
REPLY_BYTES = 4_000_000  # replies of fewer do without the store: a tenth of a small round's time

Messages = Sequence[tuple[Message, int]]  # without their arrays, with the index of these


class Worker:
    """Answers one message after the other, in a process of its own; any client's."""

    def __init__(self, grid: InProcessGrid) -> None:
        """Take the grid whose clients it stands for."""
        flower_patches.begin_task(grid.server_node_id)
        self._grid = grid

    def answer(
        self, messages: Messages, *arrays: Mapping[str, ArrayRecord]
    ) -> list[tuple[Message, float]]:
        """Return the replies of the clients that messages are for, and the seconds of each.

        Args:
            messages: Without their arrays; with each the index of these.
            arrays: By their names in a message's content.
        """
        replies = []
        for message, index in messages:
            started = time.perf_counter()
            message.content.update(arrays[index])
            replies.append((self._grid.answer(message), time.perf_counter() - started))
        return replies


class Actors(Protocol):
    """What :class:`ActorGrid` asks of Ray, or of this machine's processes.

    An actor is a :class:`Worker` elsewhere.
    """

    def put(self, value: Any) -> Any:
        """A reference to a value, or the value itself, which goes to actors in its place."""

    def start(self) -> tuple[Any, Any]:
        """A new actor, and a reference whose result, True, is there once the actor is."""

    def answer(self, actor: Any, messages: Messages, *arrays: Any) -> Any:
        """A reference to what :meth:`Worker.answer` of an actor returns."""

    def done(self, references: list[Any], *, timeout: float) -> list[Any]:
        """Those of some references whose results are there, after waiting for the first."""

    def result(self, reference: Any) -> Any | None:
        """The result of an actor; None if its process is lost."""


class ActorGrid(InProcessGrid):
    """Hands messages to actors, see :class:`Dispatcher`; replies come as they are ready.

    An actor that dies gives errors in place of the replies that it worked on, and another is
    started in its place. It takes part as soon as a machine has room for it.

    Args:
        client_app: Answers every message.
        num_clients: Number of nodes; node ``i + 2`` has ``partition-id = i``.
        actors: Starts them.
        num_actors: How many clients answer at a time.
    """

    def __init__(
        self, client_app: ClientApp, num_clients: int, *, actors: Actors, num_actors: int
    ) -> None:
        """Start the actors."""
        super().__init__(client_app, num_clients)
        self._actors = actors
        self._dispatcher = Dispatcher()
        self._starting: dict[Any, Any] = {}  # actor by what tells that it is there
        self._arrays: dict[str, Any] = {}  # or a reference to them, by message without a reply
        self._answers: dict[Any, Any] = {}  # by actor that is not idle: reference to its replies
        self._replies: dict[str, Message] = {}
        for _ in range(num_actors):
            self._start_actor()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages, begin with those that an actor is free for, and return their ids."""
        messages, stored = list(messages), dict[tuple[tuple[str, int], ...], Any]()
        for message in messages:
            small, arrays = without_arrays(message)
            same = tuple((name, id(record)) for name, record in arrays.items())
            if same not in stored:
                is_small = payload_bytes(message.content) < STORED_BYTES
                stored[same] = arrays if is_small else self._actors.put(arrays)
            self._arrays[self.number(small)] = stored[same]
            self._dispatcher.queue(small)
        self._hand_out()
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that are there; waits a tenth of a second for the first."""
        message_ids, awaited = list(message_ids), list(self._awaited())
        if awaited and not any(message_id in self._replies for message_id in message_ids):
            self._actors.done(awaited, timeout=POLL_S)
        self._collect()
        self._hand_out()
        found = [self._replies.pop(i, None) for i in message_ids]
        return [reply for reply in found if reply is not None]

    def _start_actor(self) -> None:
        actor, begun = self._actors.start()
        self._starting[begun] = actor

    def _hand_out(self) -> None:
        """Give queued messages to actors that are free."""
        for actor, messages in self._dispatcher.deal():
            arrays = [self._arrays[message.metadata.message_id] for message in messages]
            different = {id(one): one for one in arrays}
            index = {key: number for number, key in enumerate(different)}
            pairs = [(m, index[id(one)]) for m, one in zip(messages, arrays, strict=True)]
            self._answers[actor] = self._actors.answer(actor, pairs, *different.values())

    def _awaited(self) -> dict[Any, Any]:
        """Return each actor by the reference of its current task."""
        return self._starting | {answer: actor for actor, answer in self._answers.items()}

    def _collect(self) -> None:
        """Keep the replies that are ready; start an actor for each that has died."""
        while awaited := self._awaited():
            if not (done := self._actors.done(list(awaited), timeout=0)):
                return
            for reference in done:
                actor, found = awaited[reference], self._actors.result(reference)
                begins = self._starting.pop(reference, None) is not None
                self._answers.pop(actor, None)
                if begins and found is not None:
                    self._dispatcher.join(actor)
                elif found is not None:
                    replies, seconds = zip(*found, strict=True)
                    held = self._dispatcher.finish(actor, seconds)
                    for message, reply in zip(held, replies, strict=True):
                        self._reply(message, reply)
                else:
                    lost = [self._dispatcher.give_up()] if begins else self._dispatcher.lose(actor)
                    reason = "the client's process has died, perhaps for want of memory"
                    for message in filter(None, lost):
                        error = Error(flower_patches.CLIENT_RAISED, reason)
                        self._reply(message, Message(error, reply_to=message))
                    self._start_actor()

    def _reply(self, message: Message, reply: Message) -> None:
        """Keep the reply to a message, and nothing else of it."""
        message_id = message.metadata.message_id
        del self._arrays[message_id]
        self._replies[message_id] = reply


class RayActors:
    """:class:`Actors` of Ray, which has been started.

    Args:
        client_app: Answers every message.
        num_clients: Number of clients.
        resources: What Ray reserves for each actor, as ``ray.remote`` takes it.
    """

    def __init__(
        self, client_app: ClientApp, num_clients: int, resources: dict[str, float]
    ) -> None:
        """Store the clients once, for all actors."""
        ray = self._ray = import_module("ray")
        self._make_actor = ray.remote(**resources)(Worker).remote
        self._clients = ray.put(InProcessGrid(client_app, num_clients))

    def put(self, value: Any) -> Any:
        """See :class:`Actors`."""
        return self._ray.put(value)

    def start(self) -> tuple[Any, Any]:
        """See :class:`Actors`."""
        actor = self._make_actor(self._clients)
        return actor, actor.__ray_ready__.remote()

    def answer(self, actor: Any, messages: Messages, *arrays: Any) -> Any:
        """See :class:`Actors`."""
        return actor.answer.remote(messages, *arrays)

    def done(self, references: list[Any], *, timeout: float) -> list[Any]:
        """See :class:`Actors`."""
        number = len(references) if timeout == 0 else 1
        done: list[Any] = self._ray.wait(references, num_returns=number, timeout=timeout)[0]
        return done

    def result(self, reference: Any) -> Any | None:
        """See :class:`Actors`."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:  # it has raised, and lives
            raise
        except self._ray.exceptions.RayError:
            return None


def without_arrays(message: Message) -> tuple[Message, dict[str, ArrayRecord]]:
    """Return a message without the arrays of its content, and these by their names."""
    arrays = {name: r for name, r in message.content.items() if isinstance(r, ArrayRecord)}
    small = copy(message)
    small.content = RecordDict({n: r for n, r in message.content.items() if n not in arrays})
    return small, arrays


@contextmanager
def ray_grid(client_app: ClientApp, num_clients: int, runtime: RayRuntime) -> Iterator[ActorGrid]:
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
        settings["_system_config"] = {"max_direct_call_object_size": REPLY_BYTES}
    # null would join what RAY_ADDRESS or a file in /tmp/ray names, be it there or not
    ray.init(address=runtime.ray_address or "local", **settings)
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        at_once = places(runtime, tuple((n.get("CPU", 0), n.get("GPU", 0)) for n in nodes))
        resources = {"num_cpus": runtime.client_cpus, "num_gpus": runtime.client_gpus}
        actors = RayActors(client_app, num_clients, resources)
        number = min(num_clients, at_once)
        yield ActorGrid(client_app, num_clients, actors=actors, num_actors=number)
    finally:
        ray.shutdown()
