"""Which settings exclude each other; :class:`~fednas_flwr.config.run.Config` asks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fednas_flwr.config.algorithms import (
    FixedNetwork,
    GivenNetwork,
    GradientSearch,
    HyperparameterSearch,
    LocalSearch,
    TunedTraining,
)
from fednas_flwr.config.networks import BlockSpace, DPCells
from fednas_flwr.config.path_searches import CandidateSearch, ClusterSearch, PathSearch
from fednas_flwr.config.privacy import NoPrivacy
from fednas_flwr.errors import ConfigError
from fednas_flwr.names import GROUP
from fednas_flwr.search.settings import NORMED_NETWORKS

if TYPE_CHECKING:
    from fednas_flwr.config.run import Config


def check_privacy(config: Config) -> None:
    """Refuse what cannot be private, and DP-FNAS without privacy."""
    algorithm, privacy = config.algorithm, config.privacy
    if isinstance(privacy, NoPrivacy):
        if algorithm.name == "dp_fnas":
            raise ConfigError("algorithm=dp_fnas with privacy=none: set privacy=dp, or use fnas.")
        return
    private = ("dp_fnas", "fed_darts", "feathers", "fdnas", "dpnas", "fedavg")
    if config.oversample:
        raise ConfigError(
            "oversample=true with privacy=dp: a record that is drawn several times costs more than "
            "is booked; set class_factors={<class>: <public factor>} instead."
        )
    if config.personalised:
        raise ConfigError(
            "personalised=true with privacy=dp: an accuracy after local training without noise is "
            "an exact function of the records; leave it out."
        )
    if isinstance(algorithm, ClusterSearch):
        raise ConfigError(
            "privacy=dp with algorithm=cfdnas is not possible yet: a client keeps one schedule of "
            "releases per run, and each group is a run that begins when its group is known; set "
            "algorithm=fdnas."
        )
    if algorithm.name not in private:
        raise ConfigError(
            f"privacy=dp with algorithm={algorithm.name} is not possible yet: choose one of "
            f"{', '.join(private)}."
        )
    if isinstance(algorithm, GradientSearch) and algorithm.order != 1:
        raise ConfigError(
            f"algorithm.order={algorithm.order} with privacy=dp: the second order mixes splits "
            "and is no sum over records; set algorithm.order=1."
        )
    if isinstance(algorithm, LocalSearch | HyperparameterSearch):
        if algorithm.rule != "first_order":
            raise ConfigError(
                f"algorithm.rule={algorithm.rule} with privacy=dp: it mixes splits; set "
                "algorithm.rule=first_order."
            )
    wrong = [key for key, norm in _norms(config).items() if norm != GROUP]
    if wrong:
        raise ConfigError(
            "privacy=dp with batch normalisation is not possible, which mixes the records of a "
            f"batch and leaks its statistics: set {' '.join(f'{key}=group' for key in wrong)}."
        )


def _norms(config: Config) -> dict[str, str]:
    """Return the settings of norms that the networks of a run have."""
    algorithm, norms = config.algorithm, {}
    without_norm = (
        isinstance(algorithm, FixedNetwork)
        and algorithm.network not in NORMED_NETWORKS
        and config.genotype is None
    )
    if "retrain" in config.stages and not without_norm:
        norms["retrain.norm"] = config.retrain.norm
    if _searches(config):
        norms["search_space.norm"] = config.search_space.norm
    return norms


def check_algorithm(config: Config) -> None:
    """Refuse an algorithm without the clients or the search space that it is defined for."""
    if config.algorithm.name == "vanilla_nas" and config.clients != 1:
        raise ConfigError(
            f"algorithm=vanilla_nas with clients={config.clients}: vanilla NAS has one party; "
            "set clients=1 or algorithm=fnas."
        )
    if _searches(config) and isinstance(config.algorithm, PathSearch | ClusterSearch):
        if not isinstance(config.search_space, BlockSpace):
            raise ConfigError(
                f"algorithm={config.algorithm.name} with search_space={config.search_space.name}: "
                "it samples paths of blocks; set search_space=mbconv retrain=mbconv."
            )
    if _searches(config) and isinstance(config.algorithm, CandidateSearch):
        space = config.search_space
        if not isinstance(space, DPCells) or space.norm != GROUP:
            raise ConfigError(
                f"algorithm=dpnas with search_space={space.name} norm={space.norm}: candidates "
                "share weights, so that statistics of batches would be other candidates'; set "
                "search_space=dp_cells search_space.norm=group retrain=dp_cells."
            )


def check_wire(config: Config) -> None:
    """Refuse two ways of sending less at once."""
    algorithm = config.algorithm
    search = algorithm.search if isinstance(algorithm, ClusterSearch) else algorithm
    if config.wire != "float32" and isinstance(search, PathSearch) and search.sparse:
        raise ConfigError(
            f"wire={config.wire} with sparse=true of algorithm={algorithm.name}: rounding is of "
            "differences to whole states; set one of wire=float32 and sparse=false."
        )


def check_aggregate(config: Config) -> None:
    """Refuse robust averages of what is not an average, and of too few clients.

    With privacy they are allowed: they only process what has been released. The noise of a median
    has up to 1.25 times the standard deviation of the mean's.
    """
    name, clients = config.aggregate, config.clients
    if name == "mean":
        return
    if isinstance(config.algorithm, GradientSearch) and _searches(config):
        raise ConfigError(
            f"aggregate={name} with algorithm={config.algorithm.name}: it adds up sums of "
            "gradients over batches of different sizes; set aggregate=mean."
        )
    if clients < 3:
        raise ConfigError(f"aggregate={name} with clients={clients}: expected 3 or more.")
    if name != "trimmed_mean":
        return
    if isinstance(config.algorithm, ClusterSearch):
        raise ConfigError(
            "aggregate=trimmed_mean with algorithm=cfdnas: how many clients a group has is not "
            "known before; set aggregate=median."
        )
    fewest = math.ceil(config.runtime.quorum * clients - 1e-9)
    if fewest <= 2 * config.trim:
        raise ConfigError(
            f"trim={config.trim} leaves nothing of the {fewest} replies that runtime.quorum="
            f"{config.runtime.quorum:g} of clients={clients} lets a round go on with: expected "
            "fewer than half of them; raise runtime.quorum or lower trim."
        )


def check_stages(config: Config) -> None:
    """Refuse stages that lack what they start from, or have it twice."""
    searches = _searches(config)
    if config.genotype is not None and searches:
        raise ConfigError(
            f"genotype={config.genotype} with stages={config.stages}: a genotype replaces the "
            "search; set stages=[retrain,evaluate,export]."
        )
    chooses = searches or isinstance(config.algorithm, TunedTraining)
    if chooses and config.dataset.fractions.get("validation") == 0:
        raise ConfigError(
            "dataset.fractions.validation=0.0 leaves a search nothing to choose by: expected "
            "above 0."
        )
    if "retrain" in config.stages and not searches and config.genotype is None:
        if not isinstance(config.algorithm, GivenNetwork):
            raise ConfigError(
                f"stages={config.stages} without search: retraining needs a network; set "
                "genotype=<file> or algorithm=fedavg."
            )
    if not {"retrain"} & set(config.stages) and {"evaluate", "export"} & set(config.stages):
        raise ConfigError(
            f"stages={config.stages}: evaluate and export need the network that retrain trains; "
            "add retrain or leave them out."
        )


def _searches(config: Config) -> bool:
    return "search" in config.stages and not isinstance(config.algorithm, GivenNetwork)
