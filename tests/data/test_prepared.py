import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednas_flwr.data import prepared
from fednas_flwr.data.records import record_ids
from fednas_flwr.settings.data_settings import PARTITIONS
from fednas_flwr.settings.hydra_config import compose_tree

from ..data_sets import records_of
from ..processes import told
from ..refusals import refuses

EVERY = [
    {"name": "iid", "clients": 7},
    {"name": "dirichlet", "clients": 5, "alpha": 0.5},
    {"name": "label_groups", "clients": 10},
    {"name": "quantity", "clients": 5, "alpha": 1.0},
    {"name": "quantity", "clients": 3, "fractions": (0.7, 0.2, 0.1)},
    {"name": "column", "clients": 3, "column": "hospital"},
]


@cache
def in_file(name):
    """The settings of a file of ``conf/partition``."""
    return compose_tree([f"partition={name}"])["partition"]


def partition(records, *, name, clients, **changed):
    """The parts by the settings of ``conf/partition``, of which some are changed."""
    known = {key: value for key, value in changed.items() if key in in_file(name)}
    return prepared.partition(records, PARTITIONS[name](**in_file(name) | known), clients=clients)


def labelled(labels, num_classes):
    names = tuple(map(str, range(num_classes)))
    return records_of(np.zeros((len(labels), 1)), labels, class_names=names)


def assert_covers(parts, num_records):
    assert np.sort(np.concatenate(parts)).tolist() == list(range(num_records))
    for part in parts:
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()
        assert len(part) > 0


@pytest.mark.parametrize("choice", EVERY, ids=lambda choice: choice["name"])
def test_partitions_cover_all_records_and_repeat(images, choice):
    parts = partition(images, seed=3, **choice)
    assert len(parts) == choice["clients"]
    assert_covers(parts, len(images))
    assert [p.tolist() for p in partition(images, seed=3, **choice)] == [p.tolist() for p in parts]
    if choice["name"] != "column":
        other = partition(images, seed=4, **choice)
        assert [p.tolist() for p in other] != [p.tolist() for p in parts]


@pytest.mark.parametrize("choice", EVERY[:5], ids=lambda choice: choice["name"])
def test_persons_are_divided_with_all_their_records(images, choice):
    persons = np.random.default_rng(1).integers(0, 150, len(images))
    ids = record_ids(str(person).encode() for person in persons.tolist())
    parts = partition(replace(images, ids=ids, id_column="patient"), seed=3, **choice)
    assert_covers(parts, len(images))
    held = [set(persons[part].tolist()) for part in parts]
    assert sum(map(len, held)) == len(set(persons.tolist()))  # nobody is with two clients
    if choice["name"] == "iid":
        assert max(map(len, held)) - min(map(len, held)) <= 1
    # without the source's word for it, equal ids are equal records only
    apart = partition(replace(images, ids=ids), seed=3, **choice)
    assert sum(len(set(persons[part].tolist())) for part in apart) > len(set(persons.tolist()))


@given(size=st.integers(1, 200), clients=st.integers(1, 20), seed=st.integers(0, 9), data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_iid_and_quantity_cover_all_records(size, clients, seed, data):
    records = labelled(np.zeros(size), 1)
    if clients > size:
        refuses("does not fit", partition, records, name="iid", clients=clients, seed=seed)
        return
    parts = partition(records, name="iid", clients=clients, seed=seed)
    assert_covers(parts, size)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    weights = np.array([data.draw(st.integers(1, 5)) for _ in range(clients)])
    shares = weights / weights.sum()
    choice = {"name": "quantity", "clients": clients, "seed": seed, "fractions": tuple(shares)}
    if np.diff(np.rint(np.cumsum(shares) * size), prepend=0).min() == 0:
        refuses("without records", partition, records, **choice)
        return
    parts = partition(records, **choice)
    assert_covers(parts, size)
    assert np.abs([len(part) for part in parts] - shares * size).max() <= 1


def test_dirichlet_skews_labels_as_alpha_says(images):
    def skew(alpha):
        parts = partition(images, name="dirichlet", clients=4, seed=0, alpha=alpha, min_size=5)
        assert min(map(len, parts)) >= 5
        counts = np.array([np.bincount(images.labels[part], minlength=10) for part in parts])
        return float((counts / counts.sum(axis=0)).std())

    assert skew(0.1) > 2 * skew(1.0) > 4 * skew(1000.0)


def test_dirichlet_does_not_follow_the_order_of_the_file():
    parts = partition(labelled(np.zeros(1000), 1), name="dirichlet", clients=2, seed=0, alpha=100.0)
    assert [part.mean() / 1000 for part in parts] == pytest.approx([0.5, 0.5], abs=0.1)


def test_label_groups_are_those_of_fdnas(images):
    parts = partition(images, name="label_groups", clients=10, seed=0)
    for client, part in enumerate(parts):
        group = [{0, 1, 2}, {3, 4, 5}, {6, 7, 8, 9}][0 if client < 3 else 1 if client < 6 else 2]
        assert set(images.labels[part].tolist()) == group
    assert max(map(len, parts[:3])) - min(map(len, parts[:3])) <= 1


def test_label_groups_with_given_clients(images):
    groups = ((9,), tuple(range(9)))
    chosen = {"name": "label_groups", "clients": 4, "groups": groups, "clients_per_group": (1, 3)}
    parts = partition(images, seed=0, **chosen)
    assert torch.equal(torch.from_numpy(parts[0]), (images.labels == 9).nonzero().squeeze(1))
    assert_covers(parts, len(images))


def test_quantity_sizes(images):
    parts = partition(images, name="quantity", clients=5, seed=0, alpha=1.0, min_size=20)
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 20
    assert max(sizes) > 2 * min(sizes)


def test_columns_give_sorted_values(images):
    parts = partition(images, name="column", clients=3, seed=0, column="hospital")
    for value, part in zip(("east", "north", "south"), parts, strict=True):
        assert set(images.columns["hospital"][part]) == {value}


IMPOSSIBLE = [
    ({"name": "iid", "clients": 601}, "clients=601 does not fit 600 records"),
    ({"name": "iid", "clients": 0}, "clients=0 does not fit"),
    ({"name": "dirichlet", "clients": 50, "alpha": 0.1}, "raise partition.alpha"),
    ({"name": "quantity", "clients": 50, "alpha": 0.1}, "raise partition.alpha"),
    ({"name": "quantity", "fractions": (0.5, 0.5)}, "must be 3 shares"),
    ({"name": "quantity", "fractions": (0.5, 0.6, 0.1)}, "must be 3 shares"),
    ({"name": "quantity", "fractions": (0.9999, 0.00005, 0.00005)}, "without records"),
    ({"name": "label_groups", "groups": ((0, 1), (1, 2))}, "exactly once"),
    ({"name": "label_groups", "clients": 2}, r"\[0, 1, 1\] must give each of the 3 groups"),
    ({"name": "label_groups", "clients_per_group": (1, 1)}, "clients_per_group"),
    ({"name": "column"}, "needs the column partition.column, but .* have hospital"),
    ({"name": "column", "column": "town"}, "needs the column town"),
    ({"name": "column", "column": "hospital", "clients": 4}, "set clients=3"),
    ({"name": "sites"}, "needs the column site"),
]


@pytest.mark.parametrize(("choice", "message"), IMPOSSIBLE)
def test_partitions_that_cannot_be_made(images, choice, message):
    refuses(message, partition, images, **{"clients": 3, "seed": 0} | choice)


def test_a_class_too_small_for_its_clients():
    records = labelled(np.array([0] * 50 + [1]), 2)
    terms = {"name": "label_groups", "clients": 4, "seed": 0, "groups": ((0,), (1,))}
    refuses("leaves client 3 of 4 without records", partition, records, **terms)


def test_saved_partitions_come_back(tmp_path, images):
    parts = partition(images, name="iid", clients=7, seed=0)
    prepared.save_partition(tmp_path / "partition.json", parts)
    loaded = prepared.load_partition(tmp_path / "partition.json")
    assert [p.tolist() for p in loaded] == [p.tolist() for p in parts]
    assert [path.name for path in tmp_path.iterdir()] == ["partition.json"]


NO_JSON = ("{", "[" * 50_000 + "]" * 50_000, "[]", '{"clients": []}')
NO_LISTS = ([[0, 1], []], [[0, 1], [1, 2]], [[1, 0], [2]], [[-1, 0], [2]], [[0.5], [2]])


NO_PARTITIONS = [
    *((text, "cannot be read as a saved partition") for text in NO_JSON),
    *((json.dumps({"clients": of}), "saved partition: expected a list") for of in NO_LISTS),
]


@pytest.mark.parametrize(("content", "message"), NO_PARTITIONS)
def test_files_that_hold_no_partition(tmp_path, content, message):
    (tmp_path / "partition.json").write_text(content)
    refuses(message, prepared.load_partition, tmp_path / "partition.json")


def test_iid_does_not_pay_for_flwr_datasets():
    program = (
        "import sys, numpy, torch\n"
        "from fednas_flwr.data.prepared import partition\n"
        "from fednas_flwr.data.records import Records, record_ids\n"
        "from fednas_flwr.settings.data_settings import RandomPartition\n"
        "ids = record_ids([b'a', b'b'])\n"
        "r = Records(torch.zeros(2, 1), torch.zeros(2).long(), ids, ('a',))\n"
        "partition(r, RandomPartition('iid', seed=0), clients=2)\n"
        "heavy = {'flwr_datasets', 'datasets', 'pandas', 'sklearn', 'torchvision', 'PIL'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    assert told("-c", program) == "[]\n"
