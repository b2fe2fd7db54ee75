"""Scores of a search without records and size of a pool, where the settings leave them open.

A score that ranks one space's networks may mislead in another: ``search.scores.trusted_scores``.
"""

from __future__ import annotations

from collections.abc import Sequence

from fednas_flwr.config import Config, SuccessiveHalvingSettings, ZeroCostSettings

SCORED, UNSCORED = 8, 16  # networks of a pool, by whether scores choose them


def chosen_scores(config: Config) -> Sequence[str]:
    """Return the scores of a data-free search or of a pool; a pool without any is drawn."""
    from fednas_flwr.search.scores import SYNFLOW, trusted_scores

    algorithm, trusted = config.algorithm, trusted_scores(config.search_space.name)
    if isinstance(algorithm, SuccessiveHalvingSettings):
        return trusted if algorithm.pool.by is None else algorithm.pool.by
    assert isinstance(algorithm, ZeroCostSettings)
    return algorithm.scores or trusted or SYNFLOW


def pool_size(config: Config) -> int:
    """Return how many networks successive halving begins with."""
    assert isinstance(config.algorithm, SuccessiveHalvingSettings)
    pool = config.algorithm.pool
    usual = SCORED if chosen_scores(config) else UNSCORED
    return pool.keep or min(usual, pool.draws)
