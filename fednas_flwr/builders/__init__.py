"""The only place where a name becomes an object: plain dicts, explicit arguments.

Everything above this package holds a :class:`~fednas_flwr.config.Config`; everything below gets
numbers and objects.
"""

from fednas_flwr.builders.check import check_buildable
from fednas_flwr.builders.clients import (
    PRIVATE_SITE_KEYS,
    make_client,
    make_courier,
    make_site_gate,
)
from fednas_flwr.builders.data import has_real_sites, make_data, make_server_data, make_site_data
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
from fednas_flwr.builders.retraining import make_retraining
from fednas_flwr.builders.searches import SEARCHES, make_search

__all__ = [
    "PRIVATE_SITE_KEYS",
    "SEARCHES",
    "check_buildable",
    "check_hardware",
    "describe_network",
    "described_space",
    "given_genotype",
    "has_real_sites",
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
    "read_table",
    "supernet_space",
]
