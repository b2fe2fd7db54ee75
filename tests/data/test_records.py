import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data import records
from fednas_flwr.data.notation import Cells
from fednas_flwr.data.readers import data_settings
from fednas_flwr.data.records import Column, Inputs, Records, hash_positions, record_ids
from fednas_flwr.settings.names import SPLITS

from ..refusals import refuses


def rows(*, classes=("a", "b"), width=2, names=None, count=3):
    features = torch.arange(count * width, dtype=torch.float32).view(count, width)
    return Records(
        features=features,
        labels=torch.zeros(count, dtype=torch.int64),
        ids=record_ids(row.tobytes() for row in features.numpy()),
        class_names=tuple(classes),
        columns={"city": np.array(["x"] * count)},
        schema=tuple(Column(name) for name in names or [f"f{i}" for i in range(width)]),
    )


def test_an_id_is_the_hash_of_one_record_alone():
    ids = record_ids([b"one", b"two", b"one"])
    assert ids.dtype == np.dtype("S32")
    assert ids[0] == ids[2] != ids[1]
    assert record_ids([b"one"])[0] == ids[0]
    # blake2b with a digest of 16 bytes of the empty message, as coreutils' b2sum -l 128 prints it
    assert record_ids([b""])[0] == b"cae66941d9efbd404e4d88758ea67670"


def test_ids_and_positions_do_not_hang_on_the_parts_in_which_they_are_made(monkeypatch):
    ids = record_ids(str(row).encode() for row in range(7))
    whole = hash_positions(ids, key=b"k")
    for size in (1, 3, 7):
        monkeypatch.setattr(records, "_CHUNK", size)
        assert [range(7)[rows] for rows in records.chunks(7)][-1][-1] == 6
        assert (hash_positions(ids, key=b"k") == whole).all()


def test_keys_differ_where_any_word_of_an_id_does():
    ids = record_ids([b"a", b"b", b"a"])
    one, other, again = records.keys_of(ids).tolist()
    assert one == again != other
    for place in range(32):
        changed = bytearray(ids[0])
        changed[place] ^= 1
        assert records.keys_of(np.array([bytes(changed)], ids.dtype))[0] != one


def test_unequal_parts_are_refused():
    with pytest.raises(ValueError, match="one entry of each kind"):
        Records(torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64), record_ids([b"a"]), ("a",))


def test_select_keeps_every_part_in_step(images):
    chosen = np.array([5, 2, 9])
    part = records.select_records(images, chosen)
    for name in ("features", "labels", "ids"):
        assert getattr(part, name).tolist() == getattr(images, name)[[5, 2, 9]].tolist()
    assert part.columns["hospital"].tolist() == images.columns["hospital"][chosen].tolist()
    assert part.class_names == images.class_names


def test_join_sites_adds_the_site():
    told = [replace(rows(count=n), notes=(f"{n} left out",)) for n in (2, 3)]
    joined = records.join_sites(dict(zip(("paris", "oslo"), told, strict=True)))
    assert joined.notes == ("paris: 2 left out", "oslo: 3 left out")
    assert joined.columns["site"].tolist() == ["paris"] * 2 + ["oslo"] * 3
    assert joined.columns["city"].tolist() == ["x"] * 5
    assert len(joined) == 5
    assert joined.num_numeric == 2
    (note,) = records.join_sites({"paris": told[0], "rome": told[1], "oslo": told[0]}).notes[3:]
    assert note == "oslo holds the records of paris: the same file?"


UNFIT_SITES = [
    (rows(classes=("a", "c")), "site oslo and site paris do .* same classes: a, b, and a, c"),
    (rows(names=("f0", "g")), "same feature columns .* f1, g"),
    (rows(width=3, names=("f0", "f1")), r"records, torch.float32 \(2,\) and torch.float32 \(3"),
]


@pytest.mark.parametrize(("other", "message"), UNFIT_SITES)
def test_join_sites_refuses_what_does_not_fit(other, message):
    refuses(message, records.join_sites, {"oslo": rows(), "paris": other})


def test_encode_labels_names_the_unknown():
    assert records.encode_labels(Cells(["b", "a"]), ("a", "b"), where="it").tolist() == [1, 0]
    with pytest.raises(ConfigError, match="x.csv has the label c, which is not in"):
        records.encode_labels(Cells(["b", "c"]), ("a", "b"), where="x.csv")


@pytest.mark.parametrize("named_first", [True, False])
def test_as_many_features_without_names_are_not_the_same_columns(named_first):
    """Their order is anybody's guess."""
    pair = [rows(), replace(rows(), schema=())]
    one, other = pair if named_first else reversed(pair)
    with pytest.raises(ConfigError, match="do not have the same feature columns"):
        records.check_alike("the clients' records", one, "the server's test set", other)


def test_the_inputs_of_a_model_that_was_written_before_a_key_existed_are_read():
    inputs = Inputs((2,), (Column("age"), Column("size")), (0.0, 0.0), (1.0, 1.0), ("a", "b"))
    values = json.loads(inputs.to_json())
    for name in ("label", "multi_label", "label_separator", "intensity", "transform"):
        del values[name]
    assert Inputs.from_json(json.dumps(values)) == inputs
    del values["mean"]
    refuses(r"inputs\.mean is missing", Inputs.from_json, json.dumps(values))


FRACTIONS = {"train": 0.5, "validation": 0.3, "test": 0.2}
MANY = np.array([f"record {i}".encode() for i in range(20_000)])
some_ids = st.lists(st.binary(min_size=1, max_size=32).filter(lambda b: b[-1] != 0), max_size=40)
keys = st.binary(min_size=1, max_size=64)


@st.composite
def shares(draw):
    parts = [draw(st.integers(0, 10)) for _ in range(3)]
    parts = [part / sum(parts) for part in parts] if sum(parts) else [1.0, 0.0, 0.0]
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
    parts = records.assign_splits(MANY, key=b"key", fractions=FRACTIONS)
    assert np.bincount(parts) / len(MANY) == pytest.approx([0.5, 0.3, 0.2], abs=0.015)
    moved = (records.assign_splits(MANY, key=b"other", fractions=FRACTIONS) != parts).mean()
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
        assert records.assign_splits(late, key=b"key", fractions=fractions).tolist() == [part]


UNUSABLE_FRACTIONS = [
    {"train": 0.5, "validation": 0.5},
    {"train": 0.5, "validation": 0.6, "test": -0.1},
    {"train": 0.5, "validation": 0.3, "test": 0.1},
    {"train": 0.5, "validation": 0.3, "test": 0.2, "more": 0.0},
    {"train": float("nan"), "validation": 0.3, "test": 0.2},
]


@pytest.mark.parametrize("fractions", UNUSABLE_FRACTIONS)
def test_unusable_fractions_are_refused(fractions):
    with pytest.raises(ConfigError, match="^dataset.fractions.* expected "):
        data_settings("digits", {"cache": "none", "fractions": fractions})


@pytest.mark.parametrize("key", [b"", b"k" * 65])
def test_unusable_keys_are_refused(key):
    refuses("1 to 64 bytes", hash_positions, MANY[:3], error=ValueError, key=key)


@given(ids=some_ids, other=some_ids, key=keys, fractions=shares(), data=st.data())
def test_the_digest_is_equal_where_the_assignment_is(ids, other, key, fractions, data):
    def digest(ids, key=key, fractions=fractions, id_column=""):
        ids = np.array(ids, dtype="S32")
        return records.assignment_digest(ids, key=key, fractions=fractions, id_column=id_column)

    assert digest(data.draw(st.permutations(ids))) == digest(ids)
    assert (digest(other) == digest(ids)) == (sorted(other) == sorted(ids))
    # where a column gives ids, records come and go without a change of sides
    assert digest(other, id_column="patient") == digest(ids, id_column="patient")
    moved = dict(zip(fractions, [*fractions.values()][1:] + [fractions["train"]], strict=True))
    for id_column in ("", "patient"):
        own = digest(ids, id_column=id_column)
        assert digest(ids, key=key[:-1] + bytes([key[-1] ^ 1]), id_column=id_column) != own
        assert (digest(ids, fractions=moved, id_column=id_column) == own) == (moved == fractions)
    assert digest(ids, id_column="card") != digest(ids, id_column="patient") != digest(ids)


def _parts(ids, key, fractions):
    return records.assign_splits(np.array(ids, dtype="S32"), key=key, fractions=fractions).tolist()
