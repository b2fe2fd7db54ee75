"""``fednas run``: a new run, a resumed run, or a sweep by Hydra; and ``fednas data``."""

import re
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednas_flwr import api
from fednas_flwr.base.errors import ConfigError, NoEffectError, NoEffectWarning, check_choice
from fednas_flwr.base.foreign import read_yaml, terminal
from fednas_flwr.base.processes import LATER, warm_up
from fednas_flwr.cli import RUN_FAILED, Handler, fail, take_files
from fednas_flwr.report.templates import duration
from fednas_flwr.runs.numbers import EVENTS_FILE, METRICS, SEARCH_LOSS, is_complete, read_run
from fednas_flwr.settings import Config, configuration
from fednas_flwr.settings import hydra_config as hydra
from fednas_flwr.settings.data_settings import CSV

SWEEP_FILE = "multirun.yaml"  # written by Hydra into the folder of a sweep
ERROR_FILE = "error.txt"  # the reason, in the folder of a failed job
_jobs: dict[str, float] = {"total": 0, "start": 0.0}  # of the sweep in this process
OF_SWEEPS = ("sweep.", "hydra.sweep", "hydra.launcher", "hydra/sweeper", "hydra/launcher")


def run(*, dry_run: bool = False, overrides: Sequence[str]) -> int:
    """Search, retrain, evaluate and export; without arguments the quickstart.

    overrides:
      group=name            one file of conf/<group>: algorithm, dataset, partition, search_space,
                            privacy, runtime, retrain, server_optimizer, experiment
      key=value             any key of the composed configuration, e.g. seed=2 clients=5
                            algorithm.weights.lr=.05; shown by `fednas run --cfg job`
      config=<file>         the config.yaml of a run in place of conf/, to repeat it
      resume=<run folder>   continue a run that was stopped; its own configuration is used
      resume=<sweep folder> finish the jobs of a sweep that are missing or have failed
      resume=auto           continue the newest unfinished run of these overrides, else begin one
      -m key=a,b            sweep: one run per combination, each in its own folder

    Examples:
      fednas run                                           real digits, 3 clients, 20 seconds
      fednas run experiment=search/recommended             the search that we recommend
      fednas run experiment=search/recommended dataset=csv dataset.root=patients.csv
          dataset.label=died search_space=mlp_small        the same on a table of yours
      fednas run experiment=search/recommended_private privacy.epsilon=8
      fednas run algorithm=fed_darts clients=10 partition=dirichlet rounds=20 seed=2
      fednas run -m algorithm=fed_darts,feathers seed=1,2,3

    Options and overrides are those of Hydra: -m with hydra/launcher=joblib hydra/sweeper=optuna
    (extra `sweeps`), --cfg job --resolve, --info, --package, hydra.searchpath, +key,
    ++key, ~key, glob(), hydra.sweep.dir; --shell-completion install=bash prints a completion
    script.

    Args:
        dry_run: only estimate what the run would take: time, traffic, memory, disk and epsilon
        overrides: see above
    """
    asked = hydra.read_arguments(list(overrides))
    overrides = asked.overrides
    resumes = [text for text in overrides if text.startswith("resume=")]
    if dry_run and (resumes or asked.multirun or asked.informs):
        raise ConfigError("--dry-run is of one new run: leave out -m, resume and --cfg.")
    if resumes == ["resume=auto"] and not asked.flags:
        from fednas_flwr.runs.run_folder import find_unfinished

        overrides = [text for text in overrides if text != "resume=auto"]
        unfinished = find_unfinished(configured(overrides))
        if unfinished is not None:
            api.run(str(unfinished.run_dir), quiet=False)
            return 0
    elif resumes:
        if len(overrides) > 1 or asked.flags:
            raise ConfigError(
                f"{resumes[0]} takes no other setting: the run's own configuration is used."
            )
        return go_on(resumes[0].removeprefix("resume="))
    if asked.multirun:
        return sweep(asked)
    if asked.informs:
        if not asked.completes:
            configured(overrides)  # a mistake ends in one sentence
            overrides = hydra.for_hydra(overrides)
        hydra.run_hydra(run_job, [*overrides, *asked.flags])
        return 0
    for text in overrides:
        if text.lstrip("+").startswith(OF_SWEEPS):
            raise NoEffectError(f"{text} has no effect on a single run: add -m, or remove it.")
    config = configured(overrides)
    if dry_run:
        api.check(config)
        from fednas_flwr.deploy.dry_run import estimate

        print("\n".join(estimate(config).lines()))
        return 0
    helps = config.clients > 1 or config.evaluation.baselines
    if helps and config.runtime.name == "inline" and config.runtime.device != "cuda":
        warm_up(LATER if config.evaluation.baselines else ())
    api.run(config, quiet=False)
    return 0


def go_on(name: str) -> int:
    """Continue a run, or finish the missing jobs of a sweep; return the exit code."""
    record = Path(name) / SWEEP_FILE
    if not record.is_file():
        api.run(name, quiet=False)
        return 0
    typed = read_yaml(record, str(record))["hydra"]["overrides"]
    jobs = hydra.expand_sweep(hydra.for_hydra([*typed["task"], *typed["hydra"]]))
    for number, overrides in enumerate(jobs):
        differing = "_".join(text for text in overrides if any(text not in job for job in jobs))
        new = f"{number}_{re.sub('[=/]', '-', differing).replace('+', '')}"
        folder = next(Path(name).glob(f"{number}_*"), Path(name) / new)
        if is_complete(folder):
            continue
        print(f"job {number + 1} of {len(jobs)}: {folder.name}", flush=True)
        (folder / ERROR_FILE).unlink(missing_ok=True)
        _run_in(folder, overrides, begun=(folder / EVENTS_FILE).is_file())
    return _tell_end(Path(name))


def configured(overrides: Sequence[str], *, tell: bool = True) -> Config:
    """Return the checked configuration of overrides, and print its warnings."""
    overrides = [text for text in overrides if not text.lstrip("+").startswith("sweep.")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NoEffectWarning)
        config = api.compose(*overrides)
    for warning in caught if tell else ():
        print(f"fednas: warning: {warning.message}", file=sys.stderr)
    return config


def sweep(asked: hydra.Arguments) -> int:
    """Let Hydra run the jobs, each in a folder of its own; return the exit code.

    A job that fails does not stop the others; with Hydra's own sweeper, neither does a job that has
    a setting without effect. Any other mistake that can be known ends the sweep before it begins.

    Raises:
        ConfigError: An override is wrong, or all jobs have settings without effect.
    """
    overrides = [re.sub("^run_dir=", "hydra.sweep.dir=", text) for text in asked.overrides]
    fixed = hydra.without_sweeps(overrides)
    planned = hydra.compose_sweep(fixed)
    optuna = "optuna" in planned.sweeper
    if planned.sweeper.endswith("BasicSweeper"):
        if any(text.startswith("sweep.") for text in fixed):
            raise NoEffectError(
                f"sweep.metric={','.join(planned.metrics)} has no effect with hydra/sweeper=basic: "
                "set hydra/sweeper=optuna or remove it."
            )
        jobs = hydra.expand_sweep(overrides)
        _check_jobs(jobs)
        _jobs.update(total=len(jobs), start=time.monotonic())
    else:
        configuration.check_names(planned.tree)
    names = [text.partition("=")[0] for text in fixed]
    more = [f"hydra.job.config.override_dirname.exclude_keys=[{','.join(names)}]"]
    if optuna:
        best = [_direction(name) for name in planned.metrics]
        algorithm, stages = planned.tree["algorithm"], planned.tree["stages"]
        if SEARCH_LOSS in planned.metrics and ("network" in algorithm or "search" not in stages):
            raise ConfigError(
                f"sweep.metric={SEARCH_LOSS} is of a search, which these runs lack: set it to a "
                "score of the tested network, such as central_accuracy or central_rmse."
            )
        several = f"[{','.join(best)}]"
        more += [f"hydra.sweeper.direction={best[0] if len(best) == 1 else several}"]
        more += ["hydra.sweeper.max_failure_rate=1.0"]
    more = [text for text in more if text.partition("=")[0] not in names]
    forced = hydra.for_hydra(overrides, planned.known)
    forced = [text for text in forced if not text.startswith("hydra.sweep.dir=")]
    try:
        hydra.run_hydra(
            run_job, [*forced, *more, f"hydra.sweep.dir={planned.folder}", *asked.flags]
        )
    except ValueError as error:  # from Optuna, if no trial has succeeded; each has printed why
        if isinstance(error, ConfigError) or not optuna:
            raise
        print(f"fednas: {error}", file=sys.stderr)
    return _tell_end(planned.folder)


def run_job(tree: Any) -> float | list[float] | None:
    """Run one job of a sweep; Hydra calls it with the composed tree.

    Returns:
        The values of ``sweep.metric``, for a sweeper that optimises; None if the run has not
        reached them, or has failed. The file ``error.txt`` then has the reason.
    """
    take_files()  # for a process of the launcher
    overrides, folder = hydra.current_job()
    print(_place(folder), flush=True)
    if not _run_in(folder, overrides, begun=False):
        return None
    run, metric = read_run(folder), tree.sweep.metric
    values = [run.metric(str(name)) for name in ([metric] if isinstance(metric, str) else metric)]
    reached = [value for value in values if value is not None]
    if len(reached) < len(values):
        return None
    return reached[0] if isinstance(metric, str) else reached


def _run_in(folder: Path, overrides: Sequence[str], *, begun: bool) -> bool:
    """Run a job of a sweep in its folder, or continue it; return false if it has failed."""
    try:
        config = str(folder) if begun else replace(configured(overrides), run_dir=str(folder))
        api.run(config, quiet=False)
    except Exception as error:
        fail(error, debug=False)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ERROR_FILE).write_text(f"{terminal(error)}\n", encoding="utf-8")
        return False
    return True


def _place(folder: Path) -> str:
    """Return a text on which job begins, out of how many, and when all may end, if known."""
    total, start, number = _jobs["total"], _jobs["start"], int(folder.name.partition("_")[0])
    if not total:
        return f"job {folder.name}"
    left = (time.monotonic() - start) / number * (total - number) if number else None
    ends = "" if left is None else f", {duration(left)} left"
    return f"job {number + 1} of {total}{ends}: {folder.name}"


def _direction(name: str) -> str:
    """Return the direction in which a sweep optimises a metric.

    Raises:
        ConfigError: There is no metric of that name.
    """
    scores = {SEARCH_LOSS: False} | {metric.name: metric.is_score for metric in METRICS}
    check_choice("sweep.metric", name, scores)
    return "maximize" if scores[name] else "minimize"


def _check_jobs(jobs: Sequence[Sequence[str]]) -> None:
    """Refuse mistakes that can be known before a job begins."""
    refused = []
    for job in jobs:
        try:
            api.check(configured(job, tell=False))
        except NoEffectError as error:
            refused.append(error)
    if refused and len(refused) == len(jobs):
        raise refused[0]


def _tell_end(folder: Path) -> int:
    """Print the number of completed jobs, and return the exit code."""
    failed = sorted(path.parent.relative_to(folder) for path in folder.rglob(ERROR_FILE))
    runs = {path.parent for path in folder.rglob(EVENTS_FILE) if is_complete(path.parent)}
    completed = [run for run in runs if runs.isdisjoint(run.parents)]  # no groups, no baselines
    total = len(failed) + len(completed)
    if completed:
        from fednas_flwr.report import comparison

        compared = comparison.compare_runs([folder])
        comparison.print_comparison(compared)
        print(comparison.write_comparison(compared, folder)[-1])
    noun = "job" if total == 1 else "jobs"
    print(f"{len(completed)} of {total} {noun} completed; sweep folder: {folder}")
    if failed:
        jobs = "1 job" if len(failed) == 1 else f"{len(failed)} jobs"
        print(f"fednas: {jobs} failed: {', '.join(map(str, failed))}.", file=sys.stderr)
    return RUN_FAILED if failed else 0


def data(data: Path, *, overrides: Sequence[str]) -> None:
    """Print the contents of a data set, its division over clients, and suggested settings.

    DATA is a table, an npz file or a folder of images; overrides are those of fednas run, such as
    clients=5 partition=dirichlet dataset.label=outcome

    Args:
        data: file or folder of the data
        overrides: see above
    """
    from fednas_flwr.data.prepared import client_names, make_data
    from fednas_flwr.data.summary import summary

    has_table = any(override.startswith("dataset.labels_file=") for override in overrides)
    name = "labelled_images" if has_table else _data_set(data)
    table = ["search_space=mlp_small"] if name == "csv" else []
    whole = [f"dataset={name}", f"dataset.root='{data.resolve()}'", *table, *overrides]
    typed = hydra.user_settings(overrides).typed
    config = api.with_clients(configuration.parse_config(hydra.compose_tree(whole)), typed)
    if isinstance(config.dataset, CSV) and config.partition.name == "sites":
        _compare_sites(config.dataset)
    prepared, parts = make_data(config)
    names = client_names(prepared.train, config.partition)
    names = names or [f"client {client}" for client in range(len(parts))]
    for line in summary(prepared, parts, names, config.dataset.division):
        print(line)
    categories = [column.name for column in prepared.train.schema if column.categories]
    if categories and config.partition.name == "iid":
        text = f"if one of {', '.join(categories)} says whose a record is"
        print(f"suggestion: partition=column partition.column=<column>, {text}")


def _compare_sites(dataset: CSV) -> None:
    """Print the tables of sites side by side, and settings by which they can be joined."""
    from fednas_flwr.data import site_tables, table_files
    from fednas_flwr.data.datasets import find_source
    from fednas_flwr.report.terminal import print_table

    root = find_source(dataset, sites=True)
    tables = site_tables.read_site_tables(dataset, root)
    header, *rows = site_tables.side_by_side(tables)
    print_table("", header, rows)
    if said := site_tables.proposals(tables):
        print(f"These lines of {root / table_files.SITES_FILE} would join the sites; check each:")
        print("\n".join(f"  {line}" for line in site_tables.as_yaml(said)))


def _data_set(path: Path) -> str:
    """Return the name of the data set that reads a file or folder."""
    from fednas_flwr.data.table_files import suffix_of

    if not path.exists():
        raise ConfigError(f"{path} does not exist: give a table, an npz file or a folder.")
    if path.suffix in (".npz", ".npy"):
        return "npz"
    return "csv" if path.is_file() or any(map(suffix_of, path.iterdir())) else "image_folder"


COMMANDS: dict[str, Handler] = {"run": run, "data": data}
