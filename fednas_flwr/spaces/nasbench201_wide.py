"""The NAS-Bench-201 supernet organised by source state instead of by edge: the fast engine.

As in ``darts_wide.py``: the reference's modules with another forward.

Tensor suffixes: B batch, E edges, O ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fednas_flwr.base.layers import convolution, linear, pointwise
from fednas_flwr.spaces.nasbench201_network import (
    EDGES,
    OPS,
    NASBench201Body,
    ResidualBlock,
)
from fednas_flwr.spaces.wide_operations import Stack, average_pool, mix, node_states, norm

CONVOLUTIONS = ("nor_conv_1x1", "nor_conv_3x3")


class WideNASBench201Body(NASBench201Body):
    """The fixed network with all ops on all edges of its cells."""

    takes_stack = True

    def forward(
        self, x: Tensor, op_weights: Mapping[str, Tensor], stack: Stack = torch.cat
    ) -> Tensor:
        """Return logits [B, classes]; op weights as in :class:`Supernet`."""
        net: Any = self.skeleton
        weights_BEO = op_weights["cell"].expand(len(x), -1, -1)
        images = x
        x = norm(convolution(x, stack([net.stem[0].weight]), padding=(1, 1)), [net.stem[1]])
        for reduction, stage in zip(net.reductions, net.stages, strict=True):
            if isinstance(reduction, ResidualBlock):
                x = _residual(reduction, x, stack)
            for cell in stage.children():
                x = _cell(cell, x, weights_BEO, stack)
        pooled = F.relu(norm(x, [net.head_norm])).mean(dim=(2, 3))
        parameters = (stack([net.classifier.weight]), stack([net.classifier.bias]))
        return self.joined(linear(pooled, *parameters), images, stack)


def _cell(cell: Any, x: Tensor, weights_BEO: Tensor, stack: Stack) -> Tensor:
    def leave(state: Tensor, indices: list[int]) -> Tensor:
        modules = {op: [cell.edges[index].ops[op] for index in indices] for op in CONVOLUTIONS}
        active = F.relu(state)
        one = pointwise(active, stack([m[1].weight for m in modules["nor_conv_1x1"]]))
        kernels = stack([m[1].weight for m in modules["nor_conv_3x3"]])
        three = convolution(active, kernels, padding=(1, 1))
        convolved = norm(
            torch.cat([one, three], 1), [m[2] for op in CONVOLUTIONS for m in modules[op]]
        )
        shared = torch.stack([state, average_pool(state)], dim=1)[:, :, None]
        parts: list[tuple[Tensor, Sequence[str]]] = [
            (shared, ("skip_connect", "avg_pool_3x3")),
            (torch.unflatten(convolved, 1, (2, len(indices), -1)), CONVOLUTIONS),
        ]
        return mix(parts, weights_BEO[:, indices], ops=OPS)

    return node_states([x], EDGES, leave)[-1]


def _residual(block: Any, x: Tensor, stack: Stack) -> Tensor:
    out = x
    for layers in block.convolutions:
        _, conv, norm_ = layers
        out = convolution(F.relu(out), stack([conv.weight]), stride=conv.stride, padding=(1, 1))
        out = norm(out, [norm_])
    pool, conv = block.shortcut
    return out + pointwise(pool(x), stack([conv.weight]))
