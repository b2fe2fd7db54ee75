"""MODEL_CARD.md: what the model of a run is, what it was made from, and what it is not good for."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.files import write_atomically
from fednas_flwr.base.foreign import terminal
from fednas_flwr.report import guarantee, score_tables, templates, texts
from fednas_flwr.report.quantities import count, duration, percent
from fednas_flwr.runs.events import records_of
from fednas_flwr.runs.numbers import EVENTS_FILE, SCORES, Run, overall, read_run

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

PUBLISHED = "snapshot_download('<user>/<model>')"  # of huggingface_hub
SETTINGS = ("algorithm", "search_space", "retrain", "privacy")


def write_model_card(run_folder: Path) -> Path:
    """Write the run's MODEL_CARD.md and return its path; what the run did not reach is left out.

    Raises:
        FileNotFoundError: The folder holds no events.jsonl.
    """
    place = json.dumps(str(run_folder), ensure_ascii=False)
    return write_atomically(run_folder / "MODEL_CARD.md", _card(read_run(run_folder), place))


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
    """The head of a card for the Hugging Face Hub, which needs results to have a model's name."""
    from huggingface_hub import EvalResult, ModelCardData

    inputs = (run.last("exported") or {}).get("inputs") or {}
    task = f"{'tabular' if len(inputs.get('shape', ())) == 1 else 'image'}-classification"
    numbers = run.numbers()
    results = [
        EvalResult(
            task_type=task,
            dataset_type=terminal(_name(run, "dataset")),
            dataset_name=terminal(_name(run, "dataset")),
            metric_type=score.hub,
            metric_value=numbers[f"central_{score.name}"],
        )
        for score in SCORES
        if score.hub and numbers[f"central_{score.name}"] is not None
    ]
    return ModelCardData(
        model_name=terminal(texts.title(run)),
        library_name="fednas_flwr",
        pipeline_tag=task,
        tags=["federated-learning", "neural-architecture-search", "onnx"],
        eval_results=results or None,
    )


def _card(run: Run, place: str) -> str:
    """The card; ``place`` is what the model is loaded from."""
    text = templates.render(
        "card.md.j2",
        run=run,
        texts=texts,
        score_tables=score_tables,
        count=count,
        space=_name(run, "search_space"),
        results=_results(run),
        place=Markup(place),
        published=place == PUBLISHED,
        accuracies=_accuracies(run),
        privacy=_privacy(run),
        **_data(run),
        **_training(run),
        **_exported(run),
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _name(run: Run, group: str) -> str:
    value = run.config.get(group)
    return str(value["name"]) if isinstance(value, dict) and "name" in value else "not recorded"


def _data(run: Run) -> dict[str, Any]:
    event = run.last("partition") or {}
    (clients, parts), classes = records_of(event), event.get("class_names") or []
    return {
        "dataset": _name(run, "dataset"),
        "clients": f"{clients:,}" if clients else "",
        "partition": texts.settings_text(run.config, "partition")
        if "partition" in run.config
        else "",
        "sizes": ", ".join(f"{size:,} {part}" for part, size in parts.items()),
        "server_test": f"{event['server_test']:,}" if event.get("server_test") else "",
        "classes": classes,
        "class_names": ", ".join(map(str, classes)),
    }


def _training(run: Run) -> dict[str, Any]:
    settings, started = run.settings, run.last("run_started") or {}
    rows = [
        [f"{group}.{key}" if key else group, text]
        for group in SETTINGS
        for key, text in _flat(settings.get(group))
    ]
    rows += [
        [label, str(settings[key])] for key, label in texts.NUMBERS.items() if settings.get(key)
    ]
    versions = (started.get("versions") or {}).items()
    return {
        "settings": rows,
        "versions": ", ".join(f"{name} {version}" for name, version in versions) or "not recorded",
        "commit": started.get("commit") or "unknown",
    }


def _flat(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if not isinstance(value, dict):
        return [] if value is None or value == [] else [(prefix, str(value))]
    return [
        item for key, inner in value.items() for item in _flat(inner, f"{prefix}.{key}".strip("."))
    ]


def _results(run: Run) -> list[tuple[str, str]]:
    """Label and text of all that the run measured, and of the clients that failed it."""
    return [
        *texts.scores(run),
        *((f"time of {name}", duration(seconds)) for name, seconds in run.stage_seconds().items()),
        *texts.reached(run, ["traffic_mb"]),
        ("dropped replies", str(len(run.failures()))),
        *((f"client {e['client']} left the run", str(e["reason"])) for e in run.departures()),
    ]


def _exported(run: Run) -> dict[str, Any]:
    """The exported files, and what the model in them takes and gives."""
    exported = run.last("exported") or {}
    inputs = exported.get("inputs") or {}
    return {
        "files": ", ".join(exported.get("files") or []),
        "inputs": inputs,
        "labels": ", ".join(inputs.get("class_names", ())),
        "mean": _numbers(inputs.get("mean", ())),
        "std": _numbers(inputs.get("std", ())),
    }


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _accuracies(run: Run) -> list[str]:
    """The lowest and the highest accuracy of the clients, empty where none has sent one."""
    accuracies = [client["accuracy"] for client in run.client_results()]
    return [percent(min(accuracies)), percent(max(accuracies))] if accuracies else []


def _privacy(run: Run) -> dict[str, Any]:
    """Tables and paragraphs of a private run with an accepted schedule."""
    event, spent = run.privacy, run.privacy_spent()
    if event is None:
        return {}
    promises = []
    for client in event["clients"]:
        alone = {"clients": [client]}
        epsilon, delta = overall(alone)
        pair = f"({guarantee.epsilon_text(epsilon)}, {delta:g})"
        promises.append(
            [
                str(client["client"]),
                pair if guarantee.is_secure(client) else f"none ({guarantee.TEST_SEED})",
                guarantee.unit_text(alone),
                guarantee.spent_text(client, spent),
            ]
        )
    return {
        "warning": guarantee.warning_text(event),
        "head": ["client", "(epsilon, delta)", "unit", "spent of budget (filter)"],
        "promises": promises,
        "releases": guarantee.release_table(event),
        "texts": [*texts.privacy_notes(run), *guarantee.promise_texts(event)],
    }
