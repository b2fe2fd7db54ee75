"""FedEx: FedAvg of one network whose clients draw their hyper-parameters."""

from dataclasses import dataclass

from fednas_flwr.settings import GivenNetwork, registry
from fednas_flwr.settings import optimizers as opt


@dataclass(frozen=True)
class FedExSettings(opt.ConfigurationChoice, GivenNetwork):
    """FedEx: no search; FedAvg of a given network whose clients draw their hyper-parameters.

    Attributes:
        clip_norm: Largest norm of a batch's mean gradient; null does not clip.
        loss_bound: Bound on a client's validation loss.
    """

    clip_norm: opt.ClipNorm | None
    loss_bound: opt.LossBound


registry.register(
    "algorithm",
    "fedex",
    registry.Algorithm(
        FedExSettings,
        retraining=f"{__name__}.strategy:FedEx",
        clashes={
            "secure_sum!=null algorithm=fedex": "its clients are asked different things, which "
            "have no sum; choose another algorithm"
        },
        unused=(
            registry.Rule(
                "retrain.weights algorithm.ranges.alpha_lr algorithm.ranges.alpha_weight_decay",
                lambda c: True,
                "algorithm=fedex, which chooses what weights are trained with, and has no alphas",
            ),
        ),
    ),
)
