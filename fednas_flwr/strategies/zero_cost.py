"""The data-free search: the server ranks architectures by scores alone and asks no client."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Unpack

from torch import nn

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.randomness import make_generator
from fednas_flwr.search.settings import EvolutionSettings
from fednas_flwr.search.zero_cost import Limits, Score, Scored, search
from fednas_flwr.search_spaces.genotype import Genotype, from_json, to_json
from fednas_flwr.search_spaces.space import SearchSpace
from fednas_flwr.strategies.base import RoundStrategy, Shared


class ZeroCost(RoundStrategy):
    """Search by data-free scores (Abdelfattah et al. 2021, arXiv 2101.08134), on the server alone.

    Every round scores some more architectures; the best of all by the combined ranking is what is
    found. An evolution goes on where the round before has ended: its population is the youngest of
    all. No message is sent for it, no record is read, and no privacy budget pays.

    Args:
        network: One without tensors: no supernet is trained.
        courier: Reaches the clients; the search does not use it.
        space: Where architectures come from.
        score: Returns the scores of a genotype, see ``search.zero_cost.search``.
        draws: Architectures per round.
        shortlist: Ranks the best of a ranking anew; see ``search.zero_cost.shortlisted``.
        evolution: Sizes of population and tournament; None draws all at random.
        limits: Limits on what a network may cost.
        latency_ms: Predicts a genotype's latency, for a limit of it.
        limited: The space at the sizes of the networks that the limits are for.
        seed: The run's seed; the draws of a round come from (seed, round).
        **shared: See :class:`RoundStrategy`.
    """

    def __init__(
        self,
        network: nn.Module,
        courier: Courier,
        *,
        space: SearchSpace,
        score: Score,
        draws: int,
        shortlist: Callable[[list[Scored]], list[Scored]],
        evolution: EvolutionSettings | None,
        limits: Limits,
        latency_ms: Callable[[Genotype], float] | None,
        limited: SearchSpace,
        seed: int,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        super().__init__(network, courier, space=space, **shared)
        self.searched, self.score, self.draws = space, score, draws
        self.shortlist = shortlist
        self.evolution, self.limits, self.latency_ms = evolution, limits, latency_ms
        self.limited, self.seed = limited, seed
        self.values = {"found": []}

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Score some more architectures and rank all of them."""
        found = search(
            self.searched,
            self.score,
            draws=self.draws,
            generator=make_generator(self.seed, "zero_cost", server_round),
            evolution=self.evolution,
            limits=self.limits,
            latency_ms=self.latency_ms,
            limited=self.limited,
            known=self.pool(),
        )
        pool = self.shortlist(found)
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


def releases(server_round: int, num_rounds: int) -> list[PlannedRelease]:
    """Return that no round releases anything."""
    return []
