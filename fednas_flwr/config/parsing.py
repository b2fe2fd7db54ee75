"""How a composed tree becomes dataclasses, and where the files that it is composed of stand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from fednas_flwr.errors import ConfigError, MissingSettingError, unknown_choice

MISSING = "???"  # Hydra's value for what the user must give


def conf_folder() -> Path:
    """Return the folder of Hydra's groups: in the wheel, else beside the package."""
    package = Path(__file__).parent.parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def choose_kind(
    tree: Mapping[str, Any], group: str, kinds: Mapping[str, type], *, hint: str = ""
) -> type:
    """Return the dataclass that a group's name stands for; ``hint`` ends an error's sentence."""
    settings = tree.get(group)
    name = settings.get("name") if isinstance(settings, Mapping) else settings
    if not isinstance(name, str) or name not in kinds:
        raise ConfigError(f"{str(unknown_choice(group, name, kinds)).removesuffix('.')}{hint}.")
    return kinds[name]


def parse(kind: Any, values: Any, *, key: str, hints: Mapping[str, Any]) -> Any:
    """Return the dataclass ``kind`` of a mapping; ``hints`` overrule its fields' types."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={values} must be a group of settings.")
    prefix = f"{key}." if key else ""
    types = {**get_type_hints(kind), **hints}
    for name in values:
        if name not in types:
            raise unknown_choice("setting", f"{prefix}{name}", [f"{prefix}{n}" for n in types])
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


def _convert(key: str, hint: Any, value: Any) -> Any:
    """Return ``value`` as the type ``hint``; the only conversion is from whole numbers to float."""
    if value == MISSING:
        raise ConfigError(f"{key} must be given: {key}=<{_type_name(hint)}>.")
    if is_dataclass(hint):
        return parse(hint, value, key=key, hints={})
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is None:
            return None
        (hint,) = [kind for kind in arguments if kind is not type(None)]
        return _convert(key, hint, value)
    if origin is list and isinstance(value, Sequence) and not isinstance(value, str):
        return [_convert(f"{key}[{i}]", arguments[0], item) for i, item in enumerate(value)]
    if origin is dict and isinstance(value, Mapping):
        return {str(k): _convert(f"{key}.{k}", arguments[1], item) for k, item in value.items()}
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and number and math.isfinite(value):
        return float(value)
    if (
        hint is not float
        and origin is None
        and isinstance(value, hint)
        and (number or hint is not int)
    ):
        return value
    raise ConfigError(f"{key}={value} has the wrong type: expected {_type_name(hint)}.")


def _type_name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if get_origin(hint) in (Union, UnionType):
        return _type_name(get_args(hint)[0])
    if get_origin(hint) is list:
        return f"a list such as [{_type_name(get_args(hint)[0])}, ...]"
    if get_origin(hint) is dict:
        return "a mapping such as {name: value}"
    return names[hint]
