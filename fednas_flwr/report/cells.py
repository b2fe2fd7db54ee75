"""Cells of a genotype as SVG pictures, drawn without system programs, and how decided they are.

`cell_svg` lays the graph out from left to right in layers (Sugiyama, Tagawa and Toda 1981): nodes
stand in even columns by their longest path from the inputs, the op of every edge is a label in the
column before the edge's target, and an edge that passes a column gets a slot of its own there, so
that no line runs through a label. Crossings are reduced by barycenter sweeps; heights follow the
neighbours, with a least distance kept exactly. Colours are CSS variables with defaults for light
paper (``--cell-line``, ``--cell-node``, ...), so that a page can recolour the picture.

`derived_edges` tells the margin between each edge's op and the next one: a cell is derived from the
largest alphas, also where they hardly differ. An edge is decided if the lead of its op, in alphas
and so in log-odds, is larger than what it moves by from round to round, and than the differences
that a search which has hardly begun makes by chance.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup

from fednas_flwr.report import templates
from fednas_flwr.report.plots import edge_labels, node_name
from fednas_flwr.report.templates import DASH
from fednas_flwr.runs.events import Event

STARTS, SWEEPS = 8, 8
HEIGHT = {"node": 34.0, "label": 24.0, "pass": 6.0}
PADDING, MARGIN, GAP = 10.0, 6.0, 34.0
CHARACTER_WIDTH = 6.9
OP_COLOURS = (  # the first part found in the op's name decides
    ("none", "#8a8f98"),
    ("skip", "#2e8b57"),
    ("pool", "#c47f17"),
    ("dil_", "#8250c4"),
    ("", "#2f6fd0"),
)


@dataclass(frozen=True)
class _Box:
    """Something with a place in a column: a node, an edge's label, or an edge passing by."""

    kind: str
    column: int
    text: str = ""
    width: float = 0.0


@dataclass(frozen=True)
class _Wire:
    """An edge of the cell as the boxes it runs through."""

    boxes: tuple[int, ...]
    op: str


def cell_svg(edges: Sequence[Mapping[str, Any]], *, title: str) -> tuple[Markup, float]:
    """Return a cell as one ``<svg>`` element, and its width.

    A cell with two inputs follows DARTS: its output is the concatenation of all inner nodes, which
    is drawn as a node of its own. A cell with one input ends in its last node. Edges with the op
    ``none`` are dashed.

    Args:
        edges: ``{"op", "source", "target"}`` as a genotype stores them; sources come before
            targets, at least one edge.
        title: The picture's name for screen readers.

    Raises:
        ValueError: There is no edge.
    """
    if not edges:
        raise ValueError("a cell without edges cannot be drawn")
    boxes, wires = _graph(edges)
    columns = _order(boxes, wires)
    y = _heights(boxes, wires, columns)
    x, width = _widths(boxes, columns)
    picture = templates.render(
        "cell.svg.j2",
        title=title,
        width=width,
        height=max(y[i] + HEIGHT[box.kind] / 2 for i, box in enumerate(boxes)) + MARGIN,
        wires=[_drawn(wire, boxes, x, y) for wire in wires],
        boxes=[(box, sum(x[box.column]) / 2, y[i]) for i, box in enumerate(boxes)],
        heights=HEIGHT,
        op_colour=op_colour,
    )
    return Markup(picture), width


def op_colour(op: str) -> str:
    """Return the colour of an op's family: none, skip, pooling, dilated, other."""
    return next(colour for part, colour in OP_COLOURS if part in op)


def _graph(edges: Sequence[Mapping[str, Any]]) -> tuple[list[_Box], list[_Wire]]:
    """Return all boxes and the wires between them; nodes come first, by their number."""
    last = max(edge["target"] for edge in edges)
    depth = [0] * (last + 1)
    for edge in sorted(edges, key=lambda edge: int(edge["source"])):
        depth[edge["target"]] = max(depth[edge["target"]], depth[edge["source"]] + 1)
    inputs = [node for node in range(last + 1) if depth[node] == 0]
    joined = len(inputs) == 2
    names = [node_name(node, len(inputs), last) for node in range(last + 1)]
    if joined:
        names.append("c(k)")
        depth.append(max(depth) + 1)
    boxes = [
        _Box("node", 2 * level, name, max(HEIGHT["node"], 14 + CHARACTER_WIDTH * len(name)))
        for name, level in zip(names, depth, strict=True)
    ]
    wires = []
    for edge in edges:
        source, target, op = edge["source"], edge["target"], str(edge["op"])
        wire = [source, *_passes(boxes, 2 * depth[source] + 1, 2 * depth[target] - 1)]
        boxes.append(_Box("label", 2 * depth[target] - 1, op, 16 + CHARACTER_WIDTH * len(op)))
        wires.append(_Wire((*wire, len(boxes) - 1, target), op))
    for node in range(2, last + 1) if joined else ():
        passes = _passes(boxes, 2 * depth[node] + 1, 2 * depth[-1])
        wires.append(_Wire((node, *passes, last + 1), ""))
    return boxes, wires


def _passes(boxes: list[_Box], start: int, stop: int) -> list[int]:
    """Add one passing box per column and return their indices."""
    first = len(boxes)
    boxes.extend(_Box("pass", column) for column in range(start, stop))
    return list(range(first, len(boxes)))


def _order(boxes: list[_Box], wires: list[_Wire]) -> list[list[int]]:
    """Return the boxes of each column from top to bottom, with few crossings."""
    columns: list[list[int]] = [[] for _ in range(max(box.column for box in boxes) + 1)]
    for index, box in enumerate(boxes):
        columns[box.column].append(index)
    left, right = _neighbours(wires)
    best, fewest = columns, _crossings(columns, right)
    shuffle = random.Random(0).shuffle
    for start in range(STARTS):
        trial = [list(column) for column in columns]
        for column in trial if start else ():
            shuffle(column)
        for sweep in range(SWEEPS):
            forward = sweep % 2 == 0
            for column in trial if forward else trial[::-1]:
                _sort_by_neighbours(column, left if forward else right, trial, boxes)
            crossings = _crossings(trial, right)
            if crossings < fewest:
                best, fewest = [list(column) for column in trial], crossings
    return best


def _neighbours(wires: list[_Wire]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    left: dict[int, list[int]] = defaultdict(list)
    right: dict[int, list[int]] = defaultdict(list)
    for wire in wires:
        for a, b in pairwise(wire.boxes):
            left[b].append(a)
            right[a].append(b)
    return left, right


def _sort_by_neighbours(
    column: list[int],
    neighbours: dict[int, list[int]],
    columns: list[list[int]],
    boxes: list[_Box],
) -> None:
    """Sort a column by the mean place of each box's neighbours; a box without any stays put."""
    place = {
        other: rank / len(columns[boxes[other].column])
        for index in column
        for other in neighbours[index]
        for rank in [columns[boxes[other].column].index(other)]
    }
    own = {index: rank / len(column) for rank, index in enumerate(column)}
    means = {
        index: fmean(place[other] for other in neighbours[index])
        if neighbours[index]
        else own[index]
        for index in column
    }
    column.sort(key=lambda index: means[index])


def _crossings(columns: list[list[int]], right: dict[int, list[int]]) -> int:
    total = 0
    for here, there in pairwise(columns):
        rank = {index: place for place, index in enumerate(there)}
        ends = [(a, rank[other]) for a, index in enumerate(here) for other in right[index]]
        total += sum((a - c) * (b - d) < 0 for (a, b), (c, d) in combinations(ends, 2))
    return total


def _heights(boxes: list[_Box], wires: list[_Wire], columns: list[list[int]]) -> list[float]:
    """Return every box's centre: near its neighbours' mean, columns never overlapping."""
    left, right = _neighbours(wires)
    y = [0.0] * len(boxes)
    for sweep in range(24):
        for column in columns if sweep % 2 == 0 else columns[::-1]:
            wanted = []
            for index in column:
                # A straight passing edge reads best, so its neighbours pull harder at it.
                near = [*left[index], *right[index]]
                pull = [5.0 if "pass" in (boxes[i].kind, boxes[index].kind) else 1.0 for i in near]
                total = sum(w * y[i] for w, i in zip(pull, near, strict=True))
                wanted.append(total / sum(pull) if near else y[index])
            sizes = [HEIGHT[boxes[index].kind] for index in column]
            for index, value in zip(column, _spread(wanted, sizes), strict=True):
                y[index] = value
    top = min(y[i] - HEIGHT[box.kind] / 2 for i, box in enumerate(boxes)) - MARGIN
    return [value - top for value in y]


def _spread(wanted: list[float], sizes: list[float]) -> list[float]:
    """Return the places nearest to the wanted ones in least squares, in order and apart.

    With the least distances subtracted this is isotonic regression (pool adjacent violators).
    """
    offsets = [0.0]
    for a, b in pairwise(sizes):
        offsets.append(offsets[-1] + (a + b) / 2 + PADDING)
    blocks: list[list[float]] = []
    for value, offset in zip(wanted, offsets, strict=True):
        blocks.append([value - offset])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    flat = [fmean(block) for block in blocks for _ in block]
    return [value + offset for value, offset in zip(flat, offsets, strict=True)]


def _widths(boxes: list[_Box], columns: list[list[int]]) -> tuple[list[tuple[float, float]], float]:
    """Return left and right end of every column, and the picture's width."""
    ends, at = [], MARGIN
    for column in columns:
        width = max(boxes[index].width for index in column)
        ends.append((at, at + width))
        at += width + GAP
    return ends, at - GAP + MARGIN


def _drawn(
    wire: _Wire, boxes: list[_Box], x: list[tuple[float, float]], y: list[float]
) -> dict[str, str]:
    """Return a wire's op, its curves, bent between columns and straight inside, and its arrow."""
    path, pen = "", 0.0
    for position, index in enumerate(wire.boxes):
        box = boxes[index]
        start, end = x[box.column]
        if box.kind != "pass":
            middle = (start + end) / 2
            start, end = middle - box.width / 2, middle + box.width / 2
        if position == 0:
            path = f"M{end:.1f},{y[index]:.1f}"
        else:
            bend = (pen + start) / 2
            before = y[wire.boxes[position - 1]]
            path += f"C{bend:.1f},{before:.1f} {bend:.1f},{y[index]:.1f} {start:.1f},{y[index]:.1f}"
            path += f"H{end:.1f}" if box.kind == "pass" else f"M{end:.1f},{y[index]:.1f}"
        pen = end
    target = wire.boxes[-1]
    tip = sum(x[boxes[target].column]) / 2 - boxes[target].width / 2
    return {"op": wire.op, "path": path, "arrow": f"M{tip:.1f},{y[target]:.1f}l-7,-4v8z"}


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
