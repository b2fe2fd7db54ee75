"""The fast engine computes the reference's function: outputs, gradients, statistics, states."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fednas_flwr.errors import ConfigError
from fednas_flwr.randomness import make_generator, seeded
from fednas_flwr.search_spaces import DARTSSpace, NASBench201Space
from fednas_flwr.search_spaces.operations import make_norm
from fednas_flwr.search_spaces.wide_operations import (
    average_pool,
    convolution,
    depthwise,
    linear,
    max_pool,
    norm,
    pointwise,
)

SIZES = {"input_shape": (3, 8, 8), "num_classes": 5, "channels": 4}
SPACES = {
    "darts": DARTSSpace(**SIZES, num_cells=3),
    "nasbench201": NASBench201Space(**SIZES, num_cells=1),
}
SHAPES = [(3, 8, 8), (1, 9, 7), (2, 12, 5)]


@pytest.fixture(params=sorted(SPACES))
def space(request):
    return SPACES[request.param]


def draw(*shape, seed=0, dtype=torch.float64):
    generator = make_generator(seed, "engines")
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def both_engines(space, **changes):
    """Return the reference supernet and the fast one, with the same state, in float64."""
    space = dataclasses.replace(space, **changes)
    with seeded(1, "supernet"):
        reference = dataclasses.replace(space, engine="reference").supernet().double()
    fast = dataclasses.replace(space, engine="fast").supernet().double()
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
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 17, 15), (2, 13, 24)])
def test_function_and_gradients_with_group_norm(space, shape, batch):
    engines = both_engines(space, input_shape=shape, norm="group")
    x = draw(batch, *shape)
    assert_same(*(outcome(supernet, x) for supernet in engines))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
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
    assert_same(*(outcome(supernet, x, weights) for supernet in engines))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_state_dicts_and_initialisation_do_not_depend_on_the_engine(space, norm):
    states = []
    for engine in ("reference", "fast"):
        with seeded(4, "supernet"):
            supernet = dataclasses.replace(space, norm=norm, engine=engine).supernet()
        states.append(supernet.state_dict())
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    reference, _ = both_engines(space, norm=norm)
    reference.load_state_dict(states[1])


def test_unknown_engine_is_refused(space):
    with pytest.raises(ConfigError, match="engine=quick.*fast, reference"):
        dataclasses.replace(space, engine="quick")


# One layer at a time: name -> (module, the layer's function of input and weights, input channels)
LAYERS = {
    "stem": (
        nn.Conv2d(2, 5, 3, padding=1, bias=False),
        lambda x, w: convolution(x, w),
        2,
    ),
    "stride 2": (
        nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False),
        lambda x, w: convolution(x, w, stride=2),
        3,
    ),
    "pointwise": (nn.Conv2d(4, 6, 1, bias=False), lambda x, w: pointwise(x, w), 4),
    "blocks": (
        nn.Conv2d(6, 9, 1, groups=3, bias=False),
        lambda x, w: pointwise(x, w, groups=3),
        6,
    ),
}
for kernel in (3, 5):
    for stride in (1, 2):
        for dilation in (1, 2):
            LAYERS[f"depthwise {kernel}, stride {stride}, dilation {dilation}"] = (
                nn.Conv2d(
                    *(4, 4, kernel, stride),
                    padding=dilation * (kernel // 2),
                    dilation=dilation,
                    groups=4,
                    bias=False,
                ),
                lambda x, w, s=stride, d=dilation: depthwise(x, [w], stride=s, dilation=d),
                4,
            )


def record_gradients(function, weights, x, direction):
    """Return the gradients of every record by one backward through leaves [B, ...]."""
    leaves = [w.detach().expand(len(x), *w.shape).requires_grad_() for w in weights]
    return torch.autograd.grad((function(x, *leaves) * direction).sum(), leaves)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("batch", "size"), [(1, (7, 5)), (3, (6, 8)), (2, (3, 4))])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_and_its_gradients(layer, batch, size, dtype, tolerance):
    module, function, channels = LAYERS[layer]
    oracle, weight = module.double(), module.weight.detach().to(dtype)
    x = draw(batch, channels, *size, seed=3)
    leaf, wide = x.clone().requires_grad_(), x.to(dtype).requires_grad_()
    expected = oracle(leaf)
    direction = draw(*expected.shape, seed=4)
    by_x, by_weight = torch.autograd.grad((expected * direction).sum(), (leaf, oracle.weight))
    weight.requires_grad_()
    out = function(wide, weight)
    found = torch.autograd.grad((out * direction.to(dtype)).sum(), (wide, weight))
    per_record = record_gradients(function, [weight], x.to(dtype), direction.to(dtype))[0]
    one_by_one = torch.stack(
        [
            torch.autograd.grad((oracle(x[i : i + 1]) * direction[i]).sum(), oracle.weight)[0]
            for i in range(batch)
        ]
    )
    names = ["out", "by x", "by weight", "per record"]
    assert_same(
        dict(zip(names, (expected, by_x, by_weight, one_by_one), strict=True)),
        dict(zip(names, (out, *found, per_record), strict=True)),
        tolerance,
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_kernels_of_two_sizes_and_many_edges_are_one_call(stride):
    x = draw(3, 4, 7, 6)
    weights = [draw(8, 1, 3, 3, seed=1), draw(12, 1, 5, 5, seed=2)]

    def separately(x, *weights):
        outs = [
            F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2, groups=4)
            for weight in weights
            for kernel in weight.split(4)
        ]
        return torch.cat(outs, 1)

    def together(x, *weights):
        return depthwise(x, weights, stride=stride)

    torch.testing.assert_close(together(x, *weights), separately(x, *weights))
    direction = draw(*together(x, *weights).shape, seed=5)
    for weight in weights:
        weight.requires_grad_()
    gradients = record_gradients(together, weights, x, direction)
    for i in range(3):
        one = (separately(x[i : i + 1], *weights) * direction[i]).sum()
        for found, expected in zip(gradients, torch.autograd.grad(one, weights), strict=True):
            torch.testing.assert_close(found[i], expected)


def test_linear_gradients_of_every_record():
    x, weight, bias = draw(3, 4), draw(5, 4, seed=1), draw(5, seed=2)
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    direction = draw(3, 5, seed=3)
    by_weight, by_bias = record_gradients(linear, [weight, bias], x, direction)
    torch.testing.assert_close(by_weight, direction[:, :, None] * x[:, None, :])
    torch.testing.assert_close(by_bias, direction)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [(8, 6), (7, 5), (1, 1), (1, 4)])
def test_pools(size, stride):
    x = draw(2, 3, *size).round().requires_grad_()  # rounded: ties, which go to the first
    mean = nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)
    for wide, plain in (
        (max_pool(x, stride=stride), F.max_pool2d(x, 3, stride, 1)),
        (average_pool(x, stride=stride), mean(x)),
    ):
        torch.testing.assert_close(wide, plain)
        direction = draw(*plain.shape, seed=1)
        torch.testing.assert_close(
            *(torch.autograd.grad((out * direction).sum(), x)[0] for out in (wide, plain))
        )


@pytest.mark.parametrize("kind", ["batch", "group"])
@pytest.mark.parametrize("training", [True, False])
def test_norms_side_by_side(kind, training):
    modules = [make_norm(4, norm=kind, affine=False).double().train(training) for _ in range(3)]
    twins = [make_norm(4, norm=kind, affine=False).double().train(training) for _ in range(3)]
    x = draw(2, 12, 3, 5)
    expected = torch.cat([m(part) for m, part in zip(twins, x.split(4, dim=1), strict=True)], 1)
    torch.testing.assert_close(norm(x, modules), expected)
    for module, twin in zip(modules, twins, strict=True):
        for buffer, other in zip(module.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(buffer, other)
