"""From a composed tree or its JSON to one checked :class:`~fednas_flwr.settings.Config`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.settings import Config
from fednas_flwr.settings.data_settings import PARTITIONS
from fednas_flwr.settings.incompatible import check_combinations
from fednas_flwr.settings.names import CLIENT
from fednas_flwr.settings.parser import NOT_TEXT, choose_kind, is_among, known_names, parse
from fednas_flwr.settings.registry import BUILT_IN, entries
from fednas_flwr.settings.run_settings import AGGREGATES, PRIVACY, RUNTIMES, SERVER_OPTIMIZERS
from fednas_flwr.settings.unused import Given, check_effect

UPDATE_NORM = 1.0  # that a client's update is clipped to by default; a record's gradient is shorter
YIELDING = {  # defaults of privacy=dp that give way where the user sets what they take the place of
    "privacy.rate": ("algorithm.batch_size", "algorithm.search.batch_size"),
    "privacy.retrain.rate": ("retrain.batch_size",),
    "privacy.retrain.noise_walk": ("retrain.weights.lr",),
}
CHOICES: dict[str, dict[str, type]] = {  # by group, the class of each choice
    "partition": PARTITIONS,
    "privacy": PRIVACY,
    "aggregate": AGGREGATES,
    "server_optimizer": SERVER_OPTIMIZERS,
    "runtime": RUNTIMES,
}
UNREGISTERED = "; one of your own must be registered first, in each process and at each site"


def parse_config(tree: Mapping[str, Any], *, given: Given | None = None) -> Config:
    """Return the checked configuration of a composed tree.

    Args:
        tree: Groups of settings.
        given: The settings that the user has set, and that must have an effect.

    Raises:
        ConfigError: A key is unknown or missing, a value has the wrong type or is out of range,
            two settings exclude each other, or one that was given has no effect
            (:class:`~fednas_flwr.base.errors.NoEffectError`).
    """
    if given is None:
        return _parse(tree)
    check_names(tree, given.typed)
    config = _parse(yielded(tree, given))
    alone = None
    if given.alone is not None:
        with suppress(ConfigError):  # it need not run by itself
            alone = _parse(yielded(given.alone, replace(given, typed=())))
    check_effect(config, given, alone)
    return config


def yielded(tree: Mapping[str, Any], given: Given) -> Mapping[str, Any]:
    """Return the tree without the defaults in whose place the user has set something.

    Of a group of an experiment that is chosen anew, what the experiment sets in it and the new
    choice lacks goes: with ``experiment=dp_fnas/fashion_mnist privacy=none`` its budget.
    """
    tree, kinds = _with_lower_ends(tree, given), chosen_kinds(tree)
    for setting in given.experiment:
        group, _, rest = setting.partition(".")
        first = rest.partition(".")[0]
        is_typed = any(name.startswith(f"{group}.{first}") for name in given.typed)
        if first and group in given.typed and group in kinds and not is_typed:
            if first not in set(known_names(kinds[group])):
                tree[group].pop(first, None)
    privacy = tree.get("privacy")
    if not isinstance(privacy, Mapping) or privacy.get("name") != "dp":
        return tree
    known = {*given.typed, *given.experiment}
    yields: dict[str, float | None] = {}
    if privacy.get("unit") == CLIENT and "privacy.retrain.max_grad_norm" not in known:
        yields["privacy.retrain.max_grad_norm"] = UPDATE_NORM
    for default, others in YIELDING.items():
        typed = default not in given.typed and any(other in given.typed for other in others)
        if typed or (default not in known and any(other in known for other in others)):
            yields[default] = None
    for setting, value in yields.items():
        tree = _with(tree, setting.split("."), value)
    return tree


def _with_lower_ends(tree: Mapping[str, Any], given: Given, prefix: str = "") -> dict[str, Any]:
    """Return a tree in which no default of ``min_lr`` is above an ``lr`` that the user has set."""
    tree = {
        key: _with_lower_ends(value, given, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in tree.items()
    }
    lr, last, key = tree.get("lr"), tree.get("min_lr"), f"{prefix}min_lr"
    is_own = key in given.typed or (key in given.experiment and f"{prefix}lr" not in given.typed)
    if isinstance(lr, int | float) and isinstance(last, int | float) and last > lr and not is_own:
        tree["min_lr"] = lr
    return tree


def _with(tree: Any, path: Sequence[str], value: float | str | None) -> Any:
    """Return a tree with another value at a path, the same where there is no such path."""
    key, *rest = path
    if not isinstance(tree, Mapping) or key not in tree:
        return tree
    return {**tree, key: _with(tree[key], rest, value) if rest else value}


def _kinds(group: str) -> dict[str, type]:
    """The classes of settings behind the names of a group."""
    if group in CHOICES:
        return CHOICES[group]
    return {name: entry.settings for name, entry in entries(group).items()}


def chosen_kinds(tree: Mapping[str, Any]) -> dict[str, type]:
    """The class of settings of each group that a tree chooses.

    Raises:
        ConfigError: There is no such choice.
    """
    hints = dict.fromkeys(BUILT_IN, UNREGISTERED) | dict.fromkeys(CHOICES, "")
    return {group: choose_kind(tree, group, _kinds(group), hint=hints[group]) for group in hints}


def check_names(tree: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ConfigError, with the nearest spelling of all, for a name that is no setting's.

    Args:
        tree: Says which choices of the groups have settings.
        names: Dotted names that the user has written.
    """
    chosen = chosen_kinds(tree)
    known = [name for group, kind in chosen.items() for name in known_names(kind, f"{group}.")]
    known += known_names(Config)
    for name in names:
        if is_among(name, known):
            continue
        group, _, rest = name.partition(".")
        kinds = _kinds(group) if group in chosen else {}
        others = [f"{group}={n}" for n in sorted(kinds) if is_among(rest, known_names(kinds[n]))]
        if others:
            raise ConfigError(
                f"{show(name)} is a setting of {', '.join(others)}, and {group}="
                f"{tree[group]['name']} has none of that name: choose the former, or remove it."
            )
        parent = name
        while parent and not is_among(parent, known):
            parent = parent.rpartition(".")[0]
        there = [other for other in known if other.rpartition(".")[0] == parent]
        if not there:  # a plain value, of which it is no name
            continue
        raise ConfigError(
            f"{show(name)} is no setting: {parent or 'the top level'} has "
            f"{', '.join(dict.fromkeys(there))} "
            f"(nearest: {', '.join(_nearest(name, known))})."
        )


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """Return the known name, or all that end alike, whose end is spelt most like a name."""
    ends = [".".join(other.split(".")[-1 - name.count(".") :]) for other in known]
    (nearest,) = get_close_matches(name, ends, n=1, cutoff=0)
    if nearest in known:
        return [nearest]
    return list(dict.fromkeys(o for o, end in zip(known, ends, strict=True) if end == nearest))


def _parse(tree: Mapping[str, Any]) -> Config:
    hints = chosen_kinds(tree)
    evaluation = tree.get("evaluation")
    if isinstance(evaluation, Mapping) and type(evaluation.get("positive")) is int:
        # as Hydra reads the name of a class 0, 1, ...
        tree = _with(tree, ["evaluation", "positive"], str(evaluation["positive"]))
    try:
        config: Config = parse(Config, tree, key="", hints=hints, defaults=True)
    except ConfigError as error:
        if not str(error).endswith(f"{NOT_TEXT}."):
            raise
        hint = "if it is from the environment, write ${oc.decode:${oc.env:NAME}}"
        raise ConfigError(f"{str(error).removesuffix('.')}; {hint}.") from None
    check_combinations(config)
    return config


def load_config(text: str) -> Config:
    """Return the configuration that :func:`~fednas_flwr.settings.dump_config` wrote."""
    return parse_config(json.loads(text))
