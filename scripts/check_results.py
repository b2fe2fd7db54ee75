"""Check: does this checkout still measure what scripts/results/ says?

    python scripts/check_results.py --root <folder with FashionMNIST> [--tables search spaces]
        [--cifar10 <cifar10.npz> --table <file>] [--fraud <file>]

Makes one run of every row anew: that of the lowest seed, with the stored settings. Without privacy
a run repeats to the last bit on one machine, so the first metric of its table must be as stored, up
to ``--tolerance``: other processors round otherwise. Left out are private runs, whose noise is
never the same, and runs that build on the folders of others. Prints a line per row, and ends with
exit code 1 where a number differs: then make that table again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from table_runs import make_run

from fednas_flwr.reporting.lookup import found_cell, read_table

RESULTS = Path(__file__).parent / "results"
DATA = {  # the option that gives it, by a setting; the first that is found
    "experiment=feathers/fraud": "fraud",
    "dataset=npz": "cifar10",
    "dataset=fashion_mnist": "root",
    "experiment=": "root",
}


def main() -> int:
    """Make the runs and print what differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, help="folder with FashionMNIST")
    parser.add_argument(
        "--cifar10", type=Path, help="file of images, of the table of search quality"
    )
    parser.add_argument("--table", type=Path, help="its file of all cells (fednas lookup)")
    parser.add_argument("--fraud", type=Path, help="file of card transactions")
    parser.add_argument("--tables", nargs="+", help="names of files without .json (default: all)")
    parser.add_argument("--tolerance", type=float, default=0.0, help="of the metric, as shown")
    options = parser.parse_args()
    wrong = 0
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        column = document["columns"][0]
        if options.tables and path.stem not in options.tables:
            continue
        for run in first_of_rows(document["runs"]):
            row = f"{path.stem}, {', '.join(map(str, run['group'].values()))}, seed {run['seed']}"
            found = again(run, column["metric"], options)
            if isinstance(found, str):
                print(f"{row}: not run, {found}", flush=True)
                continue
            stored = run["metrics"][column["metric"]]
            scale = column.get("scale", 1)
            is_same = abs(found - stored) * scale <= options.tolerance
            wrong += not is_same
            text = "as stored" if is_same else f"stored is {scale * stored:.6g}"
            print(f"{row}: {column['title']} {scale * found:.6g}, {text}", flush=True)
    return 1 if wrong else 0


def first_of_rows(runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the run of the lowest seed of every row."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        rows.setdefault(json.dumps(run["group"], sort_keys=True), []).append(run)
    for of_row in rows.values():
        yield min(of_row, key=lambda run: run["seed"])


def again(run: dict[str, Any], metric: str, options: argparse.Namespace) -> float | str:
    """Return the metric of the same run made anew, or why it is not made."""
    overrides = run["settings"].get("overrides")
    if overrides is None:
        return "no run of fednas"
    if any("privacy" in text or "dp_fnas" in text for text in overrides):
        return "private"
    if any("runs/" in text for text in overrides):
        return "builds on another run"
    roots = [
        getattr(options, option)
        for setting, option in DATA.items()
        if any(text.startswith(setting) for text in overrides)
    ]
    if roots and roots[0] is None or metric == "percentile" and options.table is None:
        return "its data was not given"
    with tempfile.TemporaryDirectory() as place:
        made = make_run(
            Path(place) / "run",
            overrides=overrides,
            seed=run["seed"],
            root=roots[0].resolve() if roots else None,
        )
        if made is None:
            return "failed"
        if metric == "percentile":
            return read_table(options.table).percentiles[found_cell(made)]
        found = made.numbers().get(metric)
    return f"a run has no {metric} of its own" if found is None else found


if __name__ == "__main__":
    sys.exit(main())
