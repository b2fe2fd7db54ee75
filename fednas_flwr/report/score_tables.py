"""Words and tables that report, card and terminal share.

Title, facts, results and columns of a run; its scores, privacy guarantees and explored phases. A
cell is text. An epsilon that is not finite is null in the file; it is shown as infinite and never
left out of a maximum. Every epsilon is rounded up. Sentences are macros in ``page/sentences.j2``;
those of a single page are in its template.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from fednas_flwr.base.shares import wilson
from fednas_flwr.report import templates as tp
from fednas_flwr.runs.events import Event
from fednas_flwr.runs.leaderboard import compared
from fednas_flwr.runs.numbers import METRICS, SCORES, SIMPLER, Run, Score, flat_settings, of_splits
from fednas_flwr.settings.names import MOST_SHOWN, PRV, QUANTILES

STAGES = {"search": "Search", "retrain": "Retraining"}
SETTINGS = ("algorithm", "partition", "search_space", "retrain", "privacy")  # the first ones
NUMBERS = ("genotype", "clients", "rounds", "seed")

HeadAndRows = tuple[list[str], list[list[str]]]
Table = tuple[str, list[str], list[list[str]]]  # name, head, rows
Cells = Sequence[tuple[str, Callable[[Any], str]]]  # head and content of each column


def rows_of(items: Iterable[Any], columns: Cells) -> HeadAndRows:
    """Return head and rows of a table with a row for each item."""
    return [head for head, _ in columns], [[cell(item) for _, cell in columns] for item in items]


def reached(run: Run, names: Container[str]) -> list[tuple[str, str]]:
    """Return label and text of each metric of these names that the run has reached."""
    rows = []
    for metric in METRICS:
        value = metric.read(run)
        if metric.name in names and value is not None:
            noised = ", noised" if run.is_private and metric.name == "client_accuracy" else ""
            rows.append((metric.label + noised, tp.as_unit(value, metric.unit)))
    return rows


def scores(run: Run) -> list[tuple[str, str]]:
    """Return label and text of all scores of the run's model; simpler models have a table."""
    simpler = tuple(f"{model}_" for model in SIMPLER.values())
    names = [metric.name for metric in METRICS if metric.is_score or metric.unit == "error"]
    return reached(run, [name for name in names if not name.startswith(simpler)])


def setting_rows(run: Run) -> list[tuple[str, str]]:
    """Return name and value of each setting that took effect."""
    settings = run.settings
    if run.privacy:  # what the sites promise, which may be more than was asked for
        settings["privacy"] = run.group("privacy") | {"unit": tp.sentence("unit", run.privacy)}
    shown = flat_settings({name: settings.get(name) for name in (*NUMBERS, *SETTINGS)})
    return [
        (name, tp.setting_text(value)) for name, value in shown.items() if value not in (None, [])
    ]


COLUMN_HEAD = ["column", "what it is", "standardised by (mean, deviation)"]


def column_rows(run: Run) -> list[list[str]]:
    """Return a row for each column of the exported model's table; none for images."""
    inputs = run.last("exported").get("inputs") or {"schema": [], "mean": [], "std": []}
    pairs = iter(zip(inputs["mean"], inputs["std"], strict=True))
    rows = []
    for column in inputs["schema"]:
        if column["kind"] == "category":
            rows.append([column["name"], f"one of {', '.join(column['categories'])}", tp.DASH])
            continue
        mean, std = next(pairs)
        also = ", with a feature that says if it is missing" if column["indicator"] else ""
        is_date = column["kind"] == "date"
        text = f"{tp.as_date(mean)}, {std:.3g} days" if is_date else f"{mean:.6g}, {std:.6g}"
        rows.append([column["name"], column["kind"] + also, text])
    return rows


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

    def interval(kind: Score) -> str:
        ends = (central.get("intervals") or {}).get(kind.name) or ()
        return " to ".join(dict.fromkeys(map(tp.FORMS[kind.unit].text, ends))) or tp.DASH

    columns: list[tuple[str, Callable[[Score], str]]] = [
        ("score", lambda kind: kind.label),
        *((MODELS[name], partial(_score_of, of)) for name, of in measured.items() if of),
    ]
    columns.insert(2, ("95 % interval", interval))
    head, rows = rows_of(_measured([central]), columns)
    rest = [tp.DASH] * (len(head) - 2)
    added = [[name, tp.score(value), *rest] for name, value in (central.get("own") or {}).items()]
    return "Scores on the server's test set", head, rows + added


def leaderboard_table(run: Run) -> Table | None:
    """Return the models that a run has compared, or None; the main columns come first."""
    models, score = compared(run), run.score
    if len(models) < 2:
        return None
    text = tp.FORMS[score.unit].text
    no_accuracy = score == SCORES[0] or run.is_regression  # beside the score

    def validation(row: dict[str, Any]) -> str:
        value, error = row["validation"], row["standard_error"]
        return tp.DASH if value is None else f"{text(value)} ± {text(error)}"

    def test(row: dict[str, Any]) -> str:
        low_high = row["interval"]
        ends = f" ({text(low_high[0])} – {text(low_high[1])})" if low_high else ""
        return text(row["test"]) + ends

    def epsilon(row: dict[str, Any]) -> str:
        return tp.epsilon_text(row["epsilon"]) if run.is_private and row["rounds"] else tp.DASH

    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("network", lambda row: row["network"]),
        (f"test {score.label} (95 %)", test),
        (f"validation {score.label} ± error", validation),
        ("epsilon", epsilon),
        ("", lambda row: row["reason"]),
        ("time", lambda row: tp.duration(row["seconds"])),
        ("parameters", lambda row: tp.count(row["parameters"])),
        ("test accuracy", lambda row: tp.DASH if no_accuracy else tp.percent(row["accuracy"])),
        ("rounds", lambda row: tp.count(row["rounds"])),
    ]
    shown = [(head, cell) for head, cell in columns if {*map(cell, models)} - {tp.DASH, ""}]
    return "Models that were compared", *rows_of(models, shown)


def class_table(run: Run) -> Table | None:
    """Return the scores of each class, or label, on the server's test set."""
    central, names = run.scores("central"), run.class_names
    per_class = central.get("per_class") or []
    if len(per_class) != len(names) or not names:
        return None
    word = "label" if run.multi_label else "class"
    rows = [
        [name, *(tp.score(row.get(key)) for key in PER_CLASS), tp.count(row["count"])]
        for name, row in zip(names, per_class, strict=True)
    ]
    return f"Each {word}", [word, *PER_CLASS.values(), "records"], rows


def confusion_table(run: Run) -> Table | None:
    """Return the confusion matrix on the server's test set as a table."""
    central, names = run.scores("central"), run.class_names
    counts = central.get("confusion") or []
    if len(counts) != len(names) or not 0 < len(names) <= MOST_CLASSES:
        return None
    rows = [[name, *map(tp.count, row)] for name, row in zip(names, counts, strict=True)]
    return "True class by row, predicted by column", ["", *names], rows


def client_table(run: Run) -> Table | None:
    """Return the scores on each client's own test records, if clients report them.

    Accuracies have the 95 % interval of Wilson (1927), unless noise hides the number of hits.
    """
    clients: Sequence[Mapping[str, Any]] = run.client_results()
    if not (shown := _measured(clients)):
        return None
    if many := len(clients) > MOST_SHOWN:
        names = [*(kind.key or kind.name for kind in shown), "num_examples"]
        values = {n: [c[n] for c in clients if c.get(n) is not None] for n in names}
        spread = {name: tp.quantiles(known) for name, known in values.items()}
        clients = [
            {"client": f"{share:.0%} of clients", **{n: v[i] for n, v in spread.items()}}
            for i, share in enumerate(QUANTILES)
        ]

    def interval(client: Mapping[str, Any]) -> str:
        low, high = wilson(client["accuracy"], client.get("num_examples"))
        return f"{tp.percent(low)} to {tp.percent(high)}"

    def of_copy(client: Mapping[str, Any]) -> str:
        copy = copies.get(client["client"], {})
        return _score_of(copy, kinds[0]) + (", kept" if client["client"] in kept else "")

    columns: list[tuple[str, Callable[[Any], str]]] = [
        ("client", lambda client: str(client["client"])),
        *((s.label, partial(_score_of, kind=s)) for s in shown),
        ("records", lambda client: tp.count(client.get("num_examples"))),
    ]
    if not many and not run.is_private and shown[0] == SCORES[0]:
        columns.insert(2, ("95 % interval", interval))
    copies = {one["client"]: one for one in run.last("evaluated").get("copies") or []}
    kept = run.last("personalised").get("clients", ())
    if kinds := [] if many else _measured([*copies.values()]):
        columns.append((f"{kinds[0].label} of fine-tuned copy", of_copy))
    return "Each client's own test records", *rows_of(clients, columns)


def _measured(found: Sequence[Mapping[str, Any]]) -> list[Score]:
    """Return the scores that some results have."""
    return [kind for kind in SCORES if any(kind.of(one) is not None for one in found)]


def _score_of(measured: Mapping[str, Any], kind: Score) -> str:
    return tp.FORMS[kind.unit].text(kind.of(measured))


def score_tables(run: Run) -> list[Table]:
    """Return all tables that the run has numbers for."""
    made = (score_table(run), class_table(run), confusion_table(run), client_table(run))
    return [table for table in made if table is not None]


TEST_SEED = "test seed: no privacy"


def is_secure(client: Event) -> bool:
    """Return true if a client draws its noise and samples from a secret that only it knows."""
    return client["secure_noise"] is True


def release_table(event: Event) -> HeadAndRows:
    """Return head and rows of the table of releases to which clients committed, by kind."""
    columns: Cells = [
        ("stage", lambda release: release["stage"]),
        ("action", lambda release: release["action"]),
        ("splits", lambda release: ", ".join(release["splits"])),
        ("noise multiplier", lambda release: tp.sentence("multiplier", release)),
        ("clipping norm", lambda release: f"{release['max_grad_norm']:g}"),
        ("expected batch", lambda release: tp.sentence("batch", release)),
        ("rate p", lambda release: _rates_text(release["rates"])),
        ("steps, at most", lambda release: f"{release['steps']:,}"),
    ]
    releases = [
        release
        | {
            "rates": [client["rates"][place] for client in event["clients"]],
            "batches": [
                client["rates"][place] * sum(client["records"].get(s, 0) for s in release["splits"])
                for client in event["clients"]
                if release["batch_size"] and release["batch_size"] < 1
            ],
        }
        for place, release in enumerate(event["schedule"])
    ]
    return rows_of(releases, columns)


def promise_table(event: Event, spent: Mapping[int, float | None]) -> HeadAndRows:
    """Return head and rows of the table of each client's privacy guarantee.

    Args:
        event: The ``privacy`` event.
        spent: Epsilon that the clients' filters count as spent; missing for clients without news.
    """
    clients = event["clients"]
    parts = list(dict.fromkeys(part for client in clients for part in client["records"]))

    def sizes(client: Event) -> str:
        records = client["records"]
        return " / ".join(f"{records[p]:,}" if p in records else tp.DASH for p in parts)

    def epsilon(client: Event) -> str:
        known = client["epsilon"].get(PRV) is not None
        return tp.epsilon_text(of_splits(client, PRV)) if known else tp.DASH

    columns: Cells = [
        ("client", lambda client: str(client["client"])),
        (f"{tp.sentence('unit', event)}s: {' / '.join(parts)}", sizes),
        ("epsilon", epsilon),
        ("delta", lambda client: f"{client['budget']['delta']:g}"),
        ("spent of its budget, by the filter", lambda client: spent_text(client, spent)),
        ("noise", lambda client: "secret" if is_secure(client) else "test seed"),
    ]
    return rows_of(clients, columns)


def spent_text(client: Event, spent: Mapping[int, float | None]) -> str:
    """Return the part of a client's budget that its filter counts as spent: ``2.90 of 8``."""
    number = client["client"]
    used = tp.epsilon_text(spent[number]) if number in spent else tp.DASH
    return f"{used} of {client['budget']['epsilon']:g}"


def _rates_text(rates: list[float]) -> str:
    """Return the rate of a release, or the range of the clients' rates."""
    ends = [min(rates), max(rates)] if rates else []
    return " to ".join(dict.fromkeys(f"{rate:.3g}" for rate in ends)) or "not recorded"


def phase_table(phases: Sequence[Event]) -> HeadAndRows:
    """Return head and rows: for each phase, its trials and the configuration that was chosen.

    If rewards are noised, also the standard deviation of their noise and M, to which the change of
    a record's loss was clipped: differences of rewards below the noise mean little.
    """
    configuration = list(phases[0]["configuration"])
    noise: Cells = [
        ("its noise (std)", lambda event: tp.figures(event["noise"], 3)),
        ("loss bound M", lambda event: tp.figures(event["loss_bound"], 3)),
    ]
    columns: Cells = [
        ("before round", lambda event: str(event["round"])),
        ("tried", lambda event: str(event["kappa"])),
        ("best reward", _best_reward),
        *(noise if any(event.get("noise") for event in phases) else []),
        ("chosen", lambda event: str(event["best"])),
        ("its estimate", lambda event: tp.figures(event["estimates"][event["best"]], 3)),
        *((name.replace("_", " "), partial(_chosen, name)) for name in configuration),
    ]
    return rows_of(phases, columns)


def _best_reward(event: Event) -> str:
    rewards = [reward for reward in event["rewards"].values() if reward is not None]
    return tp.figures(max(rewards, default=None), 3)


def _chosen(name: str, event: Event) -> str:
    return tp.figures(event["configuration"][name], 3)
