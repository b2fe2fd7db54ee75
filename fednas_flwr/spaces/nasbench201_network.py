"""The modules of the NAS-Bench-201 search space: ops, cells and the fixed network around them.

Dong & Yang (2020), arXiv 2001.00326. In a cell, node 0 is the input, every other node the sum of
the edges from all earlier nodes, node 3 the output. The network has three stages of cells.

Tensor suffixes: E edges, O ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.settings.names import Norm
from fednas_flwr.spaces.cell_graph import CELL, candidate_edges
from fednas_flwr.spaces.genotype import Edge, Genotype
from fednas_flwr.spaces.operations import (
    MixedOp,
    Sizes,
    channels_last,
    discrete_states,
    make_norm,
    mixed_states,
    path_states,
    relu_conv_norm,
)
from fednas_flwr.spaces.skip import SkipNetwork

OPS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
NODES = range(1, 4)
NUM_STAGES = 3
EDGES = candidate_edges(NODES)


def make_operation(op: str, channels: int, *, norm: Norm, affine: bool) -> nn.Module:
    """Return the module of one op (every name but ``none``); all have stride 1."""
    match op:
        case "skip_connect":
            return nn.Identity()
        case "nor_conv_1x1" | "nor_conv_3x3":
            return relu_conv_norm(
                channels, channels, kernel_size=int(op[-1]), norm=norm, affine=affine
            )
        case "avg_pool_3x3":
            return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        case _:
            raise ValueError(f"expected one of {', '.join(OPS[1:])}, got {op}")


class NASBench201Network(SkipNetwork):
    """A discrete NAS-Bench-201 network, to be trained from scratch.

    Weights that the output does not depend on (edges out of a node that nothing enters, or into one
    that nothing leaves) are kept, as in the benchmark's parameter counts; their gradient is None or
    zero. With ``none`` on every path to the output the logits do not depend on the image.

    Attributes:
        drop_path_prob: Probability of drop-path on every edge but identities, in [0, 1); the
            benchmark uses 0.
    """

    drop_path_prob: float

    def __init__(self, genotype: Genotype, sizes: Sizes) -> None:
        """Build the network of a genotype that the space has checked."""
        super().__init__()
        self.drop_path_prob = 0.0
        self.skeleton = _Skeleton(
            functools.partial(_DiscreteCell, genotype.cells[CELL], norm=sizes.norm),
            sizes,
            affine=True,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.joined(self.skeleton(x, self.drop_path_prob if self.training else 0.0), x)

    def chain(self) -> list[nn.Module]:
        """Return the stem, the cells and the residual blocks, in the order of computation."""
        blocks: list[nn.Module] = [self.skeleton.stem]
        for index, stage in enumerate(self.skeleton.stages):
            blocks += [self.skeleton.reductions[index]] if index > 0 else []
            blocks += stage.children()
        return blocks


class NASBench201Body(SkipNetwork):
    """The fixed network with all ops on all edges of its cells."""

    def __init__(self, sizes: Sizes) -> None:
        """Build the body; see :class:`NASBench201Space` for the sizes."""
        super().__init__()
        self.skeleton = _Skeleton(
            functools.partial(SearchCell, norm=sizes.norm), sizes, affine=False
        )

    def forward(self, x: Tensor, op_weights: Mapping[str, Tensor]) -> Tensor:
        """Return logits [B, classes]; op weights as in :class:`Supernet`."""
        return self.joined(self.skeleton(x, op_weights[CELL]), x)

    def path(
        self, x: Tensor, columns: Mapping[str, Sequence[int]], gates: Mapping[str, Tensor]
    ) -> Tensor:
        """Return logits [B, classes] with one op on every edge; nothing else is computed.

        Args:
            x: Images.
            columns: By kind of cell the column of each edge's op.
            gates: By kind of cell what its output is multiplied by, [E].
        """
        return self.joined(self.skeleton(x, (columns[CELL], gates[CELL])), x)

    def ops_beside(self, columns: Mapping[str, Sequence[int]]) -> list[nn.Module]:
        """Return all ops that a path leaves out."""
        return [
            op
            for cell in self.modules()
            if isinstance(cell, SearchCell)
            for edge, column in zip(cell.mixed_ops(), columns[CELL], strict=True)
            for other in range(len(OPS))
            if other != column and (op := edge.op(other)) is not None
        ]


class _Skeleton(nn.Module):
    """Stem, three stages of cells with a residual block before the second and third, classifier.

    Args:
        make_cell: Returns a cell for a number of channels; a cell is called with its input and the
            second argument of the skeleton (op weights, or a drop-path probability).
    """

    def __init__(
        self, make_cell: Callable[[int], nn.Module], sizes: Sizes, *, affine: bool
    ) -> None:
        super().__init__()
        channels, norm = sizes.channels, sizes.norm
        self.stem = nn.Sequential(
            nn.Conv2d(sizes.inputs, channels, 3, padding=1, bias=False),
            make_norm(channels, norm=norm, affine=affine),
        )
        self.reductions = nn.ModuleList([nn.Identity()])
        self.stages = nn.ModuleList()
        for stage in range(NUM_STAGES):
            if stage > 0:
                self.reductions.append(ResidualBlock(channels, norm=norm, affine=affine))
                channels *= 2
            self.stages.append(nn.ModuleList(make_cell(channels) for _ in range(sizes.num_cells)))
        self.head_norm = make_norm(channels, norm=norm, affine=affine)
        self.classifier = nn.Linear(channels, sizes.num_classes)

    def forward(
        self, x: Tensor, cell_argument: Tensor | tuple[Sequence[int], Tensor] | float
    ) -> Tensor:
        x = channels_last(self.stem(x))
        for reduction, stage in zip(self.reductions, self.stages, strict=True):
            x = reduction(x)
            for cell in stage.children():
                x = cell(x, cell_argument)
        logits: Tensor = self.classifier(F.relu(self.head_norm(x)).mean(dim=(2, 3)))
        return logits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, the first of stride 2, plus a pooled 1x1 shortcut; doubles channels."""

    def __init__(self, channels: int, *, norm: Norm, affine: bool) -> None:
        """Build the block for ``channels`` input channels."""
        super().__init__()
        wide = 2 * channels
        self.convolutions = nn.Sequential(
            relu_conv_norm(channels, wide, kernel_size=3, stride=2, norm=norm, affine=affine),
            relu_conv_norm(wide, wide, kernel_size=3, norm=norm, affine=affine),
        )
        # ceil_mode: on odd sizes the shortcut must be as large as the convolutions' output.
        self.shortcut = nn.Sequential(
            nn.AvgPool2d(2, stride=2, ceil_mode=True, count_include_pad=False),
            nn.Conv2d(channels, wide, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, 2 C, ceil(H / 2), ceil(W / 2)]``."""
        out: Tensor = self.shortcut(x) + self.convolutions(x)
        return out


class SearchCell(nn.Module):
    """A cell with all ops on all six edges."""

    def __init__(self, channels: int, *, norm: Norm) -> None:
        """Build all modules."""
        super().__init__()
        make = functools.partial(make_operation, channels=channels, norm=norm, affine=False)
        self.edges = nn.ModuleList(MixedOp(OPS, make) for _ in EDGES)

    def mixed_ops(self) -> list[MixedOp]:
        """Return the edges' ops."""
        return [edge for edge in self.edges if isinstance(edge, MixedOp)]

    def forward(self, x: Tensor, ops: Tensor | tuple[Sequence[int], Tensor]) -> Tensor:
        """Return a tensor shaped like ``x``.

        Args:
            x: The cell's input.
            ops: The weight of every op on every edge, [E, O] or [B, E, O]; or of a path each edge's
                column and gate, and then nothing else is computed.
        """
        if isinstance(ops, Tensor):
            return mixed_states([x], EDGES, self.edges, ops)[-1]
        return path_states([x], EDGES, self.mixed_ops(), *ops)[-1]


class _DiscreteCell(nn.Module):
    """A cell with one op on every edge; edges with ``none`` are left out."""

    def __init__(self, edges: tuple[Edge, ...], channels: int, *, norm: Norm) -> None:
        super().__init__()
        self.wiring = [edge for edge in edges if edge.op != "none"]
        self.edges = nn.ModuleList(
            make_operation(edge.op, channels, norm=norm, affine=True) for edge in self.wiring
        )

    def forward(self, x: Tensor, drop_path_prob: float) -> Tensor:
        states = discrete_states(
            [x], self.wiring, self.edges, nodes=NODES, drop_path_prob=drop_path_prob
        )
        return states[-1]
