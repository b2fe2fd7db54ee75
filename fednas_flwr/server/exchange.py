"""One exchange: a question to the participants, and the functions that read their replies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import NamedTuple

from flwr.app import Message

from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.messages import Reply, restore_sent, round_sent
from fednas_flwr.protocol.requests import Settings
from fednas_flwr.protocol.states import Layout, Packed
from fednas_flwr.server.client_sampling import Participants
from fednas_flwr.server.limits import Limits, honest_limits, norm
from fednas_flwr.settings.names import FEWEST_VOTES


@dataclass(frozen=True)
class Exchange:
    """One question to the participants.

    Attributes:
        action: The action asked for, e.g. ``train.search``.
        stage: Stage of the run, part of the header.
        settings: Arguments of the action. Where they ask for ``sparse`` replies, those yielded are
            whole.
        server_round: Round within the stage.
        phase: Number of the exchange within the round.
        settings_of: Arguments for single clients in their place.
        states: Packed tensors to send.
        layouts: The states that every reply must carry.
        whole: The layouts of states of which messages carry a part: only for ``bytes_dense``.
        releases: With privacy what the stage releases: bounds what replies may be.
        also_left: True if clients that have left are asked, too, except for those whose replies
            were refused.
        among: Clients to ask, None for all; the others count as if they had answered.
        participants: Who is asked instead: the quorum is one of them, and those that fail are
            replaced, once all others have answered.
    """

    action: str
    _: KW_ONLY
    stage: str
    settings: Settings
    server_round: int = 0
    phase: int = 1
    settings_of: Mapping[int, Settings] = field(default_factory=dict)
    states: Mapping[str, Packed] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    whole: Mapping[str, Layout] = field(default_factory=dict)
    releases: Sequence[PlannedRelease] = ()
    also_left: bool = False
    among: Collection[int] | None = None
    participants: Participants | None = None

    def __str__(self) -> str:
        """Name it in a sentence."""
        return f"{self.action} in round {self.server_round}" if self.server_round else self.action

    @property
    def is_summed(self) -> bool:
        """True if its replies depend on records: secure sums add them up."""
        return not ACTIONS[self.action].is_public

    @property
    def planned(self) -> dict[str, PlannedRelease]:
        """The plan of each kind of release of this stage and action."""
        place = (self.stage, self.action)
        return {p.kind: p for p in self.releases if (p.stage, p.action) == place}

    @property
    def weights(self) -> Mapping[int, float]:
        """Weights of replies in place of their numbers of examples, where these are planned."""
        return {} if self.participants is None else self.participants.weights

    def weighed(self, client: int, reply: Reply, scale: float) -> Reply:
        """Give an accepted reply the weight that counts.

        Args:
            client: The client whose reply it is.
            reply: The reply.
            scale: Factor that keeps it to the largest share of an average.
        """
        if client in self.weights:
            scale *= self.weights[client] / reply.num_examples
        if scale == 1:
            return reply
        return reply.weighing(scale, summed=ACTIONS[self.action].gradients_of)

    @property
    def dense_request(self) -> int:
        """Bytes of a request of whole, unrounded states."""
        sizes = {name: _num_bytes(state) for name, state in self.states.items()}
        return sum(self.whole[n].num_bytes if n in self.whole else b for n, b in sizes.items())

    @property
    def dense_reply(self) -> int:
        """Bytes of a reply of whole, unrounded states."""
        return sum(self.whole.get(name, layout).num_bytes for name, layout in self.layouts.items())

    def carried(self, wire: str) -> Mapping[str, Packed]:
        """The states as they travel."""
        return round_sent(self.states, action=self.action, wire=wire)

    def limits(self, carried: Mapping[str, Packed], *, num_classes: int) -> partial[Limits]:
        """Limits of a client's reply, given its settings and records: :func:`honest_limits`."""
        return partial(
            honest_limits,
            self.action,
            classes=num_classes,
            sizes={name: sum(layout.sizes.values()) for name, layout in self.layouts.items()},
            sent={name: norm(state) for name, state in restore_sent(carried).items()},
            planned=self.planned,
        )


class Sent(NamedTuple):
    """The message to one client.

    Attributes:
        message: To be sent.
        accept: Reads the client's reply.
        most: Examples that it may have, or what it counts for in their place.
    """

    message: Message
    accept: Callable[[Message], Reply]
    most: float


def _num_bytes(packed: Packed) -> int:
    return sum(vector.numel() * vector.itemsize for vector in packed.values())


def share_scales(examples: Mapping[int, float], largest: float) -> dict[int, float]:
    """Factors of the weights of the clients that would exceed a share of the sum.

    Args:
        examples: Largest weight of each client; of one or two none is scaled.
        largest: Share of a client; the sum that counts is that of the others as they declare it.
    """
    total = sum(examples.values())
    if len(examples) < FEWEST_VOTES or largest == 1:
        return {}
    scales = {c: largest / (1 - largest) * (total - n) / n for c, n in examples.items()}
    return {client: scale for client, scale in scales.items() if scale < 1}
