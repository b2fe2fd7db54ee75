"""Whether all that a run needs can be made."""

from __future__ import annotations

import torch

from fednas_flwr.builders.clients import check_public, make_objective
from fednas_flwr.builders.data import make_data
from fednas_flwr.builders.hardware import check_hardware
from fednas_flwr.builders.networks import (
    describe_network,
    given_genotype,
    make_device,
    make_network,
    supernet_space,
)
from fednas_flwr.builders.refusals import searches
from fednas_flwr.config import Config, DifferentialPrivacy
from fednas_flwr.data.loaders import make_client_data


def check_buildable(config: Config) -> None:
    """Raise ConfigError unless device, data and networks of ``config`` can be made here.

    Leaves nothing but the cache of prepared data; networks are made without their tensors.
    """
    make_device(config.device)
    data = make_data(config)
    (prepared, parts), genotype = data, given_genotype(config)
    for part in parts:
        key, fractions = config.dataset.split_key.encode(), config.dataset.fractions
        make_client_data(prepared, part, key=key, fractions=fractions)
    make_objective(config, prepared.train.class_names, torch.device("cpu"))
    if isinstance(config.privacy, DifferentialPrivacy):
        check_public(config, prepared)
    if genotype is None and searches(config):
        space = supernet_space(config, prepared)
        check_hardware(config, space)
        genotype = space.random_genotype(torch.Generator())
        with torch.device("meta"):
            space.supernet()
    if "retrain" in config.stages:
        description = describe_network(config, prepared, genotype)
        with torch.device("meta"):
            make_network(description)
