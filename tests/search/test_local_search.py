"""Alternating steps against explicit loops: an alpha step, then a weight step, batch by batch."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from fednas_flwr.search import local_search
from fednas_flwr.search.exact_gradients import BatchGradients, ExactGradients
from fednas_flwr.search.local_search import Alternating, alpha_entropy, alternate, beta_gradient
from fednas_flwr.search.objective import Objective
from fednas_flwr.search.optimizer_step import Optimizer, Optimizers, make_adam, make_sgd
from fednas_flwr.settings.optimizers import SGD, Adam

WEIGHTS = SGD(0.3, 0.0, momentum=0.9, weight_decay=0.01, clip_norm=1.0)
ALPHAS = Adam(0.05, weight_decay=1e-3)
FACTORS = torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)
OBJECTIVE = Objective(FACTORS)


def optimizers_of(network, weights, alphas, *, beta=0.5, nesterov=False):
    """Make the optimisers of a search."""
    own, others = network.weights(), network.alphas()
    sgd = make_sgd(own.values(), weights, nesterov=nesterov)
    adam = make_adam(others.values(), alphas, beta=beta)
    return Optimizers(Optimizer(own, sgd, weights.clip_norm), Optimizer(others, adam))


def search(net, train, validation, rule, beta_decay):
    """Search for one pass over ``train``; return where the gradients came from."""
    gradients = ExactGradients(lambda: iter(train), lambda: iter(validation), objective=OBJECTIVE)
    optimizers = optimizers_of(net, WEIGHTS, ALPHAS)
    alternate(net, gradients, optimizers, Alternating(rule, beta_decay=beta_decay))
    return gradients


def loss_of(net, batch):
    return (FACTORS[batch[1]] * F.cross_entropy(net(batch[0]), batch[1], reduction="none")).mean()


def explicit(net, train, validation, rule, beta_decay):
    """The same with nothing of ours but the two gradients that have tests of their own."""
    weights, alphas = list(net.weights().values()), list(net.alphas().values())
    sgd = torch.optim.SGD(weights, lr=0.3, momentum=0.9, weight_decay=0.01)
    adam = torch.optim.Adam(alphas, lr=0.05, betas=(0.5, 0.999), weight_decay=1e-3)
    of_one_batch, losses = BatchGradients(objective=OBJECTIVE), []
    for train_batch, validation_batch in zip(train, validation, strict=False):
        both = {"train_batch": train_batch, "validation_batch": validation_batch}
        if rule == "first_order":
            gradients = torch.autograd.grad(loss_of(net, validation_batch), alphas)
        elif rule == "mixed_level":
            by_kind, _ = of_one_batch.mixed_level_gradient(net, **both)
            gradients = by_kind.values()
        else:
            twin = copy.deepcopy(net)
            step = torch.optim.SGD(twin.weights().values(), lr=0.3, momentum=0.9, weight_decay=0.01)
            for weight, own in zip(twin.weights().values(), weights, strict=True):
                if "momentum_buffer" in sgd.state[own]:
                    buffer = sgd.state[own]["momentum_buffer"].clone()
                    step.state[weight]["momentum_buffer"] = buffer
            loss_of(twin, train_batch).backward()
            step.step()
            places = {"weights": net.weights(), "virtual_weights": twin.weights()}
            by_kind, _ = of_one_batch.second_order_gradient(net, **places, **both, inner_lr=0.3)
            gradients = by_kind.values()
        decays = torch.autograd.grad(beta_decay * torch.cat(alphas).logsumexp(-1).mean(), alphas)
        for alpha, gradient, decay in zip(alphas, gradients, decays, strict=True):
            alpha.grad = gradient + decay
        adam.step()
        loss = loss_of(net, train_batch)
        losses.append(loss.item())
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.grad = gradient
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        sgd.step()
    return losses


@pytest.mark.parametrize("beta_decay", [0.0, 2.0])
@pytest.mark.parametrize("rule", ["first_order", "second_order", "mixed_level"])
def test_a_pass_equals_an_explicit_loop(rule, beta_decay, net, batch):
    train = [batch(6, seed) for seed in range(4)]
    validation = [batch(5, 10 + seed) for seed in range(6)]  # more than are needed
    twin, start = copy.deepcopy(net), copy.deepcopy(net)
    gradients = search(net, train, validation, rule, beta_decay)
    losses = explicit(twin, train, validation, rule, beta_decay)
    for name, mine in net.named_parameters():
        other, old = twin.get_parameter(name), start.get_parameter(name)
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)
        assert (mine - old).abs().max() > 1e-3, name
    seen = gradients.train_tally, gradients.validation_tally
    assert seen[0].loss == pytest.approx(sum(losses) / 4)
    assert tuple(tally.num_examples for tally in seen) == (24, 20)


def test_entropy_of_known_distributions():
    assert alpha_entropy({"a": torch.zeros(3, 8)}) == pytest.approx(math.log(8))
    assert alpha_entropy({"a": torch.tensor([[1e4, 0.0]])}) == 0.0
    two = {"a": torch.log(torch.tensor([[0.5, 0.25, 0.25]])), "b": torch.zeros(1, 4)}
    assert alpha_entropy(two) == pytest.approx((1.5 * math.log(2) + math.log(4)) / 2, rel=1e-6)


def test_ops_that_are_never_chosen_are_left_alone():
    gradient = beta_gradient({"cell": torch.tensor([[1.0, -1e9]])}, weight=2.0)["cell"]
    assert gradient.tolist() == [[2.0, 0.0]]


def test_the_weight_rises_linearly_to_its_value_in_the_last_round():
    found = [local_search.rising(5.0, number, 4) for number in (1, 2, 3, 4)]
    assert found == pytest.approx([1.25, 2.5, 3.75, 5.0])
