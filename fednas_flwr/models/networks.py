"""Devices, search spaces and networks.

A network is built from its description, JSON values that also travel to clients and into files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fednas_flwr.base.errors import ConfigError, unknown_choice
from fednas_flwr.base.randomness import seeded
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models.fixed_networks import FIXED_NETWORKS
from fednas_flwr.models.prediction import MODEL_FILE, Model, read_metadata, read_model
from fednas_flwr.search.candidate import Pool
from fednas_flwr.settings import (
    CellSpace,
    Config,
    GivenNetwork,
    SearchSpaceSettings,
    conf_folder,
    expanded,
)
from fednas_flwr.settings.names import NO_SKIP
from fednas_flwr.settings.optimizers import NORMED_NETWORKS
from fednas_flwr.spaces import space_entry
from fednas_flwr.spaces.genotype import Genotype, from_json, load_genotype, to_json
from fednas_flwr.spaces.space import SearchSpace, Supernet

POOL = "pool"  # name of the network that holds several derived ones
Description = Mapping[str, Any]  # what a network is built from, JSON values only


def make_device(name: str) -> torch.device:
    """Return the device; ``auto`` is CUDA where there is one.

    Raises:
        ConfigError: ``cuda`` was asked for and there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "runtime.device=cuda, but torch finds no CUDA device; set runtime.device=cpu or auto."
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def make_space(name: str, **settings: Any) -> SearchSpace:
    """Return a search space.

    Args:
        name: One of ``SEARCH_SPACES``.
        **settings: ``input_shape``, ``num_classes`` and the settings of ``conf/search_space``.
    """
    space = space_entry(name).make(**settings)
    if space.name != name:
        raise ConfigError(
            f"search_space={name} makes a space that is called {space.name}, and its genotypes "
            "would name that one: give its class the name under which it is registered."
        )
    return space


def supernet_space(config: Config, prepared: Prepared) -> SearchSpace:
    """Return the search space at the supernet's size for the prepared data."""
    own = config.search_space
    return make_space(
        own.name,
        norm=own.norm,
        **supernet_sizes(own),
        input_shape=prepared.input_shape,
        num_classes=prepared.num_classes,
    )


def seeded_supernet(config: Config, space: SearchSpace) -> Supernet:
    """Return a space's supernet, initialised from the run's seed."""
    with seeded(config.seed, "supernet"):
        return space.supernet()


def seeded_network(config: Config, description: Description) -> nn.Module:
    """Return the network of a description, initialised from the run's seed."""
    with seeded(config.seed, "network"):
        return make_network(description)


def given_genotype(config: Config) -> Genotype | None:
    """Return the genotype to retrain: of a file, or by name one of those in conf/; else None.

    Raises:
        ConfigError: There is no such file or name, or the file holds no genotype.
    """
    if config.genotype is None:
        return None
    shipped = {path.stem: path for path in (conf_folder() / "genotypes").glob("*.json")}
    path = shipped.get(config.genotype, expanded("genotype", config.genotype))
    if not path.suffix and not path.exists():
        raise unknown_choice("genotype", config.genotype, sorted(shipped))
    return load_genotype(path)


def describe_network(
    config: Config, prepared: Prepared, genotype: Genotype | None
) -> dict[str, Any]:
    """Describe the network to retrain, for :func:`make_network`.

    Args:
        config: Gives the sizes of retraining, or the name of a fixed network.
        prepared: Gives shape and number of classes.
        genotype: The derived architecture; None for a fixed network.
    """
    shapes = {"input_shape": list(prepared.input_shape), "num_classes": prepared.num_classes}
    if genotype is None:
        if not isinstance(config.algorithm, GivenNetwork):
            raise ValueError("only fedavg and fedex have a network without a genotype")
        if config.algorithm.network not in FIXED_NETWORKS:
            raise unknown_choice("algorithm.network", config.algorithm.network, FIXED_NETWORKS)
        description = {"name": config.algorithm.network, **shapes}
        if config.algorithm.network in NORMED_NETWORKS:
            description["norm"] = config.retrain.norm
        return description
    return describe_derived(
        genotype,
        shapes,
        sizes=_retrain_sizes(config, genotype),
        norm=config.retrain.norm,
        auxiliary=config.retrain.auxiliary_weight > 0,
    )


def _retrain_sizes(config: Config, genotype: Genotype) -> dict[str, Any]:
    """Return the sizes of the derived network: of ``retrain``, or of a space that keeps its own."""
    space, retrain = config.search_space, config.retrain
    sizes = {"channels": retrain.channels, "num_cells": retrain.num_cells}
    keeps_size = space_entry(genotype.space).settings is not CellSpace
    if any((value is None) != keeps_size for value in sizes.values()):
        remedy = "its networks have the supernet's size; set both to null."
        raise ConfigError(
            f"retrain.channels={retrain.channels} with retrain.num_cells={retrain.num_cells} and a "
            f"genotype of {genotype.space}: {remedy if keeps_size else 'set both to numbers.'}"
        )
    if not keeps_size:
        return {**sizes, "skip": space.skip}
    if space.name != genotype.space:
        raise ConfigError(
            f"the genotype is of {genotype.space}, but search_space={space.name}, which does not "
            f"give its network's size: set search_space={genotype.space}."
        )
    return supernet_sizes(space)


def supernet_sizes(space: SearchSpaceSettings) -> dict[str, Any]:
    """Return the settings of a space that a network's description holds, beside the norm."""
    return {key: getattr(space, key) for key in space_entry(space.name).sizes}


def describe_derived(
    genotype: Genotype,
    shapes: Mapping[str, Any],
    *,
    sizes: Mapping[str, Any],
    norm: str,
    auxiliary: bool,
) -> dict[str, Any]:
    """Describe a genotype's network, for :func:`make_network`."""
    return {
        "name": "derived",
        "genotype": json.loads(to_json(genotype)),
        **shapes,
        **sizes,
        "norm": norm,
        "auxiliary": auxiliary,
    }


def candidate_settings(config: Config, prepared: Prepared) -> dict[str, Any]:
    """The settings of :func:`describe_derived` for a candidate of the search, at its own size."""
    return {
        "shapes": {"input_shape": list(prepared.input_shape), "num_classes": prepared.num_classes},
        "sizes": supernet_sizes(config.search_space),
        "norm": config.search_space.norm,
        "auxiliary": False,
    }


def describe_pool(genotypes: Sequence[Genotype], **settings: Any) -> dict[str, Any]:
    """Describe a pool, the genotypes' networks side by side, for :func:`make_network`.

    Args:
        genotypes: Of one space; at least one.
        **settings: See :func:`describe_derived`.
    """
    described = [describe_derived(genotype, **settings) for genotype in genotypes]
    alone = {key: value for key, value in described[0].items() if key != "genotype"}
    return {**alone, "name": POOL, "genotypes": [one["genotype"] for one in described]}


def make_network(description: Description) -> nn.Module:
    """Return a newly initialised network; draws from torch's global generator.

    Raises:
        ConfigError: The description's name, genotype or sizes cannot be built.
    """
    input_shape, name = tuple(description["input_shape"]), description["name"]
    if name in FIXED_NETWORKS:
        norm = {"norm": description.get("norm")} if name in NORMED_NETWORKS else {}
        return FIXED_NETWORKS[name](input_shape, description["num_classes"], **norm)
    if name == POOL:
        alone = {key: value for key, value in description.items() if key != "genotypes"}
        return Pool(
            make_network({**alone, "name": "derived", "genotype": genotype})
            for genotype in description["genotypes"]
        )
    if name != "derived":
        raise unknown_choice("network", name, ["derived", POOL, *FIXED_NETWORKS])
    space, genotype = described_space(description)
    return space.network(genotype, auxiliary=description["auxiliary"])


def described_space(description: Description) -> tuple[SearchSpace, Genotype]:
    """Return the space whose network of the genotype a description of a derived network means."""
    genotype = from_json(json.dumps(description["genotype"]))
    known = {"skip": NO_SKIP, **description}  # a model that was exported before there were skips
    space = make_space(
        genotype.space,
        input_shape=tuple(description["input_shape"]),
        num_classes=description["num_classes"],
        norm=description["norm"],
        **{key: known[key] for key in space_entry(genotype.space).sizes},
    )
    return space, genotype


def load(run_folder: str | Path) -> Model:
    """Return the trained model of a run, on the CPU; it takes raw data.

    Args:
        run_folder: A run's folder, or one that ``fednas export`` has made of it.

    Raises:
        ConfigError: The folder holds no exported model.

    Example:
        ``load("runs/<run folder>").predict("patients.csv").labels``
    """
    return read_model(Path(run_folder) / MODEL_FILE, make_network)


def load_description(run_folder: Path) -> Description:
    """Read the description of the exported network of a run.

    Raises:
        ConfigError: The folder holds no exported model.
    """
    return read_metadata(run_folder / MODEL_FILE)[0]
