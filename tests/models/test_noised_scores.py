"""AUROC and a threshold from noised counts, against scikit-learn and many draws of noise."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fednas_flwr.models import noised_scores
from fednas_flwr.models.noised_scores import BINS, one_hot, planned_noise, scores_of_counts


def records(count, share, spread):
    """Log odds of records, and which of them are positive."""
    generator = torch.Generator().manual_seed(0)
    positive = torch.rand(count, generator=generator) < share
    odds = spread * torch.randn(count, generator=generator) + 1.2 * spread * positive - 2
    return odds, positive


@given(st.lists(st.tuples(st.floats(width=32) | st.just(float("nan")), st.booleans()), min_size=1))
def test_a_record_is_in_exactly_one_count(rows):
    odds, positive = (torch.tensor(column) for column in zip(*rows, strict=True))
    counts = one_hot(odds, positive)
    assert counts.shape == (len(rows), 2 * BINS)
    assert bool((counts.sum(1) == 1).all())
    assert torch.equal(counts[:, BINS:].sum(1).bool(), positive)


@pytest.mark.parametrize("spread", [0.3, 1.0, 2.0])
def test_without_noise_they_are_those_of_the_binned_scores(spread):
    odds, positive = records(2000, 0.3, spread)
    told = scores_of_counts(one_hot(odds, positive).sum(0), noise=0.0)
    assert isinstance(told, noised_scores.NoisedScores)
    scale = BINS / 2 / np.arcsinh(noised_scores.LARGEST)
    binned = np.floor(np.arcsinh(odds.numpy()) * scale)
    assert told.auroc == pytest.approx(roc_auc_score(positive, binned), abs=1e-9)
    assert told.auroc == pytest.approx(roc_auc_score(positive, odds), abs=0.02)
    assert told.error == 0
    assert told.prevalence == pytest.approx(positive.double().mean().item())
    edges = [float(np.sinh(k / scale)) for k in range(1 - BINS // 2, BINS // 2)]
    ill, well = odds[positive], odds[~positive]
    youden = [(ill >= edge).double().mean() + (well < edge).double().mean() for edge in edges]
    best = torch.tensor(edges[int(np.argmax(youden))]).double().sigmoid().item()
    assert told.threshold == pytest.approx(best)


def test_the_error_that_is_told_is_that_of_many_draws():
    odds, positive = records(1500, 0.15, 1.0)
    counts, noise = one_hot(odds, positive).sum(0), 2.0
    generator = torch.Generator().manual_seed(1)
    draws = [counts + noise * torch.randn(2 * BINS, generator=generator) for _ in range(400)]
    told = [scores_of_counts(draw, noise=noise) for draw in draws]
    areas = [one.auroc for one in told if one.auroc is not None]
    assert len(areas) > 350
    assert np.std(areas) == pytest.approx(np.mean([one.error for one in told]), rel=0.2)
    assert np.mean(areas) == pytest.approx(roc_auc_score(positive, odds), abs=0.015)
    assert noise / 2 < planned_noise(np.std(areas), records=1500, rarer=0.15) < noise * 2


def test_an_auroc_that_noise_could_have_made_is_not_told():
    odds, positive = records(1500, 0.15, 1.0)
    generator = torch.Generator().manual_seed(2)
    counts = one_hot(odds, positive).sum(0)
    noisy = scores_of_counts(counts + 8 * torch.randn(2 * BINS, generator=generator), noise=8.0)
    assert noisy is None or noisy.auroc is None
    for _ in range(50):
        assert scores_of_counts(8 * torch.randn(2 * BINS, generator=generator), noise=8.0) is None
