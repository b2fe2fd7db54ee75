"""Hashes of the results of many tiny runs, to show that a change of the code changes no bit.

``python scripts/bits.py before.json`` runs every case of ``bits.yaml`` with the checkout that
PYTHONPATH names, through the public interface only (``fednas_flwr.compose`` and ``run``, and the
files of a run), and writes a SHA-256 for each part of a case's result:

- ``tensors``: the tensors of every model.safetensors, with name, type and shape;
- ``checkpoints``: the tensors of every stage's last checkpoint, including alphas and optimisers;
- ``genotype``: every genotype.json, as data;
- ``onnx``: the outputs of every model.onnx on a fixed batch;
- one part for each kind of event that has numbers, without times, traffic and paths.

Files as a whole, reports and warnings are not hashed, since they name modules, times or paths.
Private cases have ``privacy.test_seed``, which repeats noise and the draws of records, but not the
masks of drop-path and augmentation; no private case has any. ``--only NAME...`` runs some cases;
``--compare before.json after.json`` prints differences, and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import yaml
from PIL import Image
from safetensors.numpy import load_file

import fednas_flwr

FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
SETS, CASES = FILE["sets"], FILE["cases"]  # words for several overrides; overrides of cases
NO_NUMBERS = {"run_started", "run_finished", "stage_started", "stage_finished", "group_finished"}
NO_NUMBERS |= {"warning"}
NO_BITS = {"time", "elapsed", "seconds", "client_seconds", "run_dir", "source", "run"}
NO_BITS |= {"stopped_after"}
KINDS = {"tensor(float)": "float32", "tensor(double)": "float64", "tensor(int64)": "int64"}
TRAFFIC = ("bytes_", "exchanges")


def main(arguments: list[str]) -> int:
    """Run cases and write their hashes, or compare two files of hashes; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("output", nargs="?", type=Path, metavar="OUT.json")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.compare:
        return compare(*(json.loads(path.read_text()) for path in options.compare))
    if options.output is None:
        parser.error("OUT.json or --compare is missing")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder) / "data")
        for name in options.only or CASES:
            found[name] = run_case(name, Path(folder))
            options.output.write_text(json.dumps(found, indent=1) + "\n")
    return sum("failed" in parts for parts in found.values())


def run_case(name: str, base: Path) -> dict[str, str]:
    """Return the hashes of a case's parts, or the error that ended it, as ``failed``."""
    folder = base / re.sub(r"\W+", "-", name)
    began = time.monotonic()
    try:
        overrides = spelt(CASES[name], base / "data").split()
        if name == "deployment":
            folder = deploy(overrides, folder)
        else:
            config = fednas_flwr.compose(*overrides, f"run_dir={folder}")
            if name.startswith("resumed"):
                with suppress(KeyboardInterrupt):
                    fednas_flwr.run(config, listeners=[stop_after_first_round])
                fednas_flwr.run(folder)
            else:
                fednas_flwr.run(config)
        parts = hashes(folder)
    except Exception as error:
        parts = {"failed": f"{type(error).__name__}: {error}"}
    print(f"{name}: {time.monotonic() - began:.1f} s {parts.get('failed', '')}", flush=True)
    return parts


def spelt(overrides: str, data: Path) -> str:
    """Return overrides with the words of ``SETS`` and the data's folder filled in."""
    overrides = overrides.replace("DATA", str(data))
    words = "|".join(SETS)
    return re.sub(rf"\b({words})\b", lambda m: spelt(SETS[m[0]], data), overrides)


def stop_after_first_round(event: dict[str, Any]) -> None:
    """Interrupt a run as Ctrl-C does."""
    if event["event"] == "round":
        raise KeyboardInterrupt


def deploy(overrides: list[str], folder: Path) -> Path:
    """Run on a server and three sites of this machine; return the run folder."""
    script = Path(__file__).with_name("deploy_local.py")
    done = subprocess.run(
        [sys.executable, str(script), *overrides],
        env={**os.environ, "FEDNAS_RESULTS": str(folder)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{script.name} ended with {done.returncode}: {done.stderr[-500:]}")
    return folder / "deployed"


def hashes(folder: Path) -> dict[str, str]:
    """Return a SHA-256 of each part of a run's results."""
    parts: dict[str, list[Any]] = {
        name: [read(path) for path in sorted(folder.rglob(file))]
        for name, file, read in (
            ("tensors", "model.safetensors", tensors),
            ("genotype", "genotype.json", lambda path: json.loads(path.read_text())),
            ("onnx", "model.onnx", outputs),
        )
    }
    for checkpoints in sorted(folder.rglob("checkpoints")):
        last = {path.name.rpartition("-")[0]: path for path in sorted(checkpoints.glob("*.saf*"))}
        found = [(stage, tensors(path)) for stage, path in sorted(last.items())]
        parts.setdefault("checkpoints", []).extend(found)
    for path in sorted(folder.rglob("events.jsonl")):
        for line in path.read_text().splitlines():
            event = json.loads(line)
            if event["event"] not in NO_NUMBERS:
                parts.setdefault(event["event"], []).append(numbers(event))
    return {
        name: sha256(json.dumps(value, sort_keys=True).encode())  # floats by repr
        for name, value in parts.items()
        if value
    }


def tensors(path: Path) -> list[str]:
    """Return name, type, shape and hash of every tensor of a file, sorted by name."""
    return [
        f"{name} {array.dtype} {array.shape} {sha256(array.tobytes())}"
        for name, array in sorted(load_file(path).items())
    ]


def outputs(path: Path) -> list[str]:
    """Return hashes of the outputs of an ONNX file on a batch of four made-up records."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    batch = {}
    for entry in session.get_inputs():
        shape = [size if isinstance(size, int) else 4 for size in entry.shape]
        values = rng.integers(0, 256, shape)
        if entry.type == "tensor(string)":  # a category of a table
            batch[entry.name] = np.full(shape, "f", dtype=object)
        else:
            batch[entry.name] = values.astype(KINDS.get(entry.type, "uint8"))
    found = session.run(None, batch)
    return [o.tolist() if o.dtype == object else f"{o.dtype} {sha256(o.tobytes())}" for o in found]


def numbers(value: Any) -> Any:
    """Return a part of an event without times, traffic and paths."""
    if isinstance(value, dict):
        return {
            key: numbers(part)
            for key, part in value.items()
            if key not in NO_BITS and not key.startswith(TRAFFIC)
        }
    return [numbers(part) for part in value] if isinstance(value, list) else value


def sha256(data: bytes) -> str:
    """Return a hash in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def compare(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> int:
    """Print the cases and parts that differ; return 1 if any differ."""
    both = [name for name in before if name in after]
    differ = 0
    for name in both:
        parts = sorted(before[name].keys() | after[name].keys())
        unequal = [part for part in parts if before[name].get(part) != after[name].get(part)]
        if unequal or "failed" in parts:
            differ += 1
            print(f"{name}: {', '.join(unequal) or 'failed in both'}")
    for text, less, more in (("gone", before, after), ("new", after, before)):
        for name in [name for name in less if name not in more]:
            print(f"{name}: {text}")
    print(f"{len(both) - differ} of {len(both)} cases are equal in every bit.")
    return int(differ > 0)


def write_data(folder: Path) -> None:
    """Write an npz file, tables and a folder of images, the same every time."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 150)
    images = rng.integers(0, 120, (150, 3, 8, 8)).astype(np.uint8)
    images[np.arange(150), labels] += 100
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / "images.npz",
        **{"x_train": images[:110], "y_train": labels[:110]},
        **{"x_test": images[110:], "y_test": labels[110:]},
    )
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / "folder" / ("test" if index >= 110 else "train") / "abc"[label]
        path.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(path / f"{index}.png")
    age, dose, sex = rng.integers(20, 90, 200), rng.random(200) * 10, rng.integers(0, 2, 200)
    columns = {"age": age, "dose": dose, "sex": np.array(["f", "m"])[sex]}
    table = pd.DataFrame(columns | {"ill": (dose + sex > 6) * 1, "old": (age > 60) * 1})
    for place, names in (("table", table.columns[:4]), ("labels", table.columns)):
        (folder / place).mkdir(exist_ok=True)
        for name, part in (("train", table[:150]), ("test", table[150:])):
            part[names].to_csv(folder / place / f"{name}.csv", index=False, float_format="%.3f")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
