from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.data.records import Column
from fednas_flwr.data.statistics import REACH, Moments, bounded, column_moments, pooled

from ..data_sets import records_of, save_pixels


def table(features):
    """A table of two columns of numbers and one category."""
    schema = (Column("x"), Column("y"), Column("z", "category", ("only",)))
    return records_of(features.astype(np.float32), schema=schema)


ONE_COLUMN = table(np.zeros((1, 1)))


@given(st.lists(st.integers(0, 2), min_size=6, max_size=60), st.integers(0, 2**32 - 1))
def test_pooled_statistics_are_those_of_all_records_together(owners, seed):
    rng = np.random.default_rng(seed)
    size = len(owners)
    columns = [rng.normal(1e4, 3, size), rng.exponential(2, size), rng.random(size)]
    features = np.column_stack(columns)
    features[rng.random(len(owners)) < 0.3, 1] = np.nan
    records = table(features)
    parts = [np.flatnonzero(np.array(owners) == owner) for owner in range(3)]
    found = pooled([column_moments(records, torch.from_numpy(part)) for part in parts], records)
    known = [column[~np.isnan(column)] for column in records.features[:, :2].double().numpy().T]
    means = [column.mean() if len(column) else 0.0 for column in known]
    stds = [column.std() if len(column) > 1 else 1.0 for column in known]
    assert found.mean == pytest.approx((*means, 0.0))
    assert found.std == pytest.approx((*stds, 1.0), rel=1e-6)


def test_a_target_that_is_a_number_is_standardised_by_all_records():
    rng = np.random.default_rng(0)
    records = table(rng.normal(size=(30, 3)))
    numbers = torch.from_numpy(rng.exponential(9, 30).astype(np.float32))
    records = replace(records, labels=numbers)
    parts = torch.arange(30).split([5, 24, 1])
    found = pooled([column_moments(records, part) for part in parts], records)
    assert found.target == pytest.approx((float(numbers.mean()), float(numbers.std(correction=0))))
    assert len(found.mean) == len(found.std) == 3
    assert found.mean[:2] == pytest.approx(records.features[:, :2].mean(0).tolist(), abs=1e-6)


def test_a_constant_or_missing_column_has_deviation_one():
    features = np.column_stack([np.full(4, 7.1), np.full(4, np.nan), np.ones(4)])
    moments = column_moments(table(features), torch.arange(4))
    found = pooled([moments, moments], table(features))
    assert found.mean == pytest.approx((7.1, 0.0, 0.0))
    assert found.std == (1.0, 1.0, 1.0)


CHOLESTEROL = [  # of the four hospitals of the UCI heart disease data; one has written 0 for none
    *(Moments(303, 246.7, 51.7), Moments(271, 250.8, 67.5)),
    *(Moments(123, 0.0, 0.0), Moments(193, 178.7, 113.9)),
]


def test_honest_moments_stay_as_they_are():
    """Of unlike hospitals, of unlike sizes, of columns that few know or that are constant."""
    few = [Moments(0, 0.0, 0.0), Moments(3, 0.0, 0.0), Moments(0, 0.0, 0.0), Moments(2, 1.0, 0.5)]
    constant = [Moments(9, 1.0, 0.0)] * 3 + [Moments(9, 0.0, 0.0)]
    parties = dict(enumerate(map(list, zip(CHOLESTEROL, few, constant, strict=True))))
    assert bounded(parties) == (parties, {})
    small = {0: [Moments(10_000, 5.0, 1.0)], 1: [Moments(3, 6.0, 9.0)], 2: [Moments(800, 4.0, 2.0)]}
    assert bounded(small) == (small, {})
    two = {0: [Moments(9, 1.0, 2.0)], 1: [Moments(9, 1e6, 1e9)]}
    assert bounded(two) == (two, {})  # whom to believe?


@given(st.integers(0, 10**6), st.floats(-1e29, 1e29), st.floats(0, 1e29))
def test_one_of_four_moves_what_standardises_all_by_little(count, mean, std):
    honest = dict(enumerate([of] for of in CHOLESTEROL[:3]))
    found, far = bounded({**honest, 3: [Moments(count, mean, std)]})
    assert {client: found[client] for client in honest} == honest
    before = pooled(list(honest.values()), ONE_COLUMN)
    after = pooled(list(found.values()), ONE_COLUMN)
    assert abs(after.mean[0] - before.mean[0]) <= 2 * REACH * before.std[0]
    assert after.std[0] <= 2 * REACH * before.std[0]
    assert set(far) <= {3}
    if count > 100 and (abs(mean) > 1e4 or std > 1e4):
        assert far == {3: 0}


@pytest.mark.parametrize("value", [1e-300, 1e-45, 1e29])
def test_no_deviation_is_one_that_float32_cannot_divide_by(value):
    for parties in ([0.0, 0.0, value], [value], [value, value]):
        found = pooled([[Moments(9, 0.0, std)] for std in parties], ONE_COLUMN)
        assert 1e-37 < found.std[0] <= 1e30
        assert torch.isfinite(torch.tensor(3.0) / torch.tensor(found.std[0]))


# --- summary


@pytest.fixture
def patients(tmp_path):
    """120 rows: 6 ages and 10 wards missing, one row twice, one outcome of ten rare."""
    rows = []
    for i in range(119):
        age = "" if i < 6 else f"{20 + i / 2:.1f}".replace(".", ",")
        ward = "" if 20 <= i < 30 else "ns"[i % 2]
        rows.append(f"{age};{ward};{1 + i % 28}.01.2024;{'died' if i % 10 == 0 else 'left'}")
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(["age;ward;seen;outcome", *rows, rows[-1]]) + "\n")
    return path


def test_a_table_is_told_by_columns_clients_and_what_is_odd(patients, tmp_path, prints):
    own = ["clients=2", "dataset.server_test=false", f"dataset.cache={tmp_path / 'cache'}"]
    lines = prints("data", patients, *own).splitlines()
    assert lines[0] == "120 records for clients; shape of one: 4"
    assert lines[1] == "patients.csv: separator semicolon, decimal comma"
    for line in (
        "numbers: age (6 missing)",
        "dates: seen",
        "categories: ward (2 values, 10 missing)",
        "label outcome: died 12, left 108",
        "16 cells are missing: a number or date counts as the mean, a category as no category",
        "column age: number, 23 to 79, mean 51.2456, 6 missing",
        "column seen: date, 2024-01-01 to 2024-01-28",
        "column ward: one of n, s, 10 missing",
        "note: 1 record equals another; equal ones stay in one part",
        "suggestion: evaluation.positive=died, the rarer class, for AUROC and the like",
        "suggestion: with privacy=dp 'dataset.ranges={age:[23,79],seen:[2024-01-01,2024-01-28]}', "
        "with the ends that are usual in place of these, which are of the records, and "
        "experiment=fedavg/private_table",
        "suggestion: partition=column partition.column=<column>, if one of ward says whose a "
        "record is",
    ):
        assert line in lines
    clients = [line for line in lines if line.startswith("client ")]
    assert len(clients) == 2
    told = [int(word) for line in clients for word in line.split("; ")[0].split() if word.isdigit()]
    assert sum(told) == 120


def test_small_and_lopsided_clients_are_named(patients, tmp_path, prints):
    own = ["partition=column", "partition.column=outcome", "clients=2"]
    cache = f"dataset.cache={tmp_path / 'cache'}"
    settings = ["dataset.label=ward", "dataset.server_test=false", cache]
    patients.write_text(patients.read_text().replace(";;", ";e;"))
    printed = prints("data", patients, *own, *settings)
    assert "died is small: " in printed or "died has no record for " in printed
    assert "label ward: e 10, n 56, s 54" in printed
    patients.write_text(patients.read_text().replace("left", "Died", 40))
    said = "note: the column of clients holds Died and died: join them in the data if they are one"
    assert said in prints("data", patients, *own[:2], "clients=3", *settings)
    number = ["dataset.label=age", "dataset.task=regression"]
    said = "}' dataset.target_range=[23,79], with the ends that are usual"
    assert said in prints("data", patients, *number, *settings[1:])


def test_images_are_told_with_what_is_done_to_them(tmp_path, prints):
    rng = np.random.default_rng(0)
    for i in range(40):
        pixels = rng.integers(0, 256, (8 + i % 3, 8), np.uint8)
        save_pixels(pixels, tmp_path / "images" / "ab"[i % 2] / f"{i}.png")
    (tmp_path / "images" / "a" / "no.png").write_bytes(b"no image")
    cache = [f"dataset.cache={tmp_path / 'cache'}", "dataset.channels=1", "dataset.image_size=8"]
    told = prints("data", tmp_path / "images", *cache, code=2)
    assert "1 of 41 files cannot be read as an image" in told
    printed = prints("data", tmp_path / "images", *cache, "dataset.corrupt=skip")
    assert "1 broken images left out" in printed
    assert "resized to 8x8 (bilinear) from 8x9: 13, 8x10: 13" in printed
    assert "does not exist" in prints("data", tmp_path / "nothing", code=2)
