"""The strategy of the retrain stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fednas_flwr.builders.networks import Description, seeded_network
from fednas_flwr.builders.searches import averaging, exploration, make_configurations
from fednas_flwr.config import Config, HyperparameterSearch, TunedTraining
from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.search.settings import Configuration
from fednas_flwr.strategies.base import RoundStrategy
from fednas_flwr.strategies.feathers import FEATHERS
from fednas_flwr.strategies.fedavg import FedAvg
from fednas_flwr.strategies.fedex import FedEx


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
    network = seeded_network(config, description)
    settings, algorithm = config.retrain, config.algorithm
    shared: dict[str, Any] = {
        "description": description,
        "local_epochs": settings.local_epochs,
        "batch_size": settings.batch_size,
        "auxiliary_weight": settings.auxiliary_weight,
        "checkpoints": checkpoints,
    }
    strategy: RoundStrategy
    if isinstance(algorithm, HyperparameterSearch):
        strategy = FEATHERS(
            network,
            courier,
            space=None,
            clip_norm=settings.weights.clip_norm,
            **shared,
            **exploration(config, algorithm),
        )
    elif isinstance(algorithm, TunedTraining):
        strategy = FedEx(
            network,
            courier,
            configurations=make_configurations(config.seed, algorithm),
            theta=algorithm.theta,
            clip_norm=algorithm.clip_norm,
            loss_bound=algorithm.loss_bound,
            seed=config.seed,
            **shared,
        )
    else:
        strategy = FedAvg(
            network,
            courier,
            weights=configuration.annealed(settings.weights) if configuration else settings.weights,
            drop_path_prob=configuration.dropout if configuration else settings.drop_path_prob,
            **shared,
        )
    strategy.private = private or {}
    strategy.new_average = averaging(config)
    return strategy, network
