"""The modules of the DARTS search space: ops, cells, the supernet's body and the discrete network.

Liu et al. (2019), arXiv 1806.09055. A cell has two input nodes (0, 1: the outputs of the two cells
before it) and four nodes (2 to 5), each the sum of edges from earlier nodes; its output is the
concatenation of the four. A supernet's cells have all 14 edges with all ops, a discrete network's
cells two edges per node with one op each.

Tensor suffixes: E edges, O ops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.settings.names import Norm
from fednas_flwr.spaces.cell_graph import candidate_edges
from fednas_flwr.spaces.genotype import Edge, Genotype
from fednas_flwr.spaces.operations import (
    FactorizedReduce,
    MixedOp,
    Sizes,
    TwoInputCell,
    channels_last,
    depthwise_separable,
    make_norm,
    mixed_states,
    relu_conv_norm,
)
from fednas_flwr.spaces.skip import SkipNetwork

OPS = (
    "none",
    "max_pool_3x3",
    "avg_pool_3x3",
    "skip_connect",
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
)
NODES = range(2, 6)
EDGES = candidate_edges(NODES)
STEM_MULTIPLIER = 3


def make_operation(op: str, channels: int, *, stride: int, norm: Norm, affine: bool) -> nn.Module:
    """Return the module of one op (every name but ``none``).

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
            return FactorizedReduce(channels, channels, norm=norm, affine=affine)
        case "sep_conv_3x3" | "sep_conv_5x5" | "dil_conv_3x3" | "dil_conv_5x5":
            convolution = functools.partial(
                depthwise_separable, channels, kernel_size=int(op[-1]), norm=norm, affine=affine
            )
            if op.startswith("dil"):
                return convolution(stride=stride, dilation=2)
            both = (*convolution(stride=stride, dilation=1), *convolution(stride=1, dilation=1))
            return nn.Sequential(*both)
        case _:
            raise ValueError(f"expected one of {', '.join(OPS[1:])}, got {op}")
    return nn.Sequential(pool, make_norm(channels, norm=norm, affine=False))


class DARTSNetwork(SkipNetwork):
    """A discrete DARTS network, to be trained from scratch.

    Attributes:
        drop_path_prob: Probability of drop-path on every edge but identities, in [0, 1); the
            trainer raises it from 0 (paper: to .2, linearly over the epochs).
    """

    drop_path_prob: float

    def __init__(
        self,
        genotype: Genotype,
        sizes: Sizes,
        *,
        auxiliary: bool,
    ) -> None:
        """Build the network of a genotype that the space has checked."""
        super().__init__()
        self.drop_path_prob = 0.0
        plans, norm = _plan_cells(sizes), sizes.norm
        self.stem = _stem(sizes, affine=True)
        self.cells = nn.ModuleList(
            _discrete_cell(plan, genotype.cells[plan.kind], norm=norm) for plan in plans
        )
        self.classifier = nn.Linear(plans[-1].out_channels, sizes.num_classes)
        self.auxiliary_cell = 2 * sizes.num_cells // 3
        self.auxiliary = None
        if auxiliary:
            channels = plans[self.auxiliary_cell].out_channels
            self.auxiliary = AuxiliaryHead(channels, sizes.num_classes, norm=norm)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [B, classes]; in train mode with auxiliary head (logits, auxiliary)."""
        probability = self.drop_path_prob if self.training else 0.0
        auxiliary_logits = None
        before = last = channels_last(self.stem(x))
        for index, cell in enumerate(self.cells):
            before, last = last, cell(before, last, probability)
            if index == self.auxiliary_cell and self.training and self.auxiliary is not None:
                auxiliary_logits = self.auxiliary(last)
        logits = self.joined(self.classifier(last.mean(dim=(2, 3))), x)
        return logits if auxiliary_logits is None else (logits, auxiliary_logits)

    def chain(self) -> list[nn.Module]:
        """Return the stem and the cells, in the order of computation."""
        return [self.stem, *self.cells]


class AuxiliaryHead(nn.Module):
    """The second classifier of DARTS networks, for feature maps of any size.

    ReLU, average pool to 2x2, conv1x1 128, norm, ReLU, conv2x2 768, norm, ReLU, linear. The paper's
    pool has windows of 5 at stride 3 on an 8x8 map, i.e. windows of 5/8 of the side in the corners;
    on other sizes the windows keep this share. A side of 1 is repeated.
    """

    def __init__(self, in_channels: int, num_classes: int, *, norm: Norm) -> None:
        """Build the head for a feature map of ``in_channels``."""
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 128, 1, bias=False),
            make_norm(128, norm=norm, affine=True),
            nn.ReLU(),
            nn.Conv2d(128, 768, 2, bias=False),
            make_norm(768, norm=norm, affine=True),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(768, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        height, width = x.shape[-2:]
        x = F.relu(x).expand(-1, -1, max(height, 2), max(width, 2))
        kernel = [min(math.ceil(5 * side / 8), side - 1) for side in x.shape[-2:]]
        stride = [side - window for side, window in zip(x.shape[-2:], kernel, strict=True)]
        logits: Tensor = self.classifier(self.features(F.avg_pool2d(x, kernel, stride)).flatten(1))
        return logits


class DARTSBody(SkipNetwork):
    """Stem, search cells, global pool and classifier."""

    def __init__(self, sizes: Sizes) -> None:
        """Build the body; see :class:`DARTSSpace` for the sizes."""
        super().__init__()
        plans = _plan_cells(sizes)
        self.kinds = [plan.kind for plan in plans]
        self.stem = _stem(sizes, affine=False)
        self.cells = nn.ModuleList(SearchCell(plan, norm=sizes.norm) for plan in plans)
        self.classifier = nn.Linear(plans[-1].out_channels, sizes.num_classes)

    def forward(self, x: Tensor, op_weights: Mapping[str, Tensor]) -> Tensor:
        """Return logits [B, classes]; op weights as in :class:`Supernet`."""
        before = last = channels_last(self.stem(x))
        for kind, cell in zip(self.kinds, self.cells, strict=True):
            before, last = last, cell(before, last, op_weights[kind])
        return self.joined(self.classifier(last.mean(dim=(2, 3))), x)


class SearchCell(nn.Module):
    """A cell with all ops on all 14 edges."""

    def __init__(self, plan: _CellPlan, *, norm: Norm) -> None:
        """Build all modules."""
        super().__init__()
        self.preprocess0, self.preprocess1 = _preprocessing(plan, norm=norm, affine=False)
        self.edges = nn.ModuleList(
            MixedOp(
                OPS,
                functools.partial(
                    make_operation,
                    channels=plan.channels,
                    stride=plan.stride(source),
                    norm=norm,
                    affine=False,
                ),
            )
            for source, _ in EDGES
        )

    def forward(self, before: Tensor, last: Tensor, weights_EO: Tensor) -> Tensor:
        """Return [B, 4 C, H, W] from the outputs of the two cells before."""
        inputs = [self.preprocess0(before), self.preprocess1(last)]
        states = mixed_states(inputs, EDGES, self.edges, weights_EO)
        return torch.cat(states[len(inputs) :], dim=1)


def _discrete_cell(plan: _CellPlan, edges: tuple[Edge, ...], *, norm: Norm) -> TwoInputCell:
    """Return a cell with one op on each of 8 edges."""
    before, last = _preprocessing(plan, norm=norm, affine=True)
    ops = (
        make_operation(
            edge.op, plan.channels, stride=plan.stride(edge.source), norm=norm, affine=True
        )
        for edge in edges
    )
    return TwoInputCell(before, last, edges, ops, nodes=NODES)


@dataclass(frozen=True)
class _CellPlan:
    """Sizes of one cell: channels of the cell before the last, of the last, and of its nodes."""

    before_channels: int
    last_channels: int
    channels: int
    reduction: bool
    after_reduction: bool

    @property
    def kind(self) -> str:
        return "reduction" if self.reduction else "normal"

    @property
    def out_channels(self) -> int:
        return len(NODES) * self.channels

    def stride(self, source: int) -> int:
        """Return 2 for edges from the inputs of a reduction cell, else 1."""
        return 2 if self.reduction and source < NODES.start else 1


def _plan_cells(sizes: Sizes) -> list[_CellPlan]:
    """Return the sizes of all cells; channels double at the cells L//3 and 2L//3."""
    plans: list[_CellPlan] = []
    channels = sizes.channels
    before = last = STEM_MULTIPLIER * channels
    after_reduction = False
    for index in range(sizes.num_cells):
        reduction = index in (sizes.num_cells // 3, 2 * sizes.num_cells // 3)
        channels *= 2 if reduction else 1
        plan = _CellPlan(before, last, channels, reduction, after_reduction)
        plans.append(plan)
        before, last, after_reduction = last, plan.out_channels, reduction
    return plans


def _stem(sizes: Sizes, *, affine: bool) -> nn.Sequential:
    """Return conv3x3 to 3C and norm, at stride 1: the paper's form for small images."""
    out_channels = STEM_MULTIPLIER * sizes.channels
    return nn.Sequential(
        nn.Conv2d(sizes.inputs, out_channels, 3, padding=1, bias=False),
        make_norm(out_channels, norm=sizes.norm, affine=affine),
    )


def _preprocessing(plan: _CellPlan, *, norm: Norm, affine: bool) -> tuple[nn.Module, nn.Module]:
    """Return the modules that bring both inputs to the cell's channels and to one size."""
    reduce_or_conv = FactorizedReduce if plan.after_reduction else relu_conv_norm
    return (
        reduce_or_conv(plan.before_channels, plan.channels, norm=norm, affine=affine),
        relu_conv_norm(plan.last_channels, plan.channels, norm=norm, affine=affine),
    )
