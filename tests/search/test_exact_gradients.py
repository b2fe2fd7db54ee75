"""Which batches exact gradients are of, and the gradients, against explicit ones."""

import pytest
import torch
from torch.nn import functional as F

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search.exact_gradients import BatchGradients, ExactGradients, ExactSums
from fednas_flwr.search.objective import Objective
from fednas_flwr.search.optimizer_step import Optimizer
from fednas_flwr.search.proxyless import alpha_gradient, draw_paths, gate_gradient

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
        return (
            Records("train", [batch(6, seed) for seed in range(train)], log),
            Records("validation", [batch(4, 50 + seed) for seed in range(validation)], log),
            log,
        )

    return make


def optimizer(net):
    return Optimizer(net.weights(), torch.optim.SGD(net.weights().values(), lr=0.1, momentum=0.9))


def take(gradients, net):
    """Ask for both gradients in every step; return how many there were."""
    steps = 0
    for _ in gradients.steps():
        gradients.alphas(net, optimizer(net), rule="first_order", validation_weight=1.0)
        gradients.weights(net)
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("steps", "drawn"),
    [
        (1, ["train 1.0"]),
        (2, ["train 1.0", "train 1.1"]),
        (3, ["train 1.0", "train 1.1", "train 1.2"]),  # a whole pass, and no other is begun
        (4, ["train 1.0", "train 1.1", "train 1.2", "train 2.0"]),
        (7, [f"train {n}.{i}" for n in (1, 2) for i in range(3)] + ["train 3.0"]),
    ],
)
def test_as_many_steps_as_asked_over_as_many_passes_as_needed(net, records, steps, drawn):
    train, _, log = records(3)
    gradients = ExactGradients(train, num_steps=steps)
    seen = [gradients.train_batch for _ in gradients.steps()]
    assert log == drawn
    assert len(seen) == steps
    assert all(one is train.batches[i % 3] for i, one in enumerate(seen))


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_epochs_are_whole_passes(records, epochs):
    train, _, log = records(2)
    assert len(list(ExactGradients(train, epochs=epochs).steps())) == 2 * epochs
    assert log == [f"train {n}.{i}" for n in range(1, epochs + 1) for i in range(2)]


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

    class TwoHeads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.idle = net, torch.nn.Linear(1, 1)

        def forward(self, x):
            logits = self.body(x)
            return logits, logits.square()

    network = TwoHeads()
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


@pytest.mark.parametrize("rule", ["first_order", "second_order", "mixed_level"])
def test_alphas_have_the_rules_gradient_of_the_steps_batches(rule, net, records, untouched):
    train, validation, _ = records(2, 1)
    gradients = ExactGradients(train, validation, objective=Objective(FACTORS))
    sgd, objective = optimizer(net), Objective(FACTORS)
    check, seen = untouched(net), []
    for one, _ in zip(train.batches, gradients.steps(), strict=True):
        found = gradients.alphas(net, sgd, rule=rule, validation_weight=0.5)
        other = validation.batches[0]
        if rule == "first_order":
            sums, losses = BatchGradients(objective=objective).alpha_gradient_sum(net, other)
            expected = {kind: g / 4 for kind, g in sums.items()}
        elif rule == "mixed_level":
            expected, losses = BatchGradients(objective=objective).mixed_level_gradient(
                net, train_batch=one, validation_batch=other, validation_weight=0.5
            )
        else:
            mean = objective.losses(net(one[0]), one[1]).mean()
            weights = net.weights()
            slopes = torch.autograd.grad(mean, list(weights.values()))
            steps = zip(weights.items(), slopes, strict=True)
            moved = {name: weight.detach() - 0.1 * slope for (name, weight), slope in steps}
            expected, losses = BatchGradients(objective=objective).second_order_gradient(
                net,
                weights=weights,
                virtual_weights=moved,
                train_batch=one,
                validation_batch=other,
                inner_lr=0.1,
            )
        for kind, gradient in expected.items():
            torch.testing.assert_close(found[kind], gradient, **EXACT)
        seen.append(losses)
    check()
    assert gradients.validation_tally.num_examples == 8
    assert gradients.validation_tally.loss == pytest.approx(torch.cat(seen).mean().item())


@pytest.mark.parametrize("mode", ["two", "full"])
def test_gates_are_of_the_validation_batch(mode):
    with seeded(1, "supernet"):
        supernet = PATH_SPACE.supernet().double().train()
    generator = make_generator(0, "batches")
    train, validation = (tensors_of((2, 4, 4), 3, 5, generator) for _ in range(2))
    objective = Objective(FACTORS)
    alphas = supernet.alphas()["blocks"]
    drawn = draw_paths(alphas, mode=mode, generator=generator)
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
def test_sums_are_those_of_a_loop_over_records(state, split, net, records):
    train, validation, log = records(2, 2)
    exact, seen = ExactSums(train(), validation(), objective=Objective(FACTORS)), []
    for x, y in (train if split == "train" else validation).batches:
        found, size = exact.sums(state, net)
        assert size == len(y)
        rows = zip(x, y, strict=True)
        losses = [FACTORS[label] * F.cross_entropy(net(row[None])[0], label) for row, label in rows]
        seen += [loss.item() for loss in losses]
        for name, parameter in getattr(net, state)().items():
            gradients = (torch.autograd.grad(loss, parameter, retain_graph=True) for loss in losses)
            torch.testing.assert_close(found[name], sum(g for (g,) in gradients), **EXACT)
    assert log == [f"{split} 1.0", f"{split} 1.1"]
    metrics = exact.metrics()
    assert ("train_accuracy" in metrics) == (split == "train")
    metrics.pop("train_accuracy", None)
    assert metrics == {f"{split}_loss": pytest.approx(sum(seen) / len(seen))}


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
