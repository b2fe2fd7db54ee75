"""Cells as graphs: which edges a search keeps, and which edges a genotype may have.

The first nodes of a cell are its inputs; every later node has candidate edges from all nodes before
it. Of these a discrete cell of DARTS (Liu et al. 2019, arXiv 1806.09055) keeps two, each with one
op: :class:`CellGraphSpace` is what the spaces ``darts`` and ``mlp`` share. Other cells keep every
edge: :class:`WholeGraphSpace` is what ``nasbench201`` and ``dp_cells`` share.

Tensor suffixes: E edges, O ops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.spaces.degenerate import (
    first_trained,
    has_weights,
    nearest_trained,
    routes,
)
from fednas_flwr.spaces.genotype import Edge, Genotype, arrows
from fednas_flwr.spaces.space import SpaceShape, check_alphas, check_cells, check_op

KEPT = 2  # edges into a node
CELL = "cell"  # the kind of cell, where there is only one


def candidate_edges(nodes: range) -> tuple[tuple[int, int], ...]:
    """Return (source, target) of every edge into ``nodes``, by target, then by source.

    Example:
        >>> candidate_edges(range(2, 4))
        ((0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
    """
    return tuple((source, target) for target in nodes for source in range(target))


def strongest_edges(alphas_EO: Tensor, *, ops: Sequence[str], nodes: range) -> tuple[Edge, ...]:
    """Return the two strongest edges into every node, each with its strongest op (section 2.4).

    An edge is as strong as the largest softmax weight of its ops but ``none``. Ties go to the
    lowest op and the lowest source.

    Args:
        alphas_EO: Of every candidate edge, finite.
        ops: Names of the ops; the first is ``none``, which is never kept.
        nodes: The nodes that are no inputs.
    """
    weights_EO = alphas_EO.detach().double().cpu().softmax(dim=-1).tolist()
    strongest = []
    for (source, target), weights_O in zip(candidate_edges(nodes), weights_EO, strict=True):
        # max() keeps the first of equals, which torch.argmax does not promise.
        op = max(range(1, len(ops)), key=weights_O.__getitem__)
        strongest.append((weights_O[op], Edge(ops[op], source, target)))
    kept: list[Edge] = []
    for node in nodes:
        incoming = [pair for pair in strongest if pair[1].target == node]
        best = sorted(incoming, key=lambda pair: -pair[0])[:KEPT]
        kept.extend(sorted((edge for _, edge in best), key=lambda edge: edge.source))
    return tuple(kept)


def random_edges(
    generator: torch.Generator, *, ops: Sequence[str], nodes: range
) -> tuple[Edge, ...]:
    """Return a uniform cell: two distinct sources per node, any op but ``none`` on each."""
    edges = []
    for target in nodes:
        sources = torch.randperm(target, generator=generator)[:KEPT].sort().values.tolist()
        for source in sources:
            op = int(torch.randint(1, len(ops), (), generator=generator))
            edges.append(Edge(ops[op], source, target))
    return tuple(edges)


def check_edges(edges: Sequence[Edge], *, kind: str, ops: tuple[str, ...], nodes: range) -> None:
    """Raise ConfigError unless :func:`strongest_edges` could have returned these edges."""
    for edge in edges:
        check_op(edge, kind=kind, ops=ops[1:])
    pairs = [(edge.target, edge.source) for edge in edges]
    targets = [target for target in nodes for _ in range(KEPT)]
    if [target for target, _ in pairs] != targets or sorted(set(pairs)) != pairs:
        found = arrows([(edge.source, edge.target) for edge in edges])
        raise ConfigError(
            f"cell {kind!r}: each of the nodes {nodes[0]} to {nodes[-1]} needs two edges from "
            f"different earlier nodes, ordered by target, then source; got {found}."
        )


def lead(
    genotype: Genotype, margin: float, *, ops: Sequence[str], nodes: range
) -> dict[str, Tensor]:
    """Return alphas by kind of cell, ``margin`` for the ops of a genotype and 0 for all others.

    A space derives the genotype from them.

    Args:
        genotype: Of cells with these nodes.
        margin: Above 0.
        ops: Names of the ops.
        nodes: The nodes that are no inputs.
    """
    candidates = candidate_edges(nodes)
    alphas = {}
    for kind, edges in genotype.cells.items():
        alphas[kind] = torch.zeros(len(candidates), len(ops))
        for edge in edges:
            row = candidates.index((edge.source, edge.target))
            alphas[kind][row, ops.index(edge.op)] = margin
    return alphas


class StackedSpace(SpaceShape):
    """Networks that stack cells, of a first width.

    Attributes:
        channels: Of the supernet's first cells.
        num_cells: Of the supernet, or of each of its stages.
    """

    channels: int
    num_cells: int

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        super().__post_init__()
        self.check_sizes("channels", "num_cells")


class CellGraphSpace(StackedSpace):
    """The way from alphas to a genotype of spaces with a normal and a reduction cell.

    Attributes:
        name: The name users choose the space by.
        ops: Names of the ops on every edge; the first is ``none``.
        nodes: The nodes of a cell that are no inputs.
        channels: Of the supernet's first cells.
        num_cells: Cells of the supernet.
    """

    ops: ClassVar[tuple[str, ...]]
    nodes: ClassVar[range]

    @property
    def cell_kinds(self) -> dict[str, int]:
        """Number of edges per kind of cell."""
        return dict.fromkeys(("normal", "reduction"), len(candidate_edges(self.nodes)))

    def derive(self, alphas: Mapping[str, Tensor]) -> Genotype:
        """Return the genotype of the strongest edges (Liu et al. 2019, section 2.4).

        Every node keeps the two incoming edges whose best op other than ``none`` has the largest
        softmax weight, each with that op. Ties go to the lowest op and the lowest source.
        Deviation: if none of these ops has weights, the edge on which it costs the least
        log-probability takes its strongest op that has (``degenerate.nearest_trained``).

        Raises:
            ValueError: If kinds or shapes are wrong or an alpha is not finite.
        """
        check_alphas(alphas, num_edges=self.cell_kinds, num_ops=len(self.ops))
        cells = {
            kind: strongest_edges(alphas[kind], ops=self.ops, nodes=self.nodes)
            for kind in self.cell_kinds
        }
        genotype = Genotype(space=self.name, cells=cells)
        return self._nearest(genotype, alphas) if self.is_degenerate(genotype) else genotype

    def random_genotype(self, generator: torch.Generator) -> Genotype:
        """Return a uniform genotype that is not degenerate.

        That is two distinct sources per node and any op but ``none`` on each, drawn anew while no
        op has weights.
        """

        def draw() -> Genotype:
            cells = {
                kind: random_edges(generator, ops=self.ops, nodes=self.nodes)
                for kind in self.cell_kinds
            }
            return Genotype(space=self.name, cells=cells)

        return first_trained(draw, self.is_degenerate)

    def is_degenerate(self, genotype: Genotype) -> bool:
        """Return whether no op of any cell has weights; every op lies on a route."""
        cells = genotype.cells.values()
        return not any(has_weights(edges, outputs=self.nodes) for edges in cells)

    def check(self, genotype: Genotype) -> None:
        """Raise ConfigError unless the genotype has the form that :meth:`derive` returns."""
        check_cells(genotype, space=self.name, kinds=self.cell_kinds)
        for kind, edges in genotype.cells.items():
            check_edges(edges, kind=kind, ops=self.ops, nodes=self.nodes)

    def _nearest(self, genotype: Genotype, alphas: Mapping[str, Tensor]) -> Genotype:
        """Return the genotype with the op of one edge changed to one that has weights."""
        kept = [(kind, edge) for kind in self.cell_kinds for edge in genotype.cells[kind]]
        candidates = candidate_edges(self.nodes)
        path = nearest_trained(
            [alphas[k].detach().tolist()[candidates.index((e.source, e.target))] for k, e in kept],
            [self.ops.index(edge.op) for _, edge in kept],
            ops=self.ops,
            routes=[[index] for index in range(len(kept))],
        )
        cells: dict[str, tuple[Edge, ...]] = dict.fromkeys(self.cell_kinds, ())
        for (kind, edge), op in zip(kept, path, strict=True):
            cells[kind] += (replace(edge, op=self.ops[op]),)
        return Genotype(space=self.name, cells=cells)


class WholeGraphSpace(SpaceShape):
    """The way from alphas to a genotype of spaces with one kind of cell, all of whose edges stay.

    Each edge has one op, which may be ``none``.

    Attributes:
        name: The name users choose the space by.
        ops: Names of the ops on every edge.
        nodes: The nodes of the cell that are no inputs.
        outputs: The nodes that the cell's output is made of.
    """

    ops: ClassVar[tuple[str, ...]]
    nodes: ClassVar[range]
    outputs: ClassVar[range]

    @property
    def cell_kinds(self) -> dict[str, int]:
        """Number of edges per kind of cell."""
        return {CELL: len(candidate_edges(self.nodes))}

    def derive(self, alphas: Mapping[str, Tensor]) -> Genotype:
        """Return the genotype with the op of the largest alpha on every edge, ``none`` included.

        Ties go to the lowest op. Where these ops are degenerate, the most likely ops that are not
        take their place (``degenerate.nearest_trained``).

        Raises:
            ValueError: If kinds or shapes are wrong or an alpha is not finite.
        """
        num_ops = len(self.ops)
        check_alphas(alphas, num_edges=self.cell_kinds, num_ops=num_ops)
        rows = alphas[CELL].detach().tolist()
        # max() keeps the first of equals, which torch.argmax does not promise.
        path = [max(range(num_ops), key=row.__getitem__) for row in rows]
        genotype = self.genotype(path)
        if not self.is_degenerate(genotype):
            return genotype
        ways = routes(candidate_edges(self.nodes), outputs=self.outputs)
        return self.genotype(nearest_trained(rows, path, ops=self.ops, routes=ways))

    def random_genotype(self, generator: torch.Generator) -> Genotype:
        """Return one of all cells that are not degenerate, each with the same probability."""
        shape = (len(candidate_edges(self.nodes)),)

        def draw() -> Genotype:
            return self.genotype(torch.randint(len(self.ops), shape, generator=generator).tolist())

        return first_trained(draw, self.is_degenerate)

    @classmethod
    def is_degenerate(cls, genotype: Genotype) -> bool:
        """Return whether no op with weights lies on a route from the input to the output."""
        return not has_weights(genotype.cells[CELL], outputs=cls.outputs)

    @classmethod
    def genotype(cls, path: Iterable[int]) -> Genotype:
        """Return the genotype with these ops, given by column, on the edges."""
        pairs = zip(path, candidate_edges(cls.nodes), strict=True)
        edges = tuple(Edge(cls.ops[op], *edge) for op, edge in pairs)
        return Genotype(space=cls.name, cells={CELL: edges})

    def check(self, genotype: Genotype) -> None:
        """Raise ConfigError unless the genotype has one op on each edge, in order."""
        check_cells(genotype, space=self.name, kinds=self.cell_kinds)
        edges = genotype.cells[CELL]
        for edge in edges:
            check_op(edge, kind=CELL, ops=self.ops)
        pairs = tuple((edge.source, edge.target) for edge in edges)
        if pairs != candidate_edges(self.nodes):
            raise ConfigError(
                f"cell {CELL!r}: the edges {arrows(candidate_edges(self.nodes))} are needed "
                f"in this order; got {arrows(pairs)}."
            )
