"""The search space of NAS-Bench-201: one cell of four nodes and six edges.

Dong & Yang (2020), arXiv 2001.00326. :class:`NASBench201Space` gives the supernet, the way from
alphas to a genotype and the discrete network. In a cell, node 0 is the input, every other node the
sum of the edges from all earlier nodes, node 3 the output. The network has three stages of cells.

A supernet computes from each state the edges to all later nodes at once
(``operations.node_states``), with the same parameters and result as one module for each op of each
edge.

Tensor suffixes: B batch, E edges, O ops.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.layers import called, computed, convolution, pointwise, stacked
from fednas_flwr.settings.names import Norm
from fednas_flwr.settings.optimizers import Count
from fednas_flwr.spaces import cell_graph, operations
from fednas_flwr.spaces.genotype import Edge, Genotype
from fednas_flwr.spaces.space import CELL, SearchSpace

OPS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
NODES = range(1, 4)
NUM_STAGES = 3
EDGES = cell_graph.candidate_edges(NODES)
CONVOLUTIONS = ("nor_conv_1x1", "nor_conv_3x3")


@dataclass(frozen=True, kw_only=True)
class NASBench201Space(SearchSpace):
    """The NAS-Bench-201 search space for images of one shape.

    Attributes:
        input_shape: (channels, height, width) of an image; any size.
        num_classes: Number of classes.
        channels: Channels of the supernet's first stage (16 in the paper).
        num_cells: Cells in each of the supernet's three stages (5 in the paper).
        norm: ``batch``, or ``group`` (needed for privacy), in search and in retraining.
    """

    name = "nasbench201"
    ops = OPS
    edges = EDGES
    routes = cell_graph.routes(EDGES, outputs=NODES[-1:])

    channels: Count = 16
    num_cells: Count = 5

    def body(self) -> "NASBench201Network":
        """Build the body of a supernet; its norms have no affine part."""
        return NASBench201Network(self)

    def discrete(self, genotype: Genotype, *, auxiliary: bool) -> "NASBench201Network":
        """Build a discrete network."""
        return NASBench201Network(self, genotype.cells[CELL])


def make_operation(op: str, channels: int, *, norm: Norm, affine: bool) -> nn.Module:
    """Return the module of one op (any name except ``none``); all have stride 1."""
    match op:
        case "skip_connect":
            return nn.Identity()
        case "nor_conv_1x1" | "nor_conv_3x3":
            sizes: Any = {"size": int(op[-1]), "norm": norm, "affine": affine}
            return operations.relu_conv_norm(channels, channels, **sizes)
        case "avg_pool_3x3":
            return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        case _:
            after = operations.make_norm(channels, norm=norm, affine=affine)
            return operations.OwnOp(op, channels, after, sides=(5, 5))


class NASBench201Network(operations.SkipNetwork):
    """The fixed network, with all ops on all edges of its cells or with one op on each edge.

    Weights of a discrete network on which the output does not depend (edges out of a node that
    nothing enters, or into one that nothing leaves) are kept, as in the benchmark's parameter
    counts. Their gradient is None or zero. With ``none`` on every path to the output the logits do
    not depend on the image. The benchmark's ``drop_path_prob`` is 0.
    """

    def __init__(self, space: NASBench201Space, edges: Sequence[Edge] | None = None) -> None:
        """Build the network with a cell's edges, checked by the space; None means all edges."""
        super().__init__()
        self.takes_stack = edges is None
        cell: Callable[..., nn.Module] = functools.partial(SearchCell, ops=space.ops)
        if edges is not None:
            cell = functools.partial(_DiscreteCell, edges)
        make = functools.partial(cell, norm=space.norm)
        self.skeleton = _Skeleton(make, space, affine=edges is not None)

    def forward(self, x: Tensor, op_weights: operations.OpWeights = None) -> Tensor:
        """Return logits [B, classes]; a supernet's op weights are as in :class:`Supernet`."""
        if op_weights is None:
            return self.joined(self.skeleton(x, self.dropped), x)
        weights_BEO = op_weights[CELL].expand(len(x), -1, -1)
        return self.joined(self.skeleton(x, weights_BEO, computed), x, computed)

    def chain(self) -> list[nn.Module]:
        """Return the stem, the cells and the residual blocks, in the order of computation."""
        blocks: list[nn.Module] = [self.skeleton.stem]
        for index, stage in enumerate(self.skeleton.stages):
            blocks += [self.skeleton.reductions[index]] if index > 0 else []
            blocks += stage.children()
        return blocks


class _Skeleton(nn.Module):
    """Stem, three stages of cells with a residual block before the second and third, classifier.

    Args:
        make_cell: Function that returns a cell for a number of channels; a cell is called with its
            input and the skeleton's second argument (op weights, or a drop-path probability).
    """

    def __init__(
        self, make_cell: Callable[[int], nn.Module], space: NASBench201Space, *, affine: bool
    ) -> None:
        super().__init__()
        channels, norm = space.channels, space.norm
        inputs = space.input_shape[0]
        self.stem = operations.conv_norm(inputs, channels, size=3, norm=norm, affine=affine)
        self.reductions = nn.ModuleList([nn.Identity()])
        self.stages = nn.ModuleList()
        for stage in range(NUM_STAGES):
            if stage > 0:
                self.reductions.append(ResidualBlock(channels, norm=norm, affine=affine))
                channels *= 2
            self.stages.append(nn.ModuleList(make_cell(channels) for _ in range(space.num_cells)))
        self.head_norm = operations.make_norm(channels, norm=norm, affine=affine)
        self.classifier = nn.Linear(channels, space.num_classes)

    def forward(
        self, x: Tensor, cell_argument: Tensor | float, compute: operations.Compute = called
    ) -> Tensor:
        x = compute(self.stem, x)
        x = operations.channels_last(x) if compute is called else x
        for reduction, stage in zip(self.reductions, self.stages, strict=True):
            if isinstance(reduction, ResidualBlock) and compute is computed:
                x = computed(reduction.convolutions, x) + computed(reduction.shortcut, x)
            else:
                x = reduction(x)
            for cell in stage.children():
                x = cell(x, cell_argument)
        return compute(self.classifier, nn.functional.relu(self.head_norm(x)).mean(dim=(2, 3)))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, the first of stride 2, plus a pooled 1x1 shortcut; doubles channels."""

    def __init__(self, channels: int, *, norm: Norm, affine: bool) -> None:
        """Build the block for ``channels`` input channels."""
        super().__init__()
        wide = 2 * channels
        make = functools.partial(operations.relu_conv_norm, size=3, norm=norm, affine=affine)
        self.convolutions = nn.Sequential(make(channels, wide, stride=2), make(wide, wide))
        # ceil_mode: for odd sizes the shortcut must be as large as the convolutions' output.
        self.shortcut = nn.Sequential(
            nn.AvgPool2d(2, stride=2, ceil_mode=True, count_include_pad=False),
            nn.Conv2d(channels, wide, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 2 C, ceil(H / 2), ceil(W / 2)]``."""
        return self.shortcut(x) + self.convolutions(x)


class SearchCell(nn.Module):
    """A cell with all ops on all six edges."""

    def __init__(self, channels: int, *, norm: Norm, ops: Sequence[str]) -> None:
        """Build all modules."""
        super().__init__()
        make = functools.partial(make_operation, channels=channels, norm=norm, affine=False)
        self.edges = nn.ModuleList(operations.MixedOp(ops, make) for _ in EDGES)

    def forward(self, x: Tensor, weights_BEO: Tensor) -> Tensor:
        """Return a tensor shaped like ``x``, computed with the weights of all ops."""
        edges: Any = self.edges

        def leave(state: Tensor, indices: list[int]) -> Tensor:
            modules = {op: [edges[index].ops[op] for index in indices] for op in CONVOLUTIONS}
            active = nn.functional.relu(state)
            one = pointwise(active, stacked([m[1].weight for m in modules["nor_conv_1x1"]]))
            kernels = stacked([m[1].weight for m in modules["nor_conv_3x3"]])
            three = convolution(active, kernels, padding=(1, 1))
            convolved = operations.normalised(
                torch.cat([one, three], 1), [m[2] for op in CONVOLUTIONS for m in modules[op]]
            )
            shared = torch.stack([state, operations.average_pool(state)], dim=1)[:, :, None]
            parts: list[operations.Part] = [
                (shared, ("skip_connect", "avg_pool_3x3")),
                (torch.unflatten(convolved, 1, (2, len(indices), -1)), CONVOLUTIONS),
            ]
            leaving = [edges[index] for index in indices]
            parts += operations.own_parts(leaving, state)
            return operations.mix(parts, weights_BEO[:, indices], ops=leaving[0].names)

        return operations.node_states([x], EDGES, leave)[-1]


class _DiscreteCell(nn.Module):
    """A cell with one op on every edge; edges with ``none`` are omitted."""

    def __init__(self, edges: Sequence[Edge], channels: int, *, norm: Norm) -> None:
        super().__init__()
        wired = [edge for edge in edges if edge.op != "none"]
        self.wiring = [edge.pair for edge in wired]
        self.edges = nn.ModuleList(
            make_operation(edge.op, channels, norm=norm, affine=True) for edge in wired
        )

    def forward(self, x: Tensor, drop_path_prob: float) -> Tensor:
        wiring, ops = self.wiring, self.edges
        return operations.discrete_states([x], wiring, ops, NODES, drop_path_prob)[-1]
