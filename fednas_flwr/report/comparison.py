"""Several runs side by side: groups that differ only in the seed, with mean and deviation.

`compare_runs` reads run folders or folders that hold them (a sweep); `print_comparison` and
`write_comparison` show the result. A run that cannot be counted is listed with the reason.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
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
from fednas_flwr.report.plots import Figure, axes
from fednas_flwr.report.tables import TEST_SEED
from fednas_flwr.report.templates import DASH, FORMS, mean_and_deviation, sentence
from fednas_flwr.report.terminal import print_line
from fednas_flwr.runs.numbers import (
    BESIDE,
    CONFIG_FILE,
    EVENTS_FILE,
    METRICS,
    Metric,
    Run,
    flat_settings,
    read_run,
)

TITLE_WIDTH, GROUP_WIDTH = 30, 18
NOT_SETTINGS = ("seed", "run_dir", "resume")
COLUMNS = [metric for metric in METRICS if metric.compared]
BEST_FILE = "optimization_results.yaml"  # of Hydra's Optuna sweeper, in the folder of a sweep


@dataclass(frozen=True)
class Statistics:
    """A metric of the runs of a group.

    Attributes:
        mean: Of the values that were reached; None if none was.
        deviation: Their standard deviation (n - 1); None of fewer than two.
        values: The runs' values in the order of the seeds, None where not reached.
    """

    mean: float | None
    deviation: float | None
    values: tuple[float | None, ...]

    @classmethod
    def of(cls, values: tuple[float | None, ...]) -> "Statistics":
        """The statistics of the values of some runs."""
        reached = [value for value in values if value is not None]
        deviation = stdev(reached) if len(reached) > 1 else None
        return cls(fmean(reached) if reached else None, deviation, values)


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed.

    Attributes:
        settings: The settings that tell this group from the others.
        seeds: The seeds, ascending.
        folders: The run folders, in the order of the seeds.
        test_seed: True if a client's noise came from a known seed: epsilon then protects nobody.
        metrics: What the runs have reached.
    """

    settings: dict[str, Any]
    seeds: tuple[Any, ...]
    folders: tuple[str, ...]
    test_seed: bool
    metrics: dict[str, Statistics]

    def name(self) -> str:
        """The settings in one line."""
        return ", ".join(f"{key}={_setting_text(value)}" for key, value in self.settings.items())


@dataclass(frozen=True)
class Comparison:
    """Groups in the order in which their first runs were found, and what could not be counted.

    The groups of the best trials of an optimising sweep come before the others.

    Attributes:
        best: What an optimising sweep found best, one line per trial; its groups come first.
        groups: The groups of finished runs.
        not_counted: ``folder`` and ``reason`` of every run that is in no group.
    """

    best: tuple[str, ...]
    groups: tuple[Group, ...]
    not_counted: tuple[dict[str, str], ...]

    def settings(self) -> list[str]:
        """The names of the settings that tell the groups apart."""
        return list(self.groups[0].settings) if self.groups else []

    def titles(self) -> list[str]:
        """Return the table's head."""
        return [*self.settings(), "seeds", *map(_title, COLUMNS)]

    def rows(self) -> list[list[str]]:
        """Return one row of text per group; ``(2 of 3)`` marks a mean that lacks a seed."""
        rows = []
        for group in self.groups:
            cells = [_setting_text(value) for value in group.settings.values()]
            cells.append(", ".join(str(seed) for seed in group.seeds))
            for metric in COLUMNS:
                form, values = FORMS[metric.unit], group.metrics[metric.name].values
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
            key = json.dumps(_settings(run), sort_keys=True, default=str)
            group = members.setdefault(key, {})
            seed = run.config.get("seed")
            if seed in group:
                reason = f"not counted: same settings and seed as {group[seed].folder}"
            else:
                group[seed] = run
        if reason:
            not_counted.append({"folder": str(folder), "reason": reason})
    groups = [
        [by_seed[seed] for seed in sorted(by_seed, key=_order)] for by_seed in members.values()
    ]
    trials = [trial for folder in folders for trial in _best_trials(folder)]
    groups.sort(key=lambda runs: _rank(runs[0], trials))
    shown = _distinguishing([_settings(group[0]) for group in groups])
    return Comparison(
        best=tuple(f"best trial: {_trial_text(*trial)}" for trial in trials),
        groups=tuple(_group(runs, shown) for runs in groups),
        not_counted=tuple(not_counted),
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
    settings = _settings(run)
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
        print_line(console, line, "bold")
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
    for run in comparison.not_counted:
        print_line(console, f"{run['folder']}: {run['reason']}", "yellow")


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write compare.csv, .md, .json and .html into a folder and return their paths.

    The CSV file holds plain numbers in the units of the metrics' names (accuracies as shares of 1);
    the JSON file every single run's values as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "csv": _csv(comparison),
        "md": _markdown(comparison),
        "json": json.dumps(asdict(comparison), indent=2, allow_nan=False) + "\n",
        "html": _html(comparison),
    }
    return [write_atomically(folder / f"compare.{kind}", text) for kind, text in contents.items()]


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
    if not (folder / EVENTS_FILE).is_file():
        return None, "not finished: it has written no events.jsonl"
    run = read_run(folder)
    if run.status != "completed":
        return None, f"not finished: {run.reason or 'it still goes on, or was killed'}"
    if not run.config:
        return None, "not counted: config.yaml is missing, so its settings are not known"
    return run, ""


def _settings(run: Run) -> dict[str, Any]:
    """The settings by dotted names; the name of a group stands under the group."""
    named = flat_settings(run.config).items()
    return {k.removesuffix(".name"): value for k, value in named if k not in NOT_SETTINGS}


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
    settings = _settings(runs[0])
    numbers = [run.numbers() for run in runs]
    return Group(
        settings={name: settings.get(name) for name in shown},
        seeds=tuple(run.config.get("seed") for run in runs),
        folders=tuple(str(run.folder) for run in runs),
        test_seed=any(run.privacy and sentence("test_seed", run.privacy) for run in runs),
        metrics={m.name: Statistics.of(tuple(n[m.name] for n in numbers)) for m in COLUMNS},
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
    titles = [f"{metric.name}_{kind}" for metric in COLUMNS for kind in ("mean", "deviation")]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*map(csv_cell, comparison.settings()), "seeds", *titles, "test_seed"])
    for group in comparison.groups:
        cells = [*map(_setting_text, group.settings.values()), " ".join(map(str, group.seeds))]
        found = [group.metrics[metric.name] for metric in COLUMNS]
        numbers = [number for one in found for number in (one.mean, one.deviation)]
        row = ["" if number is None else f"{number:.8g}" for number in numbers]
        writer.writerow([*map(csv_cell, cells), *row, int(group.test_seed)])
    return text.getvalue()


def _markdown(comparison: Comparison) -> str:
    table = Markup("\n".join(markdown_table(comparison.titles(), comparison.rows())))
    text = templates.render("compare.md.j2", comparison=comparison, table=table)
    return text.strip() + "\n"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, whose cells are text without markup."""
    lines = [list(titles), ["---"] * len(titles), *rows]
    return [f"| {' | '.join(markdown(cell) for cell in line)} |" for line in lines]


def _html(comparison: Comparison) -> str:
    """One offline page: the table, and a picture of each metric that was reached."""
    figures = (_figure(comparison.groups, metric) for metric in COLUMNS)
    return templates.render(
        "compare.html.j2",
        comparison=comparison,
        drawing=Markup(templates.read_part("figures.js")),
        figures=templates.as_json([figure for figure in figures if figure is not None]),
    )


def _figure(groups: Sequence[Group], metric: Metric) -> Figure | None:
    """Mean and deviation of each group, None where no run has reached the metric."""
    found = [group.metrics[metric.name] for group in groups]
    if all(one.mean is None for one in found):
        return None
    scale = FORMS[metric.unit].scale

    def scaled(values: Iterable[float | None]) -> list[float | None]:
        return [None if value is None else value * scale for value in values]

    points = {
        "type": "scatter",
        "mode": "markers",
        "x": [group.name() for group in groups],
        "y": scaled(one.mean for one in found),
        "marker": {"size": 9},
        "error_y": {"array": scaled(one.deviation for one in found)},
    }
    return {"data": [points], "layout": axes(x="", y=_title(metric))}
