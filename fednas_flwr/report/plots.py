"""The report's figures in the terms of plotly.js: plain dictionaries from a run, drawn by the page.

Each function returns a figure ``{"data": [...], "layout": {...}}``, or None when the run holds
nothing to show. The report's script adds what depends on the reader's screen: fonts, colours of the
light or dark page, and the numbers inside the partition's picture where there is room for them.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import Any

from fednas_flwr.report.templates import as_date, as_unit, count, quantiles, wilson
from fednas_flwr.runs.events import Event
from fednas_flwr.runs.leaderboard import compared
from fednas_flwr.runs.numbers import GUESSES, SCORES, Metric, Run, Unit
from fednas_flwr.settings.names import MOST_SHOWN, QUANTILES

Figure = dict[str, Any]

CATEGORIES: Figure = {"type": "category", "showgrid": False}  # an axis of names
DOWNWARDS = CATEGORIES | {"autorange": "reversed"}
BLUE, ORANGE, GREEN, GREY = "#3b82f6", "#e8842c", "#2ea36b", "#8b98a9"
COLOURS = (BLUE, ORANGE, GREEN, "#9a5bd0", "#d64b6a", "#1d9fb0", "#a38a1c", GREY)
MOST_MARKERS = 60
MOST_SLIDER_STEPS = 60
LONGEST_NAME = 24


def curves(
    rounds: Sequence[Event],
    series: Mapping[str, str],
    *,
    title: str,
    percent: bool = False,
    log: bool = False,
) -> Figure | None:
    """Return metrics over rounds, of two rounds or more; a round without the metric is a gap.

    Args:
        rounds: ``round`` events by ascending round.
        series: Legend entry of each metric to draw; metrics that never occur are left out.
        title: Title of the vertical axis.
        percent: True if the metrics are shares of 1.
        log: True if the vertical axis is logarithmic.
    """
    numbers = [event["round"] for event in rounds]
    traces = []
    for (metric, label), colour in zip(series.items(), (BLUE, ORANGE), strict=False):
        values = [event["metrics"].get(metric) for event in rounds]
        if sum(value is not None for value in values) > 1:
            traces.append(_line(numbers, values, label, colour))
    if not traces:
        return None
    look: Figure = {"tickformat": ".0%", "rangemode": "tozero"} if percent else {}
    look |= {"type": "log", "dtick": 1, "exponentformat": "power"} if log else {}
    layout = axes(x="round", y=title, yaxis=look, showlegend=len(traces) > 1)
    return {"data": traces, "layout": layout}


def bars(
    names: Sequence[str],
    values: Sequence[float],
    ends: Sequence[tuple[float, float]],
    title: str,
    unit: Unit,
    *,
    from_zero: bool = False,
) -> Figure:
    """Return horizontal bars with 95 % intervals, the first in another colour.

    The axis begins at a tenth below all intervals, so that they can be told apart.

    Args:
        names: Of the bars, from above.
        values: Their lengths.
        ends: Their intervals, ``(value, value)`` for none.
        title: What the values are.
        unit: Of the values.
        from_zero: True if the axis begins at 0 or below, as that of differences.
    """
    low, high = min(map(min, ends)), max(map(max, ends))
    start = min(0.0, low) if from_zero else max(0.0, math.floor(10 * low - 0.5) / 10)
    end = 1 if unit == "share" and high > 0.5 else high + 0.05 * (high - start)
    trace = {
        "type": "bar",
        "orientation": "h",
        "y": _distinct([_short(name) for name in names]),
        "x": values,
        "text": [as_unit(value, unit).replace("-", "−") for value in values],
        "error_x": {
            "array": [high - value for value, (_, high) in zip(values, ends, strict=True)],
            "arrayminus": [value - low for value, (low, _) in zip(values, ends, strict=True)],
        },
        "customdata": [f"{as_unit(a, unit)} to {as_unit(b, unit)}" for a, b in ends],
        "hovertemplate": "%{y}: %{text}, 95 % %{customdata}<extra></extra>",
        "marker": {"color": [BLUE, *[BLUE if from_zero else GREY] * (len(names) - 1)]},
    }
    look = {"tickformat": ".0%"} if unit == "share" else {}
    layout = axes(
        x=title,
        y="",
        xaxis={"range": [start, end], **look},
        yaxis=DOWNWARDS,
        height=60 + 25 * len(names),
        showlegend=False,
    )
    return {"data": [trace], "layout": layout}


def leaderboard(run: Run) -> Figure | None:
    """Return the models that a run has compared, its own on top.

    Without guesses that are worse than every network: then differences between those can be seen.
    """
    score, key = run.score, "accuracy" if run.score == SCORES[0] else "test"
    rows = [row for row in compared(run) if row[key] is not None]
    least = min((score.sign * row[key] for row in rows if row["rounds"] is not None), default=0)
    rows = [row for row in rows if row["network"] not in GUESSES or score.sign * row[key] >= least]
    if not rows:
        return None
    ends = [row["interval"] or (row[key], row[key]) for row in rows]
    names, values = [row["network"] for row in rows], [row[key] for row in rows]
    return bars(names, values, ends, f"{score.label} on test records", score.unit)


def importance(run: Run) -> Figure | None:
    """Return by how much the score falls where a column's values are shuffled, with intervals."""
    columns = (run.scores("central").get("importance") or {}).get("columns", [])[:MOST_SHOWN]
    if not columns:
        return None
    names, drops = [c["name"] for c in columns], [c["drop"] for c in columns]
    title = f"loss of {run.score.label} without the column"
    return bars(names, drops, [c["interval"] for c in columns], title, "score", from_zero=True)


def pareto(points: Sequence[tuple[str, float, float]], cost: Metric, score: Metric) -> Figure:
    """Return scores over costs, and the front: those that no other beats in both, as a line."""
    ordered = sorted(points, key=lambda point: (point[1], -point[2]))
    front = [p for i, p in enumerate(ordered) if all(p[2] > other[2] for other in ordered[:i])]
    look = {"tickformat": ".0%"} if score.unit == "share" else {}
    names, xs, ys = zip(*ordered, strict=True)
    dots = {
        "type": "scatter",
        "mode": "markers",
        "x": xs,
        "y": ys,
        "customdata": names,
        "hovertemplate": "%{customdata}: %{y} at %{x}<extra></extra>",
        "marker": {"size": 9, "color": BLUE},
    }
    line = _line([x for _, x, _ in front], [y for *_, y in front], "front", ORANGE)
    layout = axes(
        x=cost.label + (" (MB)" if cost.unit == "megabytes" else ""),
        y=score.label,
        yaxis=look,
        showlegend=False,
    )
    return {"data": [line | {"mode": "lines", "hoverinfo": "skip"}, dots], "layout": layout}


def effects(run: Run) -> dict[str, Figure]:
    """Return the mean probability of the positive class over values of a column, by its name."""
    found = {}
    for place, effect in enumerate(
        (run.scores("central").get("importance") or {}).get("effects", [])
    ):
        xs, ys = effect["x"], effect["y"]
        line = _line(xs, ys, "probability", BLUE)
        if effect["kind"] != "number":
            xs = xs if effect["kind"] == "category" else [as_date(days) for days in xs]
            line = {"type": "bar", "x": xs, "y": ys, "marker": {"color": BLUE}}
        look = {"tickformat": ".0%", "range": [0, 1]}
        layout = axes(x=_short(effect["name"]), y="", yaxis=look, height=190, showlegend=False)
        found[f"effect_{place}"] = {"data": [line], "layout": layout}
    return found


def epsilon(run: Run) -> Figure | None:
    """Return epsilon over the rounds of the client that spends most."""
    points = (run.privacy or {}).get("growth") or []
    if len(points) < 2:
        return None
    rounds, values = zip(*points, strict=True)
    line = _line(list(rounds), list(values), "epsilon", BLUE)
    layout = axes(x="round", y="epsilon", yaxis={"rangemode": "tozero"}, showlegend=False)
    return {"data": [line], "layout": layout}


def class_curves(run: Run) -> dict[str, tuple[str, Figure]]:
    """Return ROC and precision-recall curves of the classes that scores are of, by short name."""
    curves, names = run.scores("central").get("curves") or {}, run.class_names
    titles = {
        "roc": ("ROC", "false positive rate", "true positive rate"),
        "precision_recall": ("Precision and recall", "recall", "precision"),
    }
    found = {}
    for kind, by_class in curves.items():
        heading, x, y = titles[kind]
        traces = [
            _line(xs, ys, _short(names[int(c)] if names else c), colour) | {"mode": "lines"}
            for (c, (xs, ys)), colour in zip(by_class.items(), cycle(COLOURS), strict=False)
        ]
        look = {"range": [0, 1.02], "tickformat": ".0%"}
        layout = axes(x=x, y=y, xaxis=look, yaxis=look, showlegend=len(traces) > 1)
        found[kind] = heading, {"data": traces, "layout": layout}
    return found


def percentiles(run: Run, stage: str) -> Figure | None:
    """Return the percentile of the cell that stood best in each round of the search, by a table."""
    event = run.last("looked_up")
    if stage != "search" or not event.get("percentiles"):
        return None
    rounds, values = zip(*event["percentiles"], strict=True)
    title = f"percentile of {event['cells']:,} cells"
    layout = axes(x="round", y=title, yaxis={"range": [0, 102]}, showlegend=False)
    return {"data": [_line(list(rounds), list(values), "percentile", BLUE)], "layout": layout}


def traffic(rounds: Sequence[Event]) -> Figure | None:
    """Return the megabytes that the server sent and received in each round, if they differ."""
    numbers = [event["round"] for event in rounds]
    traces = []
    for key, label, colour in (
        ("bytes_sent", "sent by the server", BLUE),
        ("bytes_received", "received", ORANGE),
    ):
        values = [event[key] / 1e6 for event in rounds]
        if len(set(values)) > 1:
            traces.append(_line(numbers, values, label, colour))
            if label == "received":  # both directions are often equal: keep the line below visible
                traces[-1]["line"]["dash"] = "dash"
    if not traces:
        return None
    layout = axes(x="round", y="MB per round", yaxis={"rangemode": "tozero"})
    return {"data": traces, "layout": layout}


def partition(event: Event) -> Figure | None:
    """Return the number of records per class and client as a heat map."""
    counts, names = event.get("counts"), event.get("class_names")
    if not counts or not names:
        return None
    by_class = [list(column) for column in zip(*counts, strict=True)]
    clients = [str(client) for client in event["clients"]]
    hover = "client %{x}<br>%{y}: %{z:,} records<extra></extra>"
    trace = heat(clients, _distinct([_short(name) for name in names]), by_class, hover) | {
        "text": [[f"{value:,}" if value else "" for value in row] for row in by_class],
        "xgap": 1 if len(clients) <= 40 else 0,
        "ygap": 1 if len(names) <= 40 else 0,
    }
    layout = axes(
        x="client",
        y="",
        xaxis=CATEGORIES,
        yaxis=DOWNWARDS,
        height=min(max(90 + 26 * len(names), 220), 760),
        coloraxis=colours(0, max(map(max, counts)) or 1, title="records"),
    )
    return {"data": [trace], "layout": layout}


def client_accuracy(run: Run) -> Figure | None:
    """Return the test accuracy of every client with its 95 % interval, and the mean as a line.

    Of more than ``MOST_SHOWN`` clients the bars are quantiles, from the worst to the best.
    The axis runs from 0 to 1, and further where noise has carried an accuracy out of that range; it
    begins at a tenth above 0 where all accuracies are above that, so that they can be told apart.
    """
    clients = [c for c in run.client_results() if c.get("accuracy") is not None]
    if len(clients) < 2:
        return None
    names = [str(client["client"]) for client in clients]
    values = [client["accuracy"] for client in clients]
    sizes = [f"<br>{count(client.get('num_examples'))} test records" for client in clients]
    mean, who = fmean(values), "client"
    if many := len(values) > MOST_SHOWN:
        values, sizes = quantiles(values), [""] * len(QUANTILES)
        names, who = [f"{share:.0%}" for share in QUANTILES], "quantile"
    bars = {
        "type": "bar",
        "name": who,
        "x": names,
        "y": values,
        "customdata": sizes,
        "hovertemplate": f"{who} %{{x}}: %{{y:.1%}}%{{customdata}}<extra></extra>",
        "marker": {"color": BLUE},
    }
    lowest = min(values)
    if not many and not run.is_private:
        ends = [wilson(client["accuracy"], client.get("num_examples")) for client in clients]
        lows, highs = zip(*ends, strict=True)
        up = [high - value for value, high in zip(values, highs, strict=True)]
        down = [value - low for value, low in zip(values, lows, strict=True)]
        bars["error_y"] = {"array": up, "arrayminus": down}
        lowest = min(lows)
    data: list[Figure] = [bars, _level(names, mean, "mean of the clients", ORANGE, "dash")]
    central = run.scores("central").get("accuracy")
    if central is not None:
        data.append(_level(names, central, "server's test set", GREEN, "dot"))
        lowest = min(lowest, central)
    start = max(0, math.floor(10 * lowest) / 10) if lowest >= 0 else lowest
    shares = {"tickformat": ".0%", "range": [start, max(1, *values)]}
    return {"data": data, "layout": axes(x=who, y="test accuracy", xaxis=CATEGORIES, yaxis=shares)}


def alphas(events: Sequence[Event], genotype: Mapping[str, Any] | None) -> Figure:
    """Return the heat maps of the softmaxed alphas with all their slider's steps.

    Args:
        events: ``alphas`` events by ascending round.
        genotype: The derived genotype, whose edges are marked; None when there is none.

    Returns:
        ``{"rounds": [..], "kinds": {kind: {"figure": .., "steps": [z of each round]}}}``: at most
        60 rounds, evenly chosen, with the first and the last; the figure shows the last. ``kinds``
        is empty when there are no alphas.
    """
    if not events:
        return {"rounds": [], "kinds": {}}
    last = len(events) - 1
    steps = sorted({round(i * last / (MOST_SLIDER_STEPS - 1)) for i in range(MOST_SLIDER_STEPS)})
    chosen = [events[step] for step in steps]
    newest = chosen[-1]
    kinds = {}
    for kind in newest["alphas"]:
        shares = [[_softmax(row) for row in event["alphas"][kind]] for event in chosen]
        labels = edge_labels(len(shares[-1]))
        values = [value for step in shares for row in step for value in row]
        ends = min(values), max(values)
        kept = (genotype or {}).get("cells", {}).get(kind, [])
        figure = _alpha_figure(labels, newest["ops"], shares[-1], ends, kept)
        kinds[kind] = {"figure": figure, "steps": shares}
    return {"rounds": [event["round"] for event in chosen], "kinds": kinds}


def reliability(run: Run) -> Figure | None:
    """Return accuracy over confidence, with the diagonal of a calibrated model."""
    calibration = run.scores("central").get("calibration") or {}
    if not calibration.get("bins"):
        return None
    confidence, accuracy, numbers = map(list, zip(*calibration["bins"], strict=True))
    hover = "%{x:.1%}: %{y:.1%} of %{customdata:,}<extra></extra>"
    network = _line(confidence, accuracy, "the network", BLUE)
    ideal = _diagonal("calibrated", [0, 1])
    look = {"range": [0, 1.02], "tickformat": ".0%"}
    titles = {"x": "probability of what is predicted", "y": "share that is right"}
    shown = [ideal, network | {"customdata": numbers, "hovertemplate": hover}]
    return {"data": shown, "layout": axes(**titles, xaxis=look, yaxis=look)}


def predictions(run: Run) -> Figure | None:
    """Return predicted over true numbers, with the diagonal of exact predictions."""
    if not (pairs := run.scores("central").get("pairs")):
        return None
    true, predicted = zip(*pairs, strict=True)
    name, look = (*run.class_names, "number")[0], {"color": BLUE, "size": 5, "opacity": 0.6}
    points = {"type": "scatter", "mode": "markers", "name": "records", "x": true, "y": predicted}
    layout = axes(x=f"true {name}", y=f"predicted {name}")
    exact = _diagonal("exact", [min(true), max(true)])
    return {"data": [points | {"marker": look}, exact], "layout": layout}


def _diagonal(name: str, ends: list[float]) -> Figure:
    line = {"color": ORANGE, "dash": "dash"}
    place = {"x": ends, "y": ends}
    return {"type": "scatter", "mode": "lines", "name": name, **place, "line": line}


def exploration(phases: Sequence[Event]) -> dict[str, tuple[str, Figure | None]]:
    """Return heading and figure of entropy, kappa, and estimates over phases, by a short name."""
    points = [
        {"round": e["round"], "metrics": {"entropy": e["entropy"], "kappa": e["kappa"]}}
        for e in phases
    ]
    entropy = curves(points, {"entropy": "entropy"}, title="nats")
    kappa = curves(points, {"kappa": "kappa"}, title="configurations")
    for figure in (entropy, kappa):
        if figure is not None:
            figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return {
        "entropy_of_pi": ("Entropy of the bandit's distribution", entropy),
        "kappa": ("Configurations tried per phase", kappa),
        "estimates": ("Estimated rewards; rings mark the choice", estimates(phases)),
    }


def estimates(phases: Sequence[Event]) -> Figure | None:
    """Return every arm's estimated reward after each phase as a heat map."""
    if not phases:
        return None
    rounds = [str(event["round"]) for event in phases]
    by_arm = [list(row) for row in zip(*(e["estimates"] for e in phases), strict=True)]
    shown = [[None if v is None else float(f"{v:.4g}") for v in row] for row in by_arm]
    known = [value for row in shown for value in row if value is not None]
    hover = "round %{x}, configuration %{y}: %{z}<extra></extra>"
    cells = heat(rounds, None, shown, hover)
    chosen = rings(rounds, [event["best"] for event in phases])
    scale = colours(min(known, default=0), max(known, default=1), title="nats")
    look: Figure = {"xaxis": CATEGORIES, "showlegend": False, "coloraxis": scale}
    layout = axes(x="round", y="configuration", **look)
    return {"data": [cells, chosen], "layout": layout}


def edge_labels(num_edges: int) -> list[str]:
    """Return the names of a cell's edges, which are ordered by target, then by source.

    The number tells the kind of cell: every node reads all before it, and 2 + 3 + 4 + ... edges
    mean two inputs (DARTS), 1 + 2 + 3 + ... one input (NAS-Bench-201).

    Example:
        >>> edge_labels(3)
        ['input → 1', 'input → output', '1 → output']
    """
    for inputs in (2, 1):
        pairs: list[tuple[int, int]] = []
        target = inputs
        while len(pairs) < num_edges:
            pairs += [(source, target) for source in range(target)]
            target += 1
        if len(pairs) == num_edges:
            last = target - 1
            return [
                f"{node_name(a, inputs, last)} → {node_name(b, inputs, last)}" for a, b in pairs
            ]
    return [f"edge {edge}" for edge in range(num_edges)]


def node_name(index: int, inputs: int, last: int) -> str:
    """Return a node's name as the picture of the cell has it."""
    if inputs == 1:
        return {0: "input", last: "output"}.get(index, str(index))
    return ("c(k−2)", "c(k−1)")[index] if index < 2 else str(index - 2)


def _alpha_figure(
    labels: list[str],
    ops: list[str],
    shares: list[list[float]],
    ends: tuple[float, float],
    kept: Sequence[Mapping[str, Any]],
) -> Figure:
    cells = heat(ops, labels, shares, "%{y}<br>%{x}: %{z:.3f}<extra></extra>")
    cells |= {"xgap": 1, "ygap": 1}
    inputs = 2 if labels[0].startswith("c(") else 1
    last = max((e["target"] for e in kept), default=0)
    marks = [
        (
            e["op"],
            f"{node_name(e['source'], inputs, last)} → {node_name(e['target'], inputs, last)}",
        )
        for e in kept
    ]
    marks = [mark for mark in marks if mark[0] in ops and mark[1] in labels]
    chosen = rings([op for op, _ in marks], [label for _, label in marks])
    layout = axes(
        x="",
        y="",
        xaxis=CATEGORIES | {"tickangle": -40},
        yaxis=DOWNWARDS,
        height=130 + 24 * len(labels),
        showlegend=False,
        coloraxis=colours(*ends, title="share"),
    )
    return {"data": [cells, chosen] if marks else [cells], "layout": layout}


def _line(x: Sequence[float], y: Sequence[float | None], name: str, colour: str) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(x) <= MOST_MARKERS else "lines",
        "name": name,
        "x": x,
        "y": [None if value is None else float(f"{value:.5g}") for value in y],
        "line": {"color": colour, "width": 2},
        "marker": {"size": 4},
    }


def _level(names: list[str], value: float, name: str, colour: str, dash: str) -> Figure:
    """Return a horizontal line."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": names,
        "y": [value] * len(names),
        "line": {"color": colour, "dash": dash, "width": 2},
        "hovertemplate": f"{name}: %{{y:.1%}}<extra></extra>",
    }


def heat(
    x: Sequence[str], y: Sequence[str] | None, z: Sequence[Sequence[float | None]], hover: str
) -> Figure:
    """Return a heat map on the layout's axis of colours; without ``y`` its rows are numbered."""
    trace = {"type": "heatmap", "x": x, "z": z, "hovertemplate": hover, "coloraxis": "coloraxis"}
    return trace if y is None else trace | {"y": y}


def rings(x: Sequence[str], y: Sequence[object]) -> Figure:
    """Return rings around cells of a heat map."""
    line = {"width": 2.5}
    marker = {"symbol": "circle-open", "size": 11, "color": ORANGE, "line": line}
    place = {"type": "scatter", "mode": "markers", "x": x, "y": y}
    return place | {"hoverinfo": "skip", "marker": marker}


def colours(low: float, high: float, *, title: str) -> Figure:
    """Return the axis of colours of a heat map."""
    return {"cmin": low, "cmax": high, "colorbar": {"title": {"text": title}, "thickness": 12}}


def axes(
    *, x: str, y: str, xaxis: Figure | None = None, yaxis: Figure | None = None, **layout: object
) -> Figure:
    """Return a layout with titled axes, as all figures have it, and what is special to one."""
    return {
        "height": 270,
        "margin": {"l": 10, "r": 10, "t": 30, "b": 10},
        "dragmode": False,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "xaxis": {"title": {"text": x}, "automargin": True, **(xaxis or {})},
        "yaxis": {"title": {"text": y}, "automargin": True, **(yaxis or {})},
        **layout,
    }


def _softmax(row: Sequence[float | None]) -> list[float]:
    """Return the shares of a row to three digits; a missing (non-finite) alpha counts as 0."""
    values = [value or 0.0 for value in row]
    powers = [math.exp(value - max(values)) for value in values]
    return [round(power / sum(powers), 3) for power in powers]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _distinct(names: list[str]) -> list[str]:
    """Return the names with their index added where two are equal: categories must differ."""
    return [n if names.count(n) == 1 else f"{n} ({i})" for i, n in enumerate(names)]
