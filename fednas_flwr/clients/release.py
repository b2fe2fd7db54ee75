"""The release gate of private mode: the only way in which anything of a client's data leaves it.

A private verb asks :meth:`ReleaseGate.admit` for every kind of release before it reads a record,
and gets each noised sum from :meth:`ReleaseGate.release`, which books it first. Requests are not
trusted; what is public (batch sizes, rates, weights) comes from the numbers that the policy
declares, never from the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.messages import Header, Request
from fednas_flwr.exchange.states import Tensors
from fednas_flwr.privacy.accounting import ACCOUNTANTS, epsilon_per_split
from fednas_flwr.privacy.ledger import Entry, Ledger
from fednas_flwr.privacy.noise import SecureGenerator, add_noise
from fednas_flwr.privacy.policy import (
    Asked,
    Commitment,
    DataSetPolicy,
    Policy,
    check_commitment,
    check_request,
    show,
)
from fednas_flwr.privacy.renyi import poisson_rate
from fednas_flwr.privacy.renyi_filter import Reading, covered_steps


@dataclass(frozen=True)
class Admission:
    """A kind of release that the policy allows this request.

    Attributes:
        allowed: The policy of the data set.
        split: Name of what it reads, and of nothing else: ``train``, ``train+validation``, ...
        terms: Noise, rate and clipping norm of each step.
        batch_size: Expected size of a Poisson batch, ``rate * declared records``: public.
        entry: What each step is booked as.
    """

    allowed: DataSetPolicy
    split: str
    terms: Commitment
    batch_size: float
    entry: Entry


class ReleaseGate:
    """A site's policy, ledger and secret randomness, for one data set.

    Args:
        policy: What the site allows.
        ledger: Where releases are booked.
        generator: Of masks and noise.
        data_set: The policy's id of the data that this client holds.

    Raises:
        ConfigError: The policy does not know the id.
    """

    def __init__(  # noqa: D107
        self, policy: Policy, ledger: Ledger, generator: SecureGenerator, *, data_set: str
    ) -> None:
        if data_set not in policy.data_sets:
            known = ", ".join(sorted(policy.data_sets))
            raise ConfigError(f"data set {data_set!r} is not in the site's policy: it has {known}.")
        self._policy, self._ledger, self._generator = policy, ledger, generator
        self.data_set, self.allowed = data_set, policy.data_sets[data_set]
        self._commitments: dict[str, dict[str, Commitment]] = {}

    @property
    def is_secure(self) -> bool:
        """Whether nobody can repeat masks and noise; False with a test seed."""
        return self._generator.is_secure

    def num_records(self, splits: Sequence[str]) -> int:
        """Return the declared number of records of some splits."""
        return sum(self.allowed.records[split] for split in splits)

    def commit(self, header: Header, schedule: Sequence[Mapping[str, Any]]) -> None:
        """Keep the run's terms for good; all its later requests must keep to them.

        Args:
            header: Of the request; names the run.
            schedule: One mapping per kind of release: ``stage``, ``verb``, ``kind``, ``splits``,
                ``noise_multiplier``, ``batch_size``, ``steps`` and ``max_grad_norm``.

        Raises:
            ConfigError: The policy refuses a term, or the run has committed to others.
        """
        terms = self.check_schedule(schedule)
        text = json.dumps({key: vars(value) for key, value in terms.items()}, sort_keys=True)
        self._ledger.commit(header.run, text)

    def check_schedule(self, schedule: Sequence[Mapping[str, Any]]) -> dict[str, Commitment]:
        """Return the terms of each kind of release of a schedule, see :meth:`commit`.

        Raises:
            ConfigError: The policy refuses a term.
        """
        terms: dict[str, Commitment] = {}
        for item in schedule:
            splits = tuple(item["splits"])
            if len(set(splits)) != len(splits):
                raise ConfigError(
                    f"a schedule with splits={show(splits)}: expected different ones."
                )
            commitment = self._terms(item, splits, item["steps"])
            check_commitment(self._policy, self.data_set, commitment)
            terms[_key(item["stage"], item["verb"], item["kind"], splits)] = commitment
        return terms

    def epsilons(self, header: Header) -> dict[str, dict[str, float | None]]:
        """Return the epsilon of each split at the policy's delta, by accountant; None is infinite.

        Composed are all that other runs have booked on the same budget, and the whole schedule
        that this run has committed to.
        """
        releases = [
            (row.entry.release, row.entry.splits)
            for row in self._ledger.entries(self.allowed.account)
            if row.entry.run != header.run
        ]
        for key, terms in self._committed(header.run).items():
            splits = tuple(key.rpartition("/")[2].split("+"))
            charged = self._policy.charged_splits(self.data_set, splits)
            releases.append((terms.release(), charged))
        return {
            name: {
                split: epsilon if math.isfinite(epsilon) else None
                for split, epsilon in epsilon_per_split(
                    releases, self.allowed.delta, accountant
                ).items()
            }
            for name, accountant in ACCOUNTANTS.items()
        }

    def covered_steps(self, schedule: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """Return how many steps of each stage of a schedule what is left of the budget covers.

        By the filter that enforces it, from ledger, policy and schedule alone.
        """
        allowed = self.allowed
        stages: dict[str, list[Reading]] = {}
        for item in schedule:
            splits = tuple(item["splits"])
            release = self._terms(item, splits, item["steps"]).release()
            charged = self._policy.charged_splits(self.data_set, splits)
            stages.setdefault(item["stage"], []).append((release, charged))
        left = self._ledger.filters(allowed.account, epsilon=allowed.epsilon, delta=allowed.delta)
        return covered_steps(left, stages)

    def spent(self) -> float:
        """Return how much of the budget's epsilon is used, as enforcement counts it."""
        allowed = self.allowed
        return self._ledger.spent(allowed.account, epsilon=allowed.epsilon, delta=allowed.delta)

    def check_public(self, verb: str, data_set: str) -> None:
        """Refuse a verb that releases nothing unless the policy allows it, and another data set.

        Raises:
            ConfigError: A rule is broken; the sentence names it.
        """
        asked = Asked(data_set, verb, release=None)
        check_request(Policy({self.data_set: self.allowed}), asked, committed=None)

    def admit(
        self,
        request: Request,
        kind: str,
        *,
        splits: tuple[str, ...],
        steps: int = 1,
        num_values: int = 1,
        batch_norm: bool = False,
    ) -> Admission:
        """Return what a request may release of one kind; reads no record and books nothing.

        Args:
            request: Names the data set; ``releases[kind]`` holds the terms.
            kind: ``weights``, ``alphas``, ``rewards`` or ``metrics``.
            splits: What the release reads.
            steps: Number of releases that the request asks for.
            num_values: Number of values of each release.
            batch_norm: Whether the network normalises over a batch.

        Raises:
            ConfigError: A rule is broken; the sentence names it.
        """
        header, settings = request.header, request.settings
        wanted = settings.get("releases", {}).get(kind)
        release = None if wanted is None else self._terms(wanted, splits, steps)
        asked = Asked(
            data_set=settings.get("data_set", ""),
            verb=request.verb,
            release=release,
            num_values=num_values,
            order=settings.get("order", 1),
            batch_norm=batch_norm,
            oversampling=settings.get("oversampling", False),
            raw_metrics=settings.get("raw_metrics", False),
            secure_noise=self.is_secure,
            test_seed=not self.is_secure,
        )
        own = Policy({self.data_set: self.allowed})  # the node's other data is not loaded
        key = _key(header.stage, request.verb, kind, splits)
        committed = self._committed(header.run).get(key)
        allowed = check_request(own, asked, committed=committed)
        assert release is not None  # check_request refuses it
        assert committed is not None
        entry = Entry(
            account=allowed.account,
            data_set=self.data_set,
            run=header.run,
            stage=header.stage,
            round=header.round,
            verb=f"{request.verb}:{kind}",
            splits=self._policy.charged_splits(self.data_set, splits),
            release=replace(release, steps=1).release(),
            committed_steps=committed.steps,
        )
        batch_size = round(release.sample_rate * self.num_records(splits), 9)  # 1 / 49 * 49 < 1
        return Admission(allowed, "+".join(splits), release, batch_size, entry)

    def release(
        self, admission: Admission, num_records: int, clipped_sum: Callable[[Tensor], Tensors]
    ) -> Tensors:
        """Book one step, draw its Poisson batch and return the noised sum over it.

        Args:
            admission: From :meth:`admit`.
            num_records: How many records there are; the draw alone depends on it.
            clipped_sum: Given int64 rows of the drawn records (maybe none), returns a sum of one
                contribution per record, whose joint norm over all tensors is at most
                ``admission.terms.max_grad_norm``.

        Returns:
            float32 tensors on the CPU, by name: ``clipped_sum`` plus noise of std ``sigma * R``.

        Raises:
            BudgetExceededError: The budget does not cover the step; nothing was read.
            ConfigError: The run has booked all steps that it committed to.
        """
        allowed, terms = admission.allowed, admission.terms
        self._ledger.reserve(admission.entry, epsilon=allowed.epsilon, delta=allowed.delta)
        mask = self._generator.poisson_mask(num_records, probability=terms.sample_rate)
        sums = clipped_sum(mask.nonzero().flatten())
        flat = torch.cat([tensor.detach().reshape(-1).cpu().double() for tensor in sums.values()])
        noised = add_noise(
            flat,
            self._generator,
            noise_multiplier=terms.noise_multiplier,
            max_grad_norm=terms.max_grad_norm,
        ).float()
        parts = torch.split(noised, [tensor.numel() for tensor in sums.values()])
        return {n: part.view(sums[n].shape) for n, part in zip(sums, parts, strict=True)}

    def _terms(self, item: Mapping[str, Any], splits: tuple[str, ...], steps: int) -> Commitment:
        """Return the terms with the rate that the declared number of records gives."""
        batch_size, records = item["batch_size"], self.num_records(splits)
        if records == 0:
            raise ConfigError(
                f"refused by the policy, rule records: {' + '.join(splits)} has no declared record."
            )
        rate = batch_size  # which the policy refuses, unless
        if batch_size is None or (type(batch_size) in (int, float) and batch_size < math.inf):
            rate = poisson_rate(batch_size, records)
        return Commitment(
            noise_multiplier=item["noise_multiplier"],
            sample_rate=rate,
            steps=steps,
            max_grad_norm=item["max_grad_norm"],
        )

    def _committed(self, run: str) -> dict[str, Commitment]:
        """Return what a run has committed to, by stage, verb and splits."""
        if run not in self._commitments:
            text = self._ledger.committed(run)
            if text is None:
                return {}
            self._commitments[run] = {k: Commitment(**v) for k, v in json.loads(text).items()}
        return self._commitments[run]


def _key(stage: str, verb: str, kind: str, splits: tuple[str, ...]) -> str:
    return f"{stage}/{verb}/{kind}/{'+'.join(splits)}"
