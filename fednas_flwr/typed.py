"""Frozen dataclasses from trees of plain values, as YAML and JSON give them: strictly.

A key that is unknown or missing and a value of another type are refused in one sentence; nothing is
guessed, and the only conversion is from whole numbers to float. For configurations and for messages
alike. Main function: :func:`parse`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fednas_flwr.errors import ConfigError, MissingSettingError, show, unknown_choice

MISSING = "???"  # Hydra's value for what the user must give
# Above these no computation can use a number; a whole one could not even be written in a sentence.
LARGEST = {int: 2**63 - 1, float: sys.float_info.max}


def parse(kind: Any, values: Any, *, key: str, hints: Mapping[str, Any] | None = None) -> Any:
    """Return the dataclass ``kind`` of a mapping.

    Args:
        kind: The dataclass; its fields are numbers, text, lists, mappings, dataclasses or these or
            None.
        values: The mapping; of a message it may be anything.
        key: Dotted name of the mapping in error sentences; empty at the top.
        hints: Types of fields that overrule the dataclass' own.

    Raises:
        ConfigError: A key is unknown or missing, a value has the wrong type, or the dataclass
            refuses it.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={show(values)} must be a group of settings.")
    prefix = f"{key}." if key else ""
    types = {**_hints(kind), **(hints or {})}
    for name in values:
        if name not in types:
            known = [f"{prefix}{known}" for known in types]
            raise unknown_choice("setting", f"{prefix}{show(name)}", known)
    parsed = {}
    for name, hint in types.items():
        if name not in values:
            raise MissingSettingError(f"{prefix}{name}")
        parsed[name] = _convert(f"{prefix}{name}", hint, values[name])
    try:
        return kind(**parsed)
    except ConfigError as error:  # its sentence begins with a field, or the last part of ``key``
        if str(error).partition("=")[0] in types:
            raise ConfigError(f"{prefix}{error}") from None
        parent, dot, _ = key.rpartition(".")
        raise ConfigError(f"{parent}{dot}{error}") from None


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _convert(key: str, hint: Any, value: Any) -> Any:
    """Return ``value`` as the type ``hint``."""
    if isinstance(value, str) and value == MISSING:
        raise ConfigError(f"{key} must be given: {key}=<{_type_name(hint)}>.")
    if hint is Any:
        return value
    if is_dataclass(hint):
        return parse(hint, value, key=key)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None:
            return None
        (hint,) = [kind for kind in arguments if kind is not type(None)]
        return _convert(key, hint, value)
    if origin in (list, tuple) and isinstance(value, Sequence) and not isinstance(value, str):
        return origin(_convert(f"{key}[{i}]", arguments[0], item) for i, item in enumerate(value))
    if origin is dict and isinstance(value, Mapping):
        items = value.items()
        return {str(k): _convert(f"{key}.{show(k)}", arguments[1], item) for k, item in items}
    if type(value) in (int, float) and hint in LARGEST:
        if abs(value) <= LARGEST[hint] and (hint is float or type(value) is int):  # NaN is not
            return hint(value)
    elif origin is None and hint not in LARGEST and isinstance(value, hint):
        return value
    raise ConfigError(f"{key}={show(value)} has the wrong type: expected {_type_name(hint)}.")


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if get_origin(hint) in (Union, UnionType):
        return _type_name(get_args(hint)[0])
    if get_origin(hint) in (list, tuple):
        return f"a list such as [{_type_name(get_args(hint)[0])}, ...]"
    if get_origin(hint) is dict:
        return "a mapping such as {name: value}"
    return names.get(hint, "a group of settings")
