"""Gradients of batches by weights and by alphas, against formulas and other codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednas_flwr.search import exact_gradients, optimizer_step
from fednas_flwr.search.exact_gradients import BatchGradients, ExactGradients, Tally
from fednas_flwr.search.local_search import alpha_entropy, beta_gradient, rising
from fednas_flwr.search.optimizer_step import Optimizer, make_adam, make_sgd, trainable_weights
from fednas_flwr.settings.optimizers import SGD, Adam

from .conftest import copies

EXACT = {"rtol": 1e-9, "atol": 1e-12}
PLAIN = SGD(0.1, 0.1, momentum=0.0, weight_decay=0.0, clip_norm=None)


def exact(batches, **settings):
    """Gradients of one pass over the batches."""
    return ExactGradients(lambda: iter(batches), **settings)


def test_the_learning_rate_falls_along_a_cosine():
    settings = SGD(0.1, 0.02, momentum=0.9, weight_decay=3e-4, clip_norm=5.0)
    rates = [settings.at_round(number, 8).lr for number in range(1, 9)]
    assert settings.at_round(9, 8).lr == pytest.approx(0.02)  # after the last round
    # torch's own schedule, from which this is written.
    optimizer = make_sgd([nn.Parameter(torch.zeros(1))], settings)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.02)
    for rate in rates:
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        optimizer.step()
        schedule.step()
    changed = settings.at_round(3, 8)
    assert (changed.momentum, changed.weight_decay, changed.clip_norm) == (0.9, 3e-4, 5.0)


def test_adam_has_the_betas_of_darts():
    parameter = nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = make_adam([parameter], Adam(lr=0.01, weight_decay=1e-3))
    assert optimizer.defaults["betas"] == (0.5, 0.999)
    assert optimizer.defaults["weight_decay"] == 1e-3
    parameter.grad = torch.tensor([0.3, -5.0])
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.99, -1.99]))  # by lr, not more


def test_the_weight_gradient_is_the_sum_of_a_loop_over_samples(net, batch, untouched):
    x, y = batch(6, 0)
    check, measured = untouched(net), BatchGradients()
    gradients = measured.weight_gradient_sum(net, (x, y))
    check()
    assert set(gradients) == set(net.weights())
    for name, weight in net.weights().items():
        losses = [F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]) for i in range(6)]
        total = sum(torch.autograd.grad(loss, weight)[0] for loss in losses)
        torch.testing.assert_close(gradients[name], total, **EXACT)
    logits = net(x)
    loss, hits = F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).double()
    tally = measured.train_tally
    assert (tally.loss, tally.accuracy) == pytest.approx((loss, hits.mean().item()))


def descend(net, batches, *, lr):
    """The weights' gradients over one local step per batch."""
    rest = iter(batches)

    def gradient_sums():
        data = next(rest)
        return {"weights": (BatchGradients().weight_gradient_sum(net, data), len(data[1]))}

    given = {"steps": len(batches), "local_lrs": {"weights": lr}}
    found = exact_gradients.periodic_gradients(gradient_sums, {"weights": net.weights()}, **given)
    return found[0]["weights"], found[1]


def test_three_steps_equal_a_loop_of_sgd(net, batch):
    batches, lr = [batch(6, 0), batch(4, 1), batch(2, 2)], 0.5
    start = copies(net.weights())
    gradients, size = descend(net, batches, lr=lr)
    assert size == 4  # the mean
    before_last = copies(net.weights())
    net.load_state_dict(start, strict=False)
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
    start = copies(net.state_dict())
    optimizer, gradients = make_sgd(net.weights().values(), settings), exact(batches)
    optimizer_step.train(net, gradients, Optimizer(net.weights(), optimizer, settings.clip_norm))
    trained = copies(net.state_dict())
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
    optimizer_step.clip_gradients(make_sgd(parameters, PLAIN), clip_norm)
    gradient = torch.cat([parameter.grad for parameter in parameters])
    assert gradient.norm().item() == pytest.approx(expected, rel=1e-5)
    assert gradient[0] / gradient[2] == pytest.approx(-0.75)


def test_trainable_weights_leave_the_alphas_out(net):
    assert set(trainable_weights(net)) == {n for n, _ in net.named_parameters() if n[0] != "a"}
    assert set(trainable_weights(nn.Linear(1, 1))) == {"weight", "bias"}


def test_an_empty_tally_knows_nothing():
    assert [math.isnan(share) for share in (Tally().loss, Tally().accuracy)] == [True, True]


# Rows (q, t, c) of L = q (w - a t)^2 / 2 + c a w.
TRAIN = torch.tensor([[2.0, 1.0, 0.5], [4.0, -1.0, 1.5]], dtype=torch.float64)
VALIDATION = torch.tensor([[3.0, 2.0, 0.0], [1.0, 0.0, -1.0], [5.0, 1.0, 2.0]]).double()


def derivatives(rows, w, a):
    """Of the mean loss of ``rows`` by hand: dL/dw, dL/da and d2L/dadw."""
    q, t, c = rows.unbind(1)
    d_w = (q * (w - a * t) + c * a).mean()
    d_a = (-q * t * (w - a * t) + c * w).mean()
    d_aw = (-q * t + c).mean()
    return d_w.item(), d_a.item(), d_aw.item()


def step(network, lr):
    """W' after one plain step on the training rows, by hand."""
    d_w, _, _ = derivatives(TRAIN, network.w.item(), network.a.item())
    return {"w": network.w.detach() - lr * d_w, "unused": network.unused.detach()}


def second_order(network, virtual_weights, lr, validation=VALIDATION):
    """Gradient and losses from the training rows and others, all of label 0."""
    labels = torch.zeros(3, dtype=torch.int64)
    return BatchGradients().second_order_gradient(
        network,
        weights=network.weights(),
        virtual_weights=virtual_weights,
        train_batch=(TRAIN, labels[:2]),
        validation_batch=(validation, labels[: len(validation)]),
        inner_lr=lr,
    )


@pytest.mark.parametrize("lr", [0.05, 0.5])
def test_second_order_of_a_quadratic_has_its_closed_form(lr, quadratic, untouched):
    check = untouched(quadratic)
    gradients, losses = second_order(quadratic, step(quadratic, lr), lr)
    w, a = quadratic.w.item(), quadratic.a.item()
    _, _, train_aw = derivatives(TRAIN, w, a)
    virtual_w = step(quadratic, lr)["w"].item()
    validation_w, validation_a, _ = derivatives(VALIDATION, virtual_w, a)
    # d/da L_val(a, w - lr dL_tr/dw) = dL_val/da - lr d2L_tr/dadw dL_val/dw', and its finite
    # difference is exact. Multiplying by 2 r instead of dividing leaves only the first term.
    expected = validation_a - lr * train_aw * validation_w
    assert abs(lr * train_aw * validation_w) > 0.05
    torch.testing.assert_close(gradients["cell"].item(), expected, **EXACT)
    q, t, c = VALIDATION.unbind(1)
    by_hand = q * (virtual_w - a * t) ** 2 / 2 + c * a * virtual_w
    torch.testing.assert_close(losses - quadratic.OFFSET, by_hand)
    assert not losses.requires_grad
    check()


def test_without_a_gradient_at_the_virtual_weights_there_is_no_correction(quadratic):
    rows = torch.tensor([[1.0, 0.0, 0.0]]).double()  # w^2 / 2: stationary at w = 0
    stationary = {"w": torch.zeros(1).double(), "unused": quadratic.unused.detach()}
    gradients, _ = second_order(quadratic, stationary, 0.1, rows)
    assert gradients["cell"].item() == 0.0


def test_second_order_of_a_network_equals_finite_differences(net, batch, untouched):
    """On a smooth net: the step is differentiated numerically, alpha by alpha."""
    train, validation, lr, eps = batch(8, 1), batch(6, 2), 0.2, 1e-5
    weights = copies(net.weights())

    def after_a_step():
        loss = F.cross_entropy(net(train[0]), train[1])
        gradients = torch.autograd.grad(loss, list(net.weights().values()))
        return {n: weights[n] - lr * g for n, g in zip(weights, gradients, strict=True)}

    def validation_loss():
        moved = torch.func.functional_call(net, after_a_step(), (validation[0],))
        return F.cross_entropy(moved, validation[1]).item()

    check = untouched(net)
    gradients, losses = BatchGradients().second_order_gradient(
        net,
        weights=net.weights(),
        virtual_weights=after_a_step(),
        train_batch=train,
        validation_batch=validation,
        inner_lr=lr,
    )
    check()
    assert losses.mean().item() == pytest.approx(validation_loss())
    first_order, _ = BatchGradients().alpha_gradient_sum(net, validation)
    for kind, alpha in net.alphas().items():
        numeric = torch.zeros_like(alpha)
        for index in range(alpha.numel()):
            values = []
            for sign in (1, -1):
                alpha.data.view(-1)[index] += sign * eps
                values.append(validation_loss())
                alpha.data.view(-1)[index] -= sign * eps
            numeric.view(-1)[index] = (values[0] - values[1]) / (2 * eps)
        torch.testing.assert_close(gradients[kind], numeric, rtol=1e-3, atol=1e-6)
        off = (first_order[kind] / 6 - numeric).abs().max()
        assert off > 20 * (gradients[kind] - numeric).abs().max()


def test_first_order_is_the_sum_of_a_loop_over_samples(net, batch, untouched):
    x, y = batch(5, 3)
    check = untouched(net)
    gradients, losses = BatchGradients().alpha_gradient_sum(net, (x, y))
    check()
    total = {kind: torch.zeros_like(alpha) for kind, alpha in net.alphas().items()}
    for index in range(5):
        loss = F.cross_entropy(net(x[index : index + 1]), y[index : index + 1])
        assert losses[index].item() == pytest.approx(loss.item(), rel=1e-12)
        for kind, alpha in net.alphas().items():
            total[kind] += torch.autograd.grad(loss, alpha, retain_graph=True)[0]
    for kind, gradient in gradients.items():
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(gradient, total[kind], **EXACT)


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.5])
def test_mixed_level_adds_the_gradients_of_both_means(weight, net, batch, untouched):
    train, validation = batch(7, 4), batch(3, 5)
    check = untouched(net)
    gradients, losses = BatchGradients().mixed_level_gradient(
        net, train_batch=train, validation_batch=validation, validation_weight=weight
    )
    check()
    assert losses.shape == (3,)
    from_train, _ = BatchGradients().alpha_gradient_sum(net, train)
    from_validation, own = BatchGradients().alpha_gradient_sum(net, validation)
    torch.testing.assert_close(losses, own)
    for kind, gradient in gradients.items():
        expected = from_train[kind] / 7 + weight * from_validation[kind] / 3
        torch.testing.assert_close(gradient, expected, **EXACT)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.9, 0.1)])
def test_the_virtual_step_is_the_step_that_sgd_takes(momentum, weight_decay, net, batch, untouched):
    settings = SGD(0.3, 0.3, momentum=momentum, weight_decay=weight_decay, clip_norm=None)
    optimizer = make_sgd(net.weights().values(), settings)

    def real_step(data):
        optimizer.zero_grad()
        F.cross_entropy(net(data[0]), data[1]).backward()
        optimizer.step()

    for seed in range(3):  # the first step has no momentum yet
        data = batch(6, seed)
        optimizer.zero_grad()
        check = untouched(net)
        moved = BatchGradients().virtual_step(net, data, optimizer=optimizer)
        check()
        assert not any(weight.requires_grad for weight in moved.values())
        real_step(data)
        for name, weight in net.weights().items():
            torch.testing.assert_close(moved[name], weight.detach(), **EXACT)


def test_parameters_that_a_loss_does_not_use_get_zeros(quadratic):
    labels = torch.zeros(2, dtype=torch.int64)
    quadratic.forward = lambda x: torch.stack([x[:, 0] * quadratic.w, x[:, 1]], 1)
    gradients, _ = BatchGradients().alpha_gradient_sum(quadratic, (TRAIN, labels))
    assert gradients["cell"].tolist() == [0.0]


def test_entropy_of_known_distributions():
    assert alpha_entropy({"a": torch.zeros(3, 8)}) == pytest.approx(math.log(8))
    assert alpha_entropy({"a": torch.tensor([[1e4, 0.0]])}) == 0.0
    half = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    two = {"a": half, "b": torch.zeros(1, 4)}
    assert alpha_entropy(two) == pytest.approx((1.5 * math.log(2) + math.log(4)) / 2, rel=1e-6)


def test_the_gradient_is_that_of_the_mean_logsumexp_of_all_edges():
    torch.manual_seed(0)
    numbers = {"normal": 4, "reduction": 2}
    alphas = {k: torch.randn(n, 5).double().requires_grad_() for k, n in numbers.items()}
    edges = torch.cat(list(alphas.values()))
    loss = 3.5 * torch.stack([edge.exp().sum().log() for edge in edges]).mean()
    expected = torch.autograd.grad(loss, list(alphas.values()))
    actual = beta_gradient(alphas, weight=3.5)
    assert list(actual) == list(alphas)
    for mine, other in zip(actual.values(), expected, strict=True):
        torch.testing.assert_close(mine, other)
        assert not mine.requires_grad


def test_ops_that_are_never_chosen_are_left_alone():
    gradient = beta_gradient({"cell": torch.tensor([[1.0, -1e9]])}, weight=2.0)["cell"]
    assert gradient.tolist() == [[2.0, 0.0]]


def test_the_weight_rises_linearly_to_its_value_in_the_last_round():
    found = [rising(5.0, number, 4) for number in (1, 2, 3, 4)]
    assert found == pytest.approx([1.25, 2.5, 3.75, 5.0])
