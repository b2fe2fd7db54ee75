"""Shared code of the table scripts: arguments, columns, and making of missing runs."""

from __future__ import annotations

import argparse
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from tables import append_result, find_result, start_results

from fednas_flwr.base.processes import ALONE
from fednas_flwr.runs.numbers import Run, is_complete, read_run
from fednas_flwr.spaces.latency_tables import machine_name

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"
PERCENT = {"scale": 100, "decimals": 1}
MILLIONS = {"scale": 1e-6, "decimals": 2}
KNOWN = {  # columns by metric: title and format of numbers
    "central_accuracy": {"title": "test accuracy (%)", **PERCENT},
    "client_accuracy": {"title": "mean client accuracy (%)", **PERCENT},
    "central_auroc": {"title": "test AUROC", "decimals": 3},
    "central_f1": {"title": "test F1", "decimals": 3},
    "epsilon": {"title": "PRV epsilon (delta 1e-5)", "decimals": 2},
    "num_parameters": {"title": "parameters (k)", "scale": 1e-3, "decimals": 0},
    "multiply_adds": {"title": "multiply-adds (M)", **MILLIONS},
    "search_seconds": {"title": "search (s)", "decimals": 0},
    "retrain_seconds": {"title": "retrain (s)", "decimals": 0},
}

Metrics = Mapping[str, float | None]


def arguments(description: str, *, needs_root: bool = True) -> argparse.ArgumentParser:
    """Return a parser of ``--root``, the folder of the data, and ``--jobs``."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--root", type=Path, required=needs_root)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one core each")
    return parser


def arguments_of_cells(description: str) -> argparse.ArgumentParser:
    """Return a parser of ``--table``, a published table of all cells, and its ``--column``."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--column", nargs="+", default=[], help="of accuracies in the table")
    return parser


def start(
    name: str, *, columns: Iterable[str | Mapping[str, Any]], command: str = "", **head: Any
) -> Path:
    """Return the file of a table's results, created or with a new head; see ``start_results``.

    Columns of well-known metrics are given by name. The command is
    ``python scripts/table_<name>.py --root <folder>`` if none is given.
    """
    results = RESULTS / f"{name}.json"
    start_results(
        results,
        command=command or f"python scripts/table_{name}.py --root <folder>",
        columns=[{"metric": c, **KNOWN[c]} if isinstance(c, str) else c for c in columns],
        **head,
    )
    return results


def nothing(run: Run, of: Run | None = None) -> Metrics:
    """Return no metrics besides a run's own."""
    return {}


class Job(NamedTuple):
    """One run of a table: the first columns of its row, its settings and its seed.

    Attributes:
        group: The columns; empty for a run without a row.
        overrides: Settings without seed and folders.
        seed: The run's seed.
        own_name: Name of the run folder, if it does not follow from group and seed.
        of: The run that has found the network that this one trains; it is made first.
        more: Returns further metrics of the finished run, given it and, by name, the run ``of``.
    """

    group: Mapping[str, Any]
    overrides: Sequence[str]
    seed: int
    own_name: str = ""
    of: Job | None = None
    more: Callable[..., Metrics] = nothing

    @property
    def name(self) -> str:
        """The name of the run folder."""
        words = (re.sub(r"[ ,]+", "-", str(value)) for value in self.group.values())
        return self.own_name or "_".join([*words, f"s{self.seed}"])


def make_all(make: Callable[[T], object], jobs: Iterable[T], *, at_a_time: int) -> None:
    """Make all jobs, ``at_a_time`` side by side; raise the first error after the last job."""
    with ThreadPoolExecutor(at_a_time) as pool:
        list(pool.map(make, jobs))


def make_runs(
    results: Path,
    jobs: Iterable[Job],
    *,
    root: Path | None = None,
    at_a_time: int = 1,
    runs: str = "",
) -> None:
    """Make the missing runs of a table; see :func:`measure`.

    Their folders' names begin with ``runs``, by default ``runs/table_<its name>/``.
    """
    runs = runs or f"runs/table_{results.stem}/"
    root = root and root.resolve()

    def make(job: Job) -> None:
        if is_made(results, job.overrides, job.seed, job.group):
            return
        more = job.more
        if job.of is not None:
            found = make_run(Path(runs + job.of.name), job.of.overrides, seed=job.seed, root=root)
            if found is None:
                return
            more = partial(job.more, of=found)
        measure(
            results,
            Path(runs + job.name),
            overrides=job.overrides,
            group=job.group,
            seed=job.seed,
            root=root,
            more=more,
        )

    make_all(make, jobs, at_a_time=at_a_time)


def is_made(
    results: Path,
    settings: Sequence[str] | Mapping[str, Any],
    seed: int,
    group: Mapping[str, Any] | None = None,
) -> bool:
    """Return True if a table holds the run with this seed and these settings or overrides.

    A run from a commit whose package or conf/ differ from this checkout does not count. It is made
    again, so that all numbers of a finished table come from the same code.
    """
    known = settings if isinstance(settings, Mapping) else {"overrides": list(settings)}
    run = find_result(results, known, seed, group)
    return run is not None and is_current(run["commit"])


@cache
def is_current(commit: str) -> bool:
    """Return True if package and conf/ of a commit equal those of this checkout, except pages.

    ``-dirty`` is ignored, as a table's own file makes the tree dirty.
    """
    of_commit = commit.removesuffix("-dirty")
    command = ["git", "-C", str(Path(__file__).parents[1]), "diff", "--quiet", of_commit]
    paths = ["fednas_flwr", "conf", ":(exclude)*.md"]
    return subprocess.run([*command, "--", *paths], capture_output=True).returncode == 0


def measure(
    results: Path,
    folder: Path,
    *,
    overrides: Sequence[str],
    group: Mapping[str, Any],
    seed: int,
    root: Path | None,
    end: float = math.inf,
    any_commit: bool = False,
    more: Callable[[Run], Metrics] = nothing,
) -> None:
    """Make or continue one run, and add it to a table's results.

    The metric ``cpu`` covers only this run if one run is made at a time.

    Args:
        results: The table's file; nothing is run if it has this run, see :func:`is_made`.
        folder: The run folder.
        overrides: Settings of the run, without seed and folders.
        group: The first columns of the run's row.
        seed: The run's seed.
        root: Folder of the data; None if none is needed.
        end: Time, by ``time.monotonic``, at which the run is stopped, to continue later.
        any_commit: True if a finished run of another commit counts, too; else it is made anew.
        more: Returns further metrics of the finished run.
    """
    if is_made(results, overrides, seed, group):
        return
    before = cpu_seconds()
    run = make_run(folder, overrides, seed=seed, root=root, end=end, any_commit=any_commit)
    if run is None:
        return
    used = cpu_seconds() - before
    started = run.last("run_started")
    numbers = run.numbers()
    accuracy = numbers["central_accuracy"]
    error = None if accuracy is None else 1 - accuracy
    numbers |= {"error": error, "cpu": used, **more(run)}
    append_result(
        results,
        {
            "settings": {"overrides": list(overrides)},
            "group": dict(group),
            "seed": seed,
            "commit": _commit_of(run),
            "machine": started.get("machine"),
            "seconds": run.total_seconds(),
            "metrics": numbers,
        },
    )
    print(f"{dict(group)} seed {seed}: {numbers}", flush=True)


_making: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by run folder


def make_run(
    folder: Path,
    overrides: Sequence[str],
    *,
    seed: int,
    root: Path | None,
    end: float = math.inf,
    any_commit: bool = False,
) -> Run | None:
    """Return a run, which is made or continued unless it is complete.

    The result is None if the time is over or, after printing the reason, if the run failed.
    Arguments are those of :func:`measure`. If another thread is making the run, this one waits.
    """
    with _making[str(folder)]:
        if is_complete(folder):
            run = read_run(folder)
            if any_commit or is_current(_commit_of(run) or ""):
                return run
            shutil.rmtree(folder)
        left = end - time.monotonic()
        if left <= 0:
            return None
        arguments = [f"resume={folder}"]
        if not (folder / "config.yaml").exists():
            compares = any(text.startswith("evaluation.baselines=") for text in overrides)
            arguments = [] if compares else ["evaluation.baselines=0"]
            arguments += [*overrides, f"seed={seed}", f"run_dir={folder}"]
            arguments += [] if root is None else [f"dataset.root={root}"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "fednas_flwr", "run", *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=None if left == math.inf else left,
                env={**os.environ, ALONE: "1"},  # the CPU time of a run's workers is not visible
            )
        except subprocess.TimeoutExpired:
            print(f"{folder}: stopped, to go on another time", flush=True)
            return None
    if done.returncode:
        print(f"{folder}: exit code {done.returncode}\n{done.stdout[-2000:]}", flush=True)
        return None
    return read_run(folder)


def add_missing(
    results: Path,
    make: Callable[[], Mapping[str, float]],
    *,
    settings: Mapping[str, Any],
    group: Mapping[str, Any],
    seed: int,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Add what ``make`` measures on the processor to a table that lacks it, see :func:`is_made`."""
    if is_made(results, settings, seed):
        return
    started = clock()
    row = {"settings": settings, "group": group, "seed": seed, "metrics": make()}
    row |= {"seconds": clock() - started, "commit": commit()}
    append_result(results, row | {"machine": machine_name(torch.device("cpu"))})


def _commit_of(run: Run) -> str | None:
    return run.last("run_started").get("commit")


def cpu_seconds() -> float:
    """Return the CPU time of all processes for which this one has waited."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def commit() -> str:
    """Return the commit of this checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
