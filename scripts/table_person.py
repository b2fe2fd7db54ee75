"""Table: cost of protecting a person instead of a record, on card fraud.

    python scripts/table_person.py --root <folder of scripts/prepare_fraud.py> [--jobs 2]

The data do not say who paid, so rows are assigned to synthetic cards, each of one class and with 1
to 7 rows, 4 on average. ``record`` protects one row, ``person`` a card with all its rows. A step
draws as many cards as rows, but there are a fourth as many cards. There are 3 seeds, and runs are
ordered by seed. The script continues where it was stopped; every finished run is added to
scripts/results/person.json.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
from table_runs import Job, arguments, make_runs, start

from fednas_flwr.base.randomness import derive_seed

SEEDS = (1, 2, 3)
EPSILONS = (1, 3, 8)
LARGEST_CARD = 7
COLUMN = "card"
UNITS = {"record": f"dataset.ignore=[{COLUMN}]", "person": f"dataset.id_column={COLUMN}"}


def main() -> None:
    """Make the table with cards, then run what is missing."""
    options = arguments(__doc__).parse_args()
    data = Path("runs/table_person/data")
    for part in ("train", "test"):
        add_cards(options.root / f"{part}.csv.gz", data / f"{part}.csv.gz")
    results = start(
        "person",
        title="Records or persons protected, on card fraud with synthetic cards, 3 seeds",
        columns=[
            "central_auroc",
            "central_f1",
            {"metric": "epsilon", "title": "epsilon (delta 1e-5)", "decimals": 2},
            "search_seconds",
            "retrain_seconds",
        ],
        against={"unit": "record"},
    )
    shared = ("experiment=feathers/fraud_private", "clients=4")
    jobs = [
        Job({"unit": unit, "epsilon": e}, [*shared, f"privacy.epsilon={e}", column], seed)
        for seed, e, (unit, column) in itertools.product(SEEDS, EPSILONS, UNITS.items())
    ]
    make_runs(results, jobs, root=data, at_a_time=options.jobs)


def add_cards(source: Path, target: Path) -> None:
    """Write a table with a column, before the label, that assigns rows of one class to cards."""
    table = pd.read_csv(source, dtype=str)
    label = table.columns[-1]
    rng = np.random.default_rng(derive_seed(0, "cards", source.name))
    cards = np.empty(len(table), dtype=object)
    for value in sorted(table[label].unique()):
        rows = rng.permutation(np.flatnonzero(table[label] == value))
        sizes = rng.integers(1, LARGEST_CARD + 1, len(rows))
        numbers = np.repeat(np.arange(len(rows)), sizes)[: len(rows)]
        cards[rows] = [f"{value}-{number}" for number in numbers]
    table.insert(len(table.columns) - 1, COLUMN, cards)
    target.parent.mkdir(parents=True, exist_ok=True)
    table.to_csv(target, index=False)


if __name__ == "__main__":
    main()
