"""Reading a site's policy from its YAML file: one sentence for whatever is wrong with it.

:func:`load_policy` is the way in, :func:`template` a file to start from. Every key but ``account``,
``secure_sum`` and ``largest_noise_multiplier``, which older files lack (it is 100 there), must be
there, so that nothing is allowed by a default that nobody read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from fednas_flwr.errors import ConfigError, show, unknown_choice
from fednas_flwr.foreign import load_yaml
from fednas_flwr.names import CLIENT, LARGEST_MICRO_BATCH, SPLITS, UNITS
from fednas_flwr.privacy.policy import (
    APPROVALS,
    LARGEST_GRAD_NORM,
    DataSetPolicy,
    Policy,
)
from fednas_flwr.privacy.renyi import Release
from fednas_flwr.privacy.renyi_filter import RenyiFilter
from fednas_flwr.privacy.shared_noise import SumTerms
from fednas_flwr.typed import parse
from fednas_flwr.verbs import PRIVATE_VERBS, VERBS

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
    top = _mapping(document, origin, required=("data_sets",))
    sections = top["data_sets"]
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


def _parse_section(name: str, section: object, origin: str) -> DataSetPolicy:
    """Return the policy of one data set."""
    where = f"{origin}: data_sets.{show(name)}"
    if isinstance(section, dict) and "ledger" in section:
        raise ConfigError(f"{where}.ledger is called account now: rename the key.")
    required = tuple(key for key in _READERS if key not in _OPTIONAL)
    values = _mapping(section, where, required=required, optional=_OPTIONAL)
    read: dict[str, Any] = {
        key: reader(values[key], f"{where}.{key}")
        for key, reader in _READERS.items()
        if key in values
    }
    least = read["least_noise_multiplier"]
    largest = read.setdefault("largest_noise_multiplier", max(least, LARGEST_BY_DEFAULT))
    if largest < least:
        raise _wrong(f"{where}.largest_noise_multiplier", largest, f"the least, {least:g}, or more")
    for verb in read["verbs"]:
        if verb in VERBS and VERBS[verb].never_private:
            raise ConfigError(f"{where}.verbs: {verb} cannot be private, leave it out.")
        if verb not in PRIVATE_VERBS:
            raise unknown_choice(f"{where}.verbs", verb, PRIVATE_VERBS)
    try:
        RenyiFilter(epsilon=read["epsilon"], delta=read["delta"])
        Release(noise_multiplier=read["least_noise_multiplier"], sample_rate=1, steps=1)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if read["secure_noise"] and read["test_seed"]:
        raise ConfigError(f"{where}: secure_noise and test_seed exclude one another.")
    if read["unit"] == CLIENT and read["records"] != 1:
        raise _wrong(f"{where}.records", read["records"], "1 with unit: client, the site itself")
    read["records"] = _shares(read["records"], read["fractions"], read["unit"], where)
    account = _text(values.get("account", name), f"{where}.account")
    sums = _sum_terms(values.get("secure_sum"), f"{where}.secure_sum")
    return DataSetPolicy(data_set=name, account=account, secure_sum=sums, **read)


def _sum_terms(value: object, where: str) -> SumTerms | None:
    """Return the terms of secure sums, None without them."""
    if value is None:
        return None
    terms: SumTerms = parse(SumTerms, value, key=where)
    return terms


def _positive(value: object, where: str) -> float:
    """Return a finite number above 0."""
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise _wrong(where, value, "a finite number above 0")
    return float(value)  # type: ignore[arg-type]


def _norm(value: object, where: str) -> float:
    """Return a number above 0 whose noise floats can hold."""
    if not _positive(value, where) <= LARGEST_GRAD_NORM:
        raise _wrong(where, value, f"at most {LARGEST_GRAD_NORM:g}")
    return float(value)  # type: ignore[arg-type]


def _probability(value: object, where: str) -> float:
    """Return a number above 0 and below 1."""
    if not _positive(value, where) < 1:
        raise _wrong(where, value, "a number above 0 and below 1")
    return float(value)  # type: ignore[arg-type]


def _count(value: object, where: str, least: int = 1) -> int:
    """Return an integer of at least ``least``."""
    if type(value) is not int or value < least:
        raise _wrong(where, value, f"an integer of at least {least}")
    return value


def _micro_batch(value: object, where: str) -> int:
    """Return a number of records that are computed at a time."""
    if _count(value, where) > LARGEST_MICRO_BATCH:
        raise _wrong(where, value, f"at most {LARGEST_MICRO_BATCH}")
    return _count(value, where)


def _flag(value: object, where: str) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise _wrong(where, value, "true or false")
    return value


def _text(value: object, where: str) -> str:
    """Return a name."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise _wrong(where, value, "a name, as text")
    return value


def _approval(value: object, where: str) -> str:
    """Return who approves runs."""
    if value not in APPROVALS:
        raise unknown_choice(where, show(value), APPROVALS)
    return str(value)


def _verbs(value: object, where: str) -> frozenset[str]:
    """Return the names in a list."""
    if not isinstance(value, list) or not value:
        raise _wrong(where, value, "a list of verbs")
    return frozenset(_text(verb, where) for verb in value)


def _unit(value: object, where: str) -> str:
    """Return a unit of privacy."""
    if value not in UNITS:
        raise unknown_choice(where, show(value), UNITS)
    return str(value)


def _fractions(value: object, where: str) -> dict[str, float]:
    """Return the share of each split."""
    shares = _mapping(value, where, required=SPLITS)
    for split, share in shares.items():
        if type(share) not in (int, float) or not 0 <= share <= 1:
            raise _wrong(f"{where}.{split}", share, "a number from 0 to 1")
    if not math.isclose(sum(shares.values()), 1, abs_tol=1e-9):
        raise _wrong(where, shares, "three numbers that sum to 1")
    return {split: float(shares[split]) for split in SPLITS}


def _shares(total: int, fractions: dict[str, float], unit: str, where: str) -> dict[str, int]:
    """Return the declared number of each split, rounded down; a client is in all that it has."""
    if unit == CLIENT:
        return {split: int(fractions[split] > 0) for split in SPLITS}
    numbers = {split: math.floor(total * fractions[split] + 1e-9) for split in SPLITS}
    _count(numbers["train"], f"{where}: records of train")
    return numbers


_READERS: dict[str, Callable[[object, str], object]] = {
    "epsilon": _positive,
    "delta": _probability,
    "least_noise_multiplier": _positive,
    "largest_noise_multiplier": _positive,
    "largest_grad_norm": _norm,
    "largest_steps": _count,
    "verbs": _verbs,
    "unit": _unit,
    "records": _count,
    "fractions": _fractions,
    "threads": _count,
    "micro_batch_size": _micro_batch,
    "secure_noise": _flag,
    "test_seed": _flag,
    "approve": _approval,
}


def _mapping(
    value: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a mapping that has all required keys and no unknown one."""
    if not isinstance(value, dict):
        raise _wrong(where, value, f"a section with {', '.join(required)}")
    for key in value:
        if key not in (*required, *optional):
            raise unknown_choice(f"{where}: key", show(key), (*required, *optional))
    missing = [key for key in required if key not in value]
    if missing:
        raise ConfigError(f"{where} lacks {', '.join(missing)}.")
    return value


def _wrong(where: str, value: object, expected: str) -> ConfigError:
    """Return the error for a value of the file."""
    return ConfigError(f"{where}={show(value)} is not usable: expected {expected}.")


def template() -> str:
    """Return a policy to start from, with comments.

    Example:
        >>> parse_policy(template()).data_sets["my-data"].epsilon
        3.0
    """
    return (files("fednas_flwr.privacy") / "policy.yaml").read_text(encoding="utf-8")
