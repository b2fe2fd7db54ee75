"""Federated DARTS and FedNAS: clients search locally, the server averages."""

from dataclasses import dataclass
from functools import partial

from fednas_flwr.settings import LocalEpochs, names, registry
from fednas_flwr.settings import optimizers as opt


@dataclass(frozen=True)
class FedDARTSSettings(LocalEpochs):
    """Federated DARTS and FedNAS: local epochs, then averaging.

    Attributes:
        rule: Rule of the alphas' gradient: DARTS' ``first_order`` or ``second_order``, or
            ``mixed_level`` of FedNAS, which also sees the training loss.
        proximal: FedProx' mu, which keeps the weights close to those that the server has sent.
        alphas: The alphas' optimiser.
        beta_decay: Weight of beta-DARTS' regulariser in the last round, reached in a linear rise.
            With 0 the algorithm is that of the papers.
    """

    rule: opt.Rule
    proximal: opt.RateOrZero
    alphas: opt.Adam
    beta_decay: opt.RateOrZero


RULES = {
    "algorithm.rule!=first_order privacy.unit!=client": "it mixes splits; set "
    "algorithm.rule=first_order"
}
_entry = partial(
    registry.Algorithm, FedDARTSSettings, f"{__name__}.strategy:FedDARTS", clashes=RULES
)
registry.register("algorithm", "fed_darts", _entry(units=names.UNITS))
registry.register("algorithm", "fedprox_darts", _entry(units=names.UNITS))
registry.register("algorithm", "fednas", _entry())
