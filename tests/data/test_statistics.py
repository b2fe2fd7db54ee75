from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.data.records import Column
from fednas_flwr.data.statistics import REACH, Moments, bounded, column_moments, pooled

from ..data_sets import records_of


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
