"""The report's figures as plain dictionaries for plotly.js, which the page draws.

Each function returns a figure ``{"data": [...], "layout": {...}}``, or None if the run has nothing
to show; :func:`all_figures` returns those of a run by name. The report's script adds what depends
on the reader's screen: fonts, colours of the light or dark page, and the numbers inside the
partition's picture if there is room for them.

:func:`cell_svg` draws a cell as SVG, without system programs, like a musical score: nodes are
columns from left to right. Each edge is an arrow from its source's column to its target's, labelled
with its op, in a row that no other edge there uses, so that no line crosses a label and no layout
is needed. Colours are CSS variables with defaults for light paper (``--cell-line``,
``--cell-node``, ...), so that a page can change them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import Any

from markupsafe import Markup

from fednas_flwr.base.shares import wilson
from fednas_flwr.report.templates import as_date, as_unit, quantiles, render
from fednas_flwr.runs.events import Event, NamedClient
from fednas_flwr.runs.leaderboard import COSTS, compared
from fednas_flwr.runs.numbers import GUESSES, METRICS, Run, Unit, is_noised
from fednas_flwr.settings.names import MOST_SHOWN, QUANTILES

Figure = dict[str, Any]
Bar = tuple[str, float, Sequence[float] | None]  # name, value, and its interval if it has one

CATEGORIES: Figure = {"type": "category", "showgrid": False}  # an axis of names
DOWNWARDS = CATEGORIES | {"autorange": "reversed"}
PERCENT, FROM_ZERO = {"tickformat": ".0%"}, {"rangemode": "tozero"}
SHARES: Figure = PERCENT | {"range": [0, 1.02]}
SHARE: Figure = PERCENT | FROM_ZERO
LOG: Figure = {"type": "log", "dtick": 1, "exponentformat": "power"}
BLUE, ORANGE, GREEN, GREY = "#3b82f6", "#e8842c", "#2ea36b", "#8b98a9"
COLOURS = (BLUE, ORANGE, GREEN, "#9a5bd0", "#d64b6a", "#1d9fb0", "#a38a1c", GREY)
MOST_MARKERS = 60
MOST_GAPS = 40  # rows or columns of a heat map that are drawn with gaps
MOST_LABELS = 12  # points that have their names beside them
WIDE_RANGE = 100  # ratio of costs from which on their axis is logarithmic
LONGEST_NAME = 24
CHARACTER_WIDTH = 6.9  # in the picture of a cell
CHARTS: dict[str, tuple[str, str, Figure, tuple[str, ...]]] = {
    # heading, title of the axis, look of the axis, metrics
    "loss": ("Loss", "loss", {}, ("train_loss", "validation_loss")),
    "accuracy": ("Accuracy", "accuracy", PERCENT, ("train_accuracy", "validation_accuracy")),
    "closeness": (
        "Closeness: 1 - absolute error / range",
        "closeness",
        PERCENT,
        ("train_closeness", "validation_closeness"),
    ),
    "entropy": ("Entropy of the alphas", "nats per edge", FROM_ZERO, ("alpha_entropy",)),
    "lr": ("Learning rate chosen", "learning rate", LOG, ("lr", "alpha_lr")),
    "theta": ("Entropy of the configurations' distribution", "nats", {}, ("theta_entropy",)),
    "skip": ("Share of skip connections", "share", SHARE, ("skip_share",)),
}
PHASES: dict[str, tuple[str, str, Figure, tuple[str, ...]]] = {  # the same for FEATHERS
    "entropy_of_pi": ("Entropy of the bandit's distribution", "nats", FROM_ZERO, ("entropy",)),
    "kappa": ("Configurations tried per phase", "configurations", FROM_ZERO, ("kappa",)),
}
CURVES = {  # heading, titles of the axes
    "roc": ("ROC", "false positive rate", "true positive rate"),
    "precision_recall": ("Precision and recall", "recall", "precision"),
}


def all_figures(run: Run) -> dict[str, Figure]:
    """Return every figure of a run by name, without those that would be empty.

    The names of a stage's figures begin with its name; their heading is the layout's title.
    """
    growth = (run.privacy or {}).get("growth") or []
    epsilons = {"epsilon": [epsilon for _, epsilon in growth]}  # for the client that spends most
    found = {
        **stage_figures(run, "search"),
        **stage_figures(run, "retrain"),
        **{f"alphas_{kind}": figure for kind, figure in alphas(run).items()},
        **class_curves(run),
        **effects(run),
        "leaderboard": leaderboard(run),
        **leaderboard_fronts(run),
        "partition": partition(run.last("partition")),
        "clients": client_accuracy(run),
        "reliability": reliability(run),
        "predictions": predictions(run),
        "importance": importance(run),
        "epsilon": curves([number for number, _ in growth], epsilons, "epsilon", FROM_ZERO),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def stage_figures(run: Run, stage: str) -> dict[str, Figure | None]:
    """Return figures of the measurements in a stage's rounds and of its phases of exploration."""
    drawn: dict[str, Figure | None] = {}
    for charts, measured in (
        (CHARTS, {e["round"]: e["metrics"] for e in run.rounds(stage)}),
        (PHASES, {event["round"]: event for event in run.explored(stage)}),
    ):
        for key, (heading, title, look, metrics) in charts.items():
            noised = ", noised" if run.is_private and any(map(is_noised, metrics)) else ""
            series = {m.replace("_", " "): [of.get(m) for of in measured.values()] for m in metrics}
            figure = curves(list(measured), series, title, look)
            if figure is not None:
                figure["layout"]["title"] = {"text": heading + noised}
            drawn[f"{stage}_{key}"] = figure
    return drawn


def curves(
    rounds: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    title: str,
    look: Figure | None = None,
) -> Figure | None:
    """Return curves of numbers over two rounds or more; a round without the number is a gap.

    Args:
        rounds: Numbers of the rounds, ascending.
        series: The numbers of each legend entry.
        title: Title of the vertical axis.
        look: Settings by which that axis differs from others.
    """
    traces = [
        _line(rounds, values, name, colour)
        for (name, values), colour in zip(series.items(), COLOURS, strict=False)
        if sum(value is not None for value in values) > 1
    ]
    if not traces:
        return None
    return _figure(*traces, x="round", y=title, yaxis=look, showlegend=len(traces) > 1)


def bars(
    rows: Iterable[Bar],
    title: str,
    unit: Unit,
    *,
    colours: Sequence[str] = (),
    from_zero: bool = False,
) -> Figure:
    """Return horizontal bars with 95 % intervals.

    The axis begins a tenth below all intervals, so that the bars can be distinguished.

    Args:
        rows: The bars, from top to bottom.
        title: Title of the values.
        unit: Unit of the values.
        colours: Colours of the bars; by default all but the first have the same colour.
        from_zero: True if the axis begins at 0 or below, as for differences.
    """
    names, values, intervals = zip(*rows, strict=True)
    ends = [pair or (value, value) for value, pair in zip(values, intervals, strict=True)]
    low, high = min(map(min, ends)), max(map(max, ends))
    start = min(0.0, low) if from_zero or low < 0 else max(0.0, math.floor(10 * low - 0.5) / 10)
    end = max(1.0, high) if unit == "share" and high > 0.5 else high + 0.05 * (high - start)
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": _distinct(names),
        "x": values,
        "text": [as_unit(value, unit).replace("-", "−") for value in values],
        "error_x": {
            "array": [high - value for value, (_, high) in zip(values, ends, strict=True)],
            "arrayminus": [value - low for value, (low, _) in zip(values, ends, strict=True)],
        },
        "customdata": [f"{as_unit(a, unit)} to {as_unit(b, unit)}" for a, b in ends],
        "hovertemplate": "%{y}: %{text}, 95 % %{customdata}<extra></extra>",
        "marker": {"color": [*colours] or [BLUE, *[GREY] * (len(names) - 1)]},
    }
    look = {"range": [start, end], **(PERCENT if unit == "share" else {})}
    shown: Figure = {"xaxis": look, "yaxis": DOWNWARDS, "height": 60 + 25 * len(names)}
    return _figure(trace, x=title, y="", showlegend=False, **shown)


def leaderboard(run: Run) -> Figure | None:
    """Return bars of the models that a run has compared, its own on top.

    Guesses that are worse than every network are left out, so that differences can be seen.
    """
    score, rows = run.score, [row for row in compared(run) if row["test"] is not None]
    least = min((score.sign * row["test"] for row in rows if row["rounds"] is not None), default=0)
    rows = [r for r in rows if r["network"] not in GUESSES or score.sign * r["test"] >= least]
    if not rows:
        return None
    shown = [(row["network"], row["test"], row["interval"]) for row in rows]
    return bars(shown, f"{score.label} on test records", score.unit)


def leaderboard_fronts(run: Run) -> dict[str, Figure]:
    """Return the score of the networks that a run has compared over their costs."""
    score, rows = run.score, [row for row in compared(run) if row["rounds"]]
    found = fronts(rows, COSTS, f"test {score.label}", score.unit, sign=score.sign)
    return {f"front_{name}": figure for name, figure in found.items()}


def client_accuracy(run: Run) -> Figure | None:
    """Return the test accuracy of every client with its 95 % interval, their mean and the server's.

    With more than ``MOST_SHOWN`` clients the bars are quantiles, from the worst to the best.
    """
    clients = [c for c in run.client_results() if c.get("accuracy") is not None]
    if len(clients) < 2:
        return None
    values = [client["accuracy"] for client in clients]
    rows: list[Bar] = [(_named(client), client["accuracy"], None) for client in clients]
    if len(values) > MOST_SHOWN:
        shares = zip(QUANTILES, quantiles(values), strict=True)
        rows = [(f"{share:.0%} of clients", value, None) for share, value in shares]
    elif not run.is_private:
        numbers = (client.get("num_examples") for client in clients)
        pairs = zip(rows, numbers, strict=True)
        rows = [(name, value, wilson(value, number)) for (name, value, _), number in pairs]
    colours = [*[BLUE] * len(rows), ORANGE, GREEN]
    rows.append(("mean of the clients", fmean(values), None))
    if (central := run.scores("central").get("accuracy")) is not None:
        rows.append(("server's test set", central, None))
    return bars(rows, "test accuracy", "share", colours=colours[: len(rows)])


def importance(run: Run) -> Figure | None:
    """Return the drop of the score when a column's values are shuffled, with intervals."""
    columns = (run.scores("central").get("importance") or {}).get("columns", [])[:MOST_SHOWN]
    if not columns:
        return None
    rows = [(column["name"], column["drop"], column["interval"]) for column in columns]
    title, look = f"loss of {run.score.label} without the column", [BLUE] * len(columns)
    return bars(rows, title, "score", colours=look, from_zero=True)


def fronts(
    rows: Sequence[Mapping[str, Any]], costs: Sequence[str], score: str, unit: Unit, *, sign: int
) -> dict[str, Figure]:
    """Return a score over each cost in which rows differ, with the front, a line through the best.

    The best are those that no other beats in both score and cost.

    Args:
        rows: Rows with a ``network``, its ``test`` score, and its costs by name.
        costs: Names of ``METRICS``.
        score: Title of the score.
        unit: Unit of the score.
        sign: -1 if less is better.
    """
    found = {}
    for cost in [metric for metric in METRICS if metric.name in costs]:
        known = [row for row in rows if None not in (row.get(cost.name), row["test"])]
        if len({row[cost.name] for row in known}) < 2:
            continue
        points = [(row[cost.name], row["test"], row["network"]) for row in known]
        points.sort(key=lambda point: (point[0], -sign * point[1]))
        best = [
            p for i, p in enumerate(points) if all(sign * (p[1] - q[1]) > 0 for q in points[:i])
        ]
        xs, ys, names = zip(*points, strict=True)
        dots = _dots(xs, ys, "", size=9) | {
            "customdata": names,
            "hovertemplate": "%{customdata}: %{y} at %{x}<extra></extra>",
            "text": [_short(name) if len(points) <= MOST_LABELS else "" for name in names],
        }
        line = _line([x for x, *_ in best], [y for _, y, _ in best], "front", ORANGE)
        line |= {"hoverinfo": "skip", "marker": {"size": 9}}
        title = cost.label + {"megabytes": " (MB)", "milliseconds": " (ms)"}.get(cost.unit, "")
        look = PERCENT if unit == "share" else {}
        wide = 0 < min(xs) < max(xs) / WIDE_RANGE
        axis: Figure = {"xaxis": LOG if wide else {}, "yaxis": look, "showlegend": False}
        found[cost.name] = _figure(dots, line, x=title, y=score, **axis)
    return found


def effects(run: Run) -> dict[str, Figure]:
    """Return the mean probability of the positive class over values of a column, by its name."""
    found, explained = {}, run.scores("central").get("importance") or {}
    shown = explained.get("effects", [])
    top = min(1.0, 1.1 * max((max(effect["y"]) for effect in shown), default=1.0))  # for all
    for place, effect in enumerate(shown):
        xs, ys = effect["x"], effect["y"]
        line = _line(xs, ys, "probability", BLUE)
        if effect["kind"] != "number":
            xs = xs if effect["kind"] == "category" else [as_date(days) for days in xs]
            line = {"type": "bar", "x": xs, "y": ys, "marker": {"color": BLUE}}
        look: Figure = {"yaxis": PERCENT | {"range": [0, top]}, "height": 190, "showlegend": False}
        found[f"effect_{place}"] = _figure(line, x=_short(effect["name"]), y="", **look)
    return found


def class_curves(run: Run) -> dict[str, Figure]:
    """Return ROC and precision-recall curves of the scored classes, by short name."""
    found, names = {}, run.class_names
    for kind, by_class in (run.scores("central").get("curves") or {}).items():
        heading, x, y = CURVES[kind]
        traces = [
            _line(xs, ys, _short(names[int(c)] if names else c), colour, mode="lines")
            for (c, (xs, ys)), colour in zip(by_class.items(), cycle(COLOURS), strict=False)
        ]
        look: Figure = {"xaxis": SHARES, "yaxis": SHARES, "title": {"text": heading}}
        traces += [_diagonal("chance", 0, 1)] if kind == "roc" else []
        found[kind] = _figure(*traces, x=x, y=y, showlegend=len(traces) > 1, **look)
    return found


def partition(event: Event) -> Figure | None:
    """Return records per class and client as a heat map; None for numbers to predict."""
    counts, names = event.get("counts"), event.get("class_names") or ()
    if not counts or len(names) < 2:
        return None
    by_class = [list(column) for column in zip(*counts, strict=True)]
    figure = _heat(
        [str(client) for client in event["clients"]],
        _distinct(names),
        by_class,
        "client %{x}<br>%{y}: %{z:,} records<extra></extra>",
        title="records",
        ends=(0, max(map(max, counts)) or 1),
        x="client",
        yaxis=DOWNWARDS,
        height=min(max(90 + 26 * len(names), 220), 760),
    )
    texts = [[f"{value:,}" if value else "" for value in row] for row in by_class]
    figure["data"][0]["text"] = texts
    return figure


def alphas(run: Run) -> dict[str, Figure]:
    """Return heat maps of the last round's softmaxed alphas by kind of cell, with derived edges."""
    if not (events := run.alphas()):
        return {}
    figures = {}
    for kind, newest in events[-1]["alphas"].items():
        shares = [_softmax(row) for row in newest]
        values = [value for row in shares for value in row]
        labels = edge_labels(len(newest))
        kept = events[-1]["cells"].get(kind, [])
        names = zip(kept, kept_labels(kept, len(newest)), strict=True)
        marks = [(edge["op"], label) for edge, label in names if label in labels]
        hover, ends = "%{y}<br>%{x}: %{z:.3f}<extra></extra>", (min(values), max(values))
        figures[kind] = _heat(
            events[-1]["ops"],
            labels,
            shares,
            hover,
            title="share",
            ends=ends,
            rings=marks,
            xaxis=CATEGORIES | {"tickangle": -40},
            yaxis=DOWNWARDS,
            height=130 + 24 * len(labels),
        )
    return figures


def reliability(run: Run) -> Figure | None:
    """Return accuracy over confidence, with the diagonal of a calibrated model."""
    bins = (run.scores("central").get("calibration") or {}).get("bins")
    if not bins:
        return None
    confidence, accuracy, numbers = zip(*bins, strict=True)
    network = _line(confidence, accuracy, "the network", BLUE) | {
        "customdata": numbers,
        "hovertemplate": "%{x:.1%}: %{y:.1%} of %{customdata:,}<extra></extra>",
    }
    titles = {"x": "probability of what is predicted", "y": "share that is right"}
    return _figure(_diagonal("calibrated", 0, 1), network, **titles, xaxis=SHARES, yaxis=SHARES)


def predictions(run: Run) -> Figure | None:
    """Return predicted over true numbers, with the diagonal of exact predictions."""
    if not (pairs := run.scores("central").get("pairs")):
        return None
    true, predicted = zip(*pairs, strict=True)
    name, exact = (*run.class_names, "number")[0], _diagonal("exact", min(true), max(true))
    points = _dots(true, predicted, "records", size=5, opacity=0.6)
    return _figure(points, exact, x=f"true {name}", y=f"predicted {name}")


def _figure(
    *data: Figure,
    x: str,
    y: str,
    xaxis: Figure | None = None,
    yaxis: Figure | None = None,
    **layout: object,
) -> Figure:
    """Return a figure with titled axes, like all figures, and the settings special to it."""
    look = {
        "height": 270,
        "margin": {"l": 10, "r": 10, "t": 30, "b": 10},
        "dragmode": False,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"title": {"text": x}, "automargin": True, **(xaxis or {})},
        "yaxis": {"title": {"text": y}, "automargin": True, **(yaxis or {})},
    }
    return {"data": [*data], "layout": look | layout}


def _line(
    x: Sequence[float], y: Sequence[float | None], name: str, colour: str, mode: str = ""
) -> Figure:
    usual = "lines+markers" if len(x) <= MOST_MARKERS else "lines"
    look = {"line": {"color": colour, "width": 2}, "marker": {"size": 4}}
    place = {"x": [*x], "y": [v if v is None else float(f"{v:.5g}") for v in y]}
    return {"type": "scatter", "mode": mode or usual, "name": name, **place, **look}


def _dots(x: Sequence[Any], y: Sequence[Any], name: str, **look: object) -> Figure:
    marker = {"color": BLUE, **look}
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker}


def _diagonal(name: str, *ends: float) -> Figure:
    line = {"color": ORANGE, "dash": "dash"}
    return {"type": "scatter", "mode": "lines", "name": name, "x": ends, "y": ends, "line": line}


def _heat(
    columns: Sequence[str],
    rows: Sequence[object],
    z: Sequence[Sequence[float]],
    hover: str,
    *,
    title: str,
    ends: tuple[float, float],
    rings: Sequence[tuple[str, object]] = (),
    x: str = "",
    xaxis: Figure = CATEGORIES,
    **layout: Any,
) -> Figure:
    """Return a heat map with its colour axis, and rings around some of its cells."""
    bar = {"title": {"text": title}, "thickness": 12}
    colours = {"cmin": ends[0], "cmax": ends[1], "colorbar": bar}
    place = {"type": "heatmap", "x": columns, "y": [*rows], "z": z}
    gaps = {f"{axis}gap": int(len(of) <= MOST_GAPS) for axis, of in (("x", columns), ("y", rows))}
    cells = {**place, "hovertemplate": hover, "coloraxis": "coloraxis", **gaps}
    ringed = ([column for column, _ in rings], [row for _, row in rings])
    look: Figure = {"symbol": "circle-open", "size": 11, "color": ORANGE, "line": {"width": 2.5}}
    marks = [_dots(*ringed, "", **look) | {"hoverinfo": "skip"}] if rings else []
    layout |= {"coloraxis": colours, "showlegend": False}
    return _figure(cells, *marks, x=x, y="", xaxis=xaxis, **layout)


def _softmax(row: Sequence[float | None]) -> list[float]:
    """Return the shares of a row to three digits; a missing (non-finite) alpha counts as 0."""
    from scipy.special import softmax  # type: ignore[import-untyped,unused-ignore]

    return softmax([value or 0.0 for value in row]).round(3).tolist()


def _named(result: Event) -> str:
    """Return a client's name, or the word client with its number."""
    client = result["client"]
    return str(client) if isinstance(client, NamedClient) else f"client {client}"


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _distinct(names: Sequence[str]) -> list[str]:
    """Return short names, with an index if two are equal, since categories must differ."""
    names = [_short(name) for name in names]
    return [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names)]


# --- pictures of cells


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
    picture = render(
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
