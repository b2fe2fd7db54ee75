"""Listeners of an `EventLog` that send the rounds' numbers to TensorBoard, MLflow or W&B.

MLflow and Weights & Biases are extras (``fednas-flwr[mlflow]``, ``[wandb]``) and find their servers
as usual, by their own environment variables. They receive the numbers of rounds and evaluation, and
the settings; with privacy the numbers are noised like all others that the server has.
``TRACKERS`` lists the trackers.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.foreign import read_yaml
from fednas_flwr.runs.events import Event, Listener
from fednas_flwr.runs.numbers import CONFIG_FILE, SCORES, flat_settings, is_noised

PROJECT = "fednas_flwr"
LONGEST_VALUE = 500  # characters of a parameter that MLflow accepts

Send = Callable[[str, Mapping[str, float], int], None]  # group (a stage), numbers, step
Backend = Callable[[Path, Mapping[str, str]], AbstractContextManager[Send]]


def check_trackers(names: list[str]) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"trackers has {name}, which is not installed: pip install 'fednas-flwr[{name}]'."
            )


@contextmanager
def tracking(begin: Backend, run_folder: Path) -> Iterator[Listener]:
    """Send the numbers of a run's events; a resumed run is a new run at the tracker.

    All metrics of a round, with seconds and megabytes, are sent as metrics of its stage, and the
    final scores as those of ``evaluate`` at step 0. In a private run the clients' measurements are
    called ``<metric>_noised``. A run that ends with an error is marked as failed.

    Args:
        begin: Function that begins a run and yields the function that sends its numbers.
        run_folder: Folder with the run's name and settings.
    """
    file, is_private = run_folder / CONFIG_FILE, False
    settings = flat_settings(read_yaml(file, CONFIG_FILE) if file.exists() else {})
    with begin(run_folder, {name: str(value) for name, value in settings.items()}) as send:

        def listen(event: Event) -> None:
            nonlocal is_private
            is_private = is_private or event["event"] == "privacy"
            if event["event"] == "round":
                values = {
                    f"{name}_noised" if is_private and is_noised(name) else name: value
                    for name, value in event["metrics"].items()
                }
                sizes = {f"mb_{way}": event[f"bytes_{way}"] / 1e6 for way in ("sent", "received")}
                values |= {"seconds": event["seconds"], **sizes}
                known = {name: value for name, value in values.items() if value is not None}
                send(event["stage"], known, event["round"])
            elif event["event"] == "evaluated":
                scores = {
                    f"{model}_{score.name}": value
                    for score in SCORES
                    for model in score.models
                    if (value := score.of(event.get(model) or {})) is not None
                }
                send("evaluate", scores, 0)

        yield listen


@contextmanager
def tensorboard(run_folder: Path, settings: Mapping[str, str]) -> Iterator[Send]:
    """Write files in ``<run folder>/tensorboard``."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(run_folder / "tensorboard"), flush_secs=10) as writer:

        def send(group: str, values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(f"{group}/{name}", value, step)

        yield send


@contextmanager
def mlflow(run_folder: Path, settings: Mapping[str, str]) -> Iterator[Send]:
    """Log a run to MLflow, in the experiment ``fednas_flwr`` or $MLFLOW_EXPERIMENT_NAME."""
    package: Any = import_module("mlflow")
    if "MLFLOW_EXPERIMENT_NAME" not in os.environ:
        package.set_experiment(PROJECT)

    def send(group: str, values: Mapping[str, float], step: int) -> None:
        package.log_metrics({f"{group}/{k}": v for k, v in values.items()}, step=step)

    with package.start_run(run_name=run_folder.name):
        package.set_tag("run_folder", str(run_folder))
        package.log_params({k: v[:LONGEST_VALUE] for k, v in settings.items()})
        yield send


@contextmanager
def wandb(run_folder: Path, settings: Mapping[str, str]) -> Iterator[Send]:
    """Log a run to Weights & Biases, in the project ``fednas_flwr`` or $WANDB_PROJECT."""
    package: Any = import_module("wandb")
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    named = {"project": project, "name": run_folder.name, "dir": str(run_folder)}
    with package.init(**named, config=dict(settings)) as run:

        def send(group: str, values: Mapping[str, float], step: int) -> None:
            run.define_metric(f"{group}/*", step_metric=f"{group}/round")
            run.log({f"{group}/round": step} | {f"{group}/{k}": v for k, v in values.items()})

        yield send


_BACKENDS: tuple[Backend, ...] = (tensorboard, mlflow, wandb)
TRACKERS = {begin.__name__: partial(tracking, begin) for begin in _BACKENDS}
