"""The only place where a name becomes an object: plain dicts, explicit arguments.

Everything above this module holds a :class:`Config`; everything below gets numbers and objects.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors import safe_open
from torch import nn

from fednas_flwr.clients.client import Augmentation, Client
from fednas_flwr.clients.private_verbs import PRIVATE_VERBS
from fednas_flwr.clients.release import ReleaseGate
from fednas_flwr.config import (
    SEARCH_SPACES,
    BlockSpace,
    CellSpace,
    ClusterSearch,
    Config,
    DifferentialPrivacy,
    GivenNetwork,
    GradientSearch,
    Hardware,
    HyperparameterSearch,
    LocalSearch,
    PathSearch,
    RandomSearch,
    TunedTraining,
)
from fednas_flwr.data.datasets import Prepared, prepare
from fednas_flwr.data.loaders import make_client_data
from fednas_flwr.data.partitioners import load_partition, partition
from fednas_flwr.data.records import Records
from fednas_flwr.errors import ConfigError, unknown_choice
from fednas_flwr.evaluation.export import METADATA_KEY, MODEL_FILE
from fednas_flwr.evaluation.fixed_networks import FIXED_NETWORKS
from fednas_flwr.evaluation.space_costs import space_costs
from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier, Emit, ignore_events
from fednas_flwr.hardware.costs import HardwareLoss, loss_settings
from fednas_flwr.hardware.latency import LatencyTable
from fednas_flwr.hardware.latency import from_json as latency_from_json
from fednas_flwr.privacy.ledger import Ledger
from fednas_flwr.privacy.noise import SecureGenerator
from fednas_flwr.privacy.policy import Policy
from fednas_flwr.privacy.policy_file import load_policy, parse_policy
from fednas_flwr.randomness import make_generator, seeded
from fednas_flwr.reporting.files import write_text
from fednas_flwr.search.bandit import draw_configurations
from fednas_flwr.search.settings import Configuration
from fednas_flwr.search.tuner import Tuner
from fednas_flwr.search_spaces.darts import DARTSSpace
from fednas_flwr.search_spaces.genotype import Genotype, from_json, load_genotype, to_json
from fednas_flwr.search_spaces.mbconv import MBConvSpace
from fednas_flwr.search_spaces.mbconv_plan import CANDIDATES, SKELETONS
from fednas_flwr.search_spaces.mlp import MLPSpace
from fednas_flwr.search_spaces.nasbench201 import NASBench201Space
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import RoundStrategy
from fednas_flwr.strategies.fdnas import FDNAS
from fednas_flwr.strategies.feathers import FEATHERS
from fednas_flwr.strategies.fed_darts import FedDARTS
from fednas_flwr.strategies.fedavg import FedAvg
from fednas_flwr.strategies.fedex import FedEx
from fednas_flwr.strategies.fnas import FNAS
from fednas_flwr.strategies.random_search import RandomSearch as RandomSearchStrategy

Description = Mapping[str, Any]  # what a network is built from, JSON values only

# What a private site's node names: its data, how to read it and its id; rules, books, secrets.
PRIVATE_SITE_KEYS = (
    *("data-path", "dataset", "cache", "data-set"),
    *("policy", "ledger", "ledger-key", "split-key"),
)


def _mbconv_space(*, skeleton: str, candidates: str, **settings: Any) -> MBConvSpace:
    """Return the MBConv space with the named skeleton and candidates."""
    if skeleton not in SKELETONS:
        raise unknown_choice("search_space.skeleton", skeleton, SKELETONS)
    if candidates not in CANDIDATES:
        raise unknown_choice("search_space.candidates", candidates, CANDIDATES)
    return MBConvSpace(skeleton=SKELETONS[skeleton], candidates=CANDIDATES[candidates], **settings)


SPACES: dict[str, Callable[..., SearchSpace]] = {
    "darts": DARTSSpace,
    "mbconv": _mbconv_space,
    "mlp": MLPSpace,
    "nasbench201": NASBench201Space,
}


# The settings of a space that a network's description holds, beside the norm.
SIZES = {
    name: tuple(f.name for f in fields(kind) if f.name not in ("name", "norm"))
    for name, kind in SEARCH_SPACES.items()
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
    norm: str,
    engine: str = "fast",
    **sizes: Any,
) -> SearchSpace:
    """Return a search space; ``sizes`` are the other settings of ``conf/search_space``."""
    if name not in SPACES:
        raise unknown_choice("search_space.name", name, SPACES)
    return SPACES[name](
        input_shape=input_shape,
        num_classes=num_classes,
        norm=norm,
        engine=engine,
        **sizes,
    )


def make_data(config: Config) -> tuple[Prepared, list[np.ndarray]]:
    """Return the prepared records and the rows of every client."""
    split = config.partition
    prepared = _prepare(config, sites=split.name == "sites", server_test=config.dataset.server_test)
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


def has_real_sites(config: Config) -> bool:
    """Return whether each client's node has data of its own, which no other machine can read."""
    return config.runtime.name == "deployment" and config.partition.name == "sites"


def make_site_data(config: Config) -> tuple[Prepared, list[np.ndarray]]:
    """Return the records in ``dataset.root`` on a real site: all are the client's, whichever it is.

    An official test part stays unused: the keyed hash of each record fixes what it is for.
    """
    if config.dataset.name not in ("npz", "image_folder", "csv"):
        raise ConfigError(
            f"partition=sites does not fit dataset.name={config.dataset.name}: use image_folder, "
            "npz or csv."
        )
    prepared = _prepare(config, sites=False, server_test=False)
    return prepared, [np.arange(len(prepared.train))] * config.clients


def make_server_data(config: Config, facts: Mapping[int, Mapping[str, Any]]) -> Prepared:
    """Return what the server of real sites knows of their data: shapes and names, no records.

    Where ``dataset.root`` names data on the server and ``dataset.server_test`` is true, all of
    that is the public test set.

    Args:
        config: Of a run with real sites.
        facts: What each client said of itself.

    Raises:
        ConfigError: Two clients, or a client and the server's test set, do not fit together.
    """
    first, *others = sorted(facts)
    for key in ("input_shape", "feature_names", "class_names"):
        for other in others:
            if facts[other].get(key) != facts[first][key]:
                raise ConfigError(
                    f"the sites do not fit together: client {first} has {key}="
                    f"{facts[first][key]}, client {other} {facts[other].get(key)}; set the "
                    "dataset's class_names, image_size, channels or columns to those of all sites."
                )
    shape, names = tuple(facts[first]["input_shape"]), tuple(facts[first]["class_names"])
    features = tuple(facts[first]["feature_names"])
    empty = Records(torch.empty(0, *shape), torch.empty(0).long(), np.empty(0, "S32"), names)
    mean, std = tuple(config.dataset.mean), tuple(config.dataset.std)
    if not config.dataset.server_test or config.dataset.root is None:
        return Prepared(empty, None, mean, std)
    own = _prepare(config, sites=False, server_test=False)
    test = own.train
    if (own.input_shape, test.feature_names, test.class_names) != (shape, features, names):
        raise ConfigError(
            f"the server's test set dataset.root={config.dataset.root} does not fit the clients: "
            f"it has shape {own.input_shape} and classes {', '.join(test.class_names)}, they have "
            f"{shape} and {', '.join(names)}."
        )
    return Prepared(empty, test, own.mean, own.std)


def check_buildable(config: Config) -> None:
    """Raise ConfigError unless device, data and networks of ``config`` can be made here.

    Leaves nothing but the cache of prepared data; networks are made without their tensors.
    """
    make_device(config.device)
    data = make_data(config)
    (prepared, parts), genotype = data, None
    for part in parts:
        key, fractions = config.dataset.split_key.encode(), config.dataset.fractions
        make_client_data(prepared, part, key=key, fractions=fractions)
    _class_factors(config, prepared.train.class_names, torch.device("cpu"))
    if isinstance(config.privacy, DifferentialPrivacy):
        _check_public(config, prepared)
    if config.genotype is not None:
        genotype = load_genotype(Path(config.genotype).expanduser())
    elif "search" in config.stages and not isinstance(config.algorithm, GivenNetwork):
        space = supernet_space(config, prepared)
        for hardware in _all_hardware(config):
            if hardware.table is not None or hardware.unit != "ms":  # else clients make the table
                _hardware_settings(hardware, space)
        genotype = space.random_genotype(torch.Generator())
        with torch.device("meta"):
            space.supernet()
    if "retrain" in config.stages:
        description = describe_network(config, prepared, genotype)
        with torch.device("meta"):
            make_network(description)


def make_client(
    config: Config,
    index: int,
    *,
    data: tuple[Prepared, list[np.ndarray]],
    networks: dict[str, nn.Module],
    site: Mapping[str, str] | None = None,
    gate: ReleaseGate | None = None,
) -> Client:
    """Return client ``index`` of a run.

    Args:
        config: The run's configuration.
        index: From 0 to ``config.clients - 1``.
        data: What :func:`make_data` returns; shared by the clients of a process.
        networks: Built networks, shared likewise: clients of a process take turns.
        site: What the node's own configuration says, see ``client_app.SITE_KEYS``.
        gate: What :func:`make_site_gate` has made of a ``site`` that names a policy; the gates of
            simulated clients are made here.

    Raises:
        ConfigError: A setting does not fit the data, or a private run's real site has no policy.
        ValueError: ``site`` names a policy, and there is no gate.
    """
    site = site or {}
    if gate is None and "policy" in site:
        raise ValueError("a site with a policy needs its gate: pass make_site_gate(site)")
    prepared, parts = data
    device = make_device(config.device)

    def build_network(description: Description) -> nn.Module:
        if description["name"] == "supernet":
            return supernet_space(config, prepared).supernet()
        return make_network(description)

    if gate is None:
        gate = _simulated_gate(config, index, len(parts[index]))
    fractions: Mapping[str, float] = config.dataset.fractions
    if gate is not None:
        _check_public(config, prepared)
        fractions = gate.allowed.fractions
    own = make_client_data(
        prepared,
        parts[index],
        key=site.get("split-key", config.dataset.split_key).encode(),
        fractions=fractions,
    )
    return Client(
        index=index,
        seed=config.seed,
        data=own,
        class_names=prepared.train.class_names,
        device=device,
        threads=config.threads,
        make_network=build_network,
        make_space=lambda: supernet_space(config, prepared),
        augmentation=Augmentation(
            crop_padding=config.dataset.crop_padding,
            flip=config.dataset.flip,
            cutout=config.dataset.cutout,
        ),
        networks=networks,
        tag=site.get("tag", config.client_tags[index] if config.client_tags else ""),
        feature_names=prepared.train.feature_names,
        class_factors=_class_factors(config, prepared.train.class_names, device),
        oversample=config.oversample and gate is None,  # a private site reads a record once
        gate=gate,
    )


def _class_factors(
    config: Config, class_names: tuple[str, ...], device: torch.device
) -> torch.Tensor | None:
    """Return the factor of every class, 1 where none is given; None if none is."""
    given = config.class_factors
    for name in given:
        if name not in class_names:
            raise unknown_choice("class_factors", name, class_names)
    if not given:
        return None
    return torch.tensor([given.get(name, 1.0) for name in class_names], device=device)


def make_site_gate(site: Mapping[str, str]) -> ReleaseGate | None:
    """Return the gate of a node that names a policy, None if it names none; reads no record.

    Raises:
        ConfigError: The file is wrong, or the node does not name all else that is its own.
    """
    if "policy" not in site:
        return None
    missing = [key for key in PRIVATE_SITE_KEYS if key not in site]
    if missing:
        raise ConfigError(f"the node has a policy but lacks {', '.join(missing)}: give them.")
    policy = load_policy(Path(site["policy"]), verbs=PRIVATE_VERBS)
    ledger = Ledger(Path(site["ledger"]), Path(site["ledger-key"]))
    return ReleaseGate(policy, ledger, SecureGenerator(), data_set=site["data-set"])


def _simulated_gate(config: Config, index: int, num_records: int) -> ReleaseGate | None:
    """Return the gate of a simulated private client, None without privacy."""
    privacy = config.privacy
    if not isinstance(privacy, DifferentialPrivacy):
        return None
    if has_real_sites(config):
        raise ConfigError(
            "privacy=dp on a node without a policy: start it with "
            f"{', '.join(PRIVATE_SITE_KEYS)} in --node-config."
        )
    if privacy.sites is None and config.run_dir is None:
        raise ConfigError("privacy=dp without a run folder needs privacy.sites=<folder>.")
    folder = Path(privacy.sites or Path(str(config.run_dir)) / "sites").expanduser()
    folder = folder / f"client-{index}"
    policy = _simulated_policy(config, privacy, num_records, folder / "policy.yaml")
    test_seed = None if privacy.test_seed is None else f"{privacy.test_seed} {index}".encode()
    ledger = Ledger(folder / "ledger" / "ledger.sqlite", folder / "key")
    return ReleaseGate(policy, ledger, SecureGenerator(test_seed), data_set=privacy.data_set)


def _simulated_policy(
    config: Config, privacy: DifferentialPrivacy, num_records: int, path: Path
) -> Policy:
    """Return the policy in a file; without one, write what lets the run's configuration pass."""
    if not path.exists():
        norms = (part.max_grad_norm for part in (privacy.weights, privacy.alphas))
        section = {
            "epsilon": privacy.epsilon,
            "delta": privacy.delta,
            "least_noise_multiplier": 0.1,
            "largest_grad_norm": max(1.0, privacy.retrain.max_grad_norm, *norms),
            "largest_steps": 1_000_000,
            "verbs": list(PRIVATE_VERBS),
            "records": num_records,
            "fractions": config.dataset.fractions,
            "secure_noise": privacy.test_seed is None,
            "test_seed": privacy.test_seed is not None,
        }
        text = yaml.safe_dump({"data_sets": {privacy.data_set: section}}, sort_keys=False)
        parse_policy(text, verbs=PRIVATE_VERBS, origin="privacy")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    return load_policy(path, verbs=PRIVATE_VERBS)


def _check_public(config: Config, prepared: Prepared) -> None:
    """Raise ConfigError for what a private client would tell or use of its own records."""
    if prepared.uses_own_statistics:
        raise ConfigError(
            "privacy=dp with a table that each client standardises by its own statistics, which no "
            "budget covers: give public ones, dataset.statistics={column: [mean, std], ...}."
        )
    if not has_real_sites(config):
        return
    settings = config.dataset
    needed = {"class_names": bool(settings.class_names)}
    if settings.name == "image_folder" or settings.image_size or settings.channels:
        # else the first image decides
        needed["image_size"] = settings.image_size is not None
        needed["channels"] = settings.channels is not None
    if settings.name == "csv":
        needed["numeric or categorical"] = bool(settings.numeric or settings.categorical)
        needed["categories"] = set(settings.categories).issuperset(settings.categorical)
    missing = [f"dataset.{name}" for name, value in needed.items() if not value]
    if missing:
        raise ConfigError(
            f"privacy=dp on real sites: the node's dataset file must give {', '.join(missing)}, "
            "since names that were found in the records would be a release."
        )


def supernet_space(config: Config, prepared: Prepared) -> SearchSpace:
    """Return the search space at the supernet's size for the prepared data."""
    return make_space(
        **asdict(config.search_space),
        engine=config.engine,
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
        if not isinstance(config.algorithm, GivenNetwork):
            raise ValueError("only fedavg and fedex have a network without a genotype")
        if config.algorithm.network not in FIXED_NETWORKS:
            raise unknown_choice("algorithm.network", config.algorithm.network, FIXED_NETWORKS)
        return {"name": config.algorithm.network, **shapes}
    return _describe_derived(
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
    keeps_size = SEARCH_SPACES.get(genotype.space) is BlockSpace
    if any((value is None) != keeps_size for value in sizes.values()):
        raise ConfigError(
            f"retrain.channels={retrain.channels} with retrain.num_cells={retrain.num_cells} and a "
            f"genotype of {genotype.space}: "
            + ("its networks have the supernet's size; set both to null." * keeps_size)
            + ("set both to numbers." * (not keeps_size))
        )
    if not keeps_size:
        return sizes
    if space.name != genotype.space:
        raise ConfigError(
            f"the genotype is of {genotype.space}, but search_space={space.name}, which does not "
            f"give its network's size: set search_space={genotype.space}."
        )
    return _sizes(space)


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
    space = make_space(
        genotype.space,
        input_shape=input_shape,
        num_classes=description["num_classes"],
        norm=description["norm"],
        **{key: description[key] for key in SIZES.get(genotype.space, ())},
    )
    return space.network(genotype, auxiliary=description["auxiliary"])


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
    config: Config,
    prepared: Prepared,
    courier: Courier,
    checkpoints: CheckpointFolder,
    private: Mapping[str, Any] | None = None,
) -> RoundStrategy:
    """Return the strategy of the search stage, its supernet initialised from the run's seed.

    Args:
        config: The run's configuration.
        prepared: Gives shape and number of classes.
        courier: Reaches the clients.
        checkpoints: Where the state goes after every round.
        private: See :class:`RoundStrategy`.

    Raises:
        ValueError: The algorithm does not search.
    """
    kind = type(config.algorithm)
    if kind not in SEARCHES:
        raise ValueError(f"algorithm={config.algorithm.name} does not search")
    strategy = SEARCHES[kind](config, prepared, courier, checkpoints)
    strategy.private = dict(private or {})
    return strategy


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


def _make_feathers(
    config: Config, prepared: Prepared, courier: Courier, checkpoints: CheckpointFolder
) -> RoundStrategy:
    algorithm, space = config.algorithm, supernet_space(config, prepared)
    assert isinstance(algorithm, HyperparameterSearch)
    return FEATHERS(
        _seeded_supernet(config, space),
        courier,
        space=space,
        description={"name": "supernet"},
        local_epochs=algorithm.local_epochs,
        batch_size=algorithm.batch_size,
        clip_norm=algorithm.clip_norm,
        checkpoints=checkpoints,
        **_exploration(config, algorithm),
    )


def _exploration(config: Config, algorithm: HyperparameterSearch) -> dict[str, Any]:
    """Return what the two stages of FEATHERS have in common."""
    return {
        "tuner": Tuner.of(
            _configurations(config.seed, algorithm), algorithm.ranges, algorithm.bandit
        ),
        "nas_rounds": algorithm.nas_rounds,
        "rule": algorithm.rule,
        "loss_bound": algorithm.loss_bound,
        "seed": config.seed,
    }


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
        fused=algorithm.fused,
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
    algorithm, own = config.algorithm, config.search_space
    assert isinstance(algorithm, RandomSearch)
    shapes = {"input_shape": list(prepared.input_shape), "num_classes": prepared.num_classes}
    return RandomSearchStrategy(
        courier,
        space=supernet_space(config, prepared),
        describe=lambda genotype: _describe_derived(
            genotype,
            shapes,
            sizes=_sizes(own),
            norm=own.norm,
            auxiliary=False,
        ),
        make_network=lambda description: _seeded_network(config, description),
        seed=config.seed,
        trial_rounds=algorithm.trial_rounds,
        local_epochs=algorithm.local_epochs,
        batch_size=algorithm.batch_size,
        weights=algorithm.weights,
        ranges=algorithm.ranges,
        checkpoints=checkpoints,
    )


def load_table(hardware: Hardware) -> LatencyTable | None:
    """Return the latency table of a cost, None where costs are multiply-adds.

    Raises:
        ConfigError: The file cannot be read or is no table.
    """
    if hardware.table is None:
        return None
    path = Path(hardware.table).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"algorithm.hardware.table={path} cannot be read: {error}.") from error
    return latency_from_json(text, origin=str(path))


def _all_hardware(config: Config) -> list[Hardware]:
    """Return what the configuration says of costs, of all groups."""
    algorithm = config.algorithm
    if isinstance(algorithm, ClusterSearch):
        shared = [algorithm.search.hardware] if algorithm.search.hardware else []
        return [*shared, *algorithm.group_hardware.values()]
    if isinstance(algorithm, PathSearch) and algorithm.hardware is not None:
        return [algorithm.hardware]
    return []


def _hardware_settings(hardware: Hardware | None, space: SearchSpace) -> dict[str, Any] | None:
    """Return what clients make the hardware loss from, checked against what the space can reach."""
    if hardware is None:
        return None
    assert isinstance(space, MBConvSpace)  # as the configuration has it
    return loss_settings(
        HardwareLoss(
            costs=space_costs(space, load_table(hardware)),
            target=hardware.target,
            unit=hardware.unit,
            form=hardware.loss,
            scale=hardware.scale,
            exponent=hardware.exponent,
        )
    )


def _make_fdnas(
    config: Config, prepared: Prepared, courier: Courier, checkpoints: CheckpointFolder
) -> RoundStrategy:
    algorithm, space = config.algorithm, supernet_space(config, prepared)
    assert isinstance(algorithm, PathSearch)
    return FDNAS(
        _seeded_supernet(config, space),
        courier,
        space=space,
        gates=algorithm.gates,
        warm_up_rounds=algorithm.warm_up_rounds,
        local_epochs=algorithm.local_epochs,
        batch_size=algorithm.batch_size,
        weights=algorithm.weights,
        alphas=algorithm.alphas,
        hardware=_hardware_settings(algorithm.hardware, space),
        sparse=algorithm.sparse,
        checkpoints=checkpoints,
    )


SEARCHES: dict[type, Callable[[Config, Prepared, Courier, CheckpointFolder], RoundStrategy]] = {
    LocalSearch: _make_fed_darts,
    GradientSearch: _make_fnas,
    HyperparameterSearch: _make_feathers,
    PathSearch: _make_fdnas,
    RandomSearch: _make_random_search,
}


def make_retraining(
    config: Config,
    description: Description,
    courier: Courier,
    checkpoints: CheckpointFolder,
    private: Mapping[str, Any] | None = None,
    configuration: Configuration | None = None,
) -> tuple[RoundStrategy, nn.Module]:
    """Return the strategy of the retrain stage and its network, initialised from the run's seed.

    Args:
        config: The run's configuration.
        description: What the network is built from.
        courier: Reaches the clients.
        checkpoints: Where the state goes after every round.
        private: See :class:`RoundStrategy`.
        configuration: Takes the place of the retrain settings' learning rate, momentum, decay and
            drop-path probability.
    """
    network = _seeded_network(config, description)
    settings, algorithm = config.retrain, config.algorithm
    if isinstance(algorithm, HyperparameterSearch):
        return FEATHERS(
            network,
            courier,
            space=None,
            description=description,
            local_epochs=settings.local_epochs,
            batch_size=settings.batch_size,
            clip_norm=settings.weights.clip_norm,
            auxiliary_weight=settings.auxiliary_weight,
            checkpoints=checkpoints,
            private=private,
            **_exploration(config, algorithm),
        ), network
    if isinstance(algorithm, TunedTraining):
        return FedEx(
            network,
            courier,
            description=description,
            configurations=_configurations(config.seed, algorithm),
            theta=algorithm.theta,
            local_epochs=settings.local_epochs,
            batch_size=settings.batch_size,
            clip_norm=algorithm.clip_norm,
            auxiliary_weight=settings.auxiliary_weight,
            loss_bound=algorithm.loss_bound,
            seed=config.seed,
            checkpoints=checkpoints,
        ), network
    strategy = FedAvg(
        network,
        courier,
        description=description,
        local_epochs=settings.local_epochs,
        batch_size=settings.batch_size,
        weights=configuration.annealed(settings.weights) if configuration else settings.weights,
        auxiliary_weight=settings.auxiliary_weight,
        drop_path_prob=configuration.dropout if configuration else settings.drop_path_prob,
        checkpoints=checkpoints,
        private=private,
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


def _configurations(
    seed: int, algorithm: HyperparameterSearch | TunedTraining
) -> list[Configuration]:
    """Return the given configurations, else those drawn from the run's seed."""
    generator = make_generator(seed, "configurations")
    drawn = draw_configurations(algorithm.num_configurations, algorithm.ranges, generator)
    return algorithm.configurations or drawn


def _seeded_supernet(config: Config, space: SearchSpace) -> Supernet:
    with seeded(config.seed, "supernet"):
        return space.supernet()


def _seeded_network(config: Config, description: Description) -> nn.Module:
    with seeded(config.seed, "network"):
        return make_network(description)


def _sizes(space: CellSpace | BlockSpace) -> dict[str, Any]:
    return {key: getattr(space, key) for key in SIZES[space.name]}


def _describe_derived(
    genotype: Genotype,
    shapes: Mapping[str, Any],
    *,
    sizes: Mapping[str, Any],
    norm: str,
    auxiliary: bool,
) -> dict[str, Any]:
    return {
        "name": "derived",
        "genotype": json.loads(to_json(genotype)),
        **shapes,
        **sizes,
        "norm": norm,
        "auxiliary": auxiliary,
    }


def _prepare(config: Config, *, sites: bool, server_test: bool) -> Prepared:
    settings = config.dataset
    return prepare(
        cache=Path(settings.cache).expanduser(),
        name=settings.name,
        root=Path(settings.root).expanduser() if settings.root else None,
        download=settings.download,
        sites=sites,
        server_test=server_test,
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


def _check_partition(parts: list[np.ndarray], *, file: str, clients: int, records: int) -> None:
    if len(parts) != clients:
        raise ConfigError(f"{file} divides over {len(parts)} clients, but clients={clients}.")
    largest = max(int(part.max()) for part in parts)
    if largest >= records:
        raise ConfigError(
            f"{file} names record {largest}, but there are {records}: it is of another data set."
        )
