"""beta-DARTS' regulariser against its formula and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fednas_flwr.search.architect import beta_gradient, rising


def test_the_gradient_is_that_of_the_mean_logsumexp_of_all_edges():
    torch.manual_seed(0)
    alphas = {
        "normal": torch.randn(4, 5, dtype=torch.float64, requires_grad=True),
        "reduction": torch.randn(2, 5, dtype=torch.float64, requires_grad=True),
    }
    edges = torch.cat(list(alphas.values()))
    loss = 3.5 * torch.stack([edge.exp().sum().log() for edge in edges]).mean()
    expected = torch.autograd.grad(loss, list(alphas.values()))
    actual = beta_gradient(alphas, weight=3.5)
    assert list(actual) == list(alphas)
    for mine, other in zip(actual.values(), expected, strict=True):
        torch.testing.assert_close(mine, other)
        assert not mine.requires_grad


def test_by_hand():
    """Two edges with the shares 1/4, 3/4 and 1/2, 1/2, times a weight of 8 over 2 edges."""
    alphas = {"cell": torch.tensor([[0.0, math.log(3)], [7.0, 7.0]])}
    gradient = beta_gradient(alphas, weight=8.0)["cell"]
    torch.testing.assert_close(gradient, torch.tensor([[1.0, 3.0], [2.0, 2.0]]))


def test_ops_that_are_never_chosen_are_left_alone():
    gradient = beta_gradient({"cell": torch.tensor([[1.0, -1e9]])}, weight=2.0)["cell"]
    assert gradient.tolist() == [[2.0, 0.0]]


def test_the_weight_rises_linearly_to_its_value_in_the_last_round():
    assert [rising(5.0, r, 4) for r in (1, 2, 3, 4)] == pytest.approx([1.25, 2.5, 3.75, 5.0])
