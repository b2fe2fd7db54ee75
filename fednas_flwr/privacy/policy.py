"""Policy of a site, as a dataclass, and the check of every request against it.

The client decides: ``policy_file`` reads its file; :func:`check_action` and :func:`check_planned`
refuse a request before any data is read. Nothing here counts what was spent or how many steps a
run has taken: a request that passes still needs a reservation in the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.privacy.mechanism.noise_grid import noise_range
from fednas_flwr.privacy.mechanism.shared_noise import SumTerms
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.settings.names import CLIENT, LARGEST_NOISE_MULTIPLIER, SPLITS, Unit

# Beyond these float arithmetic, not privacy, would decide what a release hides.
LEAST_GRAD_NORM, LARGEST_GRAD_NORM = 1e-6, 1e30
LEAST_SAMPLE_RATE = 1e-9
APPROVALS = AUTOMATIC, MANUAL = ("automatic", "manual")


@dataclass(frozen=True)
class DataSetPolicy:
    """Permissions of a site for one data set; ``policy_file.template`` explains every attribute.

    Attributes:
        data_set: The id, which only the policy gives.
        account: The budget that is charged; data sets that overlap name the same one.
        unit: What one of is protected: a ``record``, a ``person`` with all records, or the
            ``client``, the site itself with all of its records.
        largest_noise_multiplier: Above it a release costs next to nothing, however many there are.
        records: Declared, public number of units by split: the only source of rates and weights.
        fractions: Shares of the splits, which the site fixes for good: a record that were in
            another split in another run would be charged to two budgets, each seeing half.
        threads: torch's threads. They and the size of micro-batches decide how results are
            rounded, hence they are the site's: a server could choose them so that one record
            changes the gradients of others.
        micro_batch_size: Records that are computed at a time.
        approve: ``manual``: no run releases anything before a person at the site has approved what
            it has committed to; ``automatic``: the rules of the policy are enough.
        secure_sum: With it the site's replies leave as parts of secure sums only, by these terms.
    """

    data_set: str
    account: str
    epsilon: float
    delta: float
    least_noise_multiplier: float
    largest_grad_norm: float
    largest_steps: int
    actions: frozenset[str]
    unit: Unit
    records: Mapping[str, int]
    fractions: Mapping[str, float]
    threads: int
    micro_batch_size: int
    secure_noise: bool
    test_seed: bool
    approve: str
    secure_sum: SumTerms | None = None
    largest_noise_multiplier: float = 100.0

    @property
    def needs_approval(self) -> bool:
        """True if a person must approve each run."""
        return self.approve == MANUAL


@dataclass(frozen=True)
class Policy:
    """Permissions of the site, by data set id."""

    data_sets: Mapping[str, DataSetPolicy]


def check_action(
    policy: Policy, data_set: str, action: str, *, secure_noise: bool, test_seed: bool
) -> DataSetPolicy:
    """Return the policy of the data set that an action may read; refuse the action otherwise.

    Args:
        policy: The site's.
        data_set: Id that the request names.
        action: What it asks.
        secure_noise: Whether noise and masks come from the client's cryptographic keystream.
        test_seed: Whether that keystream starts from a seed that others know.

    Raises:
        ConfigError: A rule is broken; the sentence names the rule, the value and the limit.
    """
    allowed = _data_set(policy, data_set)
    if action not in allowed.actions:
        raise refused("actions", "action", action, f"one of {', '.join(sorted(allowed.actions))}")
    if allowed.secure_noise and not secure_noise:
        raise refused("secure_noise", "secure_noise", secure_noise, "True")
    if test_seed and not allowed.test_seed:
        raise refused("test_seed", "test_seed", test_seed, "False")
    return allowed


def check_planned(allowed: DataSetPolicy, planned: PlannedRelease, *, num_values: int = 1) -> None:
    """Refuse terms outside the policy or what noise can be added with.

    That the steps of all requests stay within the planned number is checked where they are counted,
    by ``Ledger.reserve``.

    Args:
        allowed: Of the data set.
        planned: What a run means to release, or a request to, with the steps of that.
        num_values: Number of values of each step; 1 while nobody knows.

    Raises:
        ConfigError: A rule is broken; the sentence names the rule, the value and the limit.
    """
    splits = planned.splits
    if not splits or len(set(splits)) != len(splits) or not set(splits) <= set(allowed.records):
        raise refused("splits", "splits", list(splits), f"different ones of {', '.join(SPLITS)}")
    if planned.num_records(allowed.records) == 0:
        raise ConfigError(
            f"refused by the policy, rule records: {' + '.join(splits)} has no declared record."
        )
    size = planned.batch_size
    if size is not None and not 0 < size < math.inf:
        raise refused("sample_rate", "batch_size", size, "above 0, or null for all records")
    if planned.of_client != (allowed.unit == CLIENT):
        limit = f"{not planned.of_client}: this site protects every {allowed.unit}"
        raise refused("unit", "of_client", planned.of_client, limit)
    if planned.of_client and (size is not None or set(splits) != set(SPLITS)):
        raise refused("unit", "batch_size", size, f"null, with splits {', '.join(SPLITS)}")
    one_sum = planned.of_client or len(ACTIONS[planned.action].gradients_of) == 1
    if planned.shared and (allowed.secure_sum is None or not one_sum):
        limit = "False: noise is shared in secure sums of one gradient, or of clients' updates"
        raise refused("secure_sum", f"shared noise of {planned.action}", True, limit)
    terms = {
        "least_noise_multiplier": (
            *("noise_multiplier", planned.noise_multiplier),
            *(allowed.least_noise_multiplier, LARGEST_NOISE_MULTIPLIER),
        ),
        "largest_noise_multiplier": (
            *("noise_multiplier", planned.noise_multiplier),
            *(allowed.least_noise_multiplier, allowed.largest_noise_multiplier),
        ),
        "largest_grad_norm": (
            *("max_grad_norm", planned.max_grad_norm),
            *(LEAST_GRAD_NORM, allowed.largest_grad_norm),
        ),
        "sample_rate": ("sample_rate", planned.rate(allowed.records), LEAST_SAMPLE_RATE, 1),
        "largest_steps": ("steps", planned.steps, 1, allowed.largest_steps),
    }
    for rule, (term, value, least, largest) in terms.items():
        if value is None or not least <= value <= largest:  # NaN is in no range
            raise refused(rule, term, value, f"{least} to {largest}")
    sigma, records = planned.noise_multiplier, sum(allowed.records.values())
    low, high = noise_range(num_values=num_values, num_records=records)
    if sigma is None or not low <= sigma <= high:
        limit = f"{low:.3g} to {high:.3g} for {num_values} values over {records} declared records"
        raise refused("noise grid", "noise_multiplier", sigma, limit)


def refused(rule: str, name: str, value: object, limit: str) -> ConfigError:
    """Return the error for a request that breaks a rule."""
    return ConfigError(f"refused by the policy, rule {rule}: {name}={show(value)}, not {limit}.")


def _data_set(policy: Policy, data_set: str) -> DataSetPolicy:
    """Return the policy of a data set; the other ids of the site are not told."""
    if data_set not in policy.data_sets:
        raise refused("data_sets", "data set", data_set, "an id that this site's policy gives")
    return policy.data_sets[data_set]
