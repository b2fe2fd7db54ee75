"""Ask clients over any Flower Grid and yield their accepted replies, in client order.

Every wait ends: at the last reply or at the deadline. A client that errs, is late or sends what
the reply checks refuse is dropped for this exchange and named; one whose privacy budget has ended,
or whose replies were refused three times, is not asked again. Fewer replies than the quorum end the
run. With secure sums replies are added up masked, and only their total is yielded.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from fednas_flwr.base.errors import ClientLeftError, ReplyError
from fednas_flwr.data.statistics import Statistics
from fednas_flwr.protocol.messages import (
    Header,
    Reply,
    encode_request,
    encode_states,
    payload_bytes,
)
from fednas_flwr.protocol.requests import Describe
from fednas_flwr.protocol.sum_encoding import Summands
from fednas_flwr.server.client_sampling import Sampling
from fednas_flwr.server.exchange import Exchange, Requests
from fednas_flwr.server.reply_checks import (
    MAX_EXAMPLES,
    check_properties,
    misfits,
    outliers,
)
from fednas_flwr.server.secure_sums import PendingSum
from fednas_flwr.server.weights import share_scales, weighed

POLL_S, LONGEST_POLL_S = 0.05, 1.0
POLL_SHARE = 0.05  # of the time since the last reply
STRIKES = 3  # replies of a client that are refused before it is asked no more
TOTAL = -1  # in place of a client: the reply is the total of all
LONGEST_REASON = 500  # characters of a client's own words that are kept
CONNECT = Exchange("query.describe", stage="connect", settings=Describe())


class Emit(Protocol):
    """Sink of events: a name and JSON fields."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Record one event."""


def ignore_events(event: str, **fields: Any) -> None:
    """Drop the event: for use without a run folder."""


class QuorumError(RuntimeError):
    """Too few clients answered an exchange; the message names each missing one and its reason."""


class Cohort:
    """The clients of one run as the server sees them.

    Args:
        run: Name of the run; replies to another run are refused.
        num_clients: Number of clients, whose indices are 0 to ``num_clients - 1``.
        quorum: Share of the clients, in (0, 1], that must answer every exchange.
        deadline_s: Seconds until the replies of an exchange must be there.
        connect_s: Seconds until the clients must have appeared.
        wire: What float32 vectors travel as, see :mod:`fednas_flwr.protocol.wire`.
        fewest_records: Share of the median client's records that a client must declare.
        most_records: Multiple of them that it may declare.
        largest_share: Of an average, that one client of three or more may have: from above 0 to 1.
        secure_sum: Whether clients send what depends on records as part of secure sums only.
        emit: Receives ``client_failed``, ``client_left`` and ``client_back`` events; a client that
            has left because its replies were refused is ``expelled``.

    Attributes:
        bytes_sent: Bytes of all arrays sent so far; a vector sent to three clients counts thrice.
        bytes_received: Bytes of all arrays in replies so far.
        bytes_dense: Bytes that whole states, unrounded, would have taken in both directions.
        properties: What each connected client said of itself, by client.
        statistics: By which all clients standardise a table; None where they are declared.
        sampling: Draws the clients that a round asks, in all of its exchanges; None asks all.
        wait: Called with seconds where there is nothing to do but wait for replies.
    """

    def __init__(
        self,
        *,
        num_clients: int,
        run: str = "run",
        quorum: float = 1.0,
        deadline_s: float = 3600.0,
        connect_s: float = 60.0,
        wire: str = "float32",
        fewest_records: float = 0.0,
        most_records: float = math.inf,
        largest_share: float = 1.0,
        secure_sum: bool = False,
        emit: Emit = ignore_events,
    ) -> None:
        """See the class."""
        self.run = run
        self.num_clients = num_clients
        self.quorum_share = quorum
        self.quorum = self.quorum_of(num_clients)
        self.deadline_s = deadline_s
        self.connect_s = connect_s
        self.wire = wire
        self.fewest_records, self.most_records = fewest_records, most_records
        self.largest_share = largest_share
        self.secure_sum = secure_sum
        self.emit = emit
        self.wait: Callable[[float], None] = time.sleep
        self.bytes_sent = 0
        self.bytes_received = 0
        self.bytes_dense = 0
        self.properties: dict[int, Mapping[str, Any]] = {}
        self.statistics: Statistics | None = None
        self.sampling: Sampling | None = None
        self._num_classes = 1
        self._grid: Grid | None = None
        self._nodes: dict[int, int] = {}  # client -> node id
        self._max_examples: dict[int, float] = {}  # client -> records it has
        self._left: dict[int, str] = {}  # clients that are asked no more: their reason
        self._refused: Counter[int] = Counter()  # client -> refused replies
        self._limited: set[int] = set()  # clients whose weight was once cut to the largest share
        self._missed: set[int] = set()  # clients without an accepted reply when last asked

    def connect(
        self,
        grid: Grid,
        *,
        needed: Sequence[str] = ("client",),
        alike: Sequence[str] = (),
        known: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Wait for the clients of ``grid`` and learn which node is which client.

        A node that says less than is needed, an index out of range, or the same one as another node
        is left out, and so is a client whose properties are not those of most or that declares far
        fewer or far more records.

        Args:
            grid: Flower's way to the clients.
            needed: What each must say of itself.
            alike: Which of that must be the same for all.
            known: What each client would say, ``splits`` among it, where the server has made them:
                then none is asked, and clients stand in the order of their nodes.

        Raises:
            QuorumError: Too few clients appeared, answered ``query.describe`` in time or fit.
        """
        if grid is self._grid and self.properties:
            return
        self._grid, self.properties, self._max_examples, self._left = grid, {}, {}, {}
        self._refused.clear()
        self._missed.clear()
        nodes = self._wait_for_nodes(grid)
        reasons = [] if len(nodes) == self.num_clients else [f"only {len(nodes)} nodes appeared"]
        if known is None:
            described = self._described(nodes, needed, reasons)
        else:
            described = [
                (index, nodes[index], properties, max(1, sum(properties["splits"].values())))
                for index, properties in known.items()
            ]
        owners: dict[int, list[int]] = {}
        properties: dict[int, Mapping[str, Any]] = {}
        max_examples: dict[int, float] = {}
        for index, node, said, examples in described:
            owners.setdefault(index, []).append(node)
            properties[index], max_examples[index] = said, examples
        for index, claimants in sorted(owners.items()):
            if len(claimants) > 1:
                del properties[index]
                reasons.append(
                    f"nodes {' and '.join(map(str, claimants))} say that they are the same client, "
                    f"{index}: give each its own partition-id"
                )
        properties = dict(sorted(properties.items()))
        for index, reason in misfits(properties, alike).items():
            del properties[index]
            reasons.append(f"client {index}: {_plain(reason)}")
        declared = {
            index: {"": max_examples[index]}
            | {f"{split} ": number for split, number in known.get("splits", {}).items()}
            for index, known in properties.items()
        }
        strange = outliers(declared, fewest=self.fewest_records, most=self.most_records)
        for index, reason in strange.items():
            del properties[index]
            reasons.append(f"client {index}: {reason}")
        for client in sorted(set(range(self.num_clients)) - set(properties)):
            self.tell_failure(client, CONNECT, "; ".join(reasons))
        if len(properties) < self.quorum:
            raise QuorumError(
                f"{'; '.join(reasons)} (query.describe: {len(properties)} of {self.num_clients} "
                f"clients answered, {self.quorum} are needed)"
            )
        self._refused.clear()  # they stood at provisional indices
        self._nodes = {index: owners[index][0] for index in properties}
        self.properties, self._max_examples = properties, max_examples
        named = [len(own.get("class_names", [])) for own in properties.values()]
        self._num_classes = max(1, int(median(named)))  # as most clients have it

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        """The nodes that have appeared, ascending.

        Raises:
            QuorumError: They are too few.
        """
        deadline = time.monotonic() + self.connect_s
        nodes = sorted(grid.get_node_ids())
        while len(nodes) < self.num_clients and time.monotonic() < deadline:
            time.sleep(POLL_S)
            nodes = sorted(grid.get_node_ids())
        if len(nodes) < self.quorum:
            raise QuorumError(
                f"{len(nodes)} of {self.num_clients} clients appeared within {self.connect_s:g} s; "
                f"{self.quorum} are needed. Start the missing ones, or lower runtime.quorum."
            )
        return nodes

    def _described(
        self, nodes: Sequence[int], needed: Sequence[str], reasons: list[str]
    ) -> list[tuple[int, int, Mapping[str, Any], float]]:
        """Index, node, properties and number of examples of each node that says who it is.

        Args:
            nodes: Asked.
            needed: What each must say of itself.
            reasons: Gets a sentence for each node that is left out.
        """
        self._nodes = dict(enumerate(nodes))  # provisional: the answers tell the real indices
        found = []
        for place, answer in self._exchange(CONNECT):
            try:
                if not isinstance(answer, Reply):
                    raise ReplyError(answer)
                check_properties(answer.properties, needed=needed)
            except ReplyError as error:
                reasons.append(f"node {nodes[place]}: {_plain(str(error))}")
                continue
            index = answer.properties["client"]
            if 0 <= index < self.num_clients:
                found.append((index, nodes[place], answer.properties, answer.num_examples))
                continue
            reasons.append(
                f"node {nodes[place]} says that it is client {index} of clients={self.num_clients}"
            )
        return found

    def quorum_of(self, asked: int) -> int:
        """Return how many of so many clients must answer."""
        return max(1, math.ceil(self.quorum_share * asked - 1e-9))

    @property
    def clients(self) -> list[int]:
        """Indices of the connected clients that have not left, ascending."""
        return [client for client in self._nodes if client not in self._left]

    @property
    def left(self) -> dict[int, str]:
        """Why each client that has left was not asked any more, by client, ascending."""
        return dict(sorted(self._left.items()))

    def part(self, clients: Sequence[int], *, run: str, emit: Emit) -> Cohort:
        """Return a cohort of its own to some of the connected clients, with their own quorum."""
        part = Cohort(
            run=run,
            num_clients=len(clients),
            quorum=self.quorum_share,
            deadline_s=self.deadline_s,
            connect_s=self.connect_s,
            wire=self.wire,
            largest_share=self.largest_share,
            secure_sum=self.secure_sum,
            emit=emit,
        )
        part._grid = self._grid
        part._nodes = {client: self._nodes[client] for client in clients}
        part.statistics, part._num_classes = self.statistics, self._num_classes
        part._refused = self._refused
        part._left = {client: why for client, why in self._left.items() if client in clients}
        part._max_examples = {client: self._max_examples[client] for client in clients}
        part.properties = {client: self.properties[client] for client in clients}
        return part

    def expel(self, client: int, reason: str, exchange: Exchange | None = None) -> None:
        """Ask a client nothing more in this run, as after its last refused reply."""
        self._refused[client] = STRIKES
        self.dismiss(client, reason, exchange)

    def dismiss(self, client: int, reason: str, exchange: Exchange | None = None) -> None:
        """Ask a client no more in this run; emit that it has left at an exchange, if it has."""
        self._left[client] = reason
        if exchange is not None:
            more = {"expelled": True} if self._refused[client] >= STRIKES else {}
            self._tell("client_left", client, exchange, reason=reason, **more)

    def ask(self, exchange: Exchange) -> Iterator[tuple[int, Reply]]:
        """Send one request to every participant and yield ``(client, reply)`` in client order.

        A reply is kept only until those of all earlier clients are there, so that a consumer who
        reduces as it goes needs the memory of few replies. Of a secure sum one reply is yielded,
        the total's, under the name :data:`TOTAL`.

        Raises:
            QuorumError: After the last reply, when fewer than the quorum were accepted.
        """
        among, participants = exchange.among, exchange.participants
        accepted = 0 if among is None else len(set(self.clients) - set(among))
        wanted, backups, asked = self.num_clients, list[int](), among
        if participants is not None:
            wanted, asked = len(participants.clients), participants.clients
            backups = list(participants.backups)
        failures: dict[int, str] = {}
        pending = None
        if self.secure_sum and exchange.is_summed:
            present = [client for client in self.clients if self._refused[client] < STRIKES]
            pending = PendingSum.of(exchange, present, self.properties)
        while asked is None or asked:
            for client, answer in self._exchange(exchange, asked, pending):
                if isinstance(answer, Reply):
                    accepted += 1
                    self.tell_back(client, exchange)
                    if pending is None:
                        yield client, answer
                else:
                    failures[client] = answer
                    self.tell_failure(client, exchange, answer)
            short = max(0, wanted - accepted)
            asked, backups = backups[:short], backups[short:]
        if accepted < (quorum := self.quorum_of(wanted)):
            may = self.left if participants is None else participants.candidates
            failures = {c: why for c, why in self.left.items() if c in may} | failures
            first, *others = [f"client {c}: {why}" for c, why in sorted(failures.items())]
            raise QuorumError(
                f"{first} ({exchange}: {accepted} of {wanted} "
                f"clients answered, {quorum} are needed{'; '.join(['', *others])})"
            )
        if pending is not None:
            yield TOTAL, self._open_sum(pending, exchange)

    def _open_sum(self, pending: PendingSum, exchange: Exchange) -> Reply:
        """Have the survivors sign their list, then open their masks; the total's reply.

        Raises:
            QuorumError: One of them did not sign, too few have opened, or the total is none of
                honest replies.
        """
        survivors = pending.survivors
        sum_step = partial(
            Exchange,
            stage=exchange.stage,
            server_round=exchange.server_round,
            phase=exchange.phase,
            among=survivors,
        )
        failed = f"the secure sum of {exchange.action} in round {exchange.server_round} has failed"
        sign = sum_step("query.sign_survivors", settings=pending.sign_request())
        signed = self._gather(sign, needed=("signature",))
        missing = sorted(set(survivors) - set(signed))
        if missing:
            raise QuorumError(
                f"{failed}: clients {missing} "
                "have answered, but not signed the list of survivors, so that no mask may be "
                "opened; continue the run with resume=<run folder>."
            )
        signatures = {client: properties["signature"] for client, properties in signed.items()}
        own = pending.open_requests(signatures)
        openings = sum_step("query.open_masks", settings=next(iter(own.values())), own_settings=own)
        opened = self._gather(openings, needed=("parts", "pairs"))
        try:
            return pending.unmask(opened)
        except (LookupError, ValueError) as error:
            raise QuorumError(
                f"{failed}, with {len(opened)} of {len(survivors)} survivors' openings: {error}"
            ) from error

    def _gather(self, exchange: Exchange, *, needed: Sequence[str]) -> dict[int, Mapping[str, Any]]:
        """The properties of all clients that answer a secure sum's message well."""
        found = {}
        for client, answer in self._exchange(exchange, exchange.among):
            if isinstance(answer, Reply):
                try:
                    check_properties(answer.properties, needed=needed)
                    found[client] = answer.properties
                    continue
                except ReplyError as error:
                    answer = self._strike(client, _plain(str(error)))
            self.tell_failure(client, exchange, answer)
        return found

    def _exchange(
        self,
        exchange: Exchange,
        among: Collection[int] | None = None,
        pending: PendingSum | None = None,
    ) -> Iterator[tuple[int, Reply | str]]:
        """Ask; yield each client with its accepted reply or why it has none.

        Args:
            exchange: What is asked.
            among: Which clients; None asks all.
            pending: The secure sum to which replies are added.
        """
        if self._grid is None:
            raise ValueError("call connect(grid) before ask")
        requests = self._requests(exchange, among, None if pending is None else pending.summands)
        sent = set(self._grid.push_messages(list(requests.messages.values())))
        ids = {client: m.metadata.message_id for client, m in requests.messages.items()}
        awaited = {i: client for client, i in ids.items() if i in sent}
        unsent = {c: "the request could not be sent" for c, i in ids.items() if i not in sent}
        scales = self._share_scales(requests.most)
        for client, answer in self._in_order(self._grid, awaited, unsent, requests.accepts):
            if isinstance(answer, Reply):
                self.bytes_dense += exchange.dense_reply
                scale, weight = scales.get(client), exchange.weights.get(client)
                answer = weighed(answer, exchange.action, scale=scale, weight=weight)
                if pending is not None:
                    try:
                        pending.add(client, answer)
                    except ReplyError as error:
                        answer = self._strike(client, _plain(str(error)))
            yield client, answer

    def pause(self, waited_s: float) -> float:
        """Wait before replies are looked for again; return for how long, in seconds.

        Args:
            waited_s: How long no reply has come.
        """
        seconds = min(max(POLL_S, POLL_SHARE * waited_s), LONGEST_POLL_S)
        self.wait(seconds)
        return seconds

    def _share_scales(self, most: Mapping[int, float]) -> dict[int, float]:
        """Factors that keep weights to ``largest_share`` of an average; a client is named once."""
        if not self.properties or self.secure_sum:
            return {}
        scales = share_scales(most, self.largest_share)
        for client in scales.keys() - self._limited:
            message = (
                f"client {client} may weigh {most[client]:g} of {sum(most.values()):g} examples: "
                f"it is held to {self.largest_share:g} of an average (runtime.largest_share)"
            )
            self.emit("warning", message=message)
            self._limited.add(client)
        return scales

    def _requests(
        self, exchange: Exchange, among: Collection[int] | None, summands: Summands | None
    ) -> Requests:
        """The messages of an exchange, and what reads their replies."""
        messages: dict[int, Message] = {}
        accepts: dict[int, Callable[[Message], Reply]] = {}
        most: dict[int, float] = {}
        carried = exchange.carried(self.wire)
        records = encode_states(carried)
        accept = exchange.reader(self.wire, summands)
        limits = exchange.limits(carried, num_classes=self._num_classes)
        summed = None if summands is None else summands.summed
        for client in self._nodes if among is None else sorted(self._nodes.keys() & set(among)):
            has_left = client in self._left and not exchange.also_left
            if self._refused[client] >= STRIKES or has_left:
                continue
            place = (exchange.stage, exchange.server_round, exchange.phase)
            header = Header(self.run, *place, client, secrets.token_hex(8))
            settings = exchange.own_settings.get(client, exchange.settings)
            content = encode_request(
                header, settings, records, statistics=self.statistics, summed=summed
            )
            self.bytes_sent += payload_bytes(content)
            self.bytes_dense += exchange.dense_request
            own_limits = limits(
                settings,
                examples=self._max_examples.get(client, MAX_EXAMPLES),
                records=self.properties.get(client, {}).get("splits", {}),
            )
            most[client] = exchange.weights.get(client, own_limits.examples)
            accepts[client] = partial(accept, header=header, limits=own_limits)
            node = self._nodes[client]
            messages[client] = Message(content, node, exchange.action, ttl=self.deadline_s + 60)
        return Requests(messages, accepts, most)

    def tell_back(self, client: int, exchange: Exchange) -> None:
        """Emit that a client has answered again that did not before."""
        if client in self._missed:
            self._missed.remove(client)
            self._tell("client_back", client, exchange)

    def tell_failure(self, client: int, exchange: Exchange, reason: str) -> None:
        """Emit that a client gave no accepted reply, and whether it has left."""
        event = "client_left" if client in self._left else "client_failed"
        more = {"expelled": True} if self._refused[client] >= STRIKES else {}
        self._missed.add(client)
        self._tell(event, client, exchange, reason=reason, **more)

    def _tell(self, event: str, client: int, exchange: Exchange, **fields: object) -> None:
        self.emit(
            event,
            stage=exchange.stage,
            round=exchange.server_round,
            action=exchange.action,
            client=client,
            **fields,
        )

    def _in_order(
        self,
        grid: Grid,
        pending: dict[str, int],
        arrived: Mapping[int, Reply | str],
        accepts: Mapping[int, Callable[[Message], Reply]],
    ) -> Iterator[tuple[int, Reply | str]]:
        """Yield every client of ``accepts`` with its accepted reply or the reason it has none."""
        deadline = time.monotonic() + self.deadline_s
        answers, waited_s = dict(arrived), 0.0
        for client in accepts:
            while client not in answers:
                late = time.monotonic() >= deadline
                messages = list(grid.pull_messages(list(pending)))
                for message in messages:
                    sender = pending.pop(message.metadata.reply_to_message_id, None)
                    if sender is not None:
                        answers[sender] = self._read(message, sender, accepts[sender])
                if late:
                    reason = f"no reply within {self.deadline_s:g} s"
                    answers |= dict.fromkeys(pending.values(), reason)
                    pending.clear()
                elif messages:
                    waited_s = 0.0
                else:
                    waited_s += self.pause(waited_s)
            yield client, answers.pop(client)

    def _read(
        self, message: Message, client: int, accept: Callable[[Message], Reply]
    ) -> Reply | str:
        """The reply if it is accepted, else the reason."""
        if message.has_content():
            self.bytes_received += payload_bytes(message.content)
        try:
            return accept(message)
        except ClientLeftError as error:
            self._left[client] = _plain(str(error))
            return self._left[client]
        except ReplyError as error:
            reason = _plain(str(error))
            return self._strike(client, reason) if message.has_content() else reason

    def _strike(self, client: int, reason: str) -> str:
        """Count a refused reply and return the reason; with the last one the client has left."""
        self._refused[client] += 1
        if self._refused[client] < STRIKES:
            return reason
        self._left[client] = f"{STRIKES} of its replies were refused, the last one for: {reason}"
        return self._left[client]


def _plain(text: str) -> str:
    """Return a client's words cut short and without characters that command a terminal."""
    text = text[:LONGEST_REASON]
    return "".join(c if c.isprintable() else " " for c in text)
