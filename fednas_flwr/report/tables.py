"""Words and tables that report, card and terminal share.

Title, facts, results and columns of a run; its scores, promises of privacy and explored phases. A
cell is text. An epsilon that is not finite stands as null in the file; it is shown as infinite and
never left out of a maximum. Every epsilon is rounded up. Sentences are macros of
``page/sentences.j2``; what one page alone says is in its template.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from fednas_flwr.report.templates import (
    DASH,
    FORMS,
    as_date,
    as_unit,
    count,
    duration,
    epsilon_text,
    percent,
    quantiles,
    score,
    sentence,
    wilson,
)
from fednas_flwr.runs.events import Event
from fednas_flwr.runs.leaderboard import compared
from fednas_flwr.runs.numbers import METRICS, SCORES, Run, of_splits
from fednas_flwr.settings.names import GDP, MOST_SHOWN, PRV, QUANTILES, RDP

STAGES = {"search": "Search", "retrain": "Retraining"}
GROUPS = {
    "algorithm": "algorithm",
    "dataset": "data",
    "partition": "partition",
    "search_space": "search space",
    "retrain": "retraining",
    "privacy": "privacy",
    "runtime": "runtime",
}
NUMBERS = {
    "genotype": "given genotype",
    "clients": "clients",
    "rounds": "search rounds",
    "seed": "seed",
}
_STEPS = ("local_epochs", "batch_size", "local_steps", "sampling_rate", "expected_batch_size")
_SIZES = ("channels", "num_cells", "skeleton", "candidates", "width", "widths")
SHOWN = {  # what a reader asks first; all settings stand in the configuration
    "algorithm": ("network", "rule", "sampler", *_STEPS),
    "search_space": (*_SIZES, "head", "activation", "norm"),
    "retrain": ("rounds", "channels", "num_cells", *_STEPS),
}


def reached(run: Run, names: Container[str]) -> list[tuple[str, str]]:
    """Label and text of each metric of these names that the run has reached."""
    rows = []
    for metric in METRICS:
        value = metric.read(run)
        if metric.name in names and value is not None:
            noised = ", noised" if run.is_private and metric.name == "client_accuracy" else ""
            rows.append((metric.label + noised, as_unit(value, metric.unit)))
    return rows


def scores(run: Run) -> list[tuple[str, str]]:
    """Label and text of all that says how good the run's model is; simpler ones have a table."""
    simpler = ("linear_", "trees_")
    names = [metric.name for metric in METRICS if metric.is_score or metric.unit == "error"]
    return reached(run, [name for name in names if not name.startswith(simpler)])


def facts(run: Run) -> list[tuple[str, str]]:
    """Return name and value of everything that says what was run."""
    config, started = run.settings, run.last("run_started")
    versions = started.get("versions") or {}
    steps = [  # of the networks' weights; those that a file gives have none
        ((config.get(group) or {}).get("weights"), stage)
        for group, stage in (("algorithm", "search"), ("retrain", "retraining"))
    ]
    rates = [
        f"{weights['lr']:g} in {stage}"
        for weights, stage in steps
        if isinstance(weights, dict) and weights.get("lr") is not None
    ]
    searched = sentence("search_privacy", config, run.privacy) if run.rounds("search") else ""
    facts = [
        *((label, settings_text(config, key)) for key, label in GROUPS.items() if key in config),
        *((label, str(config[key])) for key, label in NUMBERS.items() if config.get(key)),
        ("the search was", searched),
        ("learning rate", ", ".join(rates)),
        ("registered by the user", ", ".join(started.get("own") or [])),
        ("data", ". ".join(run.last("data").get("found") or [])),
        *((name, str(started.get(name) or "")) for name in ("commit", "machine", "device")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("folder", run.folder.resolve().name),
    ]
    return [(name, value) for name, value in facts if value]


def settings_text(config: dict[str, Any], group: str) -> str:
    """Return a configuration group's name with its most important settings."""
    values = config[group]
    if not isinstance(values, dict):
        return str(values)
    name = values.get("name")
    keys = ("alpha",) if name == "dirichlet" else SHOWN.get(group, ())
    settings = [f"{key} {values[key]}" for key in keys if values.get(key) is not None]
    text = ", ".join(settings)
    if name is None:
        return text
    return f"{name} ({text})" if text else str(name)


COLUMN_HEAD = ["column", "what it is", "standardised by (mean, deviation)"]


def column_rows(run: Run) -> list[list[str]]:
    """Return a row for each column of the table that the exported model takes; none of images."""
    inputs = run.last("exported").get("inputs") or {"schema": [], "mean": [], "std": []}
    pairs = iter(zip(inputs["mean"], inputs["std"], strict=True))
    rows = {}
    for column in (c for c in inputs["schema"] if c["kind"] != "category"):
        mean, std = next(pairs)
        also = ", with a feature that says if it is missing" if column["indicator"] else ""
        text = f"{mean:.6g}, {std:.6g}"
        if column["kind"] == "date":
            text = f"{as_date(mean)}, {std:.3g} days"
        rows[column["name"]] = [column["name"], column["kind"] + also, text]
    for column in (c for c in inputs["schema"] if c["kind"] == "category"):
        rows[column["name"]] = [column["name"], f"one of {', '.join(column['categories'])}", DASH]
    return [rows[column["name"]] for column in inputs["schema"]]


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
        if kind.of(central) is None:
            continue
        low_high = (central.get("intervals") or {}).get(kind.name)
        text = FORMS[kind.unit].text
        interval = f"{text(low_high[0])} to {text(low_high[1])}" if low_high else DASH
        others = [text(kind.of(measured[model])) for model in shown[1:]]
        rows.append([kind.label, text(kind.of(central)), interval, *others])
    rows += [
        [name, score(value), DASH, *[DASH] * (len(shown) - 1)]
        for name, value in (central.get("own") or {}).items()
    ]
    head = ["score", MODELS["central"], "95 % interval", *(MODELS[model] for model in shown[1:])]
    return "Scores on the server's test set", head, rows


def leaderboard_table(run: Run) -> Table | None:
    """Return the models that a run has compared; None of a run that has compared none."""
    models, score = compared(run), run.score
    if len(models) < 2:
        return None
    text, by_accuracy = FORMS[score.unit].text, score == SCORES[0]

    def validation(row: dict[str, Any]) -> str:
        if row["validation"] is None:
            return DASH
        return f"{text(row['validation'])} ± {text(row['standard_error'])}"

    def test(row: dict[str, Any]) -> str:
        low_high = row["interval"]
        ends = f" ({text(low_high[0])} – {text(low_high[1])})" if low_high else ""
        return text(row["accuracy"] if by_accuracy else row["test"]) + ends

    chose = any(row["validation"] is not None for row in models)
    columns: list[tuple[str, bool, Callable[[dict[str, Any]], str]]] = [
        ("network", True, lambda row: row["network"]),
        (f"validation {score.label} ± error", chose, validation),
        (f"test {score.label} (95 %)", True, test),
        (
            "test accuracy",
            not (by_accuracy or run.is_regression),
            lambda row: percent(row["accuracy"]),
        ),
        ("parameters", True, lambda row: count(row["parameters"])),
        ("rounds", True, lambda row: count(row["rounds"])),
        ("time", True, lambda row: duration(row["seconds"])),
        (
            "epsilon",
            run.is_private,
            lambda row: epsilon_text(row["epsilon"]) if row["rounds"] else DASH,
        ),
        ("", any(row["reason"] for row in models), lambda row: row["reason"]),
    ]
    shown = [(head, cell) for head, known, cell in columns if known]
    head = [title for title, _ in shown]
    return "Models that were compared", head, [[cell(row) for _, cell in shown] for row in models]


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
    """Return the confusion matrix on the server's test set as a table."""
    central, names = run.scores("central"), run.class_names
    counts = central.get("confusion") or []
    if len(counts) != len(names) or not 0 < len(names) <= MOST_CLASSES:
        return None
    rows = [[name, *map(count, row)] for name, row in zip(names, counts, strict=True)]
    return "True class by row, predicted by column", ["", *names], rows


def client_table(run: Run) -> Table | None:
    """Return the scores on each client's own test records, where clients tell them.

    Accuracies have the 95 % interval of Wilson (1927), unless noise hides how many were right.
    """
    clients: Sequence[Mapping[str, Any]] = run.client_results()
    shown = [s for s in SCORES if any(s.of(client) is not None for client in clients)]
    if not shown:
        return None
    if many := len(clients) > MOST_SHOWN:
        names = [*(kind.name for kind in shown), "num_examples"]
        values = {n: [c[n] for c in clients if c.get(n) is not None] for n in names}
        columns = {name: quantiles(known) for name, known in values.items()}
        clients = [
            {"client": f"{share:.0%} of clients", **{n: v[i] for n, v in columns.items()}}
            for i, share in enumerate(QUANTILES)
        ]
    with_interval = not many and not run.is_private and shown[0] == SCORES[0]
    rows = []
    for client in clients:
        row = [FORMS[kind.unit].text(kind.of(client)) for kind in shown]
        if with_interval:
            low, high = wilson(client["accuracy"], client.get("num_examples"))
            row.insert(1, f"{percent(low)} to {percent(high)}")
        rows.append([str(client["client"]), *row, count(client.get("num_examples"))])
    head = ["client", *(kind.label for kind in shown), "records"]
    head[2:2] = ["95 % interval"] if with_interval else []
    return "Each client's own test records", head, rows


def score_tables(run: Run) -> list[Table]:
    """Return all tables that the run has numbers for."""
    made = (score_table(run), class_table(run), confusion_table(run), client_table(run))
    return [table for table in made if table is not None]


TEST_SEED = "test seed: no privacy"
ACCOUNTANTS = {PRV: "PRV", RDP: "RDP", GDP: "GDP (approximation, no bound)"}


def is_secure(client: Event) -> bool:
    """Return whether a client draws its noise and samples from a secret that only it knows."""
    return client["secure_noise"] is True


def release_table(event: Event) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of what clients committed to release, by kind."""
    head = ["stage", "action", "splits", "noise multiplier", "clipping norm"]
    head += ["expected batch", "rate p", "steps, at most"]
    rows = [
        [
            release["stage"],
            release["action"],
            ", ".join(release["splits"]),
            f"{release['noise_multiplier']:g}{' (of the sum)' if release.get('shared') else ''}",
            f"{release['max_grad_norm']:g}",
            "every record" if release["batch_size"] is None else f"{release['batch_size']:,}",
            _rates_text([client["rates"][place] for client in event["clients"]]),
            f"{release['steps']:,}",
        ]
        for place, release in enumerate(event["schedule"])
    ]
    return head, rows


def promise_table(
    event: Event, spent: Mapping[int, float | None]
) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table of what each client is promised.

    Args:
        event: The ``privacy`` event.
        spent: What the clients' filters count as spent; of a client not in it nothing is known.
    """
    clients = event["clients"]
    parts = list(dict.fromkeys(part for client in clients for part in client["records"]))
    splits = [s for s in parts if any(s in (c["epsilon"].get(PRV) or {}) for c in clients)]
    head = ["client", f"{sentence('unit', event)}s: {' / '.join(parts)}"]
    head += [*(f"epsilon, {split} (PRV)" for split in splits), "epsilon (PRV)"]
    head += [f"epsilon, {ACCOUNTANTS[name]}" for name in (RDP, GDP)]
    head += ["delta", "spent of budget (filter)", "noise"]
    rows = []
    for client in clients:
        prv = client["epsilon"].get(PRV) or {}
        budget = client["budget"]
        sizes = [f"{client['records'][p]:,}" if p in client["records"] else DASH for p in parts]
        row = [str(client["client"]), " / ".join(sizes)]
        row += [epsilon_text(prv[split]) if split in prv else DASH for split in splits]
        for name in ACCOUNTANTS:
            known = client["epsilon"].get(name) is not None
            row.append(epsilon_text(of_splits(client, name)) if known else DASH)
        row += [f"{budget['delta']:g}", spent_text(client, spent)]
        row.append("secret" if is_secure(client) else "test seed")
        rows.append(row)
    return head, rows


def spent_text(client: Event, spent: Mapping[int, float | None]) -> str:
    """The part of a client's budget that its filter counts as spent: ``2.90 of 8``."""
    number = client["client"]
    used = epsilon_text(spent[number]) if number in spent else DASH
    return f"{used} of {client['budget']['epsilon']:g}"


def _rates_text(rates: list[float]) -> str:
    """Return the rate of a release, or the range of the clients' rates."""
    if not rates:
        return "not recorded"
    least, largest = (f"{rate:.3g}" for rate in (min(rates), max(rates)))
    return least if least == largest else f"{least} to {largest}"


def phase_table(phases: Sequence[Event]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows: of each phase what was tried and the configuration that was chosen.

    Where rewards are noised, also the standard deviation of their noise and M, to which the change
    of a record's loss was clipped: rewards that differ by less than the noise say little.
    """
    names = list(phases[0]["configuration"])
    noised = any(event.get("noise") for event in phases)
    channel = {"noise": "its noise (std)", "loss_bound": "loss bound M"} if noised else {}
    head = ["before round", "tried", "best reward", *channel.values(), "chosen", "its estimate"]
    rows = []
    for event in phases:
        rewards = [reward for reward in event["rewards"].values() if reward is not None]
        best = event["best"]
        rows.append(
            [
                str(event["round"]),
                str(event["kappa"]),
                _number(max(rewards, default=None)),
                *(_number(event[name]) for name in channel),
                str(best),
                _number(event["estimates"][best]),
                *(_number(event["configuration"][name]) for name in names),
            ]
        )
    return [*head, *(name.replace("_", " ") for name in names)], rows


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.3g}"
