"""Flower Grids whose clients run here or in workers: actors of Ray or processes of this machine.

For actors of Ray, the arrays that the messages of one exchange share are put into Ray's object
store once, unless they are small. They travel to each machine once. Machines do not add up their
actors' replies before these travel: adding a float reply costs the server 1.6 ms, and on the
integer grid, where any order gives the same bits, it would cost 22 ms. The server adds replies in
the order of clients.

Main functions: :class:`InProcessGrid`, :func:`ray_grid`, and :func:`check_cluster`, which checks
before a run begins that its Ray cluster or SuperLink is available.
"""

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import cache
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from fednas_flwr.base.errors import ConfigError, show, unknown_choice
from fednas_flwr.base.processes import LostError
from fednas_flwr.deploy import flower_patches
from fednas_flwr.protocol.messages import payload_bytes
from fednas_flwr.settings import Config
from fednas_flwr.settings.run_settings import Deployment, RayRuntime

SERVER_NODE_ID = 1


class InProcessGrid(Grid):
    """A grid that calls the ClientApp when a reply is pulled: one client per pull, in push order.

    The server therefore reduces each reply before the next one exists. A client cannot be
    interrupted; a deadline takes effect between clients.

    Args:
        client_app: App that answers every message.
        num_clients: Number of nodes; node ``i + 2`` has ``partition-id = i``.

    Attributes:
        seconds: Seconds that the answer to each message took, by the message's id.
    """

    server_node_id = SERVER_NODE_ID

    def __init__(self, client_app: ClientApp, num_clients: int) -> None:
        flower_patches.begin_task(SERVER_NODE_ID)
        self._client_app = client_app
        self._run = Run.create_empty(run_id=1)
        self._messages: dict[str, Message] = {}
        self._num_messages, self.seconds = 0, dict[str, float]()
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
        """Give a message its id and return the id."""
        self._num_messages += 1
        flower_patches.set_message_id(message, str(self._num_messages))
        return str(self._num_messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let the first client that has yet to answer do so, and return its reply."""
        for message_id in message_ids:
            if (message := self._messages.pop(message_id, None)) is not None:
                started = time.monotonic()
                reply = self.answer(message)
                self.seconds[message_id] = time.monotonic() - started
                return [reply]
        return []

    def forget(self, message_ids: Iterable[str]) -> None:
        """Do not answer these messages any more: replies would be too late."""
        for message_id in message_ids:
            self._messages.pop(message_id, None)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the replies to all messages; ``timeout`` cannot interrupt a client."""
        ids = list(self.push_messages(messages))
        return [reply for message_id in ids for reply in self.pull_messages([message_id])]

    def answer_apart(
        self, messages: Sequence[Message], *arrays: Mapping[str, ArrayRecord]
    ) -> list[Message]:
        """Return the replies to messages whose arrays are given separately, by their names.

        Workers use this, each in its own process, for one message after the other.
        """
        for message, its in zip(messages, arrays, strict=True):
            message.content.update(its)
        return [self.answer(message) for message in messages]

    def answer(self, message: Message) -> Message:
        """Return the reply of the client to which a message is addressed."""
        try:
            return self._client_app(message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:  # as Flower's other runtimes do
            reason = f"{type(error).__name__}: {error}"
            return Message(Error(flower_patches.CLIENT_RAISED, reason), reply_to=message)


FLOWERS_OWN = {"local", "supergrid"}  # in the file that Flower writes if there is none
CONNECTS_S, ANSWERS_S = 4.0, 12.0

Nodes = tuple[tuple[float, float], ...]  # CPUs and GPUs of each machine


def places(runtime: RayRuntime, nodes: Nodes) -> int:
    """Return the number of clients that fit on a cluster's machines at a time, by ``runtime``."""

    def fits(cpus: float, gpus: float) -> int:
        by_gpus = gpus / runtime.client_gpus if runtime.client_gpus else math.inf
        return math.floor(min(cpus / runtime.client_cpus, by_gpus) + 1e-9)

    return sum(fits(cpus, gpus) for cpus, gpus in nodes)


# In a separate process, as Ray waits for a silent cluster for ever.
_ASK = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="critical")
nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
print(json.dumps([[node.get("CPU", 0), node.get("GPU", 0)] for node in nodes]))
"""


def check_cluster(config: Config) -> None:
    """Raise ConfigError for an unknown SuperLink, or a Ray cluster without room for a client."""
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
    """Refuse a SuperLink that Flower's configuration, once created, does not name."""
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
        more = f", or add [superlink.{show(name)}] with its address to {path}"
        raise unknown_choice("runtime.superlink", name, known, more)


def this_node() -> Nodes:
    """CPUs and GPUs of this machine."""
    import torch

    return ((os.cpu_count() or 1, torch.cuda.device_count()),)


@cache
def _nodes(address: str) -> Nodes:
    """Return CPUs and GPUs of every node of the cluster at an address."""
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
        raise ConfigError(
            f"runtime.ray_address={show(address)}: no Ray cluster answers there; start it, correct "
            "the address, or set runtime.ray_address=null for one on this machine."
        ) from error
    return tuple((float(cpus), float(gpus)) for cpus, gpus in json.loads(done.stdout))


POLL_S = 1.0
AGAIN_S = 1.0  # time until another try if a worker could not be started
AHEAD = 4  # messages per worker, from the head of the queue, in which it looks for its clients'
SHORT_S = 0.2  # longest total work of messages that a worker takes at once
STORED_BYTES = 100_000  # smaller arrays travel with each message, which is faster in Ray
REPLY_BYTES = 4_000_000  # smaller replies bypass the store, which saves a tenth of a small round
DIED = "the client's process has died, perhaps for want of memory"

Taken = list[tuple[Message, Any]]  # pairs of a message without its arrays, and the arrays
Answer = Callable[[Taken], list[Message]]


class WorkerGrid(InProcessGrid):
    """A grid that gives messages to workers, one thread each; replies come as they are ready.

    An idle worker takes the next message. Near the head of the queue it prefers a message for a
    client that it has answered before, whose records and networks are in its memory. So no message
    waits while a worker is idle, and the server need not hold many replies. If such messages have
    lately taken milliseconds, it takes several, fewer as the queue gets shorter (guided
    self-scheduling, Polychronopoulos and Kuck, 1987). If a worker dies, the replies that it worked
    on become errors, and another is started in its place. It joins as soon as it is ready.

    Args:
        client_app: App that answers every message.
        num_clients: Number of nodes; node ``i + 2`` has ``partition-id = i``.
        number: Number of workers.
        start: Starts a worker, waits until it is ready, and returns the function with which it
            answers; both raise :class:`LostError`.
        put: Converts arrays, which many messages may share, into what is sent to workers instead.

    Attributes:
        num_workers: Current number of workers.
        has_failed: True if a worker could not be started.
        threads: Threads of the workers that have been started.
        has_ended: True if no worker is to answer any further message.
    """

    alone = False  # if no worker can be started, messages wait for this process instead of failing

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        *,
        number: int,
        start: Callable[[], Answer],
        put: Callable[[dict[str, ArrayRecord]], Any] = lambda arrays: arrays,
    ) -> None:
        """Begin without workers."""
        super().__init__(client_app, num_clients)
        self._number, self._start, self._put = number, start, put
        self._queue: dict[str, tuple[Message, Any]] = {}  # message without arrays, and the arrays
        self._awaited, self._replies = set[str](), dict[str, Message]()
        self._before: dict[int, int] = {}  # last thread to take a message for a client's node
        self._pace: dict[str, float] = {}  # seconds that an action's last message took
        self._changed = threading.Condition()
        self.threads: list[threading.Thread] = []
        self.num_workers, self.has_failed, self.has_ended = 0, False, False

    def begin(self) -> None:
        """Start the workers."""
        for _ in range(self._number):
            self.threads.append(threading.Thread(target=self._work, daemon=True))
            self.threads[-1].start()

    def close(self) -> None:
        """Stop workers from answering further messages."""
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue the messages, and return their ids."""
        messages, put = list(messages), dict[tuple[tuple[str, int], ...], Any]()
        with self._changed:
            for message in messages:
                small, arrays = without_arrays(message)
                same = tuple((name, id(record)) for name, record in arrays.items())
                if same not in put:
                    put[same] = self._put(arrays)
                self._queue[self.number(small)] = small, put[same]
            self._awaited |= self._queue.keys()
            self._changed.notify_all()
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have arrived; waits a second for the first."""
        wanted = list(message_ids)
        with self._changed:
            self._changed.wait_for(lambda: not self._replies.keys().isdisjoint(wanted), POLL_S)
            return [self._replies.pop(one) for one in wanted if one in self._replies]

    def forget(self, message_ids: Iterable[str]) -> None:
        """Let no worker begin these messages, and keep no reply to them."""
        with self._changed:
            for one in message_ids:
                self._awaited.discard(one)
                self._queue.pop(one, None)
                self._replies.pop(one, None)

    def _work(self) -> None:
        """Let a worker answer messages; replace it when it has died."""
        while not self.has_ended:
            worker = None
            with suppress(LostError):
                worker = self._start()
                self._count(1)
            if worker is not None:
                while (taken := self._next(None, several=True)) and self._keep(taken, worker):
                    pass
                self._count(-1)
                continue
            self.has_failed = True
            while not self.alone and (taken := self._next(0.0)):
                self._keep(taken, worker)
            with self._changed:
                self._changed.wait_for(lambda: self.has_ended, AGAIN_S)

    def _count(self, more: int) -> None:
        with self._changed:
            self.num_workers += more

    def _next(self, timeout: float | None, *, several: bool = False) -> Taken:
        """Take the next messages for this thread; none at the end, or if none comes in time."""
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self.has_ended, timeout)
            if self.has_ended or not self._queue:
                return []
            head = list(islice(self._queue.values(), AHEAD * self._number))
            head.sort(key=lambda one: self._before.get(one[0].metadata.dst_node_id) != thread)
            seconds = self._pace.get(head[0][0].metadata.message_type, math.inf)
            share = len(self._queue) // (2 * self._number)
            taken = head[: max(min(share, int(SHORT_S / seconds)), 1) if several else 1]
            for message, _ in taken:
                self._before[message.metadata.dst_node_id] = thread
                del self._queue[message.metadata.message_id]
            return taken

    def _keep(self, taken: Taken, worker: Answer | None) -> bool:
        """Keep a worker's replies, or the reason for their absence; True if the worker is alive."""
        lives, started = True, time.monotonic()
        try:
            if worker is None:
                raise LostError
            replies = worker(taken)
        except Exception as error:
            lives = not isinstance(error, LostError)
            reason = f"{type(error).__name__}: {error}" if lives else DIED
            failed = Error(flower_patches.CLIENT_RAISED, reason)
            replies = [Message(failed, reply_to=message) for message, _ in taken]
        seconds = (time.monotonic() - started) / len(taken)
        with self._changed:
            for (message, _), reply in zip(taken, replies, strict=True):
                self._pace[message.metadata.message_type] = max(seconds, 1e-9)
                if (name := message.metadata.message_id) in self._awaited:
                    self._awaited.remove(name)
                    self._replies[name], self.seconds[name] = reply, seconds
            self._changed.notify_all()
        return lives


def without_arrays(message: Message) -> tuple[Message, dict[str, ArrayRecord]]:
    """Return a message without the arrays of its content, and the arrays by name."""
    arrays = {name: r for name, r in message.content.items() if isinstance(r, ArrayRecord)}
    small = copy(message)
    small.content = RecordDict({n: r for n, r in message.content.items() if n not in arrays})
    return small, arrays


@contextmanager
def ray_grid(client_app: ClientApp, num_clients: int, runtime: RayRuntime) -> Iterator[WorkerGrid]:
    """Start Ray, or join the cluster that ``runtime`` names, and leave it at the end.

    The number of clients that answer at a time follows from the machines' resources,
    ``client_cpus`` and ``client_gpus``.

    Args:
        client_app: App that answers every message.
        num_clients: Number of clients.
        runtime: Resources of one client, and the cluster.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = import_module("ray")
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if runtime.ray_address is None:
        settings["include_dashboard"] = False
        settings["_system_config"] = {"max_direct_call_object_size": REPLY_BYTES}
    # null would join the cluster that RAY_ADDRESS or a file in /tmp/ray names, available or not
    ray.init(address=runtime.ray_address or "local", **settings)
    remote = ray.remote(num_cpus=runtime.client_cpus, num_gpus=runtime.client_gpus)
    make_actor = remote(InProcessGrid)
    app = ray.put(client_app)

    def result(reference: Any) -> Any:
        while not ray.wait([reference], timeout=POLL_S)[0]:
            if grid.has_ended:
                raise LostError
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError:  # it has raised an error but is alive
            raise
        except ray.exceptions.RayError as error:
            raise LostError from error

    def start() -> Answer:
        actor = make_actor.remote(app, num_clients)
        result(actor.__ray_ready__.remote())

        def answer(taken: Taken) -> list[Message]:
            messages, arrays = zip(*taken, strict=True)
            return result(actor.answer_apart.remote(messages, *arrays))

        return answer

    def put(arrays: dict[str, ArrayRecord]) -> Any:
        return arrays if payload_bytes(RecordDict({**arrays})) < STORED_BYTES else ray.put(arrays)

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    at_once = places(runtime, tuple((n.get("CPU", 0), n.get("GPU", 0)) for n in nodes))
    number = min(num_clients, at_once)
    grid = WorkerGrid(client_app, num_clients, number=number, start=start, put=put)
    try:
        grid.begin()
        yield grid
    finally:
        grid.close()
        for thread in grid.threads:
            thread.join()
        ray.shutdown()
