"""Krum, Multi-Krum and Bulyan against Flower's own strategies, and what an attack does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import Bulyan, Krum, MultiKrum

from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.robust import Selection
from fednas_flwr.federation.flower import begin_task

CLIENTS, MALICIOUS = 11, 2
FLOWER = {
    "krum": Krum(num_malicious_nodes=MALICIOUS),
    "multi_krum": MultiKrum(num_malicious_nodes=MALICIOUS, num_nodes_to_select=CLIENTS - MALICIOUS),
    "bulyan": Bulyan(num_malicious_nodes=MALICIOUS),
}


@pytest.fixture
def models() -> list[np.ndarray]:
    """Models of clients, whose last two are hostile: the one is near, the other far away."""
    rng = np.random.default_rng(3)
    models = [own for own in rng.normal(size=(CLIENTS, 40)).astype(np.float32)]
    models[-2] = models[-2] + 3
    models[-1] = 1e4 * models[-1]
    return models


def selected(name: str, models: list[np.ndarray], malicious: int = MALICIOUS) -> np.ndarray:
    """Return what is made of the models, of which the last 10 values are another state."""
    selection = Selection(name, malicious)
    for number, own in enumerate(models):
        weights, alphas = torch.from_numpy(own[:-10].copy()), torch.from_numpy(own[-10:].copy())
        counters = torch.tensor([10**6 * number])  # of batches: no model's distance
        states = {
            "weights": {"float32": weights},
            "alphas": {"float32": alphas},
            "buffers": {"int64": counters},
        }
        selection.add(states, weight=1.0 + number)
    result = selection.result()
    assert result["buffers"]["int64"].dtype == torch.int64
    vectors = [result[state]["float32"] for state in ("weights", "alphas")]
    return torch.cat(vectors).numpy()


@pytest.mark.parametrize("name", FLOWER)
def test_agrees_with_flowers_strategy(name: str, models: list[np.ndarray]) -> None:
    begin_task(1)
    replies = [
        Message(
            RecordDict(
                {
                    "arrays": ArrayRecord({"model": Array(own)}),
                    "metrics": MetricRecord({"num-examples": 1 + number}),
                }
            ),
            dst_node_id=1,
            message_type="train",
        )
        for number, own in enumerate(models)
    ]
    arrays, _ = FLOWER[name].aggregate_train(1, replies)
    assert arrays is not None
    np.testing.assert_allclose(selected(name, models), arrays["model"].numpy(), 1e-5, 1e-6)


@pytest.mark.parametrize("name", FLOWER)
def test_hostile_models_are_left_out(name: str, models: list[np.ndarray]) -> None:
    result = selected(name, models)
    honest = np.array(models[:-2])
    assert np.abs(result).max() <= np.abs(honest).max()
    models[-1][:] = np.finfo(np.float32).max  # whose square is infinite
    np.testing.assert_allclose(selected(name, models), result, 1e-6)


def test_krum_is_the_model_of_the_least_sum_of_distances(models: list[np.ndarray]) -> None:
    wide = np.array(models, dtype=np.float64)
    squares = ((wide[:, None] - wide[None]) ** 2).sum(axis=-1)
    scores = [sorted(row)[1 : CLIENTS - MALICIOUS - 1] for row in squares]
    best = int(np.argmin([sum(score) for score in scores]))
    np.testing.assert_array_equal(selected("krum", models), models[best])


def test_small_differences_of_large_weights_count() -> None:
    """Flower's formula, of float32 weights near 1000, takes any of them."""
    rng = np.random.default_rng(0)
    models = [1000 + 1e-3 * own for own in rng.normal(size=(CLIENTS, 40))]
    for own in models[:4]:
        own += 1e-2
    chosen = selected("krum", [own.astype(np.float32) for own in models])
    assert np.abs(chosen - 1000).max() < 6e-3


@pytest.mark.parametrize(("name", "fewest"), [("krum", 7), ("multi_krum", 7), ("bulyan", 11)])
def test_too_few_replies(name: str, fewest: int, models: list[np.ndarray]) -> None:
    selected(name, models[:fewest])
    with pytest.raises(ValueError, match=f"malicious=2 needs {fewest} replies, got {fewest - 1}"):
        selected(name, models[: fewest - 1])


def test_another_name() -> None:
    with pytest.raises(ConfigError, match="aggregate=kram is unknown"):
        Selection("kram", 1)
