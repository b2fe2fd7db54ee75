from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix

from fednas_flwr.models.metrics import (
    BINS,
    best_threshold,
    calibration,
    detailed,
    histogram,
    intervals,
    shares_at,
)
from fednas_flwr.search.objective import Objective

PROBABILITIES = st.lists(st.integers(0, 999), min_size=2, max_size=40)


@given(PROBABILITIES, st.integers(0, 2**32 - 1))
def test_the_threshold_is_the_best_of_all(thousandths: list[int], seed: int) -> None:
    shares = torch.tensor(thousandths, dtype=torch.float64) / 1000 + 5e-4
    positive = torch.from_numpy(np.random.default_rng(seed).random(len(shares)) < 0.5)
    parts = [histogram(shares[i::2], positive[i::2]) for i in (0, 1)]  # of two clients
    threshold = best_threshold(parts, [len(shares[i::2]) for i in (0, 1)])
    if positive.all() or not positive.any():
        assert threshold is None
        return

    def youden(at: float) -> float:
        sensitivity = (shares[positive] >= at).double().mean()
        return float(sensitivity + (shares[~positive] < at).double().mean() - 1)

    assert threshold is not None
    everyone = [youden(k / BINS) for k in range(1, BINS)]
    assert youden(threshold) == pytest.approx(max(everyone))
    whole = histogram(shares, positive)
    found = shares_at(whole, threshold)
    assert found["sensitivity"] + found["specificity"] - 1 == pytest.approx(youden(threshold))


def test_calibration_of_records_counted_by_hand() -> None:
    probabilities = torch.tensor([[0.95, 0.05], [0.91, 0.09], [0.35, 0.65], [0.62, 0.38]])
    found = calibration(probabilities, torch.tensor([0, 1, 1, 0]))
    assert [n for _, _, n in found["bins"]] == [2, 2]
    # two at .635 of which both are right, two at .93 of which one is
    assert found["expected_error"] == pytest.approx(0.5 * 0.365 + 0.5 * 0.43)


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    """Of 200 samples about 95 % of the intervals hold the true share."""
    covered = 0
    for seed in range(200):
        hits = torch.rand(80, generator=torch.Generator().manual_seed(seed)).le(0.7).double()

        def measure(weights: torch.Tensor, hits: torch.Tensor = hits) -> dict[str, torch.Tensor]:
            return {"share": weights @ hits / weights.sum(1)}

        low, high = intervals(measure, 80, seed=seed)["share"]
        covered += low <= 0.7 <= high
    assert 175 <= covered <= 200  # expected 190, deviation 3


@pytest.mark.parametrize("num_classes", [2, 4])
def test_a_report_has_all_scores_as_json(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % num_classes
    logits = torch.randn(200, num_classes, generator=generator)
    logits[torch.arange(200), labels] += 1
    threshold = 0.4 if num_classes == 2 else None
    found = detailed(logits, labels, objective=Objective(), threshold=threshold)
    json.dumps(found, allow_nan=False)
    assert found["confusion"] == confusion_matrix(labels, logits.argmax(1)).tolist()
    counts = [row["count"] for row in found["per_class"]]
    assert counts == [200 / num_classes] * num_classes
    accuracy = float((logits.argmax(1) == labels).double().mean())
    low, high = found["intervals"]["accuracy"]
    assert low < accuracy < high
    assert ("sensitivity" in found) == (num_classes == 2)
    if num_classes == 2:
        called = logits.softmax(1)[:, 1] >= 0.4
        assert found["sensitivity"] == pytest.approx(float(called[labels == 1].double().mean()))
        assert found["specificity"] == pytest.approx(float((~called[labels == 0]).double().mean()))
