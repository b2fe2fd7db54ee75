"""A ledger's statement: its rows summed up by what was asked, and what they cost together.

For people who look at a ledger (``fednas ledger show``); nothing is decided here. Main function:
:func:`make_statement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fednas_flwr.privacy.books.ledger import Row
from fednas_flwr.privacy.mechanism.accounting import epsilon_per_split
from fednas_flwr.privacy.units import counted
from fednas_flwr.settings.names import SPLITS


@dataclass(frozen=True)
class Line:
    """All rows of one kind: what a run asked of an account with one action in one stage.

    Attributes:
        account: Whose budget paid.
        run: Name of the run.
        stage: ``search`` or ``retrain``.
        action: What the client was asked.
        splits: Splits that paid.
        steps: Steps booked.
        committed_steps: Steps that the run committed to.
        noise_multiplier: Of every step.
        sample_rate: Of every step.
        first: When the first row was booked, in seconds since 1970 by the site's clock.
        last: When the last one was.
    """

    account: str
    run: str
    stage: str
    action: str
    splits: tuple[str, ...]
    steps: int
    committed_steps: int
    noise_multiplier: float
    sample_rate: float
    first: int
    last: int


@dataclass(frozen=True)
class Statement:
    """Statement that :func:`make_statement` returns.

    Attributes:
        lines: One for each kind, in the order of first booking.
        epsilons: For each account and unit that it has paid for, the epsilon of each split that
            paid: of all that the account has paid for, counted for that unit.
    """

    lines: tuple[Line, ...]
    epsilons: dict[tuple[str, str], dict[str, float]]


def make_statement(rows: Sequence[Row], *, delta: float) -> Statement:
    """Return the statement of ``rows``.

    An epsilon is that of all rows of an account that a split paid for, composed by
    ``prv_epsilon`` as if they had been planned together. A site enforces its budget with the
    larger numbers of ``RenyiFilter``, which hold for requests that depend on earlier outputs too.

    Args:
        rows: As ``Ledger.entries`` returns them.
        delta: Strictly between 0 and 1.

    Raises:
        ValueError: ``delta`` is out of range.
    """
    kinds: dict[tuple[object, ...], list[Row]] = {}
    accounts: dict[str, list[Row]] = {}
    for row in rows:
        entry = row.entry
        kind = (entry.account, entry.run, entry.stage, entry.action, entry.splits)
        kinds.setdefault(kind, []).append(row)
        accounts.setdefault(entry.account, []).append(row)
    epsilons = {}
    for account, booked in accounts.items():
        for unit in dict.fromkeys(row.entry.unit for row in booked):
            entries = [
                (counted(row.entry.release, row.entry.unit, unit), row.entry.splits)
                for row in booked
            ]
            found = epsilon_per_split(entries, delta)
            epsilons[account, unit] = {split: found[split] for split in SPLITS if split in found}
    return Statement(tuple(_line(booked) for booked in kinds.values()), epsilons)


def _line(rows: list[Row]) -> Line:
    """Return the line of rows of one kind; a ledger gives all of them the same terms."""
    entry = rows[0].entry
    names = ("account", "run", "stage", "action", "splits", "committed_steps")
    return Line(
        **{name: getattr(entry, name) for name in names},
        steps=sum(row.entry.release.steps for row in rows),
        noise_multiplier=entry.release.noise_multiplier,
        sample_rate=entry.release.sample_rate,
        first=rows[0].time,
        last=rows[-1].time,
    )
