"""The search space for tables: DARTS cells whose ops are dense layers.

FEATHERS (Seng et al. 2023, arXiv 2206.12342, section 4) searches MLP cells for fraud detection; the
ops here are ours. :class:`MLPSpace` gives the supernet, the way from alphas to a genotype and the
discrete network; their modules stand in ``mlp_network.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.spaces.cell_graph import CellGraphSpace
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.mlp_network import NODES, OPS, MLPBody, MLPNetwork
from fednas_flwr.spaces.space import Supernet

LEAST_WIDTH = 8  # half of a reduction cell's half: 2 units, the fewest that a layer norm leaves


@dataclass(frozen=True, kw_only=True)
class MLPSpace(CellGraphSpace):
    """The search space of dense cells for tables of one shape.

    The cells are those of DARTS with three nodes instead of four and dense layers for ops: of the
    node's width or half of it, with ReLU or tanh. Cell L//2 of L is the reduction cell (DARTS has
    two): its input projections halve the width, so that inside it a skip connection is an identity.

    Attributes:
        input_shape: (features,) of a record.
        num_classes: Number of classes.
        channels: Width of the nodes before the reduction cell; at least 8.
        num_cells: Cells of the supernet; at least 2, or the alphas of the normal cell would never
            learn.
        norm: ``batch``, or ``group`` (needed for privacy), in search and in retraining.
        engine: Both are the same here.
    """

    name: ClassVar[str] = "mlp"
    ops: ClassVar[tuple[str, ...]] = OPS
    nodes: ClassVar[range] = NODES
    inputs: ClassVar[str] = "tables"

    channels: int = 32
    num_cells: int = 3

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        super().__post_init__()
        if self.channels < LEAST_WIDTH:
            raise ConfigError(
                f"channels must be at least {LEAST_WIDTH} for mlp, got {self.channels}: a norm "
                "over one unit leaves nothing of it."
            )

    def supernet(self) -> Supernet:
        """Return a newly initialised supernet; its norms have no affine part.

        Raises:
            ConfigError: There are fewer than two cells.
        """
        if self.num_cells < 2:
            raise ConfigError(
                f"search_space.num_cells must be at least 2 for mlp, got {self.num_cells}: with "
                "one there is no normal cell."
            )
        body = self.with_skip(MLPBody(self.sizes))
        return Supernet(body, num_edges=self.cell_kinds, num_ops=len(OPS))

    def network(self, genotype: Genotype, *, auxiliary: bool = False) -> MLPNetwork:
        """Return the newly initialised discrete network of the space's sizes.

        Args:
            genotype: The cells.
            auxiliary: Must be False.

        Raises:
            ConfigError: If the genotype is not of this space, or an auxiliary head is asked for.
        """
        self.check(genotype)
        if auxiliary:
            raise ConfigError(
                "mlp networks have no auxiliary head: set retrain.auxiliary_weight=0."
            )
        return self.with_skip(MLPNetwork(genotype, self.sizes))
