"""The command ``fednas``: the only module that knows Hydra.

A mistake of the user's ends in one sentence and exit code 2, a run that failed in one sentence and
exit code 1; ``--debug`` shows the full trace. torch is imported only when a run begins, so that
mistakes are told at once.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from difflib import SequenceMatcher
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fednas_flwr import __version__
from fednas_flwr.config import Config, conf_folder, parse_config
from fednas_flwr.errors import ConfigError, unknown_choice

if TYPE_CHECKING:
    from fednas_flwr.privacy.ledger import Row

RUN_FAILED = 1
USER_ERROR = 2
STOPPED = 128 + signal.SIGINT
MOST_STEPS = 10**9  # of `fednas calibrate`
PIPE_WIDTH = 200  # of tables that go to a file or a pipe
STATEMENT_HEAD = (
    *("account", "run", "stage", "verb", "splits", "steps", "committed"),
    *("noise multiplier", "rate", "first (UTC)", "last (UTC)"),
)

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parser = _parser()
    options, overrides = parser.parse_known_args(arguments)
    if overrides and options.command not in ("run", "audit", "latency"):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    try:
        commands = {
            "run": _run,
            "report": _report,
            "analyse": _analyse,
            "compare": _compare,
            "audit": _audit,
            "calibrate": _calibrate,
            "latency": _latency,
            "ledger": _ledger,
            "tables": _tables,
            "provision": _provision,
            "key": _key,
            "doctor": _doctor,
        }
        return commands[options.command](options, overrides)
    except KeyboardInterrupt:
        print("\nfednas: stopped.", file=sys.stderr)
        return STOPPED
    except Exception as error:
        return _fail(error, debug=options.debug)


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
        allow_abbrev=False,
    )
    run.add_argument("-m", "--multirun", action="store_true", help="sweep over comma lists")
    run.add_argument("--cfg", action="store_true", help="print the configuration and stop")
    report = commands.add_parser("report", help="write report.html of a run again")
    report.add_argument("run_folder", type=Path)
    compare = commands.add_parser("compare", help="table of several runs, mean over seeds")
    compare.add_argument("run_folders", type=Path, nargs="+", help="run folders or sweeps")
    compare.add_argument("--output", type=Path, help="folder for compare.csv, .md and .json")
    analyse = commands.add_parser(
        "analyse", help="what a search prefers, and what its cell owes to activations and pools"
    )
    analyse.add_argument("run_folder", type=Path, help="of a finished run")
    analyse.add_argument(
        "--against", type=Path, nargs="+", default=[], help="runs to compare its search with"
    )
    analyse.add_argument("--retrain", action="store_true", help="train the changed cells, too")
    analyse.add_argument("--batch-size", type=int, default=1, help="of inference (default: 1)")
    tables = commands.add_parser("tables", help="render README tables from scripts/results")
    tables.add_argument("readme", type=Path, nargs="?", default=Path("README.md"))
    audit = commands.add_parser(
        "audit",
        help="plant canaries in a private search and bound its epsilon from below",
        epilog="Takes the overrides of `fednas run`; rounds is the number of audited steps.",
        allow_abbrev=False,
    )
    audit.add_argument("--canaries", type=int, default=100, help="default: %(default)d")
    calibrate = commands.add_parser("calibrate", help="the least noise that keeps an epsilon")
    for name, kind, meaning in (
        ("epsilon", float, "the target"),
        ("delta", float, "of the target, above 0, below 1"),
        ("rate", float, "each record's probability of being in a step's batch: B / N"),
        ("steps", int, "how many steps are released"),
    ):
        calibrate.add_argument(f"--{name}", type=kind, required=True, help=meaning)
    calibrate.add_argument(
        "--accountant",
        choices=("prv", "rdp", "filter"),
        default="prv",
        help="whose epsilon keeps the target; a site's budget lasts by filter (default: prv)",
    )
    latency = commands.add_parser(
        "latency", help="what the ops of a search space cost on a machine"
    )
    measure = latency.add_subparsers(dest="action", required=True, metavar="action").add_parser(
        "measure",
        help="time every op on this machine and write the table",
        epilog="Takes overrides of `fednas run`: search_space, device and threads matter.",
        allow_abbrev=False,
    )
    shape = ("CHANNELS", "HEIGHT", "WIDTH")
    measure.add_argument("--shape", type=int, nargs=3, metavar=shape, default=[3, 32, 32])
    measure.add_argument("--classes", type=int, default=10, help="default: %(default)d")
    measure.add_argument("--batch-size", type=int, default=1, help="default: %(default)d")
    measure.add_argument(
        "--passes", type=int, default=21, help="measurements of each op (default: %(default)d)"
    )
    measure.add_argument("--output", type=Path, required=True, help="JSON file to write")
    ledger = commands.add_parser("ledger", help="what a site has booked of its privacy budgets")
    actions = ledger.add_subparsers(dest="action", required=True, metavar="action")
    show = actions.add_parser("show", help="table of what was booked, and its epsilon")
    show.add_argument("--account", help="only this budget, as the site's policy names it")
    show.add_argument("--delta", type=float, default=1e-5, help="of epsilon (default: %(default)g)")
    verify = actions.add_parser("verify", help="check every row, the totals and the mark")
    trail = actions.add_parser("trail", help="check the chain of a site's audit trail")
    trail.add_argument("trail", type=Path, help="the file, audit.jsonl beside the ledger")
    for action in (show, verify):
        action.add_argument("ledger", type=Path, help="the ledger's file")
        action.add_argument("--key", type=Path, required=True, help="its secret key")
    provision = commands.add_parser(
        "provision", help="what each machine of a deployment needs, in a folder for each"
    )
    provision.add_argument("sites", type=Path, help="YAML file; README, Deployment")
    provision.add_argument("--output", type=Path, default=Path("deployment"), help="folder")
    provision.add_argument("--zip", action="store_true", help="archives instead of folders")
    key = commands.add_parser("key", help="make the key by which a server knows this site's node")
    key.add_argument("path", type=Path, help="file of the new key")
    doctor = commands.add_parser("doctor", help="what is wrong with this machine, and what to do")
    doctor.add_argument("folder", type=Path, nargs="?", default=Path(), help="default: this one")
    for command in (
        *(run, report, analyse, compare, audit, calibrate, measure, show, verify, trail),
        *(tables, provision, key, doctor),
    ):
        command.add_argument("--debug", action="store_true", help="show the full trace of an error")
    return parser


def _provision(options: argparse.Namespace, overrides: list[str]) -> int:
    from fednas_flwr.federation.provision import AUTHORITY, load_sites, provision

    deployment = load_sites(options.sites)
    for path in provision(deployment, options.output, as_zip=options.zip):
        print(path)
    print(f"{options.output / AUTHORITY} stays with you: its key signs the server's certificates.")
    return 0


def _key(options: argparse.Namespace, overrides: list[str]) -> int:
    from fednas_flwr.federation.certificates import make_node_key

    try:
        public = make_node_key(options.path)
    except FileExistsError as error:
        raise ConfigError(f"{options.path} exists: the server may know the site by it.") from error
    except OSError as error:
        raise ConfigError(f"{options.path} cannot be written: {error}.") from error
    print(f"{options.path} is made and stays here. Send {public} to the server's operator and")
    print("start again when it is registered.")
    return 0


def _doctor(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print one line per check; exit code 1 when something is broken."""
    from fednas_flwr.federation.doctor import examine

    findings = examine(options.folder)
    for finding in findings:
        print(f"{'BROKEN' if finding.broken else 'ok':6}  {finding.name:11}  {finding.text}")
    return RUN_FAILED if any(finding.broken for finding in findings) else 0


def _fail(error: Exception, *, debug: bool, is_sentence: bool = False) -> int:
    """Print one error, a ConfigError as the sentence that it is, and return the exit code."""
    if debug:
        traceback.print_exception(error)
    user_error = isinstance(error, ConfigError)
    text = str(error) if user_error or is_sentence else f"{type(error).__name__}: {error}"
    print(f"fednas: {text}", file=sys.stderr)
    return USER_ERROR if user_error else RUN_FAILED


def _report(options: argparse.Namespace, overrides: list[str]) -> int:
    from fednas_flwr.reporting.report import write_report

    if not (options.run_folder / "events.jsonl").is_file():
        raise ConfigError(f"{options.run_folder} holds no events.jsonl; give the folder of a run.")
    print(write_report(options.run_folder))
    return 0


def _analyse(options: argparse.Namespace, overrides: list[str]) -> int:
    """Analyse a finished run; with ``--retrain`` train each variant of its cell before."""
    if options.batch_size < 1:
        raise ConfigError(f"--batch-size must be at least 1, got {options.batch_size}.")
    from fednas_flwr.federation.analysis import (
        ANALYSIS_FILE,
        analyse,
        finished_run,
        prepare_variants,
    )
    from fednas_flwr.federation.run_folder import open_run_folder
    from fednas_flwr.reporting.analysis import print_analysis
    from fednas_flwr.reporting.runs import is_complete

    runs = [finished_run(folder) for folder in (options.run_folder, *options.against)]
    config = open_run_folder(str(options.run_folder))
    variants = prepare_variants(config)
    for folder in variants if options.retrain else ():
        if not is_complete(folder):
            _execute(open_run_folder(str(folder)), resumed=True)
    print_analysis(
        analyse(config, runs=runs, variant_folders=variants, batch_size=options.batch_size)
    )
    print(Path(str(config.run_dir)) / ANALYSIS_FILE)
    return 0


def _compare(options: argparse.Namespace, overrides: list[str]) -> int:
    from fednas_flwr.reporting.compare import compare_runs, print_comparison, write_comparison

    comparison = compare_runs(options.run_folders)
    print_comparison(comparison)
    if options.output is not None:
        for path in write_comparison(comparison, options.output):
            print(path)
    return 0


def _audit(options: argparse.Namespace, overrides: list[str]) -> int:
    """Audit the composed private search; exit code 1 when it tells more than it claims."""
    config = parse_config(compose_tree(overrides))
    from fednas_flwr.federation.audit import audit_search

    audit = audit_search(config, num_canaries=options.canaries)
    result = audit.result
    print(
        f"{config.rounds} steps, {options.canaries} canaries: {result.num_right} of "
        f"{result.num_guesses} guesses right.\n"
        f"epsilon is at least {result.epsilon:.3g} (delta {result.delta:g}, confidence "
        f"{result.confidence:.0%}); claimed: {audit.claim:.3g}."
    )
    if result.epsilon > audit.claim:
        print("fednas: the audit refutes the claim.", file=sys.stderr)
        return RUN_FAILED
    return 0


def _calibrate(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print a noise multiplier, rounded up, and what its steps cost by every accountant."""
    from fednas_flwr.privacy.accounting import calibrate_noise, prv_epsilon, rdp_epsilon
    from fednas_flwr.privacy.gdp import gdp_epsilon
    from fednas_flwr.privacy.policy import show
    from fednas_flwr.privacy.renyi import Release
    from fednas_flwr.privacy.renyi_filter import filter_epsilon
    from fednas_flwr.reporting.guarantee import epsilon_text

    if not 1e-3 <= options.epsilon <= 1e6:
        raise ConfigError(f"--epsilon must be from .001 to 1e6, got {options.epsilon:g}.")
    if not 1 <= options.steps <= MOST_STEPS:
        raise ConfigError(f"--steps must be from 1 to {MOST_STEPS:,}, got {show(options.steps)}.")
    accountants = {"prv": prv_epsilon, "rdp": rdp_epsilon, "filter": filter_epsilon}
    try:
        least = calibrate_noise(
            target_epsilon=options.epsilon,
            delta=options.delta,
            sample_rate=options.rate,
            steps=options.steps,
            accountant=accountants[options.accountant],
        )
        digit = 10.0 ** (math.floor(math.log10(least)) - 4)
        sigma = float(f"{math.ceil(least / digit) * digit:.5g}")  # as it is printed
        release = Release(noise_multiplier=sigma, sample_rate=options.rate, steps=options.steps)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(f"noise_multiplier = {sigma:g}")
    for name, accountant in {
        "PRV": prv_epsilon,
        "RDP": rdp_epsilon,
        "GDP, an approximation and no bound": gdp_epsilon,
        "filter, the budget that a site needs": filter_epsilon,
    }.items():
        epsilon = accountant([release], options.delta)
        text = epsilon_text(epsilon if math.isfinite(epsilon) else None)
        print(f"epsilon = {text} at delta {options.delta:g} ({name})")
    return 0


def _latency(options: argparse.Namespace, overrides: list[str]) -> int:
    """Measure the composed search space, and how well the table predicts three networks of it."""
    config = parse_config(compose_tree(overrides))
    for name, value, least in (
        ("batch-size", options.batch_size, 1),
        ("passes", options.passes, 2),
    ):
        if value < least:
            raise ConfigError(f"--{name} must be at least {least}, got {value}.")
    from fednas_flwr.builders import make_device, make_space
    from fednas_flwr.evaluation.space_costs import measure_space, space_costs
    from fednas_flwr.hardware.latency import to_json
    from fednas_flwr.randomness import make_generator
    from fednas_flwr.reporting.files import write_text
    from fednas_flwr.search_spaces.mbconv import MBConvSpace

    space = make_space(
        **asdict(config.search_space), input_shape=tuple(options.shape), num_classes=options.classes
    )
    if not isinstance(space, MBConvSpace):
        raise ConfigError(f"search_space={space.name} has no latency table: choose mbconv.")
    generator = make_generator(config.seed, "latency")
    table, predictions = measure_space(
        space,
        device=make_device(config.device),
        threads=config.threads,
        batch_size=options.batch_size,
        passes=options.passes,
        genotypes=[space.random_genotype(generator) for _ in range(3)],
    )
    write_text(options.output, to_json(table))
    costs = space_costs(space, table)
    print(
        f"{len(table.timings)} layers on {table.machine}, {table.threads} thread(s), batch "
        f"{table.batch_size}, {table.clock}: networks take {costs.lowest:.3g} to "
        f"{costs.highest:.3g} ms.\n{options.output}"
    )
    for predicted_ms, measured in predictions:
        print(
            f"a random network: predicted {predicted_ms:.3g} ms, measured {measured.median_ms:.3g} "
            f"ms (spread {measured.spread_ms:.2g}), ratio {predicted_ms / measured.median_ms:.2f}"
        )
    return 0


def _ledger(options: argparse.Namespace, overrides: list[str]) -> int:
    """Show or verify a ledger that is there, or a trail: looking at one never creates it."""
    if options.action == "trail":
        from fednas_flwr.clients.audit_trail import verify_trail

        number, last = verify_trail(options.trail)
        print(f"{number} lines, all in their chain; the last one has SHA-256 {last}.")
        return 0
    from fednas_flwr.privacy.ledger import Ledger

    for name, path in (("ledger", options.ledger), ("key", options.key)):
        if not path.is_file():
            raise ConfigError(f"there is no {name} {path}; give the file of a site.")
    if options.action == "show" and not 0 < options.delta < 1:
        raise ConfigError(f"--delta must lie strictly between 0 and 1, got {options.delta:g}.")
    try:
        with Ledger(options.ledger, options.key) as ledger:
            if options.action == "verify":
                print(f"{ledger.verify()} rows, all intact.")
                return 0
            rows = ledger.entries()  # all: a damaged row of another account is damage, too
    except (RuntimeError, OSError) as error:
        return _fail(error, debug=options.debug, is_sentence=True)
    accounts = sorted({row.entry.account for row in rows})
    if options.account is not None and options.account not in accounts:
        raise ConfigError(
            f"nothing is booked on the account {options.account}; there is "
            f"{', '.join(accounts) or 'no row at all'}."
        )
    if rows:
        shown = [row for row in rows if options.account in (None, row.entry.account)]
        _print_statement(shown, options.delta)
    else:
        print("no rows.")
    return 0


def _print_statement(rows: Sequence[Row], delta: float) -> None:
    """Print one line per kind of release, and the epsilon of each account and split."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from fednas_flwr.privacy.statement import make_statement
    from fednas_flwr.reporting.guarantee import epsilon_text

    def name(text: str) -> Text:  # names come from servers and could command a terminal
        return Text(text if text.isprintable() else ascii(text))

    statement = make_statement(rows, delta=delta)
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    columns = (Column(title, overflow="fold") for title in STATEMENT_HEAD)
    booked = Table(*columns, title="what was booked")
    for line in statement.lines:
        times = (datetime.fromtimestamp(t, UTC) for t in (line.first, line.last))
        booked.add_row(
            *(name(text) for text in (line.account, line.run, line.stage, line.verb)),
            *(", ".join(line.splits), f"{line.steps:,}", f"{line.committed_steps:,}"),
            *(f"{line.noise_multiplier:.4g}", f"{line.sample_rate:.4g}"),
            *(f"{time:%Y-%m-%d %H:%M}" for time in times),
        )
    console.print(booked)
    costs = Table("account", "split", "epsilon (PRV)", title=f"all together, at delta {delta:g}")
    for account, epsilons in statement.epsilons.items():
        for split, epsilon in epsilons.items():
            costs.add_row(name(account), split, epsilon_text(epsilon))
    console.print(costs)


def _tables(options: argparse.Namespace, overrides: list[str]) -> int:
    from fednas_flwr.reporting.tables import main as render

    return render([str(options.readme), str(options.readme.parent / "scripts" / "results")])


def _run(options: argparse.Namespace, overrides: list[str]) -> int:
    """Resume a run, or compose, check and run the configuration, or each of a sweep."""
    resumes = [text for text in overrides if text.startswith("resume=")]
    if resumes == ["resume=auto"] and not options.multirun:
        from fednas_flwr.federation.run_folder import find_unfinished

        overrides = [text for text in overrides if text != "resume=auto"]
        found = find_unfinished(parse_config(compose_tree(overrides)))
        if found is not None:
            _execute(found, resumed=True)
            return 0
    elif resumes:
        if len(overrides) > 1 or options.multirun:
            raise ConfigError(
                f"{resumes[0]} takes no other setting: the run's own configuration is used."
            )
        from fednas_flwr.federation.run_folder import open_run_folder

        _execute(open_run_folder(resumes[0].removeprefix("resume=")), resumed=True)
        return 0
    jobs = _expand(overrides) if options.multirun else {"": overrides}
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
    from fednas_flwr.federation.run_folder import create_run_folder

    _execute(create_run_folder(config), resumed=False)
    return 0


def _sweep(configs: dict[str, Config], *, debug: bool) -> int:
    """Run every configuration in a folder of its own name; a failure does not stop the others."""
    from fednas_flwr.federation.run_folder import create_run_folder, sweep_folder

    parent = sweep_folder(next(iter(configs.values())).run_dir)
    configs = {n: replace(config, run_dir=str(parent / n)) for n, config in configs.items()}
    _check(list(configs.values()))
    failed = []
    for number, (name, config) in enumerate(configs.items(), 1):
        print(f"job {number} of {len(configs)}: {name}", flush=True)
        try:
            _execute(create_run_folder(config), resumed=False)
        except Exception as error:
            failed.append(name)
            _fail(error, debug=debug)
    print(f"{len(configs) - len(failed)} of {len(configs)} jobs completed; sweep folder: {parent}")
    if failed:
        print(f"fednas: {len(failed)} jobs failed: {', '.join(failed)}.", file=sys.stderr)
    return RUN_FAILED if failed else 0


def _check(configs: list[Config]) -> None:
    """Raise ConfigError for what files, data and device rule out, before any folder is made."""
    from fednas_flwr.federation.run_folder import check_free

    for config in configs:
        check_free(config)
    from fednas_flwr.builders import check_buildable

    for config in configs:
        if config.runtime.name != "deployment":  # data and genotype lie on other machines
            check_buildable(config)


def _execute(config: Config, *, resumed: bool) -> None:
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


def compose_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """Let Hydra compose ``conf/`` with ``overrides`` and return the tree as plain values.

    Raises:
        ConfigError: An override is malformed, or names a file or key that does not exist.
    """
    for text in overrides:
        _check_override(text)
    # Hydra would know no key inside of a mapping that is empty so far; the parser knows them all.
    overrides = [re.sub(r"^(?=[\w.]+=\{)", "++", text) for text in overrides]
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_folder().resolve())):
        try:
            tree: Any = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
        except (HydraException, OmegaConfBaseException) as error:
            groups = _groups()
            chosen = [text for text in overrides if text.partition("=")[0] in groups]
            known: Any = OmegaConf.to_container(compose("config", chosen))
            for text in overrides:
                _check_key(text.lstrip("+").partition("=")[0], known)
            where = getattr(error, "full_key", None) or "the configuration"
            raise ConfigError(f"{where}: {str(error).splitlines()[0]}.") from error
    return dict(tree)


def _expand(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return the jobs of a sweep, the last key fastest: overrides by the name of the job."""
    choices = []
    for text in overrides:
        override = _parse(text)
        if not override.is_sweep_override():
            choices.append([(text, "")])
        elif override.is_discrete_sweep() and not isinstance(override.value(), Glob):
            key = override.get_key_element()
            short = key.rpartition(".")[2]
            choices.append(
                [
                    (f"{key}={value}", f"{short}-{value}")
                    for value in override.sweep_string_iterator()
                ]
            )
        else:
            raise ConfigError(f"{text} is no list of values: write them out, as in seed=1,2,3.")
    jobs = {}
    for number, job in enumerate(itertools.product(*choices)):
        name = "_".join([str(number), *(part for _, part in job if part)])
        jobs[re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:60]] = [text for text, _ in job]
    return jobs


def _groups() -> dict[str, set[str]]:
    """Return the groups of conf/ and the names that each offers; ``base`` is no choice."""
    return {
        folder.name: {
            path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")
        }
        - {"base"}
        for folder in conf_folder().iterdir()
        if folder.is_dir()
    }


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        raise ConfigError(
            f"{text!r} is not of the form key=value; a value with special characters needs quotes "
            "of its own, as in 'key=\"a=b\"'."
        ) from None


def _check_override(text: str) -> None:
    """Raise ConfigError unless ``text`` sets one value of one key, or chooses a file there is."""
    override = _parse(text)
    key, groups = override.key_or_group, _groups()
    if text[0] in "+~" or override.package is not None:
        raise ConfigError(
            f"{text!r}: settings are neither added nor removed, only set; write {key}=<value>."
        )
    if override.is_sweep_override():
        raise ConfigError(
            f"{text} lists several values: add -m for a sweep over them, or put quotes around a "
            f"single value with a comma, as in '{key}=\"a,b\"'."
        )
    group, _, last = key.rpartition(".")
    if last == "name" and group in groups:
        raise ConfigError(f"{text}: a group is chosen by its own name; write {group}=<name>.")
    if key in groups and override.value() not in groups[key]:
        if not (key == "experiment" and override.value() is None):
            raise unknown_choice(key, override.value(), groups[key])


def _check_key(key: str, tree: dict[str, Any]) -> None:
    """Raise ConfigError, with the nearest spelling of all keys, unless ``key`` is in ``tree``."""
    if key in _groups():
        return
    node: Any = tree
    parent = ""
    for part in key.split("."):
        if isinstance(node, dict) and part in node:
            node, parent = node[part], f"{parent}{part}."
            continue
        if node == {}:
            parent = parent.rstrip(".")
            raise ConfigError(f"{key}: {parent} is set as a whole; write {parent}={{{part}: ...}}.")
        names = ", ".join(f"{parent}{name}" for name in node) if isinstance(node, dict) else "none"
        raise ConfigError(
            f"{key} is no setting: {parent.rstrip('.') or 'the top level'} has {names} "
            f"(nearest: {', '.join(_nearest(key, tree))})."
        )


def _nearest(key: str, tree: dict[str, Any]) -> list[str]:
    """Return all keys of the tree that end in ``key``, or else the one spelt most like it."""
    keys = list(_dotted(tree))
    same_end = [name for name in keys if name.endswith(f".{key}")]

    def likeness(name: str) -> tuple[float, float]:
        end = ".".join(name.split(".")[-1 - key.count(".") :])
        whole = SequenceMatcher(None, key, name).ratio()
        return max(SequenceMatcher(None, key, end).ratio(), whole), whole

    return same_end or [max(keys, key=likeness)]


def _dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every node."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")


if __name__ == "__main__":
    sys.exit(main())
