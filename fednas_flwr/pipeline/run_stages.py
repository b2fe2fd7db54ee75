"""State that the stages of one run share."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fednas_flwr.algorithms.base import RoundStrategy
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.pipeline.schedule import Schedule
from fednas_flwr.protocol.states import Packed
from fednas_flwr.report.lookup import CellTable
from fednas_flwr.runs.checkpoints import CheckpointFolder
from fednas_flwr.runs.events import EventLog
from fednas_flwr.server.cohort import Cohort
from fednas_flwr.settings import Config


class OutOfTimeError(RuntimeError):
    """The search has reached the run's time limit; its checkpoint is there."""


def make_checkpoints(folder: Path, log: EventLog) -> CheckpointFolder:
    """The checkpoints of a run folder, whose warnings are events."""
    return CheckpointFolder(
        folder / "checkpoints", warn=lambda message: log.emit("warning", message=message)
    )


@dataclass
class Run:
    """State that the stages share."""

    config: Config
    folder: Path
    grid: Grid
    log: EventLog
    cohort: Cohort
    checkpoints: CheckpointFolder
    prepared: Prepared
    schedule: Schedule  # of a private run's releases
    circumstances: dict[str, Any]  # versions and machine
    table: CellTable | None = None  # by which the search is told
    ends_at: float | None = None  # of time.monotonic(), by time_limit
    inherited: Mapping[str, Packed] | None = None  # states that the search goes on from

    def start(self, strategy: RoundStrategy[Any], rounds: int) -> None:
        """Run the rounds of a stage; rounds that time does not allow are named in an event."""
        stage = strategy.stage
        with self.stage(stage, rounds):
            strategy.ends_at = self.ends_at
            strategy.start(self.grid, num_rounds=rounds)
        if (done := strategy.rounds_done) < rounds:
            self.log.emit("out_of_time", stage=stage, round=done, rounds=rounds)
            self.log.emit(
                "warning",
                message=f"runtime.time_limit={self.config.runtime.time_limit}: the {stage} has "
                f"ended after round {done} of {rounds}; resume=<run folder> goes on",
            )

    @contextmanager
    def stage(self, name: str, rounds: int | None = None) -> Iterator[None]:
        """Emit that a stage begins, and that it has finished unless it fails."""
        started = time.monotonic()
        self.log.emit("stage_started", stage=name, rounds=rounds)
        yield
        self.log.emit("stage_finished", stage=name, seconds=time.monotonic() - started)
