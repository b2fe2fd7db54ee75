"""Tables: DP-FNAS on Fashion-MNIST, small form: number of clients, and variance of the noise.

    python scripts/table_dp.py --root <folder with FashionMNIST> [--jobs 2] [--table dp_shared]

DP-FNAS on scattering features with 1, 2, 4, 8 clients (paper's Table 1), beside a linear model on
the same features with the same budget and the found network trained without privacy; then DP-FNAS
and the linear model with 4 clients at noise variances .5 to 10 (Figure 3); 3 seeds each.
``dp_shared``: DP-FNAS whose search and retraining take one step per exchange, with noise of each
client's own and with noise that secure sums of {least_sites, colluding} share. Continues where it
was stopped; every finished run is added to scripts/results/.
"""

from __future__ import annotations

import argparse
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table_runs import measure

from fednas_flwr.reporting.tables import start_results

RESULTS = Path(__file__).parent / "results"
RUNS = Path("runs/table_dp")
SEEDS = (1, 2, 3)
COMMAND = "python scripts/table_dp.py --root <folder>"
COLUMNS = [
    {"metric": "central_accuracy", "title": "test accuracy (%)", "scale": 100, "decimals": 1},
    {"metric": "accuracy_without_cells", "title": "without cells", "scale": 100, "decimals": 1},
    {"metric": "accuracy_without_skip", "title": "without skip", "scale": 100, "decimals": 1},
    {"metric": "epsilon", "title": "PRV epsilon (delta 1e-5)", "decimals": 2},
    {"metric": "retrain_seconds", "title": "retraining (s)", "decimals": 0},
]
SEARCHED = ("experiment=dp_fnas/features",)
GIVEN = ("algorithm=fedavg", "stages=[retrain,evaluate,export]")
DATA = (
    *("dataset=fashion_mnist", "dataset.limit_train=8000", "dataset.transform=scattering"),
    "dataset.fractions={train: 0.5, validation: 0.5, test: 0.0}",
)
LINEAR = (*GIVEN, *DATA, "algorithm.network=linear", "privacy=dp", "privacy.micro_batch_size=64")
EXACT = (
    *(*GIVEN, *DATA, "search_space.skip=linear"),
    *("retrain=small", "retrain.norm=group", "retrain.channels=8", "retrain.rounds=15"),
    "retrain.weights={lr: 0.02, min_lr: 0.0005, momentum: 0.9, weight_decay: 5e-4, clip_norm: 5.0}",
)
TITLES = {
    "dp_clients": "Fashion-MNIST on scattering features, 8,000 images over K clients, budget of 8, "
    "3 seeds",
    "dp_noise": "By variance of the noise: Fashion-MNIST on scattering features, 8,000 images over "
    "4 clients, 3 seeds",
    "dp_shared": "DP-FNAS, one step per exchange, by whose noise a total carries: each client's "
    "own, or shared by secure sums of least_sites-colluding; Fashion-MNIST on scattering features, "
    "8,000 images over K clients, budget of 8, 3 seeds",
}
SHARED = (  # clients, terms of secure sums
    *((clients, None) for clients in (1, 2, 4, 8)),
    *((clients, (3, 1)) for clients in (4, 8)),
    (8, (7, 1)),
)


@dataclass(frozen=True)
class Job:
    """One run: the table it belongs to, its row and its settings.

    Attributes:
        table: Name of the table.
        group: First columns of the row.
        overrides: Settings.
        seed: The run's seed.
        of: The run before it whose found network it trains; None for a network of its own.
    """

    table: str
    group: dict[str, Any]
    overrides: tuple[str, ...]
    seed: int = 0
    of: Job | None = None

    @property
    def folder(self) -> Path:
        """The run folder."""
        name = "_".join(str(value).replace(" ", "-") for value in self.group.values())
        return RUNS / f"{self.table}_{name}_s{self.seed}"


def jobs() -> list[list[Job]]:
    """Return all runs, in rows that are made one after the other."""
    found = [rows(seed) for seed in SEEDS]
    return [row for of_seed in found for row in of_seed]


def rows(seed: int) -> list[list[Job]]:
    """Return the runs of one seed."""
    tables = []
    for clients in (1, 2, 4, 8):
        own = (f"clients={clients}",)
        searched = Job("dp_clients", {"network": "DP-FNAS", "K": clients}, (*SEARCHED, *own), seed)
        exact = Job(
            *("dp_clients", {"network": "without privacy", "K": clients}),
            *((*EXACT, *own), seed, searched),
        )
        linear = Job("dp_clients", {"network": "linear", "K": clients}, (*LINEAR, *own), seed)
        tables.append([searched, exact, linear])
    for variance in (0.5, 1, 2, 5, 8, 10):
        sigma = round(math.sqrt(variance), 4)
        noise = {
            part: f"privacy.{part}.noise_multiplier={sigma}"
            for part in ("weights", "alphas", "retrain")
        }
        # Given, not calibrated: a budget that no row reaches.
        terms = ("clients=4", noise["retrain"], "privacy.epsilon=100000")
        of_search = (*SEARCHED, *terms, noise["weights"], noise["alphas"])
        tables.append(
            [
                Job("dp_noise", {"network": "DP-FNAS", "variance": variance}, of_search, seed),
                Job(
                    "dp_noise", {"network": "linear", "variance": variance}, (*LINEAR, *terms), seed
                ),
            ]
        )
    return [*tables, *([shared_job(clients, terms, seed)] for clients, terms in SHARED)]


def shared_job(clients: int, terms: tuple[int, int] | None, seed: int) -> Job:
    """Return a run whose every step is an exchange."""
    overrides = [*SEARCHED, f"clients={clients}", "retrain.exchange=gradients"]
    name = "local"
    if terms is not None:
        name = f"shared {terms[0]}-{terms[1]}"
        sums = f"secure_terms={{least_sites: {terms[0]}, colluding: {terms[1]}}}"
        overrides += ["secure_sum=true", sums]
    return Job("dp_shared", {"noise": name, "K": clients}, tuple(overrides), seed)


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
    asked = [row for row in jobs() if row[0].table in tables]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda row: [make(job, root=root, results=results) for job in row], asked))


def make(job: Job, *, root: Path, results: Path) -> None:
    """Make one run of a table."""
    given = () if job.of is None else (f"genotype={job.of.folder / 'genotype.json'}",)
    measure(
        results / f"{job.table}.json",
        job.folder,
        overrides=(*job.overrides, *given),
        group=job.group,
        seed=job.seed,
        root=root,
    )


if __name__ == "__main__":
    main()
