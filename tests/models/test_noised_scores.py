"""AUROC and a threshold from noised counts, against scikit-learn and many draws of noise."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import nn

from fednas_flwr.models import networks, noised_scores
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
    assert told.edge == pytest.approx(edges[int(np.argmax(youden))])
    line = LogisticRegression(C=1e6).fit(odds[:, None], positive)
    assert [told.slope, told.offset] == pytest.approx(
        [line.coef_[0, 0], line.intercept_[0]], rel=0.1
    )
    best = torch.tensor(told.edge * told.slope + told.offset).double().sigmoid().item()
    assert told.threshold == pytest.approx(best)


def test_scores_that_are_wrong_way_round_or_wholly_apart_have_a_line():
    odds, positive = records(2000, 0.3, 1.0)
    useless = scores_of_counts(one_hot(-odds, positive).sum(0), noise=0.0)
    share = torch.tensor(useless.offset).sigmoid().item()
    assert (useless.slope, share) == (1e-3, pytest.approx(useless.prevalence, rel=1e-2))
    centres = noised_scores._log_odds(torch.tensor([15.5, 48.5]) / BINS)
    apart = scores_of_counts(one_hot(centres[positive.long()], positive).sum(0), noise=0.0)
    surest, count = (apart.slope * centres + apart.offset).sigmoid(), int(positive.sum())
    assert surest.tolist() == pytest.approx([1 / (2002 - count), 1 - 1 / (count + 2)], rel=2e-2)


@pytest.mark.parametrize("positive", [0, 1])
@pytest.mark.parametrize("kind", ["linear", "mlp_64", "bent"])
def test_a_network_is_corrected_in_its_last_layers_or_stays(kind, positive):
    torch.manual_seed(0)
    x, line = torch.randn(9, 5), noised_scores.NoisedScores(None, 1.0, 0.1, 0.0, 0.4, 1.5)
    network = nn.Sequential(nn.Linear(5, 2), nn.Softplus())
    if kind != "bent":
        network = networks.OneLayer((5,), 2, width=64) if kind == "mlp_64" else nn.Linear(5, 2)
    before = network(x)
    made = noised_scores.corrected(network, line, positive=positive, x=torch.rand(8, 5))
    assert torch.equal(network(x), before)
    assert (made is network) == (kind == "bent")
    if kind != "bent":
        odds, old = (y[:, positive] - y[:, 1 - positive] for y in (made(x), before))
        torch.testing.assert_close(odds, 0.4 * old + 1.5)


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
    draws = (counts + 5 * torch.randn(2 * BINS, generator=generator) for _ in range(200))
    told = [one.prevalence for draw in draws if (one := scores_of_counts(draw, noise=5.0))]
    assert np.mean(told) == pytest.approx(positive.double().mean().item(), abs=0.01)
    for _ in range(50):
        assert scores_of_counts(8 * torch.randn(2 * BINS, generator=generator), noise=8.0) is None
