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
from fednas_flwr.report.plots import edge_labels, node_name
from fednas_flwr.report.templates import DASH
from fednas_flwr.runs.events import Event

CHARACTER_WIDTH = 6.9
OP_COLOURS = (  # the first part found in the op's name decides
    ("none", "#8a8f98"),
    ("skip", "#2e8b57"),
    ("pool", "#a8650a"),
    ("dil_", "#8250c4"),
    ("", "#2f6fd0"),
)


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
            (45 + gap * source, 45 + gap * target, 64 + 30 * row, op, op_colour(op))
            for (source, target, op), row in zip(arrows, rows, strict=True)
        ],
        character=CHARACTER_WIDTH,
    )
    return Markup(picture), width


def op_colour(op: str) -> str:
    """Return the colour of an op's family: none, skip, pooling, dilated, other."""
    return next(colour for part, colour in OP_COLOURS if part in op)


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
    if not last:
        return []
    newest = last[-1]
    found = []
    for kind, kept in newest["cells"].items():
        num_rows = len(newest["alphas"][kind])
        columns = [
            column
            for column, op in enumerate(newest["ops"])
            if op != "none" or len(kept) == num_rows
        ]
        for edge, (row, label) in zip(kept, _places(kept, num_rows), strict=True):
            rows = [event["alphas"][kind][row] for event in last]
            found.append(_edge(kind, label, str(edge["op"]), newest["ops"], rows, columns))
    return found


def decided_text(found: Sequence[Edge]) -> str:
    """Return the number of decided edges as text, a dash without edges."""
    return f"{sum(edge.is_decided for edge in found)} of {len(found)}" if found else DASH


def _places(kept: Sequence[Mapping[str, Any]], num_rows: int) -> list[tuple[int, str]]:
    """Return for each kept edge its row of the alphas and its name."""
    if len(kept) == num_rows:
        last = max((edge["target"] for edge in kept), default=0)
        named = [(node_name(e["source"], 1, last), node_name(e["target"], 1, last)) for e in kept]
        return [(row, f"{source} → {target}") for row, (source, target) in enumerate(named)]
    labels, inputs = edge_labels(num_rows), 2
    pairs = [
        (source, target) for target in range(inputs, num_rows + inputs) for source in range(target)
    ]
    rows = [pairs.index((edge["source"], edge["target"])) for edge in kept]
    return [(row, labels[row]) for row in rows]


def _edge(
    kind: str,
    label: str,
    op: str,
    ops: Sequence[str],
    rows: Sequence[Sequence[float]],
    columns: Sequence[int],
) -> Edge:
    """Return an edge from its alphas in each snapshot; ``columns`` are of ops it could have."""
    first = ops.index(op)
    second = max((column for column in columns if column != first), key=rows[-1].__getitem__)
    leads = [row[first] - row[second] for row in rows]
    spread = stdev(leads) if len(leads) > 1 else None
    return Edge(kind, label, op, ops[second], leads[-1], spread)
