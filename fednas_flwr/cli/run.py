"""``fednas run``: one run, a sweep, or a run that goes on."""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from fednas_flwr import api
from fednas_flwr.builders.configuration import parse_config
from fednas_flwr.cli.outcomes import RUN_FAILED, fail
from fednas_flwr.cli.parsing import Commands, add_command
from fednas_flwr.composition import compose_tree, expand_sweep, given_settings
from fednas_flwr.config import Config
from fednas_flwr.errors import ConfigError, NoEffectError, NoEffectWarning

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
    data_parser = add_command(
        commands,
        "data",
        data,
        help="what a data set holds, and how clients would divide it",
        epilog="DATA is a table, an npz file or a folder of images; overrides as of fednas run, "
        "such as clients=5 partition=dirichlet dataset.label=outcome",
        takes_overrides=True,
    )
    data_parser.add_argument("data", type=Path)
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep over comma lists")
    parser.add_argument("--cfg", action="store_true", help="print the configuration and stop")


def run(options: argparse.Namespace, overrides: list[str]) -> int:
    """Resume a run, or compose, check and run the configuration, or each of a sweep."""
    resumes = [text for text in overrides if text.startswith("resume=")]
    if resumes == ["resume=auto"] and not options.multirun:
        from fednas_flwr.stages.run_folder import find_unfinished

        overrides = [text for text in overrides if text != "resume=auto"]
        found = find_unfinished(api.compose(*overrides))
        if found is not None:
            api.run(str(found.run_dir), quiet=False)
            return 0
    elif resumes:
        if len(overrides) > 1 or options.multirun:
            raise ConfigError(
                f"{resumes[0]} takes no other setting: the run's own configuration is used."
            )
        api.run(resumes[0].removeprefix("resume="), quiet=False)
        return 0
    if not options.multirun:
        config = _configured(overrides, shown=options.cfg)
        if not options.cfg:
            api.run(config, quiet=False)
        return 0
    jobs, refused = expand_sweep(overrides), dict[str, NoEffectError]()
    configs = {}
    for name, job in jobs.items():
        try:
            configs[name] = _configured(job, shown=options.cfg, end="---\n")
        except NoEffectError as error:
            refused[name] = error
    if refused and not configs:
        raise next(iter(refused.values()))
    return 0 if options.cfg else _sweep(configs, refused, debug=options.debug)


def data(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print what a data set holds, its division over clients, and suggested settings."""
    from fednas_flwr.builders.data import make_data
    from fednas_flwr.data.summary import summary

    name = _data_set(options.data)
    table = ["search_space=mlp_small"] if name == "csv" else []
    given = [f"dataset={name}", f"dataset.root='{options.data.resolve()}'", *table, *overrides]
    config = parse_config(compose_tree(given))
    prepared, parts = make_data(config)
    dataset = config.dataset
    key, fractions = dataset.split_key.encode(), dataset.fractions
    for line in summary(prepared, parts, key=key, fractions=fractions):
        print(line)
    return 0


def _data_set(path: Path) -> str:
    """Return the name of the data set that reads a file or folder."""
    from fednas_flwr.data.table_files import suffix_of

    if not path.exists():
        raise ConfigError(f"{path} does not exist: give a table, an npz file or a folder.")
    if path.suffix == ".npz":
        return "npz"
    if suffix_of(path) or (path.is_dir() and any(suffix_of(file) for file in path.iterdir())):
        return "csv"
    if path.is_dir():
        return "image_folder"
    raise ConfigError(f"{path} is no table, npz file or folder of images.")


def _configured(overrides: list[str], *, shown: bool, end: str = "") -> Config:
    """Return the configuration of overrides, printed where it is to be shown; tell warnings."""
    tree = compose_tree(overrides)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", NoEffectWarning)
        config = parse_config(tree, given=given_settings(overrides))
    for warning in told:
        print(f"fednas: warning: {warning.message}", file=sys.stderr)
    if shown:
        print(OmegaConf.to_yaml(OmegaConf.create(tree)), end=end)
    return config


def _sweep(configs: dict[str, Config], refused: dict[str, NoEffectError], *, debug: bool) -> int:
    """Run every configuration in a folder of its own name; a failure does not stop the others.

    A job that has a setting without effect is left out, and said to have failed; any other
    mistake ends the sweep before it begins.
    """
    from fednas_flwr.stages.run_folder import create_run_folder, sweep_folder

    parent = sweep_folder(next(iter(configs.values())).run_dir)
    configs = {n: replace(config, run_dir=str(parent / n)) for n, config in configs.items()}
    for name, config in list(configs.items()):
        try:
            api.check([config])
        except NoEffectError as error:
            refused[name] = error
            del configs[name]
    if not configs:
        raise next(iter(refused.values()))
    failed = list(refused)
    for name, refusal in refused.items():
        print(f"job {name} is left out:", file=sys.stderr)
        fail(refusal, debug=debug)
    for number, (name, config) in enumerate(configs.items(), 1):
        print(f"job {number} of {len(configs)}: {name}", flush=True)
        try:
            api.execute(create_run_folder(config), resumed=False)
        except Exception as error:
            failed.append(name)
            fail(error, debug=debug)
    total = len(configs) + len(refused)
    print(f"{total - len(failed)} of {total} jobs completed; sweep folder: {parent}")
    if failed:
        print(f"fednas: {len(failed)} jobs failed: {', '.join(failed)}.", file=sys.stderr)
    return RUN_FAILED if failed else 0
