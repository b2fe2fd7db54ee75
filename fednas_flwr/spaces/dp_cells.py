"""The search space of DPNAS: one cell whose 15 edges each compute one of ten ops.

Cheng et al. (2022), DPNAS, arXiv 2110.08557, section 3.2. Of the ops six are a convolution with
different activations: which of them suits private training is what is searched for.
:class:`DPCellSpace` gives the supernet, the way from alphas or a path to a genotype and the derived
network; their modules stand in ``dp_cells_network.py``.

Tensor suffixes: E edges, O ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fednas_flwr.base.errors import ConfigError, unknown_choice
from fednas_flwr.settings.names import GROUP, Norm
from fednas_flwr.spaces import darts_network
from fednas_flwr.spaces.cell_graph import CELL, WholeGraphSpace
from fednas_flwr.spaces.dp_cells_network import (
    ACTIVATIONS,
    EDGES,
    NODES,
    OPS,
    DPCellNetwork,
)
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.space import Supernet

SEARCH_GROUPS, TRAINING_GROUPS = 4, 8  # of group norms, as in the authors' code
BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class DPCellSpace(WholeGraphSpace):
    """The DP-friendly search space for images of one shape.

    Attributes:
        input_shape: (channels, height, width) of an image; any size.
        num_classes: Number of classes.
        widths: Channels of the nodes in each of the three cells (48, 96, 192 for CIFAR-10; 32, 32,
            64 for MNIST and Fashion-MNIST).
        head: Width of the head, 128 in the paper's networks.
        activation: Of the head's hidden layer, one of ``ACTIVATIONS``; selu for CIFAR-10, else
            tanh.
        norm: ``batch``, or ``group`` (needed for privacy, and the paper's only one).
        engine: Both are the same here.
    """

    name: ClassVar[str] = "dp_cells"
    ops: ClassVar[tuple[str, ...]] = OPS
    nodes: ClassVar[range] = NODES
    outputs: ClassVar[range] = NODES

    widths: tuple[int, ...] = (32, 32, 64)
    head: int = 128
    activation: str = "tanh"
    norm: Norm = GROUP

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        super().__post_init__()
        if self.activation not in ACTIVATIONS:
            raise unknown_choice("search_space.activation", self.activation, ACTIVATIONS)
        if len(self.widths) != BLOCKS or min(self.widths) < 1:
            raise ConfigError(
                f"search_space.widths={list(self.widths)} must be {BLOCKS} numbers of channels, "
                "each at least 1: one for each cell."
            )
        self.check_sizes("head")

    @classmethod
    def choices(cls) -> tuple[int, ...]:
        """Return for every edge the number of ops to choose from."""
        return (len(cls.ops),) * len(EDGES)

    def supernet(self) -> Supernet:
        """Return a newly initialised supernet with the weights of all ops on all edges.

        With a path its body computes that path alone. Without, the supernet is the relaxation of
        DARTS on this space, which is not in the paper.
        """
        body = self._network([self.ops] * len(EDGES), groups=SEARCH_GROUPS, near_identity=True)
        return Supernet(body, num_edges=self.cell_kinds, num_ops=len(self.ops))

    def path(self, genotype: Genotype) -> list[int]:
        """Return for every edge the column of the genotype's op; raises as :meth:`check`."""
        self.check(genotype)
        return [self.ops.index(edge.op) for edge in genotype.cells[CELL]]

    def network(self, genotype: Genotype, *, auxiliary: bool = False) -> DPCellNetwork:
        """Return the newly initialised derived network, of the space's own sizes.

        Args:
            genotype: The cell.
            auxiliary: Must be False: there is no auxiliary head.

        Raises:
            ConfigError: If the genotype is not of this space, or an auxiliary head is asked for.
        """
        path = self.path(genotype)
        if auxiliary:
            raise ConfigError(
                "dp_cells networks have no auxiliary head: set retrain.auxiliary_weight=0."
            )
        return self._network([[self.ops[op]] for op in path], groups=TRAINING_GROUPS)

    def _network(
        self, ops_of_edges: Sequence[Sequence[str]], *, groups: int, near_identity: bool = False
    ) -> DPCellNetwork:
        network = DPCellNetwork(
            ops_of_edges,
            input_shape=self.input_shape,
            num_classes=self.num_classes,
            widths=self.widths,
            head=self.head,
            activation=self.activation,
            norm=self.norm,
            groups=groups,
            near_identity=near_identity,
        )
        return self.with_skip(network)


class DARTSOpsSpace(DPCellSpace):
    """The same cells with the candidate ops of DARTS, none of which has an activation to choose.

    For Figure 3(a): what the choice of ops is worth. Deviations: the paper has DARTS' cells as
    well, in two kinds; pools have no norm here, and no norm an affine part.
    """

    name: ClassVar[str] = "dp_cells_darts"
    ops: ClassVar[tuple[str, ...]] = darts_network.OPS


DP_CELL_SPACES: dict[str, type[DPCellSpace]] = {
    space.name: space for space in (DPCellSpace, DARTSOpsSpace)
}
