"""The MBConv search space of ProxylessNAS, FDNAS and CFDNAS: which op in each block of a chain.

Cai et al. (2019), arXiv 1812.00332; Zhang et al. (2020), FDNAS, arXiv 2011.03372. Nothing is
searched on a smaller proxy: the derived network has the supernet's depth and width. The fixed shape
around the choices is a skeleton; :class:`MBConvSpace` gives the supernet, the way from alphas to a
genotype and the derived network. Plans and modules stand in ``mbconv_network.py``.

Tensor suffixes: E blocks, O ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fednas_flwr.base.errors import ConfigError, unknown_choice
from fednas_flwr.spaces.degenerate import WEIGHTLESS, first_trained, nearest_trained
from fednas_flwr.spaces.genotype import Edge, Genotype, arrows
from fednas_flwr.spaces.mbconv_network import (
    CANDIDATES,
    CELL,
    MBCONVS,
    SKELETONS,
    ZERO,
    MBConvNetwork,
    Plan,
    Skeleton,
    make_plan,
)
from fednas_flwr.spaces.space import (
    SpaceShape,
    Supernet,
    check_alphas,
    check_cells,
    check_op,
)

# The alpha of an op that a block does not offer. Its softmax and its gradient are exactly zero in
# every dtype, so that samplers, entropies, averages and checkpoints need not know of it.
NEVER = -1e4


@dataclass(frozen=True, kw_only=True)
class MBConvSpace(SpaceShape):
    """The MBConv search space for images of one shape.

    Attributes:
        input_shape: (channels, height, width) of an image; any size.
        num_classes: Number of classes.
        skeleton: Depth, widths and strides.
        candidates: The ops to choose from: names of ``MBCONVS``, and ``zero``, which blocks of
            stride 1 with as many output as input channels offer.
        width: Width multiplier; channels are rounded to multiples of 8, the head never shrinks.
        norm: ``batch``, or ``group`` (needed for privacy), in search and in retraining.
    """

    name: ClassVar[str] = "mbconv"

    skeleton: Skeleton = SKELETONS["fdnas"]
    candidates: tuple[str, ...] = CANDIDATES["fdnas"]
    width: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be built, or offers no choice."""
        super().__post_init__()
        if not 0 < self.width <= 16:
            raise ConfigError(f"search_space.width={self.width} is out of range: above 0, to 16.")
        for op in self.candidates:
            if op not in (*MBCONVS, ZERO):
                raise unknown_choice("candidate", op, (*MBCONVS, ZERO))
        convolutions = set(self.candidates) - {ZERO}
        if len(convolutions) < 2 or len(set(self.candidates)) < len(self.candidates):
            raise ConfigError(
                f"candidates={', '.join(self.candidates)}: at least two different ops other than "
                "zero are needed, each named once."
            )

    @property
    def ops(self) -> tuple[str, ...]:
        """The candidates."""
        return self.candidates

    @property
    def cell_kinds(self) -> dict[str, int]:
        """Number of searchable blocks."""
        return {CELL: len(self.plan.blocks)}

    @cached_property
    def plan(self) -> Plan:
        """The supernet as layers."""
        return make_plan(
            self.skeleton,
            candidates=self.candidates,
            width=self.width,
            input_shape=self.input_shape,
            num_classes=self.num_classes,
        )

    def supernet(self) -> Supernet:
        """Return a newly initialised supernet; ``NEVER`` stands at what a block does not offer.

        Without op weights it is the sum of all ops weighted by softmax(alphas), as in DARTS; with
        one-hot gates and paths (:class:`MBConvNetwork`) it is ProxylessNAS' supernet.
        """
        supernet = Supernet(
            self.with_skip(MBConvNetwork(self.plan, norm=self.norm)),
            num_edges=self.cell_kinds,
            num_ops=len(self.ops),
        )
        missing_EO = torch.tensor([[layer is None for layer in row] for row in self.plan.blocks])
        with torch.no_grad():
            supernet.alphas()[CELL].masked_fill_(missing_EO, NEVER)
        return supernet

    def derive(self, alphas: Mapping[str, Tensor]) -> Genotype:
        """Return the genotype with the op of the largest alpha in every block that it offers.

        Ties go to the lowest op. If this is ``zero`` in every block, the block in which it costs
        the least log-probability takes its likeliest other op.

        Raises:
            ValueError: If kinds or shapes are wrong or an alpha is not finite.
        """
        check_alphas(alphas, num_edges=self.cell_kinds, num_ops=len(self.ops))
        rows = alphas[CELL].detach().tolist()
        # max() keeps the first of equals, which torch.argmax does not promise.
        path = [
            max(offered, key=row.__getitem__)
            for row, offered in zip(rows, self.offered, strict=True)
        ]
        genotype = self.genotype(path)
        if self.is_degenerate(genotype):  # so every block offers every op
            ways = [[block] for block in range(len(path))]
            return self.genotype(nearest_trained(rows, path, ops=self.ops, routes=ways))
        return genotype

    def random_genotype(self, generator: torch.Generator) -> Genotype:
        """Return any genotype that is not degenerate with the same probability."""

        def draw() -> Genotype:
            return self.genotype(
                offered[int(torch.randint(len(offered), (), generator=generator))]
                for offered in self.offered
            )

        return first_trained(draw, self.is_degenerate)

    def is_degenerate(self, genotype: Genotype) -> bool:
        """Return whether every block is ``zero``.

        A block that changes the size or the channels does not offer it, and most skeletons have
        such a block.
        """
        return all(edge.op in WEIGHTLESS for edge in genotype.cells[CELL])

    @property
    def offered(self) -> list[list[int]]:
        """For every block the columns of the ops that it offers."""
        return [[i for i, layer in enumerate(row) if layer is not None] for row in self.plan.blocks]

    def genotype(self, path: Iterable[int]) -> Genotype:
        """Return the genotype with one op per block, given by column."""
        edges = (Edge(self.ops[op], block, block + 1) for block, op in enumerate(path))
        return Genotype(space=self.name, cells={CELL: tuple(edges)})

    def path(self, genotype: Genotype) -> list[int]:
        """Return for every block the column of the genotype's op; raises as :meth:`check`."""
        self.check(genotype)
        return [self.ops.index(edge.op) for edge in genotype.cells[CELL]]

    def check(self, genotype: Genotype) -> None:
        """Raise ConfigError unless the genotype has the form that :meth:`derive` returns."""
        check_cells(genotype, space=self.name, kinds=self.cell_kinds)
        edges, blocks = genotype.cells[CELL], self.plan.blocks
        for edge in edges:
            check_op(edge, kind=CELL, ops=self.ops)
        chain = [(block, block + 1) for block in range(len(blocks))]
        pairs = [(edge.source, edge.target) for edge in edges]
        if pairs != chain:
            raise ConfigError(
                f"cell {CELL!r}: the edges 0 -> 1, 1 -> 2, ... up to {len(blocks)} are needed in "
                f"this order, one for each block of the skeleton; got {arrows(pairs)}."
            )
        for edge, row in zip(edges, blocks, strict=True):
            if row[self.ops.index(edge.op)] is None:
                raise ConfigError(
                    f"block {edge.target} cannot be {edge.op}: it changes the size or the channels."
                )

    def network(self, genotype: Genotype, *, auxiliary: bool = False) -> MBConvNetwork:
        """Return the newly initialised derived network, of the space's own sizes.

        Args:
            genotype: One op per block.
            auxiliary: Must be False: there is no auxiliary head.

        Raises:
            ConfigError: If the genotype is not of this space, or an auxiliary head is asked for.
        """
        self.check_auxiliary(auxiliary)
        chosen = tuple(
            (row[op],) for row, op in zip(self.plan.blocks, self.path(genotype), strict=True)
        )
        return self.with_skip(MBConvNetwork(self.plan._replace(blocks=chosen), norm=self.norm))
