"""MODEL_CARD.md: a description of a run's model, its origin, and its limits."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.files import write_atomically
from fednas_flwr.base.foreign import terminal
from fednas_flwr.report import score_tables, templates
from fednas_flwr.runs.events import records_of
from fednas_flwr.runs.numbers import EVENTS_FILE, SCORES, Run, read_run

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

CARD_FILE, KEPT_FILE = "MODEL_CARD.md", "model.safetensors"  # as they return to sites
PUBLISHED = "snapshot_download('<user>/<model>')"  # from huggingface_hub


def write_model_card(run_folder: Path) -> Path:
    """Write the run's MODEL_CARD.md and return its path; results not reached are left out.

    Raises:
        ConfigError: The folder holds no events.jsonl.
    """
    place = json.dumps(run_folder.resolve().name, ensure_ascii=False)
    return write_atomically(run_folder / CARD_FILE, _card(read_run(run_folder), place))


def card_of(run_folder: Path) -> str:
    """Return the card that goes to the sites with the model at the end of a run."""
    run = read_run(run_folder)
    ended = run.events[-1] | {"event": "run_finished", "status": "completed"}
    sent = run.last("exported") | {"files": [KEPT_FILE]}
    return _card(replace(run, events=[*run.events, sent, ended]), '"<this folder>"')


def export_model(run_folder: Path, to: Path) -> list[Path]:
    """Make a new folder that is ready to be published as a model repository; return its files.

    They are the model's files, its genotype, and the card as ``README.md`` in the form of the
    Hugging Face Hub, with the results as metadata. None of them names a path of this machine. Of a
    model that a site keeps they are the file and the card as they were signed; results on the
    site's records stay there.

    Raises:
        ConfigError: The run has exported no model, or the folder exists or cannot be made.
    """
    kept = run_folder / CARD_FILE
    if kept.is_file() and not (run_folder / EVENTS_FILE).exists():
        files, card = [KEPT_FILE], kept.read_text(encoding="utf-8")
    else:
        run = read_run(run_folder)
        files = [Path(name).name for name in run.last("exported").get("files") or []]
        card = f"---\n{_metadata(run).to_yaml()}\n---\n\n{_card(run, PUBLISHED)}"
    if not files:
        raise ConfigError(f"{run_folder} has no exported model: let its stage export run.")
    try:
        to.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--to={to} must be a new folder: {error.strerror}.") from error
    copied = [to / name for name in (*files, "genotype.json") if (run_folder / name).is_file()]
    for path in copied:
        shutil.copyfile(run_folder / path.name, path)
    return [*copied, write_atomically(to / "README.md", card)]


def _metadata(run: Run) -> "ModelCardData":
    """Return the head of a card for the Hugging Face Hub, where results need a model's name."""
    from huggingface_hub import EvalResult, ModelCardData

    inputs = run.last("exported").get("inputs") or {}
    kind = "regression" if inputs.get("target") else "classification"
    task = f"{'tabular' if len(inputs.get('shape', ())) == 1 else 'image'}-{kind}"
    numbers, data = run.numbers(), terminal(run.group("dataset").get("name", "not recorded"))
    results = [
        EvalResult(
            task_type=task,
            dataset_type=data,
            dataset_name=data,
            metric_type=score.hub,
            metric_value=numbers[f"central_{score.name}"],
        )
        for score in SCORES
        if score.hub and numbers[f"central_{score.name}"] is not None
    ]
    return ModelCardData(
        model_name=terminal(templates.sentence("title", run)),
        library_name="fednas_flwr",
        pipeline_tag=task,
        tags=["federated-learning", "neural-architecture-search", "onnx"],
        eval_results=results or None,
    )


def _card(run: Run, place: str) -> str:
    """Return the card; ``place`` is the place that the model is loaded from."""
    text = templates.render(
        "card.md.j2",
        run=run,
        tables=score_tables,
        records_of=records_of,
        place=Markup(place),
        published=place == PUBLISHED,
    )
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
