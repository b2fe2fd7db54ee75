"""Time of reading, over that of pandas for the same CSV and of Pillow for the same images.

    python scripts/bench_reading.py [--megabytes 42 1000] [--images 50000] [--side 32]

"read" is the reader alone: records with their ids. "data" is everything that `fednas data` then
does, including the division over clients and the copy in the cache. Imports are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from bench import seconds_of
from PIL import Image
from pyarrow import csv
from sklearn.datasets import load_digits

from fednas_flwr.cli import main as fednas
from fednas_flwr.data.readers import DATA_SETS, data_settings

ROW_BYTES = 105


def main() -> None:
    """Print two ratios per table, and those of the images."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", nargs="*", type=int, default=[42])
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--side", type=int, default=32, help="of the images, in pixels")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        table, folder = Path(name) / "table.csv", Path(name) / "images"
        write_table(table, 100)
        with contextlib.redirect_stdout(io.StringIO()):  # imports everything needed
            show("", "csv", table, lambda: pd.read_csv(table))
        sizes = [megabytes * 1_000_000 // ROW_BYTES for megabytes in options.megabytes]
        for rows in (1000, *sizes):
            write_table(table, rows)
            show(f"{rows} rows", "csv", table, lambda: pd.read_csv(table))
        write_images(folder, options.images, options.side)
        files = list(folder.rglob("*.jpg"))
        size = {"image_size": options.side, "channels": 3}
        name = f"{len(files)} images of {options.side} pixels a side"
        show(name, "image_folder", folder, lambda: [*map(pixels, files)], size)


def write_table(path: Path, rows: int) -> None:
    """Write twelve columns of numbers, a category and a label."""
    rng = np.random.default_rng(0)
    columns = {f"c{i}": rng.normal(size=rows).round(5) for i in range(12)}
    columns |= {"g": rng.choice(list("abc"), rows), "y": rng.integers(0, 2, rows)}
    csv.write_csv(pa.table(columns), path)


def write_images(folder: Path, number: int, side: int) -> None:
    """Write enlarged digits with noise as gray JPEGs, in a folder per class."""
    digits = load_digits()
    noise = np.random.default_rng(0).integers(0, 64, (side, side), np.uint8)
    for i in range(number):
        path = folder / str(digits.target[i % 1797]) / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        shade = (digits.images[i % 1797] * 15).astype(np.uint8) + np.uint8(i // 1797 % 16)
        enlarged = np.asarray(Image.fromarray(shade).resize((side, side)))
        Image.fromarray(enlarged // 2 + np.roll(noise, i)).save(path)


def pixels(path: Path) -> np.ndarray:
    """Pixels of an image in colour, as in our settings."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def show(
    name: str, kind: str, path: Path, usual: Callable[[], object], given: Mapping[str, int] = {}
) -> None:
    """Print the CPU and wall times over those of the usual reader."""
    settings = data_settings(kind, {"cache": "none", **given})
    typed = [f"dataset.{name}={value}" for name, value in given.items()]
    with tempfile.TemporaryDirectory() as cache, contextlib.redirect_stdout(io.StringIO()):
        theirs = seconds_of(usual)
        read = seconds_of(lambda: DATA_SETS[kind].read(settings, path))
        data = seconds_of(lambda: fednas(["data", str(path), f"dataset.cache={cache}", *typed]))
    for what, ours in (("read", read), ("data", data)):
        ratios = [f"{a:.2f} / {b:.2f} = {a / b:.2f}" for a, b in zip(ours, theirs, strict=True)]
        print(f"{name}, {what}: {ratios[0]} of CPU, {ratios[1]} of wall", flush=True)


if __name__ == "__main__":
    main()
