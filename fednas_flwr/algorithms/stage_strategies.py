"""The strategies of an algorithm's stages, the releases of their rounds, and client sampling."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fednas_flwr.algorithms.base import PrivateRound, RoundStrategy, expected_batch
from fednas_flwr.algorithms.fedavg.strategy import FedAvg, FedSGD, GradientStrategy, retrained_on
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models import networks
from fednas_flwr.privacy.plan import PlannedRelease, of_clients
from fednas_flwr.protocol.requests import LARGER
from fednas_flwr.server.cohort import Cohort
from fednas_flwr.server.exchange import Sampling
from fednas_flwr.settings import Config
from fednas_flwr.settings.incompatible import retrains_by_gradients
from fednas_flwr.settings.registry import SUPERNET, algorithm_of, imported


def strategy_of(config: Config, stage: str) -> type[RoundStrategy[Any]]:
    """The class of a stage's strategy.

    Raises:
        ValueError: The stage is a search, and the algorithm does not search.
    """
    entry = algorithm_of(config)
    chosen = entry.search if stage == "search" else entry.retraining
    if chosen is None and stage == "search":
        raise ValueError(f"algorithm={config.algorithm.name} does not search")
    if chosen is None:
        chosen = FedSGD if retrains_by_gradients(config) else FedAvg
    return imported(chosen)


def make_search(
    config: Config, prepared: Prepared, cohort: Cohort, **more: Any
) -> RoundStrategy[Any]:
    """The strategy of the search stage, its supernet initialised from the run's seed.

    Args:
        config: The run's configuration; for CFDNAS the result is the search of all clients
            together.
        prepared: Data of the run, with its shape and number of classes.
        cohort: Reaches the clients.
        more: Further arguments of the strategy: ``checkpoints`` and ``schedule``.

    Raises:
        ValueError: The algorithm does not search.
    """
    config = config.algorithm.whole_search(config)
    strategy, space = strategy_of(config, "search"), networks.supernet_space(config, prepared)
    network = nn.Module()
    if algorithm_of(config).trains == SUPERNET:
        network = networks.seeded_supernet(config, space)
    return strategy(network, cohort, config, space=space, prepared=prepared, **more)


def make_retraining(
    config: Config, description: networks.Description, cohort: Cohort, **more: Any
) -> tuple[RoundStrategy[Any], nn.Module]:
    """The strategy of the retrain stage and its network, initialised from the run's seed.

    Args:
        config: The run's configuration.
        description: Description of the network.
        cohort: Reaches the clients.
        more: Further arguments of the strategy: ``checkpoints``, ``schedule`` and
            ``configuration``.
    """
    network, strategy = networks.seeded_network(config, description), strategy_of(config, "retrain")
    return strategy(network, cohort, config, description=description, **more), network


def releases_by_round(config: Config, stage: str, num_rounds: int) -> list[list[PlannedRelease]]:
    """Releases by a client in each round of a stage of a private run, if the round asks it."""
    strategy, numbers = strategy_of(config, stage), range(1, num_rounds + 1)
    each = (PrivateRound(config, stage, number, num_rounds) for number in numbers)
    rounds = [strategy.releases(config.algorithm, one) for one in each]
    return [of_clients(releases) for releases in rounds] if config.by_client else rounds


def make_sampling(config: Config, splits: Sequence[Mapping[str, int]]) -> Sampling | None:
    """The sampling of a run's clients; None if every round asks all of them.

    Args:
        config: The run's configuration.
        splits: The number of records that each client declares, by split.
    """
    settings = config.sampling
    if settings is None or not config.samples:
        return None
    train = np.array([declared.get("train", 0) for declared in splits])
    search, retrain = train, np.array([retrained_on(config.retrain, one) for one in splits])
    entry = algorithm_of(config)
    if entry.search is not None and issubclass(imported(entry.search), GradientStrategy):
        search = _at_most(search, expected_batch(config, "search"))
    if retrains_by_gradients(config):
        largest = LARGER * float(np.median(retrain))
        retrain = _at_most(retrain, expected_batch(config, "retrain") if config.dp else largest)
    elif entry.retraining is not None:
        retrain = train  # its strategy chooses by validation records, which are then not trained on
    return Sampling(
        seed=config.seed,
        per_round=config.asked,
        backups=min(math.ceil(settings.spare * config.asked - 1e-9), config.clients - config.asked),
        by=settings.by,
        sizes={"search": search, "retrain": retrain},
        num_clients=config.clients,
    )


def _at_most(records: NDArray[np.int64], batch: float | None) -> NDArray[np.int64]:
    """The sizes of the clients' batches; a batch below 1 is a share of the records."""
    return records if batch is None or batch < 1 else np.minimum(records, int(batch))
