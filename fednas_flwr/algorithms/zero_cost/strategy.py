"""The data-free search: the server ranks architectures by scores alone and asks no client.

Also the parts of it that choose a pool: what is drawn, within which limits, and how it is ranked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from fednas_flwr.algorithms.base import RoundStrategy
from fednas_flwr.algorithms.private_rounds import PrivateRound
from fednas_flwr.algorithms.zero_cost import ZeroCostSettings
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models.networks import describe_network, described_space
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.search.data_free_scores import measure
from fednas_flwr.search.data_free_search import Limits, Scored, search, shortlisted
from fednas_flwr.settings import Config, NetworkLimits
from fednas_flwr.settings.optimizers import ShortlistSettings
from fednas_flwr.spaces.genotype import Genotype, from_json, to_json
from fednas_flwr.spaces.hardware_terms import latency_of
from fednas_flwr.spaces.space import SearchSpace

ScoredSearch = partial[list[Scored]]  # that still needs the number of draws and a generator


def make_scored_search(
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


class ZeroCost(RoundStrategy[ZeroCostSettings]):
    """Search by data-free scores (Abdelfattah et al. 2021, arXiv 2101.08134), on the server alone.

    Every round scores some more architectures; the best of all by the combined ranking is what is
    found. An evolution goes on where the round before has ended: its population is the youngest of
    all. No message is sent for it, no record is read, and no privacy budget pays.

    The draws of a round come from (seed, round).
    """

    def set_up(self) -> None:
        """Make the search."""
        self._search = self._make_search(self.config, self.prepared, self.space)
        self.values = {"found": []}

    @staticmethod
    def _make_search(config: Config, prepared: Prepared, space: SearchSpace) -> ScoredSearch:
        settings = config.algorithm
        assert isinstance(settings, ZeroCostSettings)
        scores = settings.chosen_scores(space.name)
        return make_scored_search(config, prepared, space, scores, settings.limits)

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Score some more architectures and rank all of them."""
        settings = self.settings
        pool = self._search(
            draws=settings.draws,
            generator=make_generator(self.config.seed, "zero_cost", server_round),
            evolution=settings.evolution,
            known=self.pool(),
        )
        if settings.shortlist is not None:
            pool = shorten(self.config, self.space, settings.shortlist, pool)
        self.values = {
            "found": [
                {
                    "genotype": json.loads(to_json(one.genotype)),
                    "scores": dict(one.scores),
                    "further": None if one.further is None else dict(one.further),
                    "number": one.number,
                }
                for one in pool
            ]
        }
        self.tell_best(pool[0].genotype, server_round)
        return {"scored": float(len(pool)), **pool[0].scores, **(pool[0].further or {})}

    def pool(self) -> list[Scored]:
        """Return all architectures that were scored, the best first."""
        return [
            Scored(**one | {"genotype": from_json(json.dumps(one["genotype"]))})
            for one in self.values["found"]
        ]

    def derive(self) -> Genotype:
        """Return the architecture that ranks first."""
        return self.pool()[0].genotype

    @classmethod
    def releases(cls, settings: ZeroCostSettings, private: PrivateRound) -> list[PlannedRelease]:
        """Nothing."""
        return []

    @classmethod
    def check(cls, config: Config, prepared: Prepared, space: SearchSpace) -> None:
        """Refuse limits within which no network is drawn in the first round."""
        generator = make_generator(config.seed, "zero_cost", 1)
        check_draws(cls._make_search(config, prepared, space), generator)
