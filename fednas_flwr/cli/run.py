"""``fednas run``: one run, a sweep, or a run that goes on."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from fednas_flwr.builders import parse_config
from fednas_flwr.cli.composition import compose_tree, expand_sweep
from fednas_flwr.cli.outcomes import RUN_FAILED, fail
from fednas_flwr.cli.parsing import Commands, add_command
from fednas_flwr.config import Config
from fednas_flwr.errors import ConfigError

RUN_HELP = """
overrides:
  group=name            one file of conf/<group>: algorithm, dataset, partition, search_space,
                        privacy, runtime, retrain, experiment
  key=value             any key of the composed configuration, e.g. seed=2 clients=5
                        algorithm.weights.lr=.05; shown by `fednas run --cfg`
  resume=<run folder>   continue a run that was stopped; its own configuration is used
  resume=auto           continue the newest unfinished run of these overrides, else begin one
  -m key=a,b            sweep: one run per combination, each in its own folder
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
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep over comma lists")
    parser.add_argument("--cfg", action="store_true", help="print the configuration and stop")


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    """Resume a run, or compose, check and run the configuration, or each of a sweep."""
    resumes = [text for text in overrides if text.startswith("resume=")]
    if resumes == ["resume=auto"] and not options.multirun:
        from fednas_flwr.stages.run_folder import find_unfinished

        overrides = [text for text in overrides if text != "resume=auto"]
        found = find_unfinished(parse_config(compose_tree(overrides)))
        if found is not None:
            execute(found, resumed=True)
            return 0
    elif resumes:
        if len(overrides) > 1 or options.multirun:
            raise ConfigError(
                f"{resumes[0]} takes no other setting: the run's own configuration is used."
            )
        from fednas_flwr.stages.run_folder import check_whole, open_run_folder

        config = open_run_folder(resumes[0].removeprefix("resume="))
        check_whole(config)
        execute(config, resumed=True)
        return 0
    jobs = expand_sweep(overrides) if options.multirun else {"": overrides}
    configs = {}
    for name, job in jobs.items():
        tree = compose_tree(job)
        configs[name] = parse_config(tree)
        if options.cfg:
            print(
                OmegaConf.to_yaml(OmegaConf.create(tree)), end="---\n" if options.multirun else ""
            )
    if options.cfg:
        return 0
    if options.multirun:
        return _sweep(configs, debug=options.debug)
    (config,) = configs.values()
    _check([config])
    from fednas_flwr.stages.run_folder import create_run_folder

    execute(create_run_folder(config), resumed=False)
    return 0


def _sweep(configs: dict[str, Config], *, debug: bool) -> int:
    """Run every configuration in a folder of its own name; a failure does not stop the others."""
    from fednas_flwr.stages.run_folder import create_run_folder, sweep_folder

    parent = sweep_folder(next(iter(configs.values())).run_dir)
    configs = {n: replace(config, run_dir=str(parent / n)) for n, config in configs.items()}
    _check(list(configs.values()))
    failed = []
    for number, (name, config) in enumerate(configs.items(), 1):
        print(f"job {number} of {len(configs)}: {name}", flush=True)
        try:
            execute(create_run_folder(config), resumed=False)
        except Exception as error:
            failed.append(name)
            fail(error, debug=debug)
    print(f"{len(configs) - len(failed)} of {len(configs)} jobs completed; sweep folder: {parent}")
    if failed:
        print(f"fednas: {len(failed)} jobs failed: {', '.join(failed)}.", file=sys.stderr)
    return RUN_FAILED if failed else 0


def _check(configs: list[Config]) -> None:
    """Raise ConfigError for what files, data and device rule out, before any folder is made."""
    from fednas_flwr.stages.run_folder import check_free

    for config in configs:
        check_free(config)
    from fednas_flwr.builders import check_buildable

    for config in configs:
        if config.runtime.name != "deployment":  # data and genotype lie on other machines
            check_buildable(config)


def execute(config: Config, *, resumed: bool) -> None:
    """Run a configuration whose folder exists, with a live display and a closing table."""
    print(f"run folder: {config.run_dir}", flush=True)
    from fednas_flwr.reporting.progress import ProgressDisplay, print_summary

    try:
        with ProgressDisplay() as display:
            from fednas_flwr.federation.launch import launch

            launch(config, listeners=[display], resumed=resumed)
    except KeyboardInterrupt:
        print(f"\nTo go on: fednas run resume={config.run_dir}", file=sys.stderr)
        raise
    print_summary(Path(str(config.run_dir)))
