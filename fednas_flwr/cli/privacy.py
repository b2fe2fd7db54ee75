"""Commands about privacy: audit, calibrate, ledger."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fednas_flwr.api import compose
from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.base.foreign import terminal
from fednas_flwr.cli import INCONCLUSIVE, RUN_FAILED, Commands, add_command
from fednas_flwr.settings.names import LARGEST_EPSILON, LEAST_EPSILON, PRV
from fednas_flwr.settings.parser import Between

if TYPE_CHECKING:
    from fednas_flwr.client.release_guard import Commitment, ReleaseGuard
    from fednas_flwr.privacy.books.ledger import Ledger, Row
    from fednas_flwr.privacy.policy import DataSetPolicy

MOST_STEPS = 10**9  # of `fednas calibrate`
SCHEDULE_HEAD = ["stage", "action", "what", "splits", "steps", "noise multiplier", "clipping norm"]
SCHEDULE_HEAD += ["expected batch", "rate"]
STATEMENT_HEAD = ["account", "run", "stage", "action", "splits", "steps", "committed"]
STATEMENT_HEAD += ["noise multiplier", "rate", "first (UTC)", "last (UTC)"]


def add_commands(commands: Commands) -> None:
    """Add them."""
    parser = add_command(commands, "audit", audit, takes_overrides=True)
    parser.add_argument(
        "--confidence",
        type=float,
        default=0.9999,
        help="with which an honest client passes (default: %(default)g)",
    )
    parser = add_command(commands, "calibrate", calibrate, takes_overrides=True)
    for name, kind, meaning in (
        ("epsilon", float, "the target"),
        ("delta", float, "of the target, above 0, below 1"),
        ("rate", float, "each record's probability of being in a step's batch: B / N"),
        ("steps", int, "how many steps are released"),
    ):
        parser.add_argument(f"--{name}", type=kind, help=meaning)
    approval = add_command(commands, "approve", approve)
    approval.add_argument(
        "hash", nargs="?", help="hash of the schedule, as the run and this list print it"
    )
    for name, default, meaning in (
        ("policy", "policy.yaml", "the site's policy"),
        ("ledger", "state/ledger/ledger.sqlite", "the ledger's file"),
        ("key", "state/ledger.key", "its secret key"),
    ):
        approval.add_argument(
            f"--{name}", type=Path, default=default, help=f"{meaning} (default: %(default)s)"
        )
    ledger = commands.add_parser(
        "ledger", description="what a site has booked of its privacy budgets"
    )
    actions = ledger.add_subparsers(dest="action", required=True, metavar="action")
    show = add_command(actions, "show", show_ledger)
    show.add_argument("--delta", type=float, default=1e-5, help="of epsilon (default: %(default)g)")
    verify = add_command(actions, "verify", verify_ledger)
    for action in (show, verify):
        action.add_argument("ledger", type=Path, help="the ledger's file")
        action.add_argument("--key", type=Path, required=True, help="its secret key")
    trail = add_command(actions, "trail", verify_trail)
    trail.add_argument("trail", type=Path, help="the file, audit.jsonl beside the ledger")
    trail.add_argument("--key", type=Path, required=True, help="the ledger's secret key")


def audit(options: argparse.Namespace, overrides: list[str]) -> int:
    """Plant canaries in a private run: is every release as committed to?

    Takes the overrides of `fednas run`. Exit codes: 0 if nothing is refuted and each kind of
    release could have been, 1 if one is refuted, 3 if one, or a fault of it, could not have been
    seen: inconclusive.
    """
    config = compose(*overrides)
    from fednas_flwr.deploy.audit_run import audit_run

    findings = audit_run(config, confidence=options.confidence)
    for finding in findings:
        print(f"{finding.release}: {finding.seen}".rstrip(": "))
        for fault in finding.faults:
            print(f"  REFUTED: {fault}")
        for unseen in finding.unseen:
            print(f"  not audited: {unseen}")
    print(f"An honest client passes with probability {options.confidence:g} or more.")
    if any(finding.faults for finding in findings):
        print("fednas: the audit refutes what the run commits to.", file=sys.stderr)
        return RUN_FAILED
    if not findings or any(finding.unseen for finding in findings):
        print(
            "fednas: inconclusive: not every fault could have been seen. Less noise or larger "
            "tensors show more.",
            file=sys.stderr,
        )
        return INCONCLUSIVE
    print("The audit does not refute what the run commits to.")
    return 0


def calibrate(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print the least noise that keeps an epsilon: of a run, or of a number of steps.

    With the overrides of `fednas run` it tells what follows from records, budget and noise in that
    run, and why; else give --epsilon, --delta, --rate and --steps.
    """
    steps = {name: getattr(options, name) for name in ("epsilon", "delta", "rate", "steps")}
    if all(value is None for value in steps.values()):
        config = compose(*overrides)
        from fednas_flwr.deploy.dry_run import private_terms

        print("\n".join(private_terms(config)))
        return 0
    missing = [f"--{name}" for name, value in steps.items() if value is None]
    if missing or overrides:
        remedy = f"add {', '.join(missing)}" if missing else f"leave out {show(overrides[0])}"
        raise ConfigError(
            "fednas calibrate takes the overrides of a run, or --epsilon, --delta, --rate and "
            f"--steps together: {remedy}."
        )
    return _calibrate_steps(options)


def _calibrate_steps(options: argparse.Namespace) -> int:
    """Print a noise multiplier, rounded up, and what its steps cost by every accountant."""
    from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
    from fednas_flwr.privacy.mechanism import accounting
    from fednas_flwr.privacy.mechanism.renyi import Release
    from fednas_flwr.report.templates import epsilon_text

    Between(LEAST_EPSILON, LARGEST_EPSILON).check("--epsilon", options.epsilon)
    Between(1, MOST_STEPS).check("--steps", options.steps)
    try:
        least = accounting.calibrate_noise(
            target_epsilon=options.epsilon,
            delta=options.delta,
            sample_rate=options.rate,
            steps=options.steps,
            accountant=accounting.prv_epsilon,
        )
        digit = 10.0 ** (math.floor(math.log10(least)) - 4)
        sigma = float(f"{math.ceil(least / digit) * digit:.5g}")  # as it is printed
        release = Release(noise_multiplier=sigma, sample_rate=options.rate, steps=options.steps)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    print(f"noise_multiplier = {sigma:g}")
    for name, accountant in {
        "PRV": accounting.prv_epsilon,
        "RDP": accounting.rdp_epsilon,
        "GDP, an approximation and no bound": accounting.gdp_epsilon,
        "filter, the budget that a site needs": filter_epsilon,
    }.items():
        epsilon = accountant([release], options.delta)
        text = epsilon_text(epsilon if math.isfinite(epsilon) else None)
        print(f"epsilon = {text} at delta {options.delta:g} ({name})")
    return 0


def approve(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print what runs wait for a person's approval at this site; with a hash, approve one.

    Without options it is for the folder of a provisioned site.
    """
    from fednas_flwr.client.release_guard import ReleaseGuard, read_commitment, schedule_hash
    from fednas_flwr.privacy.mechanism.noise import SecureGenerator
    from fednas_flwr.privacy.policy import load_policy

    policy = load_policy(options.policy)
    with _opened(options) as ledger:
        waiting = {}
        for run, text in ledger.commitments().items():
            allowed = policy.data_sets.get(read_commitment(text).data_set)
            if allowed is not None and allowed.needs_approval and not ledger.is_approved(run):
                waiting[schedule_hash(run, text)] = run, read_commitment(text), allowed
        if options.hash is not None and options.hash not in waiting:
            raise ConfigError(
                f"no schedule {options.hash} waits for approval; there is "
                f"{', '.join(waiting) or 'none at all'}."
            )
        for schedule, (run, commitment, allowed) in waiting.items():
            if options.hash in (None, schedule):
                guard = ReleaseGuard(
                    policy, ledger, SecureGenerator(), data_set=commitment.data_set
                )
                guard.unit = commitment.unit
                _print_schedule(schedule, run, commitment, allowed, guard)
        if options.hash is not None:
            ledger.approve(waiting[options.hash][0])
            print(f"approved {options.hash}.")
        elif not waiting:
            print("nothing waits for approval.")
    return 0


def show_ledger(options: argparse.Namespace, overrides: list[str]) -> int:
    """Print what was booked, and its epsilon."""
    Between(0, 1, above=True, below=True).check("--delta", options.delta)
    with _opened(options) as ledger:
        rows = ledger.entries()
    if rows:
        _print_statement(rows, options.delta)
    else:
        print("no rows.")
    return 0


def verify_ledger(options: argparse.Namespace, overrides: list[str]) -> int:
    """Check every row, the totals and the mark."""
    with _opened(options) as ledger:
        print(f"{ledger.verify()} rows, all intact.")
    return 0


def verify_trail(options: argparse.Namespace, overrides: list[str]) -> int:
    """Check every line and the end of a site's audit trail."""
    from fednas_flwr.client import audit_trail

    print(f"{audit_trail.verify_trail(options.trail, options.key)} lines, all intact.")
    return 0


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[Ledger]:
    """Open a ledger that is there: looking at one never creates it."""
    from fednas_flwr.privacy.books.ledger import Ledger

    for name, path in (("ledger", options.ledger), ("key", options.key)):
        if not path.is_file():
            raise ConfigError(f"there is no {name} {path}; give the file of a site.")
    with Ledger(options.ledger, options.key) as ledger:
        yield ledger


def _print_schedule(
    schedule: str, run: str, commitment: Commitment, allowed: DataSetPolicy, guard: ReleaseGuard
) -> None:
    """Print everything that a run may release, and what that costs."""
    from fednas_flwr.report.templates import epsilon_text, sentence
    from fednas_flwr.report.terminal import print_table, table_console
    from fednas_flwr.settings.names import SPLITS

    table_console().print(f"schedule {schedule}", style="bold")
    print(f"run: {terminal(run)}")
    spent = epsilon_text(guard.spent())
    print(
        f"data set: {guard.data_set}; budget {allowed.account}: epsilon {allowed.epsilon:g} at "
        f"delta {allowed.delta:g} for one {allowed.unit}, of which {spent} is spent"
    )
    rows = [
        [
            *(planned.stage, planned.action, planned.kind, ", ".join(planned.splits)),
            *(f"{planned.steps:,}", f"{planned.noise_multiplier:.4g}"),
            f"{planned.max_grad_norm:g}",
            f"{planned.expected_batch(allowed.by_split):,.4g}",
            f"{planned.rate(allowed.by_split):.4g}",
        ]
        for planned in commitment.releases
    ]
    print_table("what the run may release, at most", SCHEDULE_HEAD, rows)
    if commitment.sizes:
        sizes = " and ".join(f"{size:,} {kind}" for kind, size in commitment.sizes.items())
        print(f"size of the model that is searched: {sizes}")
    prv = guard.epsilons(run)[PRV]
    costs = ", ".join(f"{s} {epsilon_text(prv[s])}" for s in SPLITS if s in prv)
    charged = "" if commitment.by_split else "; every release is charged to all parts"
    print(f"epsilon with all that was booked before (PRV): {costs or '0'}{charged}")
    print(f"{sentence('uncounted', [guard.uncounted()])}\n".lstrip())


def _print_statement(rows: Sequence[Row], delta: float) -> None:
    """Print one line per kind of release, and the epsilon of each account, unit and split.

    Args:
        rows: All of a ledger.
        delta: Of the epsilons.
    """
    from fednas_flwr.privacy.books.ledger import by_kind, epsilons_of
    from fednas_flwr.report.templates import epsilon_text
    from fednas_flwr.report.terminal import print_table

    booked, epsilons = [], epsilons_of(rows, delta=delta)
    for kind in by_kind(rows):
        entry, release = kind[0].entry, kind[0].entry.release
        names = [entry.account, entry.run, entry.stage, entry.action, ", ".join(entry.splits)]
        steps = [f"{sum(row.entry.release.steps for row in kind):,}", f"{entry.committed_steps:,}"]
        noise = [f"{release.noise_multiplier:.4g}", f"{release.sample_rate:.4g}"]
        times = (datetime.fromtimestamp(t, UTC) for t in (kind[0].time, kind[-1].time))
        booked.append([*names, *steps, *noise, *(f"{time:%Y-%m-%d %H:%M}" for time in times)])
    print_table("what was booked", STATEMENT_HEAD, booked)
    costs = [
        [paying, split, epsilon_text(epsilon if math.isfinite(epsilon) else None), unit]
        for (paying, unit), of_splits in epsilons.items()
        for split, epsilon in of_splits.items()
    ]
    head = ("account", "split", "epsilon (PRV)", "for one")
    print_table(f"all together, at delta {delta:g}", head, costs)
    for paying in dict.fromkeys(paying for paying, _ in epsilons):
        others = [f"{other} (per {unit})" for other, unit in epsilons if other != paying]
        if others:
            booked_on = f"{', '.join(others)}, if that was of the same records"
            print(terminal(f"{paying} does not count what was booked on {booked_on}."))
