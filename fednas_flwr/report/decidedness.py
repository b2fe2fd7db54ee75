"""Decidedness of a search's cells: the margin between each edge's op and the next one.

A cell is derived from the largest alphas, also where they hardly differ. An edge is decided if the
lead of its op, in alphas and so in log-odds, is larger than what it moves by from round to round,
and than the differences that a search which has hardly begun makes by chance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import stdev
from typing import Any

from fednas_flwr.report.plots import edge_labels, node_name
from fednas_flwr.report.quantities import DASH
from fednas_flwr.runs.events import Event

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


def edges(snapshots: Sequence[Event]) -> list[Edge]:
    """Return the edges of the cells that the last of a run's alphas stand for.

    A cell that keeps some of its candidate edges only never keeps an edge as ``none`` (DARTS), so
    there ``none`` is not a next op.

    Args:
        snapshots: ``alphas`` events by ascending round. There are no edges without any, or where
            they have no ``cells``, which old runs have not written.
    """
    last = snapshots[-LAST_ROUNDS:]
    if not last or not all("cells" in event for event in last):
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


def share(found: Sequence[Edge]) -> str:
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
