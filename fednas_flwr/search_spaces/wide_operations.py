"""Layers of the fast engine: many edges at once, and one gradient of the weights per record.

What the edges that leave one state have in common is computed once: they share the ReLU and the
pools, and their kernels are stacked into one call. A stacked weight comes from a :data:`Stack`. The
plain one is ``torch.cat``. Another may give every record a copy of its own, [B, ...] with stride 0
(``privacy.clipping.RecordWeights``): one ordinary backward then returns one gradient of the weights
per record, as a leaf of op weights does for the alphas. Every layer here takes both forms. Its
backward forms the gradient of every record anyway, since on CPU that is faster than torch's own
kernels for small depthwise and 1x1 convolutions, and adds them up where the weight is shared.

The modules that these functions compute are those of ``operations.py``. Differentiable once; not
under ``torch.vmap``.

Tensor suffixes: B batch, C channels, H height, W width, E edges of a state, O ops; in shapes of
weights O output channels, K kernel size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fednas_flwr.search_spaces.operations import add_all

Stack = Callable[[list[Tensor]], Tensor]  # parameters of one shape -> joined along dim 0


def depthwise(
    x_BCHW: Tensor, weights: Sequence[Tensor], *, stride: int = 1, dilation: int = 1
) -> Tensor:
    """Return depthwise convolutions, with ``padding`` that keeps the size at stride 1.

    Args:
        x_BCHW: Input. Either it has as many channels as all kernels together, or every group of C
            kernels reads it anew.
        weights: Stacked kernels [O, 1, K, K] of one or several odd sizes, joined along O. Smaller
            ones are computed as the largest with a border of zeros: one call costs less than two.
        stride: Of all.
        dilation: Of all.

    Returns:
        [B, sum of O, ceil(H / stride), ceil(W / stride)].
    """
    out: Tensor = _Depthwise.apply(x_BCHW, stride, dilation, *weights)
    return out


def pointwise(x_BCHW: Tensor, weight: Tensor, *, groups: int = 1) -> Tensor:
    """Return a 1x1 convolution in ``groups`` blocks; the weight is [O, C / groups, 1, 1]."""
    out: Tensor = _Pointwise.apply(x_BCHW, weight, groups)
    return out


def convolution(x_BCHW: Tensor, weight: Tensor, *, stride: int = 1) -> Tensor:
    """Return a convolution with an odd kernel [O, C, K, K] and padding K // 2."""
    out: Tensor = _Convolution.apply(x_BCHW, weight, stride)
    return out


def linear(x_BC: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``x W^T + b`` [B, O]."""
    out: Tensor = _Linear.apply(x_BC, weight, bias)
    return out


def norm(x_BCHW: Tensor, modules: Sequence[Any]) -> Tensor:
    """Return the channels normalised by norms without affine part, each on its share of them.

    The running statistics of batch norms move as they would one by one.
    """
    first = modules[0]
    if isinstance(first, nn.GroupNorm):
        return F.group_norm(x_BCHW, len(modules) * first.num_groups, eps=first.eps)
    buffers = [[m.running_mean for m in modules], [m.running_var for m in modules]]
    mean, variance = (torch.cat(each) for each in buffers)
    out = F.batch_norm(
        x_BCHW, mean, variance, training=first.training, momentum=first.momentum, eps=first.eps
    )
    if first.training:
        for module, mean_C, variance_C in zip(
            modules, mean.chunk(len(modules)), variance.chunk(len(modules)), strict=True
        ):
            module.running_mean.copy_(mean_C)
            module.running_var.copy_(variance_C)
            module.num_batches_tracked.add_(1)
    return out


def max_pool(x_BCHW: Tensor, *, stride: int = 1) -> Tensor:
    """Return 3x3 maxima, computed with all channels innermost in memory, at .2 of the cost."""
    batch, channels, height, width = x_BCHW.shape
    side_by_side = x_BCHW.reshape(1, batch * channels, height, width)
    out = F.max_pool2d(side_by_side.contiguous(memory_format=torch.channels_last), 3, stride, 1)
    return out.contiguous().view(batch, channels, *out.shape[2:])


def average_pool(x_BCHW: Tensor, *, stride: int = 1) -> Tensor:
    """Return 3x3 means over the pixels inside the image, as a depthwise convolution."""
    ones = x_BCHW.new_ones(1, 1, 3, 3)
    inside = F.conv2d(ones.new_ones(1, 1, *x_BCHW.shape[2:]), ones, stride=stride, padding=1)
    return depthwise(x_BCHW, [ones.expand(x_BCHW.shape[1], 1, 3, 3)], stride=stride) / inside


def mix(
    parts: Sequence[tuple[Tensor, Sequence[str]]], weights_BEO: Tensor, *, ops: Sequence[str]
) -> Tensor:
    """Return the weighted sum of all ops for the edges of a state, [B, E, C, H, W].

    Args:
        parts: Outputs [B, o, E (or 1: the same for all edges), C, H, W], and the names of their o
            ops.
        weights_BEO: Weight of every op on every edge.
        ops: Names of the O ops.
    """

    def weighted(out: Tensor, names: Sequence[str]) -> Tensor:
        columns = [weights_BEO[..., ops.index(name)] for name in names]
        return (out * torch.stack(columns, dim=1)[..., None, None, None]).sum(1)

    return add_all(weighted(out, names) for out, names in parts)


class _Depthwise(torch.autograd.Function):
    """:func:`depthwise`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int, dilation: int, *weights: Tensor) -> Tensor:
        kernels = [w[0] if w.dim() == 5 else w for w in weights]
        size = max(w.shape[-1] for w in kernels)
        kernel = torch.cat([_with_border(w, size) for w in kernels])
        ctx.save_for_backward(x, kernel)
        ctx.stride, ctx.dilation = stride, dilation
        ctx.shapes = [w.shape for w in weights]
        wide = _repeat(x, len(kernel))
        padding = dilation * (size // 2)
        return F.conv2d(
            wide, kernel, stride=stride, padding=padding, dilation=dilation, groups=len(kernel)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        batch, channels, height, width = x.shape
        total, size = len(kernel), kernel.shape[-1]
        padding = ctx.dilation * (size // 2)
        gradients: list[Tensor | None] = [None] * len(ctx.shapes)
        if any(ctx.needs_input_grad[3:]):
            # With every record's channels side by side, the output's gradient is the kernel.
            per_record = F.conv2d(
                _repeat(x, total).reshape(1, batch * total, height, width),
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
            wide = F.conv2d(
                g, kernel.flip(-1, -2), padding=padding, dilation=ctx.dilation, groups=total
            )
            x_gradient = wide.view(batch, -1, channels, height, width).sum(1)
        return x_gradient, None, None, *gradients


class _Pointwise(torch.autograd.Function):
    """:func:`pointwise`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        kernel = weight[0] if weight.dim() == 5 else weight
        blocks = kernel.reshape(groups, -1, kernel.shape[1])
        ctx.save_for_backward(x, blocks)
        ctx.shape = weight.shape
        batch, _, height, width = x.shape
        out = blocks @ x.reshape(batch, groups, -1, height * width)
        return out.view(batch, -1, height, width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, blocks = ctx.saved_tensors
        batch, _, height, width = x.shape
        g = g.reshape(batch, len(blocks), -1, height * width)
        x_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            x_gradient = (blocks.mT @ g).view(x.shape)
        if ctx.needs_input_grad[1]:
            per_record = g @ x.reshape(batch, len(blocks), -1, height * width).mT
            weight_gradient = _as_weight(per_record, ctx.shape)
        return x_gradient, weight_gradient, None


class _Convolution(torch.autograd.Function):
    """:func:`convolution`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        kernel = weight[0] if weight.dim() == 5 else weight
        ctx.save_for_backward(x, kernel)
        ctx.shape, ctx.stride = weight.shape, stride
        return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, kernel = ctx.saved_tensors
        shared = len(ctx.shape) == 4
        stride, padding = [ctx.stride] * 2, [kernel.shape[-1] // 2] * 2
        x_gradient, weight_gradient, _ = torch.ops.aten.convolution_backward(
            *(g, x, kernel, None, stride, padding, [1, 1], False, [0, 0], 1),
            [ctx.needs_input_grad[0], ctx.needs_input_grad[1] and shared, False],
        )
        if ctx.needs_input_grad[1] and not shared:
            patches = _patches(x, kernel.shape[-1], stride=ctx.stride)
            weight_gradient = (g.flatten(2) @ patches.mT).view(ctx.shape)
        return x_gradient, weight_gradient, None


class _Linear(torch.autograd.Function):
    """:func:`linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        matrix = weight[0] if weight.dim() == 3 else weight
        ctx.save_for_backward(x, matrix)
        ctx.shapes = weight.shape, bias.shape
        return F.linear(x, matrix, bias[0] if bias.dim() == 2 else bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        x, matrix = ctx.saved_tensors
        weight_shape, bias_shape = ctx.shapes
        per_record = g[:, :, None] * x[:, None, :]
        return g @ matrix, _as_weight(per_record, weight_shape), _as_weight(g, bias_shape)


def _patches(x_BCHW: Tensor, size: int, *, stride: int) -> Tensor:
    """Return what each output of a convolution reads, [B, C K K, outputs], as F.unfold does."""
    windows = F.pad(x_BCHW, (size // 2,) * 4).unfold(2, size, stride).unfold(3, size, stride)
    return windows.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


def _repeat(x_BCHW: Tensor, channels: int) -> Tensor:
    times = channels // x_BCHW.shape[1]
    return x_BCHW if times == 1 else x_BCHW.repeat(1, times, 1, 1)


def _with_border(kernel: Tensor, size: int) -> Tensor:
    border = (size - kernel.shape[-1]) // 2
    return F.pad(kernel, (border,) * 4) if border else kernel


def _as_weight(per_record: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradients [B, ...] in the form of the weight, added up if it is shared."""
    if shape.numel() != per_record.numel():
        return per_record.sum(0).view(shape)
    return per_record.reshape(shape)
