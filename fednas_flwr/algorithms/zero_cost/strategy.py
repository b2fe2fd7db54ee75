"""The data-free search: the server ranks architectures by scores alone and asks no client.

Also the parts of it that choose a pool: what is drawn, within which limits, and how it is ranked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fednas_flwr.algorithms.base import RoundStrategy
from fednas_flwr.algorithms.private_rounds import PrivateRound
from fednas_flwr.algorithms.zero_cost import ZeroCostSettings
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models.networks import describe_network, described_space
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.search.data_free_scores import measure
from fednas_flwr.search.data_free_search import Limits, Score, Scored, search, shortlisted
from fednas_flwr.settings import Config, NetworkLimits
from fednas_flwr.settings.optimizers import ShortlistSettings
from fednas_flwr.spaces.costs import latency_of
from fednas_flwr.spaces.genotype import Genotype, from_json, to_json
from fednas_flwr.spaces.space import SearchSpace


@dataclass(frozen=True)
class ScoredDraws:
    """Networks that are drawn from a space within limits and ranked by scores with a run's seed.

    Attributes:
        config: The run's.
        prepared: Its data.
        space: The space, at the supernet's sizes.
        scores: Names of the scores.
        limits: On the cost of a network.
        shortlist: Ranks the best anew; None ranks all by the same scores.
        options: Further arguments of :func:`~fednas_flwr.search.data_free_search.search`.
    """

    config: Config
    prepared: Prepared
    space: SearchSpace
    scores: Sequence[str]
    limits: NetworkLimits
    shortlist: ShortlistSettings | None
    options: Mapping[str, Any] = field(default_factory=dict)

    def ranked(self, **drawn: Any) -> list[Scored]:
        """All drawn networks, best first.

        Args:
            **drawn: Further arguments of :func:`~fednas_flwr.search.data_free_search.search`.
        """
        found = self._search(self._by(self.scores), **drawn)
        if self.shortlist is None:
            return found
        return shortlisted(found, self._by(self.shortlist.scores), keep=self.shortlist.keep)

    def check(self, generator: torch.Generator) -> None:
        """Refuse limits within which no network is drawn; none is scored.

        Args:
            generator: That of the first draws.
        """
        self._search(lambda _: {"none": 0.0}, draws=1, generator=generator)

    def _by(self, scores: Sequence[str]) -> Score:
        return partial(measure, self.space, scores=scores, seed=self.config.seed)

    def _search(self, score: Score, **drawn: Any) -> list[Scored]:
        limits, limited = self.limits, self.space
        bounds = Limits(
            parameters=limits.parameters,
            multiply_adds=limits.multiply_adds,
            latency_ms=limits.latency_ms,
        )
        if bounds != Limits() and "retrain" in self.config.stages:
            # at the sizes at which a found network is trained
            anything = self.space.random_genotype(torch.Generator())
            description = describe_network(self.config, self.prepared, anything)
            limited = described_space(description)[0]
        return search(
            self.space,
            score,
            limits=bounds,
            latency_ms=None if limits.table is None else latency_of(self.space, limits.table),
            limited=limited,
            **self.options,
            **drawn,
        )


class ZeroCost(RoundStrategy[ZeroCostSettings]):
    """Search by data-free scores (Abdelfattah et al. 2021, arXiv 2101.08134), on the server alone.

    Every round scores some more architectures; the best of all by the combined ranking is what is
    found. An evolution goes on where the round before has ended: its population is the youngest of
    all. No message is sent for it, no record is read, and no privacy budget pays.

    The draws of a round come from (seed, round).
    """

    def set_up(self) -> None:
        """Make the search."""
        self._drawn = self._draws(self.config, self.prepared, self.space)
        self.values = {"found": []}

    @staticmethod
    def _draws(config: Config, prepared: Prepared, space: SearchSpace) -> ScoredDraws:
        settings = config.algorithm
        assert isinstance(settings, ZeroCostSettings)
        scores = settings.chosen_scores(space.name)
        return ScoredDraws(config, prepared, space, scores, settings.limits, settings.shortlist)

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Score some more architectures and rank all of them."""
        settings = self.settings
        pool = self._drawn.ranked(
            draws=settings.draws,
            generator=make_generator(self.config.seed, "zero_cost", server_round),
            evolution=settings.evolution,
            known=self.pool(),
        )
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
        """No releases."""
        return []

    @classmethod
    def check(cls, config: Config, prepared: Prepared, space: SearchSpace) -> None:
        """Refuse limits within which no network is drawn in the first round."""
        generator = make_generator(config.seed, "zero_cost", 1)
        cls._draws(config, prepared, space).check(generator)
