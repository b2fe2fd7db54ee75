"""Overrides to settings: the only module that knows Hydra."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import reduce
from operator import getitem
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fednas_flwr.builders.effects import Given
from fednas_flwr.config import conf_folder
from fednas_flwr.errors import ConfigError, show, unknown_choice


def compose_tree(overrides: Sequence[str]) -> dict[str, Any]:
    """Let Hydra compose ``conf/`` with ``overrides`` and return the tree as plain values.

    An override replaces single values; ``key={}`` empties a mapping. Where a group of an experiment
    is chosen anew, what the experiment sets in it and the new choice lacks goes: with
    ``experiment=dp_fnas/fashion_mnist privacy=none`` its budget.

    Raises:
        ConfigError: An override is malformed, or names a file or key that does not exist.
    """
    for text in overrides:
        _check_override(text)
    # Hydra would know no key inside of a mapping that is empty so far; the parser knows them all.
    overrides = [re.sub(r"^(?=[\w.]+=\{)", "++", text) for text in overrides]
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_folder().resolve())):
        try:
            tree = _composed(overrides)
            _drop_overruled(tree, overrides)
        except (HydraException, OmegaConfBaseException, OSError) as error:
            groups = _groups()
            chosen = [text for text in overrides if text.partition("=")[0] in groups]
            known = _composed(chosen, resolve=False)
            for text in overrides:
                _check_key(text.lstrip("+").partition("=")[0], known)
            where = getattr(error, "full_key", None) or "the configuration"
            raise ConfigError(f"{where}: {str(error).splitlines()[0]}.") from error
    for text in overrides:
        if _parse(text).value() == {}:
            *parents, last = _parse(text).key_or_group.split(".")
            reduce(getitem, parents, tree)[last] = {}
    return tree


def _composed(overrides: Sequence[str], *, resolve: bool = True) -> dict[str, Any]:
    """Return Hydra's tree; within ``initialize_config_dir``."""
    tree: Any = OmegaConf.to_container(compose("config", list(overrides)), resolve=resolve)
    return dict(tree)


def given_settings(overrides: Sequence[str]) -> Given:
    """Return what the user has set: by overrides, or by the experiment file that they choose."""
    typed = []
    for text in overrides:
        override = _parse(text)
        typed += _leaves(override.key_or_group, override.value())
    name = _experiment_of(overrides)
    if name is None:
        return Given(typed)
    return Given(typed, _experiment_settings(name), name, compose_tree([f"experiment={name}"]))


def _experiment_of(overrides: Sequence[str]) -> str | None:
    """Return the name of the chosen experiment."""
    names = [text.partition("=")[2] for text in overrides if text.startswith("experiment=")]
    return names[-1] if names and names[-1] != "null" else None


def _experiment_settings(name: str) -> list[str]:
    """Return the dotted names of all that an experiment and its bases set; groups by their own."""
    stored, path = ConfigStore.instance(), conf_folder() / "experiment" / f"{name}.yaml"
    if path.is_file():
        tree: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    else:
        tree = OmegaConf.to_container(stored.load(f"experiment/{name}.yaml").node)
    names: list[str] = []
    for default in tree.pop("defaults", []):
        if isinstance(default, Mapping):
            names += [key.rpartition("/")[2] for key in default]
        elif default != "_self_":
            names += _experiment_settings(default.removeprefix("/experiment/"))
    return list(dict.fromkeys(names + [leaf for key in tree for leaf in _leaves(key, tree[key])]))


def _leaves(key: str, value: Any) -> list[str]:
    """Return the dotted names of the single values of a setting that may be a mapping."""
    if not isinstance(value, Mapping) or not value:
        return [key]
    return [leaf for name, item in value.items() for leaf in _leaves(f"{key}.{name}", item)]


def _drop_overruled(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Take out what the experiment sets in a group that is chosen anew and has no such setting."""
    keys = [text.lstrip("+").partition("=")[0] for text in overrides]
    chosen = [text for text, key in zip(overrides, keys, strict=True) if key in _groups()]
    name = _experiment_of(overrides)
    if name is None or len(chosen) < 2:
        return
    others = [text for text in chosen if not text.startswith("experiment=")]
    plain = _composed(others, resolve=False)
    for setting in _experiment_settings(name):
        group, _, rest = setting.partition(".")
        own = rest.partition(".")[0]
        typed = any(key.startswith(f"{group}.{own}") for key in keys)
        if own and group in keys and own not in plain[group] and not typed:
            tree[group].pop(own, None)


def expand_sweep(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return the jobs of a sweep, the last key fastest: overrides by the name of the job."""
    choices = []
    for text in overrides:
        override = _parse(text)
        if not override.is_sweep_override():
            choices.append([(text, "")])
        elif override.is_discrete_sweep() and not isinstance(override.value(), Glob):
            key = override.get_key_element()
            short = key.rpartition(".")[2]
            choices.append(
                [
                    (f"{key}={value}", f"{short}-{value}")
                    for value in override.sweep_string_iterator()
                ]
            )
        else:
            raise ConfigError(
                f"{show(text)} is no list of values: write them out, as in seed=1,2,3."
            )
    jobs = {}
    for number, job in enumerate(itertools.product(*choices)):
        name = "_".join([str(number), *(part for _, part in job if part)])
        jobs[re.sub(r"[^A-Za-z0-9_.-]+", "-", name)[:60]] = [text for text, _ in job]
    return jobs


def add_choice(group: str, name: str, tree: Mapping[str, Any]) -> None:
    """Let ``group=name`` choose a tree, as if it were a file ``conf/<group>/<name>.yaml``."""
    ConfigStore.instance().store(group=group, name=name, node=dict(tree))


def check_free_name(group: str, name: str) -> None:
    """Raise ConfigError if there is such a file, or the name has been given before."""
    if name in _groups()[group]:
        raise ConfigError(f"{group}={name} exists: choose another name for your own.")


def _groups() -> dict[str, set[str]]:
    """Return the groups of conf/ and the names that each offers; ``_<name>`` is no choice."""
    added = ConfigStore.instance().repo
    return {
        folder.name: {
            path.relative_to(folder).with_suffix("").as_posix()
            for path in folder.rglob("*.yaml")
            if not path.name.startswith("_")
        }
        | {file.removesuffix(".yaml") for file in added.get(folder.name, {})}
        for folder in conf_folder().iterdir()
        if folder.is_dir()
    }


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException:
        raise ConfigError(
            f"{show(text)!r} is not of the form key=value; a value with special characters needs "
            "quotes of its own, as in 'key=\"a=b\"'."
        ) from None


def _check_override(text: str) -> None:
    """Raise ConfigError unless ``text`` sets one value of one key, or chooses a file there is."""
    override = _parse(text)
    key, groups = override.key_or_group, _groups()
    if text[0] in "+~" or override.package is not None:
        raise ConfigError(
            f"{show(text)!r}: settings are neither added nor removed, only set; write "
            f"{show(key)}=<value>."
        )
    if override.is_sweep_override():
        raise ConfigError(
            f"{show(text)} lists several values: add -m for a sweep over them, or put quotes "
            f"around a single value with a comma, as in '{key}=\"a,b\"'."
        )
    group, _, last = key.rpartition(".")
    if last == "name" and group in groups:
        raise ConfigError(f"{show(text)}: a group is chosen by its own name; write {group}=<name>.")
    if key in groups and str(override.value()) not in groups[key]:
        if not (key == "experiment" and override.value() is None):
            raise unknown_choice(key, override.value(), groups[key])


def _check_key(key: str, tree: dict[str, Any]) -> None:
    """Raise ConfigError, with the nearest spelling of all keys, unless ``key`` is in ``tree``."""
    if key in _groups():
        return
    node: Any = tree
    parent = ""
    for part in key.split("."):
        if isinstance(node, dict) and part in node:
            node, parent = node[part], f"{parent}{part}."
            continue
        if node == {}:
            parent = parent.rstrip(".")
            raise ConfigError(f"{key}: {parent} is set as a whole; write {parent}={{{part}: ...}}.")
        names = ", ".join(f"{parent}{name}" for name in node) if isinstance(node, dict) else "none"
        raise ConfigError(
            f"{show(key)} is no setting: {parent.rstrip('.') or 'the top level'} has {names} "
            f"(nearest: {', '.join(_nearest(key, tree))})."
        )


def _nearest(key: str, tree: dict[str, Any]) -> list[str]:
    """Return all keys of the tree that end in ``key``, or else the one spelt most like it."""
    keys = list(_dotted(tree))
    same_end = [name for name in keys if name.endswith(f".{key}")]

    def likeness(name: str) -> tuple[float, float]:
        end = ".".join(name.split(".")[-1 - key.count(".") :])
        whole = SequenceMatcher(None, key, name).ratio()
        return max(SequenceMatcher(None, key, end).ratio(), whole), whole

    return same_end or [max(keys, key=likeness)]


def _dotted(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every node."""
    for name, value in tree.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _dotted(value, f"{prefix}{name}.")
