from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from torch import nn

from fednas_flwr import load_network
from fednas_flwr.builders.networks import make_network, make_space
from fednas_flwr.errors import ConfigError
from fednas_flwr.evaluation.export import METADATA_KEY, export_onnx, export_safetensors
from fednas_flwr.search_spaces.genotype import to_json

SHAPE = (3, 10, 12)


MBCONV = {"skeleton": "small", "candidates": "proxyless", "width": 0.5}


def derived(
    space_name: str,
    *,
    auxiliary: bool = False,
    num_cells: int = 1,
    norm: str,
    sizes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the description of a random derived network."""
    sizes = sizes or {"channels": 4, "num_cells": num_cells}
    space = make_space(space_name, input_shape=SHAPE, num_classes=5, norm=norm, **sizes)
    genotype = space.random_genotype(torch.Generator().manual_seed(3))
    shapes = {"input_shape": list(SHAPE), "num_classes": 5}
    cells = {"genotype": json.loads(to_json(genotype)), "norm": norm, "auxiliary": auxiliary}
    return {"name": "derived", **shapes, **sizes, **cells}


DESCRIPTIONS = {
    "darts": derived("darts", auxiliary=True, num_cells=5, norm="batch"),
    "darts_group": derived("darts", auxiliary=False, num_cells=3, norm="group"),
    "nasbench201": derived("nasbench201", auxiliary=False, num_cells=1, norm="batch"),
    "mbconv": derived("mbconv", norm="batch", sizes=MBCONV),
    "plain_cnn": {"name": "plain_cnn", "input_shape": list(SHAPE), "num_classes": 5},
}


def trained(description: dict[str, Any]) -> nn.Module:
    """Return the network with weights and batch statistics that are not the initial ones."""
    torch.manual_seed(0)
    network = make_network(description)
    network.train()
    for _ in range(3):
        network(torch.randn(8, *SHAPE))
    return network


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_safetensors_gives_the_same_network_back(name: str, tmp_path: Path) -> None:
    description = DESCRIPTIONS[name]
    network = trained(description)
    path = export_safetensors(network, description, tmp_path)
    loaded = load_network(tmp_path)
    assert not loaded.training
    x = torch.randn(6, *SHAPE)
    with torch.no_grad():
        assert torch.equal(loaded(x), network.eval()(x))
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()[METADATA_KEY]) == description
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_loading_before_the_export_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has not reached its export"):
        load_network(tmp_path)


@pytest.mark.parametrize("name", DESCRIPTIONS)
def test_onnx_equals_torch_for_any_batch_size(name: str, tmp_path: Path) -> None:
    network = trained(DESCRIPTIONS[name])
    path, difference = export_onnx(network, SHAPE, tmp_path)
    assert difference < 1e-4
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(onnx.load(path))
    session = onnxruntime.InferenceSession(path)
    assert [i.name for i in session.get_inputs()] == ["input"]
    for batch in (1, 3, 9):
        x = torch.randn(batch, *SHAPE)
        (logits,) = session.run(["logits"], {"input": x.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(logits, network(x).numpy(), rtol=1e-3, atol=1e-4)


class _Treacherous(nn.Module):
    """Answers differently while it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = 0.01 if torch.onnx.is_in_onnx_export() else 0.0
        logits: torch.Tensor = self.dense(x) + shift
        return logits


def test_onnx_that_differs_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("of an earlier run")
    with pytest.raises(RuntimeError, match=r"differs from torch by 0\.0"):
        export_onnx(_Treacherous(), (4,), tmp_path)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "model.onnx": "of an earlier run"
    }
