"""Cells of a genotype as SVG pictures, drawn without system programs, and names of their edges.

`cell_svg` draws a cell like a musical score: nodes are columns from left to right. Each edge is an
arrow from its source's column to its target's, labelled with its op, in a row that no other edge
there uses, so that no line crosses a label and no layout is needed. Colours are CSS variables with
defaults for light paper (``--cell-line``, ``--cell-node``, ...), so that a page can change them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from fednas_flwr.report import templates

CHARACTER_WIDTH = 6.9


def cell_svg(edges: Sequence[Mapping[str, Any]], *, title: str) -> tuple[Markup, float]:
    """Return a cell as one ``<svg>`` element, and its width.

    A cell with two inputs follows DARTS: its output, the concatenation of all inner nodes, is a
    column of its own. A cell with one input ends in its last node. Edges with the op ``none`` are
    dashed.

    Args:
        edges: ``{"op", "source", "target"}`` as a genotype stores them, at least one edge; sources
            come before targets.
        title: The picture's name for screen readers.

    Raises:
        ValueError: There is no edge.
    """
    if not edges:
        raise ValueError("a cell without edges cannot be drawn")
    last = max(edge["target"] for edge in edges)
    targets = {edge["target"] for edge in edges}
    inputs = sum(node not in targets for node in range(last + 1))
    names = [node_name(node, inputs, last) for node in range(last + 1)]
    arrows = [(edge["source"], edge["target"], str(edge["op"])) for edge in edges]
    if inputs == 2:
        names.append("c(k)")
        arrows += [(node, last + 1, "") for node in range(2, last + 1)]
    rows: list[int] = []
    taken: list[list[tuple[int, int]]] = []
    for source, target, _ in arrows:
        free = (i for i, row in enumerate(taken) if all(target <= a or b <= source for a, b in row))
        row = next(free, len(taken))
        taken += [[]] if row == len(taken) else []
        taken[row].append((source, target))
        rows.append(row)
    gap = 60 + CHARACTER_WIDTH * max(len(op) for _, _, op in arrows)
    width = gap * len(names) - gap + 90
    picture = templates.render(
        "cell.svg.j2",
        title=title,
        width=width,
        height=58 + 30 * len(taken),
        nodes=[(45 + gap * place, name) for place, name in enumerate(names)],
        arrows=[
            (45 + gap * source, 45 + gap * target, 64 + 30 * row, op)
            for (source, target, op), row in zip(arrows, rows, strict=True)
        ],
        character=CHARACTER_WIDTH,
    )
    return Markup(picture), width


def kept_labels(kept: Sequence[Mapping[str, Any]], num_edges: int) -> list[str]:
    """Return the name of each edge that a cell keeps, out of ``num_edges`` candidates."""
    if len(kept) == num_edges:
        last = max((edge["target"] for edge in kept), default=0)
        return [edge_name(edge["source"], edge["target"], 1, last) for edge in kept]
    labels, pairs = edge_labels(num_edges), _pairs(num_edges, 2)
    return [labels[pairs.index((edge["source"], edge["target"]))] for edge in kept]


def edge_labels(num_edges: int) -> list[str]:
    """Return the names of a cell's edges, at least one, ordered by target, then by source.

    The number of edges shows the kind of cell, since every node reads all nodes before it:
    2 + 3 + 4 + ... edges mean two inputs (DARTS), 1 + 2 + 3 + ... one input (NAS-Bench-201).

    Example:
        >>> edge_labels(3)
        ['input → 1', 'input → output', '1 → output']
    """
    for inputs in (2, 1):
        pairs = _pairs(num_edges, inputs)
        source, last = pairs[-1]
        if source == last - 1:
            return [edge_name(a, b, inputs, last) for a, b in pairs]
    return [f"edge {edge}" for edge in range(num_edges)]


def edge_name(source: int, target: int, inputs: int, last: int) -> str:
    """Return an edge's name, made of its nodes' names."""
    return f"{node_name(source, inputs, last)} → {node_name(target, inputs, last)}"


def node_name(index: int, inputs: int, last: int) -> str:
    """Return a node's name in the picture of the cell."""
    if inputs == 1:
        return {0: "input", last: "output"}.get(index, str(index))
    return ("c(k−2)", "c(k−1)")[index] if index < 2 else str(index - 2)


def _pairs(num_edges: int, inputs: int) -> list[tuple[int, int]]:
    """Return source and target of the edges of a cell whose nodes read all before them."""
    targets = range(inputs, num_edges + inputs)
    return [(source, target) for target in targets for source in range(target)][:num_edges]
