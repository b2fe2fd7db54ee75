"""The release guard of private mode: the only way for anything about a client's data to leave it.

A private action asks :meth:`ReleaseGuard.admit` for every kind of release before it reads a record,
and gets each noised sum from :meth:`ReleaseGuard.release`, which books it first. Requests are not
trusted: the terms of a release are those that its run has committed to, and public values (batch
sizes, rates, weights) come from the numbers that the policy declares, never from the data. Norms
stated by a caller are not trusted either: noise is scaled by the norm that comes with the sum,
whose type only functions that clip return.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.privacy.books.ledger import Entry, Ledger
from fednas_flwr.privacy.books.renyi_filter import Reading, covered_steps
from fednas_flwr.privacy.mechanism.accounting import ACCOUNTANTS, Accountant, epsilon_per_split
from fednas_flwr.privacy.mechanism.micro_batches import ClippedSum
from fednas_flwr.privacy.mechanism.noise import SecureGenerator, add_noise, add_shared_noise
from fednas_flwr.privacy.mechanism.renyi import Release, booked_unit, counted
from fednas_flwr.privacy.plan import PlannedRelease, release_key
from fednas_flwr.privacy.policy import Policy, check_action, check_planned, refused
from fednas_flwr.protocol.messages import Header, Request
from fednas_flwr.protocol.secure_sum.masks import Cells, Grid
from fednas_flwr.protocol.states import Tensors
from fednas_flwr.settings.names import SPLITS
from fednas_flwr.settings.parser import parse


class Contributions(NamedTuple):
    """The contributions that some units may make to one release.

    Attributes:
        num_units: Number of records or persons; only the draw depends on it.
        total: Given int64 rows of units, possibly none, returns the sum of one clipped contribution
            of each.
    """

    num_units: int
    total: Callable[[torch.Tensor], ClippedSum]


@dataclass(frozen=True)
class Commitment:
    """The commitment of a run, and of a site to that run.

    Attributes:
        releases: The most that may be released.
        assignment: Assignment of records to splits, see :meth:`ReleaseGuard.hold`.
        by_split: True if a release is charged only to the splits that it reads.
        data_set: Id of the data in the policy.
        sizes: Largest number of values of a release of the search, by kind; other releases have no
            limit here.
        unit: Unit of privacy, as the ledger books it.
    """

    releases: tuple[PlannedRelease, ...]
    assignment: str
    by_split: bool
    data_set: str
    sizes: dict[str, int]
    unit: str


def read_commitment(text: str) -> Commitment:
    """Return the commitment that a ledger keeps as text."""
    return parse(Commitment, json.loads(text), key="commitment")


def schedule_hash(run: str, text: str) -> str:
    """Return the 32 hex digits with which a person approves a run's commitment."""
    return hashlib.sha256(json.dumps([run, text]).encode()).hexdigest()[:32]


def _finite(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


@lru_cache(maxsize=64)  # clients of equal plans and ledgers have equal epsilons
def _by_split(
    entries: tuple[tuple[Release | None, tuple[str, ...]], ...], delta: float, of: Accountant
) -> dict[str, float | None]:
    """Return the epsilon of each split by one accountant; None is infinite."""
    by_split = epsilon_per_split(entries, delta, of)
    return {split: _finite(epsilon) for split, epsilon in by_split.items()}


@contextmanager
def before_reading(action: str) -> Iterator[None]:
    """Refuse what cannot be computed; inside, no record is read, so that the reason may be sent.

    A request that failed on some records and not on others would reveal which are there. Everything
    that can fail is therefore tried inside this context. RuntimeError and OSError of the ledger
    concern only the site.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"refused, the settings do not fit {action}: {type(error).__name__}: {error!s:.200}."
        ) from error


def refused_batch_norm() -> ConfigError:
    """Return the error for a network with batch norm."""
    reason = "False: it has no per-record gradient and its buffers leak"
    return refused("no batch_norm", "batch_norm", True, reason)


class ReleaseGuard:
    """A site's policy, ledger and secret randomness, for one data set.

    Args:
        policy: The site's policy.
        ledger: The ledger that books releases.
        generator: Source of masks and noise.
        data_set: Id, in the policy, of the data that this client holds.

    Raises:
        ConfigError: The policy does not have the id.
    """

    def __init__(
        self, policy: Policy, ledger: Ledger, generator: SecureGenerator, *, data_set: str
    ) -> None:
        if data_set not in policy.data_sets:
            names = ", ".join(sorted(policy.data_sets))
            raise ConfigError(f"data set {data_set!r} is not in the site's policy: it has {names}.")
        self._ledger, self._generator = ledger, generator
        self.data_set, self.allowed = data_set, policy.data_sets[data_set]
        self._assignment, self.unit = "", booked_unit(self.allowed.unit, "")
        self._commitments: dict[str, Commitment] = {}

    def hold(self, assignment: str, id_column: str = "") -> None:
        """Set the assignment of records to splits, before any commitment.

        Args:
            assignment: Result of :func:`~fednas_flwr.data.records.assignment_digest`.
            id_column: Column that names the owner of each record; empty if there is none.
        """
        self.unit = booked_unit(self.allowed.unit, id_column)
        self._assignment = self._ledger.fingerprint(self.data_set, assignment)

    @property
    def is_secure(self) -> bool:
        """True if nobody can reproduce masks and noise; False with a test seed."""
        return self._generator.is_secure

    @property
    def properties(self) -> dict[str, Any]:
        """Properties of policy and budget, which do not depend on records."""
        allowed = self.allowed
        terms = allowed.secure_sum
        return {
            "splits": dict(allowed.by_split),
            "data_set": self.data_set,
            "budget": allowed.budget,
            "secure_noise": self.is_secure,
            "unit": allowed.unit,
            "least_noise_multiplier": allowed.least_noise_multiplier,
            "spent": self.spent(),
        } | ({} if terms is None else {"honest_sites": terms.honest})

    def num_records(self, splits: Sequence[str]) -> int:
        """Return the declared number of records of some splits."""
        return sum(self.allowed.by_split[split] for split in splits)

    def expected_batch(self, planned: PlannedRelease) -> float:
        """Return the public expected size of a Poisson batch, by which sums are divided."""
        return planned.expected_batch(self.allowed.by_split)

    def check_action(self, action: str, data_set: str | None) -> None:
        """Refuse an action that the policy does not allow, or a different data set.

        Raises:
            ConfigError: A rule is broken; the message names it.
        """
        policy = Policy({self.data_set: self.allowed})  # the node's other data is not loaded
        check_action(policy, data_set, action, is_secure=self.is_secure)

    def check_plan(self, plan: Sequence[PlannedRelease]) -> None:
        """Refuse a plan with a term that the policy refuses, or with two releases of one kind.

        Raises:
            ConfigError: A rule is broken; the message names it.
        """
        for planned in plan:
            check_planned(self.allowed, planned)
            self.check_action(planned.action, self.data_set)
        if len({planned.key for planned in plan}) < len(plan):
            raise ConfigError("refused: the plan holds a kind of release twice.")

    def commit(
        self, run: str, plan: Sequence[PlannedRelease], *, sizes: Mapping[str, int] = {}
    ) -> None:
        """Keep a run's plan permanently; everything that the run asks for later must be in it.

        Args:
            run: Name of the run.
            plan: Everything that the run may release.
            sizes: See :class:`Commitment`.

        Raises:
            ConfigError: The policy refuses a term, or the run has committed to another plan.
        """
        self.check_plan(plan)
        if not self._assignment:
            raise ValueError("a guard commits to nothing before it holds records: call hold first")
        releases = tuple(sorted(plan, key=lambda planned: planned.key))
        by_split, sizes = self._pays_by_split(), dict(sizes)
        commitment = Commitment(
            releases, self._assignment, by_split, self.data_set, sizes, self.unit
        )
        self._ledger.commit(run, json.dumps(asdict(commitment), sort_keys=True))

    def awaited_approval(self, run: str) -> str | None:
        """Return the hash that a person must approve before the run gets anything; else None."""
        if not self.allowed.needs_approval or self._ledger.is_approved(run):
            return None
        text = self._ledger.committed(run)
        return None if text is None else schedule_hash(run, text)

    def epsilons(self, run: str) -> dict[str, dict[str, float | None]]:
        """Return the epsilon of each split at the policy's delta, by accountant; None is infinite.

        It composes everything that other runs have booked on the same budget with the whole plan
        that this run has committed to.
        """
        commitment = self._commitment(run)
        releases = [
            (counted(row.entry.release, row.entry.unit, self.unit), row.entry.splits)
            for row in self._ledger.entries(self.allowed.account)
            if row.entry.run != run
        ]
        if commitment is not None:
            releases += [self._reading(p, commitment.by_split) for p in commitment.releases]
        delta = self.allowed.delta
        return {n: _by_split(tuple(releases), delta, of) for n, of in ACCOUNTANTS.items()}

    def covered_steps(self, plan: Sequence[PlannedRelease]) -> dict[str, int]:
        """Return the number of steps of each stage of a plan that the remaining budget covers.

        It is computed with the filter that enforces the budget, from ledger, policy and plan alone.
        """
        allowed, by_split = self.allowed, self._pays_by_split()
        stages: dict[str, list[Reading]] = {}
        for planned in plan:
            stages.setdefault(planned.stage, []).append(self._reading(planned, by_split))
        filters = self._ledger.filters(allowed.account, self.unit, **allowed.budget)
        return covered_steps(filters, stages)

    def spent(self) -> float | None:
        """Return the used part of the budget's epsilon, as enforcement counts it.

        None means infinite: the budget has paid for another unit of privacy.
        """
        allowed = self.allowed
        return _finite(self._ledger.spent(allowed.account, self.unit, **allowed.budget))

    def uncounted(self) -> dict[str, list[str]]:
        """Return, as a property, the units of releases under this site's other budgets, if any.

        Those releases may be of the same records, and this budget does not count them.
        """
        units = self._ledger.units_of_others(self.allowed.account)
        return {"uncounted": units} if units else {}

    def admit(
        self,
        header: Header,
        action: str,
        kind: str,
        *,
        splits: tuple[str, ...],
        steps: int = 1,
        num_values: int = 1,
    ) -> PlannedRelease:
        """Return the plan of a kind of release; reads no record and books nothing.

        Args:
            header: Header of the request; it names run and stage.
            action: The action that was requested.
            kind: One of ``privacy.plan.KINDS``.
            splits: Splits that the release reads.
            steps: Number of releases that the request asks for.
            num_values: Number of values of each release.

        Raises:
            ConfigError: The run has not committed to it, or a rule is broken; the message names it.
        """
        self.check_action(action, self.data_set)
        key = release_key(header.stage, action, kind, splits)
        commitment = self._commitment(header.run)
        releases = () if commitment is None else commitment.releases
        planned = next((planned for planned in releases if planned.key == key), None)
        if planned is None:
            raise refused("committed values", "release", key, "one in the run's first message")
        if planned.shared and steps != 1:
            raise refused("secure_sum", "steps of shared noise", steps, "1 per request")
        if not 1 <= steps <= planned.steps:
            limit = f"1 to at most the committed {planned.steps}"
            raise refused("committed values", "steps", steps, limit)
        if (awaited := self.awaited_approval(header.run)) is not None:
            raise refused("approve", "schedule", awaited, "approved by a person at the site yet")
        self.check_size(planned, header.run, num_values)
        return planned

    def check_size(self, planned: PlannedRelease, run: str, num_values: int) -> None:
        """Refuse a release of more values than the run has committed to, or than its noise is for.

        Raises:
            ConfigError: The release has too many values; the message names the rule.
        """
        commitment, kind = self._commitment(run), planned.kind
        sizes = commitment.sizes if commitment and planned.stage == "search" else {}
        if num_values > (most := sizes.get(kind, num_values)):
            raise refused("committed values", f"number of {kind}", num_values, f"at most {most}")
        check_planned(self.allowed, planned, num_values=num_values)

    def answer(
        self, planned: PlannedRelease, request: Request, units: Contributions
    ) -> Tensors | Cells:
        """Return the result of :meth:`release`, or of :meth:`share` if clients share the noise."""
        if planned.shared:
            return self.share(planned, request.header, units, grid=request.grids.get(planned.kind))
        return self.release(planned, request.header, units)

    def release(self, planned: PlannedRelease, header: Header, units: Contributions) -> Tensors:
        """Book one step, draw its Poisson batch and return the noised sum over it.

        Args:
            planned: Result of :meth:`admit`; its noise is not shared.
            header: Header of the request.
            units: The contributions to sum.

        Returns:
            float32 tensors on the CPU, by name: the sum plus noise of std ``sigma`` times its norm.

        Raises:
            BudgetExceededError: The budget does not cover the step; nothing was read.
            ConfigError: The run has booked all steps that it committed to.
        """
        if planned.shared:
            raise ValueError("noise that is shared is no client's whole noise: call share")
        sums, total, sigma = self._booked_sum(planned, header, units)
        generator, norm = self._generator, sums.norm
        noised = add_noise(total, generator, noise_multiplier=sigma, max_grad_norm=norm).float()
        parts = torch.split(noised, [tensor.numel() for tensor in sums.values()])
        return {n: part.view(sums[n].shape) for n, part in zip(sums, parts, strict=True)}

    def share(
        self, planned: PlannedRelease, header: Header, units: Contributions, *, grid: Grid | None
    ) -> Cells:
        """Book one step and return this client's sum with its share of a secure sum's noise.

        Args:
            planned: Result of :meth:`admit`; its noise is shared.
            header: Header of the request.
            units: The contributions to sum, each of norm at most ``max_grad_norm``.
            grid: Grid of the secure sum; its range has room for the total with all clients' noise.

        Raises:
            BudgetExceededError: The budget does not cover the step; nothing was read.
            ConfigError: The run has booked all steps that it committed to, or the sum has no room.
        """
        terms, needed = self.allowed.secure_sum, planned.sum_range(self.allowed.by_split)
        if not planned.shared or terms is None or grid is None or grid.range < needed:
            width = 0.0 if grid is None else grid.range
            raise refused("secure_sum", f"range of {planned.kind}", width, f"{needed:g} or more")
        sums, total, sigma = self._booked_sum(planned, header, units)
        if sums.norm > planned.max_grad_norm:
            limit = f"at most the {planned.max_grad_norm:g} that all sites have committed to"
            raise refused("secure_sum", f"norm of {planned.kind}", sums.norm, limit)
        most = planned.clipped_range(self.allowed.by_split)
        noised = add_shared_noise(
            total.clamp(-most, most),  # before the noise: this moves no two totals further apart
            self._generator,
            noise_multiplier=sigma,
            max_grad_norm=planned.max_grad_norm,
            cell=grid.cell,
            honest=terms.honest,
        )
        return Cells(noised.numpy())

    def _booked_sum(
        self, planned: PlannedRelease, header: Header, units: Contributions
    ) -> tuple[ClippedSum, torch.Tensor, float]:
        """Book one step and draw its batch; return the sum over it, its values [d], and sigma."""
        allowed, commitment = self.allowed, self._commitment(header.run)
        assert commitment is not None  # planned belongs to it
        mechanism, splits = self._reading(replace(planned, steps=1), commitment.by_split)
        # The noise of the booked row is that of the sum. Someone who breaks the sum gets a release
        # with this site's share alone: ``1 / sqrt(h)`` of it.
        terms = allowed.secure_sum if planned.shared else None
        note = "" if terms is None else f" (noise of {terms.honest} sites)"
        entry = Entry(
            account=allowed.account,
            data_set=self.data_set,
            run=header.run,
            stage=header.stage,
            round=header.round,
            action=f"{planned.action}:{planned.kind}{note}",
            splits=splits,
            release=mechanism,
            committed_steps=planned.steps,
            unit=self.unit,
        )
        self._ledger.reserve(entry, **allowed.budget, assignment=self._assignment)
        mask = self._generator.poisson_mask(units.num_units, probability=mechanism.sample_rate)
        sums = units.total(mask.nonzero().flatten())
        if not isinstance(sums, ClippedSum):
            raise TypeError(f"{type(sums).__name__} says no norm that its noise could be scaled by")
        parts = [tensor.detach().reshape(-1).cpu().double() for tensor in sums.values()]
        return sums, torch.cat(parts), mechanism.noise_multiplier

    def _pays_by_split(self) -> bool:
        """Return True if a release is charged only to the splits that it reads."""
        return self._ledger.is_first(self.allowed.account, self._assignment)

    def _reading(self, planned: PlannedRelease, by_split: bool) -> tuple[Release, tuple[str, ...]]:
        """Return the release of all steps of a plan, and the splits to which it is charged."""
        return planned.release(self.allowed.by_split), planned.splits if by_split else SPLITS

    def _commitment(self, run: str) -> Commitment | None:
        """Return the commitment of a run; None if there is none.

        Raises:
            ConfigError: At that time the client held other records, or had them in other splits.
        """
        if run not in self._commitments:
            text = self._ledger.committed(run)
            if text is None:
                return None
            self._commitments[run] = read_commitment(text)
        commitment = self._commitments[run]
        if self._assignment not in ("", commitment.assignment):
            raise ConfigError(
                f"refused: since run {run} committed to its schedule, the records of this site or "
                "their splits have changed: start a new run."
            )
        return commitment
