"""Which batches exact gradients are of, and the gradients, against explicit ones."""

import pytest
import torch
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search.exact_gradients import BatchGradients, ExactGradients, ExactSums
from fednas_flwr.search.objective import Objective
from fednas_flwr.search.optimizer_step import Optimizer
from fednas_flwr.search.proxyless import alpha_gradient, draw_paths, gate_gradient

from ..made_networks import Made
from ..small_spaces import PATH_SPACE
from .conftest import tensors_of

EXACT = {"rtol": 1e-9, "atol": 1e-12}
FACTORS = torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)


class Records:
    """Passes over batches of one split that write down every draw, in one log for all splits."""

    def __init__(self, name, batches, log):
        self.name, self.batches, self.log, self.passes = name, batches, log, 0

    def __call__(self):
        self.passes += 1
        number = self.passes
        for index, batch in enumerate(self.batches):
            self.log.append(f"{self.name} {number}.{index}")
            yield batch


@pytest.fixture
def records(batch):
    """``records(train, validation)``: passes of so many batches of each split, and their log."""

    def make(train, validation=0):
        log = []
        batches = [batch(6, seed) for seed in range(train)]
        others = [batch(4, 50 + seed) for seed in range(validation)]
        return Records("train", batches, log), Records("validation", others, log), log

    return make


def optimizer(net):
    return Optimizer(net.weights(), torch.optim.SGD(net.weights().values(), lr=0.1, momentum=0.9))


def take(gradients, net):
    """Ask for both gradients in every step; return how many there were."""
    steps = 0
    for _ in gradients.steps():
        gradients.alphas(net, optimizer(net), rule="first_order")
        gradients.weights(net)
        steps += 1
    return steps


# after a whole pass no other is begun
STEPS = [*(({"num_steps": n}, n) for n in (1, 2, 3, 4, 7)), ({"epochs": 1}, 3), ({"epochs": 3}, 9)]


@pytest.mark.parametrize(("limit", "steps"), STEPS)
def test_as_many_steps_as_asked_over_as_many_passes_as_needed(net, records, limit, steps):
    train, _, log = records(3)
    gradients = ExactGradients(train, **limit)
    seen = [gradients.train_batch for _ in gradients.steps()]
    assert log == [f"train {1 + step // 3}.{step % 3}" for step in range(steps)]
    assert all(one is train.batches[i % 3] for i, one in enumerate(seen))


@pytest.mark.parametrize("limit", [{"epochs": 2}, {"num_steps": 10}])
def test_validation_batches_begin_anew_with_every_pass(net, records, limit):
    """Within one, as many passes are made as it needs; each batch is drawn after the step's own."""
    train, validation, log = records(5, 2)
    assert take(ExactGradients(train, validation, **limit), net) == 10
    assert log == [
        *("train 1.0", "validation 1.0", "train 1.1", "validation 1.1"),
        *("train 1.2", "validation 2.0", "train 1.3", "validation 2.1"),
        *("train 1.4", "validation 3.0"),
        *("train 2.0", "validation 4.0", "train 2.1", "validation 4.1"),
        *("train 2.2", "validation 5.0", "train 2.3", "validation 5.1"),
        *("train 2.4", "validation 6.0"),
    ]


@pytest.mark.parametrize("limit", [{"epochs": 3}, {"num_steps": 8}])
def test_tallies_are_of_the_last_pass(net, records, limit):
    train, validation, _ = records(3, 2)
    gradients = ExactGradients(train, validation, **limit)
    take(gradients, net)
    last = 3 if "num_steps" not in limit else 2
    x, y = (torch.cat(part) for part in zip(*train.batches[:last], strict=True))
    logits = net(x)
    hits = int((logits.argmax(1) == y).sum())
    assert (gradients.train_tally.num_examples, gradients.train_tally.correct) == (6 * last, hits)
    assert gradients.validation_tally.num_examples == 4 * last
    others = [*validation.batches, validation.batches[0]][:last]
    x_other, y_other = (torch.cat(part) for part in zip(*others, strict=True))
    assert gradients.metrics() == {
        "train_loss": pytest.approx(F.cross_entropy(logits, y).item()),
        "train_accuracy": hits / (6 * last),
        "validation_loss": pytest.approx(F.cross_entropy(net(x_other), y_other).item()),
    }


def test_without_alpha_steps_there_is_no_validation_loss(net, records):
    train, _, log = records(2)
    gradients = ExactGradients(train)
    for _ in gradients.steps():
        gradients.weights(net)
    assert gradients.metrics().keys() == {"train_loss", "train_accuracy"}
    assert log == ["train 1.0", "train 1.1"]


def test_weights_have_the_gradient_of_the_objectives_mean_over_both_heads(net, records):
    train, _, _ = records(1)

    def both_heads(network, x):
        logits = network.body(x)
        return logits, logits.square()

    network = Made(both_heads, body=net, idle=torch.nn.Linear(1, 1))
    gradients = ExactGradients(train, objective=Objective(FACTORS), auxiliary_weight=0.3)
    ((x, y),) = train.batches
    for _ in gradients.steps():
        found = gradients.weights(network)
    by_head = [FACTORS[y] * F.cross_entropy(out, y, reduction="none") for out in network(x)]
    (by_head[0] + 0.3 * by_head[1]).mean().backward()
    assert set(found) == {name for name, _ in network.named_parameters()}
    for name, parameter in network.named_parameters():
        if name.startswith("idle."):
            assert found[name] is parameter.grad is None
        else:
            torch.testing.assert_close(found[name], parameter.grad, **EXACT)
    assert gradients.train_tally.loss == pytest.approx(by_head[0].mean().item())


@pytest.mark.parametrize("number", [2, 4])
def test_gates_are_of_the_validation_batch(number):
    with seeded(1, "supernet"):
        supernet = PATH_SPACE.supernet().double().train()
    generator = make_generator(0, "batches")
    train, validation = (tensors_of((2, 4, 4), 3, 5, generator) for _ in range(2))
    objective = Objective(FACTORS)
    alphas = supernet.alphas()["blocks"]
    drawn = draw_paths(alphas, number=number, generator=generator)
    batches = (lambda: iter([train])), (lambda: iter([validation]))
    gradients = ExactGradients(*batches, objective=objective)
    for _ in gradients.steps():
        found = gradients.gates(supernet, drawn, None)
    by_gates, losses = gate_gradient(supernet, validation, drawn, objective=objective)
    torch.testing.assert_close(found, alpha_gradient(by_gates, alphas, drawn), **EXACT)
    logits = supernet.body(validation[0], paths=drawn[:, :1].tolist())  # the other gates are 0
    weighed = FACTORS[validation[1]] * F.cross_entropy(logits, validation[1], reduction="none")
    torch.testing.assert_close(losses, weighed.detach(), **EXACT)
    assert gradients.validation_tally.loss == pytest.approx(losses.mean().item())


@pytest.mark.parametrize(("state", "split"), [("weights", "train"), ("alphas", "validation")])
def test_sums_are_those_of_a_loop_over_records(state, split, net, records, untouched):
    train, validation, log = records(2, 2)
    exact, check = ExactSums(train(), validation(), objective=Objective(FACTORS)), untouched(net)
    seen, hits = [], 0
    for x, y in (train if split == "train" else validation).batches:
        found, size = exact.sums(state, net)
        check()
        assert size == len(y)
        rows = zip(x, y, strict=True)
        losses = [FACTORS[label] * F.cross_entropy(net(row[None])[0], label) for row, label in rows]
        seen += [loss.item() for loss in losses]
        hits += int((net(x).argmax(1) == y).sum())
        parameters = getattr(net, state)()
        assert set(found) == set(parameters)
        for name, parameter in parameters.items():
            gradients = (torch.autograd.grad(loss, parameter, retain_graph=True) for loss in losses)
            torch.testing.assert_close(found[name], sum(g for (g,) in gradients), **EXACT)
            assert found[name].abs().max() > 1e-3
        if state == "alphas":
            _, own = exact.alpha_gradient_sum(net, (x, y))
            assert own.tolist() == pytest.approx(seen[-size:], rel=1e-12)
    assert log == [f"{split} 1.0", f"{split} 1.1"]
    accuracy = {"train_accuracy": hits / len(seen)} if split == "train" else {}
    assert exact.metrics() == {f"{split}_loss": pytest.approx(sum(seen) / len(seen)), **accuracy}


def test_sums_of_second_order_look_ahead_from_the_weights_before_the_last_step(net, records):
    """Of batch means, times the batch size (Eq. 5); a train and a validation batch are taken."""
    train, validation, log = records(2, 2)
    previous = {name: weight.detach() + 0.1 for name, weight in net.weights().items()}
    objective = Objective(FACTORS)
    given = {"previous_weights": previous, "inner_lr": 0.2, "objective": objective}
    sums = ExactSums(train(), validation(), **given)
    found, size = sums.sums("alphas", net)
    both = {"train_batch": train.batches[0], "validation_batch": validation.batches[0]}
    weights = {"weights": previous, "virtual_weights": net.weights()}
    measured = BatchGradients(objective=objective)
    expected, losses = measured.second_order_gradient(net, **weights, **both, inner_lr=0.2)
    first, _ = measured.alpha_gradient_sum(net, validation.batches[0])
    assert size == 4
    for kind, gradient in expected.items():
        torch.testing.assert_close(found[kind], 4 * gradient, **EXACT)
        assert (found[kind] - first[kind]).abs().max() > 1e-4
    assert sorted(log) == ["train 1.0", "validation 1.0"]
    assert sums.metrics() == {"validation_loss": pytest.approx(losses.mean().item())}


# --- of one batch: closed forms, finite differences, and other codes


# Rows (q, t, c) of L = q (w - a t)^2 / 2 + c a w.
TRAIN = torch.tensor([[2.0, 1.0, 0.5], [4.0, -1.0, 1.5]], dtype=torch.float64)


VALIDATION = torch.tensor([[3.0, 2.0, 0.0], [1.0, 0.0, -1.0], [5.0, 1.0, 2.0]]).double()


def derivatives(rows, w, a):
    """Of the mean loss of ``rows`` by hand: dL/dw, dL/da and d2L/dadw."""
    q, t, c = rows.unbind(1)
    d_w = (q * (w - a * t) + c * a).mean()
    d_a = (-q * t * (w - a * t) + c * w).mean()
    return d_w.item(), d_a.item(), (-q * t + c).mean().item()


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


def test_mixed_level_adds_the_gradients_of_both_means(net, batch, untouched):
    train, validation = batch(7, 4), batch(3, 5)
    check = untouched(net)
    given = {"train_batch": train, "validation_batch": validation}
    gradients, losses = BatchGradients().mixed_level_gradient(net, **given)
    check()
    assert losses.shape == (3,)
    from_train, _ = BatchGradients().alpha_gradient_sum(net, train)
    from_validation, own = BatchGradients().alpha_gradient_sum(net, validation)
    torch.testing.assert_close(losses, own)
    for kind, gradient in gradients.items():
        expected = from_train[kind] / 7 + from_validation[kind] / 3
        torch.testing.assert_close(gradient, expected, **EXACT)


def test_parameters_that_a_loss_does_not_use_get_zeros(quadratic):
    labels = torch.zeros(2, dtype=torch.int64)
    quadratic.forward = lambda x: torch.stack([x[:, 0] * quadratic.w, x[:, 1]], 1)
    gradients, _ = BatchGradients().alpha_gradient_sum(quadratic, (TRAIN, labels))
    assert gradients["cell"].tolist() == [0.0]
