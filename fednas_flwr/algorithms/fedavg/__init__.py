"""FedAvg and FedProx: no search, a network that is given is trained."""

from dataclasses import dataclass

from fednas_flwr.settings import GivenNetwork
from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings.incompatible import retrains_by_gradients
from fednas_flwr.settings.names import UNITS
from fednas_flwr.settings.registry import Algorithm, Rule, register


@dataclass(frozen=True)
class FedAvgSettings(GivenNetwork):
    """No search: FedAvg or FedProx trains a network that is given by name.

    Attributes:
        proximal: FedProx' mu, which holds the weights near those that the server has sent.
    """

    proximal: opt.RateOrZero


_ENTRY = Algorithm(
    FedAvgSettings,
    units=UNITS,
    unused=(
        Rule(
            "algorithm.proximal",
            retrains_by_gradients,
            "retrain.exchange={c.retrain.exchange}, in which clients take no steps",
        ),
    ),
)
register("algorithm", "fedavg", _ENTRY)
register("algorithm", "fedprox", _ENTRY)
