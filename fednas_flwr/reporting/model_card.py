"""MODEL_CARD.md: what the model of a run is, what it was made from, and what it is not good for."""

from pathlib import Path
from typing import Any

from fednas_flwr.files import write_atomically
from fednas_flwr.reporting import guarantee
from fednas_flwr.reporting.compare import markdown_table
from fednas_flwr.reporting.events import Event
from fednas_flwr.reporting.runs import Run, read_run
from fednas_flwr.reporting.texts import NUMBERS, cost, privacy_notes, settings_text, title
from fednas_flwr.reporting.units import DASH, count, duration, num_bytes, percent, score

SETTINGS = ("algorithm", "search_space", "retrain", "privacy")


def write_model_card(run_folder: Path) -> Path:
    """Write the run's MODEL_CARD.md and return its path; what the run did not reach is left out.

    Raises:
        FileNotFoundError: The folder holds no events.jsonl.
    """
    run = read_run(run_folder)
    sections = [
        _heading(run),
        _data(run),
        _training(run),
        _results(run),
        _loading(run),
        _limits(run),
        _privacy(run),
    ]
    return write_atomically(
        run_folder / "MODEL_CARD.md", "\n\n".join(filter(None, sections)) + "\n"
    )


def _name(run: Run, group: str) -> str:
    value = run.config.get(group)
    return str(value["name"]) if isinstance(value, dict) and "name" in value else "not recorded"


def _heading(run: Run) -> str:
    numbers = run.numbers()
    text = (
        f"# {title(run)}\n\n{_origin(run)} The records stayed with the clients. "
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
    splits, names = event.get("splits") or [], event.get("class_names") or []
    lines = ["## Data and parties", "", f"- data set: {_name(run, 'dataset')}"]
    if splits:
        parts = {part: sum(split[part] for split in splits) for part in splits[0]}
        sizes = ", ".join(f"{size:,} {part}" for part, size in parts.items())
        how = settings_text(run.config, "partition") if "partition" in run.config else ""
        split = f", split by {how}," if how else ""
        declared = ", as they declare" if run.is_private else ""
        lines.append(f"- {len(splits)} clients{split} with together {sizes} records{declared}")
    if event.get("server_test"):
        lines.append(f"- test set held by the server: {event['server_test']:,} records")
    if names:
        lines.append(f"- {len(names)} classes: {', '.join(str(name) for name in names)}")
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
            "F1 on it (of two classes the last, of more the mean)",
            score(numbers["central_f1"]),
        ],
        ["AUROC on it, likewise", score(numbers["central_auroc"])],
        [f"mean accuracy on the clients' test parts{noised}", percent(numbers["client_accuracy"])],
        ["the same after local training", percent(numbers["personalised_accuracy"])],
        ["linear model on the same data", percent(numbers["linear_accuracy"])],
        ["F1 of the linear model", score(numbers["linear_f1"])],
        ["AUROC of the linear model", score(numbers["linear_auroc"])],
        *([f"time of {name}", duration(seconds)] for name, seconds in stages.items()),
        ["traffic, both directions", num_bytes(None if traffic is None else traffic * 1e6)],
        ["dropped replies", str(len(run.failures()))],
        *([f"client {e['client']} left the run", str(e["reason"])] for e in run.departures()),
    ]
    reached = [row for row in rows if row[1] != DASH]
    return "\n".join(["## Results", "", *markdown_table(["result", "value"], reached)])


def _loading(run: Run) -> str:
    exported = (run.last("exported") or {}).get("files") or []
    if not exported:
        return ""
    return (
        "## How to load it\n\n```python\nfrom fednas_flwr import load_network\n\n"
        f'network = load_network("{run.folder}")  # a torch module in eval mode\n```\n\n'
        f"Files: {', '.join(exported)}."
    )


def _limits(run: Run) -> str:
    lines = [
        "## Limits",
        "",
        _seed_limit(run),
        "- Inputs must be prepared as in training (size, channels, normalisation).",
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
