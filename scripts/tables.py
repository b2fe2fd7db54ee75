"""Render the tables of the pages from the files that hold every single run.

A script writes ``scripts/results/<name>.json`` while it measures; the file is committed:

    {"title": "Federated DARTS and FNAS against random search",
     "command": "scripts/table_fashion_mnist.sh",
     "columns": [{"metric": "central_accuracy", "title": "test accuracy (%)",
                  "scale": 100, "decimals": 1}, ...],
     "against": {"algorithm": "random_search"},
     "runs": [{"settings": {...all that was set, without the seed...},
               "group": {"algorithm": "fed_darts", "partition": "iid"},
               "seed": 1, "commit": "4f2c9ab", "machine": "Linux x86_64, 2 cores",
               "seconds": 312.5, "metrics": {"central_accuracy": 0.912, ...}}, ...]}

``group`` gives the first columns of the rendered table; runs with an equal group are one row, in
the order of first appearance. ``scale`` (1) and ``decimals`` (three significant digits) are
optional; a metric that a run did not reach is null. If ``against`` is set, a column compares the
first metric of each row with that of the row whose group differs from it only in that field: the
mean difference of runs with the same seed, and its 95 % interval by Student's t.

In a page a table is between ``<!-- table:NAME -->`` and ``<!-- /table:NAME -->``:

    python scripts/tables.py scripts/results/README.md scripts/results [--check]
"""

import argparse
import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fednas_flwr.base.files import write_atomically
from fednas_flwr.report.comparison import markdown_table, paired_difference
from fednas_flwr.report.templates import DASH, duration, mean_and_deviation

RUN_FIELDS = {"settings", "group", "seed", "commit", "machine", "seconds", "metrics"}
MARKER = re.compile(r"^<!-- (/?)table:([\w-]+) -->$", re.MULTILINE)


def start_results(
    path: Path,
    *,
    title: str,
    command: str,
    columns: Sequence[Mapping[str, Any]],
    against: Mapping[str, Any] | None = None,
) -> None:
    """Create a result file without runs, or give an existing one a new head and keep its runs.

    Args:
        path: The file, ``scripts/results/<name>.json``.
        title: The table's title.
        command: The command that measures all of it again.
        columns: The metrics to show, as described in the module's docstring.
        against: One field of the groups, and its value in the rows with which others are compared.
    """
    head: dict[str, Any] = {"title": title, "command": command, "columns": list(columns)}
    if against is not None:
        head["against"] = dict(against)
    with _locked(path.parent):
        runs = _read(path)["runs"] if path.exists() else []
        _write(path, {**head, "runs": runs})


def find_result(
    path: Path, settings: Mapping[str, Any], seed: int, group: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """Return the file's run with these settings and this seed; None if there is none.

    Runs on other data may have the same settings; if ``group`` is given, the run is of that row.
    """
    return _find(_read(path)["runs"], settings, seed, group) if path.exists() else None


def append_result(path: Path, run: Mapping[str, Any]) -> None:
    """Add one run to a file that `start_results` made; several scripts may add at the same time.

    It replaces the run of the same row and seed from an earlier commit or other settings.

    Raises:
        ValueError: The run's fields differ from the format, it lacks a metric of the columns, or a
            run with its settings, seed and commit already exists.
    """
    if set(run) != RUN_FIELDS:
        raise ValueError(f"a run has the fields {sorted(RUN_FIELDS)}, got {sorted(run)}")
    with _locked(path.parent):
        document = _read(path)
        missing = {column["metric"] for column in document["columns"]} - set(run["metrics"])
        if missing:
            raise ValueError(f"{path.name}: the run lacks the metrics {sorted(missing)}")
        known = _find(document["runs"], run["settings"], run["seed"], run["group"])
        if known is not None and known["commit"] == run["commit"]:
            raise ValueError(f"{path.name} holds these settings with seed {run['seed']} already")
        runs = document["runs"]
        rows = [(old["group"], old["seed"]) for old in runs]
        place = (run["group"], run["seed"])
        if place in rows:
            runs[rows.index(place)] = dict(run)
        else:
            runs.append(dict(run))
        _write(path, document)


def render_tables(readme: str, results_dir: Path) -> str:
    """Return a page's text with every table between marks rendered anew.

    Args:
        readme: The present text.
        results_dir: The folder with one JSON file per table.

    Raises:
        ValueError: A mark has no partner, or there is no file with its name.
    """
    parts, end = [], 0
    marks = list(MARKER.finditer(readme))
    if len(marks) % 2:
        raise ValueError(f"the mark {marks[-1][0]} has no partner")
    for opening, closing in zip(marks[::2], marks[1::2], strict=True):
        if opening[1] or not closing[1] or opening[2] != closing[2]:
            raise ValueError(f"the mark {opening[0]} is followed by {closing[0]}")
        path = results_dir / f"{opening[2]}.json"
        if not path.exists():
            raise ValueError(f"{opening[0]}: there is no {path}")
        parts += [readme[end : opening.end()], "\n", _table(_read(path)), "\n"]
        end = closing.start()
    return "".join(parts) + readme[end:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Render the tables of a file in place; with ``--check`` only report if they differ."""
    parser = argparse.ArgumentParser(description="Render a page's tables from result files.")
    parser.add_argument("readme", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    options = parser.parse_args(arguments)
    text = options.readme.read_text(encoding="utf-8")
    rendered = render_tables(text, options.results)
    if rendered == text:
        return 0
    if options.check:
        print(f"{options.readme}: its tables differ from {options.results}: render them anew.")
        return 1
    write_atomically(options.readme, rendered)
    return 0


def _table(document: Mapping[str, Any]) -> str:
    """Return title, Markdown table and the source of the numbers."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in document["runs"]:
        rows.setdefault(json.dumps(run["group"], sort_keys=True), []).append(run)
    names = list(dict.fromkeys(name for run in document["runs"] for name in run["group"]))
    against = document.get("against", {})
    titles = [*names, *(column["title"] for column in document["columns"]), "seeds"]
    titles += [f"over {value}, 95 % interval" for value in against.values()]
    lines = [f"**{document['title']}**", ""]
    cells = []
    for runs in rows.values():
        row = [str(runs[0]["group"].get(name, DASH)) for name in names]
        row += [_metric(runs, column) for column in document["columns"]]
        row.append(str(len(runs)))
        for name, value in against.items():
            partner = json.dumps(runs[0]["group"] | {name: value}, sort_keys=True)
            row.append(_difference(runs, rows.get(partner, []), document["columns"][0]))
        cells.append(row)
    lines += [*markdown_table(titles, cells), "", _source(document)]
    return "\n".join(lines)


def _metric(runs: list[dict[str, Any]], column: Mapping[str, Any]) -> str:
    values = [run["metrics"][column["metric"]] for run in runs]
    scale, decimals = column.get("scale", 1), column.get("decimals")
    return mean_and_deviation(values, scale=scale, decimals=decimals)


def _difference(
    runs: list[dict[str, Any]], others: list[dict[str, Any]], column: Mapping[str, Any]
) -> str:
    """Return the mean of the paired differences and its interval: ``+1.4 (-0.2 to +3.0)``."""
    name, scale = column["metric"], column.get("scale", 1)
    of_other = {other["seed"]: other["metrics"][name] for other in others}
    pairs = [(run["metrics"][name], of_other.get(run["seed"])) for run in runs]
    both = [(own, other) for own, other in pairs if own is not None and other is not None]
    if runs is others or len(both) < 2:
        return DASH
    decimals = column.get("decimals", 1)
    mean, reach = paired_difference([scale * (own - other) for own, other in both])
    assert reach is not None
    shown = (f"{value:+.{decimals}f}" for value in (mean, mean - reach, mean + reach))
    return "{} ({} to {})".format(*shown)


def _source(document: Mapping[str, Any]) -> str:
    runs = document["runs"]
    machines = ", ".join(sorted({run["machine"] for run in runs}))
    commits = ", ".join(sorted({run["commit"][:10] for run in runs}))
    text = f"Mean ± standard deviation (n - 1) over seeds; `{document['command']}`"
    if runs:
        seconds = duration(sum(run["seconds"] for run in runs))
        text += f", {len(runs)} runs in {seconds} on {machines}, commit {commits}"
    return text + "."


def _find(
    runs: list[dict[str, Any]],
    settings: Mapping[str, Any],
    seed: int,
    group: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    wanted = json.loads(json.dumps(settings))  # tuples are lists in the file
    found = (run for run in runs if run["settings"] == wanted and run["seed"] == seed)
    return next((run for run in found if group in (None, run["group"])), None)


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _write(path: Path, document: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time read and replace files of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
