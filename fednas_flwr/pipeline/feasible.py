"""Checks of a run before it begins, from its configuration and the prepared data.

:func:`check_run` is called before the first message, and before there is a run folder. What only
the clients know, such as the budgets of real sites, is learnt from their answers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from fednas_flwr.algorithms.stage_strategies import make_sampling, strategy_of
from fednas_flwr.base.errors import ConfigError, NoEffectError, show
from fednas_flwr.base.memory import check_fits
from fednas_flwr.client import making
from fednas_flwr.data import loaders
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.data.prepared import client_names, make_data
from fednas_flwr.data.records import Parts
from fednas_flwr.models import networks as nets
from fednas_flwr.pipeline import schedule
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.privacy.books.renyi_filter import Reading, RenyiFilter, covered_steps
from fednas_flwr.privacy.mechanism.record_gradients import refuse_batch_norm
from fednas_flwr.privacy.mechanism.renyi import booked_unit
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.policy import DataSetPolicy, check_action, check_planned
from fednas_flwr.protocol.states import network_states
from fednas_flwr.runs.checkpoints import KEEP
from fednas_flwr.runs.run_folder import check_room, check_writable
from fednas_flwr.search.objective import check_own_loss
from fednas_flwr.settings import Config, Dataset, DifferentialPrivacy
from fednas_flwr.settings.incompatible import chooses
from fednas_flwr.settings.names import CLIENT, SPLITS
from fednas_flwr.settings.registry import SUPERNET, algorithm_of


def check_run(config: Config) -> None:
    """Raise ConfigError if device, data, networks or simulated sites make the run impossible.

    Nothing is left behind but the cache of prepared data.
    """
    made = check_buildable(config)
    check_room(config, written_bytes(config, made.networks))
    if config.dp:
        check_sites(config, made)


def written_bytes(config: Config, networks: Mapping[str, nn.Module]) -> int:
    """Return a lower bound of the bytes that checkpoints and exported models take on disk.

    It excludes the moments of optimisers, the ONNX file, and networks that the search is yet to
    find.

    Args:
        config: The run's configuration.
        networks: The network that each stage trains.
    """
    copies = {"search": min(KEEP, config.rounds)}
    if "search" not in networks and not config.searches:
        exported = 1 if "export" in config.stages else 0
        copies["retrain"] = min(KEEP, config.retrain.rounds or KEEP) + exported
    return sum(
        copies.get(stage, 0) * tensor.numel() * tensor.element_size()
        for stage, network in networks.items()
        for state in network_states(network).values()
        for tensor in state.values()
    )


def check_sites(config: Config, made: Made) -> None:
    """Refuse a schedule that the policies or budgets of too many simulated sites refuse.

    Args:
        config: The configuration of a private run.
        made: The run's records and networks.
    """
    privacy = config.private
    for index in range(config.clients) if privacy.sites is not None else ():
        if (folder := making.simulated_site(config, index)) is not None:
            check_writable("privacy.sites", folder)
    policies = [
        making.simulated_policy(config, index, made.prepared.train, rows)
        for index, rows in enumerate(made.parts)
    ]
    for index, policy in enumerate(policies):
        if privacy.data_set not in policy.data_sets:
            raise ConfigError(
                f"privacy.data_set={privacy.data_set}: client {index}'s policy has only "
                f"{', '.join(policy.data_sets)}."
            )
        making.check_unit(policy.data_sets[privacy.data_set].unit, made.prepared.train)
    rules = [policy.data_sets[privacy.data_set] for policy in policies]
    declared = [allowed.by_split for allowed in rules]
    sampling = make_sampling(config, declared)
    least = [allowed.least_noise_multiplier for allowed in rules]
    config = schedule.for_data(config, made.prepared, least_noise=least)
    privacy = config.private
    schedules = schedule.make_schedules(
        config, declared, done={}, sampling=sampling, least_noise=least
    )
    sizes = {
        (stage, kind): sum(tensor.numel() for tensor in state.values())
        for stage, network in made.networks.items()
        for kind, state in network_states(network).items()
    }
    covers: dict[str, dict[int, dict[str, Any]]] = {}
    is_secure = privacy.test_seed is None
    for index, turns in enumerate(schedule.turns_of(config, sampling)):
        stages: dict[str, list[Reading]] = {}
        for planned in schedules[index]:
            try:
                check_action(policies[index], privacy.data_set, planned.action, is_secure=is_secure)
                num_values = sizes.get((planned.stage, planned.kind), 1)
                check_planned(rules[index], planned, num_values=num_values)
            except ConfigError as error:
                named = _settings(privacy, planned)
                raise ConfigError(f"{named}: client {index}: {error}") from error
            # the site may charge it to more splits, once it knows its records
            reading = (planned.release(declared[index]), planned.splits)
            stages.setdefault(planned.stage, []).append(reading)
        to_do = {stage: len(rounds) for stage, rounds in turns.items()}
        covered = covered_steps(_left(config, rules[index], client=index), stages)
        for cover in schedule.covered_rounds(schedules[index], covered, to_do):
            covers.setdefault(cover["stage"], {})[index] = cover
    for of_stage in covers.values():
        quorum = max(1, math.ceil(config.runtime.quorum * len(of_stage) - 1e-9))
        schedule.check_covered(privacy, of_stage, quorum)


def _settings(privacy: DifferentialPrivacy, planned: PlannedRelease) -> str:
    """The settings from which the terms of a release follow, with their values."""
    name, norm = planned.noise_name, f"max_grad_norm={planned.max_grad_norm:g}"
    noise = schedule.given_noise(privacy, name)
    if noise is None:
        return f"privacy.epsilon={privacy.epsilon:g} with privacy.{name}.{norm}"
    return noise if name in schedule.GIVEN else f"{noise} with {norm}"


def _left(config: Config, allowed: DataSetPolicy, *, client: int) -> dict[str, RenyiFilter]:
    """The rest of a simulated site's budget, by split."""
    folder = making.simulated_site(config, client)
    if folder is not None and (files := making.simulated_ledger(folder))[0].exists():
        with Ledger(*files) as books:
            unit = booked_unit(allowed.unit, config.dataset.person_column)
            return books.filters(allowed.account, unit, **allowed.budget)
    return dict.fromkeys(SPLITS, RenyiFilter(epsilon=allowed.epsilon, delta=allowed.delta))


COPIES = 4  # of a network's weights in memory: the server's, a client's, its gradients, its reply
THREADS_PER_CORE = 8
LARGEST_FEATURE = 1e18  # its square fits into float32


@dataclass(frozen=True)
class Made:
    """Parts that :func:`check_buildable` has built.

    Attributes:
        prepared: The data of all clients.
        parts: The rows of every client.
        networks: The network that each stage trains (``search``, ``retrain``), without tensors.
    """

    prepared: Prepared
    parts: Parts
    networks: Mapping[str, nn.Module]


def check_buildable(config: Config) -> Made:
    """Build the data and the networks of a run, as far as this device allows.

    Nothing is left behind but the cache of prepared data.

    Raises:
        ConfigError: Device, data or networks cannot be made, or do not fit one another.
    """
    device = nets.make_device(config.runtime.device)
    _check_threads(config)
    (prepared, parts), genotype = make_data(config), nets.given_genotype(config)

    def clients() -> Iterable[loaders.ClientData]:
        return (
            loaders.make_client_data(prepared, part, **config.dataset.division) for part in parts
        )

    if config.secure_sum and prepared.uses_own_statistics:
        raise ConfigError(
            "secure_sum=true with a table whose dataset.statistics are not declared: the server "
            "would see each client's own; declare them as {column: [mean, std], ...}, or "
            "dataset.ranges={column: [low, high], ...}."
        )
    if own_loss := making.make_objective(config, prepared, device).own_loss:
        shape, dtype = prepared.train.labels.shape[1:], prepared.train.labels.dtype
        labels = torch.zeros(5, *shape, dtype=dtype, device=device)
        rising = torch.linspace(-30, 30, 2 * prepared.num_classes, device=device).view(2, -1)
        logits = torch.cat([rising, rising.flip(1), 0 * rising[:1]])  # wrong, right, and unsure
        check_own_loss(str(config.training.loss), own_loss, logits, labels)
    _check_images(config.dataset, prepared)
    if config.dp:
        making.check_public(config, prepared)
        units = [making.num_units(prepared.train, part) for part in parts]
        check_delta(config.dp, number=config.clients if config.dp.unit == CLIENT else max(units))
    networks: dict[str, nn.Module] = {}
    trained: dict[str, nn.Module] = {}
    if genotype is None and config.searches:
        space = nets.supernet_space(config, prepared)
        strategy_of(config, "search").check(config, prepared, space)
        genotype = space.random_genotype(torch.Generator())
        with torch.device("meta"):
            supernet = space.supernet()
        _check_memory(config, "search_space", supernet)
        trains = algorithm_of(config).trains
        if trains == SUPERNET:
            networks["search"] = supernet
        if trains is not None and getattr(config.algorithm, "trial_rounds", None) != 0:
            trained["search"] = supernet  # or networks with the layers of its ops
    # also for a search alone, which reports the network's costs
    description = nets.describe_network(config, prepared, genotype)
    with torch.device("meta"):
        network = nets.make_network(description)
    if description["name"] == nets.FINE_TUNED:
        nets.seeded_network(config, description)  # reads the network's weights
    _check_memory(config, "retrain", network)
    if config.retrains:
        networks["retrain"] = network
    for stage, network in networks.items():
        if config.dp:
            refuse_batch_norm(network)
        has_norm = any(isinstance(layer, nn.GroupNorm) for layer in network.modules())
        if has_norm and (error := _error_of_one_record(network.eval(), prepared.input_shape)):
            sizes = _sizes(config.search_space, "search_space") + _sizes(config.retrain, "retrain")
            raise ConfigError(
                f"{stage}: of a single record a group norm of the network has one value only, "
                f"which it makes 0: raise its sizes ({', '.join(sizes)})."
            ) from error
    check_features(prepared, clients())
    if not config.dp:
        check_parts(config, prepared, clients(), trained | networks)
    if pools_records(config):
        check_linear_baseline(prepared, clients())
    return Made(prepared, parts, networks)


def _check_threads(config: Config) -> None:
    """Refuse simulated clients with so many threads that they mostly wait for one another."""
    most = THREADS_PER_CORE * (os.cpu_count() or 1)
    if config.runtime.name != "deployment" and config.runtime.threads > most:
        raise ConfigError(
            f"runtime.threads={config.runtime.threads} is out of range: expected at most {most}, "
            f"{THREADS_PER_CORE} for each of this machine's cores; lower it."
        )


def _check_memory(config: Config, group: str, network: nn.Module) -> None:
    """Refuse a network whose float32 weights alone take more memory than the machine has."""
    num_parameters = sum(tensor.numel() for tensor in network.parameters())
    check_fits(
        COPIES * 4 * num_parameters,
        f"{group}: a network of {num_parameters:.3g} parameters",
        f"lower its sizes ({', '.join(_sizes(getattr(config, group), group))})",
    )


def _sizes(settings: object, group: str) -> list[str]:
    """Return the settings of a group that determine a network's size, with their values."""
    names = ("channels", "num_cells", "widths", "head", "width", "skeleton")
    values = {name: getattr(settings, name, None) for name in names}
    return [f"{group}.{name}={value}" for name, value in values.items() if value is not None]


def _check_images(dataset: Dataset, prepared: Prepared) -> None:
    """Refuse records without values, and augmentation that tables or small images cannot have."""
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


def check_delta(privacy: DifferentialPrivacy | DataSetPolicy, *, number: int) -> None:
    """Refuse a delta so large that publishing one of ``number`` units would count as private."""
    units = "clients" if privacy.unit == CLIENT else "records of a client"
    if privacy.delta * number >= 1:
        raise ConfigError(
            f"privacy.delta={privacy.delta:g} with {number} {units}: expected below "
            f"1 / {number} = {1 / number:.3g}, since with more one of them could be published "
            "outright; lower it."
        )


def check_features(prepared: Prepared, clients: Iterable[loaders.ClientData]) -> None:
    """Refuse features that are too large for any network once they are normalised."""
    test = prepared.server_test
    images = prepared.train.features.dtype == torch.uint8  # their whole range counts
    splits = (
        (f"client {i}", part)
        for i, client in enumerate(islice(clients, 1) if images else clients)
        for part in (client.train, client.validation, client.test)
    )
    server = [] if test is None else [loaders.server_split(test, prepared.mean, prepared.std)]
    for owner, split in chain(splits, (("the server's test set", split) for split in server)):
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
    """Refuse clients that lack the records they are asked to train on, or have too few."""
    holds_out = config.retrains and config.retrain.evaluate_every > 0
    every = f"retrain.evaluate_every={config.retrain.evaluate_every}"
    uses = {"validation": f"on which {every} measures: set it to 0, or"} if holds_out else {}
    trains = algorithm_of(config).trains
    if chooses(config) and trains is not None:
        uses = {"train": f"by which {config.algorithm.name} searches:"}
        if trains == SUPERNET or config.algorithm.trains_models:
            uses["validation"] = f"by which {config.algorithm.name} chooses:"
    names = client_names(prepared.train, config.partition)
    for index, client in enumerate(clients):
        who = f"client {names[index] if names else index}"
        sizes = {"train": len(client.train), "validation": len(client.validation)}
        for name, use in uses.items():
            if not sizes[name]:
                number = sum(sizes.values()) + len(client.test)
                raise ConfigError(
                    f"{who} with {number} records has no {name} record, {use} raise dataset."
                    f"fractions.{name}={config.dataset.fractions[name]:g}, or give it more "
                    "records (fewer clients, a larger partition.min_size, small sites joined)."
                )
        trained = sizes["train"] if chooses(config) or holds_out else sum(sizes.values())
        if not trained:
            raise ConfigError(
                f"{who} has no record to train on: raise dataset.fractions.train="
                f"{config.dataset.fractions['train']:g}."
            )
        smallest = {"search": min(sizes[name] for name in uses or sizes), "retrain": trained}
        for stage, network in networks.items():
            batch_size = _batch_size(config, stage)
            if smallest[stage] != 1 and batch_size != 1:
                continue
            if error := _error_of_one_record(network.train(), prepared.input_shape):
                norm = "search_space.norm" if stage == "search" else "retrain.norm"
                raise ConfigError(
                    f"{norm}=batch normalises no batch of one record, which {who} trains on "
                    f"in {stage} (batch_size={batch_size}): set {norm}=group, or give clients "
                    "more records."
                ) from error


def check_linear_baseline(prepared: Prepared, clients: Iterable[loaders.ClientData]) -> None:
    """Refuse logistic regression on records that all have the same class."""
    train = prepared.train
    if prepared.server_test is None or train.is_regression or train.multi_label:
        return  # a label that all or none have is predicted without a model
    parts = (part for client in clients for part in (client.train, client.validation))
    classes = {label for part in parts for label in part.labels[part.rows].tolist()}
    if len(classes) < 2:
        only = prepared.train.class_names[min(classes)]
        raise ConfigError(
            f"dataset.linear_baseline=true, but all training records are of the class {only}: "
            "logistic regression needs two; set dataset.linear_baseline=false."
        )


def pools_records(config: Config) -> bool:
    """Return True if the run is compared with a linear model of all clients' pooled records."""
    return (
        config.dataset.linear_baseline
        and "evaluate" in config.stages
        and config.runtime.name != "deployment"
        and not config.dp
    )


def _batch_size(config: Config, stage: str) -> int | None:
    """Return the largest batch that a stage trains on; None for all of a part's records."""
    retraining = config.retrain.batch_size
    if stage == "retrain":
        return retraining
    return getattr(config.algorithm.whole_search(config).algorithm, "batch_size", retraining)


def _error_of_one_record(network: nn.Module, shape: tuple[int, ...]) -> ValueError | None:
    """The error of a network (without tensors) whose norm gets too few values from one record."""
    try:
        with torch.random.fork_rng(), suppress(NotImplementedError, RuntimeError):
            network(torch.zeros(1, *shape, device="meta"))
    except ValueError as error:
        return error
    return None
