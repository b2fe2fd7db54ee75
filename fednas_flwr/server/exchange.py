"""One exchange: the participants, the question, and the functions that read the replies.

:class:`Sampling` draws the participants of each round from the seed and public sizes, before the
run. With ``uniform`` draws a round's average, weighted by size, is unbiased: its expectation over
the draws is the average over all clients.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

import numpy as np
from flwr.app import Message

from fednas_flwr.base.randomness import derive_seed
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.requests import Settings
from fednas_flwr.protocol.states import Layout, States
from fednas_flwr.settings.names import FEWEST_VOTES, ROUND_ROBIN

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Participants:
    """The clients of one round.

    Attributes:
        clients: The clients that are asked, ascending.
        backups: Clients that are asked instead of those that fail, in this order.
    """

    clients: tuple[int, ...]
    backups: tuple[int, ...] = ()

    @property
    def candidates(self) -> tuple[int, ...]:
        """All clients that may be asked."""
        return (*self.clients, *self.backups)

    def after(self, answered: Collection[int]) -> "Participants":
        """The participants of the round's next exchange; a backup that has stood in stays."""
        stood_in = [client for client in self.backups if client in answered]
        failed = [client for client in self.clients if client not in answered]
        clients = {*self.clients, *stood_in} - set(failed[: len(stood_in)])
        backups = tuple(client for client in self.backups if client not in stood_in)
        return Participants(tuple(sorted(clients)), backups)


@dataclass(frozen=True)
class Exchange:
    """One question to the participants.

    Attributes:
        action: The action asked for, e.g. ``train.search``.
        stage: Stage of the run, part of the header.
        settings: Arguments of the action.
        server_round: Round within the stage.
        phase: Number of the exchange within the round.
        settings_of: Arguments that replace ``settings`` for single clients.
        states: Packed tensors to send.
        layouts: The states that every reply must carry.
        releases: With privacy, the releases of the stage; they bound replies.
        also_left: True if clients that have left are asked, too, except those that left because
            their replies were refused.
        among: Clients to ask, None for all; the others count as if they had answered.
        participants: The clients of the round. The quorum is counted among them, and those that
            fail are replaced once all others have answered.
    """

    action: str
    stage: str
    settings: Settings
    _: KW_ONLY
    server_round: int = 0
    phase: int = 1
    settings_of: Mapping[int, Settings] = field(default_factory=dict)
    states: States = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    releases: Sequence[PlannedRelease] = ()
    also_left: bool = False
    among: Collection[int] | None = None
    participants: Participants | None = None

    def __str__(self) -> str:
        """Return its name for use in a sentence."""
        return f"{self.action} in round {self.server_round}" if self.server_round else self.action

    @property
    def planned(self) -> dict[str, PlannedRelease]:
        """The plan of each kind of release of this stage and action."""
        place = (self.stage, self.action)
        return {p.kind: p for p in self.releases if (p.stage, p.action) == place}


class Sent(NamedTuple):
    """The message to one client.

    Attributes:
        message: The request.
        accept: Function that reads the client's reply.
        most: Largest number of examples that the reply may have.
    """

    message: Message
    accept: Callable[[Message], Reply]
    most: float


def share_scales(examples: Mapping[int, float], largest: float) -> dict[int, float]:
    """Factors for the weights of clients that would exceed a share of the sum.

    Args:
        examples: Largest weight of each client; with one or two clients none is scaled.
        largest: Largest share of a client in the sum after scaling. If there are too few clients to
            keep to it, shares become equal.
    """
    if len(examples) < FEWEST_VOTES or largest == 1:
        return {}
    largest, rest, limit = max(largest, 1 / len(examples)), sum(examples.values()), math.inf
    for held, most in enumerate(sorted(examples.values(), reverse=True)):
        limit = largest * rest / (1 - held * largest)  # the weight of each limited client
        if most <= limit * (1 + 1e-9):
            break
        rest -= most
    return {client: limit / n for client, n in examples.items() if n > limit * (1 + 1e-9)}


@dataclass(frozen=True)
class Sampling:
    """Draws the clients of every round; the same round always has the same clients.

    Args:
        seed: The run's seed; a draw comes from (seed, stage, round).
        per_round: m, the number of clients that a round asks: at least 1, at most all.
        backups: Number of further clients that stand by to replace those that fail.
        by: ``uniform`` draws one client in proportion to its size and the others uniformly from the
            rest. A set of clients is thus drawn in proportion to the sum of its sizes, and its
            average by size is unbiased (Midzuno 1952; Lahiri 1951). For clients of equal size it is
            the uniform draw. ``round_robin`` asks one after the other, in an order drawn once for
            each stage, so that all are asked equally often. Its averages by size are unbiased only
            for clients of equal size.
        sizes: For each stage, the weight of each client's reply in an average over all clients:
            int64 ``[N]``, public numbers. A stage without them has equal weights.
    """

    seed: int
    per_round: int
    backups: int
    by: str
    sizes: Mapping[str, Ints]
    num_clients: int

    def participants(self, stage: str, server_round: int) -> Participants:
        """The clients of a round, from 1, of a stage."""
        sizes = self.sizes.get(stage)
        if sizes is None or not sizes.any():
            sizes = np.ones(self.num_clients, dtype=np.int64)
        once = () if self.by == ROUND_ROBIN else (server_round,)
        rng = np.random.default_rng(derive_seed(self.seed, "clients", stage, *once))
        order = rng.permutation(self.num_clients)
        if self.by == ROUND_ROBIN:
            drawn = np.roll(order, -(server_round - 1) * self.per_round)
        else:
            drawn = midzuno(sizes, order, record=int(rng.integers(sizes.sum())))
        asked, backups = np.split(drawn[: self.per_round + self.backups], [self.per_round])
        return Participants(tuple(sorted(asked.tolist())), tuple(backups.tolist()))


def midzuno(sizes: Ints, order: Ints, *, record: int) -> Ints:
    """The order with the owner of a record moved to the front; there are ``sum(sizes)`` records.

    For a record drawn uniformly and an order drawn uniformly, the first m clients are a set S with
    probability ``sum_S n / (C(N - 1, m - 1) sum n)``.
    """
    owner = np.searchsorted(np.cumsum(sizes), record, side="right")
    return np.concatenate([[owner], order[order != owner]])
