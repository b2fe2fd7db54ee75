"""The policy of a site: its YAML file, and the check of every request against it.

The client decides: :func:`load_policy` reads its file, and :func:`template` returns one to start
from. Every key except ``account``, ``secure_sum`` and ``largest_noise_multiplier`` (100) is
required, so that nothing is allowed by a default that nobody has read.

:func:`check_action` and :func:`check_planned` refuse a request before any data is read. Neither
spending nor the steps of a run are counted here: a request that passes still needs a reservation in
the ledger.
"""

import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.base.foreign import load_yaml, read_yaml
from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.settings import data_settings, names, parser
from fednas_flwr.settings.optimizers import Count, Epsilon, InnerShare, NoiseMultiplier, Positive
from fednas_flwr.settings.parser import Between, Checked, Length, OneOf, Where, parse, within

# Beyond these limits float arithmetic, not privacy, would decide what a release hides.
LEAST_GRAD_NORM, LARGEST_GRAD_NORM = 1e-6, 1e30
LEAST_SAMPLE_RATE = 1e-9
LEAST_HONEST = 2  # a sum of one honest value and values that colluding sites know hides nothing
APPROVALS = AUTOMATIC, MANUAL = ("automatic", "manual")


def is_name(text: str) -> bool:
    """True if a text can name a data set or an account."""
    return bool(text.strip()) and text.isprintable()


@dataclass(frozen=True)
class SumTerms(Checked):
    """Terms of secure sums in a site's policy.

    Attributes:
        roster: Fingerprint of the list of all sites' public keys, 64 hex digits.
        least_sites: Smallest number of survivors of an exchange at which the site opens its mask.
        colluding: Number of survivors that may help the server.
    """

    roster: Annotated[str, Length(Between(64, 64))]
    least_sites: Annotated[int, Between(2, names.MOST_SITES)]
    colluding: Annotated[int, Between(0, names.MOST_SITES)]

    def conflicts(self) -> parser.Conflicts:
        """Refuse sums in which an honest site is not hidden by another honest one."""
        yield (
            self.honest < LEAST_HONEST,
            f"least_sites={self.least_sites} with colluding={self.colluding}: the sum of one "
            "honest site is its value; expected least_sites of colluding + 2 or more",
        )

    @property
    def honest(self) -> int:
        """h, the least number of honest survivors in an opened sum."""
        return self.least_sites - self.colluding


@dataclass(frozen=True)
class DataSetPolicy(Checked):
    """Permissions of a site for one data set; :func:`template` explains every attribute.

    Attributes:
        account: The budget that is charged; overlapping data sets name the same one.
        unit: The unit that is protected: a ``record``, a ``person`` with all records, or the
            ``client``, which is the site itself with all of its records.
        records: Declared, public number of units; the only source of rates and weights.
        fractions: Shares of the splits, which the site fixes permanently. A record that changed its
            split between runs would be charged to two budgets, each of which sees half.
        threads: Number of torch's threads. It and the size of micro-batches decide how results are
            rounded, hence the site chooses them: a server could choose them such that one record
            changes the gradients of others.
        micro_batch_size: Number of records that are computed at a time.
        approve: With ``manual``, no run releases anything before a person at the site has approved
            its commitment. With ``automatic``, the rules of the policy are enough.
        secure_sum: Terms of secure sums; with them the site's replies leave only as parts of secure
            sums.
        largest_noise_multiplier: Above it releases cost next to nothing, however many there are.

    Raises:
        ConfigError: A value is out of range.
    """

    epsilon: Epsilon
    delta: InnerShare
    least_noise_multiplier: NoiseMultiplier
    largest_grad_norm: Annotated[float, Between(0, LARGEST_GRAD_NORM, above=True)]
    largest_steps: Count
    actions: Annotated[
        tuple[Annotated[str, OneOf(PRIVATE_ACTIONS)], ...], Length(Between(1, len(ACTIONS)))
    ]
    unit: Annotated[names.Unit, OneOf(names.UNITS)]
    records: Count
    fractions: data_settings.Fractions
    threads: Count
    micro_batch_size: Annotated[int, Between(1, names.LARGEST_MICRO_BATCH)]
    secure_noise: bool
    test_seed: bool
    approve: Annotated[str, OneOf(APPROVALS)]
    account: Annotated[str, Where(is_name, "a name, as text")]
    secure_sum: SumTerms | None = None
    largest_noise_multiplier: Positive = 100.0

    def conflicts(self) -> parser.Conflicts:
        """Refuse values that conflict with others."""
        least, largest = self.least_noise_multiplier, self.largest_noise_multiplier
        expected = f"the least, {least:g}, or more"
        yield within(largest >= least, "largest_noise_multiplier", largest, expected)
        yield self.secure_noise and self.test_seed, "secure_noise and test_seed exclude one another"
        one = self.unit != names.CLIENT or self.records == 1
        yield within(one, "records", self.records, "1 with unit: client, the site itself")
        some = self.unit == names.CLIENT or self.by_split["train"]
        yield within(some, "records", self.records, "so many that the train split has one or more")

    @property
    def by_split(self) -> dict[str, int]:
        """Declared number of units in each split, rounded down; a client is in all its splits."""
        shares = {split: self.fractions[split] for split in names.SPLITS}
        if self.unit == names.CLIENT:
            return {split: int(share > 0) for split, share in shares.items()}
        return {split: math.floor(self.records * s + 1e-9) for split, s in shares.items()}

    @property
    def budget(self) -> dict[str, float]:
        """The budget for the whole life of the data."""
        return {"epsilon": self.epsilon, "delta": self.delta}

    @property
    def needs_approval(self) -> bool:
        """True if a person must approve each run."""
        return self.approve == MANUAL


@dataclass(frozen=True)
class Policy(Checked):
    """Permissions of the site, by data set id."""

    data_sets: Annotated[dict[str, DataSetPolicy], Length(Between(1, 1000))]

    def conflicts(self) -> parser.Conflicts:
        """Refuse ids that are no names, and different budgets for one account."""
        first: dict[str, str] = {}
        for name, allowed in self.data_sets.items():
            yield not is_name(name), f"data_sets={show(name)}: expected a name, as text"
            other = first.setdefault(allowed.account, name)
            yield (
                self.data_sets[other].budget != allowed.budget,
                f"data_sets: {other} and {name} share the account {allowed.account} and must have "
                "the same epsilon and delta",
            )


def check_action(
    policy: Policy, data_set: str | None, action: str, *, is_secure: bool
) -> DataSetPolicy:
    """Return the policy of the data set that an action may read; refuse the action otherwise.

    Args:
        policy: The site's policy.
        data_set: Id that the request names, if any; the site's other ids are not revealed.
        action: The action that is requested.
        is_secure: True if nobody can reproduce the client's noise and masks; False if their
            keystream starts from a seed that others know.

    Raises:
        ConfigError: A rule is broken; the message names the rule, the value and the limit.
    """
    if data_set is None or data_set not in policy.data_sets:
        limit = "an id that this site's policy gives (runs without privacy=dp name none)"
        raise refused("data_sets", "data set", data_set, limit)
    allowed = policy.data_sets[data_set]
    if action not in allowed.actions:
        raise refused("actions", "action", action, f"one of {', '.join(sorted(allowed.actions))}")
    if allowed.secure_noise and not is_secure:
        raise refused("secure_noise", "secure_noise", False, "True")
    if not (is_secure or allowed.test_seed):
        raise refused("test_seed", "test_seed", True, "False")
    return allowed


def noise_range(*, num_values: int, num_records: int) -> tuple[float, float]:
    """Return the least and the largest noise multiplier with which adding noise cannot fail.

    The grid of :func:`~fednas_flwr.privacy.mechanism.noise.add_noise`, of at most ``2^-24 * s *
    R``, must be below ``R / (2 * sqrt(d))``, and a sum of norm ``N * R`` must be within 2^51 cells
    of at least ``2^-25 * s * R``. Both hold with a factor of 2 to spare, as a site may hold more
    records than it declares.

    Args:
        num_values: d, the number of values of one release.
        num_records: N, the declared number of records.
    """
    return num_records * 2.0**-25, 2.0**22 / math.sqrt(max(1, num_values))


def check_planned(allowed: DataSetPolicy, planned: PlannedRelease, *, num_values: int = 1) -> None:
    """Refuse terms outside the policy, or outside the range in which noise can be added.

    ``Ledger.reserve``, which counts the steps of all requests, checks that they stay within the
    planned number.

    Args:
        allowed: Policy of the data set.
        planned: The release that a run or a request intends, with its number of steps.
        num_values: Number of values of each step; 1 while it is not known.

    Raises:
        ConfigError: A rule is broken; the message names the rule, the value and the limit.
    """
    splits = planned.splits
    if planned.num_records(allowed.by_split) == 0:
        raise ConfigError(
            f"refused by the policy, rule records: {' + '.join(splits)} has no declared record."
        )
    size = planned.batch_size
    if planned.of_client != (allowed.unit == names.CLIENT):
        limit = f"{not planned.of_client}: this site protects every {allowed.unit}"
        raise refused("unit", "of_client", planned.of_client, limit)
    if planned.of_client and (size is not None or set(splits) != set(names.SPLITS)):
        raise refused("unit", "batch_size", size, f"null, with splits {', '.join(names.SPLITS)}")
    one_sum = planned.of_client or len(ACTIONS[planned.action].gradients_of) == 1
    if planned.shared and (allowed.secure_sum is None or not one_sum):
        limit = "False: noise is shared in secure sums of one gradient, or of clients' updates"
        raise refused("secure_sum", f"shared noise of {planned.action}", True, limit)
    sigma, rate = planned.noise_multiplier, planned.rate(allowed.by_split)
    norm, most = planned.max_grad_norm, names.LARGEST_NOISE_MULTIPLIER
    lowest, largest = allowed.least_noise_multiplier, allowed.largest_noise_multiplier
    for rule, term, value, low, high in (
        ("least_noise_multiplier", "noise_multiplier", sigma, lowest, most),
        ("largest_noise_multiplier", "noise_multiplier", sigma, lowest, largest),
        ("largest_grad_norm", "max_grad_norm", norm, LEAST_GRAD_NORM, allowed.largest_grad_norm),
        ("sample_rate", "sample_rate", rate, LEAST_SAMPLE_RATE, 1),
        ("largest_steps", "steps", planned.steps, 1, allowed.largest_steps),
    ):
        if value is None or not low <= value <= high:  # NaN is in no range
            raise refused(rule, term, value, f"{low} to {high}")
    records = sum(allowed.by_split.values())
    low, high = noise_range(num_values=num_values, num_records=records)
    if sigma is None or not low <= sigma <= high:
        limit = f"{low:.3g} to {high:.3g} for {num_values} values over {records} declared records"
        raise refused("noise grid", "noise_multiplier", sigma, limit)


def refused(rule: str, name: str, value: object, limit: str) -> ConfigError:
    """Return the error for a request that breaks a rule."""
    return ConfigError(f"refused by the policy, rule {rule}: {name}={show(value)}, not {limit}.")


def load_policy(path: Path) -> Policy:
    """Return the policy in a site's file.

    Args:
        path: A YAML file; :func:`template` shows its form.

    Raises:
        ConfigError: The file cannot be read, or :func:`parse_policy` refuses it.
    """
    return _policy(read_yaml(path, f"the policy {path}"), str(path))


def parse_policy(text: str, *, origin: str = "policy") -> Policy:
    """Return the policy in ``text``.

    Args:
        text: YAML in the form of :func:`template`.
        origin: Name of the text in error messages, e.g. the path of its file.

    Raises:
        ConfigError: A key is unknown, missing or given twice, a value has the wrong type or is out
            of range, or two data sets share an account under different budgets.
    """
    return _policy(load_yaml(text, origin), origin)


def _policy(document: Any, origin: str) -> Policy:
    """Return the policy in a document; a data set that names no account gets its own."""
    sections = document.get("data_sets") if isinstance(document, dict) else None
    if isinstance(sections, dict):
        accounts = {n: {"account": str(n), **s} for n, s in sections.items() if isinstance(s, dict)}
        document = document | {"data_sets": sections | accounts}
    try:
        return parse(Policy, document, key="", defaults=True)
    except ConfigError as error:
        raise ConfigError(f"{origin}: {error}") from None


def template() -> str:
    """Return a policy to start from, with comments and a line for each private action.

    Example:
        >>> parse_policy(template()).data_sets["my-data"].epsilon
        3.0
    """
    text = (files("fednas_flwr.privacy") / "policy.yaml").read_text(encoding="utf-8")
    lines = []
    for name in PRIVATE_ACTIONS:
        item = f"      {'' if ACTIONS[name].usual else '# '}- {name}"
        lines.append(f"{item:<35} # {ACTIONS[name].note}\n")
    return text.replace("      # ACTIONS\n", "".join(lines))
