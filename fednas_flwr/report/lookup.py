"""Looks up found cells in a published table of the accuracies of all cells of NAS-Bench-201.

Dong and Yang (2020), arXiv 2001.00326, trained every cell. Such a table rates the cell found by a
search without the luck and the cost of another training. :func:`read_table` reads a table,
:func:`found_cell` takes the cell from a run, :func:`print_lookup` shows several runs.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.report.terminal import print_table
from fednas_flwr.runs.numbers import Run

Cell = tuple[str, ...]  # the ops of the edges by target, then source

SPACE = "nasbench201"
NOTATION = "|{}~0|+|{}~0|{}~1|+|{}~0|{}~1|{}~2|"
FORM = NOTATION.format(*["op"] * 6)
PATTERN = re.compile(re.escape(FORM).replace("op", "([^|~]+)"))
SPELLINGS = {  # in small letters, without marks and without a leading "nor"
    **dict.fromkeys(("none", "zero", "zeroize"), "none"),
    **dict.fromkeys(("skipconnect", "skip", "identity"), "skip_connect"),
    "conv1x1": "nor_conv_1x1",
    "conv3x3": "nor_conv_3x3",
    **dict.fromkeys(("avgpool3x3", "avgpool"), "avg_pool_3x3"),
}


@dataclass(frozen=True)
class CellTable:
    """Accuracies of cells.

    Attributes:
        columns: Names of the accuracies in the file.
        accuracies: Accuracies of each cell in the order of the columns, in the file's unit.
        percentiles: For each cell, the share of cells in percent, in (0, 100], than which the mean
            of its ranks over all columns is at least as good; for equal cells, their mean.
    """

    columns: tuple[str, ...]
    accuracies: Mapping[Cell, tuple[float, ...]]
    percentiles: Mapping[Cell, float]


def read_table(path: Path, columns: Sequence[str] = ()) -> CellTable:
    """Return the table that a file holds.

    The column of cells is found by its content. Rows of one cell, such as several seeds, are
    averaged. Ties share a rank, and so do equal means of ranks.

    Args:
        path: Text file with commas, semicolons or tabs, also compressed, or ``.parquet``.
        columns: Names of columns of accuracies, where the highest value ranks best; may be left out
            if the table has one column of numbers.

    Raises:
        ConfigError: The file cannot be read, lacks cells or columns, or needs columns to be named.
    """
    import pandas as pd

    frame = _read(path)
    column = next((name for name in frame if _holds_cells(frame[name])), None)
    if column is None:
        raise ConfigError(
            f"{path} is no table of NAS-Bench-201 cells: no column holds cells as {FORM}."
        )
    numeric = frame.select_dtypes("number")
    ranked = list(columns) or list(numeric)
    if len(ranked) != max(1, len(columns)) or not set(ranked) <= set(numeric):
        named = f"{', '.join(columns)} among " if columns else ""
        listed = ", ".join(map(str, numeric)) or "-"
        raise ConfigError(
            f"{path}: expected {named}the columns of numbers {listed}: "
            "name one or more of accuracies by `fednas lookup --column`."
        )
    cells = pd.Series([read_cell(text) for text in frame[column]], index=frame.index)
    means = numeric[ranked].groupby(cells).mean().dropna(how="all")
    percentiles = 100 * means.rank().mean(axis=1).rank(pct=True)
    return CellTable(
        columns=tuple(map(str, ranked)),
        accuracies=dict(zip(means.index, means.itertuples(index=False, name=None), strict=True)),
        percentiles=dict(zip(means.index, percentiles.tolist(), strict=True)),
    )


def read_cell(text: str) -> Cell:
    """Return the ops of a cell in the benchmark's notation, with this package's names.

    Raises:
        ValueError: The text is not of that form, or names an op that the benchmark does not have.

    Example:
        >>> read_cell("|zero~0|+|skip~0|conv_1x1~1|+|none~0|nor_conv_3x3~1|avg_pool_3x3~2|")[:3]
        ('none', 'skip_connect', 'nor_conv_1x1')
    """
    match = PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not of the form {FORM}")
    ops = []
    for name in match.groups():
        plain = re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nor")
        if plain not in SPELLINGS:
            raise ValueError(f"{text!r} has the unknown op {name!r}")
        ops.append(SPELLINGS[plain])
    return tuple(ops)


def found_cell(run: Run) -> Cell:
    """Return the cell that a run has derived.

    Raises:
        ConfigError: The run has derived no cell, or one of another search space.
    """
    genotype = run.last("derived").get("genotype")
    if genotype is None:
        raise ConfigError(f"{run.folder} has no genotype to look up: its search has not ended.")
    if genotype["space"] != SPACE:
        raise ConfigError(
            f"{run.folder} has searched search_space={genotype['space']}, but a table holds cells "
            f"of search_space={SPACE}."
        )
    return tuple(edge["op"] for edge in genotype["cells"]["cell"])


def print_lookup(table: CellTable, runs: Sequence[Run], console: Console | None = None) -> None:
    """Print accuracies and percentile of each run's cell; for several, also the mean and worst.

    Raises:
        ConfigError: A run has no cell that the table holds.
    """
    cells = [_listed(table, run) for run in runs]
    rows = [(*table.accuracies[cell], table.percentiles[cell]) for cell in cells]
    names = [str(run.folder) for run in runs]
    if len(rows) > 1:
        columns = list(zip(*rows, strict=True))
        rows += [tuple(map(fmean, columns)), tuple(map(min, columns))]
        names += ["mean", "worst"]
    decimals = 2 if max(max(values) for values in table.accuracies.values()) > 1 else 4
    texts = [[*(f"{v:.{decimals}f}" for v in values), f"{share:.1f}"] for *values, share in rows]
    print_table(
        f"accuracy by a table of {len(table.percentiles):,} cells",
        ["run", *table.columns, "percentile"],
        [[name, *cells] for name, cells in zip(names, texts, strict=True)],
        numbers=True,
        sum_rows=len(rows) - len(runs),
        console=console,
    )


def _listed(table: CellTable, run: Run) -> Cell:
    """Return the run's cell, which the table must hold."""
    cell = found_cell(run)
    if cell not in table.percentiles:
        raise ConfigError(
            f"{run.folder} has found {NOTATION.format(*cell)}, which is none of the table's "
            f"{len(table.percentiles):,} cells."
        )
    return cell


def _read(path: Path) -> Any:
    """Return the file as a data frame of at least one row."""
    import pandas as pd

    try:
        if path.suffix == ".parquet":
            return pd.read_parquet(path).reset_index()
        heads = {mark: pd.read_csv(path, sep=mark, nrows=0) for mark in ",;\t"}
        return pd.read_csv(path, sep=max(heads, key=lambda mark: heads[mark].shape[1]))
    except (OSError, ValueError, EOFError, ImportError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"the table {path} cannot be read: {reason}.") from error


def _holds_cells(column: Any) -> bool:
    """Return true if a column has values and all of them are cells."""
    try:
        return len(column) > 0 and all(bool(read_cell(value)) for value in column)
    except (ValueError, AttributeError):
        return False
