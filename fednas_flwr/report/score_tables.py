"""The scores of a trained model as texts, tables and a reliability plot, for report and card."""

from __future__ import annotations

from fednas_flwr.report import plots
from fednas_flwr.report.quantities import DASH, FORMS, count, quantiles, score
from fednas_flwr.runs.numbers import SCORES, Run
from fednas_flwr.settings.names import MOST_SHOWN, QUANTILES

Table = tuple[str, list[str], list[list[str]]]  # name, head, rows

PER_CLASS = {"precision": "precision", "recall": "recall"} | {
    score.name: score.label
    for score in SCORES
    if score.name in ("f1", "auroc", "average_precision")
}
MODELS = {"central": "the network", "linear": "linear model", "trees": "boosted trees"}
MOST_CLASSES = 30  # with more there is no confusion matrix


def score_table(run: Run) -> Table | None:
    """Return the scores of the network, with 95 % intervals, and of the baselines."""
    measured = {model: run.scores(model) for model in MODELS}
    central = measured["central"]
    if not central:
        return None
    shown = [model for model, values in measured.items() if values]
    rows = []
    for kind in SCORES:
        if central.get(kind.name) is None:
            continue
        low_high = (central.get("intervals") or {}).get(kind.name)
        text = FORMS[kind.unit].text
        interval = f"{text(low_high[0])} to {text(low_high[1])}" if low_high else DASH
        others = [text(measured[model].get(kind.name)) for model in shown[1:]]
        rows.append([kind.label, text(central[kind.name]), interval, *others])
    rows += [
        [name, score(value), DASH, *[DASH] * (len(shown) - 1)]
        for name, value in (central.get("own") or {}).items()
    ]
    head = ["score", MODELS["central"], "95 % interval", *(MODELS[model] for model in shown[1:])]
    return "Scores on the server's test set", head, rows


def class_table(run: Run) -> Table | None:
    """Return the scores of each class, or label, on the server's test set."""
    central, names = run.scores("central"), run.class_names
    per_class = central.get("per_class") or []
    if len(per_class) != len(names) or not names:
        return None
    rows = [
        [name, *(score(row.get(key)) for key in PER_CLASS), count(row["count"])]
        for name, row in zip(names, per_class, strict=True)
    ]
    word = "label" if run.multi_label else "class"
    return f"Each {word}", [word, *PER_CLASS.values(), "records"], rows


def confusion_table(run: Run) -> Table | None:
    """Return how often each class was taken for each, on the server's test set."""
    central, names = run.scores("central"), run.class_names
    counts = central.get("confusion") or []
    if len(counts) != len(names) or not 0 < len(names) <= MOST_CLASSES:
        return None
    rows = [[name, *map(count, row)] for name, row in zip(names, counts, strict=True)]
    return "True class by row, predicted by column", ["", *names], rows


def client_table(run: Run) -> Table | None:
    """Return the scores on each client's own test records, where clients tell them."""
    clients = run.client_results()
    shown = [s for s in SCORES if any(client.get(s.name) is not None for client in clients)]
    if shown in ([], [SCORES[0]]):
        return None
    if len(clients) > MOST_SHOWN:
        names = [*(kind.name for kind in shown), "num_examples"]
        values = {n: [c[n] for c in clients if c.get(n) is not None] for n in names}
        columns = {name: quantiles(known) for name, known in values.items()}
        clients = [
            {"client": f"{share:.0%} of clients", **{n: v[i] for n, v in columns.items()}}
            for i, share in enumerate(QUANTILES)
        ]
    rows = [
        [
            str(client["client"]),
            *(FORMS[kind.unit].text(client.get(kind.name)) for kind in shown),
            count(client.get("num_examples")),
        ]
        for client in clients
    ]
    head = ["client", *(kind.label for kind in shown), "records"]
    return "Each client's own test records", head, rows


def tables(run: Run) -> list[Table]:
    """Return all tables that the run has numbers for."""
    made = (score_table(run), class_table(run), confusion_table(run), client_table(run))
    return [table for table in made if table is not None]


def reliability(run: Run) -> plots.Figure | None:
    """Return accuracy over confidence, with the diagonal of a calibrated model."""
    calibration = run.scores("central").get("calibration") or {}
    if not calibration.get("bins"):
        return None
    confidence, accuracy, numbers = zip(*calibration["bins"], strict=True)
    layout = plots.axes(x="probability of what is predicted", y="share that is right")
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"range": [0, 1.02], "tickformat": ".0%"}
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": "calibrated",
                "x": [0, 1],
                "y": [0, 1],
                "line": {"color": plots.ORANGE, "dash": "dash"},
            },
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": "the network",
                "x": list(confidence),
                "y": list(accuracy),
                "customdata": list(numbers),
                "hovertemplate": "%{x:.1%}: %{y:.1%} of %{customdata:,}<extra></extra>",
                "line": {"color": plots.BLUE},
            },
        ],
        "layout": layout,
    }
