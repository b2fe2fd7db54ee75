"""Reading a site's policy from its YAML file: one sentence for whatever is wrong with it.

:func:`load_policy` is the way in, :func:`template` a file to start from. Every key but ``account``,
``secure_sum`` and ``largest_noise_multiplier``, which older files lack (it is 100 there), must be
there, so that nothing is allowed by a default that nobody read.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from fednas_flwr.base.errors import ConfigError, show, unknown_choice
from fednas_flwr.base.foreign import load_yaml
from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS
from fednas_flwr.privacy.books.renyi_filter import RenyiFilter
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.privacy.mechanism.shared_noise import SumTerms
from fednas_flwr.privacy.policy import (
    APPROVALS,
    LARGEST_GRAD_NORM,
    DataSetPolicy,
    Policy,
)
from fednas_flwr.settings.names import CLIENT, LARGEST_MICRO_BATCH, UNITS
from fednas_flwr.settings.optimizers import Count, Positive, Share
from fednas_flwr.settings.parser import Between, Checked, Length, OneOf, check_range, parse

LARGEST_BY_DEFAULT = 100.0  # noise multiplier
# Keys of a data set that may be missing.
_OPTIONAL = ("account", "secure_sum", "largest_noise_multiplier")


def load_policy(path: Path) -> Policy:
    """Return the policy in a site's file.

    Args:
        path: A YAML file; :func:`template` shows its form.

    Raises:
        ConfigError: The file cannot be read, or :func:`parse_policy` refuses it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the policy {path} cannot be read: {error}.") from error
    return parse_policy(text, origin=str(path))


def parse_policy(text: str, *, origin: str = "policy") -> Policy:
    """Return the policy that ``text`` holds.

    Args:
        text: YAML in the form of :func:`template`.
        origin: What error sentences call the text, e.g. the path of its file.

    Raises:
        ConfigError: A key is unknown, missing or given twice, a value is of the wrong type or out
            of range, or two data sets share an account under different budgets.
    """
    document = load_yaml(text, origin)
    if not isinstance(document, dict):
        raise _wrong(origin, document, "a section with data_sets")
    for key in document:
        if key != "data_sets":
            raise unknown_choice(f"{origin}: key", show(key), ("data_sets",))
    sections = document.get("data_sets")
    if not isinstance(sections, dict) or not sections:
        raise _wrong(f"{origin}: data_sets", sections, "one section for each data set")
    data_sets = {
        _text(name, f"{origin}: data_sets"): _parse_section(name, section, origin)
        for name, section in sections.items()
    }
    budgets: dict[str, DataSetPolicy] = {}
    for allowed in data_sets.values():
        other = budgets.setdefault(allowed.account, allowed)
        if (other.epsilon, other.delta) != (allowed.epsilon, allowed.delta):
            raise ConfigError(
                f"{origin}: data sets {other.data_set} and {allowed.data_set} share the account "
                f"{allowed.account} and must have the same epsilon and delta."
            )
    return Policy(data_sets)


@dataclass(frozen=True)
class _Fractions(Checked):
    """Share of each split."""

    train: Share
    validation: Share
    test: Share

    def __post_init__(self) -> None:
        """Check that they are all of it."""
        super().__post_init__()
        total = self.train + self.validation + self.test
        whole = math.isclose(total, 1, abs_tol=1e-9)
        check_range(whole, "train + validation + test", total, "three numbers that sum to 1")


@dataclass(frozen=True)
class _Section(Checked):
    """One data set, as the file has it; :class:`DataSetPolicy` says what each key means."""

    epsilon: Positive
    delta: Annotated[float, Between(0, 1, above=True, below=True)]
    least_noise_multiplier: Positive
    largest_noise_multiplier: Positive | None
    largest_grad_norm: Annotated[float, Between(0, LARGEST_GRAD_NORM, above=True)]
    largest_steps: Count
    actions: Annotated[
        tuple[Annotated[str, OneOf(PRIVATE_ACTIONS)], ...], Length(Between(1, len(ACTIONS)))
    ]
    unit: Annotated[str, OneOf(UNITS)]
    records: Count
    fractions: _Fractions
    threads: Count
    micro_batch_size: Annotated[int, Between(1, LARGEST_MICRO_BATCH)]
    secure_noise: bool
    test_seed: bool
    approve: Annotated[str, OneOf(APPROVALS)]
    account: str | None
    secure_sum: SumTerms | None

    def __post_init__(self) -> None:
        """Check the ranges, and what holds between keys."""
        for action in self.actions:
            if action in ACTIONS and ACTIONS[action].never_private:
                raise ConfigError(f"actions: {action} cannot be private, leave it out.")
        super().__post_init__()
        key, least = "largest_noise_multiplier", self.least_noise_multiplier
        check_range(self.largest >= least, key, self.largest, f"the least, {least:g}, or more")
        try:
            RenyiFilter(epsilon=self.epsilon, delta=self.delta)
            Release(noise_multiplier=least, sample_rate=1, steps=1)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.secure_noise and self.test_seed:
            raise ConfigError("secure_noise and test_seed exclude one another.")
        one = self.unit != CLIENT or self.records == 1
        check_range(one, "records", self.records, "1 with unit: client, the site itself")
        some = self.unit == CLIENT or self.numbers["train"] > 0
        check_range(some, "records", self.records, "so many that the train split has one or more")

    @property
    def largest(self) -> float:
        """Largest noise multiplier."""
        if self.largest_noise_multiplier is None:
            return max(self.least_noise_multiplier, LARGEST_BY_DEFAULT)
        return self.largest_noise_multiplier

    @property
    def numbers(self) -> dict[str, int]:
        """Declared number of each split, rounded down; a client is in all that it has."""
        shares = asdict(self.fractions)
        if self.unit == CLIENT:
            return {split: int(share > 0) for split, share in shares.items()}
        return {split: math.floor(self.records * s + 1e-9) for split, s in shares.items()}


def _parse_section(name: str, section: object, origin: str) -> DataSetPolicy:
    """The policy of one data set."""
    where = f"{origin}: data_sets.{show(name)}"
    if not isinstance(section, dict):
        raise _wrong(where, section, "a section as in policy.yaml")
    try:
        read: _Section = parse(_Section, {**dict.fromkeys(_OPTIONAL), **section}, key="")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    values = {field.name: getattr(read, field.name) for field in fields(read)}
    values |= {
        "largest_noise_multiplier": read.largest,
        "actions": frozenset(read.actions),
        "records": read.numbers,
        "fractions": asdict(read.fractions),
        "account": _text(name if read.account is None else read.account, f"{where}.account"),
    }
    return DataSetPolicy(data_set=name, **values)


def _text(value: object, where: str) -> str:
    """A name."""
    usable = isinstance(value, str) and value.strip() and value.isprintable()
    if not usable:
        raise _wrong(where, value, "a name, as text")
    return str(value)


def _wrong(where: str, value: object, expected: str) -> ConfigError:
    """The error for a value of the file."""
    return ConfigError(f"{where}={show(value)} is not usable: expected {expected}.")


def template() -> str:
    """Return a policy to start from, with comments.

    Example:
        >>> parse_policy(template()).data_sets["my-data"].epsilon
        3.0
    """
    return (files("fednas_flwr.privacy") / "policy.yaml").read_text(encoding="utf-8")
