"""The strategies of the search and of the retrain stage, made by the entry of the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from fednas_flwr.builders.algorithms import ALGORITHMS, Plan, prior_alphas
from fednas_flwr.builders.networks import (
    Description,
    seeded_network,
    seeded_supernet,
    supernet_space,
)
from fednas_flwr.builders.refusals import by_client, follows_noise
from fednas_flwr.config import Config
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.robust import TrimmedMean
from fednas_flwr.exchange.states import Average, WeightedAverage
from fednas_flwr.privacy.plan import PrivateStage, RoundReleases, of_clients
from fednas_flwr.search.settings import Configuration
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import RoundStrategy


def make_search(
    config: Config,
    prepared: Prepared,
    courier: Courier,
    checkpoints: CheckpointFolder,
    private: PrivateStage | None = None,
) -> RoundStrategy:
    """Return the strategy of the search stage, its supernet initialised from the run's seed.

    Its class is called with the supernet, the courier, ``space``, ``checkpoints`` and the keyword
    arguments of its own that the algorithm's entry states.

    Args:
        config: The run's configuration.
        prepared: Gives shape and number of classes.
        courier: Reaches the clients.
        checkpoints: Where the state goes after every round.
        private: See :class:`RoundStrategy`.

    Raises:
        ValueError: The algorithm does not search.
    """
    entry = ALGORITHMS[config.algorithm.name]
    if entry.search is None:
        raise ValueError(f"algorithm={config.algorithm.name} does not search")
    space = supernet_space(config, prepared)
    network = _first_supernet(config, space) if entry.trains_supernet else nn.Module()
    shared: dict[str, Any] = {"space": space, "checkpoints": checkpoints}
    plan = entry.search(config, prepared, space)
    shared["momentum"] = config.momentum or "reset"
    return _make_strategy(config, plan, network, courier, shared, private)


def make_retraining(
    config: Config,
    description: Description,
    courier: Courier,
    checkpoints: CheckpointFolder,
    private: PrivateStage | None = None,
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
    network = seeded_network(config, description)
    shared = {
        "description": description,
        "local_epochs": config.retrain.local_epochs,
        "batch_size": config.retrain.batch_size,
        "auxiliary_weight": config.retrain.auxiliary_weight,
        "checkpoints": checkpoints,
        "momentum": config.momentum or ("averaged" if follows_noise(config) else "reset"),
    }
    plan = ALGORITHMS[config.algorithm.name].retraining(config, configuration)
    return _make_strategy(config, plan, network, courier, shared, private), network


def search_releases(config: Config) -> RoundReleases:
    """Return what the rounds of a private run's search release."""
    return _of_unit(config, ALGORITHMS[config.algorithm.name].search_releases)


def retrain_releases(config: Config) -> RoundReleases:
    """Return what the rounds of a private run's retraining release."""
    return _of_unit(config, ALGORITHMS[config.algorithm.name].retrain_releases)


def _of_unit(config: Config, releases: Callable[[Config], RoundReleases] | None) -> RoundReleases:
    """Return the releases of an algorithm's rounds by the unit of the run's privacy."""
    assert releases is not None  # as the configuration has it
    own = releases(config)
    if not by_client(config):
        return own
    return lambda server_round, num_rounds: of_clients(own(server_round, num_rounds))


def _first_supernet(config: Config, space: SearchSpace) -> Supernet:
    """Return the supernet that a search begins with."""
    supernet = seeded_supernet(config, space)
    for kind, lead_EO in prior_alphas(config, space).items():
        supernet.alphas()[kind].data += lead_EO
    return supernet


def _make_strategy(
    config: Config,
    plan: Plan,
    network: nn.Module,
    courier: Courier,
    shared: Mapping[str, Any],
    private: PrivateStage | None,
) -> RoundStrategy:
    """Return the planned strategy, told all that is the same for every algorithm."""
    kind, own = plan
    terms: dict[str, Any] = {"private": private, "new_average": _averaging(config)}
    return kind(network, courier, **shared, **terms, **own)


def _averaging(config: Config) -> Callable[[], Average]:
    """Return what makes the average of a round's models."""
    makers: dict[str, Callable[[], Average]] = {
        "mean": WeightedAverage,
        "median": partial(TrimmedMean, None),
        "trimmed_mean": partial(TrimmedMean, config.trim),
    }
    return makers[config.aggregate]
