"""Table: results of searches against random search on Fashion-MNIST, small form.

    python scripts/table_search.py --root <folder with FashionMNIST> [--jobs 2]

There are 5 clients (vanilla_nas: one with all images), iid and Dirichlet(.5), with equal retraining
and 3 seeds; the recommended search, the data-free one and random search that takes as long have 5
seeds. The script continues where it was stopped; every finished run is added to
scripts/results/search.json.
"""

from __future__ import annotations

from table_runs import Job, arguments, make_runs, start

SMALL = ("dataset=fashion_mnist", "dataset.limit_train=2000", "clients=5")
SEARCHES = {
    "recommended": ("experiment=search/recommended", *SMALL),
    "data_free": ("experiment=search/data_free", *SMALL),
    "halving": ("experiment=search/halving", *SMALL),
    "random_search": ("experiment=random_search/fashion_mnist",),
    "random_search, as long": ("experiment=random_search/fashion_mnist", "rounds=22"),
    "fed_darts": ("experiment=fed_darts/fashion_mnist", "algorithm.beta_decay=5"),
    "fed_darts, no beta_decay": ("experiment=fed_darts/fashion_mnist",),
    "fednas": ("experiment=fed_darts/fashion_mnist", "algorithm=fednas"),
    "fedprox_darts": ("experiment=fed_darts/fashion_mnist", "algorithm=fedprox_darts"),
    "fnas": ("experiment=fnas/fashion_mnist",),
    "vanilla_nas": ("experiment=fnas/fashion_mnist", "algorithm=vanilla_nas", "clients=1"),
}
PARTITIONS = ("iid", "dirichlet")
SEEDS = (1, 2, 3)
MORE_SEEDS = (4, 5)  # for the recommended search and those compared with it
COMPARED = ("recommended", "data_free", "random_search, as long")


def jobs() -> list[Job]:
    """Return all runs, ordered by seed."""
    made = [(name, p, s) for s in SEEDS for p in PARTITIONS for name in SEARCHES]
    made = [row for row in made if row[:2] != ("vanilla_nas", "dirichlet")]  # one party
    made += [(name, p, s) for s in MORE_SEEDS for p in PARTITIONS for name in COMPARED]
    return [
        Job({"search": name, "partition": p}, [*SEARCHES[name], f"partition={p}"], seed)
        for name, p, seed in made
    ]


def main() -> None:
    """Run what is missing."""
    options = arguments(__doc__).parse_args()
    results = start(
        "search",
        title="Search on Fashion-MNIST, small form: 2,000 images, 5 clients",
        columns=["central_accuracy", "client_accuracy", "num_parameters", "search_seconds"],
        against={"search": "random_search, as long"},
    )
    make_runs(results, jobs(), root=options.root, at_a_time=options.jobs)


if __name__ == "__main__":
    main()
