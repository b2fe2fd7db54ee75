"""The fast engine computes the reference's function: outputs, gradients, statistics, states."""

import dataclasses

import pytest
import torch
from torch.optim.swa_utils import update_bn

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.spaces.operations import average_pool, make_norm, max_pool, normalised

from ..reference_engine import by_ops
from ..rows import seldom
from ..small_spaces import SPACES

SHAPES = [(3, 8, 8), (1, 9, 7), (2, 12, 5)]


@pytest.fixture(params=["darts", "nasbench201"])
def space(request):
    return SPACES[request.param]


def draw(*shape, seed=0, dtype=torch.float64):
    generator = make_generator(seed, "engines")
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def both_engines(space, **changes):
    """Return the reference supernet and the fast one, with the same state, in float64."""
    space = dataclasses.replace(space, **changes)
    with seeded(1, "supernet"):
        reference = by_ops(space.supernet()).double()
    fast = space.supernet().double()
    for alphas in reference.alphas().values():
        alphas.data.mul_(1000)  # far from uniform, so that no op is lost among the others
    fast.load_state_dict(reference.state_dict())
    return reference, fast


def outcome(supernet, x, op_weights=None):
    """Return logits, all gradients and all buffers after one step in the mode it is in."""
    logits = supernet(x, op_weights)
    by = dict(supernet.named_parameters()) if op_weights is None else op_weights
    gradients = torch.autograd.grad((logits * draw(*logits.shape, seed=9)).sum(), list(by.values()))
    named = {f"gradient of {name}": g for name, g in zip(by, gradients, strict=True)}
    return {"logits": logits, **named, **dict(supernet.named_buffers())}


def assert_same(outcomes, others, tolerance=1e-12):
    assert outcomes.keys() == others.keys()
    for name, expected in outcomes.items():
        distance = (others[name].double() - expected.double()).norm()
        assert distance <= tolerance * expected.double().norm(), (name, float(distance))


# Larger maps: over a handful of pixels a group norm amplifies rounding, in the reference as well.
GROUP_NORM = [
    *(((3, 16, 16), 3), ((1, 17, 15), 1), seldom((3, 16, 16), 1), seldom((1, 17, 15), 3)),
    *(seldom((2, 13, 24), 1), seldom((2, 13, 24), 3)),
]


@pytest.mark.parametrize(("shape", "batch"), GROUP_NORM)
def test_function_and_gradients_with_group_norm(space, shape, batch):
    engines = both_engines(space, input_shape=shape, norm="group")
    x = draw(batch, *shape)
    assert_same(*(outcome(supernet, x) for supernet in engines))


BATCH_NORM = [
    *((SHAPES[0], True), (SHAPES[1], False), seldom(SHAPES[0], False), seldom(SHAPES[1], True)),
    *(seldom(SHAPES[2], True), seldom(SHAPES[2], False)),
]


@pytest.mark.parametrize(("shape", "training"), BATCH_NORM)
def test_function_gradients_and_statistics_with_batch_norm(space, shape, training):
    engines = both_engines(space, input_shape=shape, norm="batch")
    for supernet in engines:
        for seed, (name, buffer) in enumerate(supernet.named_buffers()):
            if not name.endswith("tracked"):  # other statistics on every edge
                buffer.copy_(draw(*buffer.shape, seed=seed).square() + 0.5)
        supernet.train(training)
    assert_same(*(outcome(supernet, draw(3, *shape)) for supernet in engines))


def test_op_weights_of_every_example(space):
    engines = both_engines(space, norm="group")
    weights = {
        kind: draw(3, edges, len(space.ops), seed=2).softmax(-1).requires_grad_()
        for kind, edges in space.cell_kinds.items()
    }
    x = draw(3, *space.input_shape)
    outcomes = (outcome(supernet, x, weights) for supernet in engines)
    assert_same(*outcomes, tolerance=1e-10)  # 1e-11 was seen on one kind of CPU


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(8, 6), (7, 5), (1, 1), (1, 4)])
def test_pools(size, stride):
    x = draw(2, 3, *size).round().requires_grad_()  # rounded: ties, which go to the first
    mean = torch.nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)
    for wide, plain in (
        (max_pool(x, stride=stride), torch.nn.functional.max_pool2d(x, 3, stride, 1)),
        (average_pool(x, stride=stride), mean(x)),
    ):
        torch.testing.assert_close(wide, plain)
        direction = draw(*plain.shape, seed=1)
        gradients = (torch.autograd.grad((out * direction).sum(), x)[0] for out in (wide, plain))
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", ["batch", "group"])
@pytest.mark.parametrize("training", [True, False])
def test_norms_side_by_side(kind, training):
    modules = [make_norm(4, norm=kind, affine=False).double().train(training) for _ in range(3)]
    twins = [make_norm(4, norm=kind, affine=False).double().train(training) for _ in range(3)]
    x = draw(2, 12, 3, 5)
    expected = torch.cat([m(part) for m, part in zip(twins, x.split(4, dim=1), strict=True)], 1)
    torch.testing.assert_close(normalised(x, modules), expected)
    for module, twin in zip(modules, twins, strict=True):
        for buffer, other in zip(module.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(buffer, other)


def test_both_engines_can_average_statistics_over_batches(space):
    """Momentum None, with which torch.optim.swa_utils.update_bn estimates them anew."""
    batches = [draw(3, 3, 8, 8), draw(5, 3, 8, 8)]
    states = []
    for engine in both_engines(space, norm="batch"):
        update_bn(batches, engine)
        states.append(dict(engine.named_buffers()))
    for name, expected in states[0].items():
        torch.testing.assert_close(states[1][name], expected)
        assert "tracked" not in name or int(expected) == 2
