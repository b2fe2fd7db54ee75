"""`fednas lookup`: tables in all their forms, percentiles against a slow oracle, refusals."""

import itertools
import json
import math
import random
from pathlib import Path
from statistics import fmean

import pandas as pd
import pytest

from fednas_flwr.cli import USER_ERROR, main
from fednas_flwr.report.lookup import found_cell, print_lookup, read_cell, read_table
from fednas_flwr.runs.numbers import read_run

from ..refusals import refuses
from .conftest import cell_of, emit, printed

COLUMNS = ["cifar10_test_12ep", "val_acc_epochs_12"]
OPS = ("none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3")
FORM = "|{}~0|+|{}~0|{}~1|+|{}~0|{}~1|{}~2|"
CELLS = list(itertools.product(OPS, repeat=6))


def made_rows(cells, seed=0):
    """Return accuracies with many ties, and columns that are none."""
    rng, rows = random.Random(seed), []
    for number, cell in enumerate(cells):
        row = {"index": number, "arch_str": FORM.format(*cell), "seed": 777}
        row |= dict(zip(COLUMNS, (rng.randrange(400) / 10, rng.randrange(60)), strict=True))
        row |= {"params(M)": 0.1 * number, "FLOPs": 7.0 * number}
        rows.append(row | {"latency_ms": rng.random(), "train_loss": rng.random()})
    return rows


def some_cells(count, seed=1):
    return random.Random(seed).sample(CELLS, count)


def write(path, rows):
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def slow_percentiles(columns):
    """Rank by counting: of equals each has the mean of their places."""

    def rank(values):
        below = [sum(other < value for other in values) for value in values]
        equal = [values.count(value) for value in values]
        return [b + (e + 1) / 2 for b, e in zip(below, equal, strict=True)]

    mean_ranks = [fmean(ranks) for ranks in zip(*map(rank, columns), strict=True)]
    return [100 * place / len(mean_ranks) for place in rank(mean_ranks)]


@pytest.fixture
def make_run(tmp_path):
    """Return a function that writes a run that derived a cell."""

    def make(name, cell, space="nasbench201"):
        folder = tmp_path / name
        emit(folder, "run_started", resumed=False)
        if cell is not None:
            cells = {"cell": cell_of([(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3)], cell)}
            emit(folder, "derived", genotype={"space": space, "cells": cells})
        return folder

    return make


def test_percentiles_are_those_of_mean_ranks_by_the_named_columns(tmp_path):
    rows = made_rows(some_cells(300))
    table = read_table(write(tmp_path / "table.csv", rows), COLUMNS)
    assert table.columns == tuple(COLUMNS)
    columns = [[row[name] for row in rows] for name in table.columns]
    for row, expected in zip(rows, slow_percentiles(columns), strict=True):
        cell = read_cell(row["arch_str"])
        assert table.accuracies[cell] == tuple(row[name] for name in table.columns)
        assert math.isclose(table.percentiles[cell], expected, rel_tol=1e-12)


def test_columns_are_named_unless_there_is_one(tmp_path):
    rows = [{"arch": FORM.format(*cell), "note": "x", "acc": k} for k, cell in enumerate(CELLS[:4])]
    one = read_table(write(tmp_path / "one.csv", rows))
    assert one.columns == ("acc",)
    more = write(tmp_path / "more.csv", [row | {"seed": 7, "std": -row["acc"]} for row in rows])
    assert read_table(more, ["acc"]) == one
    listed = "the columns of numbers acc, seed, std: name one or more of accuracies"
    refuses(f"more.csv: expected {listed}", read_table, more)
    for wrong in ("note", "accuracy"):
        refuses(f"expected acc, {wrong} among {listed}", read_table, more, ["acc", wrong])


@pytest.mark.parametrize("form", ["csv.gz", "csv.xz", "semicolons", "tabs", "index", "parquet"])
def test_files_of_many_forms_are_the_same_table(tmp_path, form):
    frame = pd.DataFrame(made_rows(some_cells(20)))
    path = tmp_path / f"table.{form}"
    match form:
        case "semicolons" | "tabs":
            path = path.with_suffix(".txt")
            frame.to_csv(path, sep=";" if form == "semicolons" else "\t", index=False)
        case "index":  # an unnamed column of numbers in front
            path = path.with_suffix(".csv")
            frame.to_csv(path)
        case "parquet":
            pytest.importorskip("pyarrow")
            frame.set_index("arch_str").to_parquet(path)
        case _:
            frame.to_csv(path, index=False)
    plain = write(tmp_path / "plain.csv", made_rows(some_cells(20)))
    assert read_table(path, COLUMNS) == read_table(plain, COLUMNS)


def test_other_spellings_and_several_rows_per_cell(tmp_path):
    spelt = dict(zip(OPS, ("zero", "Identity", "conv1x1", "conv_3x3", "avg-pool-3x3"), strict=True))
    first, second = some_cells(2)
    rows = [
        {"text": "x", "a": FORM.format(*(spelt[op] for op in cell)), "test": accuracy}
        for cell, accuracy in ((first, 70.0), (second, 60.0), (first, 80.0))
    ]
    table = read_table(write(tmp_path / "t.csv", rows))
    assert table.accuracies == {first: (75.0,), second: (60.0,)}


def test_other_texts_are_no_cells():
    none, other = (FORM.format(*[op] * 6) for op in ("none", "sep_conv_3x3"))
    longer, twice = none + "+|none~0|", none.replace("none~2", "none~1")
    for text in ("", "|none~0|", other, longer, twice):
        refuses(r"form|unknown op", read_cell, text, error=ValueError)


TWO_COLUMNS = "expected the columns of numbers params, test: name one or more of accuracies by `"


NO_TABLES = [
    (None, "cannot be read: No such file"),
    ("", "cannot be read: No columns to parse"),
    ("a,b\n1,2\n", "no column holds cells as |op~0|"),
    (f"cell,test\n{FORM.format(*CELLS[0])},1\nrubbish,2\n", "no column holds cells"),
    (f"cell,params,test\n{FORM.format(*CELLS[0])},1,2\n", TWO_COLUMNS),
    (b"\x1f\x8bnot gzip", "table"),
]


@pytest.mark.parametrize(("content", "sentence"), NO_TABLES)
def test_what_is_no_table_is_refused_in_one_sentence(tmp_path, make_run, capsys, content, sentence):
    path = tmp_path / ("t.csv.gz" if isinstance(content, bytes) else "t.csv")
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["lookup", str(make_run("run", CELLS[0])), "--table", str(path)]) == USER_ERROR
    output = capsys.readouterr()
    assert sentence in output.err
    assert str(path) in output.err
    assert (output.out, output.err.count("\n")) == ("", 1)


UNLISTED = [
    (None, "nasbench201", "has no genotype to look up"),
    (CELLS[0], "darts", "has searched search_space=darts"),
    (CELLS[0], "nasbench201", f"has found {FORM.format(*CELLS[0])}, which is none of the"),
]


@pytest.mark.parametrize(("cell", "space", "sentence"), UNLISTED)
def test_runs_without_a_listed_cell_are_named(tmp_path, make_run, prints, cell, space, sentence):
    table = write(tmp_path / "t.csv", made_rows(CELLS[1:50]))
    good, bad = make_run("good", CELLS[7]), make_run("bad", cell, space)
    error = prints("lookup", good, bad, "--table", table, "--column", *COLUMNS, code=USER_ERROR)
    assert f"{bad} {sentence}" in error
    assert error.count("\n") == 1


def test_a_run_that_has_not_begun_and_no_run_are_refused(tmp_path, prints):
    table = write(tmp_path / "t.csv", made_rows(CELLS[:9]))
    for folder in (tmp_path / "sweep", tmp_path / "nothing"):
        folder.mkdir()
    (tmp_path / "sweep" / "config.yaml").write_text("seed: 1\n")
    for name, sentence in (("sweep", "its run has not begun"), ("nothing", "holds no run")):
        command = ("lookup", tmp_path / name, "--table", table, "--column", *COLUMNS)
        assert sentence in prints(*command, code=USER_ERROR)


def test_several_runs_are_shown_with_their_mean_and_worst(tmp_path, make_run):
    cells = some_cells(40)
    table = read_table(write(tmp_path / "t.csv", made_rows(cells)), COLUMNS)
    runs = [read_run(make_run(f"run{k}", cells[k])) for k in range(3)]
    found = {}
    for line in printed(print_lookup, table, runs, width=250).splitlines():
        if line.startswith("│"):
            name, *values = (cell.strip() for cell in line.strip("│").split("│"))
            found[Path(name).name] = [float(value) for value in values]
    expected = [[*table.accuracies[c], table.percentiles[c]] for c in cells[:3]]
    by_column = [*zip(*expected, strict=True)]
    expected += [[*map(fmean, by_column)], [*map(min, by_column)]]
    for name, values in zip(("run0", "run1", "run2", "mean", "worst"), expected, strict=True):
        assert found[name] == pytest.approx(values, abs=0.06)


def test_a_search_is_looked_up_from_its_folder(tmp_path, finished_run, prints):
    """A real run: its cell of every round and the derived one stand in a table of all cells."""
    table = write(tmp_path / "all.csv", made_rows(CELLS))
    space = ("search_space=nasbench201", "search_space.channels=4", "search_space.num_cells=1")
    folder = finished_run(*space, "stages=[search]", "clients=2").folder
    printed = prints("lookup", folder, "--table", table, "--column", *COLUMNS)
    read, cell = read_table(table, COLUMNS), found_cell(read_run(folder))
    assert len(read.percentiles) == 15_625
    assert f"{read.percentiles[cell]:.1f}" in printed
    genotype = json.loads((folder / "genotype.json").read_text())
    assert tuple(edge["op"] for edge in genotype["cells"]["cell"]) == cell
