"""FNAS, DP-FNAS and vanilla NAS: clients send gradients of weights and of alphas."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fednas_flwr.settings import AlgorithmSettings, names, parser, registry
from fednas_flwr.settings import optimizers as opt


@dataclass(frozen=True)
class FNASSettings(AlgorithmSettings):
    """Vanilla NAS, FNAS and DP-FNAS: one or two exchanges of gradients per iteration.

    Attributes:
        order: Order of the alphas' gradient (DP-FNAS, Eq. 5).
        fused: If true, one exchange brings the gradients of weights and alphas, at the same
            weights.
        local_steps: Steps per exchange ("periodic updates").
        batch_size: Records per step of a client; null takes all of them.
        evaluate_every: Rounds between evaluations of the supernet on validation data; 0 evaluates
            it after the last round only.
        weights: The weights' optimiser.
        alphas: The alphas' optimiser.
        beta_decay: Weight of beta-DARTS' regulariser in the last round, reached in a linear rise.
        warm_up_rounds: Number of first rounds in which the alphas stay fixed. Ops that have learnt
            nothing yet lose to poolings and skips, which need not learn. A dry run assumes that all
            rounds are like the first.
    """

    order: Annotated[int, parser.Between(1, 2)]
    fused: bool
    local_steps: opt.Steps
    batch_size: opt.Count | None
    evaluate_every: opt.CountOrZero
    weights: opt.SGD
    alphas: opt.Adam
    beta_decay: opt.RateOrZero
    warm_up_rounds: opt.CountOrZero

    trains_models = False  # clients reply with gradients


_entry = partial(
    registry.Algorithm,
    FNASSettings,
    f"{__name__}.strategy:FNAS",
    clashes={
        "algorithm.order=2 algorithm.local_steps!=1": "the second-order correction is for one "
        "step; set one of the two to 1",
        "algorithm.order=2 algorithm.fused=true": "the second order needs the weights after the "
        "step; set algorithm.order=1 or algorithm.fused=false",
        "aggregate!=mean stages=search": "the server adds up sums of gradients over batches of "
        "different sizes; set aggregate=mean",
        "algorithm=vanilla_nas clients!=1": "it has one party; set clients=1 or algorithm=fnas",
        "algorithm=dp_fnas privacy=none": "set privacy=dp, or use fnas",
        "algorithm.order=2 privacy=dp": "the second order mixes splits and is no sum over records; "
        "set algorithm.order=1",
    },
)
registry.register("algorithm", "vanilla_nas", _entry())
registry.register("algorithm", "fnas", _entry())
registry.register("algorithm", "dp_fnas", _entry(units=(names.RECORD, names.PERSON)))
