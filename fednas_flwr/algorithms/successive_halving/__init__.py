"""Successive halving: a pool of networks is trained side by side and halved."""

import math
from dataclasses import dataclass, replace
from typing import Annotated

from fednas_flwr.algorithms.zero_cost import PoolSettings, check_scores
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings import AlgorithmSettings, Config, LocalEpochs, names, parser
from fednas_flwr.settings.registry import NETWORKS, NO_ALPHAS, Algorithm, Rule, register

REWARDED = ("local", "averaged")  # the rewarded models: each client's own, or their average


@dataclass(frozen=True)
class SuccessiveHalvingSettings(LocalEpochs):
    """Successive halving: a pool, trained in federated rounds and halved by validation accuracy.

    Attributes:
        pool: Pool of networks that the search begins with.
        eta: A rung keeps one of this many networks.
        rewarded: Reward by which networks are ranked: the validation accuracy of the clients'
            average (``averaged``), or the speed at which each client's own copy trains (``local``),
            in one exchange per rung. The latter makes fewer local epochs if they would have over
            150 steps at the median client, but at least one.
    """

    pool: PoolSettings
    eta: Annotated[int, parser.Between(2)]
    rewarded: Annotated[str, parser.OneOf(REWARDED)]

    @property
    def trains_models(self) -> bool:
        """True unless each client trains copies of its own for the ranking."""
        return self.rewarded == "averaged"

    def rehearsed(self, space: str) -> tuple[AlgorithmSettings, float]:
        """A search with a pool of the same size, of the first networks drawn; the factor is 1."""
        keep = self.pool.size(space)
        pool = replace(self.pool, draws=keep, keep=keep, by=[], shortlist=None)
        return replace(self, pool=pool), 1.0

    def check(self, config: Config) -> None:
        """Refuse scores that do not exist, and impossible shortlists or local rankings."""
        pool, key = self.pool, "algorithm.pool.shortlist"
        keep = pool.size(config.search_space.name)
        scores = pool.chosen_scores(config.search_space.name)
        check_scores("algorithm.pool.by", scores, key, pool.shortlist)
        if (shortlist := pool.shortlist) is not None:
            expected = f"{keep}, the pool's size, to draws={pool.draws}"
            parser.check_range(shortlist.keep >= keep, f"{key}.keep", shortlist.keep, expected)
        if self.rewarded == "averaged":
            return
        rungs = num_rungs(keep, self.eta)
        if config.rounds > rungs:
            raise ConfigError(
                f"rounds={config.rounds} with algorithm.rewarded=local: at most {rungs} rounds "
                f"have something to choose with algorithm.pool.keep={keep} and "
                f"algorithm.eta={self.eta}; set rounds={rungs} or fewer."
            )


def num_rungs(keep: int, eta: int) -> int:
    """Number of choices of one in ``eta`` that reduce ``keep`` networks to a single one."""
    return math.ceil(math.log(keep, eta) - 1e-9)


register(
    "algorithm",
    "successive_halving",
    Algorithm(
        SuccessiveHalvingSettings,
        f"{__name__}.strategy:SuccessiveHalving",
        units=(names.RECORD, names.PERSON),
        trains=NETWORKS,
        asks_rewards=True,
        clashes={
            "algorithm.rewarded=local privacy=dp": "training losses are no planned release; set "
            "algorithm.rewarded=averaged, or take a search that reads no record, as "
            "experiment=search/recommended_private does"
        },
        unused=(
            Rule(
                "runtime.wire",
                lambda c: not (c.algorithm.trains_models or c.retrains),
                "algorithm.rewarded=local and stages={c.stages}: no trained model is sent",
            ),
            NO_ALPHAS,
        ),
    ),
)
