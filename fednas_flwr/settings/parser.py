"""Strict parser of plain values, as from YAML and JSON, into frozen dataclasses.

It serves configurations and messages alike. Unknown keys, missing keys and values of another type
are refused in one sentence. Nothing is guessed, and the only conversion is from whole numbers to
float. Main function: :func:`parse`.

The values that a field may have are written at the field, as ``Annotated[float, Between(0, 1)]``.
A dataclass derived from :class:`Checked` refuses all others, however it is made.
:func:`constraints` returns them for code that draws values.
"""

import math
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args, get_origin

from fednas_flwr.base import errors
from fednas_flwr.base.errors import ConfigError, show

EPOCH = date(1970, 1, 1).toordinal()
MISSING = "???"  # Hydra's value for what the user must give
SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}  # in a unit of time
# No computation can use larger numbers; a larger int could not even be written in a sentence.
LARGEST = {int: 2**63 - 1, float: sys.float_info.max}
LONGEST_LINE = 200  # characters


@dataclass(frozen=True)
class Between:
    """Numbers from ``low`` to ``high``, without infinity and NaN.

    Attributes:
        low: The smallest number.
        high: The largest number; infinity is no bound.
        above: True if ``low`` itself is left out.
        below: True if ``high`` itself is left out.
        reason: Reason for the bound, or advice; it ends the error's sentence.
    """

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    reason: str = ""

    def __contains__(self, number: float) -> bool:
        """Return true if a number is in the range."""
        outside = (self.above and number == self.low) or (self.below and number == self.high)
        return self.low <= number <= self.high and number != math.inf and not outside

    def __str__(self) -> str:
        """Return the range in the words of an error."""
        low, high = f"{self.low:.12g}", f"{self.high:.12g}"
        if self.high == math.inf:
            return f"above {low}" if self.above else f"{low} or more"
        if self.above:
            return f"above {low}, {'below' if self.below else 'at most'} {high}"
        return f"{low} to {'below ' if self.below else ''}{high}"

    def check(self, key: str, value: Any, alternative: str = "") -> None:
        """Raise ConfigError for a number outside; ``alternative`` names what else is allowed."""
        because = f" ({self.reason})" if self.reason else ""
        check_range(value in self, key, value, f"{self}{alternative}{because}")


@dataclass(frozen=True)
class Length:
    """Lists and mappings of ``size`` entries, and texts of ``size`` bytes in UTF-8."""

    size: Between

    def check(self, key: str, value: Any, alternative: str) -> None:
        """Raise ConfigError for a value that is shorter or longer."""
        unit, entries = ("bytes", value.encode()) if isinstance(value, str) else ("entries", value)
        check_range(len(entries) in self.size, key, value, f"{self.size} {unit}{alternative}")


@dataclass(frozen=True)
class OneOf:
    """The names that a value may have."""

    names: tuple[str, ...]

    def check(self, key: str, value: Any, alternative: str) -> None:
        """Raise ConfigError for another name, with the nearest of these names."""
        errors.check_choice(key, value, self.names)


@dataclass(frozen=True)
class Where:
    """Values for which a condition holds.

    Attributes:
        holds: The condition.
        expected: Description of such values for an error's sentence.
    """

    holds: Callable[[Any], object]
    expected: str

    def __str__(self) -> str:
        """Return the description."""
        return self.expected

    def check(self, key: str, value: Any, alternative: str) -> None:
        """Raise ConfigError for a value for which the condition does not hold."""
        check_range(bool(self.holds(value)), key, value, self.expected + alternative)


def is_line(text: str) -> bool:
    """Return true for one printable line of text, short enough to be shown to a person."""
    return len(text) <= LONGEST_LINE and text.isprintable()


A_LINE = f"a printable line of up to {LONGEST_LINE} characters"
Line = Annotated[str, Where(is_line, A_LINE)]


@dataclass(frozen=True)
class Distinct:
    """Lists without duplicates."""

    def check(self, key: str, value: Any, alternative: str) -> None:
        """Raise ConfigError for a name that is more than once in a list."""
        twice = sorted({name for name in value or () if value.count(name) > 1})
        if twice:
            raise ConfigError(
                f"{key}={show(value)} holds {', '.join(map(show, twice))} more than once: expected "
                "different names; remove what is doubled."
            )


Constraint = Between | Length | OneOf | Where | Distinct


if TYPE_CHECKING:
    Word = str
    Day = float
else:

    class Day(float):
        """Type of a number that may be written as an ISO date, for the days since 1970."""

    class Word(str):
        """Type of a text that may look like a number or truth value: 1 is the text ``1``."""


Names = Annotated[list[str], Distinct()]
Words = Annotated[list[Word], Distinct()]
Text = Annotated[str, Length(Between(1, 4096))]  # a name or path that is not empty
Conflicts = Iterable[tuple[object, str]]  # pairs of a condition and what to say about it


class Checked:
    """Base of dataclasses that refuse values outside the constraints at their fields.

    Constraints between fields belong into :meth:`conflicts` or ``__post_init__`` of each class.

    Raises:
        ConfigError: A value is outside; the sentence begins with the name of its field.

    Example:
        >>> @dataclass(frozen=True)
        ... class Optimizer(Checked):
        ...     lr: Annotated[float, Between(0, 1, above=True)]
        >>> Optimizer(lr=2.0)
        Traceback (most recent call last):
        fednas_flwr.base.errors.ConfigError: lr=2.0 is out of range: expected above 0, at most 1.
    """

    def __post_init__(self) -> None:
        """Check every field, including the entries of lists and mappings, and all conflicts."""
        kind: type = type(self)
        for name, hint in field_types(kind, extras=True).items():
            _check(name, hint, getattr(self, name))
        for base in reversed(kind.__mro__):
            for excluded, sentence in vars(base).get("conflicts", lambda _: ())(self):
                if excluded:
                    raise ConfigError(f"{sentence}.")

    def conflicts(self) -> Conflicts:
        """Return pairs: a condition under which fields exclude each other, and its sentence."""
        return ()


def constraints(kind: type) -> dict[str, tuple[Constraint, ...]]:
    """Return a dataclass's constraints by field, with those of entries of lists and mappings."""
    hints = field_types(kind, extras=True)
    return {name: tuple(_constraints(hint)) for name, hint in hints.items()}


def _constraints(hint: Any) -> Iterator[Constraint]:
    if isinstance(hint, Constraint):
        yield hint
    for part in get_args(hint):
        yield from _constraints(part)


def within(condition: object, key: str, value: object, expected: str) -> tuple[bool, str]:
    """Return a conflict unless a condition holds; it names key, value and what was expected."""
    return not condition, f"{key}={show(value)} is out of range: expected {expected}"


def one_of(**values: object) -> tuple[bool, str]:
    """Return a conflict unless exactly one of the values is given."""
    number = sum(value is not None for value in values.values())
    return number != 1, f"{' or '.join(values)} must be given, and only one"


def check_range(condition: bool, key: str, value: object, expected: str) -> None:
    """Raise ConfigError with the sentence of :func:`within` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{within(condition, key, value, expected)[1]}.")


def seconds(text: str) -> float:
    """Return the seconds of a time such as ``45s``, ``1.5d`` or ``1h30min``; 0 for other texts."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(s|min|h|d)", text)
    whole = "".join(number + unit for number, unit in parts) == text
    return sum(float(number) * SECONDS[unit] for number, unit in parts) if whole else 0.0


Time = Annotated[
    Word,
    Where(
        lambda text: 0 < seconds(text) < math.inf, "a time with its unit: 45s, 30min, 2h, 1h30min"
    ),
]


def _check(key: str, hint: Any, value: Any, alternative: str = "") -> None:
    """Raise ConfigError for a value outside the constraints of its type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for constraint in arguments[1:]:
            constraint.check(key, value, alternative)
        _check(key, arguments[0], value)
    elif origin in (Union, UnionType) and value is not None:
        for kind in arguments:
            _check(key, kind, value, ", or null")
    elif origin in (list, tuple):
        of = get_args(arguments[0])[1:]
        if of and all(isinstance(one, Between) for one in of):  # soon, as there may be thousands
            value = [item for item in value if any(item not in one for one in of)]
        for item in value:
            _check(key, arguments[0], item)
    elif origin is dict and isinstance(value, Mapping):
        for name, item in value.items():
            _check(f"{key}.{name}", arguments[1], item)


def parse(
    kind: Any, values: Any, *, key: str, hints: Mapping[str, Any] = {}, defaults: bool = False
) -> Any:
    """Return a mapping as the dataclass or TypedDict ``kind``.

    Args:
        kind: The dataclass or TypedDict; its fields are numbers, text, lists, mappings or
            dataclasses, each possibly optional.
        values: The mapping; if it is from a message, it may be anything.
        key: Dotted name of the mapping in error sentences; empty at the top.
        hints: Types of fields that overrule those of the dataclass.
        defaults: True if fields with a default may be left out, as in files that people write;
            messages are complete. An optional dataclass with a default for every field may then
            also be ``true``, for its defaults, or ``false``, for None.

    Raises:
        ConfigError: A key is unknown or missing, a value has the wrong type, or the dataclass
            refuses it; the sentence of a dataclass must begin with one of its fields.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key or 'it'}={show(values)} must be a group of settings.")
    prefix = f"{key}." if key else ""
    types = {**field_types(kind), **hints}
    for name in values:
        if name not in types:
            known = [f"{prefix}{known}" for known in types]
            raise errors.unknown_choice("setting", f"{prefix}{show(name)}", known)
    optional = _defaults(kind) if defaults or typing.is_typeddict(kind) else ()
    missing = [name for name in types if name not in values and name not in optional]
    if missing:
        raise errors.MissingSettingError(*(f"{prefix}{name}" for name in missing))
    parsed = {n: _convert(f"{prefix}{n}", types[n], v, defaults) for n, v in values.items()}
    if typing.is_typeddict(kind):
        for name, hint in field_types(kind, extras=True).items():
            if name in parsed:
                _check(f"{prefix}{name}", hint, parsed[name])
        return parsed
    try:
        return kind(**parsed)
    except ConfigError as error:  # its sentence begins with a field
        raise ConfigError(f"{prefix}{error}") from None


def parse_changes(settings: Any, values: Any, kind: type, *, key: str) -> Any:
    """Return settings with the given fields replaced.

    Args:
        settings: A dataclass.
        values: The new values by field; they may be anything.
        kind: A base class of the settings; only its fields may be replaced.
        key: Name of the mapping in error sentences.

    Raises:
        ConfigError: As :func:`parse`.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={show(values)} must be a group of settings.")
    types = field_types(kind)
    for name in values:
        if name not in types:
            raise errors.unknown_choice(f"{key}: setting", name, list(types))
    parsed = {n: _convert(f"{key}.{n}", types[n], v, True) for n, v in values.items()}
    return replace(settings, **parsed)


@cache
def field_types(kind: type, extras: bool = False) -> dict[str, Any]:
    """Return the types of a dataclass's fields; with ``extras`` also their constraints."""
    try:
        return typing.get_type_hints(kind, include_extras=extras)
    except NameError:  # for a script's class in a worker, which lacks that module
        return field_types(kind.__mro__[1], extras)


def known_names(kind: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings of a dataclass, also those in optional mappings."""
    for name, hint in field_types(kind).items():
        yield f"{prefix}{name}"
        for inner in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
            if is_dataclass(inner):
                yield from known_names(inner, f"{prefix}{name}.")  # type: ignore[arg-type]


@cache
def _defaults(kind: type) -> frozenset[str]:
    """Return the fields that may be left out."""
    if typing.is_typeddict(kind):
        return frozenset(getattr(kind, "__optional_keys__", ()))
    return frozenset(field.name for field in fields(kind) if field.default is not NO_DEFAULT)


def _convert(key: str, hint: Any, value: Any, defaults: bool) -> Any:
    """Return ``value`` as the type ``hint``."""
    if isinstance(value, str) and value == MISSING:
        raise ConfigError(f"{key} must be given: {key}=<{_type_name(hint)}>.")
    if hint is Any:
        return value
    if hint is Word and isinstance(value, int | float | str):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if hint is Day:
        hint = float
        if isinstance(value, str | date):
            try:
                return float(date.fromisoformat(str(value)).toordinal() - EPOCH)
            except ValueError:
                day = "expected a number, or a date such as 2024-12-31"
                raise ConfigError(f"{key}={show(value)} has the wrong type: {day}.") from None
    if is_dataclass(hint) or typing.is_typeddict(hint):
        return parse(hint, value, key=key, defaults=defaults)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is typing.Literal:  # a text; a constraint has the allowed names
        hint, origin = str, None
    if origin in (Union, UnionType):
        if value is None:
            return None
        (hint,) = [kind for kind in arguments if kind is not type(None)]
        if defaults and isinstance(value, bool) and isinstance(hint, type) and is_dataclass(hint):
            if _defaults(hint) == {*field_types(hint)}:
                return hint() if value else None
        return _convert(key, hint, value, defaults)
    if origin in (list, tuple) and isinstance(value, Sequence) and not isinstance(value, str):
        of = arguments[0]
        if of is float and all(type(v) is of and abs(v) <= LARGEST[of] for v in value):
            return origin(value)
        return origin(_convert(f"{key}[{i}]", of, v, defaults) for i, v in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        of = arguments[1]
        return {str(k): _convert(f"{key}.{show(k)}", of, v, defaults) for k, v in value.items()}
    if type(value) in (int, float) and hint in LARGEST:
        if abs(value) <= LARGEST[hint] and (hint is float or type(value) is int):  # excludes NaN
            return hint(value)
    elif origin is None and hint not in LARGEST and isinstance(value, hint):
        return value
    expected = _type_name(hint)
    if isinstance(value, str) and hint in LARGEST and re.fullmatch(r"[-+.\deE]+", value):
        expected += ", not text; if it is from the environment, write ${oc.decode:${oc.env:NAME}}"
    raise ConfigError(f"{key}={show(value)} has the wrong type: expected {expected}.")


def _type_name(hint: Any) -> str:
    names: dict[Any, str] = {int: "a whole number", bool: "true or false"}
    names |= dict.fromkeys((float, Day), "a number") | dict.fromkeys((str, Word), "text")
    if get_origin(hint) in (Union, UnionType):
        return _type_name(get_args(hint)[0])
    if get_origin(hint) in (list, tuple):
        return f"a list such as [{_type_name(get_args(hint)[0])}, ...]"
    if get_origin(hint) is dict:
        return "a mapping such as {name: value}"
    return names.get(hint, "a group of settings")


def conf_folder() -> Path:
    """Return the folder of Hydra's groups, in the wheel or beside the package."""
    package = Path(__file__).parent.parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def expanded(setting: str, path: str) -> Path:
    """Return the path that the user gave for a setting, with ``~`` expanded to a home folder.

    Raises:
        ConfigError: It names the home of a user who does not exist.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{setting}={show(path)}: {Path(path).parts[0]} is no user's home; give the whole path."
        ) from error


def choose_kind(
    tree: Mapping[str, Any], group: str, kinds: Mapping[str, type], *, hint: str = ""
) -> type:
    """Return the dataclass that a group's name stands for; ``hint`` ends an error's sentence."""
    settings = tree.get(group)
    name = settings.get("name") if isinstance(settings, Mapping) else settings
    if not isinstance(name, str) or name not in kinds:
        raise errors.unknown_choice(group, name, kinds, hint)
    return kinds[name]
