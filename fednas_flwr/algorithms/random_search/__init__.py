"""Random search: candidates drawn from the space, each trained on its own."""

from dataclasses import dataclass

from fednas_flwr.settings import LocalEpochs
from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings.registry import NETWORKS, Algorithm, Rule, register


@dataclass(frozen=True)
class RandomSearchSettings(LocalEpochs):
    """Random search: each round trains one random network briefly and ranks it.

    Attributes:
        trial_rounds: Rounds for which every network is trained; 0 with ``rounds=1`` takes one
            random network without training it.
        ranges: Ranges from which hyper-parameters are drawn with every network; null keeps
            ``weights``.
    """

    trial_rounds: opt.CountOrZero
    ranges: dict[str, opt.Range] | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        if self.ranges is not None:
            opt.check_ranges(self.ranges)

    @property
    def trains_models(self) -> bool:
        """True if candidates are trained."""
        return self.trial_rounds > 0


_UNUSED = (
    Rule(
        "algorithm.local_epochs algorithm.batch_size algorithm.weights algorithm.ranges",
        lambda c: not c.algorithm.trains_models,
        "algorithm.trial_rounds=0, which tries no network",
    ),
)
register(
    "algorithm",
    "random_search",
    Algorithm(
        RandomSearchSettings, f"{__name__}.strategy:RandomSearch", trains=NETWORKS, unused=_UNUSED
    ),
)
