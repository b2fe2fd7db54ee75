"""What a run's strategies release in each round, of the numbers that the configuration gives them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fednas_flwr.config import (
    CandidateSearch,
    Config,
    DifferentialPrivacy,
    FixedNetwork,
    GradientSearch,
    HyperparameterSearch,
    LocalSearch,
    PathSearch,
)
from fednas_flwr.privacy.plan import RoundReleases
from fednas_flwr.search.bandit import Bandit
from fednas_flwr.strategies import dpnas, fdnas, feathers, fed_darts, fedavg, fnas


def search_releases(config: Config) -> RoundReleases:
    """Return what the rounds of a private run's search release."""
    return SEARCH_RELEASES[type(config.algorithm)](config)


def retrain_releases(config: Config) -> RoundReleases:
    """Return what the rounds of a private run's retraining release."""
    privacy = _privacy(config)
    if isinstance(config.algorithm, HyperparameterSearch):
        return partial(
            feathers.releases,
            stage="retrain",
            batch_size=config.retrain.batch_size,
            local_steps=privacy.retrain.local_steps,
            norms=_norms(privacy) | {"weights": privacy.retrain.max_grad_norm},
            **_exploration(config.algorithm),
        )
    return partial(
        fedavg.releases,
        batch_size=config.retrain.batch_size,
        local_steps=privacy.retrain.local_steps,
        norm=privacy.retrain.max_grad_norm,
    )


def _privacy(config: Config) -> DifferentialPrivacy:
    assert isinstance(config.privacy, DifferentialPrivacy)
    return config.privacy


def _norms(privacy: DifferentialPrivacy) -> dict[str, float]:
    """Return the clipping norms of a search by kind."""
    kinds = ("weights", "alphas", "rewards")
    return {kind: getattr(privacy, kind).max_grad_norm for kind in kinds}


def _fed_darts(config: Config) -> RoundReleases:
    algorithm, privacy = config.algorithm, _privacy(config)
    assert isinstance(algorithm, LocalSearch)
    return partial(
        fed_darts.releases,
        batch_size=algorithm.batch_size,
        local_steps=privacy.local_steps,
        norms=_norms(privacy),
    )


def _fdnas(config: Config) -> RoundReleases:
    algorithm, privacy = config.algorithm, _privacy(config)
    assert isinstance(algorithm, PathSearch)
    return partial(
        fdnas.releases,
        warm_up_rounds=algorithm.warm_up_rounds,
        batch_size=algorithm.batch_size,
        local_steps=privacy.local_steps,
        norms=_norms(privacy),
    )


def _fnas(config: Config) -> RoundReleases:
    algorithm, privacy = config.algorithm, _privacy(config)
    assert isinstance(algorithm, GradientSearch)
    return partial(
        fnas.releases,
        fused=algorithm.fused,
        local_steps=algorithm.local_steps,
        batch_size=algorithm.batch_size,
        evaluate_every=algorithm.evaluate_every,
        measures=privacy.metrics_noise_multiplier is not None,
        norms=_norms(privacy),
    )


def _dpnas(config: Config) -> RoundReleases:
    algorithm = config.algorithm
    assert isinstance(algorithm, CandidateSearch)
    return partial(
        dpnas.releases,
        trained_candidates=algorithm.trained_candidates,
        warm_up_rounds=algorithm.warm_up_rounds,
        local_steps=algorithm.local_steps,
        batch_size=algorithm.batch_size,
        norms=_norms(_privacy(config)),
    )


def _feathers(config: Config) -> RoundReleases:
    algorithm, privacy = config.algorithm, _privacy(config)
    assert isinstance(algorithm, HyperparameterSearch)
    return partial(
        feathers.releases,
        stage="search",
        batch_size=algorithm.batch_size,
        local_steps=privacy.local_steps,
        norms=_norms(privacy),
        **_exploration(algorithm),
    )


def _exploration(algorithm: HyperparameterSearch) -> dict[str, Any]:
    num_arms = len(algorithm.configurations) or algorithm.num_configurations
    most = Bandit.of(num_arms, algorithm.bandit).num_trials()
    return {"nas_rounds": algorithm.nas_rounds, "most_trials": most}


SEARCH_RELEASES: dict[type, Callable[[Config], RoundReleases]] = {
    LocalSearch: _fed_darts,
    PathSearch: _fdnas,
    GradientSearch: _fnas,
    CandidateSearch: _dpnas,
    HyperparameterSearch: _feathers,
}
__all__ = ["FixedNetwork", "retrain_releases", "search_releases"]
