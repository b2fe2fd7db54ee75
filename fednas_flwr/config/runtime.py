"""Settings of where the clients run."""

from __future__ import annotations

from dataclasses import dataclass

from fednas_flwr.errors import ConfigError, unknown_choice
from fednas_flwr.search.settings import check_least, check_range

RUNTIMES = ("inline", "ray", "deployment")


@dataclass(frozen=True)
class Runtime:
    """Where the clients run, and how long the server waits for them.

    Attributes:
        name: inline, ray or deployment.
        quorum: Share of the clients that must answer every exchange.
        deadline_s: Seconds the server waits for the replies of one exchange.
        connect_s: Seconds the server waits for clients to appear.
        ray_address: Address of a Ray cluster that runs already; null starts one.
        client_cpus: CPUs of one Ray actor.
        client_gpus: GPUs of one Ray actor, may be a fraction.
        superlink: Name of the SuperLink in Flower's configuration.
    """

    name: str
    quorum: float
    deadline_s: float
    connect_s: float
    ray_address: str | None
    client_cpus: float
    client_gpus: float
    superlink: str | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.name not in RUNTIMES:
            raise unknown_choice("runtime", self.name, RUNTIMES)
        if self.name == "deployment" and self.superlink is None:
            raise ConfigError(
                "runtime.superlink must be given with runtime=deployment: the name of a SuperLink "
                "in Flower's configuration (config.toml in $FLWR_HOME or ~/.flwr)."
            )
        check_range(0 < self.quorum <= 1, "runtime.quorum", self.quorum, "above 0, at most 1")
        check_range(self.deadline_s > 0, "runtime.deadline_s", self.deadline_s, "seconds above 0")
        check_range(self.connect_s > 0, "runtime.connect_s", self.connect_s, "seconds above 0")
        check_range(
            self.client_cpus > 0, "runtime.client_cpus", self.client_cpus, "a number above 0"
        )
        check_least(self, "runtime", client_gpus=0)
