import math
from dataclasses import replace
from itertools import count

import pytest

from fednas_flwr.privacy.books.ledger import Entry, Ledger, by_kind, epsilons_of
from fednas_flwr.privacy.mechanism.accounting import prv_epsilon
from fednas_flwr.privacy.mechanism.renyi import Release

BUDGET = {"epsilon": 50.0, "delta": 1e-5}
STEP = Release(noise_multiplier=2.0, sample_rate=0.05, steps=10)
ALPHA_STEP = Release(noise_multiplier=4.0, sample_rate=1.0, steps=1)
WEIGHTS = Entry("ward", "a", "first", "search", 1, "train.weight_gradient", ("train",), STEP, 100)
ALPHAS = replace(
    WEIGHTS, action="train.alpha_gradient", splits=("validation",), release=ALPHA_STEP, round=2
)


@pytest.fixture
def rows(tmp_path):
    """What two runs booked on one account, taking turns, and one on another."""
    clock = count(1000)
    path, key = tmp_path / "ledger" / "site.sqlite", tmp_path / "key" / "site"
    with Ledger(path, key) as ledger:
        ledger._clock = lambda: next(clock)
        for entry in (WEIGHTS, ALPHAS, WEIGHTS, replace(WEIGHTS, run="second"), WEIGHTS):
            ledger.reserve(entry, **BUDGET, assignment="a")
        both = replace(ALPHAS, account="lab", splits=("validation", "train"))
        ledger.reserve(both, **BUDGET, assignment="a")
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
    changed = [
        replace(rows[0], entry=replace(rows[0].entry, **change))
        for change in ({}, {"stage": "retrain"}, {"splits": ("test",)}, {"account": "lab"})
    ]
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
    with pytest.raises(ValueError, match="delta must lie strictly between 0 and 1"):
        epsilons_of(rows, delta=1.0)
