"""Tables: DP-FNAS on Fashion-MNIST, small form: number of clients, and variance of the noise.

    python scripts/table_dp.py --root <folder with FashionMNIST> [--jobs 2] [--table dp_shared]

Vanilla NAS, FNAS and DP-FNAS with 1, 2, 4, 8 clients (paper's Table 1), then DP-FNAS with 4 clients
at noise variances .5 to 10 (Figure 3); 3 seeds each. DP-FNAS also retrains privately, FNAS does
not. ``dp_shared``: DP-FNAS whose search and retraining take one step per exchange, at one rate and
noise multiplier for every number of clients, with noise of each client's own and with noise that
secure sums of {least_sites, colluding} share. Continues where it was stopped; every finished run is
added to scripts/results/.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from table_runs import measure

from fednas_flwr.reporting.tables import start_results

RESULTS = Path(__file__).parent / "results"
RUNS = Path("runs/table_dp")
SEEDS = (1, 2, 3)
COMMAND = "python scripts/table_dp.py --root <folder>"
COLUMNS = [
    {"metric": "error", "title": "test error (%)", "scale": 100, "decimals": 1},
    {"metric": "epsilon", "title": "epsilon (delta 1e-5)", "decimals": 1},
    {"metric": "search_seconds", "title": "search (s)", "decimals": 0},
]
BATCH = 192  # of private retraining, over all clients: every K computes as many gradients
PRIVATE = "experiment=dp_fnas/fashion_mnist"
# That experiment without privacy; retraining takes five epochs in small steps instead.
PLAIN = (
    *("algorithm=fnas", "rounds=20", "dataset=fashion_mnist", "dataset.limit_train=8000"),
    "dataset.fractions={train: 0.5, validation: 0.5, test: 0.0}",
    *("search_space=nasbench201_small", "search_space.norm=group"),
    *("retrain=small", "retrain.norm=group", "retrain.channels=8", "retrain.rounds=5"),
    "retrain.weights={lr: 0.1, min_lr: 0.01, momentum: 0.9, weight_decay: 0.0, clip_norm: 5.0}",
)
TITLES = {
    "dp_clients": "Fashion-MNIST, 8,000 images over K clients, small form, 3 seeds; DP-FNAS also "
    "retrains privately, the others do not",
    "dp_noise": "DP-FNAS by variance of its noise: Fashion-MNIST, K = 4, half the rounds of "
    "the small form, 3 seeds",
    "dp_shared": "DP-FNAS, one step per exchange, by whose noise a total carries: each client's "
    "own, or shared by secure sums of least_sites-colluding; Fashion-MNIST, 8,000 images over K "
    "clients, small form, equal rates and epsilon, 3 seeds",
}
SHARED = (  # clients, terms of secure sums
    *((clients, None) for clients in (1, 2, 4, 8)),
    *((clients, (3, 1)) for clients in (4, 8)),
    (8, (7, 1)),
)
SEARCH_BATCH = 128  # of the search, over all clients


@dataclass(frozen=True)
class Job:
    """One run: the table it belongs to, its row and its settings."""

    table: str
    group: dict[str, Any]
    overrides: tuple[str, ...]
    seed: int = 0


def jobs() -> list[Job]:
    """Return all runs; what may be cut, K = 8, comes last."""
    compared = {
        clients: [
            Job("dp_clients", {"algorithm": algorithm, "K": clients}, overrides)
            for algorithm, overrides in (
                ("vanilla NAS" if clients == 1 else "FNAS", (*PLAIN, f"clients={clients}")),
                (
                    "DP-FNAS",
                    (PRIVATE, f"clients={clients}", f"retrain.batch_size={BATCH // clients}"),
                ),
            )
        ]
        for clients in (1, 2, 4, 8)
    }
    noised = []
    for variance in (0.5, 1, 2, 5, 8, 10):
        sigma = round(math.sqrt(variance), 4)
        noise = [
            f"privacy.{part}.noise_multiplier={sigma}" for part in ("weights", "alphas", "retrain")
        ]
        # Given, not calibrated: a budget that no row reaches. Half the rounds, for time.
        halved = ("rounds=10", "retrain.rounds=5")
        overrides = (PRIVATE, *halved, *noise, "privacy.epsilon=1000")
        noised.append(Job("dp_noise", {"variance": variance}, overrides))
    shared = [shared_job(clients, terms) for clients, terms in SHARED]
    rows = [*compared[1], *compared[2], *compared[4], *noised, *compared[8], *shared]
    return [replace(row, seed=seed) for row in rows for seed in SEEDS]


def shared_job(clients: int, terms: tuple[int, int] | None) -> Job:
    """Return a run in which as many records are drawn per step, whatever the number of clients."""
    overrides = [
        *(PRIVATE, f"clients={clients}", "retrain.exchange=gradients"),
        f"algorithm.batch_size={SEARCH_BATCH // clients}",
        f"retrain.batch_size={BATCH // clients}",
    ]
    name = "local"
    if terms is not None:
        name = f"shared {terms[0]}-{terms[1]}"
        sums = f"secure_terms={{least_sites: {terms[0]}, colluding: {terms[1]}}}"
        overrides += ["secure_sum=true", sums]
    return Job("dp_shared", {"noise": name, "K": clients}, tuple(overrides))


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    parser.add_argument("--table", choices=TITLES, help="only this one")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder (default: %(default)s)"
    )
    options = parser.parse_args()
    tables = TITLES if options.table is None else [options.table]
    for table in tables:
        path = options.results / f"{table}.json"
        start_results(path, title=TITLES[table], command=COMMAND, columns=COLUMNS)
    root, results = options.root.resolve(), options.results
    asked = [job for job in jobs() if job.table in tables]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: make(job, root=root, results=results), asked))


def make(job: Job, *, root: Path, results: Path) -> None:
    """Make one run of a table."""
    name = "_".join(str(value).replace(" ", "-") for value in job.group.values())
    measure(
        results / f"{job.table}.json",
        RUNS / f"{job.table}_{name}_s{job.seed}",
        overrides=job.overrides,
        group=job.group,
        seed=job.seed,
        root=root,
    )


if __name__ == "__main__":
    main()
