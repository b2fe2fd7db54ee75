"""Expected cost against enumeration of all networks; losses, and targets that are refused."""

import itertools
import json
import math
from dataclasses import asdict, replace

import pytest
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings import Hardware
from fednas_flwr.settings.parser import parse
from fednas_flwr.spaces.costs import Costs, HardwareLoss

from ..refusals import refuses

ROWS = [[3.0, 5.0, None], [2.0, 1.5, 0.25]]
NETWORKS = list(itertools.product([0, 1], [0, 1, 2]))
LOW, HIGH = 1.75 + 3.25, 1.75 + 7.0


TERMS = Hardware(None, "ms", target=6.0, loss="additive", scale=0.5, exponent=0.6)


@pytest.fixture
def costs():
    return Costs("ms", 1.75, ROWS)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": 4.9}, r"hardware\.target=4\.9 ms cannot be reached.*cost 5 to 8\.75 ms"),
        ({"target": 8.8}, r"hardware\.target=8\.8 ms cannot be reached"),
        ({"unit": "multiply_adds"}, r"the costs are in ms: give the target in ms, from 5 to 8\.75"),
        ({"loss": "additiv"}, r"hardware\.loss=additiv is unknown.*nearest: additive"),
    ],
)
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
    torch.testing.assert_close(
        again.costs.per_op_EO, costs.per_op_EO, rtol=0, atol=0, equal_nan=True
    )
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
