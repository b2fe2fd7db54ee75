"""Time that several processes save in a round, and time of a first run.

    python scripts/bench_overhead.py [--parts processes first] [--repeats 3]

processes: the wall time of a round in the processes of a plain run, and on 2 of Ray's actors, over
that of the same round in one process, with 4 clients that work for 5 s or more each. first: seconds
from typing a command to its end, on all cores and on one. Numbers are medians with their spread
(smallest to largest), except that processes compares the fastest rounds. Run it on an otherwise
idle machine. ``bench_precision.py`` measures the cost of a client's step over a bare loop of
PyTorch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench import arguments, is_met, spread

from fednas_flwr.base.processes import ALONE
from fednas_flwr.runs.numbers import Run, read_run

LIMITS = {"processes": 1 / 1.8, "first": 45.0}
CLIENTS = 4  # in a round in several processes
FIRST = {"fednas run": (), "recommended": ("experiment=search/recommended",)}
EQUAL_WORK = (
    *("rounds=4", "stages=[search]", "runtime.device=cpu", "runtime.threads=1", "trackers=[]"),
    *("search_space=nasbench201_small", "algorithm.local_epochs=20"),
)


def main() -> int:
    """Measure the requested parts; the exit code is 1 if a ratio is above its limit."""
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--parts", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    options = parser.parse_args()
    met = []
    for part in options.parts:
        ratio = measure_first_runs() if part == "first" else measure_processes(options.repeats)
        met.append(is_met(part, ratio, LIMITS[part]))
    return 0 if all(met) else 1


def measure_first_runs() -> float:
    """Return the seconds of the recommended command on all cores; print those of others, too."""
    cores, seconds = sorted(os.sched_getaffinity(0)), dict[tuple[str, int], float]()
    for name, overrides in FIRST.items():
        for some in (cores, cores[:1]):
            own = partial(os.sched_setaffinity, 0, some)
            seconds[name, len(some)], _ = timed_run(*overrides, preexec_fn=own)
            print(f"  {name}, {len(some)} cores: {seconds[name, len(some)]:.1f} s", flush=True)
    return seconds["recommended", len(cores)]


def timed_run(*overrides: str, **given: Any) -> tuple[float, Run]:
    """Return the seconds from typing a run's command to its end, and the run."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["fednas", "run", f"run_dir={folder}/run", *overrides]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **given)
        return time.perf_counter() - started, read_run(Path(folder) / "run")


def measure_processes(repeats: int) -> float:
    """Return the wall time of a round in several processes over that of the same round in one.

    The result is for a plain run or for Ray, whichever is longer. The fastest round of several runs
    counts, without each run's first round, in which processes make data and networks. On a busy
    machine the fastest rounds are the most informative.
    """
    cpus = len(os.sched_getaffinity(0))
    runtimes = {
        "one process": ("runtime=inline",),
        "plain run": ("runtime=inline",),
        "ray, 2 actors": ("runtime=ray", f"runtime.client_cpus={cpus / 2:g}"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runtimes}
    for _ in range(repeats):
        for name, runtime in runtimes.items():
            own = os.environ | ({ALONE: "1"} if name == "one process" else {})
            _, run = timed_run(*EQUAL_WORK, f"clients={CLIENTS}", *runtime, env=own)
            seconds[name] += [event["seconds"] for event in run.rounds("search")[1:]]
    alone, *others = (min(found) for found in seconds.values())
    print(f"processes: {CLIENTS} clients per round, {alone:.2f} s of work in all")
    for name, found in seconds.items():
        print(f"  {name}: {spread(found)} s per round, {min(found) / alone:.3f}")
    return max(others) / alone


if __name__ == "__main__":
    sys.exit(main())
