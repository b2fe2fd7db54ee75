"""Cells that read the outputs of the two cells before, and the networks stacked from them.

Liu et al. (2019), arXiv 1806.09055: a cell is a graph of edges between nodes, the first two of
which are its inputs; normal cells keep the size, a reduction cell changes it. A supernet's cells
have all edges with all ops, those of a derived network two edges per node with one op each.
:class:`TwoInputSpace` is the base of such spaces; each has its own ops and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.layers import called, computed
from fednas_flwr.settings.names import Norm
from fednas_flwr.spaces import operations
from fednas_flwr.spaces.genotype import Edge, Genotype, arrows
from fednas_flwr.spaces.space import SearchSpace

INTO_NODE = 2  # edges into a node that a genotype keeps


@dataclass(frozen=True)
class CellPlan:
    """Sizes of one cell, in channels or units.

    Attributes:
        before: Width of the output of the cell before the preceding one.
        last: Width of the preceding cell's output.
        width: Width of the cell's nodes.
        kind: ``normal`` or ``reduction``.
        after_reduction: True if the preceding cell is a reduction cell.
    """

    before: int
    last: int
    width: int
    kind: str
    after_reduction: bool


class TwoInputSpace(SearchSpace):
    """A space with a normal and a reduction cell, in which a genotype keeps two edges into a node.

    The first op is ``none``, which no genotype has; a cell's output consists of all of its nodes
    that are not inputs (Liu et al. 2019, arXiv 1806.09055).
    """

    kinds = ("normal", "reduction")
    search_cell: ClassVar[type[SearchCell]]  # cell with all ops on all edges
    growth: ClassVar[float]  # factor of the nodes' width at a reduction cell
    parts: ClassVar[int]  # number of parts into which reduction cells divide the chain
    takes_stack: ClassVar[bool] = False  # True if supernets compute by ``base.layers.computed``

    channels: int
    num_cells: int

    def stem(self, *, affine: bool) -> tuple[nn.Module, int]:
        """Build the module before the first cell; by default that cell reads the record itself.

        Returns:
            The module, and the width of its output.
        """
        return nn.Identity(), self.input_shape[0]

    def preprocess(self, inputs: int, width: int, *, affine: bool, halves: bool) -> nn.Module:
        """Build the module that brings an input to the cell's width and, with ``halves``, its size.

        ``affine`` is False in supernets, whose norms have no weights.
        """
        raise NotImplementedError

    def operation(self, op: str, plan: CellPlan, *, source: int, affine: bool) -> nn.Module:
        """Build an op (any name except ``none``) on an edge from a node."""
        raise NotImplementedError

    def plans(self, stem_width: int) -> list[CellPlan]:
        """The sizes of all cells; the first one reads an output of width ``stem_width``."""
        plans: list[CellPlan] = []
        before, last, width, after_reduction = stem_width, stem_width, self.channels, False
        reductions = [part * self.num_cells // self.parts for part in range(1, self.parts)]
        for index in range(self.num_cells):
            reduces = index in reductions
            width = int(width * self.growth) if reduces else width
            kind = "reduction" if reduces else "normal"
            plans.append(CellPlan(before, last, width, kind, after_reduction))
            before, last, after_reduction = last, len(self.outputs) * width, reduces
        return plans

    def body(self) -> CellNetwork:
        """Build the body of a supernet; none of its norms has an affine part."""
        return CellNetwork(self)

    def discrete(self, genotype: Genotype, *, auxiliary: bool) -> CellNetwork:
        """Build a discrete network; an auxiliary head is added at cell 2L//3 of L."""
        return CellNetwork(self, genotype.cells, auxiliary=auxiliary)

    def likeliest(self, alphas: Mapping[str, Tensor]) -> Genotype:
        """Return the genotype of the strongest edges (Liu et al. 2019, section 2.4).

        Every node keeps the two incoming edges whose best op other than ``none`` has the largest
        softmax weight, each with that op. Ties go to the lowest op and the lowest source.
        Deviation in :meth:`derive`: if none of these ops has weights, the edge on which the change
        costs the least log-probability takes its strongest op with weights.
        """
        return Genotype(self.name, {kind: self._strongest(alphas[kind]) for kind in self.kinds})

    def _strongest(self, alphas_EO: Tensor) -> tuple[Edge, ...]:
        weights_EO = alphas_EO.detach().double().cpu().softmax(dim=-1).tolist()
        strongest = []
        for pair, weights_O in zip(self.edges, weights_EO, strict=True):
            op = max(range(1, len(self.ops)), key=weights_O.__getitem__)
            strongest.append((weights_O[op], Edge(self.ops[op], *pair)))
        chosen: list[Edge] = []
        for node in self.outputs:
            incoming = [pair for pair in strongest if pair[1].target == node]
            best = sorted(incoming, key=lambda pair: -pair[0])[:INTO_NODE]
            chosen.extend(sorted((edge for _, edge in best), key=lambda edge: edge.source))
        return tuple(chosen)

    def draw(self, generator: torch.Generator) -> Genotype:
        """Draw two distinct sources per node and any op except ``none`` on each, uniformly."""
        cells = {}
        for kind in self.kinds:
            edges = []
            for target in self.outputs:
                sources = torch.randperm(target, generator=generator)[:INTO_NODE].sort().values
                for source in sources.tolist():
                    op = int(torch.randint(1, len(self.ops), (), generator=generator))
                    edges.append(Edge(self.ops[op], source, target))
            cells[kind] = tuple(edges)
        return Genotype(self.name, cells)

    def check_cell(self, kind: str, edges: Sequence[Edge]) -> None:
        """Raise ConfigError unless :meth:`derive` could have returned these edges."""
        self._check_ops(kind, edges, self.ops[1:])
        pairs = [(edge.target, edge.source) for edge in edges]
        targets = [target for target in self.outputs for _ in range(INTO_NODE)]
        if [target for target, _ in pairs] != targets or sorted(set(pairs)) != pairs:
            raise ConfigError(
                f"cell {kind!r}: each of the nodes {self.outputs[0]} to {self.outputs[-1]} needs "
                "two edges from different earlier nodes, ordered by target, then source; got "
                f"{arrows([edge.pair for edge in edges])}."
            )


class CellNetwork(operations.SkipNetwork):
    """Stem, cells, global pool and classifier: a supernet's body, or a network to be trained.

    The paper raises ``drop_path_prob`` linearly over the epochs, to .2.
    """

    def __init__(
        self,
        space: TwoInputSpace,
        cells: Mapping[str, Sequence[Edge]] | None = None,
        *,
        auxiliary: bool = False,
    ) -> None:
        """Build the network.

        Args:
            space: Space with the network's sizes.
            cells: The edges of each kind of cell, which the space has checked; None means all
                edges.
            auxiliary: True if a second classifier is added.
        """
        super().__init__()
        self.takes_stack = space.takes_stack and cells is None
        self.stem, width = space.stem(affine=cells is not None)
        plans = space.plans(width)
        self.kinds = [plan.kind for plan in plans]
        self.cells = nn.ModuleList(
            space.search_cell(space, plan)
            if cells is None
            else DerivedCell(space, plan, cells[plan.kind])
            for plan in plans
        )
        nodes = len(space.outputs)
        self.classifier = nn.Linear(nodes * plans[-1].width, space.num_classes)
        self.auxiliary_cell = 2 * space.num_cells // 3
        self.auxiliary = None
        if auxiliary:
            width = nodes * plans[self.auxiliary_cell].width
            self.auxiliary = AuxiliaryHead(width, space.num_classes, norm=space.norm)

    def forward(
        self, x: Tensor, op_weights: operations.OpWeights = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [B, classes]; in train mode with auxiliary head (logits, auxiliary).

        Args:
            x: Examples [B, ...].
            op_weights: Op weights of a supernet, as in :class:`~fednas_flwr.spaces.space.Supernet`.
        """
        compute = computed if self.takes_stack else called
        auxiliary_logits = None
        before = last = compute(self.stem, x)
        if x.dim() == 4 and not self.takes_stack:
            before = last = operations.channels_last(last)
        for index, (kind, cell) in enumerate(zip(self.kinds, self.cells, strict=True)):
            how = self.dropped if op_weights is None else op_weights[kind]
            before, last = last, cell(before, last, how)
            if index == self.auxiliary_cell and self.training and self.auxiliary is not None:
                auxiliary_logits = self.auxiliary(last)
        features = last.mean(dim=(2, 3)) if last.dim() == 4 else last
        logits = self.joined(compute(self.classifier, features), x, compute)
        return logits if auxiliary_logits is None else (logits, auxiliary_logits)

    def chain(self) -> list[nn.Module]:
        """Return the stem, if there is one, and the cells, in the order of computation."""
        return [m for m in (self.stem, *self.cells) if not isinstance(m, nn.Identity)]


class TwoInputCell(nn.Module):
    """A cell that brings the outputs of the two cells before to its width and to one size."""

    def __init__(self, space: TwoInputSpace, plan: CellPlan, *, affine: bool) -> None:
        """Build the modules for both inputs."""
        super().__init__()
        make = partial(space.preprocess, width=plan.width, affine=affine)
        self.preprocess0 = make(plan.before, halves=plan.after_reduction)
        self.preprocess1 = make(plan.last, halves=False)


class SearchCell(TwoInputCell):
    """A cell with all ops on all edges."""

    def __init__(self, space: TwoInputSpace, plan: CellPlan) -> None:
        """Build the modules for both inputs; a subclass builds those of the edges."""
        super().__init__(space, plan, affine=False)
        self.pairs = space.edges

    def prepared(self, module: nn.Module, x: Tensor) -> Tensor:
        """Bring an input to the cell's width and size."""
        return called(module, x)

    def leave(self, weights_EO: Tensor, state: Tensor, indices: list[int]) -> Tensor:
        """Compute the mixed ops of the edges that leave a state, [B, edges, ...]."""
        raise NotImplementedError

    def forward(self, before: Tensor, last: Tensor, weights_EO: Tensor) -> Tensor:
        """Return the nodes' states, side by side in dimension 1."""
        inputs = [self.prepared(self.preprocess0, before), self.prepared(self.preprocess1, last)]
        states = operations.node_states(inputs, self.pairs, partial(self.leave, weights_EO))
        return torch.cat(states[len(inputs) :], dim=1)


class DerivedCell(TwoInputCell):
    """A cell of a derived network."""

    def __init__(self, space: TwoInputSpace, plan: CellPlan, edges: Sequence[Edge]) -> None:
        """Build the cell with these edges."""
        super().__init__(space, plan, affine=True)
        self.wiring, self.nodes = edges, space.outputs
        self.edges = nn.ModuleList(
            space.operation(edge.op, plan, source=edge.source, affine=True) for edge in edges
        )

    def forward(self, before: Tensor, last: Tensor, drop_path_prob: float) -> Tensor:
        """Return the nodes' states, side by side in dimension 1."""
        inputs = [self.preprocess0(before), self.preprocess1(last)]
        pairs, ops = [edge.pair for edge in self.wiring], self.edges
        states = operations.discrete_states(inputs, pairs, ops, self.nodes, drop_path_prob)
        return torch.cat(states[self.nodes.start :], dim=1)


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
        return self.classifier(self.features(F.avg_pool2d(x, kernel, stride)).flatten(1))
