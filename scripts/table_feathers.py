"""Table: FEATHERS, federated DARTS and FedEx on Fashion-MNIST, small form.

    python scripts/table_feathers.py --root <folder with FashionMNIST> [--jobs 2]

The runs have 5 and 10 clients with 2,000 images and batches of 32, iid and label-skewed, and 3
seeds. FedEx retrains the architecture that DARTS has found with the same clients, division and
seed, as in the paper's Table 2. The rows "FEATHERS, averaged" and "FEATHERS, constant rates" are
from commit 0ae3c38c; the setting of the former no longer exists, that of the latter is
``algorithm.annealed=false``. The script continues where it was stopped; every finished run is added
to scripts/results/feathers.json.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from table_runs import Job, arguments, make_runs, start

from fednas_flwr.runs.numbers import Run

CLIENTS = (5, 10)
PARTITIONS = {  # skewed: classes 0-2, 3-5 and 6-9 at different clients
    "iid": ["partition=iid"],
    "label-skewed": ["partition=label_groups"],
}
SEEDS = (1, 2, 3)
DARTS = ["experiment=fed_darts/published"]
FEDEX = ["experiment=fedex/fashion_mnist"]
FEATHERS = ["experiment=feathers/fashion_mnist"]


def main() -> None:
    """Run what is missing."""
    options = arguments(__doc__).parse_args()
    results = start(
        "feathers",
        title="FEATHERS on Fashion-MNIST, small form",
        columns=[
            "central_accuracy",
            {"metric": "training_seconds", "title": "search + retraining (s)", "decimals": 0},
            {"metric": "exchanges", "title": "exchanges", "decimals": 0},
            {"metric": "traffic_mb", "title": "MB", "decimals": 0},
            {"metric": "time_over_darts", "title": "time / DARTS", "decimals": 2},
            {"metric": "exchanges_over_darts", "title": "exchanges / DARTS", "decimals": 2},
        ],
        against={"algorithm": "DARTS"},
    )
    settings = itertools.product(SEEDS, CLIENTS, PARTITIONS)
    asked = [job for setting in settings for job in jobs(*setting)]
    make_runs(results, asked, root=options.root, at_a_time=options.jobs)


def jobs(seed: int, clients: int, partition: str) -> Iterator[Job]:
    """Yield the runs of the algorithms in one setting; the others need that of DARTS."""
    place = f"{clients}_{partition}_s{seed}"
    genotype = f"genotype=runs/table_feathers/darts_{place}/genotype.json"
    darts = None
    for name, own in (
        ("DARTS", DARTS),
        ("FedEx", [*FEDEX, genotype, "retrain.channels=8"]),
        ("FEATHERS", FEATHERS),
    ):
        group = {"clients": clients, "partition": partition, "algorithm": name}
        overrides = [*own, f"clients={clients}", *PARTITIONS[partition]]
        job = Job(group, overrides, seed, f"{name.lower()}_{place}", of=darts, more=costs)
        darts = darts or job
        yield job


def costs(run: Run, of: Run | None = None) -> dict[str, float | None]:
    """Return the time of search and retraining, and time and exchanges over those of DARTS' run."""
    both = [run.numbers(), (of or run).numbers()]
    stages = ("search_seconds", "retrain_seconds")
    seconds, base = (sum(numbers[stage] or 0.0 for stage in stages) for numbers in both)
    exchanges, least = (numbers["exchanges"] or 0.0 for numbers in both)
    return {
        "training_seconds": seconds,
        "time_over_darts": seconds / base,
        "exchanges_over_darts": exchanges / least,
    }


if __name__ == "__main__":
    main()
