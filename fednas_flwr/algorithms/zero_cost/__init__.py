"""Data-free search: the server ranks architectures by scores and asks no client."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from fednas_flwr.base.errors import check_choice
from fednas_flwr.settings import AlgorithmSettings, Config, NetworkLimits, registry
from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings.names import UNITS
from fednas_flwr.settings.parser import Between, Checked, Length, Names, check_range

REHEARSED_DRAWS = 4
SCORED, UNSCORED = 8, 16  # networks of a pool that scores choose, or that none does


def check_shortlist(shortlist: opt.ShortlistSettings | None, draws: int, *, least: int = 2) -> None:
    """Raise ConfigError for a shortlist of more networks than are drawn, or of too few."""
    if shortlist is not None:
        keep, expected = shortlist.keep, f"{least} to draws={draws}"
        check_range(least <= keep <= draws, "shortlist.keep", keep, expected)


@dataclass(frozen=True)
class ZeroCostSettings(AlgorithmSettings):
    """Data-free search on the server alone.

    Attributes:
        scores: Names from ``data_free_scores.SCORES``; null takes those that rank networks of the
            search space well (``data_free_scores.trusted_scores``), or synflow if none does.
        draws: Architectures that are drawn per round.
        shortlist: Second ranking, of the best architectures by other scores; null ranks all by the
            same scores.
        limits: Limits on the cost of the network that is retrained; in a run without retraining, of
            a network of the supernet's size.
    """

    scores: Annotated[Names, Length(Between(1))] | None
    draws: opt.ListLength
    shortlist: opt.ShortlistSettings | None
    limits: NetworkLimits

    trains_models = False  # nothing is asked of clients

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        check_shortlist(self.shortlist, self.draws)

    def chosen_scores(self, space: str) -> Sequence[str]:
        """The scores that rank networks of a space, by its name.

        A score that ranks the networks of one space well may mislead in another.
        """
        from fednas_flwr.search.data_free_scores import SYNFLOW, trusted_scores  # brings torch

        return self.scores or trusted_scores(space) or SYNFLOW

    def rehearsed(self, space: str) -> tuple[AlgorithmSettings, float]:
        """A search that scores only a few networks, and how much longer the full one takes."""
        if self.draws <= REHEARSED_DRAWS:
            return self, 1.0
        return replace(self, draws=REHEARSED_DRAWS, shortlist=None), self.draws / REHEARSED_DRAWS

    def check(self, config: Config) -> None:
        """Refuse scores that do not exist."""
        scores = self.chosen_scores(config.search_space.name)
        check_scores("algorithm.scores", scores, "algorithm.shortlist", self.shortlist)


@dataclass(frozen=True)
class PoolSettings(Checked):
    """The networks that a search begins with; no record is read to choose them.

    Attributes:
        draws: Architectures that are drawn.
        keep: Number of the best drawn networks that are trained; null takes 8, or 16 if no score
            ranks them.
        by: Names from ``data_free_scores.SCORES`` that decide which are best; an empty list takes
            the first networks drawn; null takes the scores that rank networks of the search space
            well, or an empty list if none does.
        shortlist: Second ranking, of the best networks by other scores; null ranks all by the same
            scores.
        limits: Limits on the cost of the network that is retrained; in a run without retraining, of
            a network of the supernet's size.
        front: If true, the pool has the best network of each range of costs: latency if the limits
            have a table, else multiply-adds. From each fifth of them, the network with the best
            reward is trained and exported alongside the found one.
    """

    draws: opt.Count
    keep: Annotated[int, Between(2, opt.MOST_CANDIDATES)] | None
    by: Names | None
    shortlist: opt.ShortlistSettings | None
    limits: NetworkLimits
    front: bool

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        keep = self.keep or 2
        if self.keep is None:
            check_range(keep <= self.draws, "draws", self.draws, f"{keep} or more")
        check_range(keep <= self.draws, "keep", keep, f"2 to draws={self.draws}")
        check_shortlist(self.shortlist, self.draws, least=keep)

    def chosen_scores(self, space: str) -> Sequence[str]:
        """The scores that choose the pool from a space, by its name; if empty, the first drawn.

        A score that ranks the networks of one space well may mislead in another.
        """
        from fednas_flwr.search.data_free_scores import trusted_scores  # brings torch

        return trusted_scores(space) if self.by is None else self.by

    def size(self, space: str) -> int:
        """Number of networks that successive halving begins with in a space."""
        return self.keep or min(SCORED if self.chosen_scores(space) else UNSCORED, self.draws)


def check_scores(
    key: str, names: Iterable[str], shortlist_key: str, shortlist: opt.ShortlistSettings | None
) -> None:
    """Refuse scores that do not exist."""
    from fednas_flwr.search.data_free_scores import SCORES  # brings torch

    named = [(key, name) for name in names]
    if shortlist is not None:
        named += [(f"{shortlist_key}.scores", name) for name in shortlist.scores]
    for setting, name in named:
        check_choice(setting, name, SCORES)


registry.register(
    "algorithm",
    "zero_cost",
    registry.Algorithm(ZeroCostSettings, f"{__name__}.strategy:ZeroCost", units=UNITS, trains=None),
)
