"""The header of a message, the base of all requests, and the requests of secure sums.

These are the two messages of a secure sum that follow the action to sum, with everything that a
site needs to answer them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypedDict, TypeVar, dataclass_transform

from fednas_flwr.privacy.policy import refused
from fednas_flwr.protocol.keys import is_hex
from fednas_flwr.protocol.secure_sum.masks import PART_BYTES, SECRET_BYTES, Grid
from fednas_flwr.protocol.secure_sum.sum_site import SumSite
from fednas_flwr.settings.names import MOST_SITES
from fednas_flwr.settings.optimizers import SGD
from fednas_flwr.settings.parser import Between, Checked, Length, Where

LONGEST_NAME = 300  # bytes of a run's name, which a site keeps in its ledger

Name = Annotated[str, Length(Between(0, LONGEST_NAME))]


def by_site(digits: int) -> Where:
    """Numbers of ``digits`` hex digits by the index of a site."""

    def holds(values: Mapping[str, str]) -> bool:
        return len(values) <= MOST_SITES and all(
            re.fullmatch("0|[1-9][0-9]{0,3}", index) and is_hex(digits, text)
            for index, text in values.items()
        )

    return Where(holds, f"{digits} hex digits by the index of each site")


Digest = Annotated[str, Where(partial(is_hex, 64), "64 hex digits")]
Indices = Annotated[tuple[int, ...], Length(Between(0, MOST_SITES))]
Boxes = Annotated[dict[str, str], by_site(2 * (PART_BYTES + 16))]  # sealed parts of a seed
Kinds = dict[str, tuple[tuple[str, ...], int]]  # kind -> splits that are read, number of releases


@dataclass(frozen=True)
class Header(Checked):
    """The exchange to which a message belongs; a reply repeats its request's header.

    Attributes:
        run: Name of the run, the same in all its messages; like the other texts, at most 300 bytes
            long.
        stage: ``search``, ``retrain``, ``evaluate``, ...; rounds are counted within a stage.
        round: Number of the round, from 1; 0 before the first round.
        phase: Number of the exchange within its round, from 1.
        client: Index of the client that is asked.
        nonce: Random text, new for every message.
    """

    run: Name
    stage: Name
    round: int
    phase: int
    client: int
    nonce: Name


@dataclass(frozen=True)
class Training:
    """Facts about a local training that bound its change to the model.

    Attributes:
        weights: SGD of the weights.
        steps: Number of steps.
        proximal: mu of a proximal term.
        alphas_lr: Learning rate of the alphas; None if they are not trained.
        members: Networks that are trained side by side, each clipped on its own.
    """

    weights: SGD
    steps: int
    proximal: float = 0.0
    alphas_lr: float | None = None
    members: int = 1


@dataclass(frozen=True)
class Settings(Checked):
    """Arguments of an action, and what follows from them; actions override some of it.

    Attributes:
        of_any_site: True if the action reads no data set; otherwise a private site needs its
            ``data_set``.
        is_kept: True if the site keeps the tensors of the request permanently.
    """

    of_any_site = is_kept = False

    @property
    def count(self) -> int:
        """Number of rewards that are released at once."""
        return 1

    @property
    def described(self) -> Mapping[str, Any] | None:
        """Description of the request's network; None means the supernet or no network."""
        return None

    def released(self, action: str) -> Kinds:
        """Releases, by kind, of a private client whose records or persons are protected.

        Raises:
            ConfigError: The request asks for something that such a client does not do.
        """
        raise NotImplementedError(f"{action} releases nothing")

    def client_releases(self, action: str) -> Kinds:
        """Releases, by kind, of a client that is protected as a whole.

        Raises:
            ConfigError: The request asks for something that such a client does not answer.
        """
        limit = "train.search, train.weights or train.probe: this site is protected as a whole"
        raise refused("unit", "action", action, limit)

    def num_steps(self, records: Mapping[str, int]) -> int:
        """Steps of local training, at least 1, at a client with these records by split."""
        return 1

    def with_steps(self, steps: int) -> "Settings":
        """The same request with this number of steps of local training, if it asks for any."""
        return self

    def trained_by(self, rows: float) -> Training | None:
        """The local training over these rows whose result is returned; None if there is none."""
        return None


class NoProperties(TypedDict):
    """Properties of a reply that has none."""


class Masked(TypedDict):
    """Properties of a reply that is part of a secure sum."""

    context: Digest  # of the exchange
    boxes: Boxes


REQUESTS: dict[str, type[Settings]] = {}  # by action
# The TypedDicts of replies' properties by action: for any client, and for a private client.
PROPERTIES: dict[str, tuple[type, type]] = {}
Kind = TypeVar("Kind", bound=Settings)


@dataclass_transform(kw_only_default=True, frozen_default=True)
def asks(
    *actions: str, reply: type = NoProperties, private: type | None = None
) -> Callable[[type[Kind]], type[Kind]]:
    """Make a class a keyword-only frozen dataclass, and the request of actions.

    Args:
        *actions: Names of the actions.
        reply: TypedDict of the properties in their replies.
        private: TypedDict of the properties that do not depend on records, if not all of them are
            such.
    """

    def register(named: type[Kind]) -> type[Kind]:
        kind = dataclass(frozen=True, kw_only=True)(named)
        REQUESTS.update(dict.fromkeys(actions, kind))
        PROPERTIES.update(dict.fromkeys(actions, (reply, private or reply)))
        return kind

    return register


@dataclass(frozen=True)
class Summed(Checked):
    """Terms of masking the reply to a request.

    Attributes:
        attempt: Random text, new for every exchange.
        participants: Indices of all clients that get the same request, ascending.
        ranges: Largest magnitude of one client's values, for states whose sums travel in 32 bits;
            others take 64.
    """

    attempt: Annotated[str, Length(Between(1, 64))]
    participants: Indices
    ranges: Annotated[dict[str, float], Length(Between(0, 16))]

    @property
    def grids(self) -> dict[str, Grid]:
        """The grids of the states that have a range.

        Raises:
            ValueError: A range is invalid.
        """
        sites = len(self.participants)
        return {state: Grid.of_range(most, sites=sites) for state, most in self.ranges.items()}


class Signature(TypedDict):
    """Properties of the reply to ``query.sign_survivors``."""

    signature: Annotated[str, Where(partial(is_hex, 128), "128 hex digits")]


@asks("query.sign_survivors", reply=Signature)
class SignSurvivors(Settings):
    """``query.sign_survivors``: the list of clients whose replies are in a sum.

    Attributes:
        context: Digest of the exchange, as stated by the clients.
        survivors: Indices of the clients, ascending.
    """

    of_any_site = True

    context: Digest
    survivors: Indices


class Opened(TypedDict):
    """Properties of the reply to ``query.open_masks``."""

    parts: Annotated[dict[str, str], by_site(2 * PART_BYTES)]
    pairs: Annotated[dict[str, str], by_site(2 * SECRET_BYTES)]


@asks("query.open_masks", reply=Opened)
class OpenMasks(Settings):
    """``query.open_masks``: the parts with which the server removes the masks from a sum.

    Attributes:
        context: Digest of the exchange.
        survivors: The list that was signed.
        signatures: Signatures of all survivors, by index.
        boxes: Sealed parts for this client, by the indices of their senders.
    """

    of_any_site = True

    context: Digest
    survivors: Indices
    signatures: Annotated[dict[str, str], by_site(128)]
    boxes: Boxes


def answer_sum(sums: SumSite, asked: Settings) -> dict[str, Any]:
    """Return the properties with which a site answers one of these requests.

    Raises:
        ConfigError: The site refuses the request.
    """
    if isinstance(asked, SignSurvivors):
        return {"signature": sums.sign(bytes.fromhex(asked.context), asked.survivors).hex()}
    assert isinstance(asked, OpenMasks)
    signatures, boxes = by_index(asked.signatures), by_index(asked.boxes)
    opening = sums.open(bytes.fromhex(asked.context), asked.survivors, signatures, boxes)
    return {"parts": by_text(opening.parts), "pairs": by_text(opening.pairs)}


def by_text(values: Mapping[int, bytes]) -> dict[str, str]:
    """Return bytes by index, in a form for JSON."""
    return {str(index): value.hex() for index, value in values.items()}


def by_index(values: Mapping[str, str]) -> dict[int, bytes]:
    """Return the bytes by index that :func:`by_text` has written."""
    return {int(index): bytes.fromhex(text) for index, text in values.items()}


SUM_ACTIONS = ("query.sign_survivors", "query.open_masks")  # they read no record
