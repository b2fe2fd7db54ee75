"""Table: FEATHERS on card fraud, F1 against epsilon (the paper's Figure 4), 5 and 10 clients.

    python scripts/table_fraud.py --root <folder of scripts/prepare_fraud.py> [--jobs 2]

Epsilon is read in two ways. ``per mechanism`` is the paper's way: weights in the search, alphas,
rewards and retraining each keep within it separately, and their composition is larger.
``composed``: it bounds the whole run, from search to exported model. There are 5 seeds, and runs
are ordered by seed. The script continues where it was stopped; every finished run is added to
scripts/results/fraud.json.
"""

from __future__ import annotations

from table_runs import Job, arguments, make_runs, start

SEEDS = (1, 2, 3, 4, 5)
EPSILONS = (0.2, 0.25, 0.5, 1, 1.5, 2)
READINGS = ("per mechanism", "composed")
MECHANISMS = ("weights", "alphas", "rewards", "retrain")
NO_LIMIT = 1000  # an epsilon of the whole run that no sum of four mechanisms reaches


def job(reading: str, epsilon: float | None, clients: int, seed: int) -> Job:
    """Return one run; ``epsilon`` None means without privacy."""
    settings = [f"experiment=feathers/fraud{'' if epsilon is None else '_private'}"]
    settings.append(f"clients={clients}")
    if reading == "composed":
        settings.append(f"privacy.epsilon={epsilon}")
    elif epsilon is not None:
        settings.append(f"privacy.epsilon={NO_LIMIT}")
        settings += [f"privacy.{kind}.epsilon={epsilon}" for kind in MECHANISMS]
    group = {"reading": reading, "epsilon": "inf" if epsilon is None else epsilon}
    return Job({**group, "clients": clients}, settings, seed)


def main() -> None:
    """Run what is missing: first without privacy, then by reading and falling epsilon."""
    options = arguments(__doc__).parse_args()
    results = start(
        "fraud",
        title="FEATHERS on card fraud: F1 by epsilon, 20,306 records over the clients, 5 seeds",
        columns=[
            "central_f1",
            {"metric": "epsilon", "title": "composed epsilon (delta 1e-5)", "decimals": 2},
            "search_seconds",
            "retrain_seconds",
        ],
        against={"reading": "per mechanism"},
    )
    rows: list[tuple[str, float | None]] = [("-", None)]
    rows += [(reading, epsilon) for reading in READINGS for epsilon in reversed(EPSILONS)]
    jobs = [job(*row, clients, seed) for seed in SEEDS for row in rows for clients in (5, 10)]
    make_runs(results, jobs, root=options.root, at_a_time=options.jobs)


if __name__ == "__main__":
    main()
