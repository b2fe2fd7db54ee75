"""Entries from outside the package, and how the other processes of a run learn of them.

A name is registered in one process. The client app of a simulation carries the entries to its
workers; the server and the sites of a deployment must know the name themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from inspect import signature
from typing import Any, get_type_hints

from fednas_flwr.builders.algorithms import ALGORITHMS, Algorithm
from fednas_flwr.builders.spaces import SEARCH_SPACES, SpaceEntry
from fednas_flwr.config import AlgorithmSettings, CFDNASSettings, GivenNetwork
from fednas_flwr.data.sources import DATA_SETS, DataSet
from fednas_flwr.errors import ConfigError
from fednas_flwr.strategies.base import RoundStrategy

Entry = Algorithm | SpaceEntry | DataSet
TABLES: dict[str, dict[str, Any]] = {
    "algorithm": ALGORITHMS,
    "search_space": SEARCH_SPACES,
    "dataset": DATA_SETS,
}
OWN: dict[str, dict[str, Entry]] = {group: {} for group in TABLES}


def register(group: str, name: str, entry: Entry) -> None:
    """Let a name of a group of settings stand for an entry.

    Raises:
        ConfigError: The name exists or cannot be written as ``group=name``, or the entry of an
            algorithm that does not search has no settings of a given network.
    """
    if name in TABLES[group]:
        raise ConfigError(f"{group}={name} exists: choose another name for your own.")
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ConfigError(f"{group}={name!r} is no name: expected letters, digits and underscores.")
    if isinstance(entry, Algorithm) and (entry.search is None) != issubclass(
        entry.settings, GivenNetwork
    ):
        raise ConfigError(
            f"the algorithm {name} needs either search=<maker> or settings derived from "
            f"GivenNetwork, not both: it has search={entry.search} and {entry.settings.__name__}."
        )
    _add(group, name, entry)


def register_strategy(strategy: type[RoundStrategy], algorithm: str) -> str:
    """Let a class take the place of an algorithm's own search strategy; return the new name.

    If its constructor takes more than that of :class:`RoundStrategy`, it is called with all that
    the algorithm's own class would be called with, and its settings are the algorithm's; the name
    is ``<algorithm>.<class>``. Otherwise it has no settings, and the name is ``own.<class>``. A
    class takes the place of an earlier one of its name.

    Raises:
        ConfigError: It is no :class:`RoundStrategy`; or the algorithm does not search, or is
            CFDNAS, whose searches are FDNAS'.
    """
    if not (isinstance(strategy, type) and issubclass(strategy, RoundStrategy)):
        raise ConfigError(f"strategy={strategy} is unknown: expected a subclass of RoundStrategy.")
    taken, shared = (list(signature(kind).parameters)[2:] for kind in (strategy, RoundStrategy))
    if set(taken) <= set(shared):
        name = f"own.{strategy.__name__}"
        _add("algorithm", name, Algorithm(AlgorithmSettings, lambda *_: (strategy, {})))
        return name
    entry = ALGORITHMS.get(algorithm)
    if entry is None or entry.search is None or issubclass(entry.settings, CFDNASSettings):
        raise ConfigError(
            f"algorithm={algorithm} with strategy={strategy.__name__}: the class takes the place "
            "of one search; set algorithm=fed_darts, or another whose settings it takes."
        )
    plan = entry.search
    name = f"{algorithm}.{strategy.__name__}"
    _add("algorithm", name, replace(entry, search=lambda *given: (strategy, plan(*given)[1])))
    return name


def registered() -> dict[str, dict[str, Entry]]:
    """Return the entries from outside the package, by group and name."""
    return {group: dict(entries) for group, entries in OWN.items()}


def restore(entries: Mapping[str, Mapping[str, Entry]]) -> None:
    """Take what :func:`registered` returned in another process; what is here already stays."""
    for group, own in entries.items():
        TABLES[group].update({**own, **TABLES[group]})


def _add(group: str, name: str, entry: Entry) -> None:
    OWN[group][name] = TABLES[group][name] = entry
    if not isinstance(entry, DataSet):
        # As types: in a worker the module of a script is another one, where no text means them.
        entry.settings.__annotations__ = get_type_hints(entry.settings, include_extras=True)
