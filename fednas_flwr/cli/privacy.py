"""Commands about privacy: audit, calibrate, approve, ledger."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fednas_flwr.api import compose
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.foreign import terminal
from fednas_flwr.cli import INCONCLUSIVE, RUN_FAILED, Handler
from fednas_flwr.report.templates import epsilon_text, sentence
from fednas_flwr.settings.names import PRV, SPLITS
from fednas_flwr.settings.parser import Between

if TYPE_CHECKING:
    from fednas_flwr.client.release_guard import Commitment, ReleaseGuard
    from fednas_flwr.privacy.books.ledger import Ledger, Row
    from fednas_flwr.privacy.policy import DataSetPolicy

STATEMENT_HEAD = ["account", "run", "stage", "action", "splits", "steps", "committed"]
STATEMENT_HEAD += ["noise multiplier", "rate", "first (UTC)", "last (UTC)"]


def audit(*, confidence: float = 0.9999, overrides: Sequence[str]) -> int:
    """Plant canaries in a private run, to test whether every release is as committed.

    Takes the overrides of `fednas run`. Exit codes: 0 if no release is refuted and every kind of
    release could have been; 1 if one is refuted; 3 (inconclusive) if a kind of release, or a fault
    in it, could not have been detected.

    Args:
        confidence: probability with which an honest client passes
        overrides: see above
    """
    config = compose(*overrides)
    from fednas_flwr.deploy.audit_run import audit_run

    findings = audit_run(config, confidence=confidence)
    for finding in findings:
        print(f"{finding.release}: {finding.seen}".rstrip(": "))
        for fault in finding.faults:
            print(f"  REFUTED: {fault}")
        for unseen in finding.unseen:
            print(f"  not audited: {unseen}")
    print(f"An honest client passes with probability {confidence:g} or more.")
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


def calibrate(*, overrides: Sequence[str]) -> None:
    """Print the noise, batches and learning rate of a private run, and what each follows from.

    Args:
        overrides: those of fednas run
    """
    config = compose(*overrides)
    from fednas_flwr.deploy.dry_run import private_terms

    print("\n".join(private_terms(config)))


def approve(
    hash: str | None = None,
    *,
    policy: Path = Path("policy.yaml"),
    ledger: Path = Path("state/ledger/ledger.sqlite"),
    key: Path = Path("state/ledger.key"),
) -> None:
    """Print the runs that wait for a person's approval at this site; with a hash, approve one.

    The default options are for the folder of a provisioned site.

    Args:
        hash: hash of the schedule, as printed by the run and in this list
        policy: the site's policy
        ledger: the ledger's file
        key: its secret key
    """
    from fednas_flwr.client.release_guard import ReleaseGuard, read_commitment, schedule_hash
    from fednas_flwr.privacy.mechanism.noise import SecureGenerator
    from fednas_flwr.privacy.policy import load_policy

    rules = load_policy(policy)
    with _opened(ledger, key) as booked:
        waiting, answered = {}, {row.entry.run for row in booked.entries()}
        for run, text in booked.commitments().items():
            allowed = rules.data_sets.get(read_commitment(text).data_set)
            is_done = booked.is_approved(run) or (hash is None and run in answered)
            if allowed is not None and allowed.needs_approval and not is_done:
                waiting[schedule_hash(run, text)] = run, read_commitment(text), allowed
        if hash is not None and hash not in waiting:
            raise ConfigError(
                f"no schedule {hash} waits for approval; there is {', '.join(waiting) or 'none'}."
            )
        for schedule, (run, commitment, allowed) in waiting.items():
            if hash in (None, schedule):
                guard = ReleaseGuard(rules, booked, SecureGenerator(), data_set=commitment.data_set)
                guard.unit = commitment.unit
                _print_schedule(schedule, run, commitment, allowed, guard)
        if hash is not None:
            booked.approve(waiting[hash][0])
            print(f"approved {hash}.")
        elif not waiting:
            print("nothing waits for approval.")


def show_ledger(ledger: Path, *, key: Path, delta: float = 1e-5) -> None:
    """Print the releases booked in a ledger, and their epsilon.

    Args:
        ledger: the ledger's file
        key: its secret key
        delta: the delta of this epsilon
    """
    Between(0, 1, above=True, below=True).check("--delta", delta)
    with _opened(ledger, key) as booked:
        rows = booked.entries()
    if rows:
        _print_statement(rows, delta)
    else:
        print("no rows.")


def verify_ledger(ledger: Path, *, key: Path) -> None:
    """Check every row of a ledger, the totals and the mark.

    Args:
        ledger: the ledger's file
        key: its secret key
    """
    with _opened(ledger, key) as booked:
        print(f"{booked.verify()} rows, all intact.")


def verify_trail(trail: Path, *, key: Path) -> None:
    """Check every line and the end of a site's audit trail.

    Args:
        trail: the file, audit.jsonl beside the ledger
        key: the ledger's secret key
    """
    from fednas_flwr.client import audit_trail

    print(f"{audit_trail.verify_trail(trail, key)} lines, all intact.")


@contextmanager
def _opened(ledger: Path, key: Path) -> Iterator[Ledger]:
    """Open an existing ledger; reading never creates one."""
    from fednas_flwr.privacy.books.ledger import Ledger

    for name, path in (("ledger", ledger), ("key", key)):
        if not path.is_file():
            raise ConfigError(f"there is no {name} {path}; give the file of a site.")
    with Ledger(ledger, key) as opened:
        yield opened


def _print_schedule(
    schedule: str, run: str, commitment: Commitment, allowed: DataSetPolicy, guard: ReleaseGuard
) -> None:
    """Print everything that a run may release, and its cost."""
    from fednas_flwr.report.score_tables import Cells, rows_of
    from fednas_flwr.report.terminal import print_table, table_console

    table_console().print(f"schedule {schedule}", style="bold")
    print(f"run: {terminal(run)}")
    spent = epsilon_text(guard.spent())
    print(
        f"data set: {guard.data_set}; budget {allowed.account}: epsilon {allowed.epsilon:g} at "
        f"delta {allowed.delta:g} for one {allowed.unit}, of which {spent} is spent"
    )
    columns: Cells = [
        ("stage", lambda planned: planned.stage),
        ("action", lambda planned: planned.action),
        ("what", lambda planned: planned.kind),
        ("splits", lambda planned: ", ".join(planned.splits)),
        ("steps", lambda planned: f"{planned.steps:,}"),
        ("noise multiplier", lambda planned: f"{planned.noise_multiplier:.4g}"),
        ("clipping norm", lambda planned: f"{planned.max_grad_norm:g}"),
        ("expected batch", lambda planned: f"{planned.expected_batch(allowed.by_split):,.4g}"),
        ("rate", lambda planned: f"{planned.rate(allowed.by_split):.4g}"),
    ]
    print_table("what the run may release, at most", *rows_of(commitment.releases, columns))
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
        rows: All rows of a ledger.
        delta: Delta of the epsilons.
    """
    from fednas_flwr.privacy.books.ledger import by_kind, epsilons_of
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
        [paying, split, epsilon_text(epsilon), unit]
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


COMMANDS: dict[str, Handler] = {"audit": audit, "calibrate": calibrate, "approve": approve}
GROUPS: dict[str, tuple[str, dict[str, Handler]]] = {
    "ledger": (
        "what a site has booked of its privacy budgets",
        {"show": show_ledger, "verify": verify_ledger, "trail": verify_trail},
    )
}
