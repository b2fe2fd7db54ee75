"""The search space of DARTS: two kinds of cell, each a graph of 14 weighted edges.

Liu et al. (2019), arXiv 1806.09055. :class:`DARTSSpace` gives the supernet, the way from alphas to
a genotype and the discrete network. A cell has two input nodes (0, 1: the outputs of the two cells
before it) and four nodes (2 to 5), each the sum of edges from earlier nodes; its output is the
concatenation of the four. A supernet's cells have all 14 edges with all ops, a discrete network's
cells two edges per node with one op each.

A supernet computes from each state the edges to all later nodes at once
(``operations.node_states``), with the same parameters and result as one module for each op of each
edge.

Tensor suffixes: B batch, E edges, O ops.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.layers import computed, depthwise, pointwise, stacked
from fednas_flwr.settings.names import Norm
from fednas_flwr.settings.optimizers import Count
from fednas_flwr.settings.parser import Between
from fednas_flwr.spaces import cell_graph, operations
from fednas_flwr.spaces.two_input_cells import CellPlan, SearchCell, TwoInputSpace

POOLS = ("max_pool_3x3", "avg_pool_3x3")
SEPARABLE = ("sep_conv_3x3", "sep_conv_5x5")
DILATED = ("dil_conv_3x3", "dil_conv_5x5")
OPS = ("none", *POOLS, "skip_connect", *SEPARABLE, *DILATED)
NODES = range(2, 6)
EDGES = cell_graph.candidate_edges(NODES)
STEM_MULTIPLIER = 3
CELLS = Between(
    3,
    reason="for darts, as with fewer there is no normal cell; set retrain.num_cells, which is 1 "
    "by default, or search_space.num_cells",
)


class DARTSCell(SearchCell):
    """A cell with all ops on all 14 edges."""

    def __init__(self, space: TwoInputSpace, plan: CellPlan) -> None:
        """Build all modules."""
        super().__init__(space, plan)
        make = functools.partial(space.operation, plan=plan, affine=False)
        self.edges = nn.ModuleList(
            operations.MixedOp(space.ops, functools.partial(make, source=source))
            for source, _ in EDGES
        )

    def prepared(self, module: nn.Module, x: Tensor) -> Tensor:
        """Bring an input to the cell's channels and size."""
        if isinstance(module, operations.FactorizedReduce):
            return _factorized_reduce([module], F.relu(x))[:, 0]
        return computed(module, x)

    def leave(self, weights_EO: Tensor, state: Tensor, indices: list[int]) -> Tensor:
        """Compute the mixed ops of the edges that leave a state, [B, edges, C, H, W]."""
        weights_BEO = weights_EO.expand(len(state), -1, -1)[:, indices]
        return _edges([self.edges[i] for i in indices], state, weights_BEO)


@dataclass(frozen=True, kw_only=True)
class DARTSSpace(TwoInputSpace):
    """The DARTS search space for images of one shape.

    Attributes:
        input_shape: (channels, height, width) of an image; any size.
        num_classes: Number of classes.
        channels: Channels of the supernet's first cells (16 in the paper).
        num_cells: Cells of the supernet (8 in the paper), L below; at least 3. Cells L//3 and 2L//3
            are reduction cells; for L = 3 these are the last two. With L < 3 all cells would be
            reduction cells, and the alphas of the normal cell would never learn.
        norm: ``batch``, or ``group`` (needed for privacy), in search and in retraining.

    The paper's discrete networks have 20 cells of 36 channels. Deviation: in the supernet the
    published code keeps the affine part of the stem's norm (96 weights of 1,930,618 at C = 16);
    here no norm of a supernet has an affine part.
    """

    name = "darts"
    ops = OPS
    edges = EDGES
    outputs = NODES
    has_auxiliary = True
    search_cell = DARTSCell
    growth = 2.0
    parts = 3
    takes_stack = True

    channels: Count = 16
    num_cells: Annotated[int, CELLS] = 8

    def stem(self, *, affine: bool) -> tuple[nn.Module, int]:
        """Build conv3x3 to 3C and norm, at stride 1: the paper's form for small images."""
        width = STEM_MULTIPLIER * self.channels
        inputs = self.input_shape[0]
        return operations.conv_norm(inputs, width, size=3, norm=self.norm, affine=affine), width

    def preprocess(self, inputs: int, width: int, *, affine: bool, halves: bool) -> nn.Module:
        """Build a factorized reduction, or ReLU, 1x1 convolution and norm."""
        make = operations.FactorizedReduce if halves else operations.relu_conv_norm
        return make(inputs, width, norm=self.norm, affine=affine)

    def operation(self, op: str, plan: CellPlan, *, source: int, affine: bool) -> nn.Module:
        """Build an op; it has stride 2 on edges from the inputs of a reduction cell."""
        stride = 2 if plan.kind == "reduction" and source < NODES.start else 1
        return make_operation(op, plan.width, stride=stride, norm=self.norm, affine=affine)


def make_operation(op: str, channels: int, *, stride: int, norm: Norm, affine: bool) -> nn.Module:
    """Return the module of one op (any name except ``none``).

    Pools are followed by a norm without affine part, in search and in retraining. Deviation:
    the published code drops that norm when it retrains.
    """
    match op:
        case "max_pool_3x3":
            pool: nn.Module = nn.MaxPool2d(3, stride=stride, padding=1)
        case "avg_pool_3x3":
            pool = nn.AvgPool2d(3, stride=stride, padding=1, count_include_pad=False)
        case "skip_connect" if stride == 1:
            return nn.Identity()
        case "skip_connect":
            return operations.FactorizedReduce(channels, channels, norm=norm, affine=affine)
        case "sep_conv_3x3" | "sep_conv_5x5" | "dil_conv_3x3" | "dil_conv_5x5":
            dilation, size = (2 if op.startswith("dil") else 1), int(op[-1])
            padding, layers = dilation * (size // 2), list[nn.Module]()
            for step in (stride,) if dilation == 2 else (stride, 1):
                sizes: Any = {"stride": step, "padding": padding, "dilation": dilation}
                layers += [
                    nn.ReLU(),
                    nn.Conv2d(channels, channels, size, **sizes, groups=channels, bias=False),
                    nn.Conv2d(channels, channels, 1, bias=False),
                    operations.make_norm(channels, norm=norm, affine=affine),
                ]
            return nn.Sequential(*layers)
        case _:
            after = operations.make_norm(channels, norm=norm, affine=affine)
            return operations.OwnOp(op, channels, after, stride=stride, sides=(5, 5))
    return nn.Sequential(pool, operations.make_norm(channels, norm=norm, affine=False))


def _edges(edges: Sequence[Any], x: Tensor, weights_BEO: Tensor) -> Tensor:
    """Return the mixed ops of the edges that leave one state, [B, edges, C, H, W]."""
    modules = {op: [edge.ops[op] for edge in edges] for op in OPS if op != "none"}
    skips = modules["skip_connect"]
    stride = 1 if isinstance(skips[0], nn.Identity) else 2
    active = F.relu(x)
    parts = list[operations.Part]()
    pools = [operations.max_pool(x, stride=stride), operations.average_pool(x, stride=stride)]
    norms = [[module[1] for module in modules[op]] for op in POOLS]
    if isinstance(norms[0][0], nn.GroupNorm):  # the same for all edges
        pooled = operations.normalised(torch.cat(pools, 1), [norms[0][0], norms[1][0]])
        parts.append((_by_op(pooled, 2, 1), POOLS))
    else:  # every edge keeps its own running statistics
        wide = torch.cat([pool.repeat(1, len(edges), 1, 1) for pool in pools], 1)
        pooled = operations.normalised(wide, norms[0] + norms[1])
        parts.append((_by_op(pooled, 2, len(edges)), POOLS))
    skipped = _by_op(x, 1, 1) if stride == 1 else _factorized_reduce(skips, active)[:, None]
    parts.append((skipped, ["skip_connect"]))
    dilated = _separable([modules[op] for op in DILATED], 0, active, stride)
    parts.append((_by_op(dilated, 2, len(edges)), DILATED))
    separable = _separable([modules[op] for op in SEPARABLE], 0, active, stride)
    separable = _separable([modules[op] for op in SEPARABLE], 4, F.relu(separable), 1)
    parts.append((_by_op(separable, 2, len(edges)), SEPARABLE))
    return operations.mix(parts + operations.own_parts(edges, x), weights_BEO, ops=edges[0].names)


def _separable(modules: Sequence[Sequence[Any]], start: int, x: Tensor, stride: int) -> Tensor:
    """Return depthwise, pointwise and norm of several ops' and edges' modules, without ReLU."""
    flat = [module for op in modules for module in op]
    depthwise_weights = [stacked([module[start + 1].weight for module in op]) for op in modules]
    out = depthwise(x, depthwise_weights, stride=stride, dilation=flat[0][start + 1].dilation[0])
    out = pointwise(out, stacked([m[start + 2].weight for m in flat]), groups=len(flat))
    return operations.normalised(out, [m[start + 3] for m in flat])


def _factorized_reduce(modules: Sequence[Any], active: Tensor) -> Tensor:
    """Return [B, modules, C, H / 2, W / 2] from the output of the ReLU."""
    height, width = active.shape[-2:]
    odd = F.pad(operations.every_second(active[:, :, 1:, 1:]), (0, width % 2, 0, height % 2))
    even_kernels = stacked([m.conv_even.weight for m in modules])
    even = pointwise(operations.every_second(active), even_kernels)
    halves = [torch.unflatten(even, 1, (len(modules), -1))]
    if modules[0].conv_odd.weight.numel():
        out = pointwise(odd, stacked([m.conv_odd.weight for m in modules]))
        halves.append(torch.unflatten(out, 1, (len(modules), -1)))
    both = torch.cat(halves, dim=2)
    return operations.normalised(both.flatten(1, 2), [m.norm for m in modules]).view(both.shape)


def _by_op(x_BCHW: Tensor, ops: int, edges: int) -> Tensor:
    return torch.unflatten(x_BCHW, 1, (ops, edges, -1))
