"""Table: what searches find against random search on Fashion-MNIST, small form.

    python scripts/table_search.py --root <folder with FashionMNIST> [--jobs 2]

5 clients, iid and Dirichlet(.5), 3 seeds, equal retraining. Continues where it was stopped; every
finished run is added to scripts/results/search.json.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from table_runs import measure

from fednas_flwr.reporting.tables import start_results

RESULTS = Path(__file__).parent / "results" / "search.json"
RUNS = Path("runs/table_search")
SMALL = ("dataset=fashion_mnist", "dataset.limit_train=2000", "clients=5")
SEARCHES = {
    "recommended": ("experiment=search/recommended", *SMALL),
    "data_free": ("experiment=search/data_free", *SMALL),
    "halving": ("experiment=search/halving", *SMALL),
    "random_search": ("experiment=random_search/fashion_mnist",),
    "random_search, as long": ("experiment=random_search/fashion_mnist", "rounds=22"),
    "fed_darts": ("experiment=fed_darts/fashion_mnist",),
    "fed_darts, beta_decay": ("experiment=fed_darts/fashion_mnist", "algorithm.beta_decay=5"),
    "fnas": ("experiment=fnas/fashion_mnist",),
}
PARTITIONS = ("iid", "dirichlet")
SEEDS = (1, 2, 3)
COLUMNS = [
    {"metric": "central_accuracy", "title": "test accuracy (%)", "scale": 100, "decimals": 1},
    {"metric": "client_accuracy", "title": "mean client accuracy (%)", "scale": 100, "decimals": 1},
    {"metric": "num_parameters", "title": "parameters (k)", "scale": 1e-3, "decimals": 0},
    {"metric": "search_seconds", "title": "search (s)", "decimals": 0},
]


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    options = parser.parse_args()
    start_results(
        RESULTS,
        title="Search on Fashion-MNIST, small form: 2,000 images, 5 clients, 3 seeds",
        command="python scripts/table_search.py --root <folder>",
        columns=COLUMNS,
    )
    jobs = [(name, p, s) for s in SEEDS for p in PARTITIONS for name in SEARCHES]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: make(*job, root=options.root.resolve()), jobs))


def make(name: str, partition: str, seed: int, *, root: Path) -> None:
    """Make one run of the table."""
    measure(
        RESULTS,
        RUNS / f"{name.replace(', ', '_')}_{partition}_s{seed}",
        overrides=[*SEARCHES[name], f"partition={partition}"],
        group={"search": name, "partition": partition},
        seed=seed,
        root=root,
    )


if __name__ == "__main__":
    main()
