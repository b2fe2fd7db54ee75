"""The data-free search: the server ranks architectures by scores alone and asks no client.

The module also has the parts that choose a pool: drawing within limits, and ranking.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fednas_flwr.algorithms.base import Metrics, PrivateRound, RoundStrategy
from fednas_flwr.algorithms.zero_cost import PoolSettings, ZeroCostSettings
from fednas_flwr.base.processes import LostError, beside, is_warm
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models.networks import describe_network, described_space
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.search.data_free_scores import Scored, Scores, measure, search, shortlisted
from fednas_flwr.settings import Config, registry
from fednas_flwr.settings.names import FOUND
from fednas_flwr.spaces.costs import latency_of, ranges_of_cost
from fednas_flwr.spaces.genotype import Genotype, from_json, to_json
from fednas_flwr.spaces.space import SearchSpace

PART = 4  # genotypes that a process scores at a time


@dataclass(frozen=True)
class ScoredDraws:
    """Networks that are drawn from a space within limits and ranked by scores, with a run's seed.

    Attributes:
        config: Settings of the run.
        prepared: Data of the run.
        space: The space, at the supernet's sizes.
        choice: Scores, limits and shortlist.
    """

    config: Config
    prepared: Prepared
    space: SearchSpace
    choice: ZeroCostSettings | PoolSettings

    def ranked(self, **drawn: Any) -> list[Scored]:
        """All drawn networks, best first.

        Args:
            **drawn: Further arguments of :func:`~fednas_flwr.search.data_free_scores.search`.
        """
        scores, shortlist = partial(_scores, self.config, self.space), self.choice.shortlist
        ranking = self._search(partial(scores, self.choice.chosen_scores(self.space.name)), **drawn)
        if shortlist is None:
            return ranking
        return shortlisted(ranking, partial(scores, shortlist.scores), keep=shortlist.keep)

    def check(self, generator: torch.Generator) -> None:
        """Refuse limits within which no network is drawn; no network is scored.

        Args:
            generator: Source of the first draws.
        """
        self._search(lambda drawn: [{"none": 0.0}] * len(drawn), draws=1, generator=generator)

    def spread(self, ranking: list[Scored], size: int) -> list[Genotype]:
        """The best of a ranking in each of ``size`` ranges of cost with equally many networks."""
        genotypes, table = [one.genotype for one in ranking], self.choice.limits.table
        parts = ranges_of_cost(genotypes, self._trained(), table, count=size)
        return [genotypes[place] for place in sorted(map(min, parts))]

    def _trained(self) -> SearchSpace:
        """The space at the sizes of a retrained network; at the supernet's without retraining."""
        if not self.config.retrains and self.config.evaluation.deliver == FOUND:
            return self.space
        anything = self.space.random_genotype(torch.Generator())
        return described_space(describe_network(self.config, self.prepared, anything))[0]

    def _search(self, score: Scores, **drawn: Any) -> list[Scored]:
        limits = self.choice.limits
        return search(
            self.space,
            score,
            limits=limits.by_name,
            latency_ms=None if limits.table is None else latency_of(self.space, limits.table),
            limited=self._trained() if limits.by_name else self.space,
            **drawn,
        )


def _scores(
    config: Config, space: SearchSpace, names: Sequence[str], genotypes: list[Genotype]
) -> list[Mapping[str, float]]:
    """The scores of genotypes, computed in processes of this machine if those need only a fork."""
    score = partial(measure, space, scores=names, seed=config.seed)
    measured = partial(_measured, config.runtime.threads, score)
    parts = {first: genotypes[first : first + PART] for first in range(0, len(genotypes), PART)}
    found: dict[int, list[Any]] = {}
    if is_warm() and len(parts) > 1 and (sent := registry.packed(measured)):
        with suppress(LostError):
            found = {first: scores for (first, _), scores in beside(sent, parts.items())}
    return [s for first, part in parts.items() for s in found.get(first) or measured(first, part)]


def _measured(threads: int, score: Any, first: int, genotypes: list[Genotype]) -> list[Any]:
    torch.set_num_threads(threads)
    return [score(genotype) for genotype in genotypes]


class ZeroCost(RoundStrategy[ZeroCostSettings]):
    """Search by data-free scores (Abdelfattah et al. 2021, arXiv 2101.08134), on the server alone.

    Every round scores further architectures; the result is the best of all by the combined ranking.
    No message is sent for it, no record is read, and no privacy budget is spent.

    A round's draws come from (seed, round).
    """

    def set_up(self) -> None:
        """Begin without a network."""
        self.values = {"found": []}

    def run_round(self, server_round: int, num_rounds: int) -> Metrics:
        """Score further architectures and rank all of them."""
        settings = self.settings
        pool = ScoredDraws(self.config, self.prepared, self.space, settings).ranked(
            draws=settings.draws,
            generator=make_generator(self.config.seed, "zero_cost", server_round),
            known=self.pool(),
        )
        found = [one._asdict() | {"genotype": json.loads(to_json(one.genotype))} for one in pool]
        self.values = {"found": found}
        return {"scored": float(len(pool)), **pool[0].scores, **(pool[0].further or {})}

    def pool(self) -> list[Scored]:
        """All architectures that were scored, best first."""
        return [
            Scored(**one | {"genotype": from_json(json.dumps(one["genotype"]))})
            for one in self.values["found"]
        ]

    def derive(self) -> Genotype:
        """The architecture that ranks first."""
        return self.pool()[0].genotype

    @classmethod
    def releases(cls, settings: ZeroCostSettings, private: PrivateRound) -> list[PlannedRelease]:
        """No releases."""
        return []

    @classmethod
    def check(cls, config: Config, prepared: Prepared, space: SearchSpace) -> None:
        """Refuse limits within which no network is drawn in the first round."""
        assert isinstance(config.algorithm, ZeroCostSettings)
        drawn = ScoredDraws(config, prepared, space, config.algorithm)
        drawn.check(make_generator(config.seed, "zero_cost", 1))
