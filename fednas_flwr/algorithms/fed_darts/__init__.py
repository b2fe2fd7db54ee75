"""Federated DARTS and FedNAS: clients search locally, the server averages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings import AlgorithmSettings, registry
from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings.names import UNITS


@dataclass(frozen=True)
class FedDARTSSettings(AlgorithmSettings):
    """Federated DARTS and FedNAS: local epochs, then averaging.

    Attributes:
        rule: Rule of the alphas' gradient: DARTS' ``first_order`` or ``second_order``, or
            ``mixed_level`` of FedNAS, which also sees the training loss.
        local_epochs: Local epochs of every client per round.
        batch_size: Records per step of a client.
        validation_weight: Weight of the validation loss, with ``mixed_level`` only.
        proximal: FedProx' mu, which holds the weights near those that the server has sent.
        weights: The weights' optimiser.
        alphas: The alphas' optimiser.
        beta_decay: Weight of beta-DARTS' regulariser in the last round, to which it rises linearly;
            0 is the papers' form.
        temperatures: Temperatures of GDAS, whose steps compute one drawn op per edge; null mixes
            all ops.
    """

    rule: opt.Rule
    local_epochs: opt.Steps
    batch_size: opt.Count
    validation_weight: opt.RateOrZero
    proximal: opt.RateOrZero
    weights: opt.SGD
    alphas: opt.Adam
    beta_decay: opt.RateOrZero
    temperatures: opt.Temperatures | None

    def __post_init__(self) -> None:
        """Check the ranges, and that the rule fits."""
        super().__post_init__()
        if self.temperatures is not None and self.rule == "second_order":
            raise ConfigError(
                "rule=second_order with temperatures: single paths have no second order; set "
                "rule=first_order or temperatures=null."
            )


RULES = {
    "algorithm.rule!=first_order privacy.unit!=client": "it mixes splits; set "
    "algorithm.rule=first_order",
}
_entry = partial(
    registry.Algorithm,
    FedDARTSSettings,
    f"{__name__}.strategy:FedDARTS",
    clashes={
        **RULES,
        "algorithm.temperatures!=null search_space!=nasbench201": "single paths are drawn of the "
        "NAS-Bench-201 cell only; set algorithm.temperatures=null or search_space=nasbench201",
        "algorithm.temperatures!=null privacy.unit!=client": "single paths have no private "
        "gradient yet; set algorithm.temperatures=null",
    },
)
registry.register("algorithm", "fed_darts", _entry(units=UNITS))
registry.register("algorithm", "fedprox_darts", _entry(units=UNITS))
registry.register("algorithm", "fednas", _entry())
