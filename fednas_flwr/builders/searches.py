"""The strategy of the search stage: one maker per kind of algorithm, listed in ``SEARCHES``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from fednas_flwr.builders.hardware import hardware_terms
from fednas_flwr.builders.networks import (
    describe_derived,
    seeded_network,
    seeded_supernet,
    supernet_sizes,
    supernet_space,
)
from fednas_flwr.config import (
    CandidateSearch,
    Config,
    GradientSearch,
    HyperparameterSearch,
    LocalSearch,
    PathSearch,
    RandomSearch,
    TunedTraining,
)
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.robust import TrimmedMean
from fednas_flwr.exchange.states import WeightedAverage
from fednas_flwr.randomness import make_generator, seeded
from fednas_flwr.search.bandit import draw_configurations
from fednas_flwr.search.controller import Controller
from fednas_flwr.search.samplers import Evolution, RandomSampler, Sampler
from fednas_flwr.search.settings import Configuration
from fednas_flwr.search.tuner import Tuner
from fednas_flwr.search_spaces.dp_cells import DPCellSpace
from fednas_flwr.strategies.base import RoundStrategy
from fednas_flwr.strategies.dpnas import DPNAS
from fednas_flwr.strategies.fdnas import FDNAS
from fednas_flwr.strategies.feathers import FEATHERS
from fednas_flwr.strategies.fed_darts import FedDARTS
from fednas_flwr.strategies.fnas import FNAS
from fednas_flwr.strategies.random_search import RandomSearch as RandomSearchStrategy


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
    strategy.private = private or {}
    strategy.new_average = averaging(config)
    return strategy


def averaging(config: Config) -> Callable[[], WeightedAverage | TrimmedMean]:
    """Return what makes the average of a round's models."""
    makers: dict[str, Callable[[], WeightedAverage | TrimmedMean]] = {
        "mean": WeightedAverage,
        "median": partial(TrimmedMean, None),
        "trimmed_mean": partial(TrimmedMean, config.trim),
    }
    return makers[config.aggregate]


def _make_fed_darts(
    config: Config, prepared: Prepared, courier: Courier, checkpoints: CheckpointFolder
) -> RoundStrategy:
    algorithm = config.algorithm
    assert isinstance(algorithm, LocalSearch)
    space = supernet_space(config, prepared)
    return FedDARTS(
        seeded_supernet(config, space),
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
        seeded_supernet(config, space),
        courier,
        space=space,
        description={"name": "supernet"},
        local_epochs=algorithm.local_epochs,
        batch_size=algorithm.batch_size,
        clip_norm=algorithm.clip_norm,
        checkpoints=checkpoints,
        **exploration(config, algorithm),
    )


def exploration(config: Config, algorithm: HyperparameterSearch) -> dict[str, Any]:
    """Return what the two stages of FEATHERS have in common."""
    return {
        "tuner": Tuner.of(
            make_configurations(config.seed, algorithm), algorithm.ranges, algorithm.bandit
        ),
        "nas_rounds": algorithm.nas_rounds,
        "rule": algorithm.rule,
        "loss_bound": algorithm.loss_bound,
        "seed": config.seed,
    }


def make_configurations(
    seed: int, algorithm: HyperparameterSearch | TunedTraining
) -> list[Configuration]:
    """Return the given configurations, else those drawn from the run's seed."""
    generator = make_generator(seed, "configurations")
    drawn = draw_configurations(algorithm.num_configurations, algorithm.ranges, generator)
    return algorithm.configurations or drawn


def _make_fnas(
    config: Config, prepared: Prepared, courier: Courier, checkpoints: CheckpointFolder
) -> RoundStrategy:
    algorithm = config.algorithm
    assert isinstance(algorithm, GradientSearch)
    space = supernet_space(config, prepared)
    return FNAS(
        seeded_supernet(config, space),
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
        describe=lambda genotype: describe_derived(
            genotype,
            shapes,
            sizes=supernet_sizes(own),
            norm=own.norm,
            auxiliary=False,
        ),
        make_network=lambda description: seeded_network(config, description),
        seed=config.seed,
        trial_rounds=algorithm.trial_rounds,
        local_epochs=algorithm.local_epochs,
        batch_size=algorithm.batch_size,
        weights=algorithm.weights,
        ranges=algorithm.ranges,
        checkpoints=checkpoints,
    )


def _make_fdnas(
    config: Config, prepared: Prepared, courier: Courier, checkpoints: CheckpointFolder
) -> RoundStrategy:
    algorithm, space = config.algorithm, supernet_space(config, prepared)
    assert isinstance(algorithm, PathSearch)
    return FDNAS(
        seeded_supernet(config, space),
        courier,
        space=space,
        gates=algorithm.gates,
        warm_up_rounds=algorithm.warm_up_rounds,
        local_epochs=algorithm.local_epochs,
        batch_size=algorithm.batch_size,
        weights=algorithm.weights,
        alphas=algorithm.alphas,
        hardware=hardware_terms(algorithm.hardware, space),
        sparse=algorithm.sparse,
        checkpoints=checkpoints,
    )


def _make_dpnas(
    config: Config, prepared: Prepared, courier: Courier, checkpoints: CheckpointFolder
) -> RoundStrategy:
    algorithm, space = config.algorithm, supernet_space(config, prepared)
    assert isinstance(algorithm, CandidateSearch)
    assert isinstance(space, DPCellSpace)  # as the configuration has it
    return DPNAS(
        seeded_supernet(config, space),
        courier,
        space=space,
        sampler=make_sampler(config.seed, algorithm, space.choices()),
        trained_candidates=algorithm.trained_candidates,
        rewarded_candidates=algorithm.rewarded_candidates,
        final_candidates=algorithm.final_candidates,
        warm_up_rounds=algorithm.warm_up_rounds,
        local_steps=algorithm.local_steps,
        batch_size=algorithm.batch_size,
        weights=algorithm.weights,
        dp_aware=algorithm.dp_aware,
        seed=config.seed,
        checkpoints=checkpoints,
    )


def make_sampler(seed: int, algorithm: CandidateSearch, choices: Sequence[int]) -> Sampler:
    """Return what samples candidates, initialised from the run's seed."""
    samplers: dict[str, Callable[[], Sampler]] = {
        "controller": lambda: Controller(choices, algorithm.controller),
        "evolution": lambda: Evolution(choices, algorithm.evolution),
        "random": lambda: RandomSampler(choices),
    }
    with seeded(seed, "sampler"):
        return samplers[algorithm.sampler]()


SEARCHES: dict[type, Callable[[Config, Prepared, Courier, CheckpointFolder], RoundStrategy]] = {
    LocalSearch: _make_fed_darts,
    GradientSearch: _make_fnas,
    HyperparameterSearch: _make_feathers,
    PathSearch: _make_fdnas,
    CandidateSearch: _make_dpnas,
    RandomSearch: _make_random_search,
}
