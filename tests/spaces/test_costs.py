"""Expected cost against enumeration of all networks; losses, and targets that are refused."""

import itertools
import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.settings import Hardware
from fednas_flwr.settings.parser import parse
from fednas_flwr.spaces import costs as costing
from fednas_flwr.spaces.costs import Costs, HardwareLoss, count_multiply_adds, count_parameters
from fednas_flwr.spaces.latency_tables import Conditions
from fednas_flwr.spaces.mbconv import CANDIDATES, SKELETONS, MBConvSpace
from fednas_flwr.spaces.mlp import MLPSpace
from fednas_flwr.spaces.nasbench201 import NASBench201Space
from fednas_flwr.spaces.space import CELL

from ..refusals import refuses

NETWORKS = list(itertools.product([0, 1], [0, 1, 2]))
LOW, HIGH = 1.75 + 3.25, 1.75 + 7.0


TERMS = Hardware(None, "ms", target=6.0, loss="additive", scale=0.5, exponent=0.6)


@pytest.fixture
def costs():
    return Costs("ms", 1.75, [[3.0, 5.0, None], [2.0, 1.5, 0.25]])


def loss(costs, **changes):
    return HardwareLoss.of(costs, replace(TERMS, **changes))


def test_expected_cost_is_the_mean_over_all_networks(costs):
    alphas = torch.tensor([[0.3, -1.0, -1e4], [1.0, 0.2, -0.5]], dtype=torch.float64)
    alphas.requires_grad_()
    p = alphas.softmax(-1)
    enumerated = sum(p[0, i] * p[1, j] * costs.of_path([i, j]) for i, j in NETWORKS)
    found = costs.expected(p)
    assert found.item() == pytest.approx(enumerated.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(found, [alphas], retain_graph=True)
    (expected,) = torch.autograd.grad(enumerated, [alphas])
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def test_range_is_that_of_all_networks(costs):
    totals = [costs.of_path(path) for path in NETWORKS]
    assert (costs.lowest, costs.highest) == (min(totals), max(totals)) == (LOW, HIGH)
    assert math.isnan(costs.of_path([2, 0]))  # the first block does not offer it


def test_losses_have_the_papers_values(costs):
    task, cost = torch.tensor(2.0), torch.tensor(7.0)
    assert loss(costs)(task, cost).item() == pytest.approx(2 + 0.5 * (7 - 6) / 6)
    multiplicative = loss(costs, loss="multiplicative", scale=1.1)
    expected = 2 * 1.1 * (math.log(7) / math.log(6)) ** 0.6
    assert multiplicative(task, cost).item() == pytest.approx(expected)
    assert loss(costs, loss="multiplicative", scale=1.0)(task, torch.tensor(6.0)).item() == 2.0


@pytest.mark.parametrize("target", [LOW, HIGH])
def test_the_range_includes_its_ends(costs, target):
    assert loss(costs, target=target).terms.target == target


UNREACHABLE = [
    ({"target": 4.9}, r"hardware\.target=4\.9 ms cannot be reached.*cost 5 to 8\.75 ms"),
    ({"target": 8.8}, r"hardware\.target=8\.8 ms cannot be reached"),
    ({"unit": "multiply_adds"}, r"the costs are in ms: give the target in ms, from 5 to 8\.75"),
    ({"loss": "additiv"}, r"hardware\.loss=additiv is unknown.*nearest: additive"),
]


@pytest.mark.parametrize(("changes", "message"), UNREACHABLE)
def test_what_cannot_be_reached_is_refused_with_the_range(costs, changes, message):
    refuses(message, loss, costs, **changes)


@pytest.mark.parametrize("form", ["additive", "multiplicative"])
def test_a_loss_travels_as_json_and_is_the_same_again(costs, form):
    sent = loss(costs, loss=form, target=5.5, scale=0.7, exponent=0.3)
    assert sent.costs.per_op == [[3.0, 5.0, None], [2.0, 1.5, 0.25]]
    again = parse(HardwareLoss, json.loads(json.dumps(asdict(sent), allow_nan=False)), key="")
    again.check()
    assert again == sent
    assert (again.costs.unit, again.costs.fixed) == (costs.unit, costs.fixed)
    assert again.costs.per_op_EO.dtype == torch.float64
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(again.costs.per_op_EO, costs.per_op_EO, **exact)
    task, cost = torch.tensor(2.0), torch.tensor(7.0)
    assert torch.equal(again(task, cost), sent(task, cost))


def test_terms_that_make_no_loss_are_refused(costs):
    sent = loss(costs)
    with pytest.raises(ConfigError, match=r"hardware\.target=99 ms cannot be reached"):
        replace(sent, terms=replace(sent.terms, target=99.0)).check()
    never = replace(costs, per_op=[[None] * 3, [2.0, 1.5, 0.25]])
    refuses(r"hardware\.target=6 ms cannot be reached.*cost inf", replace(sent, costs=never).check)


def test_logarithms_need_costs_above_one():
    costs = Costs("ms", 0.1, [[0.5, 3.0]])
    with pytest.raises(ConfigError, match=r"multiplicative needs costs above 1 ms.*0\.6 ms on"):
        loss(costs, target=2.0, loss="multiplicative")


@pytest.mark.parametrize("training", [True, False])
def test_counting_leaves_the_network_as_it_was(training):
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).train(training)
    count_multiply_adds(network, (1, 5, 5))
    assert network.training is training
    assert torch.equal(network[1].running_mean, torch.zeros(2))


# --- Costs of the MBConv space: sums over layers are the networks' own


SMALL = {"skeleton": SKELETONS["small"], "candidates": CANDIDATES["proxyless"]}
SPACE = MBConvSpace(input_shape=(3, 28, 28), num_classes=5, **SMALL)


def genotypes(count):
    generator = make_generator(0, "genotypes")
    return [SPACE.random_genotype(generator) for _ in range(count)]


def test_multiply_adds_are_those_of_torchs_counter():
    costs = costing.space_costs(SPACE, None)
    for genotype in genotypes(5):
        network = SPACE.network(genotype)
        counted = count_multiply_adds(network, SPACE.input_shape)
        with FlopCounterMode(display=False) as counter:
            network.eval()(torch.zeros(1, *SPACE.input_shape))
        assert counter.get_total_flops() == 2 * counted
        assert costs.of_path(SPACE.path(genotype)) == counted
        assert costs.lowest < counted < costs.highest
    smallest = SPACE.genotype(costs.per_op_EO.nan_to_num(9e9).argmin(1).tolist())
    assert count_multiply_adds(SPACE.network(smallest), SPACE.input_shape) == costs.lowest


def test_a_measured_table_predicts_networks():
    """How well is measured by `fednas latency measure` and the report of a run."""
    under = Conditions(torch.device("cpu"), threads=1, batch_size=4, passes=5)
    table, predictions = costing.measure_space(SPACE, under, genotypes(2))
    plan = SPACE.plan
    layers = {*plan.before, *plan.after, *(layer for row in plan.blocks for layer in row)} - {None}
    assert set(table.timings) == layers
    costs = costing.space_costs(SPACE, table)
    predicted = [costs.of_path(SPACE.path(genotype)) for genotype in genotypes(2)]
    assert [predicted_ms for predicted_ms, _ in predictions] == predicted
    assert costs.unit == "ms"
    assert 0 < costs.lowest < costs.highest
    with pytest.raises(ConfigError, match="measured with norm=batch, but search_space.norm=group"):
        costing.space_costs(replace(SPACE, norm="group"), table)
    with pytest.raises(ConfigError, match="lacks the layer op mbconv3_3x3, input_shape"):
        costing.space_costs(replace(SPACE, width=2.0), table)


def size(shape):
    return {"input_shape": shape, "num_classes": 3, "norm": "group"}


IN_ORDER = [
    (MLPSpace(**size((5,)), channels=8, num_cells=2), ["normal", "reduction"]),
    (NASBench201Space(**size((1, 8, 8)), channels=4, num_cells=1), [CELL] * 3),
]


@pytest.mark.parametrize(("space", "kinds"), IN_ORDER)
def test_layers_are_in_the_order_of_computation_with_shapes(space, kinds):
    genotype = space.random_genotype(make_generator(0, "test"))
    network = space.network(genotype)
    layers = costing.layers_of(network, space.input_shape, genotype)
    assert [layer["kind"] for layer in layers if layer["kind"]] == kinds
    assert layers[-1]["name"] == "classifier"
    assert layers[-1]["shape"] == [space.num_classes]
    assert sum(layer["parameters"] for layer in layers) == count_parameters(network)
    assert not any(module._forward_hooks for module in network.modules())
