"""Layers with one weight per record, so that one backward pass gives one gradient per record.

A weight is either shared, in torch's shape, or a copy for each of B records, [B, ...] with stride 0
(``privacy.mechanism.record_gradients``). Then its gradient is [B, ...], just as the gradient of op
weights [B, edges, ops] is one per record. On CPU this costs no more than the gradient of a shared
weight by torch's own kernels, which are slow for small depthwise and 1x1 convolutions. Supernets of
images therefore always compute with these layers.

Measured: ``scripts/bench_step.py``. Differentiable once; not under ``torch.vmap``. Autocast casts
the inputs of a layer, forward and backward, as with torch's own layers.

Tensor suffixes: B batch, C channels, H height, W width; in shapes of weights O output channels, K
kernel size.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import is_autocast_available
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

ALIGNED = 16  # float32 numbers in 64 bytes: rows of a multiple all start at such a border
# Joins parameters of one shape along dim 0: torch.cat, or a function that gives records copies.
Stack = Callable[[list[Tensor]], Tensor]
_STACK: ContextVar[Stack] = ContextVar("stack", default=torch.cat)
FEWEST = 4  # columns of a matrix product; MKL computes fewer differently with AVX-512


def stacked(parameters: list[Tensor]) -> Tensor:
    """Join parameters of one shape along dim 0, by the :data:`Stack` of :func:`stacking`."""
    return _STACK.get()(parameters)


@contextmanager
def stacking(stack: Stack) -> Iterator[None]:
    """Let supernets of images join their parameters by ``stack`` inside the block."""
    token = _STACK.set(stack)
    try:
        yield
    finally:
        _STACK.reset(token)


def called(module: nn.Module, x: Tensor) -> Tensor:
    """Return a module's output, computed by the module itself."""
    return module(x)


def computed(module: nn.Module, x: Tensor) -> Tensor:
    """Return the output of a layer, or of a sequence of layers, by the functions here.

    Convolutions and linear layers get their weights from :func:`stacked`; all others are called.
    """
    if isinstance(module, nn.Sequential):
        return reduce(lambda x, part: computed(part, x), module, x)
    if not isinstance(module, nn.Conv2d | nn.Linear):
        return called(module, x)
    weight, bias = (None if p is None else stacked([p]) for p in (module.weight, module.bias))
    assert weight is not None
    if isinstance(module, nn.Linear):
        return linear(x, weight, bias)
    sizes: Any = {n: getattr(module, n) for n in ("stride", "padding", "dilation", "groups")}
    return conv2d(x, weight, bias, **sizes)


def conv2d(
    x_BCHW: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Return ``F.conv2d`` of the same arguments, computed in the cheapest of the three ways here.

    Args:
        x_BCHW: Input.
        weight: [O, C / groups, K, K] or [B, O, C / groups, K, K].
        bias: [O] or [B, O].
        stride: As in torch.
        padding: As in torch; zeros.
        dilation: As in torch.
        groups: As in torch.
    """
    out_channels, _, *kernel = weight.shape[-4:]
    same = tuple(d * (k // 2) for d, k in zip(dilation, kernel, strict=True))
    if kernel == [1, 1] and padding == (0, 0):
        out = pointwise(x_BCHW[:, :, :: stride[0], :: stride[1]], weight, groups=groups)
    elif (
        groups == x_BCHW.shape[1] == out_channels
        and kernel[0] == kernel[1]
        and kernel[0] % 2 == 1
        and padding == same
        and stride[0] == stride[1]
        and dilation[0] == dilation[1]
    ):
        out = depthwise(x_BCHW, [weight], stride=stride[0], dilation=dilation[0])
    else:
        out = convolution(x_BCHW, weight, stride, padding, dilation, groups)
    return out if bias is None else out + bias[..., None, None]


def depthwise(
    x_BCHW: Tensor, weights: Sequence[Tensor], *, stride: int = 1, dilation: int = 1
) -> Tensor:
    """Return depthwise convolutions, with the padding that keeps the size at stride 1.

    Args:
        x_BCHW: Input. It has as many channels as all kernels together, or else every group of C
            kernels reads all of it.
        weights: Stacked kernels [O, 1, K, K] of one or several odd sizes, joined along O. Smaller
            ones get a border of zeros up to the largest, since one call costs less than two.
        stride: Stride of all convolutions.
        dilation: Dilation of all convolutions.

    Returns:
        [B, sum of O, ceil(H / stride), ceil(W / stride)].
    """
    x_BCHW, *weights = _autocast(x_BCHW, *weights)
    return _Depthwise.apply(x_BCHW, stride, dilation, *weights)


def pointwise(x_BCHW: Tensor, weight: Tensor, *, groups: int = 1) -> Tensor:
    """Return a 1x1 convolution in ``groups`` blocks; the weight is [O, C / groups, 1, 1]."""
    x_BCHW, weight = _autocast(x_BCHW, weight)
    batch, _, height, width = x_BCHW.shape
    blocks = weight.reshape(*weight.shape[:-4], groups, -1, weight.shape[-3])
    out = blocks @ x_BCHW.reshape(batch, groups, -1, height * width)
    return out.view(batch, -1, height, width)


def convolution(
    x_BCHW: Tensor,
    weight: Tensor,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """Return any convolution without bias; arguments as in :func:`conv2d`."""
    x_BCHW, weight = _autocast(x_BCHW, weight)
    if weight.dim() == 4:
        return F.conv2d(x_BCHW, weight, None, stride, padding, dilation, groups)
    return _Convolution.apply(x_BCHW, weight, stride, padding, dilation, groups)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear``; x is [B, ..., C], the weight [O, C] or [B, O, C], the bias alike."""
    out: Tensor = _Linear.apply(*_autocast(x, weight))
    if bias is None:
        return out
    return out + bias.reshape(*bias.shape[:-1], *(1,) * (x.dim() - 2), bias.shape[-1])


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, *, eps: float
) -> Tensor:
    """Return ``F.group_norm``; x is [B, C, ...], weight and bias are [C] or [B, C]."""
    if all(parameter is None or parameter.dim() == 1 for parameter in (weight, bias)):
        return F.group_norm(x, num_groups, weight, bias, eps)
    # With all records' channels side by side, each record can have weights of its own.
    weights, biases = (
        None if p is None else p.expand(len(x), -1).reshape(-1) for p in (weight, bias)
    )
    out = F.group_norm(_side_by_side(x), len(x) * num_groups, weights, biases, eps)
    return out.view(x.shape)


@contextmanager
def with_forwards(forwards: Mapping[Any, Callable[..., Tensor]]) -> Iterator[None]:
    """Let layers compute with other functions inside the block."""
    for layer, forward in forwards.items():
        layer.forward = forward
    try:
        yield
    finally:
        for layer in forwards:
            del layer.forward


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Put a network into evaluation mode inside the block, and restore its mode after it."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def own_linear_layers(module: nn.Module) -> AbstractContextManager[None]:
    """Let linear layers compute with :func:`linear`, which rounds all rows alike."""
    layers = [layer for layer in module.modules() if type(layer) is nn.Linear]
    usual = [layer for layer in layers if "forward" not in vars(layer)]
    return with_forwards({layer: partial(_linear, layer) for layer in usual})


_HOOKING = threading.RLock()  # networks are shared, but one thread's hooks are not for another's


@contextmanager
def hooked(layers: Iterable[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    """Call a hook with the output of each layer, in this thread."""
    with _HOOKING, ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(hook).remove)
        yield


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)


class _Depthwise(torch.autograd.Function):
    """:func:`depthwise`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int, dilation: int, *weights: Tensor) -> Tensor:
        kernels = [w[0] if w.dim() == 5 else w for w in weights]
        size = max(w.shape[-1] for w in kernels)
        kernel = torch.cat([F.pad(w, ((size - w.shape[-1]) // 2,) * 4) for w in kernels])
        ctx.save_for_backward(x, kernel)
        ctx.stride, ctx.dilation = stride, dilation
        ctx.shapes = [w.shape for w in weights]
        wide = _repeat(x, len(kernel))
        return F.conv2d(wide, kernel, None, stride, dilation * (size // 2), dilation, len(kernel))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        batch, channels, height, width = x.shape
        total, size = len(kernel), kernel.shape[-1]
        padding = ctx.dilation * (size // 2)
        gradients: list[Tensor | None] = [None] * len(ctx.shapes)
        if any(ctx.needs_input_grad[3:]):
            # With all records' channels side by side, the output's gradient is the kernel.
            per_record = F.conv2d(
                _side_by_side(_repeat(x, total)),
                g.reshape(batch * total, 1, *g.shape[2:]),
                stride=ctx.dilation,
                padding=padding,
                dilation=ctx.stride,
                groups=batch * total,
            )[..., :size, :size].reshape(batch, total, 1, size, size)
            counts = [shape[-4] for shape in ctx.shapes]
            for index, (part, shape) in enumerate(
                zip(torch.split(per_record, counts, dim=1), ctx.shapes, strict=True)
            ):
                border = (size - shape[-1]) // 2
                part = part[..., border : size - border, border : size - border]
                gradients[index] = _as_weight(part, shape)
        x_gradient = None
        if ctx.needs_input_grad[0]:
            if ctx.stride > 1:
                full = g.new_zeros(batch, total, height, width)
                full[:, :, :: ctx.stride, :: ctx.stride] = g
                g = full
            wide = F.conv2d(g, kernel.flip(-1, -2), None, 1, padding, ctx.dilation, total)
            times = total // channels
            x_gradient = wide if times == 1 else torch.unflatten(wide, 1, (times, channels)).sum(1)
        return x_gradient, None, None, *gradients


class _Convolution(torch.autograd.Function):
    """:func:`convolution` with a weight per record."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        groups: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight[0])
        ctx.arguments = (stride, padding, dilation, groups)
        return F.conv2d(x, weight[0], None, *ctx.arguments)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        *sizes, groups = ctx.arguments
        arguments = (None, *sizes, False, (0, 0))
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient, _, _ = torch.ops.aten.convolution_backward(
                g, x, kernel, *arguments, groups, (True, False, False)
            )
        if ctx.needs_input_grad[1]:
            # With all records' channels side by side, every record is a group of its own.
            batch, sides = len(x), [_side_by_side(t) for t in (g, x)]
            kernels = kernel.new_empty(1).expand(batch * len(kernel), *kernel.shape[1:])
            _, weight_gradient, _ = torch.ops.aten.convolution_backward(
                *sides, kernels, *arguments, batch * groups, (False, True, False)
            )
            weight_gradient = weight_gradient.view(batch, *kernel.shape)
        return x_gradient, weight_gradient, None, None, None, None


class _Linear(torch.autograd.Function):
    """:func:`linear`, without bias.

    Rows are padded, so that all have the same alignment in memory, and products have at least
    ``FEWEST`` columns. In other products, MKL adds up in an order that depends on a row's position.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        matrix = weight[0] if weight.dim() == 3 else weight
        ctx.save_for_backward(x, matrix)
        ctx.shape = weight.shape
        return F.linear(_aligned(x), _wide(_aligned(matrix)))[..., : len(matrix)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = _aligned(g) @ _wide(_aligned(matrix.mT)).mT
            x_gradient = x_gradient[..., : x.shape[-1]]
        if ctx.needs_input_grad[1]:
            rows = g.reshape(len(x), -1, g.shape[-1]).mT
            per_record = rows @ x.reshape(len(x), -1, x.shape[-1])
            weight_gradient = _as_weight(per_record, ctx.shape)
        return x_gradient, weight_gradient


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors in the type of autocast on their device, if it is on."""
    kind = tensors[0].device.type
    if not (is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


def _aligned(rows: Tensor) -> Tensor:
    """Return rows padded with zeros to a multiple of 64 bytes."""
    missing = -rows.shape[-1] % ALIGNED
    return F.pad(rows, (0, missing)) if missing else rows


def _wide(matrix: Tensor) -> Tensor:
    """Return a matrix padded with rows of zeros to at least ``FEWEST`` rows."""
    missing = FEWEST - len(matrix)
    return F.pad(matrix, (0, 0, 0, missing)) if missing > 0 else matrix


def _repeat(x_BCHW: Tensor, channels: int) -> Tensor:
    times = channels // x_BCHW.shape[1]
    return x_BCHW if times == 1 else x_BCHW.repeat(1, times, 1, 1)


def _side_by_side(x: Tensor) -> Tensor:
    """Return [B, C, ...] as [1, B C, ...], with plain strides even if a side is 1."""
    return x.flatten().view(1, -1, *x.shape[2:])


def _as_weight(per_record: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradients [B, ...] in the form of the weight, summed if it is shared.

    A shared weight has as many elements as the gradient of one record.
    """
    if shape.numel() == per_record[0].numel():
        per_record = per_record.sum(0)
    return per_record.reshape(shape)
