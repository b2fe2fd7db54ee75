"""What a site allows, as a dataclass, and the check of every request against it.

The client decides, whatever the server asks: ``policy_file`` reads the site's file, and
:func:`check_request` refuses a request, with the rule that it breaks, before any data is read.
Nothing here counts what was spent or how many steps a run has taken: a request that passes still
needs a reservation in the ledger.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass

from fednas_flwr.errors import ConfigError
from fednas_flwr.names import LARGEST_NOISE_MULTIPLIER, SPLITS
from fednas_flwr.privacy.noise import noise_range
from fednas_flwr.privacy.renyi import Release

PUBLIC_VERBS = (
    "query.describe",
    "query.commit",
    "query.latency",
)  # they release nothing of the data
NEVER_PRIVATE = ("evaluate.personalised",)  # accuracy after training without noise

# Beyond these float arithmetic, not privacy, would decide what a release hides.
LEAST_GRAD_NORM, LARGEST_GRAD_NORM = 1e-6, 1e30
LEAST_SAMPLE_RATE = 1e-9


@dataclass(frozen=True)
class Commitment:
    """The terms of one kind of release, which a run commits to in its first message.

    Attributes:
        noise_multiplier: sigma; the noise has std ``sigma * R``.
        sample_rate: p, each record's probability of being in a step's batch; 1 reads all.
        steps: T, the number of steps of the whole run; in :class:`Asked` those of one request.
        max_grad_norm: R, the norm that each record's contribution is clipped to.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    max_grad_norm: float

    def release(self) -> Release:
        """Return what all the steps cost."""
        return Release(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=self.steps,
        )


@dataclass(frozen=True)
class Asked:
    """What a request asks for; nothing in it is trusted, not even the types.

    Attributes:
        data_set: Id that the request names.
        verb: What is asked, e.g. ``train.search``.
        release: Terms of the noised release; None for the verbs that release nothing.
        num_values: Number of values of each step; 1 while nobody knows.
        order: Order of the alpha gradient.
        batch_norm: Whether the module normalises over a batch.
        oversampling: Whether a record can be in one batch more than once.
        raw_metrics: Whether losses, accuracies or counts would leave without noise.
        secure_noise: Whether noise and masks come from the client's cryptographic keystream.
        test_seed: Whether that keystream starts from a seed that others know.
    """

    data_set: str
    verb: str
    release: Commitment | None
    num_values: int = 1
    order: int = 1
    batch_norm: bool = False
    oversampling: bool = False
    raw_metrics: bool = False
    secure_noise: bool = True
    test_seed: bool = False


@dataclass(frozen=True)
class DataSetPolicy:
    """What the site allows on one data set; ``policy_file.template`` explains every attribute.

    Attributes:
        data_set: The id, which only the policy gives.
        account: The budget that is charged; data sets that overlap name the same one.
        records: Declared, public number of records by split: the only source of rates and weights.
        fractions: Shares of the splits, which the site fixes for good: a record that were in
            another split in another run would be charged to two budgets, each seeing half.
    """

    data_set: str
    account: str
    epsilon: float
    delta: float
    least_noise_multiplier: float
    largest_grad_norm: float
    largest_steps: int
    verbs: frozenset[str]
    records: Mapping[str, int]
    fractions: Mapping[str, float]
    secure_noise: bool
    test_seed: bool


@dataclass(frozen=True)
class Policy:
    """What the site allows, by data set id."""

    data_sets: Mapping[str, DataSetPolicy]

    def charged_splits(self, data_set: str, splits: tuple[str, ...]) -> tuple[str, ...]:
        """Return the splits that a release which reads ``splits`` must be booked on.

        Where several data sets share an account, a record may be in different splits of them. The
        client's epsilon is that of its worst split, which counts all that such a record has paid
        only if every release is charged to every split.
        """
        accounts = [allowed.account for allowed in self.data_sets.values()]
        shared = accounts.count(self.data_sets[data_set].account) > 1
        return SPLITS if shared else splits


def check_request(policy: Policy, asked: Asked, *, committed: Commitment | None) -> DataSetPolicy:
    """Return the policy of the data set that a request may read; refuse the request otherwise.

    A request with several releases is checked once for each. That the steps of all requests stay
    within the committed number is checked where they are counted, by ``Ledger.reserve``.

    Args:
        policy: The site's.
        asked: The request.
        committed: What the run committed to for this kind of release, None if it did not yet.

    Raises:
        ConfigError: A rule is broken; the sentence names the rule, the value and the limit.
    """
    allowed = _data_set(policy, asked.data_set)
    if not isinstance(asked.verb, str) or asked.verb not in allowed.verbs:
        raise _refused("verbs", "verb", asked.verb, f"one of {', '.join(sorted(allowed.verbs))}")
    # `is`, because whoever asks could put an object here that equals everything
    if type(asked.order) is not int or asked.order != 1:
        raise _refused("first order only", "order", asked.order, "1: second order mixes splits")
    for flag, reason in _FORBIDDEN.items():
        if getattr(asked, flag) is not False:
            raise _refused(f"no {flag}", flag, getattr(asked, flag), f"False: {reason}")
    if asked.secure_noise is not True and (allowed.secure_noise or asked.secure_noise is not False):
        raise _refused("secure_noise", "secure_noise", asked.secure_noise, "True")
    if asked.test_seed is not False and (not allowed.test_seed or asked.test_seed is not True):
        raise _refused("test_seed", "test_seed", asked.test_seed, "False")

    if (asked.release is None) != (asked.verb in PUBLIC_VERBS):
        needed = "none" if asked.verb in PUBLIC_VERBS else "a noised release"
        raise _refused("noised releases only", "release", asked.release, f"{needed}: {asked.verb}")
    if asked.release is None:
        return allowed
    _check_terms(allowed, asked.release, num_values=asked.num_values)
    if committed is None:
        raise _refused("committed values", "commitment", None, "one in the run's first message")
    _check_terms(allowed, committed)
    for term in ("noise_multiplier", "sample_rate", "max_grad_norm"):
        value, promised = getattr(asked.release, term), getattr(committed, term)
        if value != promised:
            raise _refused("committed values", term, value, f"the committed {promised!r}")
    if asked.release.steps > committed.steps:
        limit = f"at most the committed {committed.steps}"
        raise _refused("committed values", "steps", asked.release.steps, limit)
    return allowed


def check_commitment(policy: Policy, data_set: str, commitment: Commitment) -> DataSetPolicy:
    """Return the policy of the data set if a run may commit to these terms on it.

    Raises:
        ConfigError: A rule is broken; the sentence names the rule, the value and the limit.
    """
    allowed = _data_set(policy, data_set)
    _check_terms(allowed, commitment)
    return allowed


_FORBIDDEN = {
    "batch_norm": "it has no per-record gradient and its buffers leak",
    "oversampling": "the accounting is for Poisson sampling, each record at most once",
    "raw_metrics": "only noised, booked numbers leave",
}


def _data_set(policy: Policy, data_set: object) -> DataSetPolicy:
    """Return the policy of a data set; the other ids of the site are not told."""
    if not isinstance(data_set, str) or data_set not in policy.data_sets:
        raise _refused("data_sets", "data set", data_set, "an id that this site's policy gives")
    return policy.data_sets[data_set]


def _check_terms(allowed: DataSetPolicy, terms: Commitment, *, num_values: int = 1) -> None:
    """Refuse terms outside the policy or what noise can be added with, and what is no number."""
    limits = {
        "least_noise_multiplier": (
            "noise_multiplier",
            allowed.least_noise_multiplier,
            LARGEST_NOISE_MULTIPLIER,
        ),
        "largest_grad_norm": ("max_grad_norm", LEAST_GRAD_NORM, allowed.largest_grad_norm),
        "sample_rate": ("sample_rate", LEAST_SAMPLE_RATE, 1),
        "largest_steps": ("steps", 1, allowed.largest_steps),
    }
    for rule, (term, least, largest) in limits.items():
        value = getattr(terms, term)
        if type(value) not in ((int,) if term == "steps" else (int, float)):
            raise _refused(rule, term, value, f"a number from {least} to {largest}")
        if not least <= value <= largest:  # NaN is in no range
            raise _refused(rule, term, value, f"{least} to {largest}")
    records = sum(allowed.records.values())
    low, high = noise_range(num_values=num_values, num_records=records)
    if not low <= terms.noise_multiplier <= high:
        limit = f"{low:.3g} to {high:.3g} for {num_values} values over {records} declared records"
        raise _refused("noise grid", "noise_multiplier", terms.noise_multiplier, limit)


def _refused(rule: str, name: str, value: object, limit: str) -> ConfigError:
    """Return the error for a request that breaks a rule."""
    return ConfigError(f"refused by the policy, rule {rule}: {name}={show(value)}, not {limit}.")


def show(value: object) -> str:
    """Return a short text for a value that may be of any type and size."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "an integer of more than 30 digits"
    return value[:80] if isinstance(value, str) else reprlib.repr(value)
