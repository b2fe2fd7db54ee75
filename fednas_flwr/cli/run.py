"""``fednas run``: one run, a sweep that Hydra runs, or a run that goes on."""

from __future__ import annotations

import argparse

from fednas_flwr import api
from fednas_flwr.base.errors import ConfigError, NoEffectError
from fednas_flwr.cli.commands import Commands, add_command
from fednas_flwr.cli.sweeps import configured, run_job, sweep
from fednas_flwr.settings.hydra_config import for_hydra, read_arguments, run_hydra

OF_SWEEPS = ("sweep.", "hydra.sweep", "hydra.launcher", "hydra/sweeper", "hydra/launcher")

RUN_HELP = """
overrides:
  group=name            one file of conf/<group>: algorithm, dataset, partition, search_space,
                        privacy, runtime, retrain, server_optimizer, experiment
  key=value             any key of the composed configuration, e.g. seed=2 clients=5
                        algorithm.weights.lr=.05; shown by `fednas run --cfg job`
  config=<file>         the config.yaml of a run in place of conf/, to repeat it
  resume=<run folder>   continue a run that was stopped; its own configuration is used
  resume=auto           continue the newest unfinished run of these overrides, else begin one
  -m key=a,b            sweep: one run per combination, each in its own folder

Options and overrides are those of Hydra: -m with hydra/launcher=joblib hydra/sweeper=optuna (extra
`sweeps`), --cfg job --resolve, --info, --config-dir, --config-name, --package, +key, ++key, ~key,
glob(), hydra.sweep.dir; --shell-completion install=bash prints a completion script.
"""


def add_commands(commands: Commands) -> None:
    """Add ``run``."""
    parser = add_command(
        commands,
        "run",
        run,
        help="search, retrain, evaluate and export; without arguments the quickstart",
        epilog=RUN_HELP,
        takes_overrides=True,
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="only estimate what the run would take: time, traffic, memory, disk and epsilon",
    )


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    """Resume a run, or compose, check and run the configuration, or let Hydra sweep or inform."""
    asked = read_arguments(arguments)
    overrides, source = asked.overrides, asked.source
    resumes = [text for text in overrides if text.startswith("resume=")]
    if options.dry_run and (resumes or asked.multirun or asked.informs):
        raise ConfigError("--dry-run is of one new run: leave out -m, resume and --cfg.")
    if resumes == ["resume=auto"] and not asked.flags:
        from fednas_flwr.runs.run_folder import find_unfinished

        overrides = [text for text in overrides if text != "resume=auto"]
        found = find_unfinished(configured(overrides, source))
        if found is not None:
            api.run(str(found.run_dir), quiet=False)
            return 0
    elif resumes:
        if len(overrides) > 1 or asked.flags:
            raise ConfigError(
                f"{resumes[0]} takes no other setting: the run's own configuration is used."
            )
        api.run(resumes[0].removeprefix("resume="), quiet=False)
        return 0
    if asked.multirun:
        return sweep(asked)
    if asked.informs:
        if not asked.completes:
            configured(overrides, source)  # a mistake is one sentence
            overrides = for_hydra(overrides, source)
        run_hydra(run_job, [*overrides, *asked.flags])
        return 0
    for text in overrides:
        if text.lstrip("+").startswith(OF_SWEEPS):
            raise NoEffectError(f"{text} has no effect on a single run: add -m, or remove it.")
    config = configured(overrides, source)
    if options.dry_run:
        api.check([config])
        from fednas_flwr.deploy.dry_run import estimate

        print("\n".join(estimate(config).lines()))
        return 0
    api.run(config, quiet=False)
    return 0
