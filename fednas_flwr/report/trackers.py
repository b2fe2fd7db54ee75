"""The rounds' numbers for MLflow and Weights & Biases: listeners of an `EventLog`.

Each is an extra (``fednas-flwr[mlflow]``, ``[wandb]``) and finds its server as it always does, by
its own environment variables. What is sent are the numbers of ``Scalars`` and the settings; with
privacy they are noised like all else that the server has. Main function: :func:`make_tracker`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.foreign import read_yaml
from fednas_flwr.report.tensorboard import Scalars, TensorBoardWriter
from fednas_flwr.runs.events import Event
from fednas_flwr.runs.numbers import CONFIG_FILE

PROJECT = "fednas_flwr"
LONGEST_VALUE = 500  # characters of a parameter, which MLflow holds


def check_trackers(names: list[str]) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"trackers has {name}, which is not installed: pip install 'fednas-flwr[{name}]'."
            )


def make_tracker(name: str, run_folder: Path) -> AbstractContextManager[Callable[[Event], None]]:
    """Return the listener of that name, a context manager.

    Args:
        name: ``tensorboard``, ``mlflow`` or ``wandb``.
        run_folder: Gives the run its name and settings.
    """
    if name == "tensorboard":
        return TensorBoardWriter(run_folder / "tensorboard")
    return {"mlflow": MLflow, "wandb": WandB}[name](run_folder)


class Tracker(AbstractContextManager["Tracker"]):
    """Sends the numbers of a run's events; a run that is resumed is a new one there.

    Args:
        run_folder: See :func:`make_tracker`.
    """

    def __init__(self, run_folder: Path) -> None:
        """Begin a run."""
        self._scalars = Scalars()
        self._failed = False
        settings = read_yaml(run_folder / CONFIG_FILE, CONFIG_FILE)
        self.begin(run_folder, _flat(settings))

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
        """Send the numbers of one event."""
        for group, values, step in self._scalars.of(event):
            self.send(group, values, step)
        if event["event"] == "run_finished":
            self._failed = event["status"] != "completed"

    def __exit__(self, *_: object) -> None:
        """End the run."""
        self.end(failed=self._failed)


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


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return settings by their dotted names, as text."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found
