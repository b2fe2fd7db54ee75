"""The rounds' numbers, and a listener of an `EventLog` that writes them for TensorBoard.

torch's SummaryWriter is imported when the first number comes: 0.1 s once torch is loaded (measured;
4 s without it), paid only by runs.
"""

from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fednas_flwr.report.guarantee import is_noised
from fednas_flwr.runs.events import Event
from fednas_flwr.runs.numbers import SCORES

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10


class Scalars:
    """The numbers of a run's events that a tracker of experiments shows."""

    def __init__(self) -> None:
        """Start as for a run without privacy, until an event says otherwise."""
        self._is_private = False

    def of(self, event: Event) -> list[tuple[str, dict[str, float], int]]:
        """Return group, numbers by name, and step; nothing of an event without numbers."""
        if event["event"] == "privacy":
            self._is_private = True
        elif event["event"] == "round":
            scalars = {
                **{self._name(metric): value for metric, value in event["metrics"].items()},
                "seconds": event["seconds"],
                "mb_sent": _megabytes(event.get("bytes_sent")),
                "mb_received": _megabytes(event.get("bytes_received")),
            }
            return [(event["stage"], _known(scalars), event["round"])]
        elif event["event"] == "evaluated":
            scalars = {
                f"{model}_{score.name}": (event.get(model) or {}).get(score.name)
                for score in SCORES
                for model in score.models
            }
            return [("evaluate", _known(scalars), 0)]
        return []

    def _name(self, metric: str) -> str:
        return f"{metric}_noised" if self._is_private and is_noised(metric) else metric


class TensorBoardWriter(AbstractContextManager["TensorBoardWriter"]):
    """Writes every metric of a round as the scalar ``<stage>/<metric>`` with the round as step.

    Seconds and megabytes per round and the final accuracies (step 0) are written as well. In a
    private run what clients measured is called ``<metric>_noised``. Use it as a context manager, so
    that the last numbers reach the disk.

    Args:
        folder: Where the files go, ``<run folder>/tensorboard``; made with the first number.
    """

    def __init__(self, folder: Path) -> None:
        """Import and write nothing yet."""
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._scalars = Scalars()

    def __call__(self, event: Event) -> None:
        """Write the numbers of one event; kinds without numbers are passed over."""
        for group, values, step in self._scalars.of(event):
            self._write(event, group, values, step=step)

    def close(self) -> None:
        """Write what is left and close the files."""
        if self._writer is not None:
            self._writer.close()

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()

    def _write(self, event: Event, group: str, scalars: dict[str, float], *, step: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSH_SECONDS)
        wall_time = datetime.fromisoformat(event["time"]).timestamp()
        for name, value in scalars.items():
            self._writer.add_scalar(f"{group}/{name}", value, step, walltime=wall_time)


def _known(scalars: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in scalars.items() if value is not None}


def _megabytes(value: float | None) -> float | None:
    return None if value is None else value / 1e6
