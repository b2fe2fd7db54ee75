"""Parses a composed tree, or its JSON, into one checked :class:`~fednas_flwr.settings.Config`."""

import json
from collections.abc import Mapping
from functools import reduce
from typing import Any

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.settings import Config, data_settings, incompatible, registry, run_settings
from fednas_flwr.settings.names import CLIENT, GROUP, LARGEST_MICRO_BATCH, NO_NORM, POOLED
from fednas_flwr.settings.parser import choose_kind, field_types, known_names, parse
from fednas_flwr.settings.unused import UserSettings, check_effect

UPDATE_NORM = 1.0  # default norm to which a client's update is clipped; a record's is smaller
YIELDING = {  # defaults of privacy=dp that give way where the user sets what they would replace
    "privacy.rate": ("algorithm.batch_size", "algorithm.search.batch_size"),
    "privacy.retrain.rate": ("retrain.batch_size",),
    "privacy.retrain.noise_walk": ("retrain.weights.lr",),
}
# Values that privacy=dp by record replaces where the data are a table: first those that it
# replaces (the default of conf/, and what an experiment for images sets), then the new one.
OF_TABLES: dict[str, tuple[tuple[float | str, ...], float | str]] = {
    "retrain.channels": ((16, 8), 32),
    "retrain.norm": ((GROUP,), NO_NORM),
    "privacy.retrain.rate": ((0.125,), 1.0),
    "privacy.retrain.noise_walk": ((0.2,), 0.5),
    "privacy.micro_batch_size": ((8, 64), LARGEST_MICRO_BATCH),
}
OF_FEATURES = ("privacy.retrain.rate", "privacy.micro_batch_size")  # for a backbone's pooled ones
CHOICES: dict[str, dict[str, type]] = {  # by group, the class of each choice
    "partition": data_settings.PARTITIONS,
    "privacy": run_settings.PRIVACY,
    "aggregate": run_settings.AGGREGATES,
    "server_optimizer": run_settings.SERVER_OPTIMIZERS,
    "runtime": run_settings.RUNTIMES,
}
UNREGISTERED = "; one of your own must be registered first, in each process and at each site"


def parse_config(tree: Mapping[str, Any], *, user: UserSettings | None = None) -> Config:
    """Return the checked configuration of a composed tree.

    Args:
        tree: Groups of settings.
        user: The settings that the user has set, all of which must have an effect.

    Raises:
        ConfigError: A key is unknown or missing, a value has the wrong type or is out of range,
            two settings exclude each other, or one that was given has no effect
            (:class:`~fednas_flwr.base.errors.NoEffectError`).
    """
    if user is None:
        return _parse(tree)
    config = _parse(yielded(tree, user))
    check_effect(config, user)
    return config


def yielded(tree: Mapping[str, Any], user: UserSettings) -> Mapping[str, Any]:
    """Return the tree without the defaults that the user's settings replace.

    If the user chooses another name for a group of an experiment, what the experiment sets there
    and the new choice lacks is removed: ``experiment=dp_fnas/fashion_mnist privacy=none`` loses
    its budget.
    """
    yields: dict[str, float | str | None] = {}
    privacy, known = tree.get("privacy"), {*user.typed, *user.experiment}
    kinds = chosen_kinds(tree)
    if isinstance(privacy, Mapping) and privacy.get("name") == "dp":
        is_whole, norm = privacy.get("unit") == CLIENT, "privacy.retrain.max_grad_norm"
        if is_whole and norm not in known and not user.repeats:  # a run's values are not conf/'s
            yields[norm] = UPDATE_NORM
        if not is_whole and not user.repeats:
            yields |= _of_vectors(tree, user, is_table=kinds["dataset"] is data_settings.CSV)
        for default, others in YIELDING.items():
            typed = default not in user.typed and any(other in user.typed for other in others)
            if typed or (default not in known and any(other in known for other in others)):
                yields[default] = None
    tree = _yielded(tree, yields, user)
    for setting in user.experiment:
        group, first, *_ = f"{setting}.".split(".")
        is_typed = any(name.startswith(f"{group}.{first}") for name in user.typed)
        if group in user.typed and group in kinds and not is_typed:
            if first not in field_types(kinds[group]):
                tree[group].pop(first, None)
    return tree


def _of_vectors(
    tree: Mapping[str, Any], user: UserSettings, *, is_table: bool
) -> dict[str, float | str]:
    """Return the new values of ``OF_TABLES`` for settings that nobody has set."""
    backbone, found = tree["dataset"].get("backbone"), {}
    is_pooled = isinstance(backbone, Mapping) and backbone.get("output", POOLED) == POOLED
    names = OF_TABLES if is_table else OF_FEATURES if is_pooled else ()
    for name in names:
        (default, *others), of_table = OF_TABLES[name]
        group, *keys = name.split(".")
        value = reduce(lambda node, key: (node or {}).get(key), keys, tree.get(group))
        is_set = name in user.typed
        if name in user.experiment:  # for another search space, or for tables
            is_set = is_set or value not in others or "search_space" not in user.typed
        if value in (default, *others) and not is_set:
            found[name] = of_table
    return found


def _yielded(
    tree: Mapping[str, Any], yields: Mapping[str, Any], user: UserSettings, prefix: str = ""
) -> dict[str, Any]:
    """Return a tree with new values, and with defaults of ``min_lr`` lowered to a set ``lr``."""
    copy = {
        key: _yielded(value, yields, user, f"{prefix}{key}.")
        if isinstance(value, dict)
        else yields.get(f"{prefix}{key}", value)
        for key, value in tree.items()
    }
    lr, last, key = copy.get("lr"), copy.get("min_lr"), f"{prefix}min_lr"
    is_own = key in user.typed or (key in user.experiment and f"{prefix}lr" not in user.typed)
    if isinstance(lr, int | float) and isinstance(last, int | float) and last > lr and not is_own:
        copy["min_lr"] = lr
    return copy


def _kinds(group: str) -> dict[str, type]:
    """Return the classes of settings behind the names of a group."""
    if group in CHOICES:
        return CHOICES[group]
    return {name: entry.settings for name, entry in registry.entries(group).items()}


def chosen_kinds(tree: Mapping[str, Any]) -> dict[str, type]:
    """Return the class of settings that a tree chooses in each group.

    Raises:
        ConfigError: There is no such choice.
    """
    remarks = dict.fromkeys(registry.BUILT_IN, UNREGISTERED) | dict.fromkeys(CHOICES, "")
    return {
        group: choose_kind(tree, group, _kinds(group), hint=hint) for group, hint in remarks.items()
    }


def check_names(tree: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that belongs to another choice, or into a group."""
    chosen = chosen_kinds(tree)
    known = [name for group, kind in chosen.items() for name in known_names(kind, f"{group}.")]
    known += known_names(Config)
    for name in tree.keys() - field_types(Config).keys():
        places = [other for other in known if other.endswith(f".{name}")]
        if places:
            raise ConfigError(
                f"{show(name)} is no setting: write {' or '.join(dict.fromkeys(places))}."
            )
    for group, kind in chosen.items():
        for name in tree[group]:
            kinds = _kinds(group) if name not in field_types(kind) else {}
            others = [
                f"{group}={n}" for n, other in sorted(kinds.items()) if name in field_types(other)
            ]
            if others:
                raise ConfigError(
                    f"{group}.{name} is a setting of {', '.join(sorted(others))}, and {group}="
                    f"{tree[group]['name']} has none of that name: choose the former, or remove it."
                )


def _parse(tree: Mapping[str, Any]) -> Config:
    check_names(tree)
    config: Config = parse(Config, tree, key="", hints=chosen_kinds(tree), defaults=True)
    incompatible.check_combinations(config)
    return config


def load_config(text: str) -> Config:
    """Return the configuration that :func:`~fednas_flwr.settings.dump_config` wrote."""
    return parse_config(json.loads(text))
