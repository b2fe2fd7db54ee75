"""Commands on the files of runs: predict, export, report, compare, lookup."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.foreign import csv_cell
from fednas_flwr.cli import Commands, add_command
from fednas_flwr.runs.numbers import EVENTS_FILE, Run, read_run
from fednas_flwr.settings.parser import Between

if TYPE_CHECKING:
    from torch import Tensor

    from fednas_flwr.models.prediction import Predictions


def add_commands(commands: Commands) -> None:
    """Add them."""
    parser = add_command(commands, "predict", predict)
    parser.add_argument("run_folder", type=Path, help="or a folder made by fednas export")
    parser.add_argument(
        "data", type=Path, help="table, image, folder of images, or npz file, as the model takes it"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("predictions.csv"), help="(default: predictions.csv)"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        help="probability from which a record is of the positive class, or has a label (default: "
        "that of the run's report; the most probable class where that has none)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto (default: cpu)")
    parser = add_command(commands, "export", export)
    parser.add_argument("run_folder", type=Path, help="folder of a run")
    parser.add_argument("--to", type=Path, required=True, help="a new folder")
    parser = add_command(commands, "report", report)
    parser.add_argument("run_folder", type=Path, help="folder of a run")
    parser = add_command(commands, "watch", watch)
    parser.add_argument("run_folder", type=Path, help="folder of a run")
    parser.add_argument("--host", default="127.0.0.1", help="(default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8642, help="(default: 8642)")
    parser = add_command(commands, "compare", compare)
    parser.add_argument("run_folders", type=Path, nargs="+", help="run folders or sweeps")
    parser.add_argument("--output", type=Path, help="folder for compare.csv, .md, .json and .html")
    parser.add_argument("--against", help="name of the group that differences by seed are from")
    for kind in ("csv", "markdown", "latex"):
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"table as {kind}")
    parser.add_argument("--curves", type=Path, metavar="FILE", help=".pdf, .svg or .png: see below")
    parser.add_argument("--metric", default="train_loss", help="of --curves (default: train_loss)")
    parser.add_argument("--stage", default="retrain", choices=("search", "retrain"))
    parser.add_argument("--over", default="rounds", choices=("rounds", "time", "traffic"))
    parser = add_command(commands, "lookup", lookup)
    parser.add_argument("run_folders", type=Path, nargs="+", help="run folders or sweeps")
    parser.add_argument(
        "--table",
        type=Path,
        required=True,
        help="CSV (also compressed) or Parquet file with a column of cells, as "
        "|op~0|+|op~0|op~1|+|op~0|op~1|op~2|, and of accuracies",
    )
    parser.add_argument(
        "--column",
        nargs="+",
        default=[],
        help="columns of accuracies; percentiles are of the mean of their ranks (default: the only "
        "column of numbers)",
    )


def predict(options: argparse.Namespace, overrides: list[str]) -> int:
    """Write a table of a model's predictions: labels and probabilities of raw data.

    Where the data has labels, the scores of a report are printed.
    """
    from rich.progress import Progress

    from fednas_flwr.models.networks import load, make_device

    if options.output.suffix != ".csv":
        raise ConfigError(f"--output={options.output} must be a .csv file.")
    model = load(options.run_folder).to(make_device(options.device))
    tested: dict[str, Any] = {}
    if (options.run_folder / EVENTS_FILE).is_file():
        tested = read_run(options.run_folder).scores("central")
    positive, threshold = tested.get("positive"), options.threshold
    if threshold is not None:
        Between(0, 1).check("--threshold", threshold)
    elif not model.inputs.multi_label:
        threshold = tested.get("threshold")
    with Progress(disable=not sys.stdout.isatty()) as bars:
        task = bars.add_task("records", total=None)

        def progress(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total)

        predictions = model.predict(
            options.data,
            progress=progress,
            threshold=threshold,
            positive=positive,
        )
    try:
        table = predictions.table()
        for name in table.select_dtypes(exclude="number"):
            table[name] = table[name].map(csv_cell)
        table.to_csv(options.output, index=False, header=[csv_cell(name) for name in table])
    except OSError as error:
        raise ConfigError(f"--output={options.output} cannot be written: {error}.") from error
    print(f"{len(predictions):,} records: {options.output}")
    if threshold is not None:
        place = predictions.objective.positive_class(len(model.class_names))
        named = "labels are" if place is None else f"the label is {model.class_names[place]}"
        print(f"{named} from a probability of {threshold:g} on; --threshold changes that")
    if predictions.accuracy is not None:
        print(f"accuracy by the labels in {options.data}: {100 * predictions.accuracy:.1f} %")
    if predictions.given is not None and len(predictions):
        _print_scores(predictions, predictions.given)
    return 0


def _print_scores(predictions: Predictions, labels: Tensor) -> None:
    """Print the scores of predictions as a report has them."""
    from fednas_flwr.models.metrics import detailed
    from fednas_flwr.report.tables import score_tables
    from fednas_flwr.report.terminal import print_table

    labels = labels.float() if predictions.target else labels
    scores = detailed(
        predictions.logits,
        labels,
        objective=predictions.objective,
        threshold=predictions.threshold,
    )
    named = {"class_names": predictions.class_names, "multi_label": predictions.multi_label}
    run = Run(
        Path(), {}, [{"event": "partition", **named}, {"event": "evaluated", "central": scores}]
    )
    for title, head, rows in score_tables(run):
        by = "of the predictions" if predictions.target else "by the most probable class"
        title = title.replace("on the server's test set", by)
        print_table(title, head, rows, numbers=True)


def export(options: argparse.Namespace, overrides: list[str]) -> int:
    """Put a run's model and its card, as a README, into a folder to publish."""
    from fednas_flwr.report.model_card import export_model

    for path in export_model(options.run_folder, options.to):
        print(path)
    return 0


def report(options: argparse.Namespace, overrides: list[str]) -> int:
    """Write report.html of a run again."""
    from fednas_flwr.report.html_report import write_report

    print(write_report(options.run_folder))
    return 0


def watch(options: argparse.Namespace, overrides: list[str]) -> int:
    """Show a run's report in the browser, renewed as it goes on, until Ctrl-C."""
    import socket

    from fednas_flwr.report.watch import serve

    read_run(options.run_folder)
    host, port = options.host, options.port
    Between(1, 65535).check("--port", port)
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise ConfigError(
            f"--host={host} --port={port} cannot be served ({error}): choose another."
        ) from error
    print(f"http://{host}:{port} shows {options.run_folder}; Ctrl-C ends it", flush=True)
    serve(options.run_folder, host=host, port=port)
    return 0


def compare(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print a table of several runs, mean over seeds; or write it, a page or curves.

    --curves draws --metric, as rounds tell it (train_loss, validation_accuracy, ...), of --stage
    --over rounds, time or traffic: mean and deviation over seeds. --against NAME adds the
    difference of runs with the same seed and its 95 % interval.
    """
    from fednas_flwr.base.files import write_atomically
    from fednas_flwr.report import comparison as c

    comparison = c.compare_runs(options.run_folders, against=options.against)
    c.print_comparison(comparison)
    writers = {"csv": c.as_csv, "markdown": c.as_markdown, "latex": c.as_latex}
    for kind, write in writers.items():
        if path := getattr(options, kind):
            print(write_atomically(path, write(comparison)))
    if options.curves is not None:
        how = {name: getattr(options, name) for name in ("metric", "stage", "over")}
        c.write_curves(options.run_folders, options.curves, **how)
        print(options.curves)
    for path in [] if options.output is None else c.write_comparison(comparison, options.output):
        print(path)
    return 0


def lookup(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the published accuracies of NAS-Bench-201 cells that runs have found."""
    from fednas_flwr.report.comparison import run_folders
    from fednas_flwr.report.lookup import print_lookup, read_table

    folders = run_folders(options.run_folders)
    table = read_table(options.table, options.column)
    for folder in folders:
        if not (folder / EVENTS_FILE).is_file():
            raise ConfigError(f"{folder} has no genotype to look up: its run has not begun.")
    print_lookup(table, [read_run(folder) for folder in folders])
    return 0
