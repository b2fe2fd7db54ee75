"""Shared code of the benchmarks: steps that are timed in turn, and the printed numbers."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles

import numpy as np
import torch

Step = Callable[[], object]
Times = dict[str, np.ndarray]  # seconds of every repeat, by step

DEVICE = os.environ.get("FEDNAS_DEVICE", "cpu")


def arguments(description: str, *, repeats: int, told: str = "") -> argparse.ArgumentParser:
    """Return a parser of ``--repeats``; everything after this is computed on one thread."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=repeats, help=told)
    return parser


def clocks() -> np.ndarray:
    """Return seconds of this process's CPU time and of wall time, after a GPU's work is done."""
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    return np.array([time.process_time(), time.perf_counter()])


def seconds_of(step: Step) -> np.ndarray:
    """Return the seconds of CPU time and of wall time that a step takes."""
    start = clocks()
    step()
    return clocks() - start


def measure_both(steps: dict[str, Step], repeats: int) -> tuple[Times, Times]:
    """Return the CPU and the wall time of steps in every repeat, after one uncounted repeat.

    Every other repeat runs the steps in the opposite order.
    """
    times = {name: np.empty((repeats + 1, 2)) for name in steps}
    for repeat in range(repeats + 1):
        gc.collect()
        for name in list(steps)[:: 1 if repeat % 2 else -1]:
            times[name][repeat] = seconds_of(steps[name])
    cpu, wall = ({name: both[1:, kind] for name, both in times.items()} for kind in (0, 1))
    return cpu, wall


def measure(steps: dict[str, Step], repeats: int) -> Times:
    """Return the CPU time of steps, or their wall time on a GPU; see :func:`measure_both`."""
    return measure_both(steps, repeats)[DEVICE != "cpu"]


def compare(contenders: dict[str, Step], repeats: int) -> float:
    """Time two functions in turn, print medians, and return the median ratio of CPU times."""
    cpu, wall = measure_both(contenders, repeats)
    for name in contenders:
        print(f"  {name}: {spread(cpu[name])} s CPU, {spread(wall[name])} s wall")
    ratios = [np.divide(*times.values()) for times in (cpu, wall)]
    print(f"  ratio: {spread(ratios[0])} of CPU, {spread(ratios[1])} of wall")
    return median(ratios[0])


def is_met(name: str, ratio: float, limit: float) -> bool:
    """Print a ratio with its limit; return True if it is within the limit."""
    verdict = "met" if ratio <= limit else "MISSED"
    print(f"{name}: {ratio:.3f}, at most {limit:g}: {verdict}", flush=True)
    return ratio <= limit


def spread(values: Sequence[float] | np.ndarray, decimals: int = 3) -> str:
    """Return ``median (smallest to largest)``."""
    middle, low, high = median(values), min(values), max(values)
    return f"{middle:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f})"


def summary(values: Sequence[float] | np.ndarray, decimals: int) -> str:
    """Return ``median [lower quartile, upper quartile]``."""
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return f"{middle:.{decimals}f} [{lower:.{decimals}f}, {upper:.{decimals}f}]"


def show(name: str, values: np.ndarray, decimals: int, *, limit: float | None = None) -> None:
    """Print a name with the summary of its values, and the limit of their median."""
    told = "" if limit is None else f"  (limit {limit:.2f})"
    print(f"  {name:<58} {summary(values, decimals)}{told}", flush=True)
