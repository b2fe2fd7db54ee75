"""The rounds' numbers for TensorBoard: a listener of an `EventLog`.

torch's SummaryWriter is imported when the first number comes: 0.1 s once torch is loaded (measured;
4 s without it), paid only by runs.
"""

from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fednas_flwr.reporting.events import Event
from fednas_flwr.reporting.guarantee import is_noised

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 10


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
        self._is_private = False

    def __call__(self, event: Event) -> None:
        """Write the numbers of one event; kinds without numbers are passed over."""
        if event["event"] == "privacy":
            self._is_private = True
        elif event["event"] == "round":
            noised = {name: is_noised(name) and self._is_private for name in event["metrics"]}
            scalars = {
                **{n + "_noised" * noised[n]: value for n, value in event["metrics"].items()},
                "seconds": event["seconds"],
                "mb_sent": _megabytes(event.get("bytes_sent")),
                "mb_received": _megabytes(event.get("bytes_received")),
            }
            self._write(event, event["stage"], scalars, step=event["round"])
        elif event["event"] == "evaluated":
            scalars = {
                f"{name}_{metric}": (event.get(name) or {}).get(metric)
                for name in ("central", "linear")
                for metric in ("accuracy", "f1")
            }
            self._write(event, "evaluate", scalars, step=0)

    def close(self) -> None:
        """Write what is left and close the files."""
        if self._writer is not None:
            self._writer.close()

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        self.close()

    def _write(
        self, event: Event, group: str, scalars: dict[str, float | None], *, step: int
    ) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSH_SECONDS)
        wall_time = datetime.fromisoformat(event["time"]).timestamp()
        for name, value in scalars.items():
            if value is not None:
                self._writer.add_scalar(f"{group}/{name}", value, step, walltime=wall_time)


def _megabytes(value: float | None) -> float | None:
    return None if value is None else value / 1e6
