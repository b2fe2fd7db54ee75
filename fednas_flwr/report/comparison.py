"""Several runs side by side: groups that differ only in the seed, with mean and deviation.

`compare_runs` reads run folders or folders that hold them (a sweep); `print_comparison` and
`write_comparison` show the result. A run that cannot be counted is listed with the reason.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.files import write_atomically
from fednas_flwr.base.foreign import csv_cell, markdown, read_yaml, terminal
from fednas_flwr.report import templates
from fednas_flwr.report.guarantee import TEST_SEED
from fednas_flwr.report.plots import Figure, axes
from fednas_flwr.report.quantities import DASH, FORMS, mean_and_deviation
from fednas_flwr.report.templates import sentence
from fednas_flwr.runs.numbers import (
    BESIDE,
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS,
    Metric,
    Run,
    read_run,
)

TITLE_WIDTH, GROUP_WIDTH = 30, 18
NOT_SETTINGS = ("seed", "run_dir", "resume")
COLUMNS = [metric for metric in METRICS if metric.compared]
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

    def statistics(self, metric: Metric) -> dict[str, float | None]:
        """Mean and standard deviation (n - 1) of the values that were reached."""
        values = [value for value in self.values[metric.name] if value is not None]
        return {
            "mean": fmean(values) if values else None,
            "deviation": stdev(values) if len(values) > 1 else None,
        }

    def name(self) -> str:
        """The settings in one line."""
        return ", ".join(f"{key}={_setting_text(value)}" for key, value in self.settings.items())


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
        return [*settings, "seeds", *map(_title, COLUMNS)]

    def rows(self) -> list[list[str]]:
        """Return one row of text per group; ``(2 of 3)`` marks a mean that lacks a seed."""
        rows = []
        for group in self.groups:
            cells = [_setting_text(value) for value in group.settings.values()]
            cells.append(", ".join(str(seed) for seed in group.seeds))
            for metric in COLUMNS:
                form = FORMS[metric.unit]
                values = group.values[metric.name]
                text = mean_and_deviation(values, scale=form.scale, decimals=form.decimals)
                unsafe = group.test_seed and metric.name == "epsilon"
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
    results = read_yaml(path, str(path))
    if "solutions" in results:
        return [(trial["params"], trial["values"]) for trial in results["solutions"]]
    return [(results["best_params"], [results["best_value"]])]


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
        values={metric.name: tuple(n[metric.name] for n in numbers) for metric in COLUMNS},
        test_seed=any(run.privacy and sentence("test_seed", run.privacy) for run in runs),
    )


def _title(metric: Metric) -> str:
    """A metric's label with its unit."""
    return metric.label + FORMS[metric.unit].title


def _order(seed: Any) -> tuple[bool, Any]:
    return (not isinstance(seed, int), seed if isinstance(seed, int) else str(seed))


def _setting_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return DASH if value is None else str(value)


def _csv(comparison: Comparison) -> str:
    settings = list(comparison.groups[0].settings) if comparison.groups else []
    titles = [f"{metric.name}_{kind}" for metric in COLUMNS for kind in ("mean", "deviation")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*map(csv_cell, settings), "seeds", *titles, "test_seed"])
    for group in comparison.groups:
        row = [csv_cell(_setting_text(value)) for value in group.settings.values()]
        row.append(csv_cell(" ".join(str(seed) for seed in group.seeds)))
        for metric in COLUMNS:
            values = group.statistics(metric).values()
            row += ["" if value is None else f"{value:.8g}" for value in values]
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
    """One offline page: the table, and a picture of each metric that was reached."""
    head, *others = comparison.best or ("Runs side by side",)
    figures = (_figure(comparison.groups, metric) for metric in COLUMNS)
    return templates.render(
        "compare.html.j2",
        head=head,
        lines=others,
        titles=comparison.titles(),
        rows=comparison.rows(),
        not_counted=comparison.not_counted,
        drawing=Markup(templates.read_part("figures.js")),
        figures=templates.as_json([figure for figure in figures if figure is not None]),
    )


def _figure(groups: Sequence[Group], metric: Metric) -> Figure | None:
    """Mean and deviation of each group, None where no run has reached the metric."""
    statistics = [group.statistics(metric) for group in groups]
    if all(one["mean"] is None for one in statistics):
        return None
    scale = FORMS[metric.unit].scale
    means, deviations = (
        [None if value is None else value * scale for value in column]
        for column in zip(*(one.values() for one in statistics), strict=True)
    )
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": [group.name() for group in groups],
        "y": means,
        "marker": {"size": 9},
        "error_y": {"array": deviations},
    }
    return {"data": [points], "layout": axes(x="", y=_title(metric))}


def _json(comparison: Comparison) -> str:
    groups = [
        {
            "settings": group.settings,
            "seeds": group.seeds,
            "folders": group.folders,
            "test_seed": group.test_seed,
            "metrics": {
                metric.name: group.statistics(metric) | {"values": group.values[metric.name]}
                for metric in COLUMNS
            },
        }
        for group in comparison.groups
    ]
    skipped = [{"folder": folder, "reason": reason} for folder, reason in comparison.not_counted]
    document = {"best": comparison.best, "groups": groups, "not_counted": skipped}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
