"""Prepared records on disk: one folder of .npy files, memory-mapped on load, without pickle.

A folder appears under its name only when all of it is on disk, so a half-written one is never
read, and processes that prepare the same data at once end with one of their equal copies.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from fednas_flwr.data.records import Records
from fednas_flwr.files import sync

_ATTEMPTS = 3


def load_or_build(folder: Path, build: Callable[[], Mapping[str, Records]]) -> dict[str, Records]:
    """Return the records in the folder, memory-mapped; build and store them where it is missing.

    Args:
        folder: Its name must change whenever the result of ``build`` does.
        build: Makes the records, by part, e.g. ``train``.

    Raises:
        OSError: The folder cannot be written.
    """
    for _ in range(_ATTEMPTS):
        records = _read(folder)
        if records is not None:
            return records
        _discard(folder)
        _write(folder, build())
    raise OSError(f"the prepared data in {folder} cannot be read back: remove that folder.")


def _write(folder: Path, parts: Mapping[str, Records]) -> None:
    """Write the records beside the folder, bring them to disk, and rename."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        described = {}
        for part, records in parts.items():
            np.save(unfinished / f"{part}-features.npy", records.features.numpy())
            np.save(unfinished / f"{part}-labels.npy", records.labels.numpy())
            np.save(unfinished / f"{part}-ids.npy", records.ids)
            for i, values in enumerate(records.columns.values()):
                np.save(unfinished / f"{part}-column{i}.npy", values.astype(np.str_))
            described[part] = {
                "class_names": records.class_names,
                "columns": list(records.columns),
                "feature_names": records.feature_names,
                "num_numeric": records.num_numeric,
                "id_column": records.id_column,
            }
        sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
        index = unfinished / "index.json"
        index.write_text(json.dumps({"sizes": sizes, "parts": described}), encoding="utf-8")
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        os.rename(unfinished, folder)
    except OSError:
        # Renaming on a full folder fails: another process was first, with the same content.
        if not (folder / "index.json").exists():
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read(folder: Path) -> dict[str, Records] | None:
    """Return the records, or None where the folder is missing or a file has not its size."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        for name, size in index["sizes"].items():
            if (folder / name).stat().st_size != size:
                return None
        return {
            part: Records(
                # Copy-on-write: torch wants writable memory, and the file must not change.
                features=torch.from_numpy(_map(folder / f"{part}-features.npy")),
                labels=torch.from_numpy(_map(folder / f"{part}-labels.npy")),
                ids=_map(folder / f"{part}-ids.npy"),
                class_names=tuple(about["class_names"]),
                columns={
                    name: _map(folder / f"{part}-column{i}.npy")
                    for i, name in enumerate(about["columns"])
                },
                feature_names=tuple(about["feature_names"]),
                num_numeric=about["num_numeric"],
                id_column=about["id_column"],
            )
            for part, about in index["parts"].items()
        }
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _map(path: Path) -> np.ndarray:
    """Return the array in the file, memory-mapped copy-on-write."""
    array: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    return array


def _discard(folder: Path) -> None:
    """Remove a damaged folder in one step, so that nobody reads half of it."""
    if folder.exists():
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            os.rename(folder, aside / "damaged")
        except FileNotFoundError:
            pass  # another process removed it first
        shutil.rmtree(aside, ignore_errors=True)
