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
from fednas_flwr.builders.refusals import check_groups, searches
from fednas_flwr.config import Config, Dataset, DifferentialPrivacy
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.data.loaders import make_client_data
from fednas_flwr.errors import ConfigError, NoEffectError, show
from fednas_flwr.memory import check_fits

COPIES = 4  # of a network's weights that are in memory at a time


def check_buildable(config: Config) -> None:
    """Raise ConfigError unless device, data and networks of ``config`` can be made here.

    Also for settings that the prepared data rules out.

    Leaves nothing but the cache of prepared data; networks are made without their tensors.
    """
    make_device(config.device)
    check_groups(config)
    data = make_data(config)
    (prepared, parts), genotype = data, given_genotype(config)
    for part in parts:
        key, fractions = config.dataset.split_key.encode(), config.dataset.fractions
        make_client_data(prepared, part, key=key, fractions=fractions)
    make_objective(config, prepared.train.class_names, torch.device("cpu"))
    _check_images(config.dataset, prepared)
    if isinstance(config.privacy, DifferentialPrivacy):
        check_public(config, prepared)
        _check_delta(config.privacy, records=max(map(len, parts)))
    if genotype is None and searches(config):
        space = supernet_space(config, prepared)
        check_hardware(config, space)
        genotype = space.random_genotype(torch.Generator())
        with torch.device("meta"):
            space.supernet()
    description = describe_network(config, prepared, genotype)  # also of a search alone: its costs
    with torch.device("meta"):
        make_network(description)


def check_memory(config: Config) -> None:
    """Refuse networks whose training takes more memory than the machine has.

    Counted are weights only, in float32: the server's, a client's, its gradients and its reply.
    """
    prepared, _ = make_data(config)
    networks: dict[str, torch.nn.Module] = {}
    genotype = given_genotype(config)
    if searches(config):
        space = supernet_space(config, prepared)
        genotype = space.random_genotype(torch.Generator())
        with torch.device("meta"):
            networks["search_space"] = space.supernet()
    with torch.device("meta"):
        networks["retrain"] = make_network(describe_network(config, prepared, genotype))
    for group, network in networks.items():
        num_parameters = sum(tensor.numel() for tensor in network.parameters())
        check_fits(
            COPIES * 4 * num_parameters,
            f"{group}: a network of {num_parameters:.3g} parameters",
            f"lower its sizes ({', '.join(_sizes(getattr(config, group), group))})",
        )


def _sizes(settings: object, group: str) -> list[str]:
    """Return the settings of a group that a network's size follows from, with their values."""
    names = ("channels", "num_cells", "widths", "head", "width", "skeleton")
    values = {name: getattr(settings, name, None) for name in names}
    return [f"{group}.{name}={value}" for name, value in values.items() if value is not None]


def _check_images(dataset: Dataset, prepared: Prepared) -> None:
    """Refuse records without values, and augmentation that a table or a small image can't have."""
    if 0 in prepared.input_shape:
        raise ConfigError(
            f"dataset={dataset.name}: its records have shape {prepared.input_shape}, so that "
            "networks would have no inputs; expected at least one column or pixel."
        )
    for setting in ("crop_padding", "flip", "cutout"):
        value = getattr(dataset, setting)
        if value and len(prepared.input_shape) == 1:
            raise NoEffectError(
                f"dataset.{setting}={show(value)} has no effect with a table: remove it."
            )
        if setting != "flip" and value and value >= min(prepared.input_shape[1:]):
            raise ConfigError(
                f"dataset.{setting}={show(value)} is out of range: expected 0 to below "
                f"{min(prepared.input_shape[1:])}, the side of the images; lower it."
            )


def _check_delta(privacy: DifferentialPrivacy, *, records: int) -> None:
    """Refuse a delta with which publishing one of the records outright would count as private."""
    if not privacy.large_delta and privacy.delta * records >= 1:
        raise ConfigError(
            f"privacy.delta={privacy.delta:g} with {records} records of a client: expected below "
            f"1 / {records} = {1 / records:.3g}, since with more a client could publish one record "
            "outright; lower it, or set privacy.large_delta=true."
        )
