"""DPNAS: sampled candidates with shared weights, and a controller that learns from them."""

from dataclasses import dataclass
from typing import Annotated

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings import AlgorithmSettings, Config, DPCells, NoPrivacy, names, parser
from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings.registry import NO_ALPHAS, Algorithm, Rule, register

SAMPLERS = ("controller", "random")
Candidates = Annotated[int, parser.Between(1, opt.MOST_CANDIDATES)]


@dataclass(frozen=True)
class DPNASSettings(AlgorithmSettings):
    """DPNAS: sampled candidates with shared weights, and a controller that learns from them.

    Attributes:
        sampler: The sampler of candidates: ``controller`` or ``random``.
        trained_candidates: Candidates that are trained per round, each for ``local_steps`` steps.
        rewarded_candidates: Candidates that are measured on validation records per round.
        final_candidates: Number of candidates that are measured at the end; the best of them is the
            result.
        warm_up_rounds: Number of first rounds in which nothing is measured and the sampler does not
            learn.
        local_steps: Steps of every trained candidate.
        batch_size: Records per step of a client.
        weights: The weights' optimiser.
        controller: Constants of the sampler ``controller``.
        dp_aware: DP-SGD's clipping and noise as a regulariser, with no claim of privacy; null
            trains plainly. With privacy the noise of ``privacy.weights`` takes its place.
    """

    sampler: Annotated[str, parser.OneOf(SAMPLERS)]
    trained_candidates: Candidates
    rewarded_candidates: Candidates
    final_candidates: Candidates
    warm_up_rounds: opt.CountOrZero
    local_steps: opt.Steps
    batch_size: opt.Count
    weights: opt.SGD
    dp_aware: opt.DPAware | None
    controller: opt.ControllerSettings

    def check(self, config: Config) -> None:
        """Refuse search spaces other than that of DPNAS, and batch norm."""
        space = config.search_space
        if config.searches and (not isinstance(space, DPCells) or space.norm != "group"):
            raise ConfigError(
                f"algorithm={self.name} with search_space={space.name} norm={space.norm}: "
                "candidates share weights, so that statistics of batches would be other "
                "candidates'; set search_space=dp_cells search_space.norm=group retrain=dp_cells."
            )


_UNUSED = (
    Rule(
        "training.precision",
        lambda c: c.algorithm.dp_aware is not None and not c.retrains,
        "algorithm.dp_aware, which clips gradients of single records, in float32",
        "remove it, or set algorithm.dp_aware=null",
    ),
    Rule(
        "algorithm.rewarded_candidates",
        lambda c: c.rounds <= c.algorithm.warm_up_rounds,
        "rounds={c.rounds}, all of which warm up (algorithm.warm_up_rounds)",
        "raise rounds, or remove it",
    ),
    Rule(
        "algorithm.dp_aware",
        lambda c: not isinstance(c.privacy, NoPrivacy),
        "privacy=dp, whose noise takes its place",
    ),
    NO_ALPHAS,
)
register(
    "algorithm",
    "dpnas",
    Algorithm(
        DPNASSettings,
        f"{__name__}.strategy:DPNAS",
        units=(names.RECORD, names.PERSON),
        asks_rewards=True,
        unused=_UNUSED,
        needs={"algorithm.sampler=controller": "algorithm.controller"},
    ),
)
