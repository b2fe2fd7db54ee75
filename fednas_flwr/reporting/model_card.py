"""MODEL_CARD.md: what the model of a run is, what it was made from, and what it is not good for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednas_flwr.errors import ConfigError
from fednas_flwr.files import write_atomically
from fednas_flwr.foreign import mapped, markdown, terminal
from fednas_flwr.reporting import guarantee, scores
from fednas_flwr.reporting.compare import markdown_table
from fednas_flwr.reporting.events import Event, records_of
from fednas_flwr.reporting.runs import EVENTS_FILE, Run, read_run
from fednas_flwr.reporting.texts import (
    COLUMN_HEAD,
    NUMBERS,
    column_rows,
    cost,
    privacy_notes,
    settings_text,
    title,
)
from fednas_flwr.reporting.units import DASH, count, duration, num_bytes, percent, score

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

HUB_METRICS = {"accuracy": "central_accuracy", "f1": "central_f1", "roc_auc": "central_auroc"}
PUBLISHED = "snapshot_download('<user>/<model>')"  # of huggingface_hub
SETTINGS = ("algorithm", "search_space", "retrain", "privacy")


def write_model_card(run_folder: Path) -> Path:
    """Write the run's MODEL_CARD.md and return its path; what the run did not reach is left out.

    Raises:
        FileNotFoundError: The folder holds no events.jsonl.
    """
    run = read_run(run_folder)
    return write_atomically(run_folder / "MODEL_CARD.md", _card(run, _quoted(str(run_folder))))


def card_of(run_folder: Path) -> str:
    """Return the card that goes to the sites with the model, while the run is at its end."""
    run = read_run(run_folder)
    ended = run.events[-1] | {"event": "run_finished", "status": "completed"}
    return _card(replace(run, events=[*run.events, ended]), '"<this folder>"')


def export_model(run_folder: Path, to: Path) -> list[Path]:
    """Return the files of a new folder that is ready to be published as a model repository.

    The model's files, its genotype, and the card as ``README.md`` in the form of the Hugging Face
    Hub, with the results as metadata. Nothing in it names a path of this machine.

    Raises:
        ConfigError: The run has exported no model, or the folder is not new and cannot be made.
    """
    if not (run_folder / EVENTS_FILE).is_file():
        raise ConfigError(f"{run_folder} holds no {EVENTS_FILE}: give the folder of a run.")
    run = read_run(run_folder)
    files = [Path(name).name for name in (run.last("exported") or {}).get("files") or []]
    if not files:
        raise ConfigError(f"{run_folder} has no exported model: let its stage export run.")
    try:
        to.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--to={to} must be a new folder: {error.strerror}.") from error
    copied = [to / name for name in (*files, "genotype.json") if (run_folder / name).is_file()]
    for path in copied:
        shutil.copyfile(run_folder / path.name, path)
    card = f"---\n{_metadata(run).to_yaml()}\n---\n\n{_card(run, PUBLISHED)}"
    return [*copied, write_atomically(to / "README.md", card)]


def _metadata(run: Run) -> ModelCardData:
    """Return what the Hugging Face Hub reads of a card; it needs results to have a model's name."""
    from huggingface_hub import EvalResult, ModelCardData

    inputs = (run.last("exported") or {}).get("inputs") or {}
    task = f"{'tabular' if len(inputs.get('shape', ())) == 1 else 'image'}-classification"
    numbers = run.numbers()
    results = [
        EvalResult(
            task_type=task,
            dataset_type=terminal(_name(run, "dataset")),
            dataset_name=terminal(_name(run, "dataset")),
            metric_type=metric,
            metric_value=numbers[name],
        )
        for metric, name in HUB_METRICS.items()
        if numbers[name] is not None
    ]
    return ModelCardData(
        model_name=terminal(title(run)),
        library_name="fednas_flwr",
        pipeline_tag=task,
        tags=["federated-learning", "neural-architecture-search", "onnx"],
        eval_results=results or None,
    )


def _card(run: Run, place: str) -> str:
    """Return the card; ``place`` is what the model is loaded from.

    All text of the run is escaped before a sentence is made of it: it may be a stranger's.
    """
    run = replace(run, config=mapped(run.config, markdown), events=mapped(run.events, markdown))
    sections = [
        _heading(run),
        _data(run),
        _training(run),
        _results(run),
        _inputs(run),
        _loading(run, place),
        _limits(run),
        _privacy(run),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _inputs(run: Run) -> str:
    """Return what the exported model takes."""
    inputs = (run.last("exported") or {}).get("inputs")
    if not inputs:
        return ""
    lines = ["## What it takes and gives", ""]
    if inputs["schema"]:
        lines += markdown_table(COLUMN_HEAD, column_rows(run))
        lines += [
            "",
            "A missing number or date counts as the mean; a missing or unknown category belongs to "
            "none. Dates are days since 1970 in model.onnx, and 2024-05-31 or 31.5.2024 elsewhere.",
        ]
    else:
        channels, height, width = inputs["shape"]
        lines.append(
            f"Images [N, {channels}, {height}, {width}], uint8 from 0 to 255, or in Python float "
            "from 0 to 1; files of any size are resized (bilinear). Normalisation is inside: "
            f"mean {_numbers(inputs['mean'])}, deviation {_numbers(inputs['std'])}."
        )
    classes = ", ".join(inputs["class_names"])
    gives = f"It gives a label and probabilities (softmax) of the classes {classes}."
    if inputs.get("multi_label"):
        gives = (
            f"A record can have several of the labels {classes}, or none: it gives the probability "
            "(sigmoid) of each, and those from 1/2 on."
        )
    lines += ["", gives]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _name(run: Run, group: str) -> str:
    value = run.config.get(group)
    return str(value["name"]) if isinstance(value, dict) and "name" in value else "not recorded"


def _heading(run: Run) -> str:
    numbers = run.numbers()
    text = (
        f"# {markdown(title(run))}\n\n{_origin(run)} The records stayed with the clients. "
        "Made by fednas_flwr."
    )
    if numbers["num_parameters"] is not None:
        text += f"\n\n{count(numbers['num_parameters'])} parameters"
        if numbers["multiply_adds"] is not None:
            text += f", {count(numbers['multiply_adds'])} multiply-adds for one example"
        text += "."
    predicted, compared = cost(run)
    if compared:
        text += f" Predicted cost: {predicted} ({compared})."
    if run.status != "completed":
        text += f"\n\n**The run is {run.status}**{': ' + run.reason if run.reason else ''}."
    return text


def _origin(run: Run) -> str:
    """Return what was searched for and trained, as far as the run came."""
    if run.of_kind("groups"):
        return "Classifiers of groups of clients: the folder of each group has a card of its own."
    searched = (
        f"searched for by several clients together (search space {_name(run, 'search_space')})"
    )
    trained = bool(run.rounds("retrain"))
    if run.rounds("search"):
        if not trained:
            return f"An architecture {searched}; its weights were not trained."
        return (
            f"A classifier whose architecture was {searched} and whose weights they then trained "
            "together."
        )
    if not trained:
        return "Nothing was searched for or trained."
    return "A classifier of a given architecture, whose weights several clients trained together."


def _data(run: Run) -> str:
    event = run.last("partition") or {}
    (clients, parts), names = records_of(event), event.get("class_names") or []
    lines = ["## Data and parties", "", f"- data set: {_name(run, 'dataset')}"]
    if clients:
        sizes = ", ".join(f"{size:,} {part}" for part, size in parts.items())
        how = settings_text(run.config, "partition") if "partition" in run.config else ""
        split = f", split by {how}," if how else ""
        declared = ", as they declare" if run.is_private else ""
        lines.append(f"- {clients:,} clients{split} with together {sizes} records{declared}")
    if event.get("server_test"):
        lines.append(f"- test set held by the server: {event['server_test']:,} records")
    if names:
        word = "labels, of which a record can have several" if run.multi_label else "classes"
        lines.append(f"- {len(names)} {word}: {', '.join(str(name) for name in names)}")
    return "\n".join(lines)


def _training(run: Run) -> str:
    settings = run.settings
    if not settings:
        return ""
    rows = [
        [f"{group}.{key}" if key else group, text]
        for group in SETTINGS
        for key, text in _flat(settings.get(group))
    ]
    rows += [[label, str(settings[key])] for key, label in NUMBERS.items() if settings.get(key)]
    started = run.last("run_started") or {}
    versions = started.get("versions") or {}
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = ["## Search and training", "", *markdown_table(["setting", "value"], rows), ""]
    lines.append(
        f"Versions: {made or 'not recorded'}; commit {started.get('commit') or 'unknown'}."
    )
    return "\n".join([*lines, "All settings: config.yaml; all rounds: events.jsonl, report.html."])


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if not isinstance(value, dict):
        return [] if value is None or value == [] else [(prefix, str(value))]
    return [
        item for key, inner in value.items() for item in _flat(inner, f"{prefix}.{key}".strip("."))
    ]


def _results(run: Run) -> str:
    numbers = run.numbers()
    stages = run.stage_seconds()
    traffic = numbers["traffic_mb"]
    noised = ", noised by them" if run.is_private else ""
    rows = [
        ["accuracy on the server's test set", percent(numbers["central_accuracy"])],
        [
            "F1 on it",
            score(numbers["central_f1"]),
        ],
        ["AUROC on it", score(numbers["central_auroc"])],
        [f"mean accuracy on the clients' test parts{noised}", percent(numbers["client_accuracy"])],
        ["the same after local training", percent(numbers["personalised_accuracy"])],
        ["linear model on the same data", percent(numbers["linear_accuracy"])],
        ["F1 of the linear model", score(numbers["linear_f1"])],
        ["AUROC of the linear model", score(numbers["linear_auroc"])],
        ["boosted trees on the same data", percent(numbers["trees_accuracy"])],
        ["F1 of the boosted trees", score(numbers["trees_f1"])],
        ["AUROC of the boosted trees", score(numbers["trees_auroc"])],
        *([f"time of {name}", duration(seconds)] for name, seconds in stages.items()),
        ["traffic, both directions", num_bytes(None if traffic is None else traffic * 1e6)],
        ["dropped replies", str(len(run.failures()))],
        *([f"client {e['client']} left the run", str(e["reason"])] for e in run.departures()),
    ]
    reached = [row for row in rows if row[1] != DASH]
    lines = ["## Results", "", *markdown_table(["result", "value"], reached)]
    if tables := scores.tables(run):
        lines += ["", scores.positive_text(run)]
    for name, head, body in tables:
        lines += ["", f"### {name}", "", *markdown_table(head, body)]
    if text := scores.calibration_text(run):
        lines += ["", text]
    return "\n".join(lines)


def _loading(run: Run, place: str) -> str:
    exported = (run.last("exported") or {}).get("files") or []
    if not exported:
        return ""
    fetched = "from huggingface_hub import snapshot_download\n" * (place == PUBLISHED)
    return (
        f"## How to use it\n\n```python\nfrom fednas_flwr import load\n{fetched}\n"
        f"model = load({place})  # takes raw data: normalisation and classes are inside\n"
        'print(model.predict("data").labels)  # arrays, a DataFrame, or a path\n```\n\n'
        f"Files: {', '.join(exported)}."
    )


def _limits(run: Run) -> str:
    lines = [
        "## Limits",
        "",
        _seed_limit(run),
    ]
    known = [client["accuracy"] for client in run.client_results()]
    if known:
        noised = " with the noise that they added" if run.is_private else ""
        lines.append(
            "- Clients differ: the accuracy on their own test parts runs from "
            f"{percent(min(known))} to {percent(max(known))}{noised}."
        )
    return "\n".join(lines)


def _seed_limit(run: Run) -> str:
    if run.last("evaluated") is None:
        return "- It was not evaluated."
    architecture = "another architecture and " if run.rounds("search") else ""
    return (
        "- It was evaluated only on data like its training data, with the seed above; another seed "
        f"gives {architecture}another accuracy."
    )


def _privacy(run: Run) -> str:
    event = run.privacy
    if not run.is_private:
        paragraphs = [
            "none: this run makes no differential-privacy claim. Records stayed with the clients, "
            "but what they sent and the model itself may reveal something about them."
        ]
    elif event is None:
        paragraphs = ["No client has accepted a schedule of this run yet: no epsilon is known."]
    else:
        warning = guarantee.warning_text(event)
        paragraphs = [f"**{warning}**"] if warning else []
        paragraphs += [
            "\n".join(_promises(run, event)),
            "\n".join(markdown_table(*guarantee.release_table(event))),
            *privacy_notes(run),
            *guarantee.promise_texts(event),
        ]
    return "\n\n".join(["## Privacy", *paragraphs])


def _promises(run: Run, event: Event) -> list[str]:
    """Return the lines of a table with the one (epsilon, delta) of each client."""
    spent = run.privacy_spent()
    head = ["client", "(epsilon, delta)", "unit", "spent of budget (filter)"]
    rows = []
    for client in event["clients"]:
        epsilon, delta = guarantee.overall({"clients": [client]})
        pair = f"({guarantee.epsilon_text(epsilon)}, {delta:g})"
        rows.append(
            [
                str(client["client"]),
                pair if guarantee.is_secure(client) else f"none ({guarantee.TEST_SEED})",
                guarantee.unit_text({"clients": [client]}),
                guarantee.spent_text(client, spent),
            ]
        )
    return markdown_table(head, rows)
