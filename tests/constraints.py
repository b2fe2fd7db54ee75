"""The constraints at the fields of settings, requests and policies."""

from typing import Any, get_args

from fednas_flwr.settings.parser import Between, Distinct, Length, OneOf, Where, field_types

KINDS = (Between, Length, OneOf, Where, Distinct)


def constraints(kind: type) -> dict[str, tuple[Any, ...]]:
    """A dataclass's constraints by field, with those of what a list or mapping holds."""
    hints = field_types(kind, extras=True)
    return {name: tuple(_constraints(hint)) for name, hint in hints.items()}


def _constraints(hint: Any):
    if isinstance(hint, KINDS):
        yield hint
    for part in get_args(hint):
        yield from _constraints(part)
