"""The DARTS supernet organised by source state instead of by edge: the fast engine.

The modules, and so parameters, initialisation and state dicts, are those of the reference; only
the forward is another. From a state the edges to all later nodes are computed at once.

Tensor suffixes: B batch, E edges, O ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.layers import convolution, depthwise, linear, pointwise
from fednas_flwr.spaces.darts_network import EDGES, OPS, DARTSBody
from fednas_flwr.spaces.operations import FactorizedReduce, every_second
from fednas_flwr.spaces.wide_operations import (
    Stack,
    average_pool,
    max_pool,
    mix,
    node_states,
    norm,
)

POOLS = ("max_pool_3x3", "avg_pool_3x3")
SEPARABLE = ("sep_conv_3x3", "sep_conv_5x5")
DILATED = ("dil_conv_3x3", "dil_conv_5x5")


class WideDARTSBody(DARTSBody):
    """Stem, search cells, global pool and classifier."""

    takes_stack = True

    def forward(
        self, x: Tensor, op_weights: Mapping[str, Tensor], stack: Stack = torch.cat
    ) -> Tensor:
        """Return logits [B, classes]; op weights as in :class:`Supernet`."""
        stem: Any = self.stem
        before = last = norm(convolution(x, stack([stem[0].weight]), padding=(1, 1)), [stem[1]])
        for kind, cell in zip(self.kinds, self.cells, strict=True):
            weights_BEO = op_weights[kind].expand(len(x), -1, -1)
            before, last = last, _cell(cell, before, last, weights_BEO, stack)
        parameters = (stack([self.classifier.weight]), stack([self.classifier.bias]))
        return self.joined(linear(last.mean(dim=(2, 3)), *parameters), x, stack)


def _cell(cell: Any, before: Tensor, last: Tensor, weights_BEO: Tensor, stack: Stack) -> Tensor:
    """Return the cell's output [B, 4 C, H, W]."""
    inputs = [
        _preprocess(cell.preprocess0, before, stack),
        _preprocess(cell.preprocess1, last, stack),
    ]

    def leave(state: Tensor, indices: list[int]) -> Tensor:
        return _edges([cell.edges[i] for i in indices], state, weights_BEO[:, indices], stack)

    return torch.cat(node_states(inputs, EDGES, leave)[len(inputs) :], dim=1)


def _preprocess(module: Any, x: Tensor, stack: Stack) -> Tensor:
    if isinstance(module, FactorizedReduce):
        return _factorized_reduce([module], F.relu(x), stack)[:, 0]
    _, convolution_1x1, norm_ = module
    return norm(pointwise(F.relu(x), stack([convolution_1x1.weight])), [norm_])


def _edges(edges: Sequence[Any], x: Tensor, weights_BEO: Tensor, stack: Stack) -> Tensor:
    """Return the mixed ops of the edges that leave one state, [B, edges, C, H, W]."""
    modules = {op: [edge.ops[op] for edge in edges] for op in OPS if op != "none"}
    skips = modules["skip_connect"]
    stride = 1 if isinstance(skips[0], nn.Identity) else 2
    active = F.relu(x)
    parts: list[tuple[Tensor, Sequence[str]]] = []
    pools = [max_pool(x, stride=stride), average_pool(x, stride=stride)]
    norms = [[module[1] for module in modules[op]] for op in POOLS]
    if isinstance(norms[0][0], nn.GroupNorm):  # the same for all edges
        pooled = norm(torch.cat(pools, 1), [norms[0][0], norms[1][0]])
        parts.append((_by_op(pooled, 2, 1), POOLS))
    else:  # every edge keeps running statistics of its own
        wide = torch.cat([pool.repeat(1, len(edges), 1, 1) for pool in pools], 1)
        parts.append((_by_op(norm(wide, norms[0] + norms[1]), 2, len(edges)), POOLS))
    if stride == 1:
        parts.append((_by_op(x, 1, 1), ["skip_connect"]))
    else:
        reduced = _factorized_reduce(skips, active, stack)
        parts.append((reduced[:, None], ["skip_connect"]))
    dilated = _separable([modules[op] for op in DILATED], 0, active, stride, stack)
    parts.append((_by_op(dilated, 2, len(edges)), DILATED))
    separable = _separable([modules[op] for op in SEPARABLE], 0, active, stride, stack)
    separable = _separable([modules[op] for op in SEPARABLE], 4, F.relu(separable), 1, stack)
    parts.append((_by_op(separable, 2, len(edges)), SEPARABLE))
    return mix(parts, weights_BEO, ops=OPS)


def _separable(
    modules: Sequence[Sequence[Any]], start: int, x: Tensor, stride: int, stack: Stack
) -> Tensor:
    """Return depthwise, pointwise, norm of several ops' and edges' modules, without their ReLU."""
    flat = [module for op in modules for module in op]
    depthwise_weights = [stack([module[start + 1].weight for module in op]) for op in modules]
    dilation = flat[0][start + 1].dilation[0]
    out = depthwise(x, depthwise_weights, stride=stride, dilation=dilation)
    out = pointwise(out, stack([m[start + 2].weight for m in flat]), groups=len(flat))
    return norm(out, [m[start + 3] for m in flat])


def _factorized_reduce(modules: Sequence[Any], active: Tensor, stack: Stack) -> Tensor:
    """Return [B, modules, C, H / 2, W / 2] from what the ReLU let through."""
    height, width = active.shape[-2:]
    odd = F.pad(every_second(active[:, :, 1:, 1:]), (0, width % 2, 0, height % 2))
    even = pointwise(every_second(active), stack([m.conv_even.weight for m in modules]))
    halves = [torch.unflatten(even, 1, (len(modules), -1))]
    if modules[0].conv_odd.weight.numel():
        out = pointwise(odd, stack([m.conv_odd.weight for m in modules]))
        halves.append(torch.unflatten(out, 1, (len(modules), -1)))
    both = torch.cat(halves, dim=2)
    return norm(both.flatten(1, 2), [m.norm for m in modules]).view(both.shape)


def _by_op(x_BCHW: Tensor, ops: int, edges: int) -> Tensor:
    return torch.unflatten(x_BCHW, 1, (ops, edges, -1))
