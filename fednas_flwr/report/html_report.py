"""report.html: one run on one page that needs no network and no server.

`write_report` reads the run folder alone, so it can be called at any time, also for a run that
failed or still goes on: what the run did not reach has no section. The page's template, style and
script are the files of ``page/``. The template is rendered with autoescape; only the style, the
script, the figures' JSON and the cells' SVG are put in as they are, and none of them
holds text that a client wrote.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import escape

from fednas_flwr.base.errors import check_choice
from fednas_flwr.base.files import write_atomically
from fednas_flwr.report import cells, plots, tables, templates
from fednas_flwr.report.templates import paragraphs, rounds_text, sentence
from fednas_flwr.runs.numbers import CONFIG_FILE, METRICS, Run, is_noised, read_run
from fednas_flwr.settings.names import SPLITS

WIDEST_IN_PAIRS = 640
CHARTS = {  # label, title of the axis, what the axis shows, legend entries by metric
    "loss": ("Loss", "loss", "", {"train_loss": "train", "validation_loss": "validation"}),
    "accuracy": (
        *("Accuracy", "accuracy", "percent"),
        {"train_accuracy": "train", "validation_accuracy": "validation"},
    ),
    "closeness": (
        *("Closeness: 1 - absolute error / range", "closeness", "percent"),
        {"train_closeness": "train", "validation_closeness": "validation"},
    ),
    "entropy": ("Entropy of the alphas", "nats per edge", "", {"alpha_entropy": "entropy"}),
    "lr": ("Learning rate chosen", "learning rate", "log", {"lr": "weights", "alpha_lr": "alphas"}),
    "theta": (
        *("Entropy of the distribution over configurations", "nats", ""),
        {"theta_entropy": "entropy"},
    ),
    "skip": ("Share of skip connections", "share", "percent", {"skip_share": "share"}),
}


def write_report(run_folder: Path) -> Path:
    """Write the run's report.html and return its path.

    Raises:
        ConfigError: The folder holds no events.jsonl.
    """
    return write_atomically(run_folder / "report.html", render_report(run_folder))


def render_report(run_folder: Path) -> str:
    """Return the page of a run's report, HTML.

    Raises:
        ConfigError: The folder holds no events.jsonl.
    """
    run = read_run(run_folder)
    derived, genotype = run.last("derived"), run.last("derived").get("genotype")
    alphas, edges = plots.alphas(run.alphas(), genotype), cells.derived_edges(run.alphas())
    warnings = Counter(str(e["message"]) for e in run.of_kind("warning"))
    warnings.update(paragraphs("undecided", edges))
    stages = [_stage(run, name) for name in tables.STAGES if run.rounds(name)]
    figures = all_figures(run)
    steps = {kind: shown["steps"] for kind, shown in alphas["kinds"].items()}
    config = run.folder / CONFIG_FILE
    layers = derived.get("layers") or []
    used = {layer["kind"] for layer in layers if layer.get("kind")}
    pictures = [
        (kind, *cells.cell_svg(edges, title=f"{kind} cell"))
        for kind, edges in (genotype or {}).get("cells", {}).items()
        if edges and (kind in used or not used)
    ]
    return templates.render(
        "report.html.j2",
        run=run,
        tables=tables,
        limits=cells,
        METRICS=METRICS,
        SPLITS=SPLITS,
        edges=edges,
        partition=run.last("partition"),
        is_noised=is_noised,
        zip=zip,
        config_text=_without_paths(config.read_text(encoding="utf-8")) if config.exists() else "",
        stages=stages,
        layers=layers,
        cells=pictures,
        narrow_cells=all(width <= WIDEST_IN_PAIRS for _, _, width in pictures),
        alphas=alphas,
        class_curves=plots.class_curves(run),
        warnings=warnings.most_common(),
        figures=figures,
        figures_json=templates.as_json(figures),
        alphas_json=templates.as_json({"rounds": alphas["rounds"], "kinds": steps}),
        **templates.page_parts(),
    )


def all_figures(run: Run) -> dict[str, plots.Figure]:
    """Every picture of a run by name; none that would be empty."""
    alphas = plots.alphas(run.alphas(), run.last("derived").get("genotype"))
    stages = [_stage(run, name) for name in tables.STAGES if run.rounds(name)]
    figures = {name: figure for stage in stages for name, figure in stage["figures"].items()}
    figures |= {f"alphas_{kind}": shown["figure"] for kind, shown in alphas["kinds"].items()}
    figures |= {name: figure for name, (_, figure) in plots.class_curves(run).items()}
    optional = {
        "leaderboard": plots.leaderboard(run),
        "partition": plots.partition(run.last("partition")),
        "clients": plots.client_accuracy(run),
        "reliability": plots.reliability(run),
        "predictions": plots.predictions(run),
        "importance": plots.importance(run),
        "epsilon": plots.epsilon(run),
        **{f"traffic_{stage}": plots.traffic(run.rounds(stage)) for stage in tables.STAGES},
    }
    figures |= {name: figure for name, figure in optional.items() if figure is not None}
    return figures | plots.effects(run)


@dataclass(frozen=True)
class Picture:
    """A picture of a report, which Jupyter shows.

    Attributes:
        figure: In the terms of plotly.js: ``plotly.graph_objects.Figure(picture.figure)`` has it.
    """

    figure: plots.Figure

    def _repr_html_(self) -> str:
        parts = templates.page_parts()
        page = templates.render("picture.html.j2", figure=templates.as_json(self.figure), **parts)
        height = self.figure["layout"]["height"] + 20
        frame = f'<iframe style="width:100%;border:0" height="{height}" srcdoc="{{}}"></iframe>'
        return frame.format(escape(page))


def picture_of(run_folder: Path, name: str) -> Picture:
    """A picture of a run's report by its name.

    Raises:
        ConfigError: The run has no such picture.
    """
    figures = all_figures(read_run(run_folder))
    check_choice("plot", name, figures)
    return Picture(figures[name])


def _without_paths(text: str) -> str:
    """A configuration without the folders of this machine: only the last part of each path."""
    return re.sub(r"(?m)(?<=: )(['\"]?)[/~]\S*/(?=\S)", r"\1…/", text)


def _stage(run: Run, name: str) -> dict[str, Any]:
    """Return a stage's figures, their headings, and its rounds as table rows."""
    rounds, phases = run.rounds(name), run.explored(name)
    noised = ", noised" if run.is_private else ""
    charts = {}
    for key, (label, title, scale, series) in CHARTS.items():
        look = {"percent": scale == "percent", "log": scale == "log"}
        by_clients = noised if any(map(is_noised, series)) else ""
        charts[key] = label + by_clients, plots.curves(rounds, series, title=title, **look)
    charts["percentile"] = "Percentile of the cell in the table", plots.percentiles(run, name)
    charts |= plots.exploration(phases)
    metrics = sorted({metric for event in rounds for metric in event["metrics"]})
    return {
        "name": name,
        "title": f"{tables.STAGES[name]}, {len(rounds)} of {rounds_text(rounds[-1]['rounds'])}",
        "plots": [(f"{name}_{key}", label) for key, (label, figure) in charts.items() if figure],
        "figures": {f"{name}_{key}": figure for key, (_, figure) in charts.items() if figure},
        "noised": sentence("noised") if noised and any(map(is_noised, metrics)) else "",
        "note": sentence("only_trained_on", name, metrics),
        "phases": phases,
        "metrics": metrics,
        "rounds": rounds,
    }
