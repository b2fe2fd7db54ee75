"""Searches by scores without records: what is drawn, within which limits, and how it is ranked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models.networks import describe_network, described_space
from fednas_flwr.search.data_free_scores import measure
from fednas_flwr.search.data_free_search import Limits, Scored, search, shortlisted
from fednas_flwr.settings import Config, NetworkLimits
from fednas_flwr.settings.optimizers import ShortlistSettings
from fednas_flwr.spaces.space import SearchSpace
from fednas_flwr.spaces.space_costs import latency_of

ScoredSearch = partial[list[Scored]]  # that still needs the number of draws and a generator


def make_search(
    config: Config,
    prepared: Prepared,
    space: SearchSpace,
    scores: Sequence[str],
    limits: NetworkLimits,
) -> ScoredSearch:
    """A :func:`~fednas_flwr.search.data_free_search.search` by scores that have the run's seed."""
    bounds = Limits(
        parameters=limits.parameters,
        multiply_adds=limits.multiply_adds,
        latency_ms=limits.latency_ms,
    )
    return partial(
        search,
        space,
        partial(measure, space, scores=scores, seed=config.seed),
        limits=bounds,
        latency_ms=None if limits.table is None else latency_of(space, limits.table),
        limited=space if bounds == Limits() else _trained_space(config, prepared, space),
    )


def shorten(
    config: Config, space: SearchSpace, shortlist: ShortlistSettings, found: list[Scored]
) -> list[Scored]:
    """The ranking with the best of it ranked anew by the shortlist's scores."""
    score = partial(measure, space, scores=shortlist.scores, seed=config.seed)
    return shortlisted(found, score, keep=shortlist.keep)


def check_draws(scored: ScoredSearch, generator: torch.Generator) -> None:
    """Refuse limits within which a search draws no network; none is scored.

    Args:
        scored: The search.
        generator: That of its first draws.
    """
    unscored = partial(search, scored.args[0], lambda _: {"none": 0.0}, **scored.keywords)
    unscored(draws=1, generator=generator)


def _trained_space(config: Config, prepared: Prepared, space: SearchSpace) -> SearchSpace:
    """The space at the sizes at which a found network is trained, if it is."""
    if "retrain" not in config.stages:
        return space
    anything = space.random_genotype(torch.Generator())
    return described_space(describe_network(config, prepared, anything))[0]
