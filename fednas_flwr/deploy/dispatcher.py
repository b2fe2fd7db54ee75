"""Deals the messages of a queue to workers, and keeps which worker has which messages.

Main class: :class:`Dispatcher`. It knows nothing of how workers are reached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Any

from flwr.app import Message

SHORT_S = 0.2  # longest work of several messages that a worker is handed at once
AHEAD = 4  # messages per worker, from the head of the queue, among which it finds its clients'
SHARE = 2  # handfuls per worker that the queue is divided into, so that all end at about one time
KEPT = 0.7  # of the longest time that an action has taken, one answer later

Worker = Any  # hashable: whatever stands for one


class Dispatcher:
    """A queue of messages, and the workers that answer them.

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
        self._held: dict[Worker, list[Message]] = {}
        self._before: dict[int, Worker] = {}  # who was last dealt a message of a client's node
        self._seconds: dict[
            str, float
        ] = {}  # that messages of an action have lately taken, at most

    def queue(self, message: Message) -> None:
        """Put a message, which has its id, at the end of the queue."""
        self._queue[message.metadata.message_id] = message

    def join(self, worker: Worker) -> None:
        """Let a worker take part."""
        self._held[worker] = []

    def deal(self) -> list[tuple[Worker, list[Message]]]:
        """Return who is to be handed which messages now: whoever was idle, at least one each."""
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

    def finish(self, worker: Worker, seconds: Sequence[float]) -> list[Message]:
        """Return the messages that a worker held, and has answered in so many seconds each."""
        held, self._held[worker] = self._held[worker], []
        for message, taken in zip(held, seconds, strict=True):
            action = message.metadata.message_type
            self._seconds[action] = max(taken, KEPT * self._seconds.get(action, 0.0))
        return held

    def lose(self, worker: Worker) -> list[Message]:
        """Return the messages that a worker held when it died."""
        return self._held.pop(worker)

    def give_up(self) -> Message | None:
        """Take the first message from the queue, if there is one."""
        first = next(iter(self._queue), "")
        return self._queue.pop(first, None)

    def _first(self, worker: Worker, *, own: bool) -> Message | None:
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
