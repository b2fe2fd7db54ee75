"""The search space of DARTS: two kinds of cell, each a graph of 14 weighted edges.

Liu et al. (2019), arXiv 1806.09055. :class:`DARTSSpace` gives the supernet, the way from alphas to
a genotype and the discrete network. A cell has two input nodes (0, 1: the outputs of the two cells
before it) and four nodes (2 to 5), each the sum of edges from earlier nodes; its output is the
concatenation of the four. A supernet's cells have all 14 edges with all ops, a discrete network's
cells two edges per node with one op each.

A supernet computes from each state the edges to all later nodes at once
(``operations.node_states``), with the parameters and the result of a module for each op of each
edge.

Tensor suffixes: B batch, E edges, O ops.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.layers import Stack, convolution, depthwise, linear, pointwise
from fednas_flwr.settings.names import Norm
from fednas_flwr.settings.optimizers import Count
from fednas_flwr.settings.parser import check_range
from fednas_flwr.spaces import operations
from fednas_flwr.spaces.cell_graph import candidate_edges
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.space import CellGraphSpace

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
POOLS = ("max_pool_3x3", "avg_pool_3x3")
SEPARABLE = ("sep_conv_3x3", "sep_conv_5x5")
DILATED = ("dil_conv_3x3", "dil_conv_5x5")


@dataclass(frozen=True, kw_only=True)
class DARTSSpace(CellGraphSpace):
    """The DARTS search space for images of one shape.

    Attributes:
        input_shape: (channels, height, width) of an image; any size.
        num_classes: Number of classes.
        channels: Channels of the supernet's first cells (16 in the paper).
        num_cells: Cells of the supernet (8 in the paper), L below; at least 3. Cells L//3 and
            2L//3 are reduction cells, so of L = 3 the last two. With L < 3 all cells would be
            reduction cells, and the alphas of the normal cell would never learn.
        norm: ``batch``, or ``group`` (needed for privacy), in search and in retraining.
    """

    name: ClassVar[str] = "darts"
    ops: ClassVar[tuple[str, ...]] = OPS
    edges: ClassVar[tuple[tuple[int, int], ...]] = EDGES
    outputs: ClassVar[range] = NODES
    has_auxiliary: ClassVar[bool] = True

    channels: Count = 16
    num_cells: int = 8

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        super().__post_init__()
        expected = (
            "at least 3 for darts, as with fewer there is no normal cell; set "
            "search_space.num_cells and retrain.num_cells"
        )
        check_range(self.num_cells >= 3, "num_cells", self.num_cells, expected)

    def body(self) -> DARTSBody:
        """Build the body of a supernet; its norms have no affine part.

        Deviation: the published code leaves the affine part of the stem's norm on (96 weights of
        1,930,618 at C = 16); here no norm of a supernet has one.
        """
        return DARTSBody(self)

    def discrete(self, genotype: Genotype, *, auxiliary: bool) -> DARTSNetwork:
        """Build a discrete network, in the paper of 20 cells of 36 channels.

        An auxiliary head is added at cell 2L//3.
        """
        return DARTSNetwork(genotype, self, auxiliary=auxiliary)


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
            return operations.FactorizedReduce(channels, channels, norm=norm, affine=affine)
        case "sep_conv_3x3" | "sep_conv_5x5" | "dil_conv_3x3" | "dil_conv_5x5":
            convolution = functools.partial(
                operations.depthwise_separable,
                channels,
                kernel_size=int(op[-1]),
                norm=norm,
                affine=affine,
            )
            if op.startswith("dil"):
                return convolution(stride=stride, dilation=2)
            both = (*convolution(stride=stride, dilation=1), *convolution(stride=1, dilation=1))
            return nn.Sequential(*both)
        case _:
            after = operations.make_norm(channels, norm=norm, affine=affine)
            return operations.OwnOp(op, channels, after, stride=stride, sides=(5, 5))
    return nn.Sequential(pool, operations.make_norm(channels, norm=norm, affine=False))


class DARTSNetwork(operations.SkipNetwork):
    """A discrete DARTS network, to be trained from scratch.

    The paper raises ``drop_path_prob`` to .2, linearly over the epochs.
    """

    def __init__(self, genotype: Genotype, space: DARTSSpace, *, auxiliary: bool) -> None:
        """Build the network of a genotype that the space has checked."""
        super().__init__()
        plans, norm = _plan_cells(space), space.norm
        self.stem = _stem(space, affine=True)
        self.cells = nn.ModuleList()
        for plan in plans:
            edges = genotype.cells[plan.kind]
            ops = (plan.operation(e.op, e.source, norm=norm, affine=True) for e in edges)
            inputs = _preprocessing(plan, norm=norm, affine=True)
            self.cells.append(operations.TwoInputCell(inputs, edges, ops, nodes=NODES))
        self.classifier = nn.Linear(plans[-1].out_channels, space.num_classes)
        self.auxiliary_cell = 2 * space.num_cells // 3
        self.auxiliary = None
        if auxiliary:
            channels = plans[self.auxiliary_cell].out_channels
            self.auxiliary = AuxiliaryHead(channels, space.num_classes, norm=norm)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [B, classes]; in train mode with auxiliary head (logits, auxiliary)."""
        auxiliary_logits = None
        before = last = operations.channels_last(self.stem(x))
        for index, cell in enumerate(self.cells):
            before, last = last, cell(before, last, self.dropped)
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
            operations.make_norm(128, norm=norm, affine=True),
            nn.ReLU(),
            nn.Conv2d(128, 768, 2, bias=False),
            operations.make_norm(768, norm=norm, affine=True),
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


class DARTSBody(operations.SkipNetwork):
    """Stem, search cells, global pool and classifier."""

    takes_stack = True

    def __init__(self, space: DARTSSpace) -> None:
        """Build the body; see :class:`DARTSSpace` for the space."""
        super().__init__()
        plans = _plan_cells(space)
        self.kinds = [plan.kind for plan in plans]
        self.stem = _stem(space, affine=False)
        self.cells = nn.ModuleList(SearchCell(plan, space) for plan in plans)
        self.classifier = nn.Linear(plans[-1].out_channels, space.num_classes)

    def forward(
        self, x: Tensor, op_weights: Mapping[str, Tensor], stack: Stack = torch.cat
    ) -> Tensor:
        """Return logits [B, classes]; op weights as in :class:`Supernet`."""
        stem: Any = self.stem
        before = last = operations.normalised(
            convolution(x, stack([stem[0].weight]), padding=(1, 1)), [stem[1]]
        )
        for kind, cell in zip(self.kinds, self.cells, strict=True):
            weights_BEO = op_weights[kind].expand(len(x), -1, -1)
            before, last = last, cell(before, last, weights_BEO, stack)
        parameters = (stack([self.classifier.weight]), stack([self.classifier.bias]))
        return self.joined(linear(last.mean(dim=(2, 3)), *parameters), x, stack)


class SearchCell(nn.Module):
    """A cell with all ops on all 14 edges."""

    def __init__(self, plan: _CellPlan, space: DARTSSpace) -> None:
        """Build all modules."""
        super().__init__()
        norm = space.norm
        self.preprocess0, self.preprocess1 = _preprocessing(plan, norm=norm, affine=False)
        self.edges = nn.ModuleList(
            operations.MixedOp(
                space.ops,
                functools.partial(plan.operation, source=source, norm=norm, affine=False),
            )
            for source, _ in EDGES
        )

    def forward(self, before: Tensor, last: Tensor, weights_BEO: Tensor, stack: Stack) -> Tensor:
        """Return [B, 4 C, H, W] from the outputs of the two cells before."""
        inputs = [
            _preprocess(self.preprocess0, before, stack),
            _preprocess(self.preprocess1, last, stack),
        ]

        def leave(state: Tensor, indices: list[int]) -> Tensor:
            return _edges([self.edges[i] for i in indices], state, weights_BEO[:, indices], stack)

        return torch.cat(operations.node_states(inputs, EDGES, leave)[len(inputs) :], dim=1)


def _preprocess(module: Any, x: Tensor, stack: Stack) -> Tensor:
    if isinstance(module, operations.FactorizedReduce):
        return _factorized_reduce([module], F.relu(x), stack)[:, 0]
    _, convolution_1x1, norm = module
    return operations.normalised(pointwise(F.relu(x), stack([convolution_1x1.weight])), [norm])


def _edges(edges: Sequence[Any], x: Tensor, weights_BEO: Tensor, stack: Stack) -> Tensor:
    """Return the mixed ops of the edges that leave one state, [B, edges, C, H, W]."""
    modules = {op: [edge.ops[op] for edge in edges] for op in OPS if op != "none"}
    skips = modules["skip_connect"]
    stride = 1 if isinstance(skips[0], nn.Identity) else 2
    active = F.relu(x)
    parts: list[tuple[Tensor, Sequence[str]]] = []
    pools = [operations.max_pool(x, stride=stride), operations.average_pool(x, stride=stride)]
    norms = [[module[1] for module in modules[op]] for op in POOLS]
    if isinstance(norms[0][0], nn.GroupNorm):  # the same for all edges
        pooled = operations.normalised(torch.cat(pools, 1), [norms[0][0], norms[1][0]])
        parts.append((_by_op(pooled, 2, 1), POOLS))
    else:  # every edge keeps running statistics of its own
        wide = torch.cat([pool.repeat(1, len(edges), 1, 1) for pool in pools], 1)
        parts.append(
            (_by_op(operations.normalised(wide, norms[0] + norms[1]), 2, len(edges)), POOLS)
        )
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
    return operations.mix(parts + operations.own_parts(edges, x), weights_BEO, ops=edges[0].names)


def _separable(
    modules: Sequence[Sequence[Any]], start: int, x: Tensor, stride: int, stack: Stack
) -> Tensor:
    """Return depthwise, pointwise, norm of several ops' and edges' modules, without their ReLU."""
    flat = [module for op in modules for module in op]
    depthwise_weights = [stack([module[start + 1].weight for module in op]) for op in modules]
    dilation = flat[0][start + 1].dilation[0]
    out = depthwise(x, depthwise_weights, stride=stride, dilation=dilation)
    out = pointwise(out, stack([m[start + 2].weight for m in flat]), groups=len(flat))
    return operations.normalised(out, [m[start + 3] for m in flat])


def _factorized_reduce(modules: Sequence[Any], active: Tensor, stack: Stack) -> Tensor:
    """Return [B, modules, C, H / 2, W / 2] from what the ReLU let through."""
    height, width = active.shape[-2:]
    odd = F.pad(operations.every_second(active[:, :, 1:, 1:]), (0, width % 2, 0, height % 2))
    even = pointwise(operations.every_second(active), stack([m.conv_even.weight for m in modules]))
    halves = [torch.unflatten(even, 1, (len(modules), -1))]
    if modules[0].conv_odd.weight.numel():
        out = pointwise(odd, stack([m.conv_odd.weight for m in modules]))
        halves.append(torch.unflatten(out, 1, (len(modules), -1)))
    both = torch.cat(halves, dim=2)
    return operations.normalised(both.flatten(1, 2), [m.norm for m in modules]).view(both.shape)


def _by_op(x_BCHW: Tensor, ops: int, edges: int) -> Tensor:
    return torch.unflatten(x_BCHW, 1, (ops, edges, -1))


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

    def operation(self, op: str, source: int, *, norm: Norm, affine: bool) -> nn.Module:
        """Build an op, of stride 2 on edges from the inputs of a reduction cell."""
        stride = 2 if self.reduction and source < NODES.start else 1
        return make_operation(op, self.channels, stride=stride, norm=norm, affine=affine)


def _plan_cells(space: DARTSSpace) -> list[_CellPlan]:
    """Return the sizes of all cells; channels double at the cells L//3 and 2L//3."""
    plans: list[_CellPlan] = []
    channels = space.channels
    before = last = STEM_MULTIPLIER * channels
    after_reduction = False
    for index in range(space.num_cells):
        reduction = index in (space.num_cells // 3, 2 * space.num_cells // 3)
        channels *= 2 if reduction else 1
        plan = _CellPlan(before, last, channels, reduction, after_reduction)
        plans.append(plan)
        before, last, after_reduction = last, plan.out_channels, reduction
    return plans


def _stem(space: DARTSSpace, *, affine: bool) -> nn.Sequential:
    """Return conv3x3 to 3C and norm, at stride 1: the paper's form for small images."""
    out_channels = STEM_MULTIPLIER * space.channels
    return nn.Sequential(
        nn.Conv2d(space.input_shape[0], out_channels, 3, padding=1, bias=False),
        operations.make_norm(out_channels, norm=space.norm, affine=affine),
    )


def _preprocessing(plan: _CellPlan, *, norm: Norm, affine: bool) -> tuple[nn.Module, nn.Module]:
    """Return the modules that bring both inputs to the cell's channels and to one size."""
    reduce_or_conv = (
        operations.FactorizedReduce if plan.after_reduction else operations.relu_conv_norm
    )
    return (
        reduce_or_conv(plan.before_channels, plan.channels, norm=norm, affine=affine),
        operations.relu_conv_norm(plan.last_channels, plan.channels, norm=norm, affine=affine),
    )
