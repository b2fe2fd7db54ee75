"""Write conf/README.md: every setting with its default, its values and its meaning.

    python scripts/settings_page.py

Meanings come from the settings classes' docstrings, defaults from ``conf/``. A test checks that the
page agrees with the code.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from fednas_flwr.data.readers import DATA_SETS
from fednas_flwr.settings import Config
from fednas_flwr.settings.configuration import CHOICES
from fednas_flwr.settings.hydra_config import compose_tree
from fednas_flwr.settings.parser import Between, Length, OneOf, Where
from fednas_flwr.settings.registry import algorithms
from fednas_flwr.settings.run_settings import Retrain
from fednas_flwr.spaces import SEARCH_SPACES

os.environ.pop("FEDNAS_CACHE", None)  # it would be shown as the default of dataset.cache
CONF = Path(__file__).parents[1] / "conf"
PAGE = CONF / "README.md"
KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}
HEAD = """# Settings

Every setting of a run: `fednas run <setting>=<value> ...`, a file in `experiment/`, or
`compose("<setting>=<value>")` in Python. A group is chosen by the name of one of its files:
`algorithm=fnas`. What is out of range, unknown or without effect is refused before anything runs.
This page is written by `python scripts/settings_page.py`.
"""


def page() -> str:
    """Return the whole page."""
    parts = [HEAD, section("Run", Config, "", prefix="", names=()), experiments()]
    for group, title, kinds in (
        ("dataset", "Data set", {name: entry.settings for name, entry in DATA_SETS.items()}),
        ("partition", "Division over clients", CHOICES["partition"]),
        ("privacy", "Privacy", CHOICES["privacy"]),
        ("retrain", "Retraining", {"quickstart": Retrain}),
        ("aggregate", "Average of the clients' models", CHOICES["aggregate"]),
        ("server_optimizer", "Optimiser of the server", CHOICES["server_optimizer"]),
        ("runtime", "Runtime", CHOICES["runtime"]),
    ):
        parts.append(group_section(title, group, kinds))
    for group, title, entries in (
        ("search_space", "Search space", SEARCH_SPACES),
        ("algorithm", "Algorithm", algorithms()),
    ):
        by_kind: dict[type, list[str]] = {}
        for name, entry in entries.items():
            by_kind.setdefault(entry.settings, []).append(name)
        for kind, names in by_kind.items():
            chosen = [own for own in names_of(group) if composed(group, own)["name"] in names]
            heading = f"{title} {', '.join(names)}"
            parts.append(section(heading, kind, names[0], prefix=f"{group}.", names=chosen))
    return "\n".join(parts)


def experiments() -> str:
    """Return the table of the files in ``experiment/``, by the first sentence of their comments."""
    rows = []
    for path in sorted((CONF / "experiment").glob("*/*.yaml")):
        name = path.relative_to(CONF / "experiment").with_suffix("").as_posix()
        told = " ".join(re.findall(r"(?m)^# (?!@package)(.*)", path.read_text(encoding="utf-8")))
        sentence = re.split(r"(?<=[^.]\.) (?=[A-Z\"])", told)[0].replace("<", "\\<")
        data_set = compose_tree([f"experiment={name}"])["dataset"]["name"]
        rows.append(f"| `{name}` | {data_set} | {sentence} |")
    head = "| experiment | data set | what it is |\n|---|---|---|"
    told = (
        "`experiment=<name>` sets what its file sets. All but those on digits need `dataset.root`."
    )
    return f"## Experiments\n\n{told}\n\n" + "\n".join([head, *rows]) + "\n"


def names_of(group: str) -> list[str]:
    """Return the names of a group's choices."""
    return sorted(p.stem for p in (CONF / group).glob("*.yaml") if not p.stem.startswith("_"))


@cache
def composed(group: str, name: str) -> dict[str, Any]:
    """Return the settings of a group with one of its choices; without a group, a run's."""
    tree = compose_tree([f"{group}={name}"] if group else [])
    return tree[group] if group else tree


def section(title: str, kind: type, default: str, *, prefix: str, names: Sequence[str]) -> str:
    """Return the settings of one class as a table."""
    tree = composed(prefix.rstrip("."), default)
    return table(title, leaves(kind, tree, prefix), [f"{prefix[:-1]}={name}" for name in names])


def table(title: str, rows: Iterable[str], choices: Sequence[str]) -> str:
    """Return a section: the choices of its group, then the rows of its settings."""
    chosen = f"\n`{'`, `'.join(choices)}`\n" if choices else ""
    head = "| setting | default | values | meaning |\n|---|---|---|---|"
    return f"## {title}\n{chosen}\n{head}\n" + "\n".join(rows) + "\n"


def group_section(title: str, group: str, kinds: Mapping[str, type]) -> str:
    """Return the settings of a group as a table; each with the choices that have it."""
    rows: list[str] = []
    holders: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        for key in get_type_hints(kind):
            holders.setdefault(key, []).append(name)
    for name, kind in kinds.items():
        new = {key for key, names in holders.items() if names[0] == name}
        only = {key: f"`{'`, `'.join(holders[key])}`: " for key in new}
        only |= {key: "" for key in new if len(holders[key]) == len(kinds)}
        if len(kinds) == 2:  # one of them is none
            only = dict.fromkeys(new, "")
        rows += leaves(kind, composed(group, name), f"{group}.", only)
    return table(title, rows, [f"{group}={name}" for name in names_of(group)])


def leaves(
    kind: type, tree: Any, prefix: str, only: Mapping[str, str] | None = None
) -> Iterator[str]:
    """Yield the row of every setting of a class; groups of a run have their own sections.

    Args:
        kind: The class.
        tree: Its values in ``conf/``.
        prefix: Prefix of the settings' names.
        only: Beginnings of the meanings, by field, for the fields to include; None includes all.
    """
    hints, told = get_type_hints(kind, include_extras=True), meanings(kind)
    for field in fields(kind):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        value = tree.get(field.name) if isinstance(tree, dict) else _default(field)
        inner = next((part for part in parts_of(hint) if is_dataclass(part)), None)
        if field.name == "name" or (not prefix and names_of(field.name)):
            continue
        if only is not None and field.name not in only:
            continue
        if field.name not in told:
            raise SystemExit(f"{kind.__name__}.{field.name} has no meaning in its docstring")
        if isinstance(inner, type):
            yield row(f"{key}.*", "", None if value is None else "", told[field.name])
            yield from leaves(inner, value, f"{key}.")
        else:
            meaning = f"{(only or {}).get(field.name, '')}{told[field.name]}"
            yield row(key, allowed(hint), value, meaning)


def _default(field: Field[Any]) -> Any:
    """Return the default of a field of a mapping that is null in ``conf/``."""
    return None if field.default is MISSING else field.default


def row(key: str, values: str, default: Any, meaning: str) -> str:
    """Return one row of a table."""
    told = json.dumps(default, ensure_ascii=False).replace('"', "")  # as in overrides
    cells = (f"`{key}`", f"`{told}`" if told else "", values, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def parts_of(hint: Any) -> list[Any]:
    """Return the types that a value may have, without their constraints."""
    if get_origin(hint) is Annotated:
        return parts_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return [part for own in get_args(hint) for part in parts_of(own)]
    return [hint]


def allowed(hint: Any) -> str:
    """Return a description of the values that a setting may have."""
    if get_origin(hint) in (Union, UnionType):
        said = [allowed(part) for part in get_args(hint) if part is not NoneType]
        return " or ".join(said) + (" or null" if NoneType in get_args(hint) else "")
    bounds = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    (kind,) = parts_of(hint)
    names = [", ".join(f"`{name}`" for name in c.names) for c in bounds if isinstance(c, OneOf)]
    if names:
        return names[0]
    size = "".join(f", {c.size} entries" for c in bounds if isinstance(c, Length))
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list:
        return f"list of {allowed(inner[0])}{size}"
    if origin is dict:
        return f"mapping to {allowed(inner[1])}{size}"
    if is_dataclass(kind):
        return "mapping"
    ranges = [f" ({c})" for c in bounds if isinstance(c, Between | Where)]
    return KINDS.get(kind, "value") + "".join(ranges)


def meanings(kind: type) -> dict[str, str]:
    """Return the description of every field in the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        block = re.search(r"Attributes:\n((?:    .*\n?|\n)*)", inspect.getdoc(base) or "")
        entries = re.findall(r"(?m)^    (\w+): (.*(?:\n        .*)*)", block[1] if block else "")
        found |= {name: _markdown(text) for name, text in entries}
    return found


def _markdown(text: str) -> str:
    """Return a docstring's text on one line, with its references as code."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
