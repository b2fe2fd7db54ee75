"""Commands on the files of runs: predict, export, report, compare, lookup."""

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.foreign import csv_cell
from fednas_flwr.cli import Handler
from fednas_flwr.runs.numbers import EVENTS_FILE, Run, read_run

if TYPE_CHECKING:
    from torch import Tensor

    from fednas_flwr.models.prediction import Predictions


def predict(
    run_folder: Path,
    data: Path,
    *,
    output: Path = Path("predictions.csv"),
    threshold: float | None = None,
    device: str = "cpu",
) -> None:
    """Write a table of a model's predictions: labels and probabilities of raw data.

    If the data has labels, the scores of a report are printed.

    Args:
        run_folder: folder of a run, or one made by fednas export
        data: table, image, folder of images, or npz file, as the model takes it
        output: CSV file to write
        threshold: probability from which on a record is of the positive class, or has a label
            (default: that of the model; the most probable class if it has none)
        device: cpu, cuda or auto
    """
    from fednas_flwr.models.networks import load, make_device

    if output.suffix != ".csv":
        raise ConfigError(f"--output={output} must be a .csv file.")
    model = load(run_folder).to(make_device(device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # notes, which are printed below
        predictions = model.predict(data, threshold=threshold, quiet=not sys.stdout.isatty())
    for note in predictions.notes:
        print(f"note: {note}")
    try:
        table = predictions.table()
        for name in table.select_dtypes(exclude="number"):
            table[name] = table[name].map(csv_cell)
        table.to_csv(output, index=False, header=[csv_cell(name) for name in table])
    except OSError as error:
        raise ConfigError(f"--output={output} cannot be written: {error}.") from error
    print(f"{len(predictions):,} records: {output}")
    place = predictions.objective.positive_class(len(model.class_names))
    threshold = predictions.inputs.threshold
    if threshold is None and place is not None and len(model.class_names) == 2:
        threshold = 0.5  # from it on, the class is the most probable one
    if threshold is not None:
        named = "labels are" if place is None else f"the label is {model.class_names[place]}"
        print(f"{named} from a probability of {threshold:g} on; --threshold changes that")
    if predictions.accuracy is not None:
        print(f"accuracy by the labels in {data}: {100 * predictions.accuracy:.1f} %")
    if predictions.labels_N is not None and len(predictions):
        _print_scores(predictions, predictions.labels_N)


def _print_scores(predictions: "Predictions", labels: "Tensor") -> None:
    """Print the scores of predictions in the form of a report."""
    from fednas_flwr.models.metrics import detailed
    from fednas_flwr.report.score_tables import score_tables
    from fednas_flwr.report.terminal import print_table

    inputs = predictions.inputs
    labels = labels.float() if inputs.target else labels
    scores = detailed(predictions.logits, labels, objective=predictions.objective)
    named = {"class_names": inputs.class_names, "multi_label": inputs.multi_label}
    run = Run(
        Path(), {}, [{"event": "partition", **named}, {"event": "evaluated", "central": scores}]
    )
    is_one = not (inputs.target or inputs.multi_label)
    by = "by the most probable class" if is_one else "of the predictions"
    if inputs.threshold is not None:
        by = f"at a threshold of {inputs.threshold:g}"
    for title, head, rows in score_tables(run):
        title = title.replace("on the server's test set", by)
        print_table(title, head, rows, numbers=True)


def export(run_folder: Path, *, to: Path) -> None:
    """Put a run's model and its card, as a README, into a folder to publish.

    Args:
        run_folder: folder of a run, or of a model that a site keeps
        to: a new folder
    """
    from fednas_flwr.report.model_card import export_model

    for path in export_model(run_folder, to):
        print(path)


def report(run_folder: Path) -> None:
    """Write report.html of a run, also of one that is in progress.

    Args:
        run_folder: folder of a run
    """
    from fednas_flwr.report.html_report import write_report

    print(write_report(run_folder))


def compare(
    run_folders: tuple[Path, ...],
    *,
    output: Path | None = None,
    against: str | None = None,
    curves: Path | None = None,
    metric: str = "train_loss",
    stage: Literal["search", "retrain"] = "retrain",
    over: Literal["rounds", "time", "traffic"] = "rounds",
) -> None:
    """Print a table of several runs, mean over seeds; or write it, a page or curves.

    --curves draws a --metric of rounds (train_loss, validation_accuracy, ...) in a --stage --over
    rounds, time or traffic, with mean and deviation over seeds. Groups on the same data have
    differences, between runs with the same seed, from the best group or from --against NAME.

    Args:
        run_folders: run folders or sweeps
        output: folder for compare.csv, .md, .tex, .json and .html
        against: group from which differences are taken; else the best, or only non-private, one
        curves: file, .pdf, .svg or .png: see below
        metric: metric of --curves
        stage: stage of --curves
        over: horizontal axis of --curves
    """
    from fednas_flwr.report import comparison as c

    comparison = c.compare_runs(run_folders, against=against)
    c.print_comparison(comparison)
    if curves is not None:
        c.write_curves(run_folders, curves, metric=metric, stage=stage, over=over)
        print(curves)
    for path in [] if output is None else c.write_comparison(comparison, output):
        print(path)


def lookup(run_folders: tuple[Path, ...], *, table: Path, column: tuple[str, ...] = ()) -> None:
    """Print the published accuracies of NAS-Bench-201 cells that runs have found.

    Args:
        run_folders: run folders or sweeps
        table: CSV (also compressed) or Parquet file with a column of cells, as
            |op~0|+|op~0|op~1|+|op~0|op~1|op~2|, and columns of accuracies
        column: columns of accuracies; percentiles are those of the mean of their ranks (default:
            the only column of numbers)
    """
    from fednas_flwr.report.comparison import run_folders as below
    from fednas_flwr.report.lookup import print_lookup, read_table

    folders = below(run_folders)
    accuracies = read_table(table, column)
    for folder in folders:
        if not (folder / EVENTS_FILE).is_file():
            raise ConfigError(f"{folder} has no genotype to look up: its run has not begun.")
    print_lookup(accuracies, [read_run(folder) for folder in folders])


_HANDLERS: tuple[Handler, ...] = (predict, export, report, compare, lookup)
COMMANDS = {handler.__name__: handler for handler in _HANDLERS}
