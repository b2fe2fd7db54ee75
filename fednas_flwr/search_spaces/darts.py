"""The search space of DARTS: two kinds of cell, each a graph of 14 weighted edges.

Liu et al. (2019), arXiv 1806.09055. :class:`DARTSSpace` gives the supernet, the way from alphas to
a genotype and the discrete network; their modules stand in ``darts_network.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fednas_flwr.errors import ConfigError
from fednas_flwr.search_spaces.cell_graph import check_edges, random_edges, strongest_edges
from fednas_flwr.search_spaces.darts_network import EDGES, NODES, OPS, DARTSBody, DARTSNetwork
from fednas_flwr.search_spaces.darts_wide import WideDARTSBody
from fednas_flwr.search_spaces.genotype import Genotype
from fednas_flwr.search_spaces.operations import Norm, check_norm
from fednas_flwr.search_spaces.space import (
    Engine,
    Supernet,
    check_alphas,
    check_cells,
    check_engine,
    check_sizes,
)

BODIES = {"fast": WideDARTSBody, "reference": DARTSBody}


@dataclass(frozen=True, kw_only=True)
class DARTSSpace:
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

    input_shape: tuple[int, ...]
    num_classes: int
    channels: int = 16
    num_cells: int = 8
    norm: Norm = "batch"
    engine: Engine = "fast"

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        check_norm(self.norm)
        check_engine(self.engine)
        check_sizes(
            space=self.name,
            input_shape=self.input_shape,
            num_classes=self.num_classes,
            channels=self.channels,
            num_cells=self.num_cells,
        )
        if self.num_cells < 3:
            raise ConfigError(
                f"num_cells must be at least 3 for darts, got {self.num_cells}: with fewer there "
                "is no normal cell; set search_space.num_cells and retrain.num_cells."
            )

    @property
    def cell_kinds(self) -> dict[str, int]:
        """Number of edges per kind of cell."""
        return {"normal": len(EDGES), "reduction": len(EDGES)}

    def supernet(self) -> Supernet:
        """Return a newly initialised supernet; its norms have no affine part.

        Deviation: the published code leaves the affine part of the stem's norm on (96 weights of
        1,930,618 at C = 16); here no norm of a supernet has one.
        """
        body = BODIES[self.engine](
            in_channels=self.input_shape[0],
            num_classes=self.num_classes,
            channels=self.channels,
            num_cells=self.num_cells,
            norm=self.norm,
        )
        return Supernet(body, num_edges=self.cell_kinds, num_ops=len(OPS))

    def derive(self, alphas: Mapping[str, Tensor]) -> Genotype:
        """Return the genotype of the strongest edges (Liu et al. 2019, section 2.4).

        Every node keeps the two incoming edges whose best op other than ``none`` has the largest
        softmax weight, each with that op. Ties go to the lowest op and the lowest source.

        Raises:
            ValueError: If kinds or shapes are wrong or an alpha is not finite.
        """
        check_alphas(alphas, num_edges=self.cell_kinds, num_ops=len(OPS))
        cells = {
            kind: strongest_edges(alphas[kind], ops=OPS, nodes=NODES) for kind in self.cell_kinds
        }
        return Genotype(space=self.name, cells=cells)

    def random_genotype(self, generator: torch.Generator) -> Genotype:
        """Return a uniform genotype: two distinct sources per node, any op but ``none`` on each."""
        cells = {kind: random_edges(generator, ops=OPS, nodes=NODES) for kind in self.cell_kinds}
        return Genotype(space=self.name, cells=cells)

    def check(self, genotype: Genotype) -> None:
        """Raise ConfigError unless the genotype is one that :meth:`derive` can return."""
        check_cells(genotype, space=self.name, kinds=self.cell_kinds)
        for kind, edges in genotype.cells.items():
            check_edges(edges, kind=kind, ops=OPS, nodes=NODES)

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
        return DARTSNetwork(
            genotype,
            in_channels=self.input_shape[0],
            num_classes=self.num_classes,
            channels=self.channels,
            num_cells=self.num_cells,
            norm=self.norm,
            auxiliary=auxiliary,
        )
