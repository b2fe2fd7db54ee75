"""report.html: one run on one page that needs no network and no server.

`write_report` reads the run folder alone, so it can be called at any time, also for a run that
failed or still goes on: what the run did not reach has no section. The page's template, style and
script are the files of ``page/``. The template is rendered with autoescape; only the style, the
script, the figures' JSON and the cells' SVG are put in as they are, and none of them
holds text that a client wrote.
"""

from collections import Counter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fednas_flwr.base.files import write_atomically
from fednas_flwr.report import (
    decidedness,
    exploration,
    guarantee,
    plots,
    score_tables,
    templates,
    texts,
)
from fednas_flwr.report.cells import cell_svg
from fednas_flwr.report.quantities import DASH, rounds_text
from fednas_flwr.runs.numbers import CONFIG_FILE, Run, read_run

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
        "reliability": score_tables.reliability(run),
        "traffic_search": plots.traffic(run.rounds("search")),
        "traffic_retrain": plots.traffic(run.rounds("retrain")),
    }
    figures |= {name: figure for name, figure in optional.items() if figure is not None}
    steps = {kind: shown["steps"] for kind, shown in alphas["kinds"].items()}
    cells = _cells(genotype)
    context = {
        "run": run,
        "texts": texts,
        "score_tables": score_tables,
        "decidedness": decidedness,
        "edges": edges,
        "partition": partition,
        "exploration_rows": exploration.cost_rows(run),
        "config_text": _config_text(run),
        "stages": stages,
        "cells": [(kind, picture) for kind, picture, _ in cells],
        "narrow_cells": all(width <= WIDEST_IN_PAIRS for _, _, width in cells),
        "alphas": alphas,
        "privacy": _privacy(run),
        "warnings": warnings.most_common(),
        "figures": figures,
        "figures_json": templates.as_json(figures),
        "alphas_json": templates.as_json({"rounds": alphas["rounds"], "kinds": steps}),
        "style": Markup(templates.read_part("style.css")),
        "script": Markup(templates.read_part("script.js")),
        "drawing": Markup(templates.read_part("figures.js")),
    }
    return templates.render("report.html.j2", **context)


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
                f"What is released, at most{', since the run was resumed' if resumed else ''}",
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
