"""One entry per algorithm: its settings, its strategies, and what it refuses.

torch and the strategies are imported when one is made, so that settings are checked at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednas_flwr.builders import refusals
from fednas_flwr.builders.pools import chosen_scores, pool_size
from fednas_flwr.config import (
    AlgorithmSettings,
    CFDNASSettings,
    Config,
    DifferentialPrivacy,
    DPNASSettings,
    FDNASSettings,
    FEATHERSSettings,
    FedAvgSettings,
    FedDARTSSettings,
    FedExSettings,
    FNASSettings,
    NetworkLimits,
    RandomSearchSettings,
    SuccessiveHalvingSettings,
    ZeroCostSettings,
)
from fednas_flwr.config.server_optimizers import ServerAdagrad, ServerAdam
from fednas_flwr.errors import ConfigError
from fednas_flwr.search.settings import Configuration, PriorSettings, ShortlistSettings

if TYPE_CHECKING:
    from torch import Tensor

    from fednas_flwr.data.datasets import Prepared
    from fednas_flwr.privacy.plan import RoundReleases
    from fednas_flwr.reporting.runs import Run
    from fednas_flwr.search.samplers import Sampler
    from fednas_flwr.search.zero_cost import Score, Scored
    from fednas_flwr.search_spaces.dp_cells import DPCellSpace
    from fednas_flwr.search_spaces.space import SearchSpace
    from fednas_flwr.strategies.base import RoundStrategy
    from fednas_flwr.strategies.server_optimizer import ServerOptimizer

Plan = tuple["Callable[..., RoundStrategy]", dict[str, Any]]  # a class, its own keyword arguments


def _fed_avg(config: Config, configuration: Configuration | None) -> Plan:
    from fednas_flwr.strategies.fedavg import FedAvg
    from fednas_flwr.strategies.fedsgd import FedSGD

    weights, drop_path_prob = config.retrain.weights, config.retrain.drop_path_prob
    if configuration is not None:
        weights, drop_path_prob = configuration.annealed(weights), configuration.dropout
    own = {"weights": weights, "drop_path_prob": drop_path_prob}
    own |= {"evaluate_every": config.retrain.evaluate_every}
    if retrains_by_gradients(config):
        return FedSGD, own
    if isinstance(config.algorithm, FedAvgSettings):
        own |= {"proximal": config.algorithm.proximal, "optimizer": _server_optimizer(config)}
    return FedAvg, own


def _server_optimizer(config: Config) -> ServerOptimizer | None:
    from fednas_flwr.strategies.server_optimizer import ServerOptimizer

    chosen = config.server_optimizer
    if not isinstance(chosen, ServerAdagrad):
        return None
    constants = {"eta": chosen.lr, "tau": chosen.tau}
    if isinstance(chosen, ServerAdam):
        constants |= {"beta_1": chosen.beta_1, "beta_2": chosen.beta_2}
    return ServerOptimizer(chosen.name, **constants)


def _fed_avg_releases(config: Config) -> RoundReleases:
    from fednas_flwr.strategies import fedavg, fedsgd

    own = _privacy(config).retrain
    terms: dict[str, Any] = {
        "batch_size": retrain_batch(config),
        "local_steps": own.local_steps,
        "norm": own.max_grad_norm,
    }
    if retrains_by_gradients(config):
        return partial(fedsgd.releases, **terms, secure_sum=config.secure_sum)
    return partial(fedavg.releases, **terms)


@dataclass(frozen=True)
class Algorithm:
    """Entry behind a name of ``conf/algorithm``.

    Attributes:
        settings: The dataclass of its settings; of a :class:`~fednas_flwr.config.GivenNetwork` if
            it does not search.
        search: Given configuration, data and search space, returns the strategy's class and the
            keyword arguments that it takes beside those of every strategy; see
            :func:`~fednas_flwr.builders.strategies.make_search`. None if it does not search.
        retraining: The same of the retrain stage, given the configuration and the
            hyper-parameters that the search has found, None if none.
        search_releases: Given the configuration, returns what a round of the private search
            releases; None if it has none.
        retrain_releases: The same of the private retrain stage; None if the algorithm does not run
            with ``privacy=dp``.
        refuses: Raises ConfigError for settings that exclude each other.
        trains_supernet: Whether the search's strategy begins from a supernet; else its network
            has no tensors.
    """

    settings: type[AlgorithmSettings]
    search: Callable[[Config, Prepared, SearchSpace], Plan] | None = None
    retraining: Callable[[Config, Configuration | None], Plan] = _fed_avg
    search_releases: Callable[[Config], RoundReleases] | None = None
    retrain_releases: Callable[[Config], RoundReleases] | None = None
    refuses: Callable[[Config], None] | None = None
    trains_supernet: bool = True


def retrains_by_gradients(config: Config) -> bool:
    """Return whether every step of retraining is an exchange, FedSGD's, and not FedAvg's many.

    Where that is left open it is where clients share the noise of such steps.
    """
    if ALGORITHMS[config.algorithm.name].retraining is not Algorithm.retraining:
        return False
    if config.retrain.exchange is None:
        return config.secure_sum and refusals.by_record(config)
    return config.retrain.exchange == "gradients"


def search_batch(config: Config) -> float | None:
    """Return the size of a search step's batch at a client, expected with privacy.

    Below 1 it is the rate at which each record is drawn; None takes all records.
    """
    return _batch(config.privacy, getattr(config.algorithm, "batch_size", None))


def retrain_batch(config: Config) -> float | None:
    """Return the size of a retraining step's batch at a client, likewise."""
    privacy = config.privacy
    own = privacy.retrain if isinstance(privacy, DifferentialPrivacy) else privacy
    return _batch(own, config.retrain.batch_size)


def _batch(terms: object, batch_size: int | None) -> float | None:
    rate: float | None = getattr(terms, "rate", None)
    if rate is None:
        return batch_size
    return rate if rate < 1 else None


def own_settings(settings: AlgorithmSettings, *without: str) -> dict[str, Any]:
    """Return all settings of an algorithm by name, except for ``name`` and those ``without``."""
    names = (field.name for field in fields(settings))
    return {name: getattr(settings, name) for name in names if name not in ("name", *without)}


def _fed_darts(config: Config, prepared: Prepared, space: SearchSpace) -> Plan:
    from fednas_flwr.search.local_search import Alternating
    from fednas_flwr.strategies.fed_darts import FedDARTS

    algorithm = config.algorithm
    assert isinstance(algorithm, FedDARTSSettings)
    terms = ("rule", "validation_weight", "proximal")
    alternating = Alternating(*(getattr(algorithm, term) for term in terms))
    own = own_settings(algorithm, *terms, "prior")
    return FedDARTS, own | {"alternating": alternating}


def _fed_darts_releases(config: Config) -> RoundReleases:
    from fednas_flwr.strategies.fed_darts import releases

    return _with_terms(config, releases)


def _with_terms(config: Config, releases: Callable[..., Any], **more: Any) -> RoundReleases:
    """Return a search's ``releases`` with the settings and private terms that it takes."""
    privacy = _privacy(config)
    terms = {"local_steps": privacy.local_steps, "norms": privacy.search_norms}
    terms |= own_settings(config.algorithm) | {"batch_size": search_batch(config)} | more
    taken = signature(releases).parameters
    return partial(releases, **{name: term for name, term in terms.items() if name in taken})


def _privacy(config: Config) -> DifferentialPrivacy:
    assert isinstance(config.privacy, DifferentialPrivacy)
    return config.privacy


def _fnas(config: Config, prepared: Prepared, space: SearchSpace) -> Plan:
    from fednas_flwr.strategies.fnas import FNAS

    return FNAS, own_settings(config.algorithm, "prior")


def _fnas_releases(config: Config) -> RoundReleases:
    from fednas_flwr.strategies.fnas import releases

    measures = _privacy(config).metrics_noise_multiplier is not None
    return _with_terms(config, releases, measures=measures, secure_sum=config.secure_sum)


def _feathers(config: Config, prepared: Prepared, space: SearchSpace) -> Plan:
    from fednas_flwr.strategies.feathers import FEATHERS

    algorithm = config.algorithm
    assert isinstance(algorithm, FEATHERSSettings)
    return FEATHERS, {
        "description": {"name": "supernet"},
        "local_epochs": algorithm.local_epochs,
        "batch_size": algorithm.batch_size,
        "clip_norm": algorithm.clip_norm,
        **_exploration(config, algorithm),
    }


def _retrain_feathers(config: Config, configuration: Configuration | None) -> Plan:
    from fednas_flwr.strategies.feathers import FEATHERS

    algorithm = config.algorithm
    assert isinstance(algorithm, FEATHERSSettings)
    clip_norm = config.retrain.weights.clip_norm
    return FEATHERS, {"space": None, "clip_norm": clip_norm, **_exploration(config, algorithm)}


def _feathers_releases(config: Config) -> RoundReleases:
    from fednas_flwr.strategies.feathers import releases

    return _with_terms(config, releases, stage="search", most_trials=_most_trials(config))


def _retrain_feathers_releases(config: Config) -> RoundReleases:
    from fednas_flwr.strategies.feathers import releases

    privacy = _privacy(config)
    return _with_terms(
        config,
        releases,
        stage="retrain",
        most_trials=_most_trials(config),
        batch_size=retrain_batch(config),
        local_steps=privacy.retrain.local_steps,
        norms={**privacy.search_norms, "weights": privacy.retrain.max_grad_norm},
    )


def _most_trials(config: Config) -> int:
    """Return the largest number of trials of an exploration."""
    from fednas_flwr.search.bandit import Bandit

    algorithm = config.algorithm
    assert isinstance(algorithm, FEATHERSSettings)
    num_arms = len(algorithm.configurations) or algorithm.num_configurations
    return Bandit.of(num_arms, algorithm.bandit).num_trials()


def _exploration(config: Config, algorithm: FEATHERSSettings) -> dict[str, Any]:
    """Return what the two stages of FEATHERS have in common."""
    from fednas_flwr.search.local_search import Alternating
    from fednas_flwr.search.tuner import Tuner

    return {
        "tuner": Tuner.of(_configurations(config), algorithm.ranges, algorithm.bandit),
        "nas_rounds": algorithm.nas_rounds,
        "alternating": Alternating(algorithm.rule),
        "beta_decay": algorithm.beta_decay,
        "loss_bound": algorithm.loss_bound,
        "rewarded": algorithm.rewarded,
        "seed": config.seed,
    }


def _configurations(config: Config) -> list[Configuration]:
    """Return the given configurations, else those drawn from the run's seed."""
    from fednas_flwr.randomness import make_generator
    from fednas_flwr.search.bandit import draw_configurations

    algorithm = config.algorithm
    assert isinstance(algorithm, FEATHERSSettings | FedExSettings)
    if algorithm.configurations:
        return algorithm.configurations
    generator = make_generator(config.seed, "configurations")
    return draw_configurations(algorithm.num_configurations, algorithm.ranges, generator)


def _random_search(config: Config, prepared: Prepared, space: SearchSpace) -> Plan:
    from fednas_flwr.builders.networks import describe_derived, seeded_network
    from fednas_flwr.strategies.random_search import RandomSearch

    return RandomSearch, {
        "describe": partial(describe_derived, **_at_search_size(config, prepared)),
        "make_network": partial(seeded_network, config),
        "seed": config.seed,
        **own_settings(config.algorithm),
    }


def _at_search_size(config: Config, prepared: Prepared) -> dict[str, Any]:
    """Return the further settings of ``describe_derived`` for networks of the supernet's size."""
    from fednas_flwr.builders.networks import supernet_sizes

    return {
        "shapes": {"input_shape": list(prepared.input_shape), "num_classes": prepared.num_classes},
        "sizes": supernet_sizes(config.search_space),
        "norm": config.search_space.norm,
        "auxiliary": False,
    }


def _zero_cost(config: Config, prepared: Prepared, space: SearchSpace) -> Plan:
    from fednas_flwr.strategies.zero_cost import ZeroCost

    algorithm = config.algorithm
    assert isinstance(algorithm, ZeroCostSettings)
    return ZeroCost, {
        "evolution": algorithm.evolution,
        "seed": config.seed,
        "shortlist": _shortlist(config, space, algorithm.shortlist),
        **_scored_draws(config, prepared, space, algorithm.draws, algorithm.limits),
    }


def _shortlist(
    config: Config, space: SearchSpace, shortlist: ShortlistSettings | None
) -> Callable[[list[Scored]], list[Scored]]:
    """Return what ranks the best of a ranking anew, or nothing."""
    from fednas_flwr.search.zero_cost import shortlisted

    if shortlist is None:
        return lambda found: found
    score = _score(config, space, shortlist.scores)
    return lambda found: shortlisted(found, score, keep=shortlist.keep)


def _score(config: Config, space: SearchSpace, scores: Sequence[str]) -> Score:
    """Return what scores a genotype, all with the run's seed."""
    from fednas_flwr.search.scores import measure

    return lambda genotype: measure(space, genotype, scores, seed=config.seed)


def _scored_draws(
    config: Config, prepared: Prepared, space: SearchSpace, draws: int, limits: NetworkLimits
) -> dict[str, Any]:
    """Return the arguments of ``zero_cost.search`` that say what is drawn and how it is scored."""
    from fednas_flwr.builders.hardware import latency_of
    from fednas_flwr.search.zero_cost import Limits

    bounds = Limits(
        parameters=limits.parameters,
        multiply_adds=limits.multiply_adds,
        latency_ms=limits.latency_ms,
    )
    return {
        "score": _score(config, space, chosen_scores(config)),
        "draws": draws,
        "limits": bounds,
        "latency_ms": None if limits.table is None else latency_of(space, limits.table),
        "limited": space if bounds == Limits() else _trained_space(config, prepared, space),
    }


def _trained_space(config: Config, prepared: Prepared, space: SearchSpace) -> SearchSpace:
    """Return the space at the sizes at which a found network is trained, if it is."""
    from torch import Generator

    from fednas_flwr.builders.networks import describe_network, described_space

    if "retrain" not in config.stages:
        return space
    anything = space.random_genotype(Generator())
    return described_space(describe_network(config, prepared, anything))[0]


def _successive_halving(config: Config, prepared: Prepared, space: SearchSpace) -> Plan:
    from fednas_flwr.builders.networks import describe_pool, seeded_network
    from fednas_flwr.search.zero_cost import search
    from fednas_flwr.strategies.successive_halving import SuccessiveHalving

    algorithm = config.algorithm
    assert isinstance(algorithm, SuccessiveHalvingSettings)
    pool = algorithm.pool
    scored = _pool_draws(config, prepared, space)
    shortlist = _shortlist(config, space, pool.shortlist)
    return SuccessiveHalving, {
        "choose": lambda generator: [
            one.genotype for one in shortlist(search(space, generator=generator, **scored))
        ],
        "describe": partial(describe_pool, **_at_search_size(config, prepared)),
        "make_network": partial(seeded_network, config),
        "seed": config.seed,
        "keep": pool_size(config),
        **own_settings(algorithm, "pool"),
    }


def _pool_draws(config: Config, prepared: Prepared, space: SearchSpace) -> dict[str, Any]:
    """Return the arguments of ``zero_cost.search`` that say what a pool is drawn from."""
    from fednas_flwr.search.zero_cost import draw_by_alphas

    assert isinstance(config.algorithm, SuccessiveHalvingSettings)
    pool = config.algorithm.pool
    scored = _scored_draws(config, prepared, space, pool.draws, pool.limits)
    if pool.alphas is not None:
        scored["draw"] = partial(draw_by_alphas, space, _found_alphas(config, space, pool.alphas))
    return scored


def check_draws(config: Config, prepared: Prepared, space: SearchSpace) -> None:
    """Refuse limits within which a search by scores draws no network, and alphas that are none.

    The draws are those with which the search begins, without their scores.
    """
    from fednas_flwr.randomness import make_generator
    from fednas_flwr.search.zero_cost import search

    algorithm = config.algorithm
    if isinstance(algorithm, ZeroCostSettings):
        own = _scored_draws(config, prepared, space, algorithm.draws, algorithm.limits)
        generator = make_generator(config.seed, "zero_cost", 1)
    elif isinstance(algorithm, SuccessiveHalvingSettings):
        own = _pool_draws(config, prepared, space)
        generator = make_generator(config.seed, algorithm.name)
    else:
        return
    search(space, generator=generator, **own | {"draws": 1, "score": lambda _: {"none": 0.0}})


def _found_alphas(config: Config, space: SearchSpace, folder: str) -> dict[str, Tensor]:
    """Return the last alphas of a run.

    Raises:
        ConfigError: It has none, or those of another space; or this run is private and it is not.
    """
    import torch

    key = f"algorithm.pool.alphas={folder}"
    run = _earlier_run(config, key, folder)
    events = [] if run is None else run.alphas()
    if not events:
        raise ConfigError(f"{key} holds no alphas: give the folder of a one-shot search.")
    alphas = {kind: torch.tensor(values) for kind, values in events[-1]["alphas"].items()}
    try:
        if tuple(events[-1]["ops"]) != space.ops:
            raise ValueError("they are of other ops")
        space.derive(alphas)
    except ValueError as error:
        raise ConfigError(f"{key} does not fit search_space={space.name}: {error}.") from error
    return alphas


def prior_alphas(config: Config, space: SearchSpace) -> dict[str, Tensor]:
    """Return by how much alphas are larger at first, by kind of cell; nothing without a prior.

    Raises:
        ConfigError: The run has found no architecture, or one of another space, or the space has
            no cells; or this run is private and that one is not.
    """
    from fednas_flwr.search_spaces.cell_graph import CellGraphSpace, WholeGraphSpace, lead
    from fednas_flwr.search_spaces.genotype import from_json

    prior: PriorSettings | None = getattr(config.algorithm, "prior", None)
    if prior is None:
        return {}
    key = f"algorithm.prior.run={prior.run}"
    if not isinstance(space, CellGraphSpace | WholeGraphSpace):
        raise ConfigError(
            f"{key} with search_space={space.name}: alphas begin with a lead in spaces of cells "
            "only; set algorithm.prior=null."
        )
    run = _earlier_run(config, key, prior.run)
    found = None if run is None else run.last("derived")
    if found is None:
        raise ConfigError(f"{key} has found no architecture: give the folder of a search.")
    genotype = from_json(json.dumps(found["genotype"]), origin=key)
    space.check(genotype)
    return lead(genotype, prior.margin, ops=space.ops, nodes=space.nodes)


def _earlier_run(config: Config, key: str, folder: str) -> Run | None:
    """Return the run in a folder, None where there is none.

    Raises:
        ConfigError: This run is private, and that one's search has read records and was not.
    """
    from fednas_flwr.reporting.runs import EVENTS_FILE, read_run

    path = Path(folder).expanduser()
    if not (path / EVENTS_FILE).is_file():
        return None
    run = read_run(path)
    rounds = run.rounds("search")
    data_free = bool(rounds) and all(event.get("exchanges") == 0 for event in rounds)
    if not (run.is_private or data_free) and isinstance(config.privacy, DifferentialPrivacy):
        raise ConfigError(
            f"{key} with privacy=dp: what a search without privacy has found is an exact function "
            "of records; give the folder of a private one, or of a data-free one."
        )
    return run


def _successive_halving_releases(config: Config) -> RoundReleases:
    from fednas_flwr.strategies.successive_halving import releases

    algorithm = config.algorithm
    assert isinstance(algorithm, SuccessiveHalvingSettings)
    return _with_terms(config, releases, keep=pool_size(config))


def _no_releases(config: Config) -> RoundReleases:
    from fednas_flwr.strategies.zero_cost import releases

    return releases


def _fdnas(config: Config, prepared: Prepared, space: SearchSpace) -> Plan:
    from fednas_flwr.builders.hardware import hardware_terms
    from fednas_flwr.strategies.fdnas import FDNAS

    algorithm = config.algorithm
    assert isinstance(algorithm, FDNASSettings)
    hardware = hardware_terms(algorithm.hardware, space)
    return FDNAS, own_settings(algorithm) | {"hardware": hardware}


def _fdnas_releases(config: Config) -> RoundReleases:
    from fednas_flwr.strategies.fdnas import releases

    return _with_terms(config, releases)


def _cfdnas(config: Config, prepared: Prepared, space: SearchSpace) -> Plan:
    """Return FDNAS of all clients, with which CFDNAS begins."""
    algorithm = config.algorithm
    assert isinstance(algorithm, CFDNASSettings)
    return _fdnas(replace(config, algorithm=algorithm.search), prepared, space)


def whole_search(config: Config) -> Config:
    """Return the configuration with all rounds of search that a client is asked in.

    That is the same, but for CFDNAS, whose groups search on: then it is one of FDNAS.
    """
    algorithm = config.algorithm
    if not isinstance(algorithm, CFDNASSettings):
        return config
    rounds = algorithm.group_rounds + config.rounds * algorithm.inherit
    return replace(config, algorithm=algorithm.search, rounds=rounds)


def _dpnas(config: Config, prepared: Prepared, space: SearchSpace) -> Plan:
    from fednas_flwr.search_spaces.dp_cells import DPCellSpace
    from fednas_flwr.strategies.dpnas import DPNAS

    algorithm = config.algorithm
    assert isinstance(algorithm, DPNASSettings)
    assert isinstance(space, DPCellSpace)  # as the configuration has it
    return DPNAS, own_settings(algorithm, "controller", "evolution") | {
        "sampler": make_sampler(config.seed, algorithm, type(space)),
        "seed": config.seed,
    }


def _dpnas_releases(config: Config) -> RoundReleases:
    from fednas_flwr.strategies.dpnas import releases

    return _with_terms(config, releases)


def make_sampler(seed: int, algorithm: DPNASSettings, space: type[DPCellSpace]) -> Sampler:
    """Return what samples candidates that are not degenerate, initialised from the run's seed."""
    from fednas_flwr.randomness import seeded
    from fednas_flwr.search.controller import Controller
    from fednas_flwr.search.samplers import Evolution, RandomSampler, RejectionSampler

    choices = space.choices()

    def rejects(path: list[int]) -> bool:
        return space.is_degenerate(space.genotype(path))

    samplers: dict[str, Callable[[], Sampler]] = {
        "controller": lambda: Controller(choices, algorithm.controller),
        "evolution": lambda: Evolution(choices, algorithm.evolution),
        "random": lambda: RandomSampler(choices),
    }
    with seeded(seed, "sampler"):
        sampler = samplers[algorithm.sampler]()
    return RejectionSampler(sampler, choices, rejects)


def _retrain_fedex(config: Config, configuration: Configuration | None) -> Plan:
    from fednas_flwr.strategies.fedex import FedEx

    algorithm = config.algorithm
    assert isinstance(algorithm, FedExSettings)
    return FedEx, {
        "configurations": _configurations(config),
        "theta": algorithm.theta,
        "clip_norm": algorithm.clip_norm,
        "loss_bound": algorithm.loss_bound,
        "seed": config.seed,
    }


ALGORITHMS: dict[str, Algorithm] = {
    "vanilla_nas": Algorithm(FNASSettings, _fnas, refuses=refusals.of_vanilla_nas),
    "fnas": Algorithm(FNASSettings, _fnas, refuses=refusals.of_fnas),
    "dp_fnas": Algorithm(
        FNASSettings,
        _fnas,
        search_releases=_fnas_releases,
        retrain_releases=_fed_avg_releases,
        refuses=refusals.of_dp_fnas,
    ),
    **dict.fromkeys(
        ("fed_darts", "fedprox_darts"),
        Algorithm(
            FedDARTSSettings,
            _fed_darts,
            search_releases=_fed_darts_releases,
            retrain_releases=_fed_avg_releases,
            refuses=refusals.of_fed_darts,
        ),
    ),
    "fednas": Algorithm(FedDARTSSettings, _fed_darts, refuses=refusals.of_single_paths),
    "feathers": Algorithm(
        FEATHERSSettings,
        _feathers,
        retraining=_retrain_feathers,
        search_releases=_feathers_releases,
        retrain_releases=_retrain_feathers_releases,
        refuses=refusals.of_feathers,
    ),
    "fdnas": Algorithm(
        FDNASSettings,
        _fdnas,
        search_releases=_fdnas_releases,
        retrain_releases=_fed_avg_releases,
        refuses=refusals.of_fdnas,
    ),
    "cfdnas": Algorithm(
        CFDNASSettings,
        _cfdnas,
        search_releases=_fdnas_releases,
        retrain_releases=_fed_avg_releases,
        refuses=refusals.of_cfdnas,
    ),
    "dpnas": Algorithm(
        DPNASSettings,
        _dpnas,
        search_releases=_dpnas_releases,
        retrain_releases=_fed_avg_releases,
        refuses=refusals.of_dpnas,
    ),
    "random_search": Algorithm(RandomSearchSettings, _random_search, trains_supernet=False),
    "zero_cost": Algorithm(
        ZeroCostSettings,
        _zero_cost,
        search_releases=_no_releases,
        retrain_releases=_fed_avg_releases,
        refuses=refusals.of_scores,
        trains_supernet=False,
    ),
    "successive_halving": Algorithm(
        SuccessiveHalvingSettings,
        _successive_halving,
        search_releases=_successive_halving_releases,
        retrain_releases=_fed_avg_releases,
        refuses=refusals.of_successive_halving,
        trains_supernet=False,
    ),
    **dict.fromkeys(
        ("fedavg", "fedprox"), Algorithm(FedAvgSettings, retrain_releases=_fed_avg_releases)
    ),
    "fedex": Algorithm(FedExSettings, retraining=_retrain_fedex, refuses=refusals.of_fedex),
}
