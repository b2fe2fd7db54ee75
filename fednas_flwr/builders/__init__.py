"""The only place where a name becomes an object: plain dicts, explicit arguments.

Everything above this package holds a :class:`~fednas_flwr.config.Config`; everything below gets
numbers and objects. What imports torch is imported when it is first asked for, so that a
configuration is checked at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fednas_flwr.builders.algorithms import ALGORITHMS, Algorithm
from fednas_flwr.builders.configuration import check_combinations, load_config, parse_config
from fednas_flwr.builders.spaces import SEARCH_SPACES, SpaceEntry

if TYPE_CHECKING:
    from fednas_flwr.builders.check import check_buildable
    from fednas_flwr.builders.clients import (
        PRIVATE_SITE_KEYS,
        make_client,
        make_courier,
        make_site_gate,
    )
    from fednas_flwr.builders.data import (
        has_real_sites,
        make_data,
        make_server_data,
        make_site_data,
    )
    from fednas_flwr.builders.hardware import check_hardware, load_table, read_table
    from fednas_flwr.builders.networks import (
        describe_network,
        described_space,
        given_genotype,
        load_description,
        load_exported,
        load_network,
        make_device,
        make_network,
        make_space,
        supernet_space,
    )
    from fednas_flwr.builders.strategies import (
        make_retraining,
        make_search,
        retrain_releases,
        search_releases,
    )

__all__ = [
    "ALGORITHMS",
    "PRIVATE_SITE_KEYS",
    "SEARCH_SPACES",
    "Algorithm",
    "SpaceEntry",
    "check_buildable",
    "check_combinations",
    "check_hardware",
    "describe_network",
    "described_space",
    "given_genotype",
    "has_real_sites",
    "load_config",
    "load_description",
    "load_exported",
    "load_network",
    "load_table",
    "make_client",
    "make_courier",
    "make_data",
    "make_device",
    "make_network",
    "make_retraining",
    "make_search",
    "make_server_data",
    "make_site_data",
    "make_site_gate",
    "make_space",
    "parse_config",
    "read_table",
    "retrain_releases",
    "search_releases",
    "supernet_space",
]


def __getattr__(name: str) -> Any:
    """Return what is imported above for type checkers only."""
    if name in __all__:
        for module in ("data", "networks", "hardware", "clients", "strategies", "check"):
            names = vars(import_module(f"{__name__}.{module}"))
            if name in names:
                return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
