"""Registry of algorithms, search spaces and data sets, by their names in ``conf/``.

The package's own entries register themselves when their modules are imported, by the same
:func:`register` as a user's entries. A name is registered in one process only. The client app of
a simulation carries entries from outside the package to its workers; in a deployment, the server
and each site must register the name themselves.
"""

import pickle
import re
import string
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, get_type_hints

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.settings.names import NUMBER_LOSSES
from fednas_flwr.settings.run_settings import AlgorithmSettings, Config, GivenNetwork

BUILT_IN = {
    "algorithm": "fednas_flwr.algorithms",
    "search_space": "fednas_flwr.spaces",
    "dataset": "fednas_flwr.data.readers",
}
PARTS = {"network": "fednas_flwr.models.networks"} | dict.fromkeys(("op", "loss", "metric"), "")
TABLES: dict[str, dict[str, Any]] = {group: {} for group in (*BUILT_IN, *PARTS)}
OWN: dict[str, dict[str, Any]] = {group: {} for group in TABLES}  # from outside the package
SUPERNET, NETWORKS = "supernet", "networks"


@dataclass(frozen=True)
class Rule:
    """Settings that do nothing in some runs.

    Attributes:
        settings: Dotted names, separated by spaces. A group or mapping stands for all its settings,
            ``algorithm.*`` for all settings of the algorithm, and ``search_space=`` for the choice
            alone.
        when: Function of the configuration; true if they do nothing in that run.
        cause: Setting that overrules them, as a format string with the configuration ``c``.
        remedy: Advice to the user.
    """

    settings: str
    when: Callable[[Any], bool]
    cause: str
    remedy: str = "remove it"


NO_ALPHAS = Rule(
    "privacy.alphas", lambda c: True, "algorithm={c.algorithm.name}, which has no alphas"
)


class _Spelling(string.Formatter):
    """Formatter that spells values like overrides."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return format(value if format_spec else show(value), format_spec)


def spelled(text: str, config: Config) -> str:
    """Return a format string with the values of the configuration ``c`` filled in."""
    return _Spelling().format(text, c=config)


@dataclass(frozen=True)
class Algorithm:
    """Entry behind a name of ``conf/algorithm``; it brings no torch.

    Attributes:
        settings: The dataclass of its settings, derived from
            :class:`~fednas_flwr.settings.GivenNetwork` if it does not search.
        search: The strategy of the search, a subclass of
            :class:`~fednas_flwr.algorithms.base.RoundStrategy`, or the place to import it from,
            ``<module>:<class>``. None if it does not search.
        retraining: The strategy of the retrain stage; None is FedAvg, or FedSGD.
        units: Units of privacy that it can protect; empty if it does not run with ``privacy=dp``.
        trains: Kind of model that clients train in the search: a ``supernet``, with which the
            search then begins, or ``networks``; None if clients are asked nothing.
        asks_rewards: True if clients are asked for rewards of trials or candidates.
        unused: Settings that have no effect with this algorithm only.
        needs: Settings that act only with a certain value of another one, for this algorithm only,
            in the form of ``settings.unused.NEEDS``.
        clashes: Values that exclude each other with this algorithm only, in the form of
            ``settings.incompatible.CLASHES``.
    """

    settings: type[AlgorithmSettings]
    search: str | type | None = None
    retraining: str | type | None = None
    units: Collection[str] = ()
    trains: str | None = SUPERNET
    asks_rewards: bool = False
    unused: tuple[Rule, ...] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    clashes: Mapping[str, str] = field(default_factory=dict)


def entries(group: str) -> dict[str, Any]:
    """Return the table of a group, with the package's own entries."""
    if module := (BUILT_IN | PARTS)[group]:  # some have only what users register
        import_module(module)
    return TABLES[group]


def algorithms() -> dict[str, Algorithm]:
    """Return all algorithms by name."""
    return entries("algorithm")


def algorithm_of(config: Config) -> Algorithm:
    """Return the entry of a run's algorithm."""
    return algorithms()[config.algorithm.name]


def imported(place: str | Callable[..., Any]) -> Any:
    """Return the class or function of an entry, which may name it as ``<module>:<name>``."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def register(group: str, name: str, entry: Any) -> None:
    """Let a name of a group of settings stand for an entry.

    Raises:
        ConfigError: The name exists or cannot be written as ``group=name``, or an algorithm has
            neither or both of a search and settings derived from ``GivenNetwork``.
    """
    if name in entries(group) or (group == "loss" and name in NUMBER_LOSSES):
        raise ConfigError(f"{group}={name} exists: choose another name for your own.")
    if not re.fullmatch(r"(?!(?i:null|nan|inf|true|false)$)[A-Za-z]\w*", name):
        raise ConfigError(
            f"{group}={name!r} is no name: expected letters, digits and underscores, and no value "
            "such as null."
        )
    if isinstance(entry, Algorithm) and (entry.search is None) != issubclass(
        entry.settings, GivenNetwork
    ):
        raise ConfigError(
            f"the algorithm {name} needs either search=<strategy> or settings derived from "
            f"GivenNetwork, not both: it has search={entry.search} and {entry.settings.__name__}."
        )
    TABLES[group][name] = entry


def carry(group: str, name: str, entry: Any) -> None:
    """Let a name stand for an entry from outside the package, also in the workers of a run."""
    OWN[group][name] = TABLES[group][name] = entry
    if isinstance(getattr(entry, "settings", None), type):
        # As types: in a worker the script's module is another one, which lacks these names.
        entry.settings.__annotations__ = get_type_hints(entry.settings, include_extras=True)


def registered() -> dict[str, dict[str, Any]]:
    """Return the entries from outside the package, by group and name."""
    return {group: dict(parts) for group, parts in OWN.items()}


def own_parts(config: Config) -> list[str]:
    """Return the entries from outside the package that a run uses, such as ``op wide``."""
    used = {
        **{group: [getattr(config, group).name] for group in BUILT_IN},
        "network": [getattr(config.algorithm, "network", None)],
        "op": config.search_space.own_ops,
        "loss": [config.training.loss],
        "metric": OWN["metric"],
    }
    return [f"{group} {name}" for group, of in used.items() for name in of if name in OWN[group]]


def packed(function: Callable[..., Any]) -> bytes | None:
    """Return a function pickled with all registered entries; None if these cannot be pickled."""
    import cloudpickle

    try:
        return cloudpickle.dumps(partial(_restored, registered(), function))
    except (pickle.PicklingError, TypeError, AttributeError):  # an open file, a lock, ...
        return None


def _restored(carried: Mapping[str, Any], function: Callable[..., Any], *asked: Any) -> Any:
    restore(carried)
    return function(*asked)


def restore(carried: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the entries that :func:`registered` returned in another process; own ones stay."""
    for group, parts in carried.items():
        TABLES[group].update({**parts, **entries(group)})
