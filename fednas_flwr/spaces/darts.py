"""The search space of DARTS: two kinds of cell, each a graph of 14 weighted edges.

Liu et al. (2019), arXiv 1806.09055. :class:`DARTSSpace` gives the supernet, the way from alphas to
a genotype and the discrete network; their modules stand in ``darts_network.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings.names import FAST, REFERENCE
from fednas_flwr.spaces.cell_graph import CellGraphSpace
from fednas_flwr.spaces.darts_network import NODES, OPS, DARTSBody, DARTSNetwork
from fednas_flwr.spaces.darts_wide import WideDARTSBody
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.space import Supernet

BODIES = {FAST: WideDARTSBody, REFERENCE: DARTSBody}


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
        engine: How the supernet computes the same function of the same parameters: ``fast``, all
            edges of a state at once, or ``reference``, every op as a module.
    """

    name: ClassVar[str] = "darts"
    ops: ClassVar[tuple[str, ...]] = OPS
    nodes: ClassVar[range] = NODES

    channels: int = 16
    num_cells: int = 8

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        super().__post_init__()
        if self.num_cells < 3:
            raise ConfigError(
                f"num_cells must be at least 3 for darts, got {self.num_cells}: with fewer there "
                "is no normal cell; set search_space.num_cells and retrain.num_cells."
            )

    def supernet(self) -> Supernet:
        """Return a newly initialised supernet; its norms have no affine part.

        Deviation: the published code leaves the affine part of the stem's norm on (96 weights of
        1,930,618 at C = 16); here no norm of a supernet has one.
        """
        body = self.with_skip(BODIES[self.engine](self.sizes))
        return Supernet(body, num_edges=self.cell_kinds, num_ops=len(OPS))

    def network(self, genotype: Genotype, *, auxiliary: bool = False) -> DARTSNetwork:
        """Return the newly initialised discrete network of the space's sizes.

        In the paper 20 cells of 36 channels.

        Args:
            genotype: The cells.
            auxiliary: Whether to add a second classifier at cell 2L//3.

        Raises:
            ConfigError: If the genotype is not of this space.
        """
        self.check(genotype)
        return self.with_skip(DARTSNetwork(genotype, self.sizes, auxiliary=auxiliary))
