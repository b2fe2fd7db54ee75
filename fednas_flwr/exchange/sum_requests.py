"""Requests of a secure sum to a site besides the verb that it sums; imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.secure_sum.grid import Grid
from fednas_flwr.exchange.secure_sum.roster import MOST_SITES
from fednas_flwr.exchange.secure_sum.site import SumSite
from fednas_flwr.typed import Between, Checked, Length

Digest = Annotated[str, Length(Between(64, 64))]  # hex digits
Indices = Annotated[tuple[int, ...], Length(Between(0, MOST_SITES))]
BySite = Annotated[dict[str, str], Length(Between(0, MOST_SITES))]  # hex digits by index


@dataclass(frozen=True)
class Settings(Checked):
    """Arguments of a verb."""


@dataclass(frozen=True)
class Summed(Checked):
    """Masking of the reply to a request.

    Attributes:
        attempt: Random text, new for every exchange.
        participants: Indices of all clients that are asked the same, ascending.
        ranges: Largest magnitude of one client's values, of the states whose sums travel in 32
            bits; others take 64.
    """

    attempt: Annotated[str, Length(Between(1, 64))]
    participants: Indices
    ranges: Annotated[dict[str, float], Length(Between(0, 16))]

    @property
    def grids(self) -> dict[str, Grid]:
        """The grids of the states that have a range.

        Raises:
            ValueError: A range is none.
        """
        sites = len(self.participants)
        return {state: Grid.of_range(most, sites=sites) for state, most in self.ranges.items()}


@dataclass(frozen=True)
class SignSurvivors(Settings):
    """``query.sign_survivors``: the list of the clients whose replies are in a sum.

    Attributes:
        context: Digest of the exchange, as the clients have told it.
        survivors: Indices, ascending.
    """

    context: Digest
    survivors: Indices

    def __post_init__(self) -> None:
        """Check the sizes, and that the digest is one."""
        super().__post_init__()
        check_digest(self.context)


@dataclass(frozen=True)
class OpenMasks(Settings):
    """``query.open_masks``: what the server needs to take the masks off a sum.

    Attributes:
        context: Digest of the exchange.
        survivors: The list that was signed.
        signatures: Of all survivors, by index.
        boxes: Sealed parts for this client, by the index of their senders.
    """

    context: Digest
    survivors: Indices
    signatures: BySite
    boxes: BySite

    def __post_init__(self) -> None:
        """Check the sizes, and that the digest is one."""
        super().__post_init__()
        check_digest(self.context)


def check_digest(context: str) -> None:
    """Raise ConfigError for a context of anything but hex digits."""
    if not re.fullmatch("[0-9a-f]{64}", context):
        raise ConfigError(f"context={context!r} is not usable: expected 64 hex digits.")


def answer_sum(sums: SumSite, asked: Settings) -> dict[str, Any]:
    """Return the facts by which a site answers one of these requests.

    Raises:
        ConfigError: The site refuses it.
    """
    if isinstance(asked, SignSurvivors):
        return {"signature": sums.sign(bytes.fromhex(asked.context), asked.survivors).hex()}
    assert isinstance(asked, OpenMasks)
    opening = sums.open(
        bytes.fromhex(asked.context),
        asked.survivors,
        by_index(asked.signatures),
        by_index(asked.boxes),
    )
    return {"parts": by_text(opening.parts), "pairs": by_text(opening.pairs)}


def by_text(values: Mapping[int, bytes]) -> dict[str, str]:
    """Return bytes by index as JSON holds them."""
    return {str(index): value.hex() for index, value in values.items()}


def by_index(values: Mapping[str, str]) -> dict[int, bytes]:
    """Return what :func:`by_text` has written.

    Raises:
        ConfigError: It has not.
    """
    try:
        return {int(index): bytes.fromhex(text) for index, text in values.items()}
    except ValueError as error:
        raise ConfigError(f"refused, no hex digits by index: {error}.") from error


SUM_REQUESTS: dict[str, type[Settings]] = {
    "query.sign_survivors": SignSurvivors,
    "query.open_masks": OpenMasks,
}
