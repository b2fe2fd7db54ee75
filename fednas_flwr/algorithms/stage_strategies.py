"""The strategies of the search and of the retrain stage, as the algorithm's entry names them."""

from __future__ import annotations

from typing import Any

from torch import nn

from fednas_flwr.algorithms.base import RoundStrategy
from fednas_flwr.algorithms.earlier_runs import prior_alphas
from fednas_flwr.algorithms.fdnas import whole_search
from fednas_flwr.algorithms.fedavg.fedsgd import FedSGD
from fednas_flwr.algorithms.fedavg.strategy import FedAvg
from fednas_flwr.algorithms.private_rounds import PrivateRound
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models.networks import (
    Description,
    seeded_network,
    seeded_supernet,
    supernet_space,
)
from fednas_flwr.privacy.plan import PlannedRelease, PrivateStage, of_clients
from fednas_flwr.runs.checkpoints import CheckpointFolder
from fednas_flwr.server.cohort import Cohort
from fednas_flwr.settings import Config
from fednas_flwr.settings.incompatible import by_client, retrains_by_gradients
from fednas_flwr.settings.optimizers import Configuration
from fednas_flwr.settings.registry import SUPERNET, algorithm_of, imported
from fednas_flwr.spaces.space import SearchSpace, Supernet


def strategy_of(config: Config, stage: str) -> type[RoundStrategy[Any]]:
    """The class of a stage's strategy.

    Raises:
        ValueError: It is of a search, and the algorithm does not search.
    """
    entry = algorithm_of(config)
    chosen = entry.search if stage == "search" else entry.retraining
    if chosen is None and stage == "search":
        raise ValueError(f"algorithm={config.algorithm.name} does not search")
    if chosen is None:
        chosen = FedSGD if retrains_by_gradients(config) else FedAvg
    strategy: type[RoundStrategy[Any]] = imported(chosen)
    return strategy


def make_search(
    config: Config,
    prepared: Prepared,
    cohort: Cohort,
    checkpoints: CheckpointFolder | None,
    private: PrivateStage | None = None,
) -> RoundStrategy[Any]:
    """The strategy of the search stage, its supernet initialised from the run's seed.

    Args:
        config: The run's configuration; of CFDNAS the strategy is that of all clients.
        prepared: Gives shape and number of classes.
        cohort: Reaches the clients.
        checkpoints: Where the state goes after every round.
        private: See :class:`~fednas_flwr.algorithms.base.RoundStrategy`.

    Raises:
        ValueError: The algorithm does not search.
    """
    config = whole_search(config)
    strategy, space = strategy_of(config, "search"), supernet_space(config, prepared)
    network = nn.Module()
    if algorithm_of(config).trains == SUPERNET:
        network = _first_supernet(config, space)
    return strategy(
        network,
        cohort,
        config,
        space=space,
        prepared=prepared,
        checkpoints=checkpoints,
        private=private,
    )


def make_retraining(
    config: Config,
    description: Description,
    cohort: Cohort,
    checkpoints: CheckpointFolder | None,
    private: PrivateStage | None = None,
    configuration: Configuration | None = None,
) -> tuple[RoundStrategy[Any], nn.Module]:
    """The strategy of the retrain stage and its network, initialised from the run's seed.

    Args:
        config: The run's configuration.
        description: What the network is built from.
        cohort: Reaches the clients.
        checkpoints: Where the state goes after every round.
        private: See :class:`~fednas_flwr.algorithms.base.RoundStrategy`.
        configuration: Takes the place of the retrain settings' learning rate, momentum, decay and
            drop-path probability.
    """
    network = seeded_network(config, description)
    strategy = strategy_of(config, "retrain")(
        network,
        cohort,
        config,
        description=description,
        configuration=configuration,
        checkpoints=checkpoints,
        private=private,
    )
    return strategy, network


def releases_by_round(config: Config, stage: str, num_rounds: int) -> list[list[PlannedRelease]]:
    """What each round of a stage of a private run releases of a client that it asks."""
    strategy = strategy_of(config, stage)
    rounds = [
        strategy.releases(config.algorithm, PrivateRound.of(config, stage, number, num_rounds))
        for number in range(1, num_rounds + 1)
    ]
    return [of_clients(releases) for releases in rounds] if by_client(config) else rounds


def _first_supernet(config: Config, space: SearchSpace) -> Supernet:
    """The supernet that a search begins with."""
    supernet = seeded_supernet(config, space)
    for kind, lead_EO in prior_alphas(config, space).items():
        supernet.alphas()[kind].data += lead_EO
    return supernet
