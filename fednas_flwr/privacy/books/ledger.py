"""The ledger of a site's spent privacy budgets: a durable, chained record in one sqlite file.

:meth:`Ledger.reserve` books a release before its noise is drawn; nothing is ever refunded. It does
not decide what may be asked (``policy``) or what a release costs (``renyi_filter``).
:func:`by_kind` and :func:`epsilons_of` summarise rows for people.

Every row carries an HMAC over itself and the row before. With running totals per budget and split,
under an HMAC that ties them to the last row, a reservation takes no longer after a million rows.
The mark (``anchor``), next to the key and outside the ledger's folder, records the last row.
Reserving

1. takes the mark's lock and checks that the ledger ends at the mark,
2. checks the budget against the running totals, inserts row and totals,
3. commits the ledger,
4. moves the mark to the new row and commits it,

and returns only then; both commits are synced to disk. A crash before 3 leaves nothing behind. One
between 3 and 4 leaves the ledger one row *ahead* of its mark: the row counts although nothing was
released, and the next use moves the mark. A ledger *behind* its mark, or two rows ahead, is not the
result of a crash: it was rolled back, truncated, edited or deleted, and nothing is released any
more.

An account records the assignments with which it was used: a data set, and the split of each record.
Releases on the first assignment are charged to the splits that they read, those on any other to
every split. Everything that was released about a record is therefore charged to its split in the
first assignment, however the same records were exported, divided or named later. No split's budget
can be exceeded by records that have changed splits.

A row stores the unit that its release protects, and every budget is counted for the unit that its
next release protects (``renyi.counted``).

Guarantee:
    Someone who can write the ledger's folder, but can neither read the key nor write the mark,
    cannot make a site spend more than its budget. Someone who can restore old copies of both
    together can.
"""

import json
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import numpy as np

from fednas_flwr.base.errors import BudgetExceededError, ConfigError
from fednas_flwr.privacy.books import anchor
from fednas_flwr.privacy.books.renyi_filter import RenyiFilter
from fednas_flwr.privacy.mechanism import accounting, renyi
from fednas_flwr.privacy.plan import Splits
from fednas_flwr.settings.names import RECORD, SPLITS
from fednas_flwr.settings.parser import Checked

_ROW_BYTES = 300  # per row or commitment, besides its values: its HMAC and sqlite's overhead
_COLUMNS = (
    "sequence, time, account, data_set, run, stage, round, verb, splits, noise_multiplier, "
    "sample_rate, steps, run_steps, committed_steps, unit"
)
_SCHEMA = """
    CREATE TABLE IF NOT EXISTS entries (
        sequence INTEGER PRIMARY KEY, time INTEGER, account TEXT, data_set TEXT, run TEXT,
        stage TEXT, round INTEGER, verb TEXT, splits TEXT, noise_multiplier REAL,
        sample_rate REAL, steps INTEGER, run_steps INTEGER, committed_steps INTEGER, mac TEXT,
        unit TEXT);
    CREATE TABLE IF NOT EXISTS totals (state TEXT, mac TEXT);
    CREATE TABLE IF NOT EXISTS commitments (run TEXT PRIMARY KEY, terms TEXT, mac TEXT);
    CREATE TABLE IF NOT EXISTS approvals (run TEXT PRIMARY KEY, mac TEXT);
"""
# {account: {"orders": [...], "totals": _Totals, "assignments": [[data set, HMAC], ...]}}
_State = dict[str, dict[str, Any]]
# {unit: {split: the cost of the unit's rows at each order, then their cost for a finer unit}}
_Totals = dict[str, dict[str, list[float]]]


@dataclass(frozen=True)
class Entry(Checked):
    """One release, as it is booked.

    Attributes:
        account: Account whose budget pays: the ``account`` in the data set's policy.
        data_set: Id of the data set.
        run: Name of the run.
        stage: One of ``privacy.plan.STAGES``.
        round: Round within the stage.
        action: The action that was requested of the client.
        splits: The splits that pay, which are those that are read.
        release: The release that is booked.
        committed_steps: Steps of this kind (run, stage, action, splits) that the run committed to.
            Rows of one kind share it, the noise multiplier and the sample rate.
        unit: The unit that it protects, from ``renyi.booked_unit``.
    """

    account: str
    data_set: str
    run: str
    stage: str
    round: int
    action: str
    splits: Splits
    release: renyi.Release
    committed_steps: int
    unit: str = RECORD


@dataclass(frozen=True)
class Row:
    """One row of a ledger.

    Attributes:
        sequence: Number in the order of booking, from 1, without gaps.
        time: Seconds since 1970 by the site's clock; nothing depends on it.
        entry: The booked release.
        run_steps: Steps of this kind that the run has booked so far.
    """

    sequence: int
    time: int
    entry: Entry
    run_steps: int


class Ledger(AbstractContextManager["Ledger"]):
    """A site's ledger; any number of processes and threads may have it open at once.

    Args:
        path: The ledger's file, created if missing.
        key_path: The ledger's own secret key, created if missing; outside ``path``'s folder and
            readable by its owner only. The mark is next to it.

    Raises:
        ConfigError: The key is in the ledger's folder, readable by others, or no key.
        RuntimeError: The ledger is damaged; one sentence says how.
        OSError: A file cannot be opened or written, or stayed locked.
    """

    def __init__(self, path: Path, key_path: Path) -> None:
        self.path, key_path = path.resolve(), key_path.resolve()
        if key_path.is_relative_to(self.path.parent):
            raise ConfigError(
                f"the key {key_path} lies in the folder of the ledger {self.path}: whoever can "
                "write the one could replace the other; put it elsewhere."
            )
        self._clock = time.time
        self._counter = anchor.counter_of(key_path)
        self._pid, self._mutex = os.getpid(), threading.Lock()
        with anchor.plain_errors(self.path):
            self._mark = anchor.Mark(key_path)
            try:
                self._open()
            except BaseException:
                self._mark.connection.close()
                raise
        # A connection refers to itself: unless it is closed, its file stays open for a while.
        for connection in (self._rows, self._mark.connection):
            weakref.finalize(self, connection.close).atexit = False

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files; reservations are already on disk."""
        self._rows.close()
        self._mark.connection.close()

    def reserve(self, entry: Entry, *, epsilon: float, delta: float, assignment: str) -> None:
        """Book ``entry``, or raise; what is booked may then be released once.

        For every split, everything that any run ever booked on it is composed by a ``RenyiFilter``;
        its orders are fixed at the account's first booking.

        Args:
            entry: The release.
            epsilon: The account's budget.
            delta: The budget's delta.
            assignment: The :meth:`fingerprint` of the records and their splits.

        Raises:
            BudgetExceededError: A split's budget does not cover the entry, or has releases that
                promise nothing for the entry's unit.
            ConfigError: The run departs from the terms it committed to, or books more steps; or the
                entry is not charged to every split although the account was first used with another
                assignment.
            DayFullError: The site's daily allowance does not cover the row.
            RuntimeError: The ledger is damaged, or was opened before a fork.
            OSError: A file cannot be written, or stayed locked.
        """
        with self._exclusive() as (last, last_mac):
            state = self._state(last, last_mac)
            self._assign(state, entry, assignment)
            self._spend(state, entry, epsilon=epsilon, delta=delta)
            values = self._values(last + 1, entry)
            self._take(values[1], *values)
            mac = self._mark.hmac("row", last_mac, values)
            places = ", ".join("?" for _ in (*values, mac))
            self._rows.execute(
                f"INSERT INTO entries ({_COLUMNS}, mac) VALUES ({places})", (*values, mac)
            )
            if self._hmac_of(last + 1, last_mac) != mac:
                raise anchor.damaged(f"{self.path} changes what is written to it")
            text = json.dumps(state)
            self._rows.execute("DELETE FROM totals")
            self._rows.execute(
                "INSERT INTO totals VALUES (?, ?)", (text, self._mark.hmac("totals", mac, text))
            )
            self._rows.execute("COMMIT")
            self._mark.move(last + 1, mac)
            self._mark.connection.execute("COMMIT")

    def commit(self, run: str, terms: str) -> None:
        """Keep a run's commitment, which it makes once, before its first release.

        Args:
            run: Name of the run.
            terms: All terms as text, which :meth:`committed` returns.

        Raises:
            ConfigError: The run has committed to other terms.
            DayFullError: The site's daily allowance does not cover it.
            RuntimeError: The ledger is damaged, or was opened before a fork.
            OSError: A file cannot be written, or stayed locked.
        """
        with self._exclusive():
            known = self._commitment(run)
            if known is not None and known != terms:
                raise ConfigError(f"run {run} has committed to other terms: start a new run.")
            if known is None:
                self._take(self._clock(), run, run, terms)  # the index repeats the run's name
                mac = self._mark.hmac("commitment", run, terms)
                self._rows.execute("INSERT INTO commitments VALUES (?, ?, ?)", (run, terms, mac))
                self._rows.execute("COMMIT")

    def committed(self, run: str) -> str | None:
        """Return the terms that a run has committed to; None if there are none."""
        with self._exclusive():
            return self._commitment(run)

    def commitments(self) -> dict[str, str]:
        """Return the terms of every run, in the order in which they committed to them."""
        with self._exclusive():
            runs = self._rows.execute("SELECT run FROM commitments ORDER BY rowid").fetchall()
            return {run: self._commitment(run) or "" for (run,) in runs}

    def approve(self, run: str) -> None:
        """Record that a person has approved a run's commitment.

        Raises:
            ConfigError: The run has committed to nothing.
        """
        with self._exclusive():
            terms = self._commitment(run)
            if terms is None:
                raise ConfigError(f"run {run} has committed to nothing that could be approved.")
            mac = self._mark.hmac("approval", run, terms)
            self._rows.execute("INSERT OR REPLACE INTO approvals VALUES (?, ?)", (run, mac))
            self._rows.execute("COMMIT")

    def is_approved(self, run: str) -> bool:
        """Return True if a person has approved a run's commitment."""
        with self._exclusive():
            row = self._rows.execute("SELECT mac FROM approvals WHERE run = ?", (run,)).fetchone()
            terms = self._commitment(run)
            return row is not None and anchor.equal(row[0], self._mark.hmac("approval", run, terms))

    def fingerprint(self, data_set: str, assignment: str) -> str:
        """Return the HMAC of the settings that assign a data set's records to splits."""
        return self._mark.hmac("assignment", data_set, assignment)

    def is_first(self, account: str, assignment: str) -> bool:
        """Return True if releases may be charged only to the splits that they read.

        Args:
            account: Account whose budget pays.
            assignment: Result of :meth:`fingerprint` for the records that are held now.
        """
        with self._exclusive() as end:
            known = _account(self._state(*end), account)["assignments"]
        return not known or known[0][1] == assignment

    def spent(self, account: str, unit: str, *, epsilon: float, delta: float) -> float:
        """Return the used part of a budget: ``RenyiFilter.spent``, the maximum over splits."""
        filters = self.filters(account, unit, epsilon=epsilon, delta=delta)
        return max(budget.spent() for budget in filters.values())

    def filters(
        self, account: str, unit: str, *, epsilon: float, delta: float
    ) -> dict[str, RenyiFilter]:
        """Return every split's filter after all booked spending, counted for a unit."""
        with self._exclusive() as end:
            booked = _account(self._state(*end), account)
            return {
                split: _booked_filter(booked, split, unit, epsilon=epsilon, delta=delta)
                for split in SPLITS
            }

    def units_of_others(self, account: str) -> list[str]:
        """Return the units of privacy booked on all other accounts, sorted."""
        with self._exclusive() as end:
            others = [b for name, b in self._state(*end).items() if name != account]
        return sorted({renyi.kind_of(unit) for booked in others for unit in booked["totals"]})

    def entries(self, account: str | None = None) -> list[Row]:
        """Return all rows, or those of one account, in the order of booking, checked."""
        with self._exclusive():
            rows = list(self._checked_rows())
        return [row for row in rows if account in (None, row.entry.account)]

    def verify(self) -> int:
        """Return the number of rows after checking every row, the totals and the mark.

        Raises:
            RuntimeError: One sentence says what is damaged.
        """
        sums: dict[str, _Totals] = {}
        with self._exclusive() as (last, last_mac):
            state = self._state(last, last_mac)
            for row in self._checked_rows():
                orders = state[row.entry.account]["orders"]
                _add(sums.setdefault(row.entry.account, {}), row.entry, orders)
        for account, added in sums.items():
            kept = state[account]["totals"]
            places = [(unit, split) for unit, by_split in added.items() for split in by_split]
            if not all(np.allclose(kept[u][s], added[u][s], rtol=1e-9, atol=0) for u, s in places):
                raise anchor.damaged(
                    f"the totals of {account} in {self.path} are not the sum of its rows"
                )
        return last

    def _open(self) -> None:
        """Open the ledger; create what a new site lacks."""
        self._mark.connection.execute("BEGIN IMMEDIATE")
        if not self._mark.is_empty() and not self.path.exists():
            raise anchor.damaged(f"{self.path} was deleted, or the key is another ledger's")
        self._rows = anchor.connect(self.path)
        try:
            if self._mark.is_empty():
                self._rows.executescript(_SCHEMA)
            if self._last_row() is not None and not self._mark.key_path.exists():
                raise anchor.damaged(f"the key {self._mark.key_path} is missing")
            self._mark.load_key()
            self._mark.connection.execute("COMMIT")
            self._inodes = self._current_inodes()
            with self._exclusive():
                pass
        except BaseException:
            self._rows.close()
            raise

    @contextmanager
    def _exclusive(self) -> Iterator[tuple[int, str]]:
        """Hold both locks; yield number and HMAC of the last row, confirmed by the mark."""
        if os.getpid() != self._pid:  # sqlite's locks do not survive a fork
            raise RuntimeError(f"the ledger {self.path} was opened before a fork: open it again.")
        with self._mutex, anchor.plain_errors(self.path):
            try:
                yield self._lock()
            finally:
                self._rows.rollback()
                self._mark.connection.rollback()

    def _lock(self) -> tuple[int, str]:
        """Take both locks and check the last row; a mark left behind by a crash is moved first."""
        while True:
            self._mark.connection.execute("BEGIN IMMEDIATE")
            self._rows.execute("BEGIN IMMEDIATE")
            last, last_mac = self._last_row() or (0, self._mark.genesis())
            if self._is_marked(last, last_mac):
                return last, last_mac
            self._rows.execute("ROLLBACK")
            self._mark.move(last, last_mac)
            self._mark.connection.execute("COMMIT")

    def _is_marked(self, last: int, last_mac: str) -> bool:
        """Return True if the mark is at the last row, False if it is one behind; else raise."""
        if self._current_inodes() != self._inodes:
            raise anchor.damaged(
                f"{self.path} or its mark was deleted or replaced while it was open"
            )
        marked, marked_mac = self._mark.position()
        if last < marked:
            raise anchor.damaged(
                f"{self.path} ends at row {last} although row {marked} was booked, it was rolled "
                "back, truncated or replaced"
            )
        if last > marked + 1:
            raise anchor.damaged(
                f"{self._mark.path} ends at row {marked} of {last}, it was rolled back"
            )
        if last == marked:
            if not anchor.equal(last_mac, marked_mac):
                raise anchor.damaged(
                    f"row {last} of {self.path} is not the one that was booked with this key"
                )
            return True
        if not anchor.equal(last_mac, self._hmac_of(last, marked_mac)):
            raise anchor.damaged(f"row {last} of {self.path} was edited")
        return False

    def _take(self, now: float, *values: object) -> None:
        """Charge a row with these values to the site's daily allowance."""
        anchor.take(self._counter, len(str(values).encode()) + _ROW_BYTES, now=now)

    def _commitment(self, run: str) -> str | None:
        """Return the terms of a run."""
        query = "SELECT terms, mac FROM commitments WHERE run = ?"
        row = self._rows.execute(query, (run,)).fetchone()
        if row is None:
            return None
        if not anchor.equal(row[1], self._mark.hmac("commitment", run, row[0])):
            raise anchor.damaged(f"the commitment of run {run} in {self.path} was edited")
        return row[0]

    def _last_row(self) -> tuple[int, str] | None:
        """Return number and HMAC of the last row."""
        query = "SELECT sequence, mac FROM entries ORDER BY sequence DESC LIMIT 1"
        row = self._rows.execute(query).fetchone()
        if row is not None and not isinstance(row[0], int):
            raise anchor.damaged(f"{self.path} has another form")
        return row

    def _hmac_of(self, sequence: int, previous_mac: object) -> str:
        """Return the HMAC of the row in the file, given that of the row before."""
        query = f"SELECT {_COLUMNS} FROM entries WHERE sequence = ?"
        values = self._rows.execute(query, (sequence,)).fetchone()
        return self._mark.hmac("row", previous_mac, values)

    def _current_inodes(self) -> list[int | None]:
        """Return the inodes of the files that are now at the paths of ledger and mark."""
        files = (self.path, self._mark.path)
        return [file.stat().st_ino if file.exists() else None for file in files]

    def _checked_rows(self) -> Iterator[Row]:
        """Yield every row, in order, after checking that it follows the one before."""
        mac, sequence = self._mark.genesis(), 0
        query = f"SELECT {_COLUMNS}, mac FROM entries ORDER BY sequence"
        for *values, found in self._rows.execute(query):
            sequence, mac = sequence + 1, self._mark.hmac("row", mac, values)
            if values[0] != sequence or not anchor.equal(found, mac):
                raise anchor.damaged(f"row {sequence} of {self.path} was edited, removed or moved")
            yield _row(values)

    def _state(self, last: int, last_mac: str) -> _State:
        """Return the orders and totals of every account; their HMAC ties them to the last row."""
        if last == 0:
            return {}
        row = self._rows.execute("SELECT state, mac FROM totals").fetchone()
        if row is None or not anchor.equal(row[1], self._mark.hmac("totals", last_mac, row[0])):
            raise anchor.damaged(f"the totals of {self.path} were edited or removed")
        return json.loads(row[0])

    def _assign(self, state: _State, entry: Entry, assignment: str) -> None:
        """Record the entry's assignment in ``state``; refuse one that must pay on every split."""
        known, this = _account(state, entry.account)["assignments"], [entry.data_set, assignment]
        if known and known[0][1] != assignment and set(entry.splits) != set(SPLITS):
            raise ConfigError(
                f"refused: since run {entry.run} committed to its schedule, the budget "
                f"{entry.account} was used with other records or splits: start a new run."
            )
        if this not in known:
            known.append(this)

    def _spend(self, state: _State, entry: Entry, *, epsilon: float, delta: float) -> None:
        """Add the entry to the totals in ``state``, or raise if it does not fit."""
        booked = _account(state, entry.account)
        totals = booked["totals"]
        if others := {
            renyi.kind_of(unit) for unit in totals if not renyi.protects(unit, entry.unit)
        }:
            raise BudgetExceededError(
                f"data set {entry.data_set}, budget {entry.account}: it has paid for releases per "
                f"{' and '.join(sorted(others))}, which promise nothing for a "
                f"{renyi.kind_of(entry.unit)} as the site tells them apart now: name another "
                "account in the policy."
            )
        for split in entry.splits:
            budget = _booked_filter(booked, split, entry.unit, epsilon=epsilon, delta=delta)
            try:
                budget.spend(entry.release)
            except BudgetExceededError as error:
                where = f"data set {entry.data_set}, budget {entry.account}, split {split}"
                raise BudgetExceededError(f"{where}: {error}") from None
            booked["orders"] = budget.orders
        _add(totals, entry, booked["orders"])

    def _values(self, sequence: int, entry: Entry) -> tuple[Any, ...]:
        """Return the columns of a new row; refuse terms other than the run's, and more steps."""
        splits, release = ",".join(entry.splits), entry.release
        noise_multiplier, rate = float(release.noise_multiplier), float(release.sample_rate)
        last = self._last_of_kind((entry.run, entry.account, entry.stage, entry.action, splits))
        terms = (noise_multiplier, rate, entry.committed_steps)
        *committed, booked = last or (*terms, 0)
        if tuple(committed) != terms:
            raise ConfigError(
                f"run {entry.run} committed to (noise_multiplier, sample_rate, steps)="
                f"{tuple(committed)} for {entry.action} and now asks for {terms}."
            )
        if booked + release.steps > entry.committed_steps:
            raise ConfigError(
                f"run {entry.run} committed to {entry.committed_steps} steps of {entry.action}, "
                f"has booked {booked} and now asks for {release.steps} more."
            )
        asked = (entry.account, entry.data_set, entry.run, entry.stage, entry.round, entry.action)
        numbers = (noise_multiplier, rate, release.steps, booked + release.steps)
        when = int(self._clock())
        return (sequence, when, *asked, splits, *numbers, entry.committed_steps, entry.unit)

    def _last_of_kind(self, kind: tuple[str, ...]) -> tuple[float, float, int, int] | None:
        """Return noise multiplier, rate, committed and booked steps of a kind's last row."""
        row = self._rows.execute(
            "SELECT sequence, mac, noise_multiplier, sample_rate, committed_steps, run_steps FROM "
            "entries WHERE run = ? AND account = ? AND stage = ? AND verb = ? AND splits = ? "
            "ORDER BY sequence DESC LIMIT 1",
            kind,
        ).fetchone()
        if row is None:
            return None
        sequence, mac, *terms = row
        query = "SELECT mac FROM entries WHERE sequence = ?"
        before = self._rows.execute(query, (sequence - 1,)).fetchone() or (self._mark.genesis(),)
        if not anchor.equal(mac, self._hmac_of(sequence, before[0])):
            raise anchor.damaged(f"row {sequence} of {self.path} was edited")
        return tuple(terms)


def _account(state: _State, name: str) -> dict[str, Any]:
    """Return the bookings of an account, which may be changed in place."""
    return state.setdefault(name, {"orders": None, "totals": {}, "assignments": []})


def _add(totals: _Totals, entry: Entry, orders: Sequence[float]) -> None:
    """Add an entry's cost, for its own unit and for finer ones, to the totals of its splits."""
    releases = (entry.release, renyi.counted(entry.release, entry.unit, RECORD))
    costs = [
        math.inf if of is None else renyi.cost(of, order) for of in releases for order in orders
    ]
    by_split = totals.setdefault(entry.unit, {})
    for split in entry.splits:
        by_split[split] = list(map(add, by_split.get(split, [0.0] * len(costs)), costs))


def _booked_filter(
    booked: dict[str, Any], split: str, unit: str, *, epsilon: float, delta: float
) -> RenyiFilter:
    """Return the filter of one split from an account's state, counted for a unit."""
    orders = booked["orders"]
    totals = [0.0] * len(orders or ())
    for paid, by_split in booked["totals"].items():
        costs = by_split.get(split, [0.0] * 2 * len(totals))
        costs = costs[: len(totals)] if paid == unit else costs[len(totals) :]
        totals = [
            t + c if renyi.protects(paid, unit) else math.inf
            for t, c in zip(totals, costs, strict=True)
        ]
    return RenyiFilter(epsilon=epsilon, delta=delta, orders=orders, totals=totals or None)


def _row(values: list[Any]) -> Row:
    """Return the row with these values of its columns."""
    sequence, when, *asked, splits, noise, rate, steps, run_steps, committed, unit = values
    release = renyi.Release(noise_multiplier=noise, sample_rate=rate, steps=steps)
    booked = [*asked, tuple(splits.split(",")), release, committed, unit]
    return Row(sequence, when, Entry(*booked), run_steps)


def by_kind(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each kind, in the order of first booking.

    Rows of a kind come from one run, stage and action on an account, all under the same terms.
    """
    kinds: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        entry = row.entry
        kind = (entry.account, entry.run, entry.stage, entry.action, entry.splits)
        kinds.setdefault(kind, []).append(row)
    return list(kinds.values())


def epsilons_of(rows: Sequence[Row], *, delta: float) -> dict[tuple[str, str], dict[str, float]]:
    """Return the cost of rows in each split that paid, by account and unit.

    An epsilon covers all rows of an account that a split paid for, counted for the unit and
    composed by ``prv_epsilon`` as if they had been planned together. A site enforces its budget
    with the larger numbers of ``RenyiFilter``, which also hold for requests that depend on earlier
    outputs.

    Args:
        rows: Rows, as returned by ``Ledger.entries``.
        delta: Strictly between 0 and 1.

    Raises:
        ValueError: ``delta`` is out of range.
    """
    epsilons = {}
    for account, unit in dict.fromkeys((row.entry.account, row.entry.unit) for row in rows):
        booked = [row.entry for row in rows if row.entry.account == account]
        found = accounting.epsilon_per_split(
            [(renyi.counted(e.release, e.unit, unit), e.splits) for e in booked], delta
        )
        epsilons[account, unit] = {split: found[split] for split in SPLITS if split in found}
    return epsilons
