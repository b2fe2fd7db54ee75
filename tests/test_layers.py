"""Every layer computes what torch computes, and the gradient of every record by one backward."""

import functools
import itertools
import platform

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import nn

from fednas_flwr.base.layers import conv2d, depthwise, group_norm, linear
from fednas_flwr.base.memory import described, keep_freed_memory
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.cli import fail
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid

from .processes import told
from .refusals import raising


def draw(*shape, seed=0, dtype=torch.float64):
    generator = make_generator(seed, "layers")
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def record_gradients(function, weights, x, direction):
    """Return the gradients of every record by one backward through leaves [B, ...]."""
    leaves = [w.detach().expand(len(x), *w.shape).requires_grad_() for w in weights]
    return torch.autograd.grad((function(x, *leaves) * direction).sum(), leaves)


CONVOLUTIONS = {
    "stem": lambda: nn.Conv2d(2, 5, 3, padding=1, bias=False),
    "stride 2, bias": lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1),
    "no padding": lambda: nn.Conv2d(3, 4, 2),
    "everything": lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (2, 1), dilation=(1, 2), groups=2),
    "pointwise": lambda: nn.Conv2d(4, 6, 1, bias=False),
    "pointwise, stride 2": lambda: nn.Conv2d(4, 6, 1, stride=2),
    "blocks": lambda: nn.Conv2d(6, 9, 1, groups=3, bias=False),
    "depthwise, even kernel": lambda: nn.Conv2d(4, 4, 2, groups=4),
    "depthwise, two kernels a channel": lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4),
}
for kernel, stride, dilation in itertools.product((3, 5), (1, 2), (1, 2)):
    own = {"padding": dilation * (kernel // 2), "dilation": dilation, "groups": 4, "bias": False}
    made = functools.partial(nn.Conv2d, 4, 4, kernel, stride, **own)
    CONVOLUTIONS[f"depthwise {kernel}, stride {stride}, dilation {dilation}"] = made
OTHERS = {
    "linear": lambda: nn.Linear(4, 5),
    "linear without bias": lambda: nn.Linear(4, 5, bias=False),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "group norm without weights": lambda: nn.GroupNorm(2, 4, affine=False),
}


def call(module, x, weight=None, bias=None):
    """Return what ``fednas_flwr.base.layers`` computes for a module."""
    if isinstance(module, nn.Conv2d):
        settings = {n: getattr(module, n) for n in ("stride", "padding", "dilation", "groups")}
        return conv2d(x, weight, bias, **settings)
    if isinstance(module, nn.GroupNorm):
        return group_norm(x, module.num_groups, weight, bias, eps=module.eps)
    return linear(x, weight, bias)


def assert_near(found, expected, tolerance):
    distance = (found.double() - expected).norm()
    assert distance <= tolerance * expected.norm(), float(distance / expected.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("batch", "size"), [(1, (7, 5)), (3, (6, 8)), (2, (3, 4))])
@pytest.mark.parametrize("name", CONVOLUTIONS | OTHERS)
def test_a_layer_and_its_gradients(name, batch, size, dtype, tolerance):
    oracle = (CONVOLUTIONS | OTHERS)[name]().double()
    weights = [parameter.data.copy_(draw(*parameter.shape)) for parameter in oracle.parameters()]
    if isinstance(oracle, nn.Linear):
        shape = (batch, 4) if size == (7, 5) else (batch, *size, 4)
    else:
        shape = (batch, oracle.in_channels if name in CONVOLUTIONS else 4, *size)
    x = draw(*shape, seed=3)
    parameters = list(oracle.parameters())
    leaf, own = x.clone().requires_grad_(), x.to(dtype).requires_grad_()
    shared = [w.to(dtype).requires_grad_() for w in weights]
    expected, out = oracle(leaf), call(oracle, own, *shared)
    assert_near(out, expected, tolerance)
    direction = draw(*expected.shape, seed=4)
    wanted = torch.autograd.grad((expected * direction).sum(), [leaf, *parameters])
    found = torch.autograd.grad((out * direction.to(dtype)).sum(), [own, *shared])
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, other, tolerance)
    if not parameters:
        return
    given = shared, x.to(dtype), direction.to(dtype)
    per_record = record_gradients(lambda x, *leaves: call(oracle, x, *leaves), *given)
    for i in range(batch):
        alone = (oracle(x[i : i + 1]) * direction[i]).sum()
        for gradient, other in zip(per_record, torch.autograd.grad(alone, parameters), strict=True):
            assert_near(gradient[i], other, tolerance)


@pytest.mark.parametrize("stride", [1, 2])
def test_kernels_of_two_sizes_and_many_edges_are_one_call(stride):
    x = draw(3, 4, 7, 6)
    weights = [draw(8, 1, 3, 3, seed=1), draw(12, 1, 5, 5, seed=2)]

    def separately(x, *weights):
        outs = [
            nn.functional.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2, groups=4)
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


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_group_norm_of_which_one_parameter_is_trained(trained):
    x, parameters = draw(3, 4, 5, 2), {"weight": draw(4, seed=1), "bias": draw(4, seed=2)}
    leaf = parameters[trained].expand(3, 4).requires_grad_()
    out = group_norm(x, 2, **(parameters | {trained: leaf}), eps=1e-5)
    torch.testing.assert_close(out, nn.functional.group_norm(x, 2, **parameters, eps=1e-5))
    (gradient,) = torch.autograd.grad(out.square().sum(), leaf)
    for i in range(3):
        own = parameters[trained].clone().requires_grad_()
        one = nn.functional.group_norm(x[i : i + 1], 2, **(parameters | {trained: own}), eps=1e-5)
        torch.testing.assert_close(gradient[i], torch.autograd.grad(one.square().sum(), own)[0])


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 10])
@pytest.mark.parametrize("inputs", [3, 24, 64])
def test_rows_of_a_linear_layer_are_rounded_alike(inputs, columns):
    """Forward and backward, at every place of batches of many sizes; MKL alone does not."""
    generator = torch.Generator().manual_seed(inputs + columns)
    weight = torch.randn(columns, inputs, generator=generator)
    record, gradient = (torch.randn(n, generator=generator) for n in (inputs, columns))
    for size in (1, 2, 3, 4, 5, 8, 16):
        x = record.repeat(size, 1).requires_grad_()
        out = linear(x, weight)
        (by_x,) = torch.autograd.grad(out, x, gradient.repeat(size, 1))
        assert out.shape == (size, columns)
        assert torch.equal(out, out[:1].expand_as(out))
        assert torch.equal(by_x, by_x[:1].expand_as(by_x))
        torch.testing.assert_close(out[0], weight @ record)
        torch.testing.assert_close(by_x[0], gradient @ weight)


def test_settings_are_checked_without_loading_torch_or_numpy():
    loaded = "sorted({'numpy', 'torch'} & set(sys.modules))"
    assert told("-c", f"import sys, fednas_flwr.settings\nprint({loaded})") == "[]\n"


# --- memory


PROCESS = """
import resource, sys
import torch
from fednas_flwr.base.memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()


def step():
    for _ in range(20):
        torch.ones(10 * 2**20)  # 40 MiB: glibc itself never keeps more than 32 MiB


step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(argument):
    """Return how many pages a process faults in for 20 tensors after 20 others."""
    return int(told("-c", PROCESS, argument))


@pytest.mark.run
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc is set")
def test_freed_memory_stays_with_the_process():
    assert 10 * faults("keep") < faults("leave")


def test_every_process_that_answers_keeps_it():
    keep_freed_memory.cache_clear()
    grid = InProcessGrid(make_client_app(), 1)
    list(grid.send_and_receive([grid.create_message(RecordDict(), "train.search", 2, "")]))
    assert keep_freed_memory.cache_info().misses == 1


TOO_LARGE = [(torch.empty, "4000000000000000 bytes"), (np.empty, "7.11 PiB")]


@pytest.mark.parametrize(("make", "amount"), TOO_LARGE)
def test_who_runs_out_of_memory_is_told_what_to_lower(make, amount):
    with pytest.raises((RuntimeError, MemoryError)) as error:
        make(10**15)
    assert described(error.value).startswith(f"out of memory when {amount} more were needed: lower")
    assert described(ValueError("lr must be above 0")) == "ValueError: lr must be above 0"


def test_client_and_command_tell_it(monkeypatch, capsys):
    decode = "fednas_flwr.deploy.client_app.messages.decode_request"
    monkeypatch.setattr(decode, raising(MemoryError))
    grid = InProcessGrid(make_client_app(), 1)
    (reply,) = grid.send_and_receive([grid.create_message(RecordDict(), "train.search", 2, "")])
    assert reply.error.reason.startswith("out of memory: lower")
    fail(MemoryError(), debug=False)
    assert capsys.readouterr().err.startswith("fednas: out of memory: lower")
