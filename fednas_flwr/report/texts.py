"""Words of report, card and terminal that several of them share: title, facts, results, columns.

Sentences are macros of ``page/sentences.j2``; what one page alone says is in its template.
"""

from collections.abc import Container
from typing import Any

from fednas_flwr.report.quantities import DASH, as_unit
from fednas_flwr.report.templates import sentence
from fednas_flwr.runs.numbers import METRICS, Run

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
    "algorithm": ("network", "rule", "reduce", "sampler", *_STEPS),
    "search_space": (*_SIZES, "head", "activation", "norm"),
    "retrain": ("rounds", "channels", "num_cells", *_STEPS),
}


def title(run: Run) -> str:
    """Return the page's title: algorithm and data, else the folder's name."""
    if not run.config:
        return f"Run {run.folder.resolve().name}"
    searched = "algorithm" in run.settings
    what = run.group("algorithm").get("name", DASH) if searched else "Given genotype"
    return f"{what} on {run.group('dataset').get('name', DASH)}"


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
    """Label and text of all that says how good the run's model and simpler ones are."""
    return reached(run, [metric.name for metric in METRICS if metric.is_score])


def facts(run: Run) -> list[tuple[str, str]]:
    """Return name and value of everything that says what was run."""
    config, started = run.settings, run.last("run_started")
    versions = started.get("versions") or {}
    rates = [
        f"{group['weights']['lr']:g} in {stage}"
        for group, stage in (
            (config.get("algorithm"), "search"),
            (config.get("retrain"), "retraining"),
        )
        if isinstance(group, dict) and (group.get("weights") or {}).get("lr") is not None
    ]
    searched = sentence("search_privacy", config, run.privacy) if run.rounds("search") else ""
    facts = [
        *((label, settings_text(config, key)) for key, label in GROUPS.items() if key in config),
        *((label, str(config[key])) for key, label in NUMBERS.items() if config.get(key)),
        ("the search was", searched),
        ("learning rate", ", ".join(rates)),
        ("data", ". ".join(run.last("data").get("found") or [])),
        *((name, str(started.get(name) or "")) for name in ("commit", "machine", "device")),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("folder", str(run.folder.resolve())),
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
        rows[column["name"]] = [column["name"], column["kind"] + also, f"{mean:.6g}, {std:.6g}"]
    for column in (c for c in inputs["schema"] if c["kind"] == "category"):
        rows[column["name"]] = [column["name"], f"one of {', '.join(column['categories'])}", DASH]
    return [rows[column["name"]] for column in inputs["schema"]]
