"""Table: loss and savings of the quickstart if messages travel in fewer bits.

    python scripts/table_wire.py

Federated DARTS runs on scikit-learn's digits with all settings of `fednas run` except
`runtime.wire`, with 3 seeds. The script continues where it was stopped; every finished run is added
to scripts/results/wire.json.
"""

from __future__ import annotations

from table_runs import Job, make_runs, start

from fednas_flwr.runs.numbers import Run

WIRES = ("float32", "float16", "int8")
SEEDS = (1, 2, 3)


def main() -> None:
    """Run what is missing."""
    results = start(
        "wire",
        title="The quickstart by message format: digits, 3 clients, 3 seeds",
        command="python scripts/table_wire.py",
        columns=[
            "central_accuracy",
            "num_parameters",
            {"metric": "search_sent_mb", "title": "sent in the search (MB)", "decimals": 2},
            {"metric": "search_replies_mb", "title": "replies of the search (MB)", "decimals": 2},
            {"metric": "traffic_mb", "title": "both directions (MB)", "decimals": 1},
        ],
        against={"wire": "float32"},
    )
    jobs = [
        Job({"wire": wire}, [f"runtime.wire={wire}"], seed, more=traffic)
        for seed in SEEDS
        for wire in WIRES
    ]
    make_runs(results, jobs)


def traffic(run: Run) -> dict[str, float]:
    """Return the megabytes of the search in both directions; all runs have the same supernet."""
    sent, received = run.traffic("search")
    return {"search_sent_mb": sent / 1e6, "search_replies_mb": received / 1e6}


if __name__ == "__main__":
    main()
