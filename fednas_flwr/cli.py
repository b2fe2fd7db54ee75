"""The command ``fednas``: the only module that knows Hydra.

A mistake of the user's ends in one sentence and exit code 2, a run that failed in one sentence and
exit code 1; ``--debug`` shows the full trace.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fednas_flwr import __version__
from fednas_flwr.config import Config, conf_folder, parse_config
from fednas_flwr.errors import ConfigError, unknown_choice

USER_ERROR = 2
RUN_FAILED = 1

RUN_HELP = """
overrides:
  group=name            one file of conf/<group>: algorithm, dataset, partition, search_space,
                        privacy, runtime, retrain, experiment
  key=value             any key of the composed configuration, e.g. seed=2 clients=5
                        algorithm.weights.lr=.05; shown by `fednas run --cfg`
  resume=<run folder>   continue a run that was stopped; its own configuration is used
  -m key=a,b            Hydra sweep: one run per combination, each in its own folder
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and options.command != "run":
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        commands = {"run": _run, "report": _report, "compare": _compare, "tables": _tables}
        return commands[options.command](options, overrides)
    except ConfigError as error:
        return _fail(error, USER_ERROR, debug=options.debug)
    except KeyboardInterrupt:
        print("\nfednas: stopped; continue with resume=<run folder>.", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        return _fail(error, RUN_FAILED, debug=options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fednas", description="Federated neural architecture search on Flower."
    )
    parser.add_argument("--version", action="version", version=f"fednas {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    run = commands.add_parser(
        "run",
        help="search, retrain, evaluate and export; without arguments the quickstart",
        epilog=RUN_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("-m", "--multirun", action="store_true", help="sweep over comma lists")
    run.add_argument("--cfg", action="store_true", help="print the configuration and stop")
    report = commands.add_parser("report", help="write report.html of a run again")
    report.add_argument("run_folder", type=Path)
    compare = commands.add_parser("compare", help="table of several runs, mean over seeds")
    compare.add_argument("run_folders", type=Path, nargs="+", help="run folders or sweeps")
    compare.add_argument("--output", type=Path, help="folder for compare.csv, .md and .json")
    tables = commands.add_parser("tables", help="render README tables from scripts/results")
    tables.add_argument("readme", type=Path, nargs="?", default=Path("README.md"))
    for command in (run, report, compare, tables):
        command.add_argument("--debug", action="store_true", help="show the full trace of an error")
    return parser


def _fail(error: Exception, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    print(f"fednas: {error}", file=sys.stderr)
    return code


def _report(options: argparse.Namespace, overrides: list[str]) -> int:
    from fednas_flwr.reporting.report import write_report

    if not (options.run_folder / "events.jsonl").is_file():
        raise ConfigError(f"{options.run_folder} holds no events.jsonl; give the folder of a run.")
    print(write_report(options.run_folder))
    return 0


def _compare(options: argparse.Namespace, overrides: list[str]) -> int:
    from fednas_flwr.reporting.compare import compare_runs, print_comparison, write_comparison

    comparison = compare_runs(options.run_folders)
    print_comparison(comparison)
    if options.output is not None:
        for path in write_comparison(comparison, options.output):
            print(path)
    return 0


def _tables(options: argparse.Namespace, overrides: list[str]) -> int:
    from fednas_flwr.reporting.tables import main as render

    return render([str(options.readme)])


def _run(options: argparse.Namespace, overrides: list[str]) -> int:
    resumes = [o.split("=", 1)[1] for o in overrides if o.startswith("resume=")]
    if resumes:
        if len(overrides) > 1 or options.multirun:
            raise ConfigError(
                f"resume={resumes[0]} takes no other setting: the run's own configuration is used."
            )
        from fednas_flwr.federation.run_folder import open_run_folder

        config = open_run_folder(resumes[0])
        _execute(config, resumed=True)
        return 0
    codes: list[int] = []

    def job(tree: DictConfig) -> None:
        values: Any = OmegaConf.to_container(tree, resolve=True)
        config = parse_config(values)
        if options.cfg:
            print(OmegaConf.to_yaml(tree, resolve=True))
            return
        from fednas_flwr.federation.run_folder import create_run_folder

        settings = HydraConfig.get()
        if settings.mode == RunMode.MULTIRUN:
            name = f"{settings.job.num}_{settings.job.override_dirname}"
            parent = Path(config.run_dir or Path("runs") / f"sweep_{os.getpid()}")
            config = create_run_folder(_without_run_dir(config), parent=parent, name=name)
        else:
            config = create_run_folder(config)
        _execute(config, resumed=False)

    _compose(job, overrides, multirun=options.multirun)
    return max(codes, default=0)


def _execute(config: Config, *, resumed: bool) -> None:
    """Run a configuration whose folder exists, with a live display and a closing table."""
    print(f"run folder: {config.run_dir}", flush=True)
    from fednas_flwr.reporting.progress import ProgressDisplay, print_summary

    with ProgressDisplay() as display:
        from fednas_flwr.federation.launch import launch

        launch(config, listeners=[display], resumed=resumed)
    print_summary(Path(str(config.run_dir)))


def _compose(job: Any, overrides: list[str], *, multirun: bool) -> None:
    """Let Hydra compose ``conf/`` and call ``job``; turn its errors into sentences."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of ending the process
    decorated = hydra.main(
        version_base="1.3", config_path=str(conf_folder().resolve()), config_name="config"
    )(job)
    saved, sys.argv = sys.argv, ["fednas", *(["-m"] if multirun else []), *overrides]
    try:
        decorated()
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(overrides, error) from error
    finally:
        sys.argv = saved


def _explain(overrides: list[str], error: Exception) -> ConfigError:
    """Return one sentence for Hydra's error: the override it is about and what is allowed."""
    folder = conf_folder()
    groups = {path.name for path in folder.iterdir() if path.is_dir()}
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            return ConfigError(f"{text!r} is not of the form key=value.")
        key = override.key_or_group
        if key in groups:
            names = {
                str(path.relative_to(folder / key).with_suffix(""))
                for path in (folder / key).rglob("*.yaml")
            } - {"base"}
            chosen = str(override.value())
            values = chosen.split(",") if override.is_sweep_override() else [chosen]
            for value in values:
                if value not in names:
                    return unknown_choice(key, value, names)
        else:
            unknown = _unknown_key(key, [o for o in overrides if o.split("=")[0] in groups])
            if unknown is not None:
                return unknown
    return ConfigError(str(error).strip().splitlines()[0])


def _unknown_key(key: str, group_overrides: list[str]) -> ConfigError | None:
    """Return the error for a key that the composed configuration does not have."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(version_base="1.3", config_dir=str(conf_folder().resolve())):
        tree = compose("config", overrides=group_overrides)
    node: Any = tree
    parts = key.split(".")
    for depth, part in enumerate(parts):
        if not isinstance(node, DictConfig) or part not in node:
            names = [".".join([*parts[:depth], str(name)]) for name in node]
            return unknown_choice("key", ".".join(parts[: depth + 1]), names)
        node = OmegaConf.select(node, part, throw_on_missing=False)
    return None


def _without_run_dir(config: Config) -> Config:
    from dataclasses import replace

    return replace(config, run_dir=None)


if __name__ == "__main__":
    sys.exit(main())
