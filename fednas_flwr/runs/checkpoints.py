"""The state of a stage after every round, on disk, so that a killed run continues bit for bit.

A checkpoint is two files: ``<stage>-<round>.safetensors`` and, written after it,
``<stage>-<round>.json`` with the tensors' hash. If the hashes of a checkpoint do not fit, the one
before it is used.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fednas_flwr.base.files import write_atomically

KEEP = 3  # checkpoints per stage that are kept on disk


@dataclass(frozen=True)
class Checkpoint:
    """State that a stage needs to continue after ``round``: its tensors and JSON values."""

    stage: str
    round: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        path: Folder, created if missing.
        warn: Function called with one sentence for every damaged checkpoint that is skipped.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Make the folder and remove files that a killed process has left."""
        self.path = path
        self._warn = warn
        path.mkdir(parents=True, exist_ok=True)
        for unfinished in path.glob(".*.tmp"):  # left by a process that was killed while writing
            unfinished.unlink(missing_ok=True)

    def save(self, checkpoint: Checkpoint) -> None:
        """Write ``checkpoint`` and delete the stage's oldest ones beyond the last three."""
        base = self.path / f"{checkpoint.stage}-{checkpoint.round:06d}"
        data = save_tensors({name: t.contiguous() for name, t in checkpoint.tensors.items()})
        write_atomically(base.with_suffix(".safetensors"), data)
        body = json.dumps(
            {
                "stage": checkpoint.stage,
                "round": checkpoint.round,
                "tensors_sha256": hashlib.sha256(data).hexdigest(),
                "values": dict(checkpoint.values),
            },
            sort_keys=True,
        )
        digest = hashlib.sha256(body.encode()).hexdigest()
        write_atomically(base.with_suffix(".json"), f"{body}\n{digest}\n".encode())
        for old in self._rounds(checkpoint.stage)[:-KEEP]:
            for suffix in (".json", ".safetensors"):
                (self.path / f"{checkpoint.stage}-{old:06d}{suffix}").unlink(missing_ok=True)

    def latest(self, stage: str) -> Checkpoint | None:
        """Return the newest undamaged checkpoint of ``stage``, or None."""
        for round_number in reversed(self._rounds(stage)):
            name = f"{stage}-{round_number:06d}"
            try:
                return self._load(name)
            except (OSError, ValueError, KeyError) as error:
                self._warn(f"checkpoint {name} is damaged ({error}); the one before it is used.")
        return None

    def _load(self, name: str) -> Checkpoint:
        body, digest = (self.path / f"{name}.json").read_text().removesuffix("\n").rsplit("\n", 1)
        if hashlib.sha256(body.encode()).hexdigest() != digest:
            raise ValueError(f"{name}.json does not have its own hash")
        header = json.loads(body)
        data = (self.path / f"{name}.safetensors").read_bytes()
        if hashlib.sha256(data).hexdigest() != header["tensors_sha256"]:
            raise ValueError(f"{name}.safetensors does not have the hash in {name}.json")
        return Checkpoint(header["stage"], header["round"], load_tensors(data), header["values"])

    def _rounds(self, stage: str) -> list[int]:
        pattern = re.compile(rf"{re.escape(stage)}-(\d+)\.json")
        matches = (pattern.fullmatch(path.name) for path in self.path.iterdir())
        return sorted(int(match[1]) for match in matches if match)
