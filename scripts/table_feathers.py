"""Table: FEATHERS, federated DARTS and FedEx on Fashion-MNIST, small form.

    python scripts/table_feathers.py --root <folder with FashionMNIST> [--jobs 2]

5 and 10 clients with 2,000 images and batches of 32, iid and label-skewed, 3 seeds. FedEx retrains
the architecture that DARTS has found with the same clients, division and seed, as in the paper's
Table 2. The rows "FEATHERS, averaged", by a setting that is gone, are of commit 0ae3c38c. Continues
where it was stopped; every finished run is added to scripts/results/feathers.json.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from table_runs import RESULTS, TEST_ACCURACY, arguments, make_all, make_run, measure, start

from fednas_flwr.runs.numbers import Run

RUNS = Path("runs/table_feathers")
CLIENTS = (5, 10)
PARTITIONS = {  # the skewed one: classes 0-2, 3-5 and 6-9 at different clients
    "iid": ["partition=iid"],
    "label-skewed": ["partition=label_groups"],
}
SEEDS = (1, 2, 3)
DARTS = ["experiment=fed_darts/published"]
FEDEX = ["experiment=fedex/fashion_mnist"]
FEATHERS = ["experiment=feathers/fashion_mnist"]
COLUMNS = [
    TEST_ACCURACY,
    {"metric": "training_seconds", "title": "search + retraining (s)", "decimals": 0},
    {"metric": "exchanges", "title": "exchanges", "decimals": 0},
    {"metric": "traffic_mb", "title": "MB", "decimals": 0},
    {"metric": "time_over_darts", "title": "time / DARTS", "decimals": 2},
    {"metric": "exchanges_over_darts", "title": "exchanges / DARTS", "decimals": 2},
]


def main() -> None:
    """Run what is missing."""
    options = arguments(__doc__).parse_args()
    root = options.root.resolve()
    start(
        "feathers",
        title="FEATHERS on Fashion-MNIST, small form",
        command="python scripts/table_feathers.py --root <folder>",
        columns=COLUMNS,
        against={"algorithm": "DARTS"},
    )
    settings = itertools.product(SEEDS, CLIENTS, PARTITIONS)
    make_all(lambda one: make_setting(*one, root=root), settings, at_a_time=options.jobs)


def make_setting(seed: int, clients: int, partition: str, *, root: Path) -> None:
    """Make the runs of the algorithms in one setting: the others need that of DARTS."""

    def folder(name: str) -> Path:
        return RUNS / f"{name.lower().replace(', ', '_')}_{clients}_{partition}_s{seed}"

    def darts() -> Run:
        run = make_run(folder("DARTS"), overrides=[*DARTS, *shared], seed=seed, root=root)
        if run is None:
            raise RuntimeError(f"{folder('DARTS')} has failed: nothing to compare with")
        return run

    shared = [f"clients={clients}", *PARTITIONS[partition]]
    algorithms = {
        "DARTS": DARTS,
        "FedEx": [*FEDEX, f"genotype={folder('DARTS') / 'genotype.json'}", "retrain.channels=8"],
        "FEATHERS": FEATHERS,
    }
    for name, overrides in algorithms.items():
        measure(
            RESULTS / "feathers.json",
            folder(name),
            overrides=[*overrides, *shared],
            group={"clients": clients, "partition": partition, "algorithm": name},
            seed=seed,
            root=root,
            more=lambda run: costs(run, over=darts()),
        )


def costs(run: Run, *, over: Run) -> dict[str, float | None]:
    """Return the time of search and retraining, and time and exchanges over another run's."""
    seconds, base = (
        sum(numbers[stage] or 0.0 for stage in ("search_seconds", "retrain_seconds"))
        for numbers in (run.numbers(), over.numbers())
    )
    return {
        "training_seconds": seconds,
        "time_over_darts": seconds / base,
        "exchanges_over_darts": exchanges(run) / exchanges(over),
    }


def exchanges(run: Run) -> float:
    """Return the exchanges of a run in all its rounds."""
    return run.numbers()["exchanges"] or 0.0


if __name__ == "__main__":
    main()
