"""Releases that a run plans: one type from the strategy that plans them to the ledger's rows.

A strategy states the :class:`PlannedRelease` objects of every round, the schedule adds them up and
calibrates their noise, a site keeps them in its ledger, and every release is checked against them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS
from fednas_flwr.privacy.mechanism.renyi import Release, poisson_rate
from fednas_flwr.settings.names import SPLITS
from fednas_flwr.settings.parser import Between, Checked, Distinct, Length, OneOf

# At least one split, all different.
Splits = Annotated[
    tuple[Annotated[str, OneOf(SPLITS)], ...], Length(Between(1, len(SPLITS))), Distinct()
]
BySplit = Mapping[str, int]  # numbers of records by split
STATISTICS = "statistics"  # a stage of one exchange before the search; also its kind of release
STAGES = (STATISTICS, "search", "retrain", "evaluate")
KINDS = ("weights", "alphas", "rewards", "metrics", "scores", STATISTICS)


@dataclass(frozen=True)
class PlannedRelease(Checked):
    """One kind of release of a stage: clipped sums over Poisson batches of records, noised.

    Attributes:
        stage: ``statistics``, ``search``, ``retrain`` or ``evaluate``.
        action: The action that is requested of the client.
        kind: ``weights``, ``alphas``, ``rewards``, ``metrics``, ``scores`` or ``statistics``.
        splits: The splits that are read; no others are.
        batch_size: Expected size of a step's batch. A value between 0 and 1 is the rate at which
            each record is drawn, with at least one record expected. None takes all records.
        steps: Number of releases.
        max_grad_norm: R, the norm to which each record's contribution is clipped.
        noise_multiplier: sigma; the noise has std ``sigma * R``. None if it is still to be
            calibrated.
        shared: True if that is the noise of a secure sum's total, of which each client adds a share
            (``noise.add_shared_noise``); otherwise every client adds all of it.
        of_client: True if it is not a sum over records but one contribution of the whole client,
            from all of its records: the unit of privacy is the client.
    """

    stage: Annotated[str, OneOf(STAGES)]
    action: Annotated[str, OneOf(PRIVATE_ACTIONS)]
    kind: Annotated[str, OneOf(KINDS)]
    splits: Splits
    batch_size: Annotated[float, Between(0, above=True)] | None
    steps: int
    max_grad_norm: float
    noise_multiplier: float | None = None
    shared: bool = False
    of_client: bool = False

    @property
    def key(self) -> str:
        """Text that identifies a kind of release; a run has one plan for each."""
        return release_key(self.stage, self.action, self.kind, self.splits)

    @property
    def noise_name(self) -> str:
        """Name of the privacy setting that gives its noise: its kind, or ``retrain``."""
        return "retrain" if self.stage == "retrain" and self.kind == "weights" else self.kind

    def num_records(self, records: BySplit) -> int:
        """Return the number of units in the sum, by declared split: records, persons, a client."""
        return 1 if self.of_client else sum(records[split] for split in self.splits)

    def rate(self, records: BySplit) -> float:
        """Return p, the probability with which a client with these declared records draws each."""
        return poisson_rate(self.batch_size, self.num_records(records))

    def expected_batch(self, records: BySplit) -> float:
        """Return ``p N``, the expected batch size, a public number by which sums are divided."""
        return round(self.rate(records) * self.num_records(records), 9)  # 1 / 49 * 49 < 1

    def sum_range(self, records: BySplit) -> float:
        """Return the largest magnitude of one client's noised sum for which a secure sum has room.

        ``R (B + 6 sqrt(B (1 - p)) + 8 sigma)``, where B is the expected batch size. A Poisson batch
        is larger once in 1e9 times, and the noise of one of a million values once in 1e9.
        """
        return self.clipped_range(records) + 8 * (self.noise_multiplier or 0.0) * self.max_grad_norm

    def clipped_range(self, records: BySplit) -> float:
        """Return the largest magnitude of one client's clipped sum that is not projected."""
        batch, rate = self.expected_batch(records), self.rate(records)
        return self.max_grad_norm * (batch + 6 * math.sqrt(batch * (1 - rate)))

    def release(self, records: BySplit) -> Release:
        """Return the cost of all steps for a client with these declared records.

        Raises:
            ValueError: The noise is not calibrated yet, or a number is out of range.
        """
        if self.noise_multiplier is None:
            raise ValueError(f"the noise of {self.key} is not calibrated yet")
        return Release(
            noise_multiplier=self.noise_multiplier, sample_rate=self.rate(records), steps=self.steps
        )


def release_key(stage: str, action: str, kind: str, splits: tuple[str, ...]) -> str:
    """Return :attr:`PlannedRelease.key`."""
    return f"{stage}/{action}/{kind}/{'+'.join(splits)}"


def of_clients(releases: Iterable[PlannedRelease]) -> list[PlannedRelease]:
    """Return the releases of a round whose unit of privacy is the client.

    A local training, whose steps concern only the client, releases one update of each state;
    clients share its noise. The trials of a probe release only their rewards.

    Args:
        releases: Releases of the same round if the unit is the record.
    """
    return [
        replace(
            release,
            splits=SPLITS,
            batch_size=None,
            steps=release.steps if release.kind == "rewards" else 1,
            shared=release.kind != "rewards",
            of_client=True,
        )
        for release in releases
        if ACTIONS[release.action].trains or release.kind == "rewards"
    ]


_once_of_all = partial(PlannedRelease, batch_size=None, steps=1, max_grad_norm=1.0)


def metrics_release(stage: str, split: str) -> PlannedRelease:
    """Return the release of loss and accuracy over all records of a split."""
    return _once_of_all(stage, "evaluate.model", "metrics", (split,))


def scores_release(*, shared: bool) -> PlannedRelease:
    """Return the release of counts of scores by class, over all records trained on."""
    splits = ("train", "validation")
    return _once_of_all("evaluate", "evaluate.scores", "scores", splits, shared=shared)


def statistics_release(*, shared: bool) -> PlannedRelease:
    """Return the release of means, and of a table's deviations, over all train records."""
    return _once_of_all(STATISTICS, "query.statistics", STATISTICS, ("train",), shared=shared)


def add_up(releases: Iterable[PlannedRelease]) -> list[PlannedRelease]:
    """Return one release of each kind with the steps of all, in the order of first occurrence."""
    total: dict[str, PlannedRelease] = {}
    for release in releases:
        before = total.get(release.key)
        total[release.key] = replace(release, steps=release.steps + (before.steps if before else 0))
    return list(total.values())


def largest_round(rounds: Sequence[Sequence[PlannedRelease]]) -> list[PlannedRelease]:
    """Return, for each kind, the release of the round that has the most steps of it."""
    most: dict[str, PlannedRelease] = {}
    for releases in rounds:
        for release in add_up(releases):
            before = most.get(release.key)
            if before is None or before.steps < release.steps:
                most[release.key] = release
    return list(most.values())
