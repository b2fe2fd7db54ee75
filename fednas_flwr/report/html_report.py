"""report.html: one run on one page that needs no network and no server.

`write_report` reads only the run folder, so it can be called at any time, also for a run that
failed or still goes on: results that the run did not reach have no section. The page's template,
style and script are the files in ``page/``. The template is rendered with autoescape; only the
style, the script, the figures' JSON and the cells' SVG are inserted as they are, and none of them
holds text that a client wrote.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from markupsafe import escape

from fednas_flwr.base.files import write_atomically
from fednas_flwr.report import plots, score_tables, templates
from fednas_flwr.runs.numbers import CONFIG_FILE, read_run
from fednas_flwr.settings.names import SPLITS

WIDEST_IN_PAIRS = 640


def write_report(run_folder: Path) -> Path:
    """Write the run's report.html and return its path.

    Raises:
        ConfigError: The folder holds no events.jsonl.
    """
    return write_atomically(run_folder / "report.html", render_report(run_folder))


def render_report(run_folder: Path) -> str:
    """Return the HTML page of a run's report.

    Raises:
        ConfigError: The folder holds no events.jsonl.
    """
    run = read_run(run_folder)
    derived = run.last("derived")
    figures, config = plots.all_figures(run), run.folder / CONFIG_FILE
    settings = config.read_text(encoding="utf-8") if config.exists() else ""
    layers = derived.get("layers") or []
    used = {layer["kind"] for layer in layers if layer.get("kind")}
    pictures = [
        (kind, *plots.cell_svg(edges, title=f"{kind} cell"))
        for kind, edges in (derived.get("genotype") or {}).get("cells", {}).items()
        if edges and (kind in used or not used)
    ]
    return templates.render_page(
        "report.html.j2",
        figures,
        run=run,
        tables=score_tables,
        SPLITS=SPLITS,
        by_seconds=lambda used: sorted(used.items(), key=lambda pair: -sum(pair[1])),
        # without this machine's folders: each path keeps its last part
        config_text=re.sub(r"(?m)(?<=: )(['\"]?)[/~]\S*/(?=\S)", r"\1…/", settings),
        layers=layers,
        cells=pictures,
        narrow_cells=all(width <= WIDEST_IN_PAIRS for _, _, width in pictures),
    )


@dataclass(frozen=True)
class Picture:
    """A picture of a report, which Jupyter shows.

    Attributes:
        figure: The figure as plotly.js takes it: ``plotly.graph_objects.Figure(picture.figure)``.
    """

    figure: plots.Figure

    def _repr_html_(self) -> str:
        page = templates.render_page("picture.html.j2", {"shown": self.figure})
        height = self.figure["layout"]["height"] + 20
        frame = f'<iframe style="width:100%;border:0" height="{height}" srcdoc="{{}}"></iframe>'
        return frame.format(escape(page))
