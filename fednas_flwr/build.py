"""The only place where a name becomes an object: plain dicts, explicit arguments.

Everything above this module holds a :class:`Config`; everything below gets numbers and objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from fednas_flwr.clients.client import Augmentation, Client
from fednas_flwr.config import (
    Config,
    FixedNetwork,
    GradientSearch,
    LocalSearch,
    RandomSearch,
)
from fednas_flwr.data.datasets import Prepared, prepare
from fednas_flwr.data.loaders import make_client_data
from fednas_flwr.data.partitioners import load_partition, partition
from fednas_flwr.errors import ConfigError, unknown_choice
from fednas_flwr.evaluation.export import METADATA_KEY, MODEL_FILE
from fednas_flwr.evaluation.fixed_networks import FIXED_NETWORKS
from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier, Emit, ignore_events
from fednas_flwr.randomness import seeded
from fednas_flwr.search_spaces.darts import DARTSSpace
from fednas_flwr.search_spaces.genotype import Genotype, from_json, to_json
from fednas_flwr.search_spaces.nasbench201 import NASBench201Space
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import RoundStrategy
from fednas_flwr.strategies.fed_darts import FedDARTS
from fednas_flwr.strategies.fedavg import FedAvg
from fednas_flwr.strategies.fnas import FNAS
from fednas_flwr.strategies.random_search import RandomSearch as RandomSearchStrategy

Description = Mapping[str, Any]  # what a network is built from, JSON values only

SPACES: dict[str, Callable[..., SearchSpace]] = {
    "darts": DARTSSpace,
    "nasbench201": NASBench201Space,
}


def make_device(name: str) -> torch.device:
    """Return the device; ``auto`` is CUDA where there is one.

    Raises:
        ConfigError: ``cuda`` was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch finds no CUDA device; set device=cpu or auto.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def make_space(
    name: str,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    channels: int,
    num_cells: int,
    norm: str,
) -> SearchSpace:
    """Return a search space; the sizes are those of its supernet."""
    if name not in SPACES:
        raise unknown_choice("search_space.name", name, SPACES)
    return SPACES[name](
        input_shape=input_shape,
        num_classes=num_classes,
        channels=channels,
        num_cells=num_cells,
        norm=norm,
    )


def make_data(config: Config) -> tuple[Prepared, list[np.ndarray]]:
    """Return the prepared records and the rows of every client."""
    settings, split = config.dataset, config.partition
    prepared = prepare(
        cache=Path(settings.cache).expanduser(),
        name=settings.name,
        root=Path(settings.root).expanduser() if settings.root else None,
        download=settings.download,
        sites=split.name == "sites",
        server_test=settings.server_test,
        limit_train=settings.limit_train,
        limit_test=settings.limit_test,
        mean=settings.mean,
        std=settings.std,
        image_size=settings.image_size,
        channels=settings.channels,
        class_names=settings.class_names,
        label=settings.label,
        id_column=settings.id_column,
        numeric=settings.numeric,
        categorical=settings.categorical,
        categories=settings.categories,
        ignore=settings.ignore,
        statistics=settings.statistics,
    )
    if split.file is not None:
        parts = load_partition(Path(split.file).expanduser())
        _check_partition(
            parts, file=split.file, clients=config.clients, records=len(prepared.train)
        )
        return prepared, parts
    return prepared, partition(
        prepared.train,
        name=split.name,
        clients=config.clients,
        seed=split.seed,
        alpha=split.alpha,
        min_size=split.min_size,
        groups=split.groups,
        clients_per_group=split.clients_per_group,
        fractions=split.fractions,
        column=split.column,
    )


def make_client(
    config: Config,
    index: int,
    *,
    data: tuple[Prepared, list[np.ndarray]],
    networks: dict[str, nn.Module],
    tag: str = "",
) -> Client:
    """Return client ``index`` of a run.

    Args:
        config: The run's configuration.
        index: From 0 to ``config.clients - 1``.
        data: What :func:`make_data` returns; shared by the clients of a process.
        networks: Built networks, shared likewise: clients of a process take turns.
        tag: What the site calls itself.
    """
    prepared, parts = data
    device = make_device(config.device)

    def build_network(description: Description) -> nn.Module:
        if description["name"] == "supernet":
            return supernet_space(config, prepared).supernet()
        return make_network(description)

    return Client(
        index=index,
        seed=config.seed,
        data=make_client_data(
            prepared,
            parts[index],
            key=config.dataset.split_key.encode(),
            fractions=config.dataset.fractions,
        ),
        class_names=prepared.train.class_names,
        device=device,
        threads=config.threads,
        make_network=build_network,
        augmentation=Augmentation(
            crop_padding=config.dataset.crop_padding,
            flip=config.dataset.flip,
            cutout=config.dataset.cutout,
        ),
        networks=networks,
        tag=tag,
    )


def supernet_space(config: Config, prepared: Prepared) -> SearchSpace:
    """Return the search space at the supernet's size for the prepared data."""
    return make_space(
        **asdict(config.search_space),
        input_shape=prepared.input_shape,
        num_classes=prepared.num_classes,
    )


def describe_network(
    config: Config, prepared: Prepared, genotype: Genotype | None
) -> dict[str, Any]:
    """Return what :func:`make_network` builds the network to retrain from.

    Args:
        config: Gives the sizes of retraining, or the name of a fixed network.
        prepared: Gives shape and number of classes.
        genotype: The derived architecture; None for a fixed network.
    """
    shapes = {"input_shape": list(prepared.input_shape), "num_classes": prepared.num_classes}
    if genotype is None:
        if not isinstance(config.algorithm, FixedNetwork):
            raise ValueError("only algorithm=fedavg has a network without a genotype")
        if config.algorithm.network not in FIXED_NETWORKS:
            raise unknown_choice("algorithm.network", config.algorithm.network, FIXED_NETWORKS)
        return {"name": config.algorithm.network, **shapes}
    return _describe_derived(
        genotype,
        shapes,
        channels=config.retrain.channels,
        num_cells=config.retrain.num_cells,
        norm=config.retrain.norm,
        auxiliary=config.retrain.auxiliary_weight > 0,
    )


def make_network(description: Description) -> nn.Module:
    """Return a newly initialised network; draws from torch's global generator.

    Raises:
        ConfigError: The description's name, genotype or sizes cannot be built.
    """
    input_shape = tuple(description["input_shape"])
    if description["name"] in FIXED_NETWORKS:
        return FIXED_NETWORKS[description["name"]](input_shape, description["num_classes"])
    if description["name"] != "derived":
        raise unknown_choice("network", description["name"], ["derived", *FIXED_NETWORKS])
    genotype = from_json(json.dumps(description["genotype"]))
    sizes = {"channels": description["channels"], "num_cells": description["num_cells"]}
    space = make_space(
        genotype.space,
        input_shape=input_shape,
        num_classes=description["num_classes"],
        norm=description["norm"],
        **sizes,
    )
    space.check(genotype)
    return space.network(genotype, **sizes, auxiliary=description["auxiliary"])


def make_courier(config: Config, *, run: str, emit: Emit = ignore_events) -> Courier:
    """Return the server's way to the clients, with the runtime's quorum and deadlines."""
    return Courier(
        run=run,
        num_clients=config.clients,
        quorum=config.runtime.quorum,
        deadline_s=config.runtime.deadline_s,
        connect_s=config.runtime.connect_s,
        emit=emit,
    )


def make_search(
    config: Config, prepared: Prepared, courier: Courier, checkpoints: CheckpointFolder
) -> RoundStrategy:
    """Return the strategy of the search stage, its supernet initialised from the run's seed.

    Raises:
        ValueError: The algorithm does not search.
    """
    kind = type(config.algorithm)
    if kind not in SEARCHES:
        raise ValueError(f"algorithm={config.algorithm.name} does not search")
    return SEARCHES[kind](config, prepared, courier, checkpoints)


def _make_fed_darts(
    config: Config, prepared: Prepared, courier: Courier, checkpoints: CheckpointFolder
) -> RoundStrategy:
    algorithm = config.algorithm
    assert isinstance(algorithm, LocalSearch)
    space = supernet_space(config, prepared)
    return FedDARTS(
        _seeded_supernet(config, space),
        courier,
        space=space,
        rule=algorithm.rule,
        local_epochs=algorithm.local_epochs,
        batch_size=algorithm.batch_size,
        weights=algorithm.weights,
        alphas=algorithm.alphas,
        validation_weight=algorithm.validation_weight,
        checkpoints=checkpoints,
    )


def _make_fnas(
    config: Config, prepared: Prepared, courier: Courier, checkpoints: CheckpointFolder
) -> RoundStrategy:
    algorithm = config.algorithm
    assert isinstance(algorithm, GradientSearch)
    space = supernet_space(config, prepared)
    return FNAS(
        _seeded_supernet(config, space),
        courier,
        space=space,
        order=algorithm.order,
        reduce=algorithm.reduce,
        local_steps=algorithm.local_steps,
        batch_size=algorithm.batch_size,
        evaluate_every=algorithm.evaluate_every,
        weights=algorithm.weights,
        alphas=algorithm.alphas,
        checkpoints=checkpoints,
    )


def _make_random_search(
    config: Config, prepared: Prepared, courier: Courier, checkpoints: CheckpointFolder
) -> RoundStrategy:
    algorithm, sizes = config.algorithm, config.search_space
    assert isinstance(algorithm, RandomSearch)
    shapes = {"input_shape": list(prepared.input_shape), "num_classes": prepared.num_classes}
    return RandomSearchStrategy(
        courier,
        space=supernet_space(config, prepared),
        describe=lambda genotype: _describe_derived(
            genotype,
            shapes,
            channels=sizes.channels,
            num_cells=sizes.num_cells,
            norm=sizes.norm,
            auxiliary=False,
        ),
        make_network=lambda description: _seeded_network(config, description),
        seed=config.seed,
        trial_rounds=algorithm.trial_rounds,
        local_epochs=algorithm.local_epochs,
        batch_size=algorithm.batch_size,
        weights=algorithm.weights,
        checkpoints=checkpoints,
    )


SEARCHES: dict[type, Callable[[Config, Prepared, Courier, CheckpointFolder], RoundStrategy]] = {
    LocalSearch: _make_fed_darts,
    GradientSearch: _make_fnas,
    RandomSearch: _make_random_search,
}


def make_retraining(
    config: Config, description: Description, courier: Courier, checkpoints: CheckpointFolder
) -> tuple[FedAvg, nn.Module]:
    """Return the strategy of the retrain stage and its network, initialised from the run's seed."""
    network = _seeded_network(config, description)
    settings = config.retrain
    strategy = FedAvg(
        network,
        courier,
        description=description,
        local_epochs=settings.local_epochs,
        batch_size=settings.batch_size,
        weights=settings.weights,
        auxiliary_weight=settings.auxiliary_weight,
        drop_path_prob=settings.drop_path_prob,
        checkpoints=checkpoints,
    )
    return strategy, network


def load_network(run_folder: str | Path) -> nn.Module:
    """Return the trained network of a run, on the CPU, in evaluation mode.

    Raises:
        ConfigError: The folder holds no exported model.

    Example:
        ``network = load_network("runs/quickstart"); logits = network(images)``
    """
    path = Path(run_folder) / MODEL_FILE
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: the run has not reached its export.")
    with safe_open(path, framework="pt") as file:
        description = json.loads(file.metadata()[METADATA_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    network = make_network(description)
    network.load_state_dict(tensors)
    return network.eval()


def _seeded_supernet(config: Config, space: SearchSpace) -> Supernet:
    with seeded(config.seed, "supernet"):
        return space.supernet()


def _seeded_network(config: Config, description: Description) -> nn.Module:
    with seeded(config.seed, "network"):
        return make_network(description)


def _describe_derived(
    genotype: Genotype,
    shapes: Mapping[str, Any],
    *,
    channels: int,
    num_cells: int,
    norm: str,
    auxiliary: bool,
) -> dict[str, Any]:
    return {
        "name": "derived",
        "genotype": json.loads(to_json(genotype)),
        **shapes,
        "channels": channels,
        "num_cells": num_cells,
        "norm": norm,
        "auxiliary": auxiliary,
    }


def _check_partition(parts: list[np.ndarray], *, file: str, clients: int, records: int) -> None:
    if len(parts) != clients:
        raise ConfigError(f"{file} divides over {len(parts)} clients, but clients={clients}.")
    largest = max(int(part.max()) for part in parts)
    if largest >= records:
        raise ConfigError(
            f"{file} names record {largest}, but there are {records}: it is of another data set."
        )
