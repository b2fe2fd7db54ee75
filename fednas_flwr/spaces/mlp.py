"""The search space for tables: DARTS cells whose ops are dense layers.

FEATHERS (Seng et al. 2023, arXiv 2206.12342, section 4) searches MLP cells for fraud detection; the
ops here are our own. :class:`MLPSpace` gives the supernet, the way from alphas to a genotype and
the discrete network.

A cell has two input nodes (0, 1: the outputs of the two cells before it, each brought to the cell's
width by a linear layer and a norm) and three nodes (2 to 4), each the sum of edges from earlier
nodes; its output is the concatenation of the three. The first cell reads the record itself.

Every op except ``none`` and ``skip_connect`` is a dense layer: linear, activation, norm. A
``narrow`` one has half as many units as its node and adds to the node's first half. In a supernet
the dense layers that read one node are computed as one linear layer per width.

Tensor suffixes: B batch, E edges, O ops, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings.names import GROUP, NO_NORM, Norm
from fednas_flwr.settings.optimizers import Count
from fednas_flwr.settings.parser import Between
from fednas_flwr.spaces import cell_graph, operations
from fednas_flwr.spaces.two_input_cells import CellNetwork, CellPlan, SearchCell, TwoInputSpace

OPS = ("none", "skip_connect", "dense_relu", "dense_tanh", "narrow_relu", "narrow_tanh")
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}  # in the order of OPS, for both widths
NODES = range(2, 5)
EDGES = cell_graph.candidate_edges(NODES)
# Half of a reduction cell's half must be 2 units, the fewest of which a layer norm leaves anything.
WIDTHS = Between(8, reason="for mlp, as a norm over one unit leaves nothing of it")


class MLPCell(SearchCell):
    """A cell with all ops on all 9 edges."""

    def __init__(self, space: TwoInputSpace, plan: CellPlan) -> None:
        """Build all modules; the edges that leave one node share one module."""
        super().__init__(space, plan)
        sources = [source for source, _ in EDGES]
        self.leaving = nn.ModuleList(
            LeavingEdges(sources.count(source), plan.width, norm=space.norm, own=space.own_ops)
            for source in range(NODES[-1])
        )

    def leave(self, weights_EO: Tensor, state: Tensor, indices: list[int]) -> Tensor:
        """Compute the mixed ops of the edges that leave a state, [B, edges, W]."""
        source, _ = EDGES[indices[0]]
        return self.leaving[source](state, weights_EO[..., indices, :])


@dataclass(frozen=True, kw_only=True)
class MLPSpace(TwoInputSpace):
    """The search space of dense cells for tables of one shape.

    The cells are those of DARTS with three nodes instead of four and dense layers as ops. The
    layers have the node's width or half of it, with ReLU or tanh. Cell L//2 of L is the reduction
    cell (DARTS has two): its input projections halve the width, so that inside it a skip connection
    is an identity.

    Attributes:
        input_shape: (features,) of a record.
        num_classes: Number of classes.
        channels: Width of the nodes before the reduction cell; at least 8.
        num_cells: Cells of the supernet; at least 2, or the alphas of the normal cell would never
            learn.
        norm: ``batch``, or ``group`` (needed for privacy), in search and in retraining.
    """

    name = "mlp"
    ops = OPS
    edges = EDGES
    outputs = NODES
    inputs = "tables"
    search_cell = MLPCell
    growth = 0.5
    parts = 2

    channels: Annotated[int, WIDTHS] = 32
    num_cells: Count = 3

    def body(self) -> CellNetwork:
        """Build the body of a supernet; its norms have no affine part.

        Raises:
            ConfigError: There are fewer than two cells.
        """
        if self.num_cells < 2:
            raise ConfigError(
                f"search_space.num_cells must be at least 2 for mlp, got {self.num_cells}: with "
                "one there is no normal cell."
            )
        return super().body()

    def preprocess(self, inputs: int, width: int, *, affine: bool, halves: bool) -> nn.Module:
        """Build a linear layer and a norm."""
        dense = nn.Linear(inputs, width)
        return nn.Sequential(dense, make_norm(width, norm=self.norm, affine=affine))

    def operation(self, op: str, plan: CellPlan, *, source: int, affine: bool) -> nn.Module:
        """Build an op of a discrete cell."""
        return make_operation(op, plan.width, norm=self.norm)


def make_norm(width: int, *, layers: int = 1, norm: Norm, affine: bool) -> nn.Module:
    """Return batch norm, a group norm with one group per layer of ``layers`` side by side, or none.

    Group norm over one group is layer norm. With more groups, as for images, a group of two units
    without pixels would keep only which unit is larger. ``none`` keeps what a norm over few units
    loses.
    """
    if norm == NO_NORM:
        return nn.Identity()
    if norm == GROUP:
        return nn.GroupNorm(layers, layers * width, affine=affine)
    return nn.BatchNorm1d(layers * width, affine=affine)


def make_operation(op: str, width: int, *, norm: Norm) -> nn.Module:
    """Build the module [B, W] -> [B, W] of one op of a discrete cell (any name except ``none``)."""
    if op == "skip_connect":
        return nn.Identity()
    if op not in OPS:
        return operations.OwnOp(op, width, make_norm(width, norm=norm, affine=True), sides=())
    size, activation = op.split("_")
    units = width if size == "dense" else width // 2
    return nn.Sequential(
        nn.Linear(width, units),
        ACTIVATIONS[activation](),
        make_norm(units, norm=norm, affine=True),
        nn.ConstantPad1d((0, width - units), 0.0),
    )


class LeavingEdges(nn.Module):
    """The mixed ops of all edges that leave one node."""

    def __init__(self, num_edges: int, width: int, *, norm: Norm, own: Sequence[str] = ()) -> None:
        """Build the dense layers of ``num_edges`` edges; those of one width are one layer.

        Each edge also gets the ``own`` ops, which users have registered.
        """
        super().__init__()
        self.dense = ParallelLayers(num_edges, width, width, norm=norm)
        self.narrow = ParallelLayers(num_edges, width, width // 2, norm=norm)
        self.own = nn.ModuleList(
            operations.OwnOp(op, width, make_norm(width, norm=norm, affine=False), sides=())
            for _ in range(num_edges)
            for op in own
        )

    def forward(self, x_BW: Tensor, weights_EO: Tensor) -> Tensor:
        """Return ``sum_o w_o * op_o(x)`` for every edge, [B, E, W]."""
        known, own = weights_EO[..., : len(OPS)], weights_EO[..., len(OPS) :]
        _, skip, dense, narrow = torch.split(known, [1, 1, 2, 2], dim=-1)  # in the order of OPS
        dense_BEW = self.dense(x_BW, dense)
        narrow_BEH = self.narrow(x_BW, narrow)
        padded = nn.functional.pad(narrow_BEH, (0, dense_BEW.shape[-1] - narrow_BEH.shape[-1]))
        mixed_BEW = skip * x_BW[:, None] + dense_BEW + padded
        if not self.own:
            return mixed_BEW
        outs = torch.stack([op(x_BW) for op in self.own], dim=1)
        outs_BEOW = outs.view(len(x_BW), *own.shape[-2:], -1)
        return torch.add(mixed_BEW, (outs_BEOW * own[..., None]).sum(-2))


class ParallelLayers(nn.Module):
    """Two weighted dense layers of one width on each of some edges, one per activation."""

    def __init__(self, num_edges: int, width: int, units: int, *, norm: Norm) -> None:
        """Build one linear layer and one norm."""
        super().__init__()
        layers = len(ACTIVATIONS) * num_edges
        self.linear = nn.Linear(width, layers * units)
        self.activations = nn.ModuleList(activation() for activation in ACTIVATIONS.values())
        self.norm = make_norm(units, layers=layers, norm=norm, affine=False)

    def forward(self, x_BW: Tensor, weights_EO: Tensor) -> Tensor:
        """Return [B, E, units]; the weights are those of the two layers, [E, 2] or [B, E, 2]."""
        parts = self.linear(x_BW).chunk(len(self.activations), dim=1)
        activated = [f(part) for f, part in zip(self.activations, parts, strict=True)]
        out = self.norm(torch.cat(activated, dim=1))
        out_BOEW = out.view(len(out), len(activated), weights_EO.shape[-2], -1)
        return (out_BOEW * weights_EO.mT[..., None]).sum(1)
