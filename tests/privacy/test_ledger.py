"""Run as a script, this file is also the process that its tests kill and race (see `main`)."""

import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednas_flwr.base.errors import BudgetExceededError, DayFullError
from fednas_flwr.privacy.books import anchor
from fednas_flwr.privacy.books.anchor import MOST_BYTES, counter_of
from fednas_flwr.privacy.books.ledger import Entry, Ledger, by_kind, epsilons_of
from fednas_flwr.privacy.books.renyi_filter import RenyiFilter
from fednas_flwr.privacy.mechanism.accounting import prv_epsilon
from fednas_flwr.privacy.mechanism.renyi import Release, booked_unit, counted
from fednas_flwr.settings.names import SPLITS

from ..processes import told
from ..refusals import refuses

BUDGET = {"epsilon": 4.0, "delta": 1e-5}
UNIT = Release(noise_multiplier=3.0, sample_rate=1.0, steps=1)
ENTRY = Entry("ward", "ward-a", "run", "search", 1, "train.search", ("train",), UNIT, 1000)
# in memory, where syncing is free: power loss cannot be tested, and kill -9 keeps the cache


def affordable(release=UNIT):
    budget = RenyiFilter(**BUDGET)
    for count in range(10_000):
        if not budget.affords(release):
            return count
        budget.spend(release)


UNITS = affordable()


def open_ledger(folder, clock=time.time):
    ledger = Ledger(folder / "ledger" / "site.sqlite", folder / "key" / "site")
    ledger._clock = clock
    return ledger


def watch_steps(ledger, note):
    """Call ``note`` with the name of every step that a reservation has taken, before the next."""
    after = {
        ledger._rows: {"SELECT sequence, mac FROM entries ORDER": "locked", "COMMIT": "inserted"},
        ledger._mark.connection: {"DELETE FROM mark": "committed", "COMMIT": "moved"},
    }

    def watch(connection, steps):
        def tell(statement):
            for name in (name for start, name in steps.items() if statement.startswith(start)):
                note(name)

        connection.set_trace_callback(tell)

    for connection, steps in after.items():
        watch(connection, steps)


def reserve(ledger, entry=ENTRY, *, epsilon=BUDGET["epsilon"], assignment="a", **change):
    entry = replace(entry, **change)
    ledger.reserve(entry, epsilon=epsilon, delta=BUDGET["delta"], assignment=assignment)


def book(folder, count=1, entry=ENTRY):
    with open_ledger(folder) as ledger:
        for _ in range(count):
            reserve(ledger, entry)


def new_folder():
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


@pytest.fixture
def folder():
    with new_folder() as name:
        yield Path(name)


def sql(folder, statement, *values, file="ledger/site.sqlite"):
    with closing(sqlite3.connect(folder / file)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def as_process(*arguments):
    """Return what this file's other process tells; see `main`."""
    module = ("-m", "tests.privacy.test_ledger")
    return json.loads(told(*module, *arguments, cwd=Path(__file__).parents[2], timeout=600))


# --- what is booked


def test_a_row_comes_back_as_it_was_booked(folder):
    release = Release(noise_multiplier=1.1, sample_rate=0.1 + 0.2, steps=7)
    first = replace(ENTRY, run="é\x00'", round=3, splits=("train", "test"), release=release)
    with open_ledger(folder, clock=lambda: 1234.5) as ledger:
        reserve(ledger, first, epsilon=100.0)
        reserve(ledger, first, epsilon=100.0)
        reserve(ledger, account="other")
    with open_ledger(folder) as ledger:
        rows = ledger.entries("ward")
        told = [(row.sequence, row.time, row.run_steps) for row in rows]
        assert told == [(1, 1234, 7), (2, 1234, 14)]
        assert rows[0].entry == first
        assert len(ledger.entries()) == 3
        assert ledger.entries("nobody") == []
        assert ledger.verify() == 3


def test_the_refusal_names_data_set_budget_spent_and_asked(folder):
    book(folder, UNITS)
    with open_ledger(folder) as ledger, pytest.raises(BudgetExceededError) as refusal:
        reserve(ledger)
    spent = RenyiFilter(**BUDGET)
    needed = RenyiFilter(epsilon=5, delta=1e-5, orders=spent.orders)
    for _ in range(UNITS):
        spent.spend(UNIT)
        needed.spend(UNIT)
    needed.spend(UNIT)
    assert str(refusal.value) == (
        "data set ward-a, budget ward, split train: noise_multiplier=3 at sample_rate=1 for 1 "
        f"steps would need epsilon={needed.spent():.4g} at delta=1e-05; the budget is 4, of which "
        f"{spent.spent():.4g} is spent."
    )


def test_a_larger_budget_keeps_the_orders_that_were_fixed(folder):
    book(folder, UNITS)
    with open_ledger(folder) as ledger:
        for _ in range(2):
            reserve(ledger, epsilon=40.0)
        ((text,),) = sql(folder, "SELECT state FROM totals")
        assert ledger.verify() == UNITS + 2
    assert tuple(json.loads(text)["ward"]["orders"]) == RenyiFilter(**BUDGET).orders


OTHER_TERMS = [
    ({"release": Release(2.0, 1.0, 1)}, "committed to"),
    ({"release": Release(3.0, 0.5, 1)}, "committed to"),
    ({"committed_steps": 1001}, "committed to"),
    ({"release": Release(3.0, 1.0, 1000)}, "has booked 1 and now asks for 1000 more"),
]


@pytest.mark.parametrize(("change", "message"), OTHER_TERMS)
def test_a_run_keeps_to_what_it_committed_even_after_a_restart(folder, change, message):
    book(folder)
    with open_ledger(folder) as ledger:
        refuses(message, reserve, ledger, epsilon=1e5, **change)
        assert ledger.verify() == 1
        for other in ({"run": "b"}, {"stage": "b"}, {"action": "b"}, {"splits": ("test",)}):
            terms = {"committed_steps": 1000, "release": Release(2.0, 1.0, 1), **other}
            reserve(ledger, epsilon=1e5, **terms)
        reserve(ledger, epsilon=1e5, release=Release(3.0, 1.0, 999))


def test_the_clock_decides_nothing(folder):
    times = iter([2e9, 1e9, -5.0, 3e9])
    with open_ledger(folder, clock=lambda: next(times)) as ledger:
        for _ in range(4):
            reserve(ledger)
        assert [row.time for row in ledger.entries()] == [2 * 10**9, 10**9, -5, 3 * 10**9]
        assert ledger.verify() == 4
    book(folder, UNITS - 4)
    refuses("", book, folder, error=BudgetExceededError)


NOT_GIVEN_BACK = [
    *({"run": 5}, {"round": "5"}, {"round": True}, {"round": 2**70}, {"committed_steps": 7.0}),
    *({"splits": ()}, {"splits": ("train", "train")}, {"splits": ("trian",)}),
    {"action": "\ud800"},
]


@pytest.mark.parametrize("change", NOT_GIVEN_BACK)
def test_what_sqlite_would_not_give_back_is_refused(folder, change):
    with open_ledger(folder) as ledger:
        refuses("", reserve, ledger, **change, error=(ValueError, OverflowError, RuntimeError))
        reserve(ledger)
        assert ledger.verify() == 1


multipliers, rates = st.sampled_from([0.6, 1.0, 2.0, 3.0, 5.0]), st.sampled_from([1.0, 0.3, 0.01])
some_splits = st.sets(st.sampled_from(SPLITS), min_size=1)
releases = st.builds(Release, multipliers, rates, st.integers(1, 30))
requests = st.tuples(releases, some_splits.map(sorted).map(tuple), st.booleans())


def test_every_commit_of_both_files_is_synced(folder):
    with open_ledger(folder) as ledger:
        for connection in (ledger._rows, ledger._mark.connection):
            assert connection.execute("PRAGMA synchronous").fetchone()[0] >= 2
            assert connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_a_second_ledger_needs_its_own_key(folder):
    book(folder)
    with pytest.raises(RuntimeError, match="or the key is another ledger's"):
        Ledger(folder / "second" / "site.sqlite", folder / "key" / "site")


def test_a_run_is_approved_for_the_terms_that_were_seen_by_whoever_has_the_key(folder):
    with open_ledger(folder) as ledger:
        for run in ("b", "a"):
            ledger.commit(run, f"terms of {run}")
        assert list(ledger.commitments().items()) == [("b", "terms of b"), ("a", "terms of a")]
        refuses("run c has committed to nothing that could be appro", ledger.approve, "c")
        ledger.approve("b")
    with open_ledger(folder) as ledger:
        assert [ledger.is_approved(run) for run in "abc"] == [False, True, False]
    sql(folder, "INSERT INTO approvals SELECT 'a', mac FROM approvals")
    with open_ledger(folder) as ledger:
        assert [ledger.is_approved(run) for run in "abc"] == [False, True, False]


# --- units of privacy


PERSON_A, PERSON_B = booked_unit("person", "a"), booked_unit("person", "b")
BOOKED_UNITS = ("record", PERSON_A, PERSON_B, "client")


@given(
    plan=st.lists(st.tuples(requests, st.sampled_from(BOOKED_UNITS)), min_size=1, max_size=15),
    mixed=st.booleans(),
    asked=st.sampled_from(BOOKED_UNITS),
    epsilon=st.sampled_from([4.0, 20.0]),
)
def test_no_unit_is_charged_less_than_its_rows_when_policies_change(plan, mixed, asked, epsilon):
    """The sum of what is booked never exceeds the budget, and nothing below it is refused."""
    budget = {"epsilon": epsilon, "delta": 1e-5}
    rows = []

    def charged(unit, split):
        found = RenyiFilter(**{**budget, "epsilon": 1e6}, orders=RenyiFilter(**budget).orders)
        for row_unit, release, splits in rows:
            own = counted(release, row_unit, unit)
            if own is None:
                return None
            if split in splits:
                found.spend(own)
        return found

    with new_folder() as name:
        folder = Path(name)
        ledger = open_ledger(folder)
        for number, ((release, splits, restart), unit) in enumerate(plan):
            unit = unit if mixed else asked
            if restart:
                ledger.close()
                ledger = open_ledger(folder)
            new = {"run": f"{number}", "data_set": f"ward-{number}", "unit": unit}
            entry = replace(ENTRY, **new, splits=splits, release=release)
            before = [charged(unit, split) for split in splits]
            known = [{"orders": f.orders, "totals": f.totals} for f in before if f is not None]
            fits = len(known) == len(before) and all(
                RenyiFilter(**budget, **of_split).affords(release) for of_split in known
            )
            how = {"entry": entry, "epsilon": budget["epsilon"]}
            if fits:
                reserve(ledger, **how)
                rows.append((unit, release, splits))
            else:
                words = "which promise nothing for a " if None in before else ""
                refuses(words, reserve, ledger, error=BudgetExceededError, **how)
        assert ledger.verify() == len(rows)
        filters = ledger.filters("ward", asked, **budget)
        spent = ledger.spent("ward", asked, **budget)
        assert spent == max(found.spent() for found in filters.values())
        assert mixed or spent <= epsilon
        assert ledger.spent("nobody", asked, **budget) == 0
        for split, found in filters.items():
            model = charged(asked, split)
            assert model is not None or found.spent() == math.inf
            assert model is None or found.totals == pytest.approx(model.totals)
        kept = [(row.entry.unit, row.entry.release, row.entry.splits) for row in ledger.entries()]
        assert kept == rows
        reserve(ledger, account="another")
        ledger.close()


def test_other_accounts_are_told_by_their_units(folder):
    with open_ledger(folder) as ledger:
        for account, unit in (("ward", "record"), ("lab", PERSON_A), ("lab", "record")):
            reserve(ledger, epsilon=1e3, account=account, unit=unit)
        told = {name: ledger.units_of_others(name) for name in ("ward", "lab", "new")}
    assert told == {"ward": ["person", "record"], "lab": ["record"], "new": ["person", "record"]}


# --- assignments of records to splits


def test_the_first_assignment_of_an_account_pays_by_split_and_every_other_on_all(folder):
    with open_ledger(folder) as ledger:
        a, b = (ledger.fingerprint("ward-a", digest) for digest in ("1", "2"))
        assert len({a, b, ledger.fingerprint("ward-b", "1")}) == 3
        assert ledger.is_first("ward", a)
        assert ledger.is_first("ward", b)  # nothing is booked yet
        reserve(ledger, assignment=a)
        for splits in (ENTRY.splits, ("train", "test")):
            words = "used with other records or splits: start a ne"
            refuses(words, reserve, ledger, assignment=b, splits=splits)
        reserve(ledger, assignment=b, splits=SPLITS)
        reserve(ledger, assignment=a)
        reserve(ledger, account="lab", assignment=b)
    with open_ledger(folder) as ledger:  # and after a restart
        assert [ledger.is_first("ward", one) for one in (a, b)] == [True, False]
        assert [ledger.is_first("lab", one) for one in (a, b)] == [False, True]
        assert ledger.verify() == 4


@given(
    uses=st.lists(st.tuples(st.integers(0, 3), some_splits), max_size=12),
    sides=st.lists(st.sampled_from([*SPLITS, None]), min_size=4, max_size=4),
)
@settings(max_examples=30)
def test_no_record_pays_more_than_the_split_of_its_first_side_was_charged(uses, sides):
    """A record that from assignment to assignment changes sides as it likes, or is missing."""
    with new_folder() as name, open_ledger(Path(name)) as ledger:
        real = 0
        for number, (assignment, read) in enumerate(uses):
            first = ledger.is_first("ward", str(assignment))
            splits = tuple(s for s in SPLITS if s in read or not first)
            own = {"run": f"run {number}", "splits": splits, "assignment": str(assignment)}
            reserve(ledger, epsilon=1e5, **own)
            real += sides[assignment] in read
        charged = [split for row in ledger.entries() for split in row.entry.splits]
    home = sides[uses[0][0]] if uses else None
    assert real <= (charged.count(home) if home else min(map(charged.count, SPLITS)))


# --- the daily allowance


def taken(folder):
    """What today's requests have taken of the allowance, in bytes."""
    return int(counter_of(folder / "key" / "site").read_text().split()[1])


def test_rows_and_commitments_take_from_one_daily_allowance(folder):
    times = [0.0]
    with open_ledger(folder, clock=lambda: times[0]) as ledger:
        ledger.commit("run", "terms")
        committed = taken(folder)
        ledger.commit("run", "terms")  # a retried message
        assert taken(folder) == committed > len("runterms")
        reserve(ledger)
        spent = MOST_BYTES - (taken(folder) - committed) + 1  # a byte less than a row is left
        counter_of(folder / "key" / "site").write_text(f"{0:>12} {spent:>20} {0:>20}\n")
        for ask in (lambda: reserve(ledger), lambda: ledger.commit("one more", "terms" * 1000)):
            refuses("^refused: requests have made this site write", ask, error=DayFullError)
        assert ledger.verify() == 1
        assert ledger.committed("one more") is None
        times[0] = 86_400.0
        reserve(ledger)
        ledger.commit("one more", "terms" * 1000)
        assert ledger.verify() == 2


def test_the_file_never_grows_by_more_than_what_is_taken(folder):
    path = folder / "ledger" / "site.sqlite"
    with open_ledger(folder, clock=lambda: 0.0) as ledger:
        ledger.commit("warm up", "")
    before, start = path.stat().st_size, taken(folder)
    with open_ledger(folder, clock=lambda: 0.0) as ledger:
        for number in range(200):
            long = replace(ENTRY, run=f"{number}" + "r\u00e9" * 100, release=Release(1e3, 1e-6, 1))
            ledger.commit(long.run, f"{number}" * 500)
            for _ in range(3):
                reserve(ledger, long)
    page, run, rows = 4096, ENTRY.run, 400
    assert path.stat().st_size - before <= taken(folder) - start + 3 * page
    with open_ledger(folder, clock=lambda: 0.0) as ledger:
        start = taken(folder)
        for _ in range(rows):
            reserve(ledger, run=run, release=Release(1e3, 1e-6, 1))
    # an honest run of thousands of steps a day takes little of it
    assert 100_000 * (taken(folder) - start) / rows < MOST_BYTES / 4


# --- kill -9, races, threads, forks


@pytest.mark.run
def test_kill_9_between_every_two_steps_loses_nothing_and_blocks_nothing(folder):
    outcome = as_process("crash", folder)
    # the kill before the commit booked nothing, every later one booked its row
    assert outcome["booked"] == [0, 0, 1, 1, 1, 1, 1]
    assert outcome["rows"] == UNITS
    assert outcome["sent"] == UNITS - 4  # committed, moved, reserved and drawn never left


@pytest.mark.run
def test_kill_9_at_any_time_from_the_first_byte(folder):
    assert as_process("kill", folder) == "ok"


@pytest.mark.run
def test_twenty_processes_race_for_the_last_unit_and_for_a_new_site(folder):
    book(folder / "old", UNITS - 1)
    outcomes = {"old": [0] + [1] * 19, "new/site": [0] * UNITS + [1] * (20 - UNITS)}
    assert as_process("race", folder) == outcomes
    for site in ("old", "new/site"):
        with open_ledger(folder / site) as ledger:
            assert ledger.verify() == UNITS


def test_threads_share_a_ledger(folder):
    def outcome(_):
        try:
            reserve(ledger)
        except BudgetExceededError:
            return "refused"
        return "booked"

    # sleeping lets the other threads run in the middle of a reservation
    with open_ledger(folder) as ledger, ThreadPoolExecutor(2 * UNITS) as threads:
        watch_steps(ledger, lambda step: time.sleep(0.001))
        outcomes = sorted(threads.map(outcome, range(2 * UNITS)))
        assert outcomes == ["booked"] * UNITS + ["refused"] * UNITS
        assert ledger.verify() == UNITS


def test_a_ledger_is_not_used_over_a_fork(folder, monkeypatch):
    with open_ledger(folder) as ledger:
        monkeypatch.setattr(os, "getpid", lambda: 0)
        refuses("opened before a fork", reserve, ledger, error=RuntimeError)


def test_waiting_for_another_process_ends(folder, monkeypatch):
    monkeypatch.setattr(anchor, "WAIT_S", 0.1)
    with open_ledger(folder) as holder, open_ledger(folder) as ledger:
        holder._mark.connection.execute("BEGIN IMMEDIATE")
        refuses("nothing is released: database is locked", reserve, ledger, error=OSError)


def test_opening_waits_for_a_process_that_is_creating_the_site(folder):
    (folder / "key").mkdir()
    path = folder / "key" / "site.mark"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.2, other.rollback)
    release.start()
    book(folder)
    release.join()
    other.close()


# --- damage


def is_refused(folder, match):
    """Whether opening or verifying says so in one sentence; nothing is affordable on top."""
    with pytest.raises(RuntimeError, match=match) as damage, open_ledger(folder) as ledger:
        ledger.verify()
    assert str(damage.value).count(". ") == 0
    assert str(damage.value).endswith("count its budgets as spent.")


COLUMNS = dict(
    edit.split("=")
    for edit in (
        *("time=0", "account='x'", "data_set='x'", "run=CAST(run AS BLOB)", "stage=NULL"),
        *("round='1.5'", "verb='x'", "splits='test'", "noise_multiplier=100", "sample_rate=1e-6"),
        *("steps=0", "run_steps=0", "committed_steps=9", f"mac='{64 * '0'}'", "unit='client'"),
    )
)


DAMAGES = [
    ("DELETE FROM entries WHERE sequence = 1", "row 1 .* removed"),
    ("DELETE FROM entries WHERE sequence = 2", "row 2 .* removed"),
    ("DELETE FROM entries WHERE sequence = 3", "ends at row 2 although row 3 was booked"),
    ("DELETE FROM entries", "ends at row 0 although row 3 was booked"),
    ("UPDATE entries SET sequence = 7 WHERE sequence = 2", "mark ends at row 3 of 7"),
    ("INSERT INTO entries SELECT 4, " + ", ".join(COLUMNS) + " FROM entries LIMIT 1", "row 4"),
    ("DELETE FROM totals", "totals"),
    ("UPDATE totals SET state = '{}'", "totals"),
    ("UPDATE totals SET mac = NULL", "totals"),
    ("DROP TABLE entries", "no such table"),
    *(
        (f"UPDATE entries SET {edit} WHERE sequence = {n}", f"row {n} of .* (was edited|is not)")
        for edit in map("=".join, COLUMNS.items())
        for n in (1, 2, 3)
    ),
]


@pytest.mark.parametrize(("statement", "match"), DAMAGES)
def test_edited_removed_moved_and_added_rows_are_found(folder, statement, match):
    book(folder, 3)
    sql(folder, statement)
    is_refused(folder, match)


@pytest.mark.parametrize("column", ["steps", "run_steps", "committed_steps", "noise_multiplier"])
def test_a_commitment_is_not_read_from_an_edited_row(folder, column):
    book(folder, 2)
    book(folder, 1, replace(ENTRY, run="another"))
    for sequence in (1, 2):
        sql(folder, f"UPDATE entries SET {column} = 0.5 WHERE sequence = {sequence}")
    refuses("row 2 .* was edited", book, folder, error=RuntimeError)


TRIGGERS = [
    ("ON entries BEGIN UPDATE entries SET steps = 0", "changes what is written to it"),
    ("ON entries BEGIN DELETE FROM entries WHERE sequence > 1", "changes what is written"),
    ("ON totals BEGIN DELETE FROM entries WHERE sequence > 1", "ends at row 1 although row 2"),
    ("ON totals BEGIN UPDATE totals SET state = '{}'", "totals"),
]


@pytest.mark.parametrize(("trigger", "match"), TRIGGERS)
def test_code_planted_in_the_file_gives_nothing_back(folder, trigger, match):
    book(folder)
    sql(folder, f"CREATE TRIGGER planted AFTER INSERT {trigger}; END")
    refuses(match, book, folder, 2, error=RuntimeError)


@pytest.mark.parametrize("kept", [0, 1, 100, 4096, 6000])
def test_a_truncated_file_is_found(folder, kept):
    book(folder, 3)
    os.truncate(folder / "ledger" / "site.sqlite", kept)
    is_refused(folder, "damaged")


@pytest.mark.parametrize("rows_since", [1, 2])
@pytest.mark.parametrize("rows_before", [0, 1, 2])
def test_an_old_copy_of_the_ledger_is_found(folder, rows_before, rows_since):
    book(folder, rows_before)
    shutil.copytree(folder / "ledger", folder / "old")
    book(folder, rows_since)
    shutil.rmtree(folder / "ledger")
    shutil.copytree(folder / "old", folder / "ledger")
    is_refused(folder, f"ends at row {rows_before} although row {rows_before + rows_since}")


def test_old_totals_under_the_newest_rows_are_found(folder):
    book(folder)
    (old,) = sql(folder, "SELECT state, mac FROM totals")
    book(folder)
    sql(folder, "UPDATE totals SET state = ?, mac = ?", *old)
    refuses("totals", book, folder, error=RuntimeError)


def test_totals_that_are_not_the_sum_are_found_by_verify(folder):
    with open_ledger(folder) as ledger:
        reserve(ledger)
        ledger._state = lambda last, mac: {  # as after a mistake of ours: nobody else has the key
            "ward": {"orders": [2.0, 3.0], "totals": {"record": {"train": [0.0] * 4}}}
        }
        refuses("not the sum of its rows", ledger.verify, error=RuntimeError)


DELETED = [
    (1, ["ledger/site.sqlite"], "was deleted"),
    (1, ["key/site.mark"], "the mark .* is missing"),
    (1, ["key/site"], "the key .* is missing"),
    (0, ["key/site"], "the key .* is missing"),  # an unused site is no new one
    (1, ["key/site", "key/site.mark"], "the key .* is missing"),
    (1, ["key/site.mark", "ledger/site.sqlite"], "the mark .* is missing"),
]


@pytest.mark.parametrize(("rows", "files", "match"), DELETED)
def test_deleted_files_are_found_and_not_made_anew(folder, rows, files, match):
    book(folder, rows)
    for file in files:
        (folder / file).unlink()
    for _ in range(3):  # asking again changes nothing
        is_refused(folder, match)
        assert not (folder / files[0]).exists()


@pytest.mark.parametrize("file", ["ledger/site.sqlite", "key/site.mark"])
def test_a_file_deleted_or_replaced_while_open_is_found(folder, file):
    with open_ledger(folder) as ledger:
        reserve(ledger)
        content = (folder / file).read_bytes()
        (folder / file).unlink()
        refuses("was deleted or replaced while it was open", reserve, ledger, error=RuntimeError)
        (folder / "other").write_bytes(content)
        (folder / "other").rename(folder / file)
        refuses("was deleted or replaced while it was open", reserve, ledger, error=RuntimeError)


def test_an_old_or_edited_mark_is_found(folder):
    mark = folder / "key" / "site.mark"
    book(folder)
    old = mark.read_bytes()
    book(folder, 2)
    new = mark.read_bytes()
    mark.write_bytes(old)
    is_refused(folder, "ends at row 1 of 3, it was rolled back")
    mark.write_bytes(new)
    sql(folder, "UPDATE mark SET sequence = 2", file="key/site.mark")
    is_refused(folder, "the mark .* was edited")
    mark.write_bytes(new)
    sql(folder, "DELETE FROM mark", file="key/site.mark")
    is_refused(folder, "ends at row 0 of 3")
    mark.write_bytes(new)
    (folder / "key" / "site").write_text(64 * "0")
    is_refused(folder, "site is not its key")


@given(data=st.data())
def test_flipped_bytes_never_give_budget_back(data):
    with new_folder() as name:
        folder = Path(name)
        book(folder, 2)
        file = folder / "ledger" / "site.sqlite"
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        file.write_bytes(content)
        count = 0
        try:
            with patch.object(anchor, "WAIT_S", 0.1), open_ledger(folder) as ledger:
                for _ in range(UNITS):
                    reserve(ledger)
                    count += 1
        except (RuntimeError, OSError):  # BudgetExceededError is a RuntimeError
            pass
        assert count <= UNITS - 2


# --- key, permissions, full disks


def test_the_key_must_lie_outside_and_be_private(folder):
    path = folder / "ledger" / "site.sqlite"
    (folder / "ledger").mkdir()
    (folder / "link").symlink_to(folder / "ledger")
    for key in (path.parent / "key", path.parent / "deeper" / "key", folder / "link" / "key"):
        refuses("lies in the folder of the ledger", Ledger, path, key)
    book(folder)
    key = folder / "key" / "site"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}  # ledger and mark, too
    for mode in (0o640, 0o604, 0o620, 0o601):
        key.chmod(mode)
        refuses(f"has mode {mode:o}", open_ledger, folder)
    key.chmod(0o600)
    for text in ("", "abc", 64 * "x", 66 * "0"):
        key.write_text(text)
        refuses("is no key", open_ledger, folder)


@pytest.mark.parametrize("step", ["locked", "committed"])
def test_a_disk_that_takes_no_more_releases_nothing(folder, step):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(name):
        if name == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))

    with open_ledger(folder) as ledger:
        watch_steps(ledger, fill)
        try:
            refuses("cannot be used, nothing is released: ", reserve, ledger, error=OSError)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            watch_steps(ledger, lambda name: None)
        # what could not be released is booked where the ledger was written and the mark was not
        booked = 1 if step == "committed" else 0
        assert ledger.verify() == booked
        for _ in range(UNITS - booked):
            reserve(ledger)
        refuses("", ledger.reserve, ENTRY, error=BudgetExceededError, **BUDGET, assignment="a")


@pytest.mark.run
def test_read_only_files_release_nothing(folder):
    book(folder)
    assert "cannot be used, nothing is released: " in as_process("readonly", folder)
    with open_ledger(folder) as ledger:
        assert ledger.verify() == 1


# --- the other process


def fork(work, folder):
    """Run ``work(folder)`` in a child; return its exit status, None where a signal ended it."""
    child = os.fork()
    if not child:
        status = 2
        try:
            status = work(folder) or 0
        except BudgetExceededError:
            status = 1
        finally:
            os._exit(status)
    return child


def status_of(child):
    _, status = os.waitpid(child, 0)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else None


def answer_once(folder, die=None):
    """Reserve, draw noise, send; kill -9 at the step ``die``."""

    def checkpoint(name):
        if name == die:
            os.kill(os.getpid(), signal.SIGKILL)

    with open_ledger(folder) as ledger:
        watch_steps(ledger, checkpoint)
        reserve(ledger)
        checkpoint("reserved")
        checkpoint("drawn")
        with open(folder / "sent", "a") as sent:
            sent.write("x")
        checkpoint("sent")


def rows_and_sent(folder):
    with open_ledger(folder) as ledger:
        rows = ledger.verify()
    return rows, (folder / "sent").stat().st_size if (folder / "sent").exists() else 0


def crash(folder):
    booked = []
    for step in ("locked", "inserted", "committed", "moved", "reserved", "drawn", "sent"):
        before = rows_and_sent(folder)[0]
        assert status_of(fork(lambda folder, die=step: answer_once(folder, die), folder)) is None
        rows, sent = rows_and_sent(folder)
        assert rows >= sent
        booked.append(rows - before)
    while status_of(fork(answer_once, folder)) == 0:
        pass
    rows, sent = rows_and_sent(folder)
    return {"booked": booked, "rows": rows, "sent": sent}


def kill(folder):
    """Kill children that open a site and use it in a loop, after a random time."""
    chance = random.Random(0)

    def use(folder):
        while True:
            answer_once(folder)

    for i in range(48):
        site = folder / f"site {i // 3}"  # two more lives for each
        site.mkdir(exist_ok=True)
        child = fork(use, site)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert status_of(child) in (None, 1)
        rows, sent = rows_and_sent(site)
        assert sent <= rows <= UNITS
        assert rows - sent <= i % 3 + 1
    return "ok"


def race(folder):
    def start(folder):
        os.close(go)
        os.read(ready, 1)  # returns when the last writer has closed
        book(folder)

    outcomes = {}
    for site in ("old", "new/site"):
        ready, go = os.pipe()
        children = [fork(start, folder / site) for _ in range(20)]
        os.close(go)
        outcomes[site] = sorted(status_of(child) for child in children)
    return outcomes


def readonly(folder):
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else path.stat().st_mode & 0o777)
        if os.getuid() == 0:
            os.chown(path, 65534, 65534)
    (folder / "ledger" / "site.sqlite").chmod(0o444)
    (folder / "ledger").chmod(0o555)
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        book(folder)
    except OSError as error:
        return str(error)
    finally:
        (folder / "ledger").chmod(0o755)
        (folder / "ledger" / "site.sqlite").chmod(0o644)
    return "released"


if __name__ == "__main__":
    works = {"crash": crash, "kill": kill, "race": race, "readonly": readonly}
    print(json.dumps(works[sys.argv[1]](Path(sys.argv[2]))))


# --- what is said of the rows


STEP = Release(noise_multiplier=2.0, sample_rate=0.05, steps=10)
ALPHA_STEP = Release(noise_multiplier=4.0, sample_rate=1.0, steps=1)
WEIGHTS = Entry("ward", "a", "first", "search", 1, "train.weight_gradient", ("train",), STEP, 100)
OF_ALPHAS = {"action": "train.alpha_gradient", "splits": ("validation",), "release": ALPHA_STEP}
ALPHAS = replace(WEIGHTS, **OF_ALPHAS, round=2)


@pytest.fixture
def rows(tmp_path):
    """What two runs booked on one account, taking turns, and one on another."""
    both = replace(ALPHAS, account="lab", splits=("validation", "train"))
    with open_ledger(tmp_path, clock=itertools.count(1000).__next__) as ledger:
        for entry in (WEIGHTS, ALPHAS, WEIGHTS, replace(WEIGHTS, run="second"), WEIGHTS, both):
            reserve(ledger, entry, epsilon=50.0)
        return ledger.entries()


def test_rows_of_one_kind_are_together(rows):
    kinds = by_kind(rows)
    firsts = [kind[0].entry for kind in kinds]
    assert [(entry.account, entry.run, entry.action) for entry in firsts] == [
        ("ward", "first", "train.weight_gradient"),
        ("ward", "first", "train.alpha_gradient"),
        ("ward", "second", "train.weight_gradient"),
        ("lab", "first", "train.alpha_gradient"),
    ]
    assert [[row.time for row in kind] for kind in kinds[:2]] == [[1000, 1002, 1004], [1001]]


def test_what_is_asked_in_another_stage_or_of_other_splits_is_another_line(rows):
    changes = ({}, {"stage": "retrain"}, {"splits": ("test",)}, {"account": "lab"})
    changed = [replace(rows[0], entry=replace(rows[0].entry, **change)) for change in changes]
    assert len(by_kind(changed)) == 4


def test_epsilon_is_that_of_all_rows_that_a_split_paid_for(rows):
    epsilons = epsilons_of(rows, delta=1e-6)
    ward, lab = ("ward", "record"), ("lab", "record")
    assert list(epsilons) == [ward, lab]
    assert list(epsilons[lab]) == ["train", "validation"]
    assert epsilons[ward] == {
        "train": prv_epsilon([replace(STEP, steps=40)], 1e-6),  # both runs
        "validation": prv_epsilon([ALPHA_STEP], 1e-6),
    }
    assert epsilons[lab]["train"] == epsilons[lab]["validation"] > 0


def test_an_account_that_has_paid_for_several_units_says_what_each_is_promised(rows):
    person = [replace(row, entry=replace(row.entry, unit="person by a")) for row in rows[:2]]
    epsilons = epsilons_of([*person, *rows[2:]], delta=1e-5)
    alone = epsilons_of(rows, delta=1e-5)
    assert list(epsilons) == [("ward", "person by a"), ("ward", "record"), ("lab", "record")]
    assert set(epsilons["ward", "person by a"].values()) == {math.inf}
    for split, epsilon in alone["ward", "record"].items():
        assert epsilon <= epsilons["ward", "record"][split] < math.inf
    assert epsilons["ward", "record"]["train"] > alone["ward", "record"]["train"]


def test_no_rows_give_an_empty_statement_and_a_delta_out_of_range_is_refused(rows):
    assert by_kind([]) == []
    assert epsilons_of([], delta=1e-5) == {}
    words = "delta must lie strictly between 0 and 1"
    refuses(words, epsilons_of, rows, error=ValueError, delta=1.0)
