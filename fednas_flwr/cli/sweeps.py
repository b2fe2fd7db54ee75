"""``fednas run -m``: what each job of a sweep does, which Hydra's sweepers and launchers call."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednas_flwr import api
from fednas_flwr.base.errors import ConfigError, NoEffectError, NoEffectWarning, unknown_choice
from fednas_flwr.base.foreign import terminal
from fednas_flwr.cli.commands import RUN_FAILED, fail, take_files
from fednas_flwr.runs.numbers import EVENTS_FILE, METRICS, SEARCH_LOSS, is_complete, read_run
from fednas_flwr.settings import Config
from fednas_flwr.settings.configuration import check_names, parse_config
from fednas_flwr.settings.hydra_config import (
    Arguments,
    Source,
    compose_sweep,
    compose_tree,
    current_job,
    expand_sweep,
    for_hydra,
    given_settings,
    run_hydra,
    without_sweeps,
)

ERROR_FILE = "error.txt"  # in the folder of a job that has failed: why


def configured(overrides: Sequence[str], source: Source, *, tell: bool = True) -> Config:
    """Return the checked configuration of overrides, and print its warnings."""
    overrides = [text for text in overrides if not text.lstrip("+").startswith("sweep.")]
    tree = compose_tree(overrides, source)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", NoEffectWarning)
        config = parse_config(tree, given=given_settings(overrides, source))
    for warning in told if tell else ():
        print(f"fednas: warning: {warning.message}", file=sys.stderr)
    return config


def sweep(asked: Arguments) -> int:
    """Let Hydra run the jobs, each in a folder of its own; returns the exit code.

    A job that fails does not stop the others, nor does one of Hydra's own sweeper that has a
    setting without effect. Any other mistake that can be known ends the sweep before it begins.

    Raises:
        ConfigError: An override is wrong, or all jobs have settings without effect.
    """
    overrides = [_sweep_folder(text) for text in asked.overrides]
    fixed = without_sweeps(overrides)
    planned = compose_sweep(fixed, asked.source)
    optuna = "optuna" in planned.sweeper
    if planned.sweeper.endswith("BasicSweeper"):
        if any(text.startswith("sweep.") for text in fixed):
            raise NoEffectError(
                f"sweep.metric={','.join(planned.metrics)} has no effect with hydra/sweeper=basic: "
                "set hydra/sweeper=optuna or remove it."
            )
        _check_jobs(expand_sweep(overrides, asked.source), asked.source)
    else:
        check_names(planned.known, given_settings(fixed).typed)
    names = [text.partition("=")[0] for text in fixed]
    more = [f"hydra.job.config.override_dirname.exclude_keys=[{','.join(names)}]"]
    if optuna:
        best = [_direction(name) for name in planned.metrics]
        several = f"[{','.join(best)}]"
        more += [f"hydra.sweeper.direction={best[0] if len(best) == 1 else several}"]
        more += ["hydra.sweeper.max_failure_rate=1.0"]
    more = [text for text in more if text.partition("=")[0] not in names]
    kept = for_hydra(overrides, asked.source, planned.known)
    kept = [text for text in kept if not text.startswith("hydra.sweep.dir=")]
    try:
        run_hydra(run_job, [*kept, *more, f"hydra.sweep.dir={planned.folder}", *asked.flags])
    except ValueError as error:  # of Optuna, where no trial has succeeded: they have told why
        if isinstance(error, ConfigError) or not optuna:
            raise
        print(f"fednas: {error}", file=sys.stderr)
    return _tell_end(planned.folder)


def run_job(tree: Any) -> float | list[float] | None:
    """Run one job of a sweep; Hydra calls it with the composed tree.

    Returns:
        What ``sweep.metric`` names, for a sweeper that optimises; None where the run has not
        reached it, or has failed, which the file ``error.txt`` then tells.
    """
    take_files()  # in a process of the launcher
    overrides, source, folder = current_job()
    print(f"job {folder.name}", flush=True)
    try:
        config = replace(configured(overrides, source), run_dir=str(folder))
        api.run(config, quiet=False)
    except Exception as error:
        fail(error, debug=False)
        (folder / ERROR_FILE).write_text(f"{terminal(error)}\n", encoding="utf-8")
        return None
    run, metric = read_run(folder), tree.sweep.metric
    values = [run.metric(str(name)) for name in ([metric] if isinstance(metric, str) else metric)]
    reached = [value for value in values if value is not None]
    if len(reached) < len(values):
        return None
    return reached[0] if isinstance(metric, str) else reached


def _sweep_folder(text: str) -> str:
    """Return an override; ``run_dir`` of a sweep is the folder of its jobs."""
    return f"hydra.sweep.dir={text.partition('=')[2]}" if text.startswith("run_dir=") else text


def _direction(name: str) -> str:
    """Say whether a sweep makes a metric as large or as small as it can.

    Raises:
        ConfigError: There is no metric of that name.
    """
    scores = {SEARCH_LOSS: False} | {metric.name: metric.is_score for metric in METRICS}
    if name not in scores:
        raise unknown_choice("sweep.metric", name, scores)
    return "maximize" if scores[name] else "minimize"


def _check_jobs(jobs: Sequence[Sequence[str]], source: Source) -> None:
    """Refuse mistakes that can be known before a job begins."""
    configs, refused = [], []
    for job in jobs:
        try:
            config = configured(job, source, tell=False)
            api.check([config])
            configs.append(config)
        except NoEffectError as error:
            refused.append(error)
    if refused and not configs:
        raise refused[0]


def _tell_end(folder: Path) -> int:
    """Print how many jobs have completed, and return the exit code."""
    failed = sorted(path.parent.relative_to(folder) for path in folder.rglob(ERROR_FILE))
    runs = {path.parent for path in folder.rglob(EVENTS_FILE) if is_complete(path.parent)}
    completed = [run for run in runs if runs.isdisjoint(run.parents)]  # no group, no baseline
    total = len(failed) + len(completed)
    if completed:
        from fednas_flwr.report.comparison import (
            compare_runs,
            print_comparison,
            write_comparison,
        )

        comparison = compare_runs([folder])
        print_comparison(comparison)
        print(write_comparison(comparison, folder)[-1])
    noun = "job" if total == 1 else "jobs"
    print(f"{len(completed)} of {total} {noun} completed; sweep folder: {folder}")
    if failed:
        jobs = "1 job" if len(failed) == 1 else f"{len(failed)} jobs"
        print(f"fednas: {jobs} failed: {', '.join(map(str, failed))}.", file=sys.stderr)
    return RUN_FAILED if failed else 0
