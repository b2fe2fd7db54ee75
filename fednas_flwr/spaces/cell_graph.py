"""Cells as graphs: their edges, and degenerate architectures, in which nothing can be trained.

The first nodes of a cell are its inputs; every later node has edges from nodes before it.

An op affects the logits only if it is on a route from a cell's input to its output on which no op
is ``none``. A genotype is degenerate unless such an op has weights. In a degenerate one either no
route is left, and the logits do not depend on the example, or only skip connections and pools are
left, which is how a differentiable search collapses (Zela et al. 2020, arXiv 1909.09656). A space
neither derives nor draws degenerate genotypes.
"""

import math
from collections.abc import Iterable, Sequence

import torch

from fednas_flwr.settings.registry import TABLES
from fednas_flwr.spaces.genotype import Edge

NOTHING = frozenset({"none"})
# For all spaces. DARTS' skip connection is an identity except where a reduction cell halves the
# image. There it has weights, but these do not show that a search has chosen something to train.
WEIGHTLESS = NOTHING | {"zero", "skip_connect", "max_pool_3x3", "avg_pool_3x3"}


def candidate_edges(nodes: range) -> tuple[tuple[int, int], ...]:
    """List (source, target) of every edge into ``nodes``, by target, then by source.

    Example:
        >>> candidate_edges(range(2, 4))
        ((0, 2), (1, 2), (0, 3), (1, 3), (2, 3))
    """
    return tuple((source, target) for target in nodes for source in range(target))


def is_weightless(op: str) -> bool:
    """Return True if an op, given by name, has no weights; a user's own is built once to check.

    Example:
        >>> is_weightless("skip_connect"), is_weightless("sep_conv_3x3")
        (True, False)
    """
    entry = TABLES["op"].get(op)
    return op in WEIGHTLESS or (entry is not None and not entry.has_weights)


def has_weights(edges: Sequence[Edge], *, outputs: Iterable[int]) -> bool:
    """Return True if an op with weights is on a route to the output.

    Args:
        edges: Edges of one cell, ordered by target; its inputs are the nodes that no edge enters.
        outputs: The nodes of which the cell's output consists.

    Example:
        >>> edges = Edge("skip_connect", 0, 1), Edge("nor_conv_3x3", 0, 2), Edge("none", 1, 2)
        >>> has_weights(edges, outputs=[2]), has_weights(edges, outputs=[1])
        (True, False)
    """
    wired = [edge for edge in edges if edge.op not in NOTHING]
    reached = {edge.source for edge in edges} - {edge.target for edge in edges}
    for edge in wired:
        if edge.source in reached:
            reached.add(edge.target)
    read = set(outputs)
    for edge in reversed(wired):
        if edge.target in read:
            read.add(edge.source)
    return any(
        not is_weightless(edge.op) and edge.source in reached and edge.target in read
        for edge in wired
    )


def routes(pairs: Sequence[tuple[int, int]], *, outputs: Iterable[int]) -> list[list[int]]:
    """List all routes from node 0 to the outputs, each as the positions of its edges.

    Args:
        pairs: (source, target) of every edge of a cell whose input is node 0.
        outputs: The nodes of which the cell's output consists.

    Example:
        >>> routes([(0, 1), (0, 2), (1, 2)], outputs=[2])
        [[1], [0, 2]]
    """

    def ways(target: int) -> list[list[int]]:
        if target == 0:
            return [[]]
        entering = [(index, source) for index, (source, node) in enumerate(pairs) if node == target]
        return [[*way, index] for index, source in entering for way in ways(source)]

    return [way for output in outputs for way in ways(output)]


def nearest_trained(
    alphas_EO: Sequence[Sequence[float]],
    path: Sequence[int],
    *,
    ops: Sequence[str],
    routes: Iterable[Sequence[int]],
) -> list[int]:
    """Find the most likely ops of a genotype that is not degenerate, ``argmax sum_e log p_e(o_e)``.

    Here ``p_e = softmax(alphas_e)``. A genotype is not degenerate if there are a route and an edge
    t on it such that t's op has weights and no op of the route is ``none``. The likeliest ops under
    this condition are therefore compared for every such pair. Ties go to the first route, edge and
    op.

    Args:
        alphas_EO: One row per edge; ``-inf`` for an op that an edge does not offer.
        path: For every edge the column of its likeliest op, which edges outside the route keep.
        ops: Names of the columns.
        routes: Every route from the input to the output, as positions of edges.

    Returns:
        A column for every edge.
    """
    wired = [column for column, op in enumerate(ops) if op not in NOTHING]
    trained = [column for column, op in enumerate(ops) if not is_weightless(op)]
    log_probs_EO = torch.tensor(alphas_EO, dtype=torch.float64).log_softmax(dim=-1).tolist()
    least, nearest = math.inf, list(path)
    for route in routes:
        for chosen in route:
            changed, loss = list(path), 0.0
            for edge in route:
                log_probs_O = log_probs_EO[edge]
                columns = trained if edge == chosen else wired
                changed[edge] = max(columns, key=log_probs_O.__getitem__)
                loss += log_probs_O[path[edge]] - log_probs_O[changed[edge]]
            if loss < least:
                least, nearest = loss, changed
    return nearest
