"""Table: data-free scores of NAS-Bench-201 cells against a published table of their accuracies.

    python scripts/table_scores.py --table <file> --column <names>

Random cells are scored in the networks of the small preset (8 channels, one cell per stage), and
each score and combination of scores is compared with the cells' accuracies in the table. There are
3 seeds. The script continues where it was stopped; scores are kept in runs/table_scores, and
results are added to scripts/results/scores.json. Its seconds are those of the comparison; the
scores of a cell take about half a second of CPU. ``learning``, which takes seconds, is omitted. The
rows "zen", "naswot" and those of records are from commit 0ae3c38c; their scores no longer exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr
from table_runs import add_missing, arguments_of_cells, start

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.report.lookup import NOTATION, CellTable, read_cell, read_table
from fednas_flwr.search.data_free_scores import AZ_NAS, SCORES, combine, measure
from fednas_flwr.spaces.nasbench201 import NASBench201Space
from fednas_flwr.spaces.space import CELL

RUNS = Path("runs/table_scores")
CHANNELS, NUM_CELLS = 8, 1  # of the first stage, per stage
CELLS, DRAWS = 500, 250  # number of scored cells, and of those that a search draws
SEEDS = (1, 2, 3)
REPEATS = 1000  # searches among the scored cells
BEST = 0.8  # quantile of the percentiles above which the second correlation is taken
QUICK = tuple(name for name in SCORES if name != "learning")  # ``learning`` costs seconds
COMBINATIONS = {
    **{name: (name,) for name in QUICK},
    "AZ-NAS": AZ_NAS,
    "AZ-NAS and synflow": (*AZ_NAS, "synflow"),
}
COLUMNS = [
    {"metric": "correlation", "title": "rank correlation with the percentile", "decimals": 2},
    {"metric": "correlation_best", "title": "among the best 20 %", "decimals": 2},
    {"metric": "choice", "title": "percentile of a search's choice", "decimals": 1},
    {"metric": "choice_worst", "title": "worst 5 % of these", "decimals": 1},
]


def main() -> None:
    """Compute the missing scores, then compare."""
    options = arguments_of_cells(__doc__).parse_args()
    torch.set_num_threads(1)
    table = read_table(options.table, options.column)
    results = start(
        "scores",
        title="Data-free scores of random NAS-Bench-201 cells by a table of all cells",
        command="python scripts/table_scores.py --table <file> --column <names>",
        columns=COLUMNS,
    )
    for seed in SEEDS:
        scored = score_cells(seed)
        for name, scores in COMBINATIONS.items():
            settings = {
                "scores": list(scores),
                "channels": CHANNELS,
                "num_cells": NUM_CELLS,
                "cells": CELLS,
                "draws": DRAWS,
                "table": options.table.name,
            }
            make = partial(compare, scored, scores, table, seed=seed)
            add_missing(results, make, settings=settings, group={"score": name}, seed=seed)


def score_cells(seed: int) -> dict[str, dict[str, float]]:
    """Return the scores of distinct random cells by notation; known ones are read from a file.

    The seed determines the draw, the initialisation and the inputs.
    """
    space = NASBench201Space(
        input_shape=(3, 32, 32), num_classes=10, channels=CHANNELS, num_cells=NUM_CELLS
    )
    generator, cells = make_generator(seed, "pool"), {}
    while len(cells) < CELLS:
        genotype = space.random_genotype(generator)
        cells[NOTATION.format(*(edge.op for edge in genotype.cells[CELL]))] = genotype
    path = RUNS / f"c{CHANNELS}_n{NUM_CELLS}_s{seed}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if path.exists():
        known = pd.read_csv(path, index_col="cell", float_precision="round_trip").to_dict("index")
    for cell, genotype in cells.items():
        if cell not in known:
            known[cell] = measure(space, genotype, QUICK, seed=seed)
            row = pd.DataFrame([known[cell]], index=pd.Index([cell], name="cell"))
            row.to_csv(path, mode="a", columns=list(QUICK), header=not path.exists())
    return {cell: known[cell] for cell in cells}


def compare(
    scored: Mapping[str, Mapping[str, float]], scores: Sequence[str], table: CellTable, *, seed: int
) -> dict[str, float]:
    """Return the metrics of COLUMNS for the ranking by some scores together.

    Args:
        scored: The scores of each cell, by its notation.
        scores: Names of the scores for the ranking.
        table: The accuracies.
        seed: Seed of the draws of the cells that a search ranks.
    """
    cells = [read_cell(text) for text in scored]
    values = [{name: row[name] for name in scores} for row in scored.values()]
    percentiles = np.array([table.percentiles[cell] for cell in cells])
    combined = np.array(combine(values))
    best = percentiles >= np.quantile(percentiles, BEST)
    rng = np.random.default_rng(seed)
    choices = []
    for _ in range(REPEATS):
        drawn = rng.choice(len(cells), DRAWS, replace=False)
        among = np.array(combine([values[index] for index in drawn]))
        choices.append(percentiles[drawn[np.argmax(among)]])
    return {
        "correlation": float(spearmanr(combined, percentiles).statistic),
        "correlation_best": float(spearmanr(combined[best], percentiles[best]).statistic),
        "choice": float(np.mean(choices)),
        "choice_worst": float(np.quantile(choices, 0.05)),
    }


if __name__ == "__main__":
    main()
