"""Time of `fednas data` over pandas' of the same CSV and Pillow's of the same images, in one run.

    python scripts/bench_reading.py [--megabytes 42 1000] [--images 50000]

Times are of CPU and wall, without imports; ours have all that the command does: ids, notes, the
division over clients, and the copy in the cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from PIL import Image
from pyarrow import csv
from sklearn.datasets import load_digits

from fednas_flwr.cli import main as fednas

LINE = 105  # bytes of a row


def main() -> None:
    """Print a line per table, and one of the images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", nargs="*", type=int, default=[42])
    parser.add_argument("--images", type=int, default=50_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_table(folder / "warm.csv", 1000)
        show("warm.csv", folder / "warm.csv", lambda: pd.read_csv(folder / "warm.csv"))
        for megabytes in options.megabytes:
            path = folder / "table.csv"
            write_table(path, megabytes * 1_000_000 // LINE)
            show(f"{megabytes} MB", path, lambda: pd.read_csv(folder / "table.csv"))
        write_images(folder / "images", options.images)
        files = list((folder / "images").rglob("*.png"))
        show(f"{len(files)} images", folder / "images", lambda: [decoded(file) for file in files])


def write_table(path: Path, rows: int) -> None:
    """Write twelve columns of numbers, a category and a label."""
    rng = np.random.default_rng(0)
    columns = {f"c{i}": rng.normal(size=rows).round(5) for i in range(12)}
    columns |= {"g": rng.choice(list("abc"), rows), "y": rng.integers(0, 2, rows)}
    csv.write_csv(pa.table(columns), path)


def write_images(folder: Path, number: int) -> None:
    """Write digits in a folder per class, 32 x 32."""
    digits = load_digits()
    for i in range(number):
        pixels = (digits.images[i % 1797] * 15).astype(np.uint8) + i // 1797 % 16
        path = folder / str(digits.target[i % 1797]) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize((32, 32)).save(path)


def decoded(path: Path) -> np.ndarray:
    """Pixels of an image, in colour, as the settings have it."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def show(name: str, path: Path, usual: Callable[[], object]) -> None:
    """Print both times and their ratios."""
    with tempfile.TemporaryDirectory() as cache:
        theirs = timed(usual)
        ours = timed(lambda: fednas(["data", str(path), f"dataset.cache={cache}"]))
    for kind, one, other in zip(("CPU", "wall"), ours, theirs, strict=True):
        print(f"== {name}: {one:.2f} s of {kind}, {other:.2f} s usual: {one / other:.2f} times")


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds of CPU and of wall that a function takes."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    main()
