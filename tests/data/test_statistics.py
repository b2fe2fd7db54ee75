from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.data.records import Records, record_ids
from fednas_flwr.data.schema import Column
from fednas_flwr.data.statistics import column_moments, pooled


def table(features: np.ndarray) -> Records:
    """A table of two columns of numbers and one category."""
    return Records(
        features=torch.from_numpy(features.astype(np.float32)),
        labels=torch.zeros(len(features), dtype=torch.int64),
        ids=record_ids(row.tobytes() for row in features),
        class_names=("a",),
        schema=(Column("x"), Column("y"), Column("z", "category", ("only",))),
    )


@given(st.lists(st.integers(0, 2), min_size=6, max_size=60), st.integers(0, 2**32 - 1))
def test_pooled_statistics_are_those_of_all_records_together(owners: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = np.column_stack(
        [rng.normal(1e4, 3, len(owners)), rng.exponential(2, len(owners)), rng.random(len(owners))]
    )
    features[rng.random(len(owners)) < 0.3, 1] = np.nan
    records = table(features)
    moments = [
        column_moments(records, torch.from_numpy(np.flatnonzero(np.array(owners) == owner)))
        for owner in range(3)
    ]
    found = pooled(moments, num_features=3)
    numbers = records.features[:, :2].double().numpy()
    known = [column[~np.isnan(column)] for column in numbers.T]
    means = [column.mean() if len(column) else 0.0 for column in known]
    stds = [column.std() if len(column) > 1 else 1.0 for column in known]
    assert found.mean == pytest.approx((*means, 0.0))
    assert found.std == pytest.approx((*stds, 1.0), rel=1e-6)


def test_a_constant_or_missing_column_has_deviation_one() -> None:
    features = np.column_stack([np.full(4, 7.1), np.full(4, np.nan), np.ones(4)])
    moments = column_moments(table(features), torch.arange(4))
    found = pooled([moments, moments], num_features=3)
    assert found.mean == pytest.approx((7.1, 0.0, 0.0))
    assert found.std == (1.0, 1.0, 1.0)
