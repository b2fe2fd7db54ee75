"""Cells of a genotype as SVG pictures, drawn without system programs, and how decided they are.

`cell_svg` draws a cell as a score: nodes are columns from left to right, and each edge is an arrow
from its source's column to its target's, with its op on it, in a row that no other edge there has;
so no line crosses a label, and nothing has to be laid out. Colours are CSS variables with defaults
for light paper (``--cell-line``, ``--cell-node``, ...), so that a page can recolour the picture.

`derived_edges` tells the margin between each edge's op and the next one: a cell is derived from the
largest alphas, also where they hardly differ. An edge is decided if the lead of its op, in alphas
and so in log-odds, is larger than what it moves by from round to round, and than the differences
that a search which has hardly begun makes by chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from markupsafe import Markup

from fednas_flwr.report import templates
from fednas_flwr.report.templates import DASH
from fednas_flwr.runs.events import Event

CHARACTER_WIDTH = 6.9


def cell_svg(edges: Sequence[Mapping[str, Any]], *, title: str) -> tuple[Markup, float]:
    """Return a cell as one ``<svg>`` element, and its width.

    A cell with two inputs follows DARTS: its output is the concatenation of all inner nodes, a
    column of its own. A cell with one input ends in its last node. Edges with the op ``none`` are
    dashed.

    Args:
        edges: ``{"op", "source", "target"}`` as a genotype stores them; sources come before
            targets, at least one edge.
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


LAST_ROUNDS = 5  # snapshots of the alphas that the spread is taken over
SPREADS = 2.0  # that a lead must exceed
LEAST_LEAD = 0.05  # in odds 5 %: alphas that have hardly left where they began decide nothing


@dataclass(frozen=True)
class Edge:
    """An edge of a derived cell.

    Attributes:
        kind: Of the cell.
        label: The edge's name.
        op: What was derived.
        next_op: The op with the largest alpha of the others that could have been.
        lead: The alpha of ``op`` minus that of ``next_op``, after the last round; below 0 where the
            space has not taken the largest.
        spread: Standard deviation (n - 1) of that difference over the last ``LAST_ROUNDS``
            snapshots; None for a single one.
    """

    kind: str
    label: str
    op: str
    next_op: str
    lead: float
    spread: float | None

    @property
    def is_decided(self) -> bool:
        """True if the lead is more than ``SPREADS`` spreads and ``LEAST_LEAD``."""
        return self.spread is not None and self.lead > max(SPREADS * self.spread, LEAST_LEAD)


def derived_edges(snapshots: Sequence[Event]) -> list[Edge]:
    """Return the edges of the cells that the last of a run's alphas stand for.

    A cell that keeps some of its candidate edges only never keeps an edge as ``none`` (DARTS), so
    there ``none`` is not a next op.

    Args:
        snapshots: ``alphas`` events by ascending round. There are no edges without any.
    """
    last = snapshots[-LAST_ROUNDS:]
    found = []
    for kind, kept in last[-1]["cells"].items() if last else ():
        ops, num_rows = last[-1]["ops"], len(last[-1]["alphas"][kind])
        possible = [i for i, op in enumerate(ops) if op != "none" or len(kept) == num_rows]
        for edge, (row, label) in zip(kept, _places(kept, num_rows), strict=True):
            rows, first = [event["alphas"][kind][row] for event in last], ops.index(edge["op"])
            second = max((i for i in possible if i != first), key=rows[-1].__getitem__)
            leads = [row[first] - row[second] for row in rows]
            spread = stdev(leads) if len(leads) > 1 else None
            found.append(Edge(kind, label, edge["op"], ops[second], leads[-1], spread))
    return found


def decided_text(found: Sequence[Edge]) -> str:
    """Return the number of decided edges as text, a dash without edges."""
    return f"{sum(edge.is_decided for edge in found)} of {len(found)}" if found else DASH


def _places(kept: Sequence[Mapping[str, Any]], num_rows: int) -> list[tuple[int, str]]:
    """Return for each kept edge its row of the alphas and its name."""
    if len(kept) == num_rows:
        last = max((edge["target"] for edge in kept), default=0)
        return [(i, edge_name(e["source"], e["target"], 1, last)) for i, e in enumerate(kept)]
    labels, pairs = edge_labels(num_rows), _pairs(num_rows, 2)
    rows = [pairs.index((edge["source"], edge["target"])) for edge in kept]
    return [(row, labels[row]) for row in rows]


def edge_labels(num_edges: int) -> list[str]:
    """Return the names of a cell's edges, at least one, ordered by target, then by source.

    The number tells the kind of cell: every node reads all before it, and 2 + 3 + 4 + ... edges
    mean two inputs (DARTS), 1 + 2 + 3 + ... one input (NAS-Bench-201).

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
    """Return an edge's name by those of its nodes."""
    return f"{node_name(source, inputs, last)} → {node_name(target, inputs, last)}"


def node_name(index: int, inputs: int, last: int) -> str:
    """Return a node's name as the picture of the cell has it."""
    if inputs == 1:
        return {0: "input", last: "output"}.get(index, str(index))
    return ("c(k−2)", "c(k−1)")[index] if index < 2 else str(index - 2)


def _pairs(num_edges: int, inputs: int) -> list[tuple[int, int]]:
    """Return source and target of the edges of a cell whose nodes read all before them."""
    targets = range(inputs, num_edges + inputs)
    return [(source, target) for target in targets for source in range(target)][:num_edges]
