"""Table: federated DARTS and FNAS against random search on Fashion-MNIST, small form.

    python scripts/table_search.py --root <folder with FashionMNIST> [--jobs 2]

5 clients, iid and Dirichlet(.5), 3 seeds, equal retraining. Continues where it was stopped; every
finished run is added to scripts/results/search.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fednas_flwr.reporting.runs import read_run
from fednas_flwr.reporting.tables import append_result, has_result, start_results

RESULTS = Path(__file__).parent / "results" / "search.json"
RUNS = Path("runs/table_search")
ALGORITHMS = ("fed_darts", "fnas", "random_search")
PARTITIONS = ("iid", "dirichlet")
SEEDS = (1, 2, 3)
COLUMNS = [
    {"metric": "central_accuracy", "title": "test accuracy (%)", "scale": 100, "decimals": 1},
    {"metric": "client_accuracy", "title": "mean client accuracy (%)", "scale": 100, "decimals": 1},
    {"metric": "num_parameters", "title": "parameters (k)", "scale": 1e-3, "decimals": 0},
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
    jobs = [(a, p, s) for s in SEEDS for p in PARTITIONS for a in ALGORITHMS]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: measure(*job, root=options.root.resolve()), jobs))


def measure(algorithm: str, partition: str, seed: int, *, root: Path) -> None:
    """Make one run unless its result is there, or go on with it."""
    overrides = [f"experiment={algorithm}/fashion_mnist", f"partition={partition}"]
    settings = {"overrides": overrides}
    if has_result(RESULTS, settings, seed):
        return
    folder = RUNS / f"{algorithm}_{partition}_s{seed}"
    if (folder / "config.yaml").exists():
        arguments = [f"resume={folder}"]
    else:
        arguments = [*overrides, f"seed={seed}", f"dataset.root={root}", f"run_dir={folder}"]
    done = subprocess.run(
        [sys.executable, "-m", "fednas_flwr.cli", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(f"{folder}: exit code {done.returncode}\n{done.stdout[-2000:]}", flush=True)
        return
    run = read_run(folder)
    started = run.last("run_started") or {}
    append_result(
        RESULTS,
        {
            "settings": settings,
            "group": {"algorithm": algorithm, "partition": partition},
            "seed": seed,
            "commit": started.get("commit"),
            "machine": started.get("machine"),
            "seconds": run.total_seconds(),
            "metrics": run.numbers(),
        },
    )
    print(f"{algorithm} {partition} seed {seed}: {run.numbers()}", flush=True)


if __name__ == "__main__":
    main()
