"""The package's own errors, and the sentence for a name that does not exist.

All other errors are built-in exceptions. Every layer imports this module; it imports none.
"""

import reprlib
from collections.abc import Collection, Iterable
from dataclasses import is_dataclass
from difflib import get_close_matches
from typing import Any

MEANT = {"gpu": "cuda"}  # other common names


class ConfigError(ValueError):
    """A request that cannot be run; the message is one sentence that says what is possible."""


class MissingSettingError(ConfigError):
    """A configuration lacks settings.

    Args:
        keys: The settings' dotted names.
    """

    def __init__(self, *keys: str) -> None:
        more = f", and so is {', '.join(keys[1:])}" if keys[1:] else ""
        super().__init__(f"{keys[0]} is missing{more}: give it, too.")
        self.key = keys[0]
        self._keys = keys

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings, from which the message is made again."""
        return type(self), self._keys


class NoEffectError(ConfigError):
    """The user has set something that the run would not use; a sweep skips that job."""


class NoEffectWarning(UserWarning):
    """A setting of an experiment file that a typed setting overrules; the message names it."""


class DamagedError(RuntimeError):
    """A site's books cannot be trusted any longer; the message is one sentence that says why."""


class BudgetExceededError(RuntimeError):
    """A client refuses a release that its privacy budget does not cover."""


class DayFullError(ConfigError):
    """A site refuses a request that would write more than its daily allowance."""


class ReplyError(ValueError):
    """A client's reply does not fit the request; it is dropped, and the round goes on."""


class ClientLeftError(ReplyError):
    """A client's privacy budget has ended; it is not asked again in this run."""


def unknown_choice(what: str, value: object, allowed: Iterable[str], more: str = "") -> ConfigError:
    """Return the error for a name that is not allowed, with the nearest allowed name.

    Args:
        what: Kind of the name, as the user writes it, e.g. ``algorithm``.
        value: The given name.
        allowed: All names that exist.
        more: Further advice, with the sign and the blank before it.

    Example:
        >>> print(unknown_choice("algorithm", "fed_dart", ["fed_darts", "fnas"]))
        algorithm=fed_dart is unknown: choose one of fed_darts, fnas (nearest: fed_darts).
    """
    names, shown = sorted(allowed), show(value)
    nearest = [MEANT[shown]] if shown in MEANT else get_close_matches(shown, names, cutoff=0.5)
    hint = f" (nearest: {nearest[0]})" if nearest else ""
    choice = f"choose one of {', '.join(names)}" if names else "there is none"
    return ConfigError(f"{what}={shown} is unknown: {choice}{hint}{more}.")


def check_choice(what: str, value: object, allowed: Collection[str]) -> None:
    """Raise :func:`unknown_choice` for a name that is not among the allowed ones."""
    if value not in allowed:
        raise unknown_choice(what, value, allowed)


def listed(names: Iterable[object], most: int = 10) -> str:
    """Return the first of some names, joined for a sentence, with the number of further ones."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def show(value: object) -> str:
    """Return a short text for a value of any type and size, spelled as in overrides.

    Example:
        >>> show([None, True, {"a": "b"}])
        '[null, true, {a: b}]'
    """
    return (value if isinstance(value, str) else _Spelling().repr(value))[:80]


class _Spelling(reprlib.Repr):
    """Representation of values as Hydra reads them."""

    def repr_instance(self, value: object, level: int) -> str:
        return "{...}" if is_dataclass(value) else super().repr_instance(value, level)

    def repr_tuple(self, value: tuple[object, ...], level: int) -> str:
        return self.repr_list([*value], level)

    def repr_NoneType(self, value: None, level: int) -> str:  # noqa: N802
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:  # noqa: FBT001
        return str(value).lower()

    def repr_int(self, value: int, level: int) -> str:
        return str(value) if abs(value) < 10**30 else "an integer of more than 30 digits"

    def repr_str(self, value: str, level: int) -> str:
        return value if len(value) <= self.maxstring else f"{value[: self.maxstring]}..."
