"""FedAvg and FedProx: training of a given network, without a search."""

from dataclasses import dataclass

from fednas_flwr.settings import GivenNetwork, incompatible, names, registry
from fednas_flwr.settings import optimizers as opt


@dataclass(frozen=True)
class FedAvgSettings(GivenNetwork):
    """No search: FedAvg or FedProx trains a network that is given by name.

    Attributes:
        proximal: FedProx' mu, which keeps the weights close to those that the server has sent.
    """

    proximal: opt.RateOrZero


_ENTRY = registry.Algorithm(
    FedAvgSettings,
    units=names.UNITS,
    unused=(
        registry.Rule(
            "algorithm.proximal",
            incompatible.retrains_by_gradients,
            "retrain.exchange={c.retrain.exchange}, in which clients take no steps",
        ),
    ),
)
registry.register("algorithm", "fedavg", _ENTRY)
registry.register("algorithm", "fedprox", _ENTRY)
