from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.search.exact_gradients import ExactGradients
from fednas_flwr.search.gradient_sums import Tally, periodic_gradients, weight_gradient_sum
from fednas_flwr.search.optimizer_step import (
    Optimizer,
    clip_gradients,
    make_adam,
    make_sgd,
    train,
    trainable_weights,
)
from fednas_flwr.settings.optimizers import SGD, Adam

EXACT = {"rtol": 1e-9, "atol": 1e-12}
PLAIN = SGD(0.1, 0.1, momentum=0.0, weight_decay=0.0, clip_norm=None)


def exact(batches, **settings):
    """Gradients of one pass over the batches."""
    return ExactGradients(lambda: iter(batches), **settings)


def test_the_learning_rate_falls_along_a_cosine():
    settings = SGD(0.1, 0.02, momentum=0.9, weight_decay=3e-4, clip_norm=5.0)
    rates = [settings.at_round(number, 8).lr for number in range(1, 9)]
    assert rates[0] == 0.1
    assert rates[4] == pytest.approx((0.1 + 0.02) / 2)
    assert settings.at_round(9, 8).lr == pytest.approx(0.02)  # after the last round
    assert all(left > right > 0.02 for left, right in zip(rates, rates[1:], strict=False))
    # torch's own schedule, from which this is written.
    optimizer = make_sgd([nn.Parameter(torch.zeros(1))], settings)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.02)
    for rate in rates:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        optimizer.step()
        schedule.step()
    changed = settings.at_round(3, 8)
    assert (changed.momentum, changed.weight_decay, changed.clip_norm) == (0.9, 3e-4, 5.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "^lr=0.0"),
        ({"lr": float("nan")}, "^lr=nan"),
        ({"lr": 1e31}, r"^lr=1e\+31"),
        ({"min_lr": 0.2}, "^min_lr=0.2"),
        ({"momentum": 1.0}, "^momentum=1.0"),
        ({"weight_decay": -1e-4}, "^weight_decay=-0.0001"),
        ({"weight_decay": float("inf")}, "^weight_decay=inf"),
        ({"clip_norm": 0.0}, "^clip_norm=0.0"),
        ({"clip_norm": float("inf")}, "^clip_norm=inf"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    values = {"lr": 0.1, "min_lr": 0.0, "momentum": 0.9, "weight_decay": 0.0, "clip_norm": None}
    with pytest.raises(ConfigError, match=message):
        SGD(**{**values, **changes})


def test_adam_has_the_betas_of_darts():
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = make_adam([parameter], Adam(lr=0.01, weight_decay=1e-3))
    assert optimizer.defaults["betas"] == (0.5, 0.999)
    assert optimizer.defaults["weight_decay"] == 1e-3
    parameter.grad = torch.tensor([0.3, -5.0])
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.99, -1.99]))  # by lr, not more
    with pytest.raises(ConfigError, match="^lr=-1.0"):
        Adam(lr=-1.0, weight_decay=0.0)


def test_the_weight_gradient_is_the_sum_of_a_loop_over_samples(net, batch, untouched):
    x, y = batch(6, 0)
    check, tally = untouched(net), Tally()
    gradients = weight_gradient_sum(net, (x, y), tally)
    check()
    assert set(gradients) == set(net.weights())
    for name, weight in net.weights().items():
        losses = [F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]) for i in range(6)]
        total = sum(torch.autograd.grad(loss, weight)[0] for loss in losses)
        torch.testing.assert_close(gradients[name], total, **EXACT)
    logits = net(x)
    assert tally.loss == pytest.approx(F.cross_entropy(logits, y).item())
    assert tally.accuracy == pytest.approx(((logits.argmax(1) == y).double().mean()).item())


def descend(net, batches, *, lr):
    """The weights' gradients over one local step per batch."""
    rest = iter(batches)

    def gradient_sums():
        data = next(rest)
        return {"weights": (weight_gradient_sum(net, data, Tally()), len(data[1]))}

    gradients, size = periodic_gradients(
        gradient_sums,
        {"weights": net.weights()},
        steps=len(batches),
        local_lrs={"weights": lr},
    )
    return gradients["weights"], size


def test_one_batch_is_its_own_gradient(net, batch, untouched):
    data = batch(6, 0)
    check = untouched(net)
    gradients, size = descend(net, [data], lr=0.5)
    check()
    assert size == 6
    expected = weight_gradient_sum(net, data, Tally())
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_three_steps_equal_a_loop_of_sgd(net, batch):
    batches, lr = [batch(6, 0), batch(4, 1), batch(2, 2)], 0.5
    start = {name: weight.detach().clone() for name, weight in net.weights().items()}
    gradients, size = descend(net, batches, lr=lr)
    assert size == 4  # the mean
    before_last = {name: weight.detach().clone() for name, weight in net.weights().items()}
    with torch.no_grad():
        for name, weight in net.weights().items():
            weight.copy_(start[name])
    optimizer = torch.optim.SGD(net.weights().values(), lr=lr)
    for index, (x, y) in enumerate(batches):
        if index == 2:  # two of the three steps have been taken, as documented
            for name, weight in net.weights().items():
                torch.testing.assert_close(before_last[name], weight.detach(), **EXACT)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    for name, weight in net.weights().items():
        moved = (start[name] - weight.detach()) / lr
        torch.testing.assert_close(gradients[name] / size, moved, **EXACT)
        assert moved.abs().max() > 1e-3


def test_a_pass_is_sgd_with_momentum_decay_and_clipping(net, batch):
    settings = SGD(0.4, 0.0, momentum=0.9, weight_decay=0.1, clip_norm=0.05)
    batches = [batch(6, seed) for seed in range(4)]
    start = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizer, gradients = make_sgd(net.weights().values(), settings), exact(batches)
    train(net, gradients, Optimizer(net.weights(), optimizer, settings.clip_norm))
    trained = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    net.load_state_dict(start)
    velocity = {name: torch.zeros_like(weight) for name, weight in net.weights().items()}
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(net(x), y)
        losses.append(loss.item())
        found = torch.autograd.grad(loss, list(net.weights().values()))
        norm = torch.cat([g.reshape(-1) for g in found]).norm()
        assert norm > settings.clip_norm
        with torch.no_grad():
            for (name, weight), gradient in zip(net.weights().items(), found, strict=True):
                clipped = gradient * settings.clip_norm / (norm + 1e-6)
                velocity[name] = 0.9 * velocity[name] + clipped + 0.1 * weight
                weight -= 0.4 * velocity[name]
    for name, weight in net.named_parameters():
        torch.testing.assert_close(trained[name], weight.detach(), rtol=1e-9, atol=1e-10)
        assert torch.equal(trained[name], start[name]) == name.startswith("a.")
    assert gradients.train_tally.loss == pytest.approx(sum(losses) / 4)
    assert gradients.train_tally.num_examples == 24


@pytest.mark.parametrize(("clip_norm", "expected"), [(None, 5.0), (10.0, 5.0), (0.5, 0.5)])
def test_clipping_bounds_the_norm_of_all_parameters_together(clip_norm, expected):
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0]), torch.tensor([0.0, -4.0])
    clip_gradients(make_sgd(parameters, PLAIN), clip_norm)
    gradient = torch.cat([parameter.grad for parameter in parameters])
    assert gradient.norm().item() == pytest.approx(expected, rel=1e-5)
    assert gradient[0] / gradient[2] == pytest.approx(-0.75)


def test_trainable_weights_leave_the_alphas_out(net):
    assert set(trainable_weights(net)) == {n for n, _ in net.named_parameters() if n[0] != "a"}
    assert set(trainable_weights(nn.Linear(1, 1))) == {"weight", "bias"}


def test_an_empty_tally_knows_nothing():
    assert math.isnan(Tally().loss)
    assert math.isnan(Tally().accuracy)
