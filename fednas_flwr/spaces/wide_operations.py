"""Parts of supernets: what the edges that leave one state have in common, computed once.

The edges share the ReLU and the pools, and their kernels are stacked into one call of
``fednas_flwr.base.layers``. The modules computed here are those of ``operations.py``, whose results
are the same.

Tensor suffixes: B batch, C channels, H height, W width, E edges of a state, O ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.layers import depthwise
from fednas_flwr.spaces.operations import add_all


def node_states(
    inputs: Sequence[Tensor],
    edges: Sequence[tuple[int, int]],
    leave: Callable[[Tensor, list[int]], Tensor],
) -> list[Tensor]:
    """Return the states of all nodes of a cell, those of its inputs first.

    Args:
        inputs: States of the first nodes.
        edges: (source, target) of every edge; every later node has one.
        leave: From a state and the indices of the edges that leave it to their outputs [B, E, ...].
    """
    states, last = list(inputs), max(target for _, target in edges)
    incoming: dict[int, list[Tensor]] = {node: [] for node in range(last + 1)}
    for source in range(last):
        if source >= len(inputs):
            states.append(add_all(incoming[source]))
        indices = [index for index, edge in enumerate(edges) if edge[0] == source]
        outs = leave(states[source], indices).unbind(1)
        for index, out in zip(indices, outs, strict=True):
            incoming[edges[index][1]].append(out)
    return [*states, add_all(incoming[last])]


def norm(x_BCHW: Tensor, modules: Sequence[Any]) -> Tensor:
    """Return the channels normalised by norms without affine part, each on its share of them.

    The running statistics of batch norms move as they would one by one.

    Raises:
        ValueError: Some batch norms are in training mode and others are not.
    """
    first = modules[0]
    if isinstance(first, nn.GroupNorm):
        return F.group_norm(x_BCHW, len(modules) * first.num_groups, eps=first.eps)
    if len({module.training for module in modules}) > 1:
        raise ValueError("a supernet needs all norms in one mode: call train() or eval()")
    buffers = [[m.running_mean for m in modules], [m.running_var for m in modules]]
    mean, variance = (torch.cat(each) for each in buffers)
    momentum = first.momentum
    if momentum is None:  # as torch's own: the mean over all batches
        momentum = 1 / (int(first.num_batches_tracked) + 1)
    out = F.batch_norm(
        x_BCHW, mean, variance, training=first.training, momentum=momentum, eps=first.eps
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
