"""Prepared records on disk: one folder of .npy files, memory-mapped on load, without pickle.

A folder appears under its name only when all of it is on disk, so a half-written one is never
read, and processes that prepare the same data at once end with one of their equal copies.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednas_flwr.base.files import make_folder, sync
from fednas_flwr.data.records import Records
from fednas_flwr.data.schema import Column
from fednas_flwr.settings.data_settings import TableForm
from fednas_flwr.settings.parser import parse

_ATTEMPTS = 3
_TEXTS = ("label", "label_separator", "id_column")
_TUPLES = ("class_names", "image_shape", "notes")


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
    make_folder(folder.parent)
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
                "columns": list(records.columns),
                "form": asdict(records.form),
                "schema": [asdict(column) for column in records.schema],
                **{name: getattr(records, name) for name in (*_TEXTS, *_TUPLES)},
            }
        files = {path.name: _facts(path) for path in sorted(unfinished.iterdir())}
        index = unfinished / "index.json"
        index.write_text(json.dumps({"files": files, "parts": described}), encoding="utf-8")
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
    """Return the records, or None where the folder is missing or a file is not as written."""
    try:
        index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
        if not all(_is_whole(folder / name, facts) for name, facts in index["files"].items()):
            return None
        parts: dict[str, dict[str, Any]] = index["parts"]
        return {
            part: Records(
                # Copy-on-write: torch wants writable memory, and the file must not change.
                features=torch.from_numpy(_map(folder / f"{part}-features.npy")),
                labels=torch.from_numpy(_map(folder / f"{part}-labels.npy")),
                ids=_map(folder / f"{part}-ids.npy"),
                columns={
                    name: _map(folder / f"{part}-column{i}.npy")
                    for i, name in enumerate(about["columns"])
                },
                schema=tuple(parse(Column, column, key="column") for column in about["schema"]),
                form=parse(TableForm, about["form"], key="form"),
                **_described(about),
            )
            for part, about in parts.items()
        }
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, LookupError, TypeError, AttributeError):  # another form: damaged
        return None


def _described(about: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of records that are texts or tuples of them."""
    return {n: about[n] for n in _TEXTS} | {n: tuple(about[n]) for n in _TUPLES}


def _facts(path: Path) -> list[object]:
    """Return a file's size in bytes, time of change in ns and hash."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, _digest(path)]


def _is_whole(path: Path, facts: list[object]) -> bool:
    """Return whether a file is as it was written; its bytes are read only if its time differs."""
    stat, (size, time_ns, digest) = path.stat(), facts
    return stat.st_size == size and (stat.st_mtime_ns == time_ns or _digest(path) == digest)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


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
