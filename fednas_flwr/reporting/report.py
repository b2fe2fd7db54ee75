"""report.html: one run on one page that needs no network and no server.

`write_report` reads the run folder alone, so it can be called at any time, also for a run that
failed or still goes on: what the run did not reach has no section. The page's template, style and
script are the files of ``page/``. The template is rendered with autoescape; only the style, the
script, the figures' JSON and the cells' SVG are put in as they are, and none of them
holds text that a client wrote.
"""

import json
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fednas_flwr.files import write_atomically
from fednas_flwr.reporting import decidedness, exploration, guarantee, plots, scores, texts
from fednas_flwr.reporting.cells import cell_svg
from fednas_flwr.reporting.runs import CONFIG_FILE, Run, read_run
from fednas_flwr.reporting.units import DASH, rounds_text

WIDEST_IN_PAIRS = 640


def write_report(run_folder: Path) -> Path:
    """Write the run's report.html and return its path.

    Raises:
        FileNotFoundError: The folder holds no events.jsonl.
    """
    return write_atomically(run_folder / "report.html", render_report(run_folder))


def render_report(run_folder: Path) -> str:
    """Return the page of a run's report, HTML.

    Raises:
        FileNotFoundError: The folder holds no events.jsonl.
    """
    run = read_run(run_folder)
    derived, partition = run.last("derived") or {}, run.last("partition") or {}
    evaluated = run.last("evaluated") or {}
    genotype = derived.get("genotype")
    alphas, edges = plots.alphas(run.alphas(), genotype), decidedness.edges(run.alphas())
    warnings = Counter(str(e["message"]) for e in run.of_kind("warning"))
    warnings.update(filter(None, [decidedness.warning(edges)]))
    stages = [_stage(run, name) for name in texts.STAGES if run.rounds(name)]
    figures = {name: figure for stage in stages for name, figure in stage["figures"].items()}
    figures |= {f"alphas_{kind}": shown["figure"] for kind, shown in alphas["kinds"].items()}
    optional = {
        "partition": plots.partition(partition),
        "clients": plots.client_accuracy(evaluated),
        "reliability": scores.reliability(run),
        "traffic_search": plots.traffic(run.rounds("search")),
        "traffic_retrain": plots.traffic(run.rounds("retrain")),
    }
    figures |= {name: figure for name, figure in optional.items() if figure is not None}
    steps = {kind: shown["steps"] for kind, shown in alphas["kinds"].items()}
    cells = _cells(genotype)
    splits = texts.split_rows(partition)
    context = {
        "run": run,
        "title": texts.title(run),
        "started": texts.started_text(run),
        "attempts": len(run.attempts()),
        "tiles": texts.tiles(run),
        "facts": texts.facts(run),
        "config_text": _config_text(run),
        "stages": stages,
        "cells": [(kind, picture) for kind, picture, _ in cells],
        "narrow_cells": all(width <= WIDEST_IN_PAIRS for _, _, width in cells),
        "alphas": alphas,
        "decided_text": decidedness.text(edges),
        "decided_head": decidedness.TABLE_HEAD,
        "decided_rows": decidedness.table(edges),
        "splits": splits,
        "partition_text": texts.partition_text(partition, declared=run.is_private),
        "privacy": _privacy(run),
        "accuracy_text": f"{texts.simpler_text(run)} {texts.accuracy_text(run)}".strip(),
        "score_tables": scores.tables(run),
        "positive_text": scores.positive_text(run),
        "calibration_text": scores.calibration_text(run),
        "use": texts.use_rows(run),
        "column_head": texts.COLUMN_HEAD,
        "columns": texts.column_rows(run),
        "times": texts.time_rows(run),
        "traffic_rows": texts.traffic_rows(run),
        "exploration_rows": exploration.cost_rows(run),
        "exported": texts.exported_text(run),
        "group_head": texts.GROUP_HEAD,
        "groups": texts.group_rows(run),
        "baseline_head": texts.BASELINE_HEAD,
        "baselines": texts.baseline_rows(run),
        "baselines_text": texts.baselines_text(run),
        "failures": texts.failure_rows(run),
        "failure_text": texts.failure_text(run),
        "answered_text": texts.answered_text(run),
        "origin": "found" if run.rounds("search") else "given",
        "warnings": warnings.most_common(),
        "figures": figures,
        "figures_json": _json(figures),
        "alphas_json": _json({"rounds": alphas["rounds"], "kinds": steps}),
        "style": Markup(read_part("style.css")),
        "script": Markup(read_part("script.js")),
        "drawing": Markup(read_part("figures.js")),
    }
    context["sections"] = _sections(context)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.from_string(read_part("report.html.j2")).render(context)


def read_part(name: str) -> str:
    """Return a file of ``page/``: template, style or script."""
    return (resources.files("fednas_flwr.reporting") / "page" / name).read_text(encoding="utf-8")


def _json(value: object) -> Markup:
    """Return JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))


def _config_text(run: Run) -> str:
    path = run.folder / CONFIG_FILE
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _stage(run: Run, name: str) -> dict[str, Any]:
    """Return a stage's figures, their headings, and its rounds as table rows."""
    rounds = run.rounds(name)
    both = ("train", "validation")
    noised = ", noised" if run.is_private else ""

    def chart(label: str, series: dict[str, str], **look: Any) -> tuple[str, plots.Figure | None]:
        return label, plots.curves(rounds, series, **look)

    charts: dict[str, tuple[str, plots.Figure | None]] = {
        "loss": chart(f"Loss{noised}", {f"{k}_loss": k for k in both}, title="loss"),
        "accuracy": chart(
            f"Accuracy{noised}", {f"{k}_accuracy": k for k in both}, title="accuracy", percent=True
        ),
        "entropy": chart(
            "Entropy of the alphas", {"alpha_entropy": "entropy"}, title="nats per edge"
        ),
        "lr": chart(
            "Learning rate chosen",
            {"lr": "weights", "alpha_lr": "alphas"},
            title="learning rate",
            log=True,
        ),
        "theta": chart(
            "Entropy of the distribution over configurations",
            {"theta_entropy": "entropy"},
            title="nats",
        ),
        "percentile": ("Percentile of the cell in the table", plots.percentiles(run, name)),
        "skip": chart(
            "Share of skip connections", {"skip_share": "share"}, title="share", percent=True
        ),
    }
    phases = run.explored(name)
    charts |= exploration.figures(phases)
    metrics = sorted({metric for event in rounds for metric in event["metrics"]})
    return {
        "name": name,
        "title": f"{texts.STAGES[name]}, {len(rounds)} of {rounds_text(rounds[-1]['rounds'])}",
        "plots": [(f"{name}_{key}", label) for key, (label, figure) in charts.items() if figure],
        "figures": {f"{name}_{key}": figure for key, (_, figure) in charts.items() if figure},
        "noised": texts.NOISED_TEXT if noised and any(map(guarantee.is_noised, metrics)) else "",
        "note": texts.train_curve_text(run, name, metrics),
        "phases": exploration.phase_table(phases),
        "metrics": [metric + (noised if guarantee.is_noised(metric) else "") for metric in metrics],
        "rows": [
            [e["round"], *(_cell(e["metrics"].get(m)) for m in metrics), f"{e['seconds']:.2f}"]
            for e in rounds
        ],
    }


def _privacy(run: Run) -> dict[str, Any]:
    """Return texts and tables of a private run's section, empty without privacy."""
    if not run.is_private:
        return {}
    event = run.privacy
    tables = []
    resumed = len(run.of_kind("privacy")) > 1
    if event is not None:
        spent = run.privacy_spent()
        tables = [  # name, how many columns of words come first, head, rows
            (
                "What is released, at most" + resumed * ", since the run was resumed",
                3,
                *guarantee.release_table(event),
            ),
            ("What each client is promised", 0, *guarantee.client_table(event, spent)),
        ]
    return {
        "summary": guarantee.overall_text(event) if event else "",
        "warning": guarantee.warning_text(event) if event else "",
        "texts": [
            *(guarantee.promise_texts(event) if event else ()),
            *texts.privacy_notes(run),
        ],
        "tables": tables,
    }


def _cell(value: float | None) -> str:
    return DASH if value is None else f"{value:.4g}"


def _cells(genotype: dict[str, Any] | None) -> list[tuple[str, Markup, int]]:
    """Return kind, picture and width of each cell; cell_svg escapes what it writes."""
    cells = []
    for kind, edges in (genotype or {}).get("cells", {}).items():
        if edges:
            picture = cell_svg(edges, title=f"{kind} cell")
            width = int(picture.split(' width="', 1)[1].split('"', 1)[0])
            cells.append((kind, Markup(picture), width))
    return cells


def _sections(context: dict[str, Any]) -> list[tuple[str, str]]:
    """Return id and name of the sections that the page will have, in order."""
    figures = context["figures"]
    candidates = [
        ("use", "Use this model", context["use"]),
        ("run", "What was run", True),
        *((stage["name"], texts.STAGES[stage["name"]], True) for stage in context["stages"]),
        ("groups", "Groups", context["groups"]),
        ("baselines", "Worth of the search", context["baselines"]),
        ("cells", "Cells", context["cells"]),
        ("alphas", "Architecture parameters", context["alphas"]["kinds"]),
        ("partition", "Who holds what", context["splits"] or "partition" in figures),
        ("privacy", "Privacy", context["privacy"]),
        ("scores", "Scores", context["score_tables"]),
        ("accuracy", "Accuracy per client", "clients" in figures),
        ("cost", "Time and traffic", context["times"] or context["traffic_rows"]),
        ("model", "Model", context["exported"]),
        ("failures", "Failures and warnings", True),
    ]
    return [(section, name) for section, name, shown in candidates if shown]
