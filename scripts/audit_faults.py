"""Count how often `fednas audit` finds a client's fault, and how often it passes an honest client.

    python scripts/audit_faults.py [--runs 20] [--jobs 1] [--only "half the noise"]

Each run takes the next of the private runs below, on made-up data, and builds one fault into one
kind of release, drawn at random from those that can have it. Only the requests with that kind are
audited; honest clients are audited completely. The script prints one line per run as JSON, then the
numbers of faults found, by fault and by kind of release.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from fednas_flwr.api import compose
from fednas_flwr.deploy import audit_run
from fednas_flwr.protocol.requests import Probe

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "deploy"))
import faulty_client  # noqa: E402 (from the checkout)

HONEST = "honest"
STATED = ("dataset.statistics={a: [0, 1], b: [0, 1], c: [0, 1]}", "dataset.ignore=[id]")
RANGES = ("dataset.ranges={a: [-4, 4], b: [-4, 4], c: [-4, 4]}", "dataset.id_column=id")
SUMS = ("secure_sum={least_sites: 3, colluding: 1}", "clients=3")
RUNS = {
    "persons": (
        *("algorithm=dp_fnas", *RANGES, "privacy.statistics_noise_multiplier=3"),
        "privacy.metrics_noise_multiplier=10",
    ),
    "local training": ("algorithm=fed_darts", *STATED),
    "trials": ("algorithm=feathers", *STATED),
    "pool": ("algorithm=successive_halving", *STATED),
    "totals": ("algorithm=dp_fnas", *STATED, *SUMS),
    "clients": (
        *("algorithm=fed_darts", *STATED, *SUMS, "privacy.unit=client", "privacy.epsilon=1000"),
        *("privacy.weights.noise_multiplier=1", "privacy.alphas.noise_multiplier=1"),
        "privacy.retrain.noise_multiplier=1",
    ),
}


def overrides_of(name: str, folder: Path) -> list[str]:
    """Return the overrides of a run on a table, which is created in a folder."""
    rows = np.random.default_rng(0).normal(size=(360, 3)).round(3)
    lines = [
        f"p{i // 3},{a},{b},{c},{'no' if a < b else 'yes'}" for i, (a, b, c) in enumerate(rows)
    ]
    (folder / "table.csv").write_text("\n".join(["id,a,b,c,label", *lines]) + "\n")
    return [
        *("privacy=dp", "clients=1", "runtime.device=cpu", "runtime.threads=1"),
        *("rounds=2", "retrain.rounds=2"),
        *("dataset=csv", f"dataset.root={folder / 'table.csv'}", "dataset.label=label"),
        *(f"dataset.cache={folder / 'cache'}", "search_space=mlp_small"),
        *("search_space.channels=8", *RUNS[name]),
    ]


def audited(case: tuple[str, str, int]) -> dict[str, Any]:
    """Return the result of an audit of a run with a named fault, drawn with a seed."""
    fault, name, seed = case
    dice = random.Random(f"{fault} {seed}")
    with tempfile.TemporaryDirectory() as folder:
        config = compose(*overrides_of(name, Path(folder)))
        if fault == HONEST:
            found = audit_run.audit_run(config)
            faults = [text for finding in found for text in finding.faults]
            return {"fault": fault, "run": name, "key": "all", "found": faults}
        schedule, asked = audit_run._recorded(config)
        key = dice.choice(sorted(fitting(fault, schedule, asked)))
        with faulty_client.audited_only(key), faulty_client.broken(fault, key, seed=seed):
            found = audit_run.audit_run(config)
    faults = [text for finding in found if finding.release == key for text in finding.faults]
    return {"fault": fault, "run": name, "key": key, "found": faults}


def fitting(fault: str, schedule: Any, asked: Any) -> set[str]:
    """Return the keys of the releases that can have a fault and are visible in replies."""
    keys = set()
    for planned in schedule:
        is_gradient = planned.kind in ("weights", "alphas")
        if is_gradient and isinstance(asked[planned.key].settings, Probe):
            continue
        fits, of_records = True, not planned.of_client
        if fault in faulty_client.MASKS:
            fits = of_records and planned.batch_size is not None
        elif fault in faulty_client.GRADIENTS:
            fits = of_records and is_gradient
        elif fault in faulty_client.REPEATED:
            fits = of_records and planned.action in ("train.search", "train.weights")
        if fits:
            keys.add(planned.key)
    return keys


def names_for(fault: str) -> list[str]:
    """Return the names of the runs that have a release for a fault."""
    if fault in faulty_client.REPEATED:
        return ["local training", "trials", "pool"]
    if fault in (faulty_client.MASKS | faulty_client.GRADIENTS):
        return [name for name in RUNS if name != "clients"]
    return list(RUNS)


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="of each fault, and of honest clients")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=[HONEST, *faulty_client.FAULTS])
    options = parser.parse_args()
    cases: list[tuple[str, str, int]] = []
    for fault in options.only:
        names = names_for(fault)
        cases += [(fault, names[seed % len(names)], seed) for seed in range(options.runs)]
    right, number = Counter[str](), Counter[str]()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for said in pool.map(audited, cases):
            print(json.dumps(said), flush=True)
            for row in (said["fault"], f"{said['run']}: {said['key']}"):
                number[row] += 1
                right[row] += bool(said["found"]) != (said["fault"] == HONEST)
    for row in number:
        print(f"{right[row]:3} of {number[row]:3}  {row}")


if __name__ == "__main__":
    main()
