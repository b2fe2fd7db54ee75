"""FedEx: FedAvg of one network whose clients draw their hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings import Config, GivenNetwork
from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings.registry import Algorithm, Rule, register


@dataclass(frozen=True)
class FedExSettings(GivenNetwork):
    """FedEx: no search; FedAvg of a given network whose clients draw their hyper-parameters.

    Attributes:
        clip_norm: Largest norm of a batch's mean gradient; null does not clip.
        loss_bound: Bound on a client's validation loss.
        theta: The distribution over configurations.
        num_configurations: Number of configurations to draw where none are given.
        configurations: Configurations of which clients draw; empty draws them from ``ranges``.
        ranges: Range of every hyper-parameter.
    """

    clip_norm: opt.ClipNorm | None
    loss_bound: opt.LossBound
    theta: opt.ThetaSettings
    num_configurations: opt.ListLength
    configurations: list[opt.Configuration]
    ranges: dict[str, opt.Range]

    def __post_init__(self) -> None:
        """Check the ranges; those that nothing is drawn from may be empty."""
        super().__post_init__()
        if self.ranges or self.needs_ranges:
            opt.check_ranges(self.ranges)

    @property
    def needs_ranges(self) -> bool:
        """Whether configurations are drawn."""
        return not self.configurations


def _check(config: Config) -> None:
    """Refuse the server's momentum, as every client draws its own."""
    if config.momentum == "server":
        raise ConfigError(
            "momentum=server with algorithm=fedex: every client steps with a momentum of its own; "
            "set momentum=reset or momentum=averaged."
        )


register(
    "algorithm",
    "fedex",
    Algorithm(
        FedExSettings,
        retraining=f"{__name__}.strategy:FedEx",
        unsupported={
            "secure_sum": "its clients are asked different things, which have no sum; choose "
            "another algorithm"
        },
        check=_check,
        unused=(
            Rule(
                "retrain.weights retrain.drop_path_prob",
                lambda c: True,
                "algorithm={c.algorithm.name}, which chooses it from configurations of its own",
            ),
            Rule(
                "algorithm.ranges.alpha_lr algorithm.ranges.alpha_weight_decay",
                lambda c: True,
                "algorithm=fedex, which trains no alphas",
            ),
        ),
    ),
)
