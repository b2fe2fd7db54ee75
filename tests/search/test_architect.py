from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fednas_flwr.search.architect import (
    alpha_entropy,
    alpha_gradient_sum,
    mixed_level_gradient,
    second_order_gradient,
    virtual_step,
)
from fednas_flwr.search.optimizer_step import make_sgd
from fednas_flwr.settings.optimizers import SGD

EXACT = {"rtol": 1e-9, "atol": 1e-12}
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
    return second_order_gradient(
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


def test_second_order_is_the_derivative_through_the_step(quadratic):
    """Against the number that the formula stands for: L_val after a step, as a function of a."""
    lr, eps = 0.3, 1e-5

    def validation_loss(a):
        d_w, _, _ = derivatives(TRAIN, quadratic.w.item(), a)
        w = quadratic.w.item() - lr * d_w
        q, t, c = VALIDATION.unbind(1)
        return ((q * (w - a * t) ** 2 / 2 + c * a * w).mean()).item()

    a = quadratic.a.item()
    expected = (validation_loss(a + eps) - validation_loss(a - eps)) / (2 * eps)
    gradients, _ = second_order(quadratic, step(quadratic, lr), lr)
    assert gradients["cell"].item() == pytest.approx(expected, rel=1e-6)


def test_without_a_gradient_at_the_virtual_weights_there_is_no_correction(quadratic):
    rows = torch.tensor([[1.0, 0.0, 0.0]]).double()  # w^2 / 2: stationary at w = 0
    stationary = {"w": torch.zeros(1).double(), "unused": quadratic.unused.detach()}
    gradients, _ = second_order(quadratic, stationary, 0.1, rows)
    assert gradients["cell"].item() == 0.0


def test_second_order_of_a_network_equals_finite_differences(net, batch, untouched):
    """On a smooth net: the step is differentiated numerically, alpha by alpha."""
    train, validation, lr, eps = batch(8, 1), batch(6, 2), 0.2, 1e-5
    weights = {name: weight.detach().clone() for name, weight in net.weights().items()}

    def after_a_step():
        loss = F.cross_entropy(net(train[0]), train[1])
        gradients = torch.autograd.grad(loss, list(net.weights().values()))
        return {n: weights[n] - lr * g for n, g in zip(weights, gradients, strict=True)}

    def validation_loss():
        moved = torch.func.functional_call(net, after_a_step(), (validation[0],))
        return F.cross_entropy(moved, validation[1]).item()

    check = untouched(net)
    gradients, losses = second_order_gradient(
        net,
        weights=net.weights(),
        virtual_weights=after_a_step(),
        train_batch=train,
        validation_batch=validation,
        inner_lr=lr,
    )
    check()
    assert losses.mean().item() == pytest.approx(validation_loss())
    first_order, _ = alpha_gradient_sum(net, validation)
    for kind, alpha in net.alphas().items():
        numeric = torch.zeros_like(alpha)
        for index in range(alpha.numel()):
            values = []
            for sign in (1, -1):
                with torch.no_grad():
                    alpha.view(-1)[index] += sign * eps
                values.append(validation_loss())
                with torch.no_grad():
                    alpha.view(-1)[index] -= sign * eps
            numeric.view(-1)[index] = (values[0] - values[1]) / (2 * eps)
        torch.testing.assert_close(gradients[kind], numeric, rtol=1e-3, atol=1e-6)
        off = (first_order[kind] / 6 - numeric).abs().max()
        assert off > 20 * (gradients[kind] - numeric).abs().max()


def test_first_order_is_the_sum_of_a_loop_over_samples(net, batch, untouched):
    x, y = batch(5, 3)
    check = untouched(net)
    gradients, losses = alpha_gradient_sum(net, (x, y))
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
    gradients, losses = mixed_level_gradient(
        net, train_batch=train, validation_batch=validation, validation_weight=weight
    )
    check()
    assert losses.shape == (3,)
    from_train, _ = alpha_gradient_sum(net, train)
    from_validation, own = alpha_gradient_sum(net, validation)
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
        moved = virtual_step(
            net,
            data,
            optimizer=optimizer,
        )
        check()
        assert not any(weight.requires_grad for weight in moved.values())
        real_step(data)
        for name, weight in net.weights().items():
            torch.testing.assert_close(moved[name], weight.detach(), **EXACT)


def test_parameters_that_a_loss_does_not_use_get_zeros(quadratic):
    labels = torch.zeros(2, dtype=torch.int64)
    quadratic.forward = lambda x: torch.stack([x[:, 0] * quadratic.w, x[:, 1]], 1)
    gradients, _ = alpha_gradient_sum(quadratic, (TRAIN, labels))
    assert gradients["cell"].tolist() == [0.0]


def test_entropy_of_known_distributions():
    assert alpha_entropy({"a": torch.zeros(3, 8)}) == pytest.approx(math.log(8))
    assert alpha_entropy({"a": torch.tensor([[1e4, 0.0]])}) == 0.0
    half = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    two = {"a": half, "b": torch.zeros(1, 4)}
    assert alpha_entropy(two) == pytest.approx((1.5 * math.log(2) + math.log(4)) / 2, rel=1e-6)
