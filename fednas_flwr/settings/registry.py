"""The entries behind the names of algorithms, search spaces and data sets, and how one is added.

The package's own entries register themselves when their modules are imported, by the same
:func:`register` as those of a user. A name is registered in one process. The client app of a
simulation carries entries from outside the package to its workers; the server and the sites of a
deployment must know the name themselves.
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
        settings: Dotted names, apart by spaces; a group or mapping stands for all that it holds,
            ``algorithm.*`` for all settings of the algorithm, and ``search_space=`` for the choice
            alone.
        when: True if they do nothing in a run.
        cause: Setting that overrules them: a format of the configuration ``c``.
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
    """Formats with values as overrides spell them."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return format(value if format_spec else show(value), format_spec)


def spelled(text: str, config: Config) -> str:
    """Return a format of the configuration ``c``, filled in."""
    return _Spelling().format(text, c=config)


@dataclass(frozen=True)
class Algorithm:
    """Entry behind a name of ``conf/algorithm``; it brings no torch.

    Attributes:
        settings: The dataclass of its settings; of a :class:`~fednas_flwr.settings.GivenNetwork` if
            it does not search.
        search: The strategy of the search, a subclass of
            :class:`~fednas_flwr.algorithms.base.RoundStrategy`, or the place that it is imported
            from, ``<module>:<class>``. None if it does not search.
        retraining: The same of the retrain stage; None is FedAvg, or FedSGD.
        units: Units of privacy that it can protect; none if it does not run with ``privacy=dp``.
        trains: Kind of model that clients train in the search: a ``supernet``, with which it then
            begins, or ``networks``; None if it asks them nothing.
        asks_rewards: True if clients are asked for rewards of trials or candidates.
        unused: Settings that have no effect with this algorithm only.
        needs: The same by the value that another setting needs to have, as
            ``settings.unused.NEEDS`` has them.
        clashes: Values that exclude each other with this algorithm only, as
            ``settings.incompatible.CLASHES`` has them.
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
    """The table of a group, with the package's own entries."""
    if module := (BUILT_IN | PARTS)[group]:  # some have only what users register
        import_module(module)
    return TABLES[group]


def algorithms() -> dict[str, Algorithm]:
    """All algorithms by name."""
    return entries("algorithm")


def algorithm_of(config: Config) -> Algorithm:
    """The entry of a run's algorithm."""
    return algorithms()[config.algorithm.name]


def imported(place: str | Callable[..., Any]) -> Any:
    """The class or function that an entry has, or names as ``<module>:<name>``."""
    if not isinstance(place, str):
        return place
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def register(group: str, name: str, entry: Any) -> None:
    """Let a name of a group of settings stand for an entry.

    Raises:
        ConfigError: The name exists or cannot be written as ``group=name``, or the entry of an
            algorithm that does not search has no settings of a given network.
    """
    if name in entries(group):
        raise ConfigError(f"{group}={name} exists: choose another name for your own.")
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ConfigError(f"{group}={name!r} is no name: expected letters, digits and underscores.")
    if isinstance(entry, Algorithm) and (entry.search is None) != issubclass(
        entry.settings, GivenNetwork
    ):
        raise ConfigError(
            f"the algorithm {name} needs either search=<strategy> or settings derived from "
            f"GivenNetwork, not both: it has search={entry.search} and {entry.settings.__name__}."
        )
    TABLES[group][name] = entry


def carry(group: str, name: str, entry: Any) -> None:
    """Let a name stand for an entry from outside the package, in the workers of a run, too."""
    OWN[group][name] = TABLES[group][name] = entry
    if isinstance(getattr(entry, "settings", None), type):
        # As types: in a worker the module of a script is another one, where no text means them.
        entry.settings.__annotations__ = get_type_hints(entry.settings, include_extras=True)


def registered() -> dict[str, dict[str, Any]]:
    """The entries from outside the package, by group and name."""
    return {group: dict(parts) for group, parts in OWN.items()}


def own_parts(config: Config) -> list[str]:
    """What a run uses from outside the package, such as ``op wide``."""
    used = {
        **{group: [getattr(config, group).name] for group in BUILT_IN},
        "network": [getattr(config.algorithm, "network", None)],
        "op": config.search_space.own_ops,
        "loss": [config.training.loss],
        "metric": OWN["metric"],
    }
    return [f"{group} {name}" for group, of in used.items() for name in of if name in OWN[group]]


def packed(function: Callable[..., Any]) -> bytes | None:
    """A function of the package, pickled with what is registered; None if that cannot be sent."""
    import cloudpickle

    try:
        return cloudpickle.dumps(partial(_restored, registered(), function))
    except (pickle.PicklingError, TypeError, AttributeError):  # an open file, a lock, ...
        return None


def _restored(carried: Mapping[str, Any], function: Callable[..., Any], *asked: Any) -> Any:
    restore(carried)
    return function(*asked)


def restore(carried: Mapping[str, Mapping[str, Any]]) -> None:
    """Take what :func:`registered` returned in another process; what is here already stays."""
    for group, parts in carried.items():
        TABLES[group].update({**parts, **entries(group)})
