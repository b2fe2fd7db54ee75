"""The graph of a DARTS cell: which edges a search keeps, and which edges a genotype may have.

Liu et al. (2019), arXiv 1806.09055. The first nodes of a cell are its inputs; every later node has
candidate edges from all nodes before it, of which a discrete cell keeps two, each with one op.
Shared by the spaces whose cells are such graphs: ``darts`` and ``mlp``.

Tensor suffixes: E edges, O ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fednas_flwr.errors import ConfigError
from fednas_flwr.search_spaces.genotype import Edge
from fednas_flwr.search_spaces.space import check_op

KEPT = 2  # edges into a node


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
        found = ", ".join(f"{edge.source} -> {edge.target}" for edge in edges)
        raise ConfigError(
            f"cell {kind!r}: each of the nodes {nodes[0]} to {nodes[-1]} needs two edges from "
            f"different earlier nodes, ordered by target, then source; got {found or 'no edges'}."
        )
