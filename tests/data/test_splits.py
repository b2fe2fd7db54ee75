import doctest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data import records
from fednas_flwr.data.records import assign_splits, assignment_digest, hash_positions
from fednas_flwr.settings.names import SPLITS

FRACTIONS = {"train": 0.5, "validation": 0.3, "test": 0.2}
MANY = np.array([f"record {i}".encode() for i in range(20_000)])
some_ids = st.lists(st.binary(min_size=1, max_size=32).filter(lambda b: b[-1] != 0), max_size=40)
keys = st.binary(min_size=1, max_size=64)


@st.composite
def shares(draw):
    parts = [draw(st.integers(0, 10)) for _ in range(3)]
    total = sum(parts) or 1
    parts = [part / total for part in parts] if sum(parts) else [1.0, 0.0, 0.0]
    return dict(zip(SPLITS, parts, strict=True))


@given(kept=some_ids, others=some_ids, key=keys, fractions=shares(), data=st.data())
def test_other_records_never_move_a_record(kept, others, key, fractions, data):
    mixed = data.draw(st.permutations(kept + others))
    alone = dict(zip(kept, _parts(kept, key, fractions), strict=True))
    among = dict(zip(mixed, _parts(mixed, key, fractions), strict=True))
    assert all(among[record] == part for record, part in alone.items())


@given(ids=some_ids, key=keys, fractions=shares())
def test_duplicates_share_a_part_and_empty_parts_stay_empty(ids, key, fractions):
    parts = _parts(ids + ids, key, fractions)
    assert parts[: len(ids)] == parts[len(ids) :]
    assert all(fractions[SPLITS[part]] > 0 for part in parts)


@given(ids=some_ids, key=keys)
def test_positions_are_fractions(ids, key):
    positions = hash_positions(np.array(ids, dtype="S32"), key=key)
    assert positions.dtype == np.float64
    assert ((positions >= 0) & (positions < 1)).all()


def test_fractions_are_met_and_another_key_moves_records():
    parts = assign_splits(MANY, key=b"key", fractions=FRACTIONS)
    assert np.bincount(parts) / len(MANY) == pytest.approx([0.5, 0.3, 0.2], abs=0.015)
    moved = (assign_splits(MANY, key=b"other", fractions=FRACTIONS) != parts).mean()
    # independent parts agree with probability .5^2 + .3^2 + .2^2
    assert moved == pytest.approx(1 - 0.38, abs=0.015)


def test_positions_are_these_forever():
    # A change would turn records of a site's train part into test records.
    positions = hash_positions(np.array([b"a", b"b"]), key=b"site")
    assert positions.tolist() == [0.3036722733352102, 0.3973305641516678]


def test_rounded_fractions_send_nothing_to_a_part_without_a_share():
    # This id's position is 1 - 1.5e-7, above the sum of the fractions, which may be 1e-6 short.
    late = np.array([b"record 2012903"])
    assert hash_positions(late, key=b"key")[0] > 1 - 2e-7
    for shares, part in [((1 - 5e-7, 0, 0), 0), ((0.5, 0.5 - 5e-7, 0), 1), ((0.5, 0.2, 0.3), 2)]:
        fractions = dict(zip(SPLITS, shares, strict=True))
        assert assign_splits(late, key=b"key", fractions=fractions).tolist() == [part]


@pytest.mark.parametrize(
    "fractions",
    [
        {"train": 0.5, "validation": 0.5},
        {"train": 0.5, "validation": 0.6, "test": -0.1},
        {"train": 0.5, "validation": 0.3, "test": 0.1},
        {"train": 0.5, "validation": 0.3, "test": 0.2, "more": 0.0},
        {"train": float("nan"), "validation": 0.3, "test": 0.2},
    ],
)
def test_unusable_fractions_are_refused(fractions):
    with pytest.raises(ConfigError, match="not usable"):
        assign_splits(MANY[:3], key=b"key", fractions=fractions)


@pytest.mark.parametrize("key", [b"", b"k" * 65])
def test_unusable_keys_are_refused(key):
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        hash_positions(MANY[:3], key=key)


@given(ids=some_ids, other=some_ids, key=keys, fractions=shares(), data=st.data())
def test_the_digest_of_an_assignment_is_equal_where_the_assignment_is(
    ids, other, key, fractions, data
):
    def digest(ids, key=key, fractions=fractions, id_column=""):
        ids = np.array(ids, dtype="S32")
        return assignment_digest(ids, key=key, fractions=fractions, id_column=id_column)

    assert digest(data.draw(st.permutations(ids))) == digest(ids)
    assert (digest(other) == digest(ids)) == (sorted(other) == sorted(ids))
    # where a column gives ids, records come and go without a change of sides
    assert digest(other, id_column="patient") == digest(ids, id_column="patient")
    for id_column in ("", "patient"):
        assert digest(ids, key=key[:-1] + bytes([key[-1] ^ 1]), id_column=id_column) != digest(
            ids, id_column=id_column
        )
        moved = dict(zip(fractions, [*fractions.values()][1:] + [fractions["train"]], strict=True))
        same = digest(ids, fractions=moved, id_column=id_column) == digest(ids, id_column=id_column)
        assert same == (moved == fractions)
    assert digest(ids, id_column="card") != digest(ids, id_column="patient") != digest(ids)


def test_examples_in_docstrings():
    assert doctest.testmod(records).failed == 0


def _parts(ids, key, fractions):
    return assign_splits(np.array(ids, dtype="S32"), key=key, fractions=fractions).tolist()
