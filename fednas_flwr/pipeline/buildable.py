"""Checks that all parts of a run can be made and fit the records."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import nn

from fednas_flwr.algorithms.fdnas import whole_search
from fednas_flwr.algorithms.stage_strategies import prior_alphas, strategy_of
from fednas_flwr.base.errors import ConfigError, NoEffectError, show
from fednas_flwr.base.memory import check_fits
from fednas_flwr.client.making import check_public, make_objective, num_units
from fednas_flwr.data import loaders
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.data.prepared import make_data
from fednas_flwr.data.records import Records
from fednas_flwr.models import networks as nets
from fednas_flwr.settings import Config, Dataset, DifferentialPrivacy
from fednas_flwr.settings.incompatible import chooses, searches
from fednas_flwr.settings.names import CLIENT
from fednas_flwr.settings.registry import SUPERNET, algorithm_of

COPIES = 4  # of a network's weights in memory: server's, a client's, its gradients, its reply
THREADS_PER_CORE = 8
LARGEST_FEATURE = 1e18  # float32 holds its square


@dataclass(frozen=True)
class Made:
    """Parts that :func:`check_buildable` has made.

    Attributes:
        records: Those of all clients.
        parts: The rows of every client.
        networks: The network that each stage trains (``search``, ``retrain``), without tensors.
    """

    records: Records
    parts: list[np.ndarray]
    networks: Mapping[str, nn.Module]


def check_buildable(config: Config) -> Made:
    """Build the data and the networks of a run, as far as it can be tried on this device.

    Leaves nothing but the cache of prepared data.

    Raises:
        ConfigError: Device, data or networks cannot be made, or do not fit one another.
    """
    nets.make_device(config.runtime.device)
    _check_threads(config)
    data = make_data(config)
    (prepared, parts), genotype = data, nets.given_genotype(config)

    def clients() -> Iterable[loaders.ClientData]:
        division = config.dataset.division
        return (loaders.make_client_data(prepared, part, **division) for part in parts)

    if config.secure_sum and prepared.uses_own_statistics:
        raise ConfigError(
            "secure_sum=true with a table whose dataset.statistics are not declared: the server "
            "would see each client's own; declare them as {column: [mean, std], ...}, or "
            "dataset.ranges={column: [low, high], ...}."
        )
    make_objective(config, prepared.train, torch.device("cpu"))
    _check_images(config.dataset, prepared)
    if isinstance(config.privacy, DifferentialPrivacy):
        check_public(config, prepared)
        units = [num_units(prepared.train, part) for part in parts]
        whole = config.privacy.unit == CLIENT
        _check_delta(config.privacy, number=config.clients if whole else max(units))
    networks: dict[str, nn.Module] = {}
    trained: dict[str, nn.Module] = {}
    if genotype is None and searches(config):
        space = nets.supernet_space(config, prepared)
        strategy_of(config, "search").check(config, prepared, space)
        prior_alphas(config, space)
        genotype = space.random_genotype(torch.Generator())
        with torch.device("meta"):
            supernet = space.supernet()
        _check_memory(config, "search_space", supernet)
        trains = algorithm_of(config).trains
        if trains == SUPERNET:
            networks["search"] = supernet
        if trains is not None and getattr(config.algorithm, "trial_rounds", None) != 0:
            trained["search"] = supernet  # or networks with the layers of its ops
    # also of a search alone: its costs
    description = nets.describe_network(config, prepared, genotype)
    with torch.device("meta"):
        network = nets.make_network(description)
    _check_memory(config, "retrain", network)
    if "retrain" in config.stages:
        networks["retrain"] = network
    for stage, network in networks.items():
        _check_values_per_norm(config, stage, network, shape=prepared.input_shape)
    check_features(prepared, clients())
    if not isinstance(config.privacy, DifferentialPrivacy):
        check_parts(config, prepared, clients(), trained | networks)
    if pools_records(config):
        check_linear_baseline(prepared, clients())
    return Made(prepared.train, parts, networks)


def _check_threads(config: Config) -> None:
    """Refuse simulated clients with so many threads that they only wait for one another."""
    most = THREADS_PER_CORE * (os.cpu_count() or 1)
    if config.runtime.name != "deployment" and config.runtime.threads > most:
        raise ConfigError(
            f"runtime.threads={config.runtime.threads} is out of range: expected at most {most}, "
            f"{THREADS_PER_CORE} for each of this machine's cores; lower it."
        )


def _check_memory(config: Config, group: str, network: nn.Module) -> None:
    """Refuse a network whose weights alone take more memory than the machine has, in float32."""
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
    for setting, value in dataset.augmentation.items():
        if value and len(prepared.input_shape) == 1:
            raise NoEffectError(
                f"dataset.{setting}={show(value)} has no effect with a table: remove it."
            )
        if setting != "flip" and value and value >= min(prepared.input_shape[1:]):
            raise ConfigError(
                f"dataset.{setting}={show(value)} is out of range: expected 0 to below "
                f"{min(prepared.input_shape[1:])}, the side of the images; lower it."
            )


def _check_delta(privacy: DifferentialPrivacy, *, number: int) -> None:
    """Refuse a delta with which publishing one of so many units outright would count as private."""
    units = "clients" if privacy.unit == CLIENT else "records of a client"
    if not privacy.large_delta and privacy.delta * number >= 1:
        raise ConfigError(
            f"privacy.delta={privacy.delta:g} with {number} {units}: expected below "
            f"1 / {number} = {1 / number:.3g}, since with more one of them could be published "
            "outright; lower it, or set privacy.large_delta=true."
        )


def check_features(prepared: Prepared, clients: Iterable[loaders.ClientData]) -> None:
    """Refuse features that are too large for any network once they are normalised."""
    test = prepared.server_test
    images = prepared.train.features.dtype == torch.uint8  # whose whole range counts, for all alike
    splits = (
        (f"client {i}", part)
        for i, client in enumerate(islice(clients, 1) if images else clients)
        for part in (client.train, client.validation, client.test)
    )
    own = [] if test is None else [loaders.server_split(test, prepared.mean, prepared.std)]
    for owner, split in chain(splits, (("the server's test set", split) for split in own)):
        column, value = loaders.largest_feature(split)
        if value <= LARGEST_FEATURE:
            continue
        names = prepared.train.feature_names
        where = f"feature {names[column]}" if names else f"channel {column}"
        cure = f"dataset.statistics.{names[column]}" if names else "dataset.mean and dataset.std"
        raise ConfigError(
            f"{where} of {owner} is beyond {LARGEST_FEATURE:g} after normalisation, which no "
            f"network can compute with: correct {cure}, or the data."
        )


def check_parts(
    config: Config,
    prepared: Prepared,
    clients: Iterable[loaders.ClientData],
    networks: Mapping[str, nn.Module],
) -> None:
    """Refuse clients without the records that they are asked to train on, or with too few."""
    holds_out = "retrain" in config.stages and config.retrain.evaluate_every > 0
    for index, client in enumerate(clients):
        if holds_out and len(client.validation) == 0:
            raise ConfigError(
                f"client {index} has no validation record, on which "
                f"retrain.evaluate_every={config.retrain.evaluate_every} measures: set it to 0, or "
                "raise dataset.fractions.validation="
                f"{config.dataset.fractions['validation']:g}."
            )
        parts = {"train": client.train, "validation": client.validation} if chooses(config) else {}
        for name, part in parts.items():
            if len(part) == 0:
                raise ConfigError(
                    f"client {index} has no {name} record, by which {config.algorithm.name} "
                    f"{'chooses' if name == 'validation' else 'searches'}: raise "
                    f"dataset.fractions.{name}={config.dataset.fractions[name]:g}, or give it more "
                    "records (fewer clients, a larger partition.min_size)."
                )
        held_out = client.validation if holds_out else ()
        if len(client.train) + len(client.validation) == len(held_out):
            raise ConfigError(
                f"client {index} has no record to train on: raise dataset.fractions.train="
                f"{config.dataset.fractions['train']:g}."
            )
        smallest = {
            "search": min(len(client.train), len(client.validation)),
            "retrain": len(client.train)
            if chooses(config) or holds_out
            else len(client.train) + len(client.validation),
        }
        for stage, network in networks.items():
            batch_size = _batch_size(config, stage)
            if smallest[stage] == 1 or batch_size == 1:
                _check_single_record(network, stage, index, batch_size, shape=prepared.input_shape)


def check_linear_baseline(prepared: Prepared, clients: Iterable[loaders.ClientData]) -> None:
    """Refuse logistic regression on records that are all of one class."""
    if prepared.server_test is None:
        return
    if prepared.train.multi_label:
        return  # a label that all or none have is told without a model
    parts = (part for client in clients for part in (client.train, client.validation))
    classes = {label for part in parts for label in part.labels[part.rows].tolist()}
    if len(classes) < 2:
        only = prepared.train.class_names[min(classes)]
        raise ConfigError(
            f"dataset.linear_baseline=true, but all training records are of the class {only}: "
            "logistic regression needs two; set dataset.linear_baseline=false."
        )


def pools_records(config: Config) -> bool:
    """Return whether a run compares with a linear model of all clients' pooled records."""
    return (
        config.dataset.linear_baseline
        and "evaluate" in config.stages
        and config.runtime.name != "deployment"
        and not isinstance(config.privacy, DifferentialPrivacy)
    )


def _batch_size(config: Config, stage: str) -> int | None:
    """Return the largest batch that a stage trains on, None for all of a part's records."""
    retraining = config.retrain.batch_size
    if stage == "retrain":
        return retraining
    size: int | None = getattr(whole_search(config).algorithm, "batch_size", retraining)
    return size


def _check_values_per_norm(
    config: Config, stage: str, network: nn.Module, *, shape: tuple[int, ...]
) -> None:
    """Refuse a network in which a group norm has one value to normalise, which it forgets."""
    error = _error_of_one_record(network.eval(), shape)
    if error is not None:
        sizes = _sizes(config.search_space, "search_space") + _sizes(config.retrain, "retrain")
        raise ConfigError(
            f"{stage}: of a single record a group norm of the network has one value only, which "
            f"it makes 0: raise its sizes ({', '.join(sizes)})."
        ) from error


def _check_single_record(
    network: nn.Module, stage: str, client: int, batch_size: int | None, *, shape: tuple[int, ...]
) -> None:
    """Refuse a network that cannot be trained on a batch of one record."""
    error = _error_of_one_record(network.train(), shape)  # of batch normalisation
    if error is not None:
        norm = "search_space.norm" if stage == "search" else "retrain.norm"
        raise ConfigError(
            f"{norm}=batch normalises no batch of one record, which client {client} trains on in "
            f"{stage} (batch_size={batch_size}): set {norm}=group, or give clients more records."
        ) from error


def _error_of_one_record(network: nn.Module, shape: tuple[int, ...]) -> ValueError | None:
    """The error of a network without tensors whose norm has too few values of one record."""
    try:
        with torch.random.fork_rng(), suppress(NotImplementedError, RuntimeError):
            network(torch.zeros(1, *shape, device="meta"))
    except ValueError as error:
        return error
    return None
