"""Several runs side by side: groups that differ only in the seed, with mean and deviation.

`compare_runs` reads run folders, or folders that hold them (a sweep). `print_comparison`,
`write_comparison`, `as_latex` and `write_curves` show the result. A run that cannot be counted is
listed with the reason. Differences are between runs with the same seed, with Student's t.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from markupsafe import Markup
from rich.console import Console

from fednas_flwr.base.errors import ConfigError, check_choice, listed
from fednas_flwr.base.files import write_atomically
from fednas_flwr.base.foreign import csv_cell, markdown, read_yaml
from fednas_flwr.report import templates
from fednas_flwr.report.plots import Bar, bars, fronts
from fednas_flwr.report.score_tables import TEST_SEED, rows_of
from fednas_flwr.report.templates import DASH, FORMS, mean_and_deviation, paragraphs, sentence
from fednas_flwr.report.terminal import print_line, print_table
from fednas_flwr.runs import numbers as rn
from fednas_flwr.runs.events import Event
from fednas_flwr.runs.leaderboard import COSTS
from fednas_flwr.runs.numbers import Metric, Run

TITLE_WIDTH, GROUP_WIDTH = 30, 18
MOST_SETTINGS = 6  # settings that have columns
GROUPS = ("algorithm", "dataset", "partition", "search_space", "retrain", "privacy", "runtime")
NOT_SETTINGS = ("seed", "run_dir", "resume")
BY_NAME = {metric.name: metric for metric in rn.METRICS}
# Settings of records: runs that differ in one, except in these, are on other records.
SAME_DATA = "fractions|ranges|scattering|statistics|target_range"
OTHER_DATA = re.compile(rf"(dataset(?!\.({SAME_DATA}))|partition|clients)\b")
# Settings of the data set that must be equal for the same test set.
SAME_TEST = ("name", "root", "label", "labels", "limit_test")
OVER: dict[str, tuple[str, Callable[[Sequence[Event]], float]]] = {
    "rounds": ("round", lambda events: events[-1]["round"]),
    "time": ("seconds", lambda events: sum(event["seconds"] for event in events)),
    "traffic": (
        "MB in both directions",
        lambda events: sum(e["bytes_sent"] + e["bytes_received"] for e in events) / 1e6,
    ),
}
BEST_FILE = "optimization_results.yaml"  # by Hydra's Optuna sweeper, in the folder of a sweep


@dataclass(frozen=True)
class Statistics:
    """A metric of the runs in a group.

    Attributes:
        mean: Mean of the values that were reached; None if none was.
        deviation: Their standard deviation (n - 1); None with fewer than two values.
        values: The runs' values in the order of the seeds, None where not reached.
    """

    mean: float | None
    deviation: float | None
    values: tuple[float | None, ...]

    @classmethod
    def of(cls, values: tuple[float | None, ...]) -> "Statistics":
        """Return the statistics of the values of some runs."""
        reached = [value for value in values if value is not None]
        deviation = stdev(reached) if len(reached) > 1 else None
        return cls(fmean(reached) if reached else None, deviation, values)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval.

    Attributes:
        mean: Mean of the values.
        low: Lower end of the interval; None for one seed without an interval.
        high: Upper end of the interval.
        of: Source of the interval: ``seeds``, by Student's t; or the ``test records`` of one seed,
            by their bootstrap, which says nothing about other seeds; empty without an interval.
    """

    mean: float
    low: float | None
    high: float | None
    of: str

    @classmethod
    def by(cls, values: Sequence[float], records: Sequence[float] | None) -> "Estimate | None":
        """Return the estimate of some values; for one value the interval ``records`` is used."""
        if not values:
            return None
        mean, half = paired_difference(values)
        if half is not None:
            return cls(mean, mean - half, mean + half, "seeds")
        low, high = (records[0], records[1]) if records else (None, None)
        return cls(mean, low, high, "test records" if records else "")

    def text(self, metric: Metric) -> str:
        """Return it as a difference, in the unit of the metric's column."""
        form = FORMS[metric.unit]
        digits = form.decimals or 3
        mean, low, high = (
            "" if value is None else f"{form.scale * value:+.{digits}f}".replace("-", "−")
            for value in (self.mean, self.low, self.high)
        )
        if self.low is None:
            return f"{mean} (one seed)"
        half = form.scale * (self.mean - self.low)
        return f"{mean} ± {half:.{digits}f}" if self.of == "seeds" else f"{mean} ({low} to {high})"


@dataclass(frozen=True)
class Group:
    """Runs that differ only in the seed.

    Attributes:
        name: A few words that distinguish this group from the others.
        settings: The settings that distinguish this group from the others.
        seeds: The seeds, ascending.
        folders: The run folders, in the order of the seeds.
        test_seed: True if a client's noise came from a known seed: epsilon then protects nobody.
        metrics: The metrics that the runs have reached.
        score: The score by which runs are compared; None if no run has reached it.
        difference: Difference of the score from the group that others are compared with, or None.
    """

    name: str
    settings: dict[str, str]
    seeds: tuple[Any, ...]
    folders: tuple[str, ...]
    test_seed: bool
    metrics: dict[str, Statistics]
    score: Estimate | None
    difference: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """Groups in the order in which their first runs were found, and runs that are not counted.

    The groups of the best trials of an optimising sweep come before the others.

    Attributes:
        best: The best trials of an optimising sweep, one line each; their groups come first.
        groups: The groups of finished runs.
        not_counted: ``folder`` and ``reason`` of every run that is in no group.
        metric: The metric by which runs are compared first, a name of ``METRICS``.
        warnings: One sentence for each case in which a score and accuracy disagree.
        against: Name of the group from which the others' differences are taken, or None.
    """

    best: tuple[str, ...]
    groups: tuple[Group, ...]
    not_counted: tuple[dict[str, str], ...]
    metric: str = rn.METRICS[0].name
    warnings: tuple[str, ...] = ()
    against: str | None = None

    @property
    def main(self) -> Metric:
        """The metric by which the runs are compared first."""
        return BY_NAME[self.metric]

    @property
    def notes(self) -> list[str]:
        """Sentences on the cost of privacy, if there are plain runs, and on the differences."""
        return [*paragraphs("costs_of_privacy", self), *paragraphs("difference_notes", self)]

    @property
    def same_data(self) -> bool:
        """True if all groups have the same records, divided over clients in the same way."""
        return not any(map(OTHER_DATA.match, self.settings()))

    def settings(self) -> list[str]:
        """The names of the settings that distinguish the groups."""
        return list(self.groups[0].settings) if self.groups else []

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return head and rows of text, one per group: results first, then settings.

        It leaves out results that no group has reached, or that are equal in all groups.
        ``(2 of 3)`` marks a mean that lacks a seed.
        """
        score, several = self.metric.partition("_")[2], len(self.groups) > 1
        columns: list[tuple[str, Callable[[Group], str]]] = [("", lambda group: group.name)]
        for metric in sorted(rn.METRICS, key=lambda metric: metric.name != self.metric):
            model, _, kind = metric.name.partition("_")
            cells = {_cell(metric, group).partition(" ±")[0] for group in self.groups}
            constant = metric.name != self.metric and len(cells) <= several
            other = model in rn.SIMPLER.values() and kind != score
            if cells != {DASH} and not constant and not other:
                columns.append((metric.label + FORMS[metric.unit].title, partial(_cell, metric)))
        if any(group.difference for group in self.groups):
            columns.insert(2, (f"difference from {self.against} (95 %)", self._difference))
        if len(names := self.settings()) <= MOST_SETTINGS:
            columns += [(n, partial(lambda key, group: group.settings[key], n)) for n in names]
        columns.append(("seeds", lambda group: ", ".join(map(str, group.seeds))))
        return rows_of(self.groups, columns)

    def _difference(self, group: Group) -> str:
        return DASH if group.difference is None else group.difference.text(self.main)


def paired_difference(differences: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean of differences and half its 95 % interval (Student's t), None for one."""
    from scipy.stats import t  # type: ignore[import-untyped,unused-ignore]

    number = len(differences)
    if number < 2:
        return fmean(differences), None
    return fmean(differences), float(t.ppf(0.975, number - 1)) * stdev(differences) / sqrt(number)


def _difference(runs: Sequence[Run], others: Sequence[Run], main: Metric) -> Estimate | None:
    """Return by how much some runs are ahead of others with the same seeds."""
    by_seed = {} if runs is others else {other.config.get("seed"): other for other in others}
    pairs: list[tuple[Run, Run]] = []
    values: list[float] = []
    for run in runs:
        other = by_seed.get(run.config.get("seed"))
        ours, theirs = main.read(run), None if other is None else main.read(other)
        if other is not None and ours is not None and theirs is not None:
            pairs.append((run, other))
            values.append(ours - theirs)
    records = None
    if len(pairs) == 1 and len({*map(_test_set, pairs[0])}) == 1:
        first, second = (run.scores("central") for run in pairs[0])
        records = rn.paired_interval(first, second, main.name.removeprefix("central_"))
    return Estimate.by(values, records)


def _test_set(run: Run) -> tuple[Any, ...]:
    """Return values that are equal for runs with the same test set and resamples of its records."""
    named = [str(run.group("dataset").get(key)) for key in SAME_TEST]
    return *named, run.config.get("seed"), run.scores("central").get("num_examples")


def _cell(metric: Metric, group: Group) -> str:
    form, found = FORMS[metric.unit], group.metrics[metric.name]
    if metric.name == "epsilon" and found.mean is not None:
        return templates.epsilon_text(found.mean) + (f" ({TEST_SEED})" if group.test_seed else "")
    return mean_and_deviation(found.values, scale=form.scale, decimals=form.decimals)


def compare_runs(folders: Iterable[Path], *, against: str | None = None) -> Comparison:
    """Return the runs grouped by their settings.

    Two runs belong together if their configurations differ only in seed, run_dir and resume. If two
    runs have the same settings and seed, the one found later is not counted.

    Args:
        folders: Run folders, or folders that hold run folders at any depth.
        against: Name of the group from which differences are taken. None takes, if all groups are
            on the same data, the only one without privacy, else the one with the best mean. There
            are none if the data has changed in between.

    Raises:
        ConfigError: A folder does not exist, or there is no run in it; or no group has the name.
    """
    folders = list(folders)
    members: dict[tuple[tuple[str, str], ...], dict[Any, Run]] = {}
    not_counted = []
    for folder in run_folders(folders):
        run, reason = _finished(folder)
        if run is not None:
            group = members.setdefault(tuple(sorted(_settings(run).items())), {})
            seed = run.config.get("seed")
            if seed in group:
                reason = f"not counted: same settings and seed as {group[seed].folder}"
            else:
                group[seed] = run
        if reason:
            not_counted.append({"folder": str(folder), "reason": reason})
    groups = [
        [by_seed[seed] for seed in sorted(by_seed, key=lambda seed: (seed is None, seed))]
        for by_seed in members.values()
    ]
    trials = [trial for folder in folders for trial in _best_trials(folder)]
    groups.sort(key=lambda runs: _rank(runs[0], trials))
    shown = _distinguishing([_settings(group[0]) for group in groups])
    names = _names(groups, shown, {path.resolve() for path in folders})
    runs = [run for group in groups for run in group]
    score = f"central_{runs[0].score.name}" if runs else rn.METRICS[0].name
    reached = not runs or any(run.numbers().get(score) is not None for run in runs)
    metric = score if reached else "client_accuracy"
    if against is not None:
        check_choice("--against", against, names)
    elif len(names) > 1 and not any(map(OTHER_DATA.match, shown)):
        by_name = dict(zip(names, groups, strict=True))
        plain = [name for name, of in by_name.items() if not of[0].is_private]
        against = plain[0] if len(plain) == 1 else _best(by_name, BY_NAME[metric])
    said = [f"{run.folder.name}: {text}" for run in runs if (text := sentence("disagrees", run))]
    here = [run for run in runs if run.group("runtime").get("name") != "deployment"]
    data = {run.last("partition").get("data") for run in here}  # no hash of private records
    if len(data - {None, ""}) > 1 and not any(map(OTHER_DATA.match, shown)):
        against = None
        said.append("the data has changed between these runs: no differences are shown")
    other = groups[names.index(against)] if against is not None else []
    return Comparison(
        best=tuple(f"best trial: {_trial_text(*trial)}" for trial in trials),
        groups=tuple(
            _group(runs, shown, name, BY_NAME[metric], other)
            for runs, name in zip(groups, names, strict=True)
        ),
        not_counted=tuple(not_counted),
        metric=metric,
        warnings=tuple(said),
        against=against,
    )


def _best(groups: Mapping[str, Sequence[Run]], metric: Metric) -> str | None:
    """Return the name of the group with the best mean; None if no run has reached the metric."""
    means = {n: Statistics.of(tuple(map(metric.read, runs))).mean for n, runs in groups.items()}
    reached = {name: mean for name, mean in means.items() if mean is not None}
    best = max if metric.is_score else min
    return best(reached, key=lambda name: reached[name], default=None)


def _names(groups: Sequence[Sequence[Run]], shown: Sequence[str], named: set[Path]) -> list[str]:
    """Return a short name for each group: its given folder's name, else what differs most."""
    if all(len(runs) == 1 and runs[0].folder.resolve() in named for runs in groups):
        folders = [runs[0].folder.resolve().name for runs in groups]
        if len({*folders}) == len(groups):
            return folders
    settings = [_settings(runs[0]) for runs in groups]
    rows = [{name: of_group.get(name, DASH) for name in shown} for of_group in settings]
    used: list[str] = []
    for name in sorted(shown, key=lambda n: (-len({row[n] for row in rows}), n not in GROUPS)):
        if len({tuple(row[n] for n in used) for row in rows}) < len(rows) or not used:
            used.append(name)
    return [
        ", ".join(row[n] if n in GROUPS else f"{n.rpartition('.')[2]}={row[n]}" for n in used)
        or "run"
        for row in rows
    ]


def _best_trials(folder: Path) -> list[tuple[dict[str, Any], list[float]]]:
    """Return settings and values of a sweep's best trials, several if it had several metrics."""
    path = folder / BEST_FILE
    if not path.is_file():
        return []
    results = read_yaml(path, str(path))
    if "solutions" in results:
        return [(trial["params"], trial["values"]) for trial in results["solutions"]]
    return [(results["best_params"], [results["best_value"]])]


def _rank(run: Run, trials: Sequence[tuple[dict[str, Any], list[float]]]) -> int:
    """Return the rank of the trial whose settings a run has; all other runs come after."""
    settings = _settings(run)
    for place, (params, _) in enumerate(trials):
        chosen = {name.lstrip("+"): templates.setting_text(value) for name, value in params.items()}
        if chosen.items() <= settings.items():
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
    head, rows = comparison.table()
    at_once = max(1, (console.width - TITLE_WIDTH) // GROUP_WIDTH)
    for start in range(0, len(rows), at_once):
        shown = list(zip(head, *rows[start : start + at_once], strict=True))
        title = sentence("over_seeds", comparison)
        print_table(title, shown[0], shown[1:], numbers=True, console=console)
    for text in comparison.notes:
        print_line(console, text)
    left_out = [f"{run['folder']}: {run['reason']}" for run in comparison.not_counted]
    for text in (*comparison.warnings, *left_out):
        print_line(console, text, "yellow")


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write compare.csv, .md, .tex, .json and .html into a folder and return their paths.

    The CSV file holds plain numbers in the units of the metrics' names (accuracies as shares of 1).
    The JSON file also holds the values of every run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "csv": as_csv(comparison),
        "md": as_markdown(comparison),
        "tex": as_latex(comparison),
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
        names = (rn.EVENTS_FILE, rn.CONFIG_FILE)
        inside = {path.parent for name in names for path in folder.rglob(name)}
        if not inside:
            raise ConfigError(f"{folder} holds no run: no events.jsonl is in it or below it.")
        if folder in inside:
            inside = {folder}
        # Runs beside a run are compared if their folder is named.
        runs = [f for f in inside if f.parent.name not in rn.BESIDE or f.parents[1] not in inside]
        found |= {path.resolve(): path for path in sorted(runs) if path.resolve() not in found}
    return list(found.values())


_UNFINISHED = "it still goes on, or was killed: resume=<folder> then finishes it"


def _finished(folder: Path) -> tuple[Run | None, str]:
    """Return a finished run, or None and the reason."""
    if not (folder / rn.EVENTS_FILE).is_file():
        return None, "not finished: it has written no events.jsonl"
    run = rn.read_run(folder)
    if run.status != "completed":
        return None, f"not finished: {run.reason or _UNFINISHED}"
    if not run.config:
        return None, "not counted: config.yaml is missing, so its settings are not known"
    return run, ""


def _settings(run: Run) -> dict[str, str]:
    """Return the settings by dotted names, as text; a group has its choice as value."""
    named = rn.flat_settings(run.config).items()
    texts = {key.removesuffix(".name"): templates.setting_text(value) for key, value in named}
    return {name: text for name, text in texts.items() if name not in NOT_SETTINGS}


def _distinguishing(settings: Sequence[dict[str, str]]) -> list[str]:
    """Return the names to show: those that differ and every group has, then further needed ones."""
    names = list(dict.fromkeys(name for group in settings for name in group))
    differing = [n for n in names if len({group.get(n, DASH) for group in settings}) > 1]
    shown = [name for name in differing if all(name in group for group in settings)]
    for name in [name for name in differing if name not in shown]:
        if len({tuple(g.get(n) for n in shown) for g in settings}) == len(settings):
            break
        shown.append(name)
    return shown or [name for name in ("algorithm", "dataset", "partition") if name in names]


def _group(runs: list[Run], shown: list[str], name: str, main: Metric, others: list[Run]) -> Group:
    settings = _settings(runs[0])
    numbers = [run.numbers() for run in runs]
    values = [value for run in runs if (value := main.read(run)) is not None]
    central, _, score = main.name.partition("central_")
    known = {} if central else runs[0].scores("central").get("intervals") or {}
    return Group(
        name=name,
        settings={name: settings.get(name, DASH) for name in shown},
        seeds=tuple(run.config.get("seed") for run in runs),
        folders=tuple(str(run.folder) for run in runs),
        test_seed=any(run.privacy and sentence("test_seed", run.privacy) for run in runs),
        metrics={m.name: Statistics.of(tuple(n[m.name] for n in numbers)) for m in rn.METRICS},
        score=Estimate.by(values, known.get(score)),
        difference=_difference(runs, others, main),
    )


def as_csv(comparison: Comparison) -> str:
    """Return the groups' plain numbers, in the units of the metrics' names."""
    import pandas as pd

    rows = [
        {"group": csv_cell(group.name)}
        | {csv_cell(name): csv_cell(value) for name, value in group.settings.items()}
        | {"seeds": " ".join(map(str, group.seeds))}
        | {f"{name}_mean": found.mean for name, found in group.metrics.items()}
        | {f"{name}_deviation": found.deviation for name, found in group.metrics.items()}
        | {"test_seed": int(group.test_seed)}
        | {f"difference_{n}": getattr(group.difference, n, None) for n in Estimate.__match_args__}
        for group in comparison.groups
    ]
    return str(pd.DataFrame(rows).to_csv(index=False, float_format="%.8g", lineterminator="\n"))


def as_latex(comparison: Comparison) -> str:
    """Return the table for a paper, with the package booktabs."""
    head, rows = comparison.table()
    return templates.render("compare.tex.j2", head=head, rows=rows)


def as_markdown(comparison: Comparison) -> str:
    """Return the table, and the runs that were not counted."""
    table = Markup("\n".join(markdown_table(*comparison.table())))
    return templates.render("compare.md.j2", comparison=comparison, table=table).strip() + "\n"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, whose cells are text without markup."""
    lines = [list(titles), ["---"] * len(titles), *rows]
    return [f"| {' | '.join(markdown(cell) for cell in line)} |" for line in lines]


def _html(comparison: Comparison) -> str:
    """Return an offline page in the report's style: a chart, the table, and costs."""
    main, figures = comparison.main, {}
    found = [(group, group.score) for group in comparison.groups if group.score is not None]
    if found:
        results: list[Bar] = [
            (group.name, of.mean, None if of.low is None or of.high is None else (of.low, of.high))
            for group, of in found
        ]
        figures["results"] = bars(results, main.label, main.unit)
    rows = [
        {name: of.mean for name, of in group.metrics.items()}
        | {"network": group.name, "test": score.mean}
        for group, score in found
    ]
    costs, sign = (*COSTS, "num_parameters", "retrain_seconds"), 1 if main.is_score else -1
    figures |= fronts(rows, costs, main.label, main.unit, sign=sign)
    return templates.render_page("compare.html.j2", figures, comparison=comparison)


def write_curves(
    folders: Iterable[Path], path: Path, *, metric: str, over: str = "rounds", stage: str = "search"
) -> None:
    """Draw a metric of the rounds, mean and deviation over seeds, into a PDF, SVG or PNG file.

    Args:
        folders: As in :func:`compare_runs`.
        path: The file.
        metric: Metric of ``round`` events, such as ``validation_accuracy``.
        over: ``rounds``, or ``time`` in seconds or ``traffic`` in MB since the stage began.
        stage: ``search`` or ``retrain``.

    Raises:
        ConfigError: matplotlib is not installed, or no run has the metric.
    """
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise ConfigError(
            "--curves needs matplotlib: install fednas_flwr[plots], or use compare.html."
        ) from error
    import pandas as pd

    picture = Picture(figsize=(6, 4), layout="constrained")
    axes, (label, until), known = picture.subplots(), OVER[over], set[str]()
    for group in compare_runs(folders).groups:
        runs = [rn.read_run(Path(folder)).rounds(stage) for folder in group.folders]
        known.update(name for rounds in runs for event in rounds for name in event["metrics"])
        runs = [[e for e in rounds if e["metrics"].get(metric) is not None] for rounds in runs]
        points = [
            (place, until(rounds[: place + 1]), event["metrics"][metric])
            for rounds in runs
            for place, event in enumerate(rounds)
        ]
        rounds = pd.DataFrame(points, columns=["place", "x", "y"]).groupby("place")
        means, spreads = rounds.mean(), rounds["y"].std().fillna(0)
        whole = rounds.size() == len(runs)  # rounds that all seeds have
        x, y, spread = means["x"][whole], means["y"][whole], spreads[whole]
        if len(x):
            axes.plot(x, y, label=group.name)
            axes.fill_between(x, y - spread, y + spread, alpha=0.2)
    if not axes.lines:
        have = f"they have {listed(sorted(known)) or 'none'}"
        raise ConfigError(f"no run has the metric {metric} in its rounds of {stage}: {have}.")
    axes.set(xlabel=label, ylabel=metric.replace("_", " "))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        picture.savefig(path)
    except ValueError as error:  # for a suffix that matplotlib does not know
        raise ConfigError(f"--curves={path}: {error}.") from error
