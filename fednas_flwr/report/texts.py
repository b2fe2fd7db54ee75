"""Sentences and small tables of the report: one function per piece of the page.

Each returns text or rows of text for the template, empty where the run holds nothing to say.
"""

import json
import shlex
from collections import Counter
from collections.abc import Container, Sequence
from datetime import datetime
from typing import Any

from fednas_flwr.report import guarantee
from fednas_flwr.report.guarantee import (
    TEST_SEED,
    epsilon_text,
    unit_text,
    warning_text,
)
from fednas_flwr.report.quantities import DASH, FORMS, count, duration, num_bytes, percent
from fednas_flwr.runs.events import Event, clients_of
from fednas_flwr.runs.numbers import BASELINES_FOLDER, METRICS, SCORES, Run, Score, overall
from fednas_flwr.settings.names import LINEAR, QUANTILES, SPLITS

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
NOISED_TEXT = (
    "Clients added noise to what they measured, so it can be below 0, or an accuracy above 100 %."
)
_STEPS = ("local_epochs", "batch_size", "local_steps", "sampling_rate", "expected_batch_size")
_SIZES = ("channels", "num_cells", "skeleton", "candidates", "width", "widths")
SHOWN = {  # what a reader asks first; all settings stand in the configuration
    "algorithm": ("network", "rule", "reduce", "sampler", *_STEPS),
    "search_space": (*_SIZES, "head", "activation", "norm"),
    "retrain": ("rounds", "channels", "num_cells", *_STEPS),
}


def _name(config: dict[str, Any], group: str) -> str:
    """Return the chosen name of a configuration group, a dash where there is none."""
    value = config.get(group)
    return str(value.get("name", DASH)) if isinstance(value, dict) else DASH


def title(run: Run) -> str:
    """Return the page's title: algorithm and data, else the folder's name."""
    if not run.config:
        return f"Run {run.folder.resolve().name}"
    settings = run.settings
    what = _name(settings, "algorithm") if "algorithm" in settings else "Given genotype"
    return f"{what} on {_name(settings, 'dataset')}"


def started_text(run: Run) -> str:
    """Return when the run started and how long it took."""
    if not run.events:
        return ""
    first = datetime.fromisoformat(run.events[0]["time"])
    return f"started {first:%Y-%m-%d %H:%M} UTC · {duration(run.total_seconds())}"


def reached(run: Run, names: Container[str]) -> list[tuple[str, str]]:
    """Label and text of each metric of these names that the run has reached."""
    rows = []
    for metric in METRICS:
        value = metric.read(run)
        if metric.name in names and value is not None:
            noised = ", noised" if run.is_private and metric.name == "client_accuracy" else ""
            rows.append((metric.label + noised, FORMS[metric.unit].text(value)))
    return rows


def scores(run: Run) -> list[tuple[str, str]]:
    """Label and text of all that says how good the run's model and simpler ones are."""
    return reached(run, [metric.name for metric in METRICS if metric.is_score])


def tiles(run: Run) -> list[dict[str, str]]:
    """Return label, value and note of each big number that the run reached."""
    notes = _notes(run)
    shown = [
        (metric.label, FORMS[metric.unit].text(metric.read(run)), notes.get(metric.name, ""))
        for metric in METRICS
        if metric.tile
    ]
    shown += [
        ("predicted cost", *cost(run)),
        _epsilon_tile(run),
        ("time", duration(run.total_seconds()), "all stages"),
        _failures_tile(run),
    ]
    return [
        {"label": label[0].upper() + label[1:], "value": value, "note": note}
        for label, value, note in shown
        if value != DASH
    ]


def _notes(run: Run) -> dict[str, str]:
    """What stands below the tiles of metrics, by their names."""
    numbers, evaluated = run.numbers(), run.last("evaluated") or {}
    central, total = evaluated.get("central") or {}, evaluated.get("total")
    noised = "noised, " if run.is_private else ""
    clients, drawn = run.config.get("clients"), run.config.get("sampling")
    of_all = f" drawn of {clients:,}" if drawn else ""
    tested = f"{noised}test parts of {len(run.client_results())} clients{of_all}"
    if total:
        tested = f"{noised}test parts of {total['sites']} clients as one, by a secure sum"
    best, linear = run.accuracy(), numbers["linear_accuracy"]
    gain = ""
    if best is not None and linear is not None:
        gain = f"network {100 * (best - linear):+.1f} points"
    names, positive = (
        (run.last("partition") or {}).get("class_names") or [],
        central.get("positive"),
    )
    word, words = ("label", "labels") if run.multi_label else ("class", "classes")
    over = f"mean over the {words}" if positive is None else f"of the {word} {names[positive]}"
    alone = percent(numbers["accuracy_without_cells"])
    return {
        **{f"central_{score.name}": _beside(numbers, score, over) for score in SCORES},
        "central_accuracy": f"server's test set, {count(central.get('num_examples'))} records",
        "accuracy_without_skip": f"the cells alone; the linear skip alone {alone}",
        "client_accuracy": tested,
        "personalised_accuracy": "mean over clients, each on its own test part",
        "linear_accuracy": gain,
        "trees_accuracy": "on the same pooled records",
        "num_parameters": "of the network",
        "multiply_adds": "for one example",
        "traffic_mb": "both directions",
    }


def _beside(numbers: dict[str, float | None], score: Score, over: str) -> str:
    """The classes that a score is of, and what simpler models reach by it."""
    simpler = {"linear model": f"linear_{score.name}", "boosted trees": f"trees_{score.name}"}
    others = [
        f"{model} {FORMS[score.unit].text(numbers[name])}"
        for model, name in simpler.items()
        if numbers.get(name) is not None
    ]
    return "; ".join([over, *others])


def _epsilon_tile(run: Run) -> tuple[str, str, str]:
    event = run.privacy
    if event is None:
        return "epsilon", DASH, ""
    epsilon, delta = overall(event)
    unit = f"at delta {delta:g}, {unit_text(event)}"
    return "epsilon", epsilon_text(epsilon), TEST_SEED if warning_text(event) else unit


def _failures_tile(run: Run) -> tuple[str, str, str]:
    failures, left = run.failures(), len(run.departures())
    parties = len({failure["client"] for failure in failures})
    troubles = [f"by {parties} client{'s' if parties > 1 else ''}"] if parties else []
    troubles += [f"{left} client{'s' if left > 1 else ''} left"] if left else []
    return "failures", str(len(failures)), ", ".join(troubles) or answered_text(run)


def cost(run: Run) -> tuple[str, str]:
    """Return the derived network's predicted cost and what it compares with; a dash without."""
    cost = (run.last("derived") or {}).get("cost")
    if not cost:
        return DASH, ""

    def amount(value: float) -> str:
        return f"{value:.3g} ms" if cost["unit"] == "ms" else f"{count(value)} multiply-adds"

    text = f"target {amount(cost['target'])}"
    if cost["measured"] is not None:
        ratio = cost["predicted"] / cost["measured"]
        text += f"; measured {amount(cost['measured'])} on {cost['machine']}, ratio {ratio:.2f}"
    return amount(cost["predicted"]), text


def facts(run: Run) -> list[tuple[str, str]]:
    """Return name and value of everything that says what was run."""
    config, started = run.settings, run.last("run_started") or {}
    versions = started.get("versions") or {}
    searched = guarantee.search_text(config, run.privacy)
    facts = [
        *((label, settings_text(config, key)) for key, label in GROUPS.items() if key in config),
        *((label, str(config[key])) for key, label in NUMBERS.items() if config.get(key)),
        ("the search was", searched if run.rounds("search") else ""),
        ("learning rate", _rates(config)),
        ("data", ". ".join((run.last("data") or {}).get("found") or [])),
        ("commit", str(started.get("commit") or "")),
        ("machine", str(started.get("machine") or "")),
        ("device", str(started.get("device") or "")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("folder", str(run.folder.resolve())),
    ]
    return [(name, value) for name, value in facts if value]


def _rates(config: dict[str, Any]) -> str:
    """Return the first learning rate of the weights in search and retraining, as far as set."""
    rates = []
    for group, stage in (("algorithm", "search"), ("retrain", "retraining")):
        settings = config.get(group)
        weights = settings.get("weights") if isinstance(settings, dict) else None
        if isinstance(weights, dict) and weights.get("lr") is not None:
            rates.append(f"{weights['lr']:g} in {stage}")
    return ", ".join(rates)


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


def privacy_notes(run: Run) -> list[str]:
    """Return sentences on what a private run's statement does not hold by itself."""
    runtime = run.config.get("runtime")
    simulated = isinstance(runtime, dict) and runtime.get("name") in ("inline", "ray")
    privacy = run.config.get("privacy")
    holds = {
        "resumed": len(run.of_kind("privacy")) > 1,
        "unfinished": run.privacy is not None and not _released_all(run),
        "simulated": simulated,
        "new_ledgers": simulated and not (isinstance(privacy, dict) and privacy.get("sites")),
        "genotype_from_elsewhere": bool(run.config.get("genotype")),
    }
    return [guarantee.sentence(name) for name, is_so in holds.items() if is_so]


def _released_all(run: Run) -> bool:
    """Return whether the run has reached all rounds of its stages, with all clients."""
    stages = {event["stage"]: event["rounds"] for event in run.of_kind("stage_started")}
    committed = {release["stage"] for release in (run.privacy or {}).get("schedule", [])}
    reached = [
        len(run.rounds(stage)) == stages.get(stage) for stage in STAGES if stage in committed
    ]
    return run.status == "completed" and all(reached) and not run.departures()


def answered_text(run: Run) -> str:
    """A sentence on the answers of the clients of a run without failures."""
    any_round = any(run.rounds(stage) for stage in STAGES) or run.of_kind("groups")
    return "every client answered" if any_round else "no round has finished"


def split_rows(partition: dict[str, Any]) -> list[list[str]]:
    """Return client, sizes of its parts, and their sum as table rows; none of too many clients."""
    return [
        [str(client), *(f"{split[s]:,}" for s in SPLITS), f"{sum(split[s] for s in SPLITS):,}"]
        for client, split in zip(clients_of(partition), partition.get("splits") or [], strict=True)
    ]


def partition_text(partition: dict[str, Any], *, declared: bool) -> str:
    """Return a sentence on the sizes of the clients and of the server's test set.

    Args:
        partition: The ``partition`` event.
        declared: Whether the sizes are what the clients declare, as in a private run.
    """
    summary = partition.get("summary")
    sizes = [sum(split.values()) for split in partition.get("splits") or []]
    if not sizes:
        sizes = [sum(row) for row in partition.get("counts") or []]
    if not sizes and not summary:
        return ""
    clients, total = len(sizes), sum(sizes)
    if summary:
        sizes, clients = summary["sizes"], summary["clients"]
        total = sum(summary["records"].values())
    text = f"{clients:,} clients hold {total:,} records; the smallest has {min(sizes):,}, "
    text += f"the largest {max(sizes):,}."
    if summary:
        between = zip(QUANTILES[1:-1], sizes[1:-1], strict=True)
        text += f" Quantiles: {', '.join(f'{share:.0%} {size:,}' for share, size in between)}."
    if declared:
        text += " These numbers are declared by the clients and public; counts per class are not."
    if partition.get("server_test"):
        text += f" The server's test set has {partition['server_test']:,} records."
    return text


def accuracy_text(run: Run) -> str:
    """Return a sentence on the worst and the best client."""
    clients = run.client_results()
    if not clients:
        return ""
    worst = min(clients, key=lambda client: client["accuracy"])
    best = max(clients, key=lambda client: client["accuracy"])
    text = (
        f"On the clients' own test parts: from {percent(worst['accuracy'])} (client "
        f"{worst['client']}) to {percent(best['accuracy'])} (client {best['client']})."
    )
    return f"{text} {NOISED_TEXT}" if run.is_private else text


def simpler_text(run: Run) -> str:
    """Return a sentence on the simpler models that the network is no better than; empty if none."""
    numbers, accuracy = run.numbers(), run.accuracy()
    trained = {baseline.folder.name: baseline.accuracy() for baseline in run.baselines()}
    simpler = {
        "a linear model on the same input": trained.get(LINEAR, numbers["linear_accuracy"]),
        "its linear skip alone": numbers["accuracy_without_cells"],
        "boosted trees": numbers["trees_accuracy"],
    }
    if accuracy is None:
        return ""
    as_good = [
        f"{name} ({percent(other)})"
        for name, other in simpler.items()
        if other is not None and other >= accuracy
    ]
    if not as_good:
        return ""
    return f"The network ({percent(accuracy)}) is no better than {' and '.join(as_good)}."


def time_rows(run: Run) -> list[tuple[str, str, float]]:
    """Return name, time and length of its bar in percent for each stage."""
    seconds = run.stage_seconds()
    longest = max(seconds.values(), default=0.0) or 1.0
    return [(name, duration(s), round(100 * s / longest, 1)) for name, s in seconds.items()]


def traffic_rows(run: Run) -> list[list[str]]:
    """Return stage, bytes sent and received, and both as a share of what whole states would take.

    The last row is their sum; the share is a dash where it is not known.
    """
    stages = [name for name in STAGES if any(run.traffic(name))]
    rows = [(name, *run.traffic(name), run.bytes_dense(name)) for name in stages]
    if len(rows) > 1:
        sent, received, dense = zip(*(row[1:] for row in rows), strict=True)
        whole = None if None in dense else sum(dense)
        rows.append(("all", sum(sent), sum(received), whole))
    return [
        [name, num_bytes(sent), num_bytes(got), percent((sent + got) / dense if dense else None)]
        for name, sent, got, dense in rows
    ]


COLUMN_HEAD = ["column", "what it is", "standardised by (mean, deviation)"]


def train_curve_text(run: Run, stage: str, metrics: Sequence[str]) -> str:
    """Return that curves of retraining are of training records alone, where they are."""
    if stage != "retrain" or "train_loss" not in metrics or "validation_loss" in metrics:
        return ""
    return (
        "Of training records alone, where overfitting does not show: the clients' validation "
        "records are trained on, too. retrain.evaluate_every=1 holds them out and measures on them."
    )


def column_rows(run: Run) -> list[list[str]]:
    """Return a row for each column of the table that the exported model takes; none of images."""
    inputs = (run.last("exported") or {}).get("inputs") or {"schema": [], "mean": [], "std": []}
    pairs = iter(zip(inputs["mean"], inputs["std"], strict=True))
    rows = {}
    for column in (c for c in inputs["schema"] if c["kind"] != "category"):
        mean, std = next(pairs)
        also = ", with a feature that says if it is missing" if column["indicator"] else ""
        rows[column["name"]] = [column["name"], column["kind"] + also, f"{mean:.6g}, {std:.6g}"]
    for column in (c for c in inputs["schema"] if c["kind"] == "category"):
        rows[column["name"]] = [column["name"], f"one of {', '.join(column['categories'])}", DASH]
    return [rows[column["name"]] for column in inputs["schema"]]


def use_rows(run: Run) -> list[tuple[str, str]]:
    """Return lines to copy that use the exported model, by how; none before the export."""
    exported = run.last("exported") or {}
    inputs = exported.get("inputs")
    if not inputs:
        return []
    data = "patients.csv" if len(inputs["shape"]) == 1 else "images/"
    path = str(run.folder.resolve())
    folder = shlex.quote(path)
    load = f"from fednas_flwr import load\nmodel = load({json.dumps(path, ensure_ascii=False)})\n"
    return [
        ("In Python", f'{load}print(model.predict("{data}").table())'),
        ("On the command line", f"fednas predict {folder} {data} --output predictions.csv"),
        ("To publish it", f"fednas export {folder} --to model-folder"),
    ]


def exported_text(run: Run) -> str:
    """Return a sentence on the exported files and the check of the ONNX file."""
    exported = run.last("exported")
    if exported is None:
        return ""
    text = f"Exported: {', '.join(exported['files'])}."
    difference = exported.get("onnx_max_difference")
    if difference is not None:
        text += f" ONNX and torch differ by at most {difference:.2g}."
    return text


def failure_text(run: Run) -> str:
    """The clients that left the run, and those whose replies were dropped most often."""
    counts = Counter(failure["client"] for failure in run.failures())
    named = [f"client {client}: {times}" for client, times in counts.most_common(5)]
    more = f" and {len(counts) - 5} more clients" if len(counts) > 5 else ""
    texts = [f"Client {e['client']} left the run." for e in run.departures()]
    texts += [f"Dropped replies, most frequent first: {', '.join(named)}{more}."] if named else []
    return " ".join(texts)


def failure_rows(run: Run) -> list[list[str]]:
    """Return client, stage, round, action and reason as table rows, clients that left first."""

    def row(event: Event, reason: str) -> list[str]:
        number = str(event["round"]) if event["round"] else DASH
        return [str(event["client"]), event["stage"], number, event["action"], reason]

    left = [row(event, f"left the run: {event['reason']}") for event in run.departures()]
    return [*left, *(row(event, str(event["reason"])) for event in run.failures())]


_OF_GROUPS = ("central_accuracy", "client_accuracy", "personalised_accuracy")
GROUP_METRICS = [m for m in METRICS if m.name in _OF_GROUPS or m.unit == "count"]
GROUP_HEAD = ["clients", "ended", *(metric.label for metric in GROUP_METRICS), "time"]


BASELINES = {  # what they are, by the first part of their names
    "random": "random ones of the search space",
    "data": "the choice of scores that read no record",
    "linear": "a linear model",
    "resnet8": "a ResNet-8 of about as many multiply-adds",
}
BASELINE_HEAD = ("test accuracy", "found minus it", "parameters", "multiply-adds", "epsilon", "")


def baseline_rows(run: Run) -> list[tuple[str, str, list[str]]]:
    """Return name, the link to its report, and the results of every network to compare with."""
    found, rows = run.accuracy(), []
    for baseline in run.baselines():
        numbers, accuracy = baseline.numbers(), baseline.accuracy()
        gain = DASH
        if found is not None and accuracy is not None:
            gain = f"{100 * (found - accuracy):+.1f} points"
        values = [
            percent(accuracy),
            gain,
            count(numbers["num_parameters"]),
            count(numbers["multiply_adds"]),
            epsilon_text(numbers["epsilon"]) if baseline.is_private else DASH,
            baseline.reason or "",
        ]
        name = baseline.folder.name
        rows.append((name, f"./{BASELINES_FOLDER}/{name}/report.html", values))
    return rows


def baselines_text(run: Run) -> str:
    """A sentence on the baselines and how they were trained."""
    paid = " Each had a ledger of its own, so all epsilon, as no real site would give."
    if (run.config.get("privacy") or {}).get("baseline_share"):
        paid = (
            " Sites paid for each of them besides, by equal parts of privacy.baseline_share; its "
            "epsilon is that of all that they have released by then."
        )
    names = {baseline.folder.name.partition("_")[0] for baseline in run.baselines()}
    kinds = [text for name, text in BASELINES.items() if name in names]
    retrained = ""
    if (run.config.get("algorithm") or {}).get("name") == "feathers":
        retrained = (
            " FEATHERS also retrained the random ones; the others had the constants of retrain."
        )
    return (
        "Networks that were not searched, with the same retraining, clients and records: "
        f"{', '.join(kinds)}.{retrained}" + (paid if run.is_private else "")
    )


def group_rows(run: Run) -> list[tuple[str, str, list[str]]]:
    """Return name, the link to its report, and the results of every group that has ended."""
    latest = {event["group"]: event for event in run.of_kind("group_finished")}
    rows = []
    for name, event in sorted(latest.items()):
        values = [
            ", ".join(map(str, event["clients"])),
            event["status"] if event["reason"] is None else str(event["reason"]),
            *(FORMS[m.unit].text(event["results"][m.name]) for m in GROUP_METRICS),
            duration(event["seconds"]),
        ]
        rows.append((name, f"./{event['folder']}/report.html", values))
    return rows
