"""The server's cohort of clients, which asks over any Flower Grid and yields accepted replies.

Every wait ends at the last reply or at the deadline. A client that fails, is late or sends a reply
that the checks refuse is dropped for this exchange and named. A client whose privacy budget has
ended, or whose replies were refused three times, is not asked again. Fewer replies than the quorum
end the run. With secure sums masked replies are added up, and only their total is yielded.
"""

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from fednas_flwr.base.errors import ClientLeftError, ReplyError
from fednas_flwr.base.foreign import terminal
from fednas_flwr.data.statistics import Statistics
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.protocol import messages
from fednas_flwr.protocol.messages import Header, Reply
from fednas_flwr.protocol.requests import MAX_EXAMPLES, Describe, ExactClientProperties
from fednas_flwr.protocol.sum_encoding import Summands
from fednas_flwr.server import reply_checks as checks
from fednas_flwr.server.exchange import Exchange, Participants, Sampling, Sent, share_scales
from fednas_flwr.server.secure_sums import PendingSum

POLL_S, LONGEST_POLL_S = 0.05, 1.0
POLL_SHARE = 0.05  # a pause, as a share of the time since the last reply
STRIKES = 3  # number of refused replies after which a client is not asked again
TOTAL = -1  # stands for a client: the reply is the total of all
LONGEST_REASON = 500  # characters that are kept of a client's own text
CONNECT = Exchange("query.describe", "connect", Describe())


class Emit(Protocol):
    """Sink of events: a name and JSON fields."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Record one event."""


def ignore_events(event: str, **fields: Any) -> None:
    """Drop the event: for use without a run folder."""


class QuorumError(RuntimeError):
    """Too few clients answered an exchange; the message names each missing one and its reason."""


@dataclass(eq=False, kw_only=True)
class Cohort:
    """The clients of one run, as seen by the server.

    Args:
        run: Name of the run; replies for another run are refused.
        num_clients: Number of clients, whose indices are 0 to ``num_clients - 1``.
        quorum_share: Share of the clients, in (0, 1], that must answer every exchange.
        deadline_s: Seconds within which the replies of an exchange must arrive.
        connect_s: Seconds within which the clients must appear.
        wire: Format of float32 vectors, see :mod:`fednas_flwr.protocol.messages`.
        fewest_records: Share of the median client's number of records that a client must declare at
            least.
        most_records: Multiple of that number that a client may declare at most.
        largest_share: Largest share, in (0, 1], that one of three or more clients may have in an
            average.
        secure_sum: True if clients send what depends on records only as part of secure sums.
        emit: Receives ``client_failed``, ``client_left`` and ``client_back`` events; a client that
            left because its replies were refused is ``expelled``.
        wait: Called with a number of seconds when there is nothing to do but wait for replies.

    Attributes:
        bytes_sent: Bytes of all arrays sent so far; a vector sent to three clients counts three
            times.
        bytes_received: Bytes of all arrays in replies so far.
        seconds: The time that each client took for its replies; for real sites it includes the
            network.
        properties: Properties of each connected client, by client.
        declared: Numbers of records by split that each client had when the run began, by client. A
            resumed run has the same numbers, regardless of who is connected now.
        names: The names by which people know clients, for clients that have one.
        statistics: Statistics by which all clients standardise a table; None if they use declared
            ones.
        predicts_numbers: True if closeness takes the place of accuracy.
        sampling: Draws the clients that a round asks in all of its exchanges; None asks all.
    """

    num_clients: int
    run: str = "run"
    quorum_share: float = 1.0
    deadline_s: float = 3600.0
    connect_s: float = 60.0
    wire: str = "float32"
    fewest_records: float = 0.0
    most_records: float = math.inf
    largest_share: float = 1.0
    secure_sum: bool = False
    emit: Emit = ignore_events
    wait: Callable[[float], None] = time.sleep
    bytes_sent: int = field(default=0, init=False)
    bytes_received: int = field(default=0, init=False)
    seconds: Counter[int] = field(default_factory=Counter, init=False)
    properties: dict[int, ExactClientProperties] = field(default_factory=dict, init=False)
    declared: dict[int, Mapping[str, int]] = field(default_factory=dict, init=False)
    names: Mapping[int, str] = field(default_factory=dict)
    statistics: Statistics | None = None
    predicts_numbers: bool = False
    sampling: Sampling | None = field(default=None, init=False)
    _grid: Grid | None = field(default=None, init=False)
    _nodes: dict[int, int] = field(default_factory=dict, init=False)  # client -> node id
    _max_examples: dict[int, float] = field(default_factory=dict, init=False)  # declared records
    _left: dict[int, str] = field(default_factory=dict, init=False)  # why they are asked no more
    _refused: Counter[int] = field(default_factory=Counter, init=False)  # refused replies
    _limited: set[int] = field(default_factory=set, init=False)  # whose share was limited once
    _missed: set[int] = field(default_factory=set, init=False)  # without a reply when last asked

    def participants(self, stage: str, server_round: int) -> Participants | None:
        """The clients of a stage's round, from 1; None if it asks all."""
        sampling = self.sampling
        return None if sampling is None else sampling.participants(stage, server_round)

    def connect(
        self,
        grid: Grid,
        *,
        needed: Sequence[str] = ("client",),
        alike: Sequence[str] = (),
        known: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Wait for the clients of ``grid`` and learn which node is which client.

        A node is left out if it lacks a needed property, or if its index is out of range or that of
        another node. A client is left out if its properties differ from those of most clients, or
        if it declares far fewer or far more records.

        Args:
            grid: Flower's connection to the clients.
            needed: Names of properties that each client must declare.
            alike: Names of properties that must be the same for all.
            known: Properties of each client, including ``splits``, if the server has made them.
                Then no client is asked, and clients are in the order of their nodes.

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
            described = {
                nodes[index]: Reply(max(1, sum(of["splits"].values())), properties=of)
                for index, of in known.items()
            }
        owners: dict[int, list[int]] = {}
        for node, reply in described.items():
            owners.setdefault(reply.properties["client"], []).append(node)
        for index, claimants in sorted(owners.items()):
            if len(claimants) > 1:
                reasons.append(
                    f"nodes {' and '.join(map(str, claimants))} say that they are the same client, "
                    f"{index}: give each its own partition-id"
                )
        fit = {index: described[of[0]] for index, of in sorted(owners.items()) if len(of) == 1}
        of_nodes, of_clients = "; ".join(reasons), dict[int, str]()

        def leave_out(unfit: Mapping[int, str]) -> None:
            self.names = {i: fit[i].properties.get("tag", "") for i in unfit}
            for index, reason in unfit.items():
                del fit[index]
                of_clients[index] = f"{self.named(index)}: {terminal(reason[:LONGEST_REASON])}"
                reasons.append(of_clients[index])

        leave_out(checks.misfits({index: reply.properties for index, reply in fit.items()}, alike))
        declared: dict[int, dict[str, float]] = {}
        for index, reply in fit.items():
            splits = reply.properties.get("splits", {})
            declared[index] = {"": reply.num_examples, **{f"{s} ": n for s, n in splits.items()}}
        leave_out(checks.outliers(declared, fewest=self.fewest_records, most=self.most_records))
        for client in sorted(set(range(self.num_clients)) - set(fit)):
            self._report_failure(client, CONNECT, of_clients.get(client, of_nodes))
        if len(fit) < self.quorum:
            raise QuorumError(
                f"{'; '.join(reasons)} (query.describe: {len(fit)} of {self.num_clients} "
                f"clients answered, {self.quorum} are needed)"
            )
        self._refused.clear()  # they were counted at provisional indices
        self._nodes = {index: owners[index][0] for index in fit}
        self.properties = {index: reply.properties for index, reply in fit.items()}
        self.declared = {i: known.get("splits", {}) for i, known in self.properties.items()}
        self._max_examples = {index: reply.num_examples for index, reply in fit.items()}

    def _wait_for_nodes(self, grid: Grid) -> list[int]:
        """The nodes that have appeared, ascending.

        Raises:
            QuorumError: There are too few.
        """
        deadline = time.monotonic() + self.connect_s
        while len(nodes := sorted(grid.get_node_ids())) < self.num_clients:
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        if len(nodes) < self.quorum:
            raise QuorumError(
                f"{len(nodes)} of {self.num_clients} clients appeared within {self.connect_s:g} s; "
                f"{self.quorum} are needed. Start the missing ones, or lower runtime.quorum."
            )
        return nodes

    def _described(
        self, nodes: Sequence[int], needed: Sequence[str], reasons: list[str]
    ) -> dict[int, Reply]:
        """The reply of each node that says which client it is.

        Args:
            nodes: The nodes to ask.
            needed: Names of properties that each client must declare.
            reasons: Receives a sentence for each node that is left out.
        """
        self._nodes = dict(enumerate(nodes))  # provisional: the answers have the real indices
        replies = {}
        for place, answer in self._exchange(CONNECT):
            node = nodes[place]
            if isinstance(answer, str):
                reasons.append(f"node {node}: {answer}")
            elif silent := [name for name in needed if name not in answer.properties]:
                reasons.append(f"node {node}: does not say its {silent[0]}")
            elif 0 <= (index := answer.properties["client"]) < self.num_clients:
                replies[node] = answer
            else:
                reasons.append(
                    f"node {node} says that it is client {index} of clients={self.num_clients}"
                )
        return replies

    @property
    def quorum(self) -> int:
        """Number of clients that must answer an exchange with all clients."""
        return self.quorum_of(self.num_clients)

    def quorum_of(self, asked: int) -> int:
        """The number of clients that must answer if ``asked`` clients are asked."""
        return max(1, math.ceil(self.quorum_share * asked - 1e-9))

    @property
    def clients(self) -> list[int]:
        """Indices of the connected clients that have not left, ascending."""
        return [client for client in self._nodes if client not in self._left]

    @property
    def left(self) -> dict[int, str]:
        """The reason for each client that has left, by client, ascending."""
        return dict(sorted(self._left.items()))

    def named(self, client: int) -> str:
        """A client's number, with its name if it has one."""
        name = self.names.get(client)
        return f"client {client} ({name})" if name else f"client {client}"

    def part(self, clients: Sequence[int], *, run: str, emit: Emit) -> "Cohort":
        """Make a cohort of some clients, with their own quorum and counts.

        Clients that are not connected, for instance after a resume, have left it.
        """
        part = replace(self, run=run, num_clients=len(clients), emit=emit, wait=time.sleep)
        part._grid, part._refused = self._grid, self._refused
        part._left = {client: why for client, why in self._left.items() if client in clients}
        part._left |= dict.fromkeys(set(clients) - set(self._nodes), "it is not connected")
        part.declared = {c: known for c, known in self.declared.items() if c in clients}
        clients = [client for client in clients if client in self._nodes]
        part._nodes = {client: self._nodes[client] for client in clients}
        part._max_examples = {client: self._max_examples[client] for client in clients}
        part.properties = {client: self.properties[client] for client in clients}
        return part

    def dismiss(
        self, client: int, reason: str, exchange: Exchange | None = None, *, expelled: bool = False
    ) -> None:
        """Stop asking a client in this run.

        Args:
            client: The client.
            reason: The reason.
            exchange: The exchange at which it left, for the event; None emits no event.
            expelled: True if the client is asked nothing at all any more, as after its last refused
                reply.
        """
        self._left[client] = reason
        if expelled:
            self._refused[client] = STRIKES
        if exchange is not None:
            self._report_unanswered(client, exchange, reason)

    def ask(self, exchange: Exchange) -> Iterator[tuple[int, Reply]]:
        """Send one request to every participant and yield ``(client, reply)`` in client order.

        A reply is kept only until those of all earlier clients have arrived, so that a consumer
        that reduces them one by one needs the memory of few replies. For a secure sum one reply is
        yielded, that of the total, with :data:`TOTAL` as its client.

        Raises:
            QuorumError: After the last reply, if fewer replies than the quorum were accepted.
        """
        among, participants = exchange.among, exchange.participants
        accepted = 0 if among is None else len(set(self.clients) - set(among))
        wanted, backups, asked = self.num_clients, list[int](), among
        if participants is not None:
            wanted, asked = len(participants.clients), participants.clients
            backups = list(participants.backups)
        failures: dict[int, str] = {}
        most: dict[int, float] = {}  # examples of clients whose replies may be averaged
        pending = None
        if self.secure_sum and not ACTIONS[exchange.action].is_public:
            present = [client for client in self.clients if self._refused[client] < STRIKES]
            pending = PendingSum.of(exchange, present, self.properties)
        while asked is None or asked:
            for client, answer in self._exchange(exchange, asked, pending, most):
                if isinstance(answer, Reply):
                    accepted += 1
                    if client in self._missed:
                        self._missed.remove(client)
                        self._report("client_back", client, exchange)
                    if pending is None:
                        yield client, answer
                else:
                    failures[client] = answer
                    most.pop(client, None)
                    self._report_failure(client, exchange, answer)
            short = max(0, wanted - accepted)
            asked, backups = backups[:short], backups[short:]
        if accepted < (quorum := self.quorum_of(wanted)):
            may = self.left if participants is None else participants.candidates
            failures = {c: why for c, why in self.left.items() if c in may} | failures
            first, *others = [f"{self.named(c)}: {why}" for c, why in sorted(failures.items())]
            raise QuorumError(
                f"{first} ({exchange}: {accepted} of {wanted} "
                f"clients answered, {quorum} are needed{'; '.join(['', *others])})"
            )
        if pending is not None:
            yield TOTAL, self._open_sum(pending, exchange)

    def _open_sum(self, pending: PendingSum, exchange: Exchange) -> Reply:
        """Have the survivors sign their list, then open their masks; return the total's reply.

        Raises:
            QuorumError: A survivor did not sign, too few opened their masks, or the total cannot
                come from honest replies.
        """
        survivors = pending.total.survivors
        sum_step = partial(
            Exchange,
            stage=exchange.stage,
            server_round=exchange.server_round,
            phase=exchange.phase,
            among=survivors,
        )
        failed = f"the secure sum of {exchange.action} in round {exchange.server_round} has failed"
        signed = self._gather(sum_step("query.sign_survivors", settings=pending.sign_request()))
        missing = sorted(set(survivors) - set(signed))
        if missing:
            raise QuorumError(
                f"{failed}: some have answered, but not signed the list of survivors "
                f"({', '.join(map(self.named, missing))}), so that no mask may be opened; continue "
                "the run with resume=<run folder>."
            )
        signatures = {client: properties["signature"] for client, properties in signed.items()}
        requests = pending.open_requests(signatures)
        one = next(iter(requests.values()))
        opened = self._gather(sum_step("query.open_masks", settings=one, settings_of=requests))
        try:
            return pending.unmask(opened)
        except (LookupError, ValueError) as error:
            raise QuorumError(
                f"{failed}, with {len(opened)} of {len(survivors)} survivors' openings: {error}"
            ) from error

    def _gather(self, exchange: Exchange) -> dict[int, Mapping[str, Any]]:
        """The properties of all clients that answer a secure sum's message correctly."""
        properties = {}
        for client, answer in self._exchange(exchange, exchange.among):
            if isinstance(answer, Reply):
                properties[client] = answer.properties
            else:
                self._report_failure(client, exchange, answer)
        return properties

    def _exchange(
        self,
        exchange: Exchange,
        among: Collection[int] | None = None,
        pending: PendingSum | None = None,
        most: dict[int, float] | None = None,
    ) -> Iterator[tuple[int, Reply | str]]:
        """Ask; yield each client with its accepted reply or the reason why it has none.

        Args:
            exchange: The exchange.
            among: Clients to ask; None asks all.
            pending: The secure sum to which replies are added.
            most: Most examples of each client that has already answered the same request; the
                clients that are asked now are added.
        """
        assert self._grid is not None  # set by connect
        asked = self._requests(exchange, among, None if pending is None else pending.summands)
        sent = set(self._grid.push_messages([request.message for request in asked.values()]))
        ids = {client: request.message.metadata.message_id for client, request in asked.items()}
        awaited = {i: client for client, i in ids.items() if i in sent}
        unsent = {c: "the request could not be sent" for c, i in ids.items() if i not in sent}
        most = {} if most is None else most
        most |= {client: request.most for client, request in asked.items()}
        scales = self._share_scales(most)
        for client, answer in self._in_order(self._grid, awaited, unsent, asked):
            if isinstance(answer, Reply):
                if client in scales:
                    summed = ACTIONS[exchange.action].gradients_of
                    answer = answer.weighing(scales[client], summed=summed)
                if pending is not None:
                    try:
                        pending.add(client, answer)
                    except ReplyError as error:
                        answer = terminal(str(error)[:LONGEST_REASON])
            yield client, answer

    def pause(self, waited_s: float) -> float:
        """Wait before looking for replies again; return the seconds waited.

        Args:
            waited_s: Time since the last reply.
        """
        seconds = min(max(POLL_S, POLL_SHARE * waited_s), LONGEST_POLL_S)
        self.wait(seconds)
        return seconds

    def _share_scales(self, most: Mapping[int, float]) -> dict[int, float]:
        """Factors that keep weights within ``largest_share`` of an average; names a client once."""
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
    ) -> dict[int, Sent]:
        """The messages of an exchange by client, with the functions that read the replies."""
        requests: dict[int, Sent] = {}
        carried = messages.round_sent(exchange.states, action=exchange.action, wire=self.wire)
        records = messages.encode_states(carried)
        accept = partial(checks.accept_reply, exchange=exchange, wire=self.wire, summands=summands)
        restored = messages.restore_sent(carried)
        sent = {name: checks.distance(state, {}) for name, state in restored.items()}
        limits = partial(checks.honest_limits, exchange, sent=sent)
        summed = None if summands is None else summands.summed
        for client in self._nodes if among is None else sorted(self._nodes.keys() & set(among)):
            has_left = client in self._left and not exchange.also_left
            if has_left or self._refused[client] >= STRIKES:
                continue
            place = (exchange.stage, exchange.server_round, exchange.phase)
            header = Header(self.run, *place, client, secrets.token_hex(8))
            settings = exchange.settings_of.get(client, exchange.settings)
            content = messages.encode_request(
                header, settings, records, statistics=self.statistics, summed=summed
            )
            self.bytes_sent += messages.payload_bytes(content)
            said = self.properties.get(client)
            client_limits = limits(
                settings,
                examples=self._max_examples.get(client, MAX_EXAMPLES),
                records={} if said is None else said.get("splits", {}),
            )
            node, ttl = self._nodes[client], self.deadline_s + 60
            requests[client] = Sent(
                Message(content, node, exchange.action, ttl=ttl),
                partial(accept, header=header, limits=client_limits),
                client_limits.examples,
            )
        return requests

    def _report_failure(self, client: int, exchange: Exchange, reason: str) -> None:
        """Emit that a client gave no accepted reply, and record it."""
        self._missed.add(client)
        self._report_unanswered(client, exchange, reason)

    def _report_unanswered(self, client: int, exchange: Exchange, reason: str) -> None:
        """Emit that a client gave no accepted reply, and whether it has left."""
        event = "client_left" if client in self._left else "client_failed"
        more = {"expelled": True} if self._refused[client] >= STRIKES else {}
        self._report(event, client, exchange, reason=reason, **more)

    def _report(self, event: str, client: int, exchange: Exchange, **fields: object) -> None:
        place = {"stage": exchange.stage, "round": exchange.server_round}
        self.emit(event, **place, action=exchange.action, client=client, **fields)

    def _in_order(
        self,
        grid: Grid,
        pending: dict[str, int],
        arrived: Mapping[int, Reply | str],
        asked: Mapping[int, Sent],
    ) -> Iterator[tuple[int, Reply | str]]:
        """Yield every client of ``asked`` with its accepted reply or the reason why it has none."""
        started = time.monotonic()
        deadline, timed = started + self.deadline_s, getattr(grid, "seconds", {})
        answers, waited_s = dict(arrived), 0.0
        for client in asked:
            while client not in answers:
                late = time.monotonic() >= deadline
                messages = list(grid.pull_messages(list(pending)))
                for message in messages:
                    sender = pending.pop(replied := message.metadata.reply_to_message_id, None)
                    used = timed.pop(replied, time.monotonic() - started)
                    if sender is not None:
                        self.seconds[sender] += used
                        answers[sender] = self._read(message, sender, asked[sender])
                if late:
                    reason = f"no reply within {self.deadline_s:g} s"
                    answers |= dict.fromkeys(pending.values(), reason)
                    if forget := getattr(grid, "forget", None):  # Flower's grids lack it
                        forget(pending)
                    pending.clear()
                elif messages:
                    waited_s = 0.0
                else:
                    waited_s += self.pause(waited_s)
            yield client, answers.pop(client)

    def _read(self, message: Message, client: int, sent: Sent) -> Reply | str:
        """The reply if it is accepted, else the reason for its refusal."""
        if message.has_content():
            self.bytes_received += messages.payload_bytes(message.content)
        try:
            return sent.accept(message)
        except ClientLeftError as error:
            self._left[client] = terminal(str(error)[:LONGEST_REASON])
            return self._left[client]
        except ReplyError as error:
            reason = terminal(str(error)[:LONGEST_REASON])
            return self._strike(client, reason) if message.has_content() else reason

    def _strike(self, client: int, reason: str) -> str:
        """Count a refused reply and return the reason; after the last one the client has left."""
        self._refused[client] += 1
        if self._refused[client] < STRIKES:
            return reason
        self._left[client] = f"{STRIKES} of its replies were refused, the last one for: {reason}"
        return self._left[client]
