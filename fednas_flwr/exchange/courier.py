"""Ask clients over any Flower Grid and yield their accepted replies, in client order.

Every wait ends: at the last reply or at the deadline. A client that errs, is late or sends what
the gate refuses is dropped for this exchange and named; one whose privacy budget has ended, or
whose replies the gate has refused three times, is not asked again. Fewer replies than the quorum
end the run. With secure sums replies are added up masked, and only their total is yielded.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, Protocol

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fednas_flwr.data.statistics import Statistics
from fednas_flwr.errors import ClientLeftError, ReplyError
from fednas_flwr.exchange.gate import (
    MAX_EXAMPLES,
    accept_reply,
    check_facts,
    held_shares,
    misfits,
    outliers,
)
from fednas_flwr.exchange.limits import Limits, honest_limits, norm
from fednas_flwr.exchange.messages import (
    Header,
    Reply,
    encode_request,
    encode_states,
    payload_bytes,
)
from fednas_flwr.exchange.requests import Describe, Search, Settings
from fednas_flwr.exchange.sampling import Sampling, Turn
from fednas_flwr.exchange.secure_sum.server import MaskedSum
from fednas_flwr.exchange.secure_sum.site import Opening
from fednas_flwr.exchange.states import Layout, Packed
from fednas_flwr.exchange.sum_requests import OpenMasks, SignSurvivors, Summed, by_index
from fednas_flwr.exchange.summands import MASKED, Summands
from fednas_flwr.exchange.wire import restore_sent, round_sent
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.verbs import VERBS

POLL_S, LONGEST_POLL_S = 0.05, 1.0
POLL_SHARE = 0.05  # of the time since the last reply
STRIKES = 3  # replies of a client that are refused before it is asked no more
TOTAL = -1  # in place of a client: the reply is the total of all
LONGEST_REASON = 500  # characters of a client's own words that are kept


class Emit(Protocol):
    """Sink of events: a name and JSON fields."""

    def __call__(self, event: str, **fields: Any) -> None:
        """Record one event."""


def ignore_events(event: str, **fields: Any) -> None:
    """Drop the event: for use without a run folder."""


class QuorumError(RuntimeError):
    """Too few clients answered an exchange; the message names each missing one and its reason."""


@dataclass(frozen=True)
class Requests:
    """The messages of an exchange, by client.

    Attributes:
        messages: To be sent.
        accepts: Reads the client's reply.
        most: Examples that it may have, or what it counts for in their place.
        weights: What it counts for in an average in place of its examples, where that is planned.
        verb: What is asked.
        dense_reply: Bytes of a reply of whole states that nobody has rounded.
    """

    messages: Mapping[int, Message]
    accepts: Mapping[int, Callable[[Message], Reply]]
    most: Mapping[int, float]
    weights: Mapping[int, float]
    verb: str
    dense_reply: int


@dataclass
class _PendingSum:
    """A secure sum that is under way.

    Attributes:
        summands: What is summed.
        total: Of the masked vectors.
        context: As its first client has told it.
        boxes: By client, the sealed parts that it has made for the others.
    """

    summands: Summands
    total: MaskedSum
    context: str = ""
    boxes: dict[int, Mapping[str, str]] = field(default_factory=dict)

    def add(self, client: int, reply: Reply) -> None:
        """Add a masked reply.

        Raises:
            ReplyError: The client was asked, or says that it was asked, something else.
        """
        check_facts(reply.facts, needed=("context", "boxes"))
        self.context = self.context or reply.facts["context"]
        if reply.facts["context"] != self.context:
            raise ReplyError("it has answered another request than the clients before it")
        self.boxes[client] = reply.facts["boxes"]
        vectors = reply.states[MASKED]
        self.total.add(client, [vectors[d].numpy() for d in self.summands.lengths])


class Courier:
    """The clients of one run as the server sees them.

    Args:
        run: Name of the run; replies to another run are refused.
        num_clients: Number of clients, whose indices are 0 to ``num_clients - 1``.
        quorum: Share of the clients, in (0, 1], that must answer every exchange.
        deadline_s: Seconds until the replies of an exchange must be there.
        connect_s: Seconds until the clients must have appeared.
        wire: What float32 vectors travel as, see :mod:`fednas_flwr.exchange.wire`.
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
        facts: What each connected client said of itself, by client.
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
        self.facts: dict[int, Mapping[str, Any]] = {}
        self.statistics: Statistics | None = None
        self.sampling: Sampling | None = None
        self._num_classes = 1
        self._grid: Grid | None = None
        self._nodes: dict[int, int] = {}  # client -> node id
        self._max_examples: dict[int, float] = {}  # client -> records it has
        self._left: dict[int, str] = {}  # clients that are asked no more: their reason
        self._refused: Counter[int] = Counter()  # client -> replies that the gate has refused
        self._held: set[int] = set()  # clients whose weight was once held to the largest share
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
        is left out, and so is a client whose facts are not those of most or that declares far fewer
        or far more records.

        Args:
            grid: Flower's way to the clients.
            needed: What each must say of itself.
            alike: Which of that must be the same for all.
            known: What each client would say, ``splits`` among it, where the server has made them:
                then none is asked, and clients stand in the order of their nodes.

        Raises:
            QuorumError: Too few clients appeared, answered ``query.describe`` in time or fit.
        """
        if grid is self._grid and self.facts:
            return
        self._grid, self.facts, self._max_examples, self._left = grid, {}, {}, {}
        self._refused.clear()
        self._missed.clear()
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
        self._nodes = dict(enumerate(nodes))  # provisional: the answers tell the real indices
        owners: dict[int, list[int]] = {}
        facts: dict[int, Mapping[str, Any]] = {}
        max_examples: dict[int, float] = {}
        reasons = [] if len(nodes) == self.num_clients else [f"only {len(nodes)} nodes appeared"]
        for index, own in (known or {}).items():
            owners[index], facts[index] = [nodes[index]], own
            max_examples[index] = max(1, sum(own["splits"].values()))
        asked_who: Iterator[tuple[int, Reply | str]] = iter(())
        if known is None:
            asked_who = self._exchange(self.requests("query.describe", "connect", 0, 1, Describe()))
        for asked, answer in asked_who:
            try:
                if not isinstance(answer, Reply):
                    raise ReplyError(answer)
                check_facts(answer.facts, needed=needed)
            except ReplyError as error:
                reasons.append(f"node {nodes[asked]}: {_plain(str(error))}")
                continue
            index = answer.facts["client"]
            if not 0 <= index < self.num_clients:
                reasons.append(
                    f"node {nodes[asked]} says that it is client {index} of clients="
                    f"{self.num_clients}"
                )
                continue
            owners.setdefault(index, []).append(nodes[asked])
            facts[index] = answer.facts
            max_examples[index] = answer.num_examples
        for index, claimants in sorted(owners.items()):
            if len(claimants) > 1:
                del facts[index]
                reasons.append(
                    f"nodes {' and '.join(map(str, claimants))} say that they are the same client, "
                    f"{index}: give each its own partition-id"
                )
        facts = dict(sorted(facts.items()))
        for index, reason in misfits(facts, alike).items():
            del facts[index]
            reasons.append(f"client {index}: {_plain(reason)}")
        declared = {
            index: {"": max_examples[index]}
            | {f"{split} ": number for split, number in known.get("splits", {}).items()}
            for index, known in facts.items()
        }
        strange = outliers(declared, fewest=self.fewest_records, most=self.most_records)
        for index, reason in strange.items():
            del facts[index]
            reasons.append(f"client {index}: {reason}")
        for client in sorted(set(range(self.num_clients)) - set(facts)):
            self.tell_failure("connect", 0, "query.describe", client, "; ".join(reasons))
        if len(facts) < self.quorum:
            raise QuorumError(
                f"{'; '.join(reasons)} (query.describe: {len(facts)} of {self.num_clients} "
                f"clients answered, {self.quorum} are needed)"
            )
        self._refused.clear()  # they stood at provisional indices
        self._nodes = {index: owners[index][0] for index in facts}
        self.facts, self._max_examples = facts, max_examples
        named = [len(own.get("class_names", [])) for own in facts.values()]
        self._num_classes = max(1, int(median(named)))  # as most clients have it

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

    def part(self, clients: Sequence[int], *, run: str, emit: Emit) -> Courier:
        """Return a courier of its own to some of the connected clients, with their own quorum."""
        part = Courier(
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
        part.facts = {client: self.facts[client] for client in clients}
        return part

    def expel(self, client: int, reason: str) -> None:
        """Ask a client nothing more in this run, as after its last refused reply."""
        self._refused[client], self._left[client] = STRIKES, reason

    def dismiss(self, client: int, reason: str) -> None:
        """Ask a client no more in this run."""
        self._left[client] = reason

    def ask(
        self,
        verb: str,
        *,
        stage: str,
        server_round: int = 0,
        phase: int = 1,
        settings: Settings,
        own_settings: Mapping[int, Settings] | None = None,
        states: Mapping[str, Packed] | None = None,
        layouts: Mapping[str, Layout] | None = None,
        whole: Mapping[str, Layout] | None = None,
        releases: Sequence[PlannedRelease] = (),
        also_left: bool = False,
        among: Collection[int] | None = None,
        turn: Turn | None = None,
    ) -> Iterator[tuple[int, Reply]]:
        """Send one request to every client and yield ``(client, reply)`` in client order.

        A reply is held only until those of all earlier clients are there, so that a consumer who
        reduces as it goes needs the memory of few replies. Of a secure sum one reply is yielded,
        the total's, under the name :data:`TOTAL`.

        Args:
            verb: What is asked, e.g. ``train.search``.
            stage: Stage of the run, part of the header.
            server_round: Round within the stage.
            phase: Number of the exchange within the round.
            settings: Arguments of the verb. Where they ask for ``sparse`` replies, those yielded
                are whole.
            own_settings: Arguments for single clients in their place.
            states: Packed tensors to send.
            layouts: The states that every reply must carry.
            whole: The layouts of states of which messages carry a part: only for ``bytes_dense``.
            releases: With privacy what the stage releases: bounds what replies may be.
            also_left: Whether clients that have left are asked, too, except for those whose replies
                were refused.
            among: Which clients are asked, None for all; the others count as if they had answered.
            turn: Which clients are asked instead: the quorum is one of them, and those that fail
                are replaced, once all others have answered.

        Raises:
            QuorumError: After the last reply, when fewer than the quorum were accepted.
        """
        accepted = 0 if among is None else len(set(self.clients) - set(among))
        wanted = self.num_clients if turn is None else len(turn.clients)
        spares = [] if turn is None else list(turn.spares)
        asked = among if turn is None else turn.clients
        failures: dict[int, str] = {}
        planned = {p.kind: p for p in releases if (p.stage, p.verb) == (stage, verb)}
        pending: _PendingSum | None = None
        if self.secure_sum and not VERBS[verb].is_public:
            if own_settings:
                raise ValueError("a secure sum is of replies to one request: no own_settings")
            pending = self._begin_sum(verb, states or {}, layouts or {}, planned)
        while asked is None or asked:
            requests = self.requests(
                *(verb, stage, server_round, phase, settings, states, layouts),
                own_settings=own_settings,
                whole=whole,
                planned=planned,
                also_left=also_left,
                among=asked,
                weights={} if turn is None else turn.weights,
                summands=None if pending is None else pending.summands,
            )
            for client, answer in self._exchange(requests):
                if pending is not None and isinstance(answer, Reply):
                    try:
                        pending.add(client, answer)
                    except ReplyError as error:
                        answer = self._strike(client, _plain(str(error)))
                if isinstance(answer, Reply):
                    accepted += 1
                    self.tell_back(client, stage, server_round, verb)
                    if pending is None:
                        yield client, answer
                else:
                    failures[client] = answer
                    self.tell_failure(stage, server_round, verb, client, answer)
            short = max(0, wanted - accepted)
            asked, spares = spares[:short], spares[short:]
        if accepted < (quorum := self.quorum_of(wanted)):
            left = {c: w for c, w in self.left.items() if turn is None or c in turn.candidates}
            first, *others = [f"client {c}: {why}" for c, why in sorted((left | failures).items())]
            where = f"{verb} in round {server_round}" if server_round else verb
            raise QuorumError(
                f"{first} ({where}: {accepted} of {wanted} "
                f"clients answered, {quorum} are needed{'; '.join(['', *others])})"
            )
        if pending is not None:
            yield TOTAL, self._open_sum(pending, verb, stage, server_round, phase)

    def _begin_sum(
        self,
        verb: str,
        states: Mapping[str, Packed],
        layouts: Mapping[str, Layout],
        planned: Mapping[str, PlannedRelease],
    ) -> _PendingSum:
        """Return a new sum over all clients that can be asked.

        Sums whose noise is shared have a range that is known; they take 32 bits.
        """
        asked = tuple(client for client in self.clients if self._refused[client] < STRIKES)
        ranges = {
            kind: max(release.sum_range(self.facts[client]["splits"]) for client in asked)
            for kind, release in planned.items()
            if release.shared
        }
        summed = Summed(secrets.token_hex(8), asked, ranges)
        sizes = {name: layout.sizes for name, layout in layouts.items()}
        return _PendingSum(Summands(verb, sizes, summed, states), MaskedSum(asked))

    def _open_sum(
        self, pending: _PendingSum, verb: str, stage: str, server_round: int, phase: int
    ) -> Reply:
        """Have the survivors sign their list, then open their masks; return the total's reply.

        Raises:
            QuorumError: One of them did not sign, too few have opened, or the total is none of
                honest replies.
        """
        survivors = pending.total.survivors
        place = (stage, server_round, phase)
        sign = SignSurvivors(pending.context, tuple(survivors))
        signatures = self._gather("query.sign_survivors", place, sign, survivors, ("signature",))
        missing = sorted(set(survivors) - set(signatures))
        if missing:
            raise QuorumError(
                f"the secure sum of {verb} in round {server_round} has failed: clients {missing} "
                "have answered, but not signed the list of survivors, so that no mask may be "
                "opened; continue the run with resume=<run folder>."
            )
        signed = {str(client): facts["signature"] for client, facts in signatures.items()}
        opening = {
            client: OpenMasks(
                pending.context,
                tuple(survivors),
                signed,
                {
                    str(other): boxes[str(client)]
                    for other, boxes in pending.boxes.items()
                    if other != client and str(client) in boxes
                },
            )
            for client in survivors
        }
        opened = self._gather(
            *("query.open_masks", place, next(iter(opening.values())), survivors),
            ("parts", "pairs"),
            own_settings=opening,
        )
        openings = {
            client: Opening(by_index(facts["parts"]), by_index(facts["pairs"]))
            for client, facts in opened.items()
        }
        try:
            vectors = pending.total.unmask(openings)
            named = dict(zip(pending.summands.lengths, vectors, strict=True))
            return pending.summands.decode(named, sites=len(survivors))
        except (LookupError, ValueError) as error:
            raise QuorumError(
                f"the secure sum of {verb} in round {server_round} has failed, with "
                f"{len(openings)} of {len(survivors)} survivors' openings: {error}"
            ) from error

    def _gather(
        self,
        verb: str,
        place: tuple[str, int, int],
        settings: Settings,
        clients: Sequence[int],
        needed: Sequence[str],
        *,
        own_settings: Mapping[int, Settings] | None = None,
    ) -> dict[int, Mapping[str, Any]]:
        """Return the facts of all clients that answer a message of a secure sum as they should."""
        found = {}
        requests = self.requests(verb, *place, settings, own_settings=own_settings, among=clients)
        for client, answer in self._exchange(requests):
            if isinstance(answer, Reply):
                try:
                    check_facts(answer.facts, needed=needed)
                    found[client] = answer.facts
                    continue
                except ReplyError as error:
                    answer = self._strike(client, _plain(str(error)))
            self.tell_failure(place[0], place[1], verb, client, answer)
        return found

    def _exchange(self, requests: Requests) -> Iterator[tuple[int, Reply | str]]:
        """Ask; yield each client with its accepted reply or why it has none."""
        if self._grid is None:
            raise ValueError("call connect(grid) before ask")
        sent = set(self._grid.push_messages(list(requests.messages.values())))
        ids = {client: m.metadata.message_id for client, m in requests.messages.items()}
        pending = {i: client for client, i in ids.items() if i in sent}
        unsent = {c: "the request could not be sent" for c, i in ids.items() if i not in sent}
        scales = self._held_shares(requests.most)
        for client, answer in self._in_order(self._grid, pending, unsent, requests.accepts):
            if isinstance(answer, Reply):
                scale = scales.get(client, 1.0)
                if client in requests.weights:
                    scale *= requests.weights[client] / answer.num_examples
                if client in scales or client in requests.weights:
                    answer = answer.weighing(scale, summed=VERBS[requests.verb].gradients_of)
                self.bytes_dense += requests.dense_reply
            yield client, answer

    def pause(self, waited_s: float) -> float:
        """Wait before replies are looked for again; return for how long, in seconds.

        Args:
            waited_s: How long no reply has come.
        """
        seconds = min(max(POLL_S, POLL_SHARE * waited_s), LONGEST_POLL_S)
        self.wait(seconds)
        return seconds

    def _held_shares(self, most: Mapping[int, float]) -> dict[int, float]:
        """Return whose weights are scaled to ``largest_share`` of an average, and tell it once."""
        scales = held_shares(most, self.largest_share) if self.facts and not self.secure_sum else {}
        for client in scales.keys() - self._held:
            message = (
                f"client {client} may weigh {most[client]:g} of {sum(most.values()):g} examples: "
                f"it is held to {self.largest_share:g} of an average (runtime.largest_share)"
            )
            self.emit("warning", message=message)
            self._held.add(client)
        return scales

    def requests(
        self,
        verb: str,
        stage: str,
        server_round: int,
        phase: int,
        settings: Settings,
        states: Mapping[str, Packed] | None = None,
        layouts: Mapping[str, Layout] | None = None,
        *,
        own_settings: Mapping[int, Settings] | None = None,
        whole: Mapping[str, Layout] | None = None,
        planned: Mapping[str, PlannedRelease] | None = None,
        also_left: bool = False,
        among: Collection[int] | None = None,
        weights: Mapping[int, float] | None = None,
        summands: Summands | None = None,
    ) -> Requests:
        """Return the messages of an exchange, and what reads their replies; as :meth:`ask`."""
        states, layouts, weights = states or {}, layouts or {}, weights or {}
        sizes = {name: _num_bytes(state) for name, state in states.items()}
        returned = {name: layout.num_bytes for name, layout in layouts.items()}
        for name, layout in (whole or {}).items():
            sizes |= {name: layout.num_bytes} if name in sizes else {}
            returned |= {name: layout.num_bytes} if name in returned else {}
        messages: dict[int, Message] = {}
        accepts: dict[int, Callable[[Message], Reply]] = {}
        most: dict[int, float] = {}  # examples, or what it counts for in their place
        records, accept, limits = self._carried(verb, settings, states, layouts, summands=summands)
        for client in self._nodes if among is None else sorted(self._nodes.keys() & set(among)):
            if self._refused[client] >= STRIKES or (client in self._left and not also_left):
                continue
            node = self._nodes[client]
            header = Header(self.run, stage, server_round, phase, client, secrets.token_hex(8))
            own = (own_settings or {}).get(client, settings)
            content = encode_request(
                header,
                own,
                records,
                statistics=self.statistics,
                summed=None if summands is None else summands.summed,
            )
            self.bytes_sent += payload_bytes(content)
            self.bytes_dense += sum(sizes.values())
            facts = self.facts.get(client, {})
            own_limits = limits(
                own,
                examples=self._max_examples.get(client, MAX_EXAMPLES),
                planned=planned or {},
                records=facts.get("splits", {}),
            )
            most[client] = weights.get(client, own_limits.examples)
            accepts[client] = partial(accept, header=header, limits=own_limits)
            messages[client] = Message(content, node, verb, ttl=self.deadline_s + 60)
        return Requests(messages, accepts, most, weights, verb, sum(returned.values()))

    def _carried(
        self,
        verb: str,
        settings: Settings,
        states: Mapping[str, Packed],
        layouts: Mapping[str, Layout],
        *,
        summands: Summands | None,
    ) -> tuple[dict[str, ArrayRecord], partial[Reply], partial[Limits]]:
        """Return what states travel as, what reads a reply to them, and what says its limits."""
        rounded = round_sent(states, verb=verb, wire=self.wire)
        accept = partial(
            accept_reply,
            layouts=layouts,
            metrics=VERBS[verb].metrics,
            sent=states if isinstance(settings, Search) and settings.sparse else None,
            wire=self.wire,
            base=states if VERBS[verb].trains else None,
            summands=summands,
        )
        limits = partial(
            honest_limits,
            verb,
            classes=self._num_classes,
            sizes={name: sum(layout.sizes.values()) for name, layout in layouts.items()},
            sent={name: norm(state) for name, state in restore_sent(rounded).items()},
        )
        return encode_states(rounded), accept, limits

    def tell_back(self, client: int, stage: str, server_round: int, verb: str) -> None:
        """Tell that a client has answered again that did not before."""
        if client in self._missed:
            self._missed.remove(client)
            self._tell("client_back", stage, server_round, verb, client)

    def tell_failure(
        self, stage: str, server_round: int, verb: str, client: int, reason: str
    ) -> None:
        """Tell that a client gave no accepted reply, and whether it has left."""
        event = "client_left" if client in self._left else "client_failed"
        more = {"expelled": True} if self._refused[client] >= STRIKES else {}
        self._missed.add(client)
        self._tell(event, stage, server_round, verb, client, reason=reason, **more)

    def _tell(
        self, event: str, stage: str, server_round: int, verb: str, client: int, **fields: object
    ) -> None:
        self.emit(event, stage=stage, round=server_round, verb=verb, client=client, **fields)

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
        """Return the reply if the gate accepts it, else the reason."""
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


def _num_bytes(packed: Packed) -> int:
    return sum(vector.numel() * vector.itemsize for vector in packed.values())


def _plain(text: str) -> str:
    """Return a client's words cut short and without characters that command a terminal."""
    text = text[:LONGEST_REASON]
    return "".join(c if c.isprintable() else " " for c in text)
