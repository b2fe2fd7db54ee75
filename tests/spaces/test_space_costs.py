"""Costs of the MBConv space: sums over layers are the networks' own."""

from dataclasses import replace

import pytest
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.spaces.costs import (
    count_multiply_adds,
    count_parameters,
    layers_of,
    measure_space,
    space_costs,
)
from fednas_flwr.spaces.latency_tables import Conditions
from fednas_flwr.spaces.mbconv import CANDIDATES, SKELETONS, MBConvSpace
from fednas_flwr.spaces.mlp import MLPSpace
from fednas_flwr.spaces.nasbench201 import NASBench201Space
from fednas_flwr.spaces.space import CELL

SMALL = {"skeleton": SKELETONS["small"], "candidates": CANDIDATES["proxyless"]}
SPACE = MBConvSpace(input_shape=(3, 28, 28), num_classes=5, **SMALL)


def genotypes(count):
    generator = make_generator(0, "genotypes")
    return [SPACE.random_genotype(generator) for _ in range(count)]


def test_multiply_adds_are_those_of_torchs_counter():
    costs = space_costs(SPACE, None)
    for genotype in genotypes(5):
        counted = count_multiply_adds(SPACE.network(genotype), SPACE.input_shape)
        assert costs.of_path(SPACE.path(genotype)) == counted
        assert costs.lowest < counted < costs.highest
    smallest = SPACE.genotype(costs.per_op_EO.nan_to_num(9e9).argmin(1).tolist())
    assert count_multiply_adds(SPACE.network(smallest), SPACE.input_shape) == costs.lowest


def test_a_measured_table_predicts_networks():
    """How well is measured by `fednas latency measure` and the report of a run."""
    under = Conditions(torch.device("cpu"), threads=1, batch_size=4, passes=5)
    table, predictions = measure_space(SPACE, under, genotypes(2))
    plan = SPACE.plan
    layers = {*plan.before, *plan.after, *(layer for row in plan.blocks for layer in row)} - {None}
    assert set(table.timings) == layers
    costs = space_costs(SPACE, table)
    predicted = [costs.of_path(SPACE.path(genotype)) for genotype in genotypes(2)]
    assert [predicted_ms for predicted_ms, _ in predictions] == predicted
    assert costs.unit == "ms"
    assert 0 < costs.lowest < costs.highest
    with pytest.raises(ConfigError, match="measured with norm=batch, but search_space.norm=group"):
        space_costs(replace(SPACE, norm="group"), table)
    with pytest.raises(ConfigError, match="lacks the layer op mbconv3_3x3, input_shape"):
        space_costs(replace(SPACE, width=2.0), table)


def size(shape):
    return {"input_shape": shape, "num_classes": 3, "norm": "group"}


@pytest.mark.parametrize(
    ("space", "kinds"),
    [
        (MLPSpace(**size((5,)), channels=8, num_cells=2), ["normal", "reduction"]),
        (NASBench201Space(**size((1, 8, 8)), channels=4, num_cells=1), [CELL] * 3),
    ],
)
def test_layers_are_in_the_order_of_computation_with_shapes(space, kinds):
    genotype = space.random_genotype(make_generator(0, "test"))
    network = space.network(genotype)
    layers = layers_of(network, space.input_shape, genotype)
    assert [layer["kind"] for layer in layers if layer["kind"]] == kinds
    assert layers[-1]["name"] == "classifier"
    assert layers[-1]["shape"] == [space.num_classes]
    assert sum(layer["parameters"] for layer in layers) == count_parameters(network)
    assert not any(module._forward_hooks for module in network.modules())
