"""Deals the messages of a queue to workers, and keeps which worker has which messages.

Main class: :class:`Dealer`. It knows nothing of how workers are reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from flwr.app import Message

SHORT_S = 0.2  # longest work for which a worker is handed its next message in advance
AHEAD = 4  # messages per worker, from the head of the queue, among which it finds its clients'
KEPT = 0.7  # of the longest time that a verb has taken, one answer later

Worker = Any  # hashable: whatever stands for one


class Dealer:
    """A queue of messages, and the workers that answer them.

    A message goes to the worker that answered its client before if that one is free, since the
    client's records and networks are in its memory, else to any free one: no message waits for one
    worker while another is idle. Messages leave the queue nearly in order, so that the server need
    not hold many replies. A worker whose message takes at most ``SHORT_S`` is handed another one,
    to go on with at once; where messages take longer, another worker might be idle earlier.
    """

    def __init__(self) -> None:
        """Start without workers and messages."""
        self._queue: dict[str, Message] = {}
        self._held: dict[Worker, list[Message]] = {}  # it works on the first of them
        self._before: dict[int, Worker] = {}  # who was last dealt a message of a client's node
        self._seconds: dict[str, float] = {}  # that messages of a verb have lately taken, at most

    @property
    def running(self) -> Mapping[Worker, Message]:
        """What each worker that is not idle works on."""
        return {worker: held[0] for worker, held in self._held.items() if held}

    def queue(self, message: Message) -> None:
        """Put a message, which has its id, at the end of the queue."""
        self._queue[message.metadata.message_id] = message

    def join(self, worker: Worker) -> None:
        """Let a worker take part."""
        self._held[worker] = []

    def deal(self) -> list[tuple[Worker, Message]]:
        """Return who is to be handed which messages now."""
        dealt = []
        for num_held, own in ((0, True), (0, False), (1, True), (1, False)):
            for worker, held in self._held.items():
                if len(held) != num_held or not all(map(self._is_short, held)):
                    continue
                message = self._first(worker, own=own, short=num_held > 0)
                if message is not None:
                    del self._queue[message.metadata.message_id]
                    held.append(message)
                    self._before[message.metadata.dst_node_id] = worker
                    dealt.append((worker, message))
        return dealt

    def finish(self, worker: Worker, seconds: float) -> Message:
        """Return the message that a worker worked on, and has answered in so many seconds."""
        message = self._held[worker].pop(0)
        verb = message.metadata.message_type
        self._seconds[verb] = max(seconds, KEPT * self._seconds.get(verb, 0.0))
        return message

    def lose(self, worker: Worker) -> Message:
        """Return the message that a worker worked on when it died; its next one is queued again."""
        lost, *others = self._held.pop(worker)
        self._queue = {message.metadata.message_id: message for message in others} | self._queue
        return lost

    def give_up(self) -> Message | None:
        """Take the first message from the queue, if there is one."""
        first = next(iter(self._queue), "")
        return self._queue.pop(first, None)

    def _first(self, worker: Worker, *, own: bool, short: bool) -> Message | None:
        """Return the first message for a worker: of clients of its own only, or short ones only."""
        for message in islice(self._queue.values(), AHEAD * len(self._held)):
            if own and self._before.get(message.metadata.dst_node_id) != worker:
                continue
            if not short or self._is_short(message):
                return message
        return None

    def _is_short(self, message: Message) -> bool:
        return self._seconds.get(message.metadata.message_type, float("inf")) <= SHORT_S
