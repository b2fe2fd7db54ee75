"""Several runs side by side: groups that differ only in the seed, with mean and deviation.

`compare_runs` reads run folders or folders that hold them (a sweep); `print_comparison` and
`write_comparison` show the result. A run that cannot be counted is listed with the reason.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fednas_flwr.errors import ConfigError
from fednas_flwr.files import write_atomically
from fednas_flwr.foreign import csv_cell, markdown, read_yaml, terminal
from fednas_flwr.reporting.guarantee import TEST_SEED, warning_text
from fednas_flwr.reporting.plots import axes
from fednas_flwr.reporting.runs import BESIDE, CONFIG_FILE, EVENTS_FILE, Run, read_run
from fednas_flwr.reporting.units import DASH, mean_and_deviation

TITLE_WIDTH, GROUP_WIDTH = 30, 18
NOT_SETTINGS = ("seed", "run_dir", "resume")
COLUMNS: dict[str, tuple[str, float, int | None]] = {  # metric: title, scale, decimals
    "central_accuracy": ("test accuracy (%)", 100, 1),
    "central_f1": ("test F1", 1, 3),
    "central_auroc": ("test AUROC", 1, 3),
    "client_accuracy": ("mean client accuracy (%)", 100, 1),
    "personalised_accuracy": ("after local training (%)", 100, 1),
    "num_parameters": ("parameters (M)", 1e-6, None),
    "multiply_adds": ("multiply-adds (M)", 1e-6, None),
    "search_seconds": ("search (s)", 1, None),
    "retrain_seconds": ("retrain (s)", 1, None),
    "traffic_mb": ("traffic (MB)", 1, None),
    "epsilon": ("epsilon", 1, None),
    "clients_lost": ("clients lost", 1, None),
}
BEST_FILE = "optimization_results.yaml"  # of Hydra's Optuna sweeper, in the folder of a sweep


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed.

    Attributes:
        settings: The settings that tell this group from the others.
        seeds: The seeds, ascending.
        folders: The run folders, in the order of the seeds.
        values: For each metric the runs' values in the order of the seeds, None where not reached.
        test_seed: Whether a client's noise came from a known seed: epsilon then protects nobody.
    """

    settings: dict[str, Any]
    seeds: tuple[Any, ...]
    folders: tuple[str, ...]
    values: dict[str, tuple[float | None, ...]]
    test_seed: bool

    def reached(self, metric: str) -> list[float]:
        """Return a metric's values without those that were not reached."""
        return [value for value in self.values[metric] if value is not None]


@dataclass(frozen=True)
class Comparison:
    """Groups in the order in which their first runs were found, and what could not be counted.

    The groups of the best trials of an optimising sweep come before the others.

    Attributes:
        groups: The groups of finished runs.
        not_counted: Folder and reason of every run that is in no group.
        best: What an optimising sweep found best, one line per trial; its groups come first.
    """

    groups: tuple[Group, ...]
    not_counted: tuple[tuple[str, str], ...]
    best: tuple[str, ...] = ()

    def titles(self) -> list[str]:
        """Return the table's head."""
        settings = list(self.groups[0].settings) if self.groups else []
        return [*settings, "seeds", *(title for title, _, _ in COLUMNS.values())]

    def rows(self) -> list[list[str]]:
        """Return one row of text per group; ``(2 of 3)`` marks a mean that lacks a seed."""
        rows = []
        for group in self.groups:
            cells = [_setting_text(value) for value in group.settings.values()]
            cells.append(", ".join(str(seed) for seed in group.seeds))
            for metric, (_, scale, decimals) in COLUMNS.items():
                values = group.values[metric]
                text = mean_and_deviation(values, scale=scale, decimals=decimals)
                unsafe = group.test_seed and metric == "epsilon"
                cells.append(f"{text} ({TEST_SEED})" if unsafe else text)
            rows.append(cells)
        return rows


def compare_runs(folders: Iterable[Path]) -> Comparison:
    """Return the runs grouped by their settings.

    Two runs belong together when their configurations differ in nothing but seed, run_dir and
    resume. Of two runs with the same settings and seed the later found one is not counted.

    Args:
        folders: Run folders, or folders that hold run folders at any depth.

    Raises:
        ConfigError: A folder does not exist, or there is no run in it.
    """
    folders = list(folders)
    members: dict[str, dict[Any, Run]] = {}
    not_counted = []
    for folder in run_folders(folders):
        run, reason = _finished(folder)
        if run is not None:
            key = json.dumps(_flat_settings(run.config), sort_keys=True, default=str)
            group = members.setdefault(key, {})
            seed = run.config.get("seed")
            if seed in group:
                reason = f"not counted: same settings and seed as {group[seed].folder}"
            else:
                group[seed] = run
        if reason:
            not_counted.append((str(folder), reason))
    groups = [
        [by_seed[seed] for seed in sorted(by_seed, key=_order)] for by_seed in members.values()
    ]
    trials = [trial for folder in folders for trial in _best_trials(folder)]
    groups.sort(key=lambda runs: _rank(runs[0], trials))
    shown = _distinguishing([_flat_settings(group[0].config) for group in groups])
    return Comparison(
        groups=tuple(_group(runs, shown) for runs in groups),
        not_counted=tuple(not_counted),
        best=tuple(f"best trial: {_trial_text(*trial)}" for trial in trials),
    )


def _best_trials(folder: Path) -> list[tuple[dict[str, Any], list[float]]]:
    """Return settings and values of the best trials of a sweep, several if it had several aims."""
    path = folder / BEST_FILE
    if not path.is_file():
        return []
    told = read_yaml(path, str(path))
    if "solutions" in told:
        return [(trial["params"], trial["values"]) for trial in told["solutions"]]
    return [(told["best_params"], [told["best_value"]])]


def _rank(run: Run, trials: Sequence[tuple[dict[str, Any], list[float]]]) -> int:
    """Return the place of the trial whose settings a run has; all others come after."""
    settings = _flat_settings(run.config)
    for place, (params, _) in enumerate(trials):
        if all(settings.get(name.lstrip("+")) == value for name, value in params.items()):
            return place
    return len(trials)


def _trial_text(params: dict[str, Any], values: Sequence[float]) -> str:
    settings = " ".join(f"{name}={value}" for name, value in params.items())
    return f"{settings} ({', '.join(f'{value:.4g}' for value in values)})"


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print the groups side by side, as many as fit, and the runs that were not counted."""
    console = console or Console()
    for line in comparison.best:
        console.print(Text(terminal(line), style="bold"), soft_wrap=True, highlight=False)
    rows = comparison.rows()
    at_once = max(1, (console.width - TITLE_WIDTH) // GROUP_WIDTH)
    for start in range(0, len(rows), at_once):
        table = Table(title="mean ± standard deviation over seeds", show_header=False)
        table.add_column(style="bold", overflow="fold")
        shown = rows[start : start + at_once]
        for _ in shown:
            table.add_column(justify="right", overflow="fold")
        for title, *cells in zip(comparison.titles(), *shown, strict=True):
            if any(cell != DASH for cell in cells):
                table.add_row(*(Text(terminal(cell)) for cell in (title, *cells)))
        console.print(table)
    for folder, reason in comparison.not_counted:
        left = Text(terminal(f"{folder}: {reason}"), style="yellow")
        console.print(left, soft_wrap=True, highlight=False)


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write compare.csv, .md, .json and .html into a folder and return their paths.

    The CSV file holds plain numbers in the units of the metrics' names (accuracies as shares of 1);
    the JSON file every single run's values as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_atomically(folder / "compare.csv", _csv(comparison)),
        write_atomically(folder / "compare.md", _markdown(comparison)),
        write_atomically(folder / "compare.json", _json(comparison)),
        write_atomically(folder / "compare.html", _html(comparison)),
    ]


def run_folders(folders: Iterable[Path]) -> list[Path]:
    """Return all run folders in or below some folders, each once.

    Raises:
        ConfigError: A folder does not exist, or there is no run in it.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: give run folders or a sweep's folder.")
        names = (EVENTS_FILE, CONFIG_FILE)
        inside = sorted({path.parent for name in names for path in folder.rglob(name)})
        if not inside:
            raise ConfigError(f"{folder} holds no run: no events.jsonl is in it or below it.")
        if folder in inside:
            inside = [folder]
        runs = set(inside)  # what was trained beside a run is compared where it is named
        inside = [f for f in inside if f.parent.name not in BESIDE or f.parents[1] not in runs]
        found |= {path.resolve(): path for path in inside if path.resolve() not in found}
    return list(found.values())


def _finished(folder: Path) -> tuple[Run | None, str]:
    """Return a finished run, or None and the reason."""
    try:
        run = read_run(folder)
    except FileNotFoundError:
        return None, "not finished: it has written no events.jsonl"
    if run.status != "completed":
        return None, f"not finished: {run.reason or 'it still goes on, or was killed'}"
    if not run.config:
        return None, "not counted: config.yaml is missing, so its settings are not known"
    return run, ""


def _flat_settings(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings under dotted names; the name of a group stands under the group."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if not prefix and key in NOT_SETTINGS:
            continue
        if isinstance(value, dict):
            flat |= _flat_settings(value, f"{prefix}{key}.")
        else:
            flat[prefix[:-1] if prefix and key == "name" else f"{prefix}{key}"] = value
    return flat


def _distinguishing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the names to show: all that every group has and that differ, then what is needed."""
    names = list(dict.fromkeys(name for group in settings for name in group))
    differing = [n for n in names if len({_setting_text(g.get(n)) for g in settings}) > 1]
    shown = [name for name in differing if all(name in group for group in settings)]
    for name in [name for name in differing if name not in shown]:
        rows = {tuple(_setting_text(group.get(n)) for n in shown) for group in settings}
        if len(rows) == len(settings):
            break
        shown.append(name)
    return shown or [name for name in ("algorithm", "dataset", "partition") if name in names]


def _group(runs: list[Run], shown: list[str]) -> Group:
    settings = _flat_settings(runs[0].config)
    numbers = [run.numbers() for run in runs]
    return Group(
        settings={name: settings.get(name) for name in shown},
        seeds=tuple(run.config.get("seed") for run in runs),
        folders=tuple(str(run.folder) for run in runs),
        values={metric: tuple(n[metric] for n in numbers) for metric in COLUMNS},
        test_seed=any(run.privacy and warning_text(run.privacy) for run in runs),
    )


def _order(seed: Any) -> tuple[bool, Any]:
    return (not isinstance(seed, int), seed if isinstance(seed, int) else str(seed))


def _setting_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return DASH if value is None else str(value)


def _statistics(values: list[float]) -> dict[str, float | None]:
    return {
        "mean": fmean(values) if values else None,
        "deviation": stdev(values) if len(values) > 1 else None,
    }


def _csv(comparison: Comparison) -> str:
    settings = list(comparison.groups[0].settings) if comparison.groups else []
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    kinds = ("mean", "deviation")
    titles = [f"{metric}_{kind}" for metric in COLUMNS for kind in kinds]
    writer.writerow([*map(csv_cell, settings), "seeds", *titles, "test_seed"])
    for group in comparison.groups:
        row = [csv_cell(_setting_text(value)) for value in group.settings.values()]
        row.append(csv_cell(" ".join(str(seed) for seed in group.seeds)))
        for metric in COLUMNS:
            statistics = _statistics(group.reached(metric))
            row += ["" if statistics[k] is None else f"{statistics[k]:.8g}" for k in kinds]
        writer.writerow([*row, int(group.test_seed)])
    return text.getvalue()


def _markdown(comparison: Comparison) -> str:
    lines = markdown_table(comparison.titles(), comparison.rows()) if comparison.groups else []
    lines = [line for best in comparison.best for line in (f"{markdown(best)}  ", "")] + lines
    if comparison.groups:
        lines += ["", "Mean ± standard deviation (n - 1) over seeds; traffic in both directions;"]
        lines += [
            "epsilon: the largest of all clients, per record (or person) added or removed (PRV)."
        ]
    if comparison.not_counted:
        lines += ["", *(f"- {markdown(': '.join(pair))}" for pair in comparison.not_counted)]
    return "\n".join(lines).strip() + "\n"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, whose cells are text without markup."""
    lines = [list(titles), ["---"] * len(titles), *rows]
    return [f"| {' | '.join(markdown(cell) for cell in line)} |" for line in lines]


def _html(comparison: Comparison) -> str:
    """Return one offline page: the table, and a picture of each metric that was reached."""
    head, *others = comparison.best or ("Runs side by side",)
    titles, rows = comparison.titles(), comparison.rows()
    names = [
        ", ".join(f"{k}={_setting_text(v)}" for k, v in g.settings.items())
        for g in comparison.groups
    ]
    figures = []
    for metric, (title, scale, _) in COLUMNS.items():
        statistics = [_statistics(group.reached(metric)) for group in comparison.groups]
        if not any(one["mean"] is not None for one in statistics):
            continue
        means, deviations = (
            [None if one[kind] is None else one[kind] * scale for one in statistics]  # type: ignore[operator]
            for kind in ("mean", "deviation")
        )
        marks = {
            "type": "scatter",
            "mode": "markers",
            "x": names,
            "y": means,
            "marker": {"size": 9},
        }
        layout = axes(x="", y=title)
        figures.append({"data": [marks | {"error_y": {"array": deviations}}], "layout": layout})
    cells = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows
    )
    return _PAGE.format(
        head=escape(head),
        lines="".join(f"<p>{escape(line)}</p>" for line in others),
        titles="".join(f"<th>{escape(title)}</th>" for title in titles),
        cells=cells,
        skipped="".join(
            f"<li>{escape(f)}: {escape(reason)}</li>" for f, reason in comparison.not_counted
        ),
        drawing=(resources.files("fednas_flwr.reporting") / "page" / "figures.js").read_text(
            encoding="utf-8"
        ),
        figures=json.dumps(figures).replace("<", "\\u003c"),
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Runs side by side</title>
<style>body{{font-family:sans-serif;margin:2em}}table{{border-collapse:collapse;display:block;
overflow-x:auto}}.tip{{position:fixed;background:#222;color:#fff;padding:4px 8px}}
td,th{{padding:.3em .7em;text-align:right;border-bottom:1px solid #ccc}}
</style></head>
<body><h1>{head}</h1>{lines}
<table><thead><tr>{titles}</tr></thead><tbody>{cells}</tbody></table>
<p>Mean ± standard deviation over seeds.</p><ul>{skipped}</ul><div id="figures"></div>
<script>{drawing}
for (const figure of {figures}) {{
  const place = document.createElement("div");
  document.getElementById("figures").append(place);
  const draw = () => drawFigure(place, figure, {{ width: place.clientWidth, size: 12,
    text: "#222", rule: "#ddd", ends: ["#eef2f7", "#1f55b5"] }});
  draw();
  addEventListener("resize", draw);
}}</script></body></html>
"""


def _json(comparison: Comparison) -> str:
    groups = [
        {
            "settings": group.settings,
            "seeds": group.seeds,
            "folders": group.folders,
            "test_seed": group.test_seed,
            "metrics": {
                metric: {**_statistics(group.reached(metric)), "values": group.values[metric]}
                for metric in COLUMNS
            },
        }
        for group in comparison.groups
    ]
    skipped = [{"folder": folder, "reason": reason} for folder, reason in comparison.not_counted]
    document = {"best": comparison.best, "groups": groups, "not_counted": skipped}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
