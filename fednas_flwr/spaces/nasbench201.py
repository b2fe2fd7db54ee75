"""The search space of NAS-Bench-201: one cell of four nodes and six edges.

Dong & Yang (2020), arXiv 2001.00326. :class:`NASBench201Space` gives the supernet, the way from
alphas to a genotype and the discrete network; their modules stand in ``nasbench201_network.py``.
:func:`to_arch_string` and :func:`from_arch_string` speak the benchmark's own notation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings.names import FAST, REFERENCE
from fednas_flwr.spaces.cell_graph import CELL, StackedSpace, WholeGraphSpace
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.nasbench201_network import (
    NODES,
    OPS,
    NASBench201Body,
    NASBench201Network,
)
from fednas_flwr.spaces.nasbench201_wide import WideNASBench201Body
from fednas_flwr.spaces.space import Supernet

BODIES = {FAST: WideNASBench201Body, REFERENCE: NASBench201Body}


@dataclass(frozen=True, kw_only=True)
class NASBench201Space(StackedSpace, WholeGraphSpace):
    """The NAS-Bench-201 search space for images of one shape.

    Attributes:
        input_shape: (channels, height, width) of an image; any size.
        num_classes: Number of classes.
        channels: Channels of the supernet's first stage (16 in the paper).
        num_cells: Cells in each of the supernet's three stages (5 in the paper).
        norm: ``batch``, or ``group`` (needed for privacy), in search and in retraining.
        engine: How the supernet computes the same function of the same parameters: ``fast``, all
            edges of a state at once, or ``reference``, every op as a module.
    """

    name: ClassVar[str] = "nasbench201"
    ops: ClassVar[tuple[str, ...]] = OPS
    nodes: ClassVar[range] = NODES
    outputs: ClassVar[range] = NODES[-1:]

    channels: int = 16
    num_cells: int = 5

    def supernet(self) -> Supernet:
        """Return a newly initialised supernet; its norms have no affine part."""
        body = self.with_skip(BODIES[self.engine](self.sizes))
        return Supernet(body, num_edges=self.cell_kinds, num_ops=len(OPS))

    def network(self, genotype: Genotype, *, auxiliary: bool = False) -> NASBench201Network:
        """Return the newly initialised discrete network of the space's sizes.

        Args:
            genotype: The cell.
            auxiliary: Must be False: the benchmark's networks have no auxiliary head.

        Raises:
            ConfigError: If the genotype is not of this space, or an auxiliary head is asked for.
        """
        self.check(genotype)
        if auxiliary:
            raise ConfigError(
                "nasbench201 networks have no auxiliary head: set retrain.auxiliary_weight=0."
            )
        return self.with_skip(NASBench201Network(genotype, self.sizes))


def to_arch_string(genotype: Genotype) -> str:
    """Return the cell in the benchmark's notation, ``|op~0|+|op~0|op~1|+|op~0|op~1|op~2|``."""
    edges = genotype.cells[CELL]
    return "+".join(
        "|" + "".join(f"{edge.op}~{edge.source}|" for edge in edges if edge.target == node)
        for node in NODES
    )


def from_arch_string(text: str) -> Genotype:
    """Return the genotype of a cell in the benchmark's notation.

    Raises:
        ConfigError: If the text is not of the form ``|op~0|+|op~0|op~1|+|op~0|op~1|op~2|`` with ops
            of this space.
    """
    pattern = r"\+".join(
        r"\|" + "".join(rf"(\w+)~{source}\|" for source in range(node)) for node in NODES
    )
    match = re.fullmatch(pattern, text)
    if match is None or not set(match.groups()) <= set(OPS):
        raise ConfigError(
            f"{text!r} is not a NAS-Bench-201 cell: expected |op~0|+|op~0|op~1|+|op~0|op~1|op~2| "
            f"with the ops {', '.join(OPS)}."
        )
    return NASBench201Space.genotype(OPS.index(op) for op in match.groups())
