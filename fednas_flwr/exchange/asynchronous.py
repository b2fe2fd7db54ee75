"""Rounds that end with the first replies, while other clients go on (FedBuff).

Nguyen et al. 2022, arXiv 2106.06639. Main class: :class:`FirstReplies`, which asks in the place of
``Courier.ask``; :func:`moved_on` makes a late reply count for the present model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from flwr.app import Message

from fednas_flwr.exchange.courier import Courier, QuorumError
from fednas_flwr.exchange.messages import Reply
from fednas_flwr.exchange.requests import Settings
from fednas_flwr.exchange.states import Layout, Packed
from fednas_flwr.search.settings import Asynchronous


@dataclass(frozen=True)
class Late:
    """A reply to a request that the server may have moved on from since.

    Attributes:
        reply: Accepted.
        sent: The states that the client was sent.
        staleness: Updates of the global model since then.
    """

    reply: Reply
    sent: Mapping[str, Packed]
    staleness: int


@dataclass(frozen=True)
class _Flight:
    """A request that a client works on.

    Attributes:
        client: Its index.
        server_round: In which it was sent.
        sent: With which states.
        accept: Reads the reply.
        ends_at: Of ``time.monotonic()``: it is waited for no longer.
        ready_at: When its reply is there by a simulation's clock.
    """

    client: int
    server_round: int
    sent: Mapping[str, Packed]
    accept: Callable[[Message], Reply]
    ends_at: float
    ready_at: float


@dataclass(frozen=True)
class _Landed:
    """A request that has ended: the accepted reply, or why there is none."""

    flight: _Flight
    answer: Reply | str


class FirstReplies:
    """One stage's requests, of which some are under way from one round to the next.

    Args:
        courier: Reaches the clients.
        terms: How many replies a round waits for, and by which delays they come.
        stage: Of the run.
    """

    def __init__(self, courier: Courier, terms: Asynchronous, stage: str) -> None:
        """See the class."""
        self.courier, self.terms, self.stage = courier, terms, stage
        self._flights: dict[str, _Flight] = {}  # by message
        self._landed: list[_Landed] = []  # that no round has taken yet
        self._clock = 0.0  # of a simulation with delays

    def ask(
        self,
        verb: str,
        settings: Settings,
        *,
        server_round: int,
        states: Mapping[str, Packed],
        layouts: Mapping[str, Layout],
    ) -> Iterator[tuple[int, Late]]:
        """Send a request to all clients that work on none; yield a round's first replies to any.

        What is not there by then stays under way: it comes in a later round, with what it was sent.
        A client's largest share is of the average of these replies, which wait for one another.

        Args:
            verb: What is asked.
            settings: Its arguments.
            server_round: Round within the stage.
            states: Packed tensors to send.
            layouts: The states that every reply must carry.

        Raises:
            QuorumError: Fewer clients are left to answer than a round waits for.
        """
        courier, failures = self.courier, self._send(verb, settings, server_round, states, layouts)
        accepted: list[tuple[int, Late]] = []
        while len(accepted) < self.terms.buffer and (self._landed or self._flights):
            if not self._landed:
                self._land()
            landed = self._landed.pop(0)
            flight, answer = landed.flight, landed.answer
            if not isinstance(answer, Reply):
                failures[flight.client] = answer
                continue
            late = Late(answer, flight.sent, server_round - flight.server_round)
            accepted.append((flight.client, late))
            courier.bytes_dense += sum(layout.num_bytes for layout in layouts.values())
            courier.tell_back(flight.client, self.stage, server_round, verb)
        for client, why in failures.items():
            courier.tell_failure(self.stage, server_round, verb, client, why)
        if len(accepted) < self.terms.buffer:
            missing = sorted((courier.left | failures).items())
            raise QuorumError(
                f"{'; '.join(f'client {c}: {why}' for c, why in missing) or 'no client is left'} "
                f"({verb} in round {server_round}: {len(accepted)} of the {self.terms.buffer} "
                "replies that a round waits for came)"
            )
        scales = courier.held({client: courier.examples[client] for client, _ in accepted})
        for client, late in accepted:
            if client in scales:
                late = replace(late, reply=late.reply.weighing(scales[client], summed=()))
            yield client, late

    def _send(
        self,
        verb: str,
        settings: Settings,
        server_round: int,
        states: Mapping[str, Packed],
        layouts: Mapping[str, Layout],
    ) -> dict[int, str]:
        """Ask the clients that work on nothing; return which could not be sent to, and why."""
        courier, delays, failures = self.courier, self.terms.delays, dict[int, str]()
        under_way = [*self._flights.values(), *(landed.flight for landed in self._landed)]
        busy = {flight.client for flight in under_way}
        idle = [client for client in courier.clients if client not in busy]
        request = (verb, self.stage, server_round, 1, settings, states, layouts)
        requests = courier.requests(*request, among=idle)
        for message_id, client in courier.push(requests.messages, failures).items():
            self._flights[message_id] = _Flight(
                *(client, server_round, states, requests.accepts[client]),
                ends_at=time.monotonic() + courier.deadline_s,
                ready_at=self._clock + (0.0 if delays is None else delays[client]),
            )
        return failures

    def _land(self) -> None:
        """Wait until a client has answered or is late: the next one, by a simulation's clock."""
        waiting = sorted(self._flights, key=lambda i: self._flights[i].ready_at)
        waiting = waiting if self.terms.delays is None else waiting[:1]
        waited_s = 0.0
        while not self._landed:
            late = [i for i in waiting if time.monotonic() >= self._flights[i].ends_at]
            for message in self.courier.pull(waiting):
                flight = self._flights.pop(message.metadata.reply_to_message_id, None)
                if flight is not None:
                    self._clock = max(self._clock, flight.ready_at)
                    answer = self.courier.read(message, flight.client, flight.accept)
                    self._landed.append(_Landed(flight, answer))
            for flight in [self._flights.pop(i) for i in late if i in self._flights]:
                reason = f"no reply within {self.courier.deadline_s:g} s"
                self._landed.append(_Landed(flight, reason))
            if not self._landed:
                waited_s += self.courier.pause(waited_s)


def moved_on(late: Late, states: Mapping[str, Packed], power: float) -> Mapping[str, Packed]:
    """Return a late reply's states as they count for the present model.

    ``x + (1 + t)^-a (y - x_sent)``, FedBuff's discounted update (section 5); statistics of norms
    move by that share towards the client's, so that variances stay above 0. Counters are the
    client's.

    Args:
        late: y, what it was sent, and t.
        states: x, the present global model.
        power: a, at least 0.
    """
    if late.staleness == 0:
        return late.reply.states
    share = (1 + late.staleness) ** -power
    moved: dict[str, Packed] = {}
    for name, packed in late.reply.states.items():
        moved[name] = {}
        for dtype, vector in packed.items():
            now, before = states[name][dtype], late.sent[name][dtype]
            if not vector.dtype.is_floating_point:
                moved[name][dtype] = vector
            elif name == "buffers":
                moved[name][dtype] = torch.lerp(now, vector, share)
            else:
                moved[name][dtype] = torch.add(now, vector - before, alpha=share)
    return moved
