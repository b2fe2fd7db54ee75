"""Tables: FEATHERS, federated DARTS and FedEx on Fashion-MNIST, small form; FEATHERS' options.

    python scripts/table_feathers.py --root <folder with FashionMNIST> [--jobs 2] [--options]

5 and 10 clients with 2,000 images and batches of 32, 3 seeds, and 100 clients with 5,000 images, in
batches of 8 so that 50 still make several steps, 2 seeds; iid and label-skewed. FedEx retrains the
architecture that DARTS has found with the same clients, division and seed, as in the paper's Table
2. With --options instead FEATHERS' bandit by Eq. 6, with resampling, seeing the training state, and
rewarded by the averaged model, 5 clients: the default is FEATHERS with 5 clients in the first
table. Continues where it was stopped; every finished run is added to scripts/results/.
"""

from __future__ import annotations

import argparse
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from table_runs import measure

from fednas_flwr.reporting.runs import Run, read_run
from fednas_flwr.reporting.tables import start_results

RESULTS = Path(__file__).parent / "results"
RUNS = Path("runs/table_feathers")
COMMAND = "python scripts/table_feathers.py --root <folder>"
FEW, MANY = (5, 10), (100,)  # clients
SMALL_SHARES = [
    "dataset.limit_train=5000",
    "retrain.batch_size=8",
]  # as many steps as 10 clients make
SEARCH_BATCH = ["algorithm.batch_size=8"]
PARTITIONS = {  # the skewed one: classes 0-2, 3-5 and 6-9 at different clients
    "iid": ["partition=iid"],
    "label-skewed": ["partition=label_groups"],
}
SEEDS = (1, 2, 3)
SEEDS_OF_MANY = (1, 2)  # such a run takes several times as long
DARTS = ["experiment=fed_darts/published"]
FEDEX = ["experiment=fedex/fashion_mnist"]
FEATHERS = ["experiment=feathers/fashion_mnist"]
RESAMPLED = "algorithm.bandit.resampled_share=0.3"
SEES_STATE = "algorithm.bandit.sees_state=true"
OPTIONS = {
    "Eq. 6": ["algorithm=feathers_paper_faithful"],
    "resampling": [RESAMPLED],
    "seeing the state": [SEES_STATE],
    "both": [RESAMPLED, SEES_STATE],
    "averaged rewards": ["algorithm.rewarded=averaged"],
}
COLUMNS = [
    {"metric": "central_accuracy", "title": "test accuracy (%)", "scale": 100, "decimals": 1},
    {"metric": "training_seconds", "title": "search + retraining (s)", "decimals": 0},
    {"metric": "exchanges", "title": "exchanges", "decimals": 0},
    {"metric": "traffic_mb", "title": "MB", "decimals": 0},
]
OVERHEAD = [
    {"metric": "time_over_darts", "title": "time / DARTS", "decimals": 2},
    {"metric": "exchanges_over_darts", "title": "exchanges / DARTS", "decimals": 2},
]


def main() -> None:
    """Run what is missing of one of the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--options", action="store_true", help="the options of the bandit")
    options = parser.parse_args()
    root = options.root.resolve()
    with ThreadPoolExecutor(options.jobs) as pool:
        if options.options:
            start_results(
                RESULTS / "feathers_options.json",
                title="FEATHERS' bandit on Fashion-MNIST, small form: 5 clients",
                command=f"{COMMAND} --options",
                columns=COLUMNS,
            )
            jobs = itertools.product(SEEDS, OPTIONS, PARTITIONS)
            list(pool.map(lambda job: make_option(*job, root=root), jobs))
        else:
            start_results(
                RESULTS / "feathers.json",
                title="FEATHERS on Fashion-MNIST, small form",
                command=COMMAND,
                columns=[*COLUMNS, *OVERHEAD],
            )
            settings = [
                *itertools.product(SEEDS, FEW, PARTITIONS),
                *itertools.product(SEEDS_OF_MANY, MANY, PARTITIONS),
            ]
            list(pool.map(lambda setting: make_setting(*setting, root=root), settings))


def make_setting(seed: int, clients: int, partition: str, *, root: Path) -> None:
    """Make the runs of the three algorithms in one setting: the others need that of DARTS."""
    darts = RUNS / f"darts_{clients}_{partition}_s{seed}"
    many = clients in MANY
    shared = [
        f"clients={clients}",
        *PARTITIONS[partition],
        *(SMALL_SHARES if many else []),
    ]
    given = [f"genotype={darts / 'genotype.json'}", "retrain.channels=8"]
    for name, overrides in {
        "DARTS": DARTS,
        "FedEx": [*FEDEX, *given],
        "FEATHERS": FEATHERS,
    }.items():
        measure(
            RESULTS / "feathers.json",
            RUNS / f"{name.lower()}_{clients}_{partition}_s{seed}",
            overrides=[*overrides, *shared, *(SEARCH_BATCH if many and name != "FedEx" else [])],
            group={"clients": clients, "partition": partition, "algorithm": name},
            seed=seed,
            root=root,
            more=lambda run: costs(run, over=read_run(darts)),
        )


def make_option(seed: int, option: str, partition: str, *, root: Path) -> None:
    """Make one run with options of the bandit."""
    measure(
        RESULTS / "feathers_options.json",
        RUNS / f"{option.replace(' ', '-')}_{partition}_s{seed}",
        overrides=[*FEATHERS, *PARTITIONS[partition], *OPTIONS[option]],
        group={"bandit": option, "partition": partition},
        seed=seed,
        root=root,
        more=lambda run: costs(run, over=run),
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
