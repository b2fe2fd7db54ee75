"""Table: results of searches on 8,000 CIFAR-10 images, by a published table of all cells.

    python scripts/table_search_quality.py --root <cifar10.npz> --table <file> --column <names>

The space is NAS-Bench-201, 4 clients, iid and Dirichlet(.5). Federated DARTS, with and without the
regulariser of beta-DARTS, is compared with the recommended search, as deep as the table's networks
and also with 2 of the clients asked, and with data-free searches: AZ-NAS on small networks, and the
one that we recommend if no record may be read. Found cells are looked up, not retrained. The
recommended and data-free searches and federated DARTS have 5 seeds, the others 3. The rows "prior"
and "GDAS" are from commits 598eb934 and 0ae3c38c; their settings no longer exist. The file of
images holds x_train, y_train, x_test and y_test. The script continues where it was stopped; every
finished run is added to scripts/results/search_quality.json.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from table_runs import Job, arguments_of_cells, make_runs, start

from fednas_flwr.report.lookup import CellTable, found_cell, read_table
from fednas_flwr.runs.numbers import Run

DATA = (
    *("dataset=npz", "dataset.limit_train=8000"),
    *("clients=4", "search_space=nasbench201_small", "stages=[search]", "trackers=[]"),
)
IMAGES = ("dataset.crop_padding=4", "dataset.flip=true")  # if clients train
ZERO_COST = ("algorithm=zero_cost", "algorithm.draws=250", "rounds=1")
DATA_FREE = ("experiment=search/data_free",)
DARTS = ("algorithm=fed_darts", "rounds=8", *IMAGES)
DEEP = ("search_space.channels=4", "search_space.num_cells=5")  # as deep as the table's networks
RECOMMENDED = ("experiment=search/recommended", *DEEP, *IMAGES)
ROWS = [  # search, partition, settings; no partition if no record is read
    ("zero_cost", "none", ZERO_COST),
    ("data_free", "none", DATA_FREE),
    ("recommended", "iid", RECOMMENDED),
    ("recommended", "dirichlet", RECOMMENDED),
    ("recommended, 2 clients", "iid", (*RECOMMENDED, "sampling.per_round=2")),
    ("recommended, 2 clients", "dirichlet", (*RECOMMENDED, "sampling.per_round=2")),
    ("fed_darts", "iid", DARTS),
    ("fed_darts", "dirichlet", DARTS),
]
# Rows with fewer seeds.
MORE_ROWS = [("fed_darts, no beta_decay", "iid", (*DARTS, "algorithm.beta_decay=0"))]
SEEDS, FEWER_SEEDS = (1, 2, 3, 4, 5), (1, 2, 3)


def main() -> None:
    """Make the missing runs, one after the other."""
    parser = arguments_of_cells(__doc__)
    parser.add_argument("--root", type=Path, required=True)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    results = start(
        "search_quality",
        title="Percentile of found NAS-Bench-201 cells, 8,000 CIFAR-10 images (JPEG), 4 clients",
        command="python scripts/table_search_quality.py --root <cifar10.npz> --table <file> "
        "--column <names>",
        columns=[
            {"metric": "percentile", "title": "percentile of the found cell", "decimals": 1},
            {"metric": "cpu", "title": "CPU (s)", "decimals": 0},
            {"metric": "megabytes", "title": "traffic (MB)", "decimals": 1},
        ],
        against={"search": "fed_darts"},
    )
    table = read_table(options.table, options.column)
    made = [(*row, seed) for seed in SEEDS for row in ROWS]
    made += [(*row, seed) for seed in FEWER_SEEDS for row in MORE_ROWS]
    jobs = [job(*row)._replace(more=partial(found, table)) for row in made]
    make_runs(results, jobs, root=options.root)


def job(search: str, partition: str, settings: tuple[str, ...], seed: int) -> Job:
    """Return one run of the table."""
    own = [] if partition == "none" else [f"partition={partition}"]
    return Job({"search": search, "partition": partition}, [*settings, *DATA, *own], seed)


def found(table: CellTable, run: Run) -> dict[str, float]:
    """Return the quality of the found cell, and the traffic of the search."""
    megabytes = sum(run.traffic("search")) / 1e6
    return {"percentile": table.percentiles[found_cell(run)], "megabytes": megabytes}


if __name__ == "__main__":
    main()
