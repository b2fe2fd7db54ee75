"""Table: FEATHERS on card fraud, F1 against epsilon (the paper's Figure 4), 5 and 10 clients.

    python scripts/table_fraud.py --root <folder of scripts/prepare_fraud.py> [--jobs 2]

Epsilon is read in two ways. ``per mechanism``, as the paper counts: weights in the search, alphas,
rewards and retraining each keep it alone, and what they compose to is larger. ``composed``: it
bounds the whole run, search to exported model. 5 seeds, ordered by seed. Continues where it was
stopped; every finished run is added to scripts/results/fraud.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from table_runs import arguments, make_all, measure
from tables import start_results

RESULTS = Path(__file__).parent / "results" / "fraud.json"
RUNS = Path("runs/table_fraud")
SEEDS = (1, 2, 3, 4, 5)
EPSILONS = (0.2, 0.25, 0.5, 1, 1.5, 2)
READINGS = ("per mechanism", "composed")
NO_LIMIT = 1000  # an epsilon of the whole run that no sum of four mechanisms reaches
COLUMNS = [
    {"metric": "central_f1", "title": "test F1", "decimals": 3},
    {"metric": "epsilon", "title": "composed epsilon (delta 1e-5)", "decimals": 2},
    {"metric": "search_seconds", "title": "search (s)", "decimals": 0},
    {"metric": "retrain_seconds", "title": "retrain (s)", "decimals": 0},
]


@dataclass(frozen=True)
class Job:
    """One run; ``epsilon`` None is without privacy."""

    reading: str
    epsilon: float | None
    clients: int
    seed: int

    def overrides(self) -> list[str]:
        """Return the run's settings."""
        clients = f"clients={self.clients}"
        if self.epsilon is None:
            return ["experiment=feathers/fraud", clients]
        settings = ["experiment=feathers/fraud_private", clients]
        if self.reading == "composed":
            return [*settings, f"privacy.epsilon={self.epsilon}"]
        own = [
            f"privacy.{kind}.epsilon={self.epsilon}"
            for kind in ("weights", "alphas", "rewards", "retrain")
        ]
        return [*settings, f"privacy.epsilon={NO_LIMIT}", *own]


def jobs() -> list[Job]:
    """Return all runs; without privacy first, then by reading and falling epsilon."""
    rows: list[tuple[str, float | None]] = [("-", None)]
    rows += [(reading, epsilon) for reading in READINGS for epsilon in reversed(EPSILONS)]
    return [Job(*row, clients, seed) for seed in SEEDS for row in rows for clients in (5, 10)]


def main() -> None:
    """Run what is missing."""
    options = arguments(__doc__).parse_args()
    start_results(
        RESULTS,
        title="FEATHERS on card fraud: F1 by epsilon, 20,306 records over the clients, 5 seeds",
        command="python scripts/table_fraud.py --root <folder>",
        columns=COLUMNS,
        against={"reading": "per mechanism"},
    )
    root = options.root.resolve()
    make_all(lambda job: make(job, root=root), jobs(), at_a_time=options.jobs)


def make(job: Job, *, root: Path) -> None:
    """Make one run of the table."""
    epsilon = "inf" if job.epsilon is None else job.epsilon
    reading = job.reading.replace(" ", "_")
    measure(
        RESULTS,
        RUNS / f"{reading}_{epsilon}_{job.clients}_s{job.seed}",
        overrides=job.overrides(),
        group={"reading": job.reading, "epsilon": epsilon, "clients": job.clients},
        seed=job.seed,
        root=root,
    )


if __name__ == "__main__":
    main()
