"""The rounds' numbers for TensorBoard, MLflow and Weights & Biases: listeners of an `EventLog`.

MLflow and Weights & Biases are extras (``fednas-flwr[mlflow]``, ``[wandb]``) and find their servers
as they always do, by their own environment variables. What is sent are the numbers of rounds and
evaluation, and the settings; with privacy they are noised like all else that the server has.
``TRACKERS`` lists them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.foreign import read_yaml
from fednas_flwr.runs.events import Event
from fednas_flwr.runs.numbers import CONFIG_FILE, SCORES, flat_settings, is_noised

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

PROJECT = "fednas_flwr"
LONGEST_VALUE = 500  # characters of a parameter, which MLflow holds
FLUSH_SECONDS = 10


def check_trackers(names: list[str]) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"trackers has {name}, which is not installed: pip install 'fednas-flwr[{name}]'."
            )


class Tracker(AbstractContextManager["Tracker"]):
    """Sends the numbers of a run's events; a run that is resumed is a new one there.

    Every metric of a round, with seconds and megabytes, is sent as one of its stage, and the final
    scores as those of ``evaluate`` at step 0. In a private run what clients measured is called
    ``<metric>_noised``. Use it as a context manager, so that the last numbers arrive.

    Args:
        run_folder: Gives the run its name and settings.
    """

    def __init__(self, run_folder: Path) -> None:
        """Begin a run."""
        self._is_private = self._failed = False
        file = run_folder / CONFIG_FILE
        settings = read_yaml(file, CONFIG_FILE) if file.exists() else {}
        self.begin(run_folder, {k: str(v) for k, v in flat_settings(settings).items()})

    def begin(self, run_folder: Path, settings: Mapping[str, str]) -> None:
        """Begin a run of that name with these settings."""
        raise NotImplementedError

    def send(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Send numbers of a step of a group, a stage."""
        raise NotImplementedError

    def end(self, *, failed: bool) -> None:
        """End the run."""
        raise NotImplementedError

    def __call__(self, event: Event) -> None:
        """Send the numbers of one event; kinds without numbers are passed over."""
        match event["event"]:
            case "privacy":
                self._is_private = True
            case "round":
                named = {self._name(metric): value for metric, value in event["metrics"].items()}
                sizes = {f"mb_{way}": event[f"bytes_{way}"] / 1e6 for way in ("sent", "received")}
                values = {**named, "seconds": event["seconds"], **sizes}
                self._send_known(event["stage"], values, event["round"])
            case "evaluated":
                values = {
                    f"{model}_{score.name}": (event.get(model) or {}).get(score.name)
                    for score in SCORES
                    for model in score.models
                }
                self._send_known("evaluate", values, 0)
            case "run_finished":
                self._failed = event["status"] != "completed"

    def __exit__(self, *_: object) -> None:
        """End the run."""
        self.end(failed=self._failed)

    def _name(self, metric: str) -> str:
        return f"{metric}_noised" if self._is_private and is_noised(metric) else metric

    def _send_known(self, group: str, values: Mapping[str, float | None], step: int) -> None:
        self.send(group, {name: v for name, v in values.items() if v is not None}, step)


class TensorBoard(Tracker):
    """Files in ``<run folder>/tensorboard``, made with the first number.

    torch's SummaryWriter is imported then: 0.1 s once torch is loaded (measured; 4 s without it).
    """

    def begin(self, run_folder: Path, settings: Mapping[str, str]) -> None:
        """See :class:`Tracker`."""
        self._folder = run_folder / "tensorboard"
        self._writer: SummaryWriter | None = None

    def send(self, group: str, values: Mapping[str, float], step: int) -> None:
        """See :class:`Tracker`."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSH_SECONDS)
        for name, value in values.items():
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def end(self, *, failed: bool) -> None:
        """See :class:`Tracker`."""
        if self._writer is not None:
            self._writer.close()


class MLflow(Tracker):
    """A run of MLflow, in the experiment ``fednas_flwr`` unless MLFLOW_EXPERIMENT_NAME is set."""

    def begin(self, run_folder: Path, settings: Mapping[str, str]) -> None:
        """See :class:`Tracker`."""
        self._mlflow: Any = import_module("mlflow")
        if "MLFLOW_EXPERIMENT_NAME" not in os.environ:
            self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=run_folder.name)
        self._mlflow.set_tag("run_folder", str(run_folder))
        self._mlflow.log_params({k: v[:LONGEST_VALUE] for k, v in settings.items()})

    def send(self, group: str, values: Mapping[str, float], step: int) -> None:
        """See :class:`Tracker`."""
        self._mlflow.log_metrics({f"{group}/{k}": v for k, v in values.items()}, step=step)

    def end(self, *, failed: bool) -> None:
        """See :class:`Tracker`."""
        self._mlflow.end_run(status="FAILED" if failed else "FINISHED")


class WandB(Tracker):
    """A run of Weights & Biases, in the project ``fednas_flwr`` unless WANDB_PROJECT is set."""

    def begin(self, run_folder: Path, settings: Mapping[str, str]) -> None:
        """See :class:`Tracker`."""
        wandb: Any = import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run_folder.name,
            dir=str(run_folder),
            config=dict(settings),
        )

    def send(self, group: str, values: Mapping[str, float], step: int) -> None:
        """See :class:`Tracker`."""
        self._run.define_metric(f"{group}/*", step_metric=f"{group}/round")
        self._run.log({f"{group}/round": step} | {f"{group}/{k}": v for k, v in values.items()})

    def end(self, *, failed: bool) -> None:
        """See :class:`Tracker`."""
        self._run.finish(exit_code=int(failed))


TRACKERS = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
