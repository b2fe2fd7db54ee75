"""Settings of where the clients run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fednas_flwr.errors import ConfigError
from fednas_flwr.search.settings import NonNegative, Positive, ShareAbove0
from fednas_flwr.typed import Between, Checked, OneOf, Text

RUNTIMES = ("inline", "ray", "deployment")
LEAST_PART = Between(1e-4, reason="Ray counts no smaller part of a processor")


@dataclass(frozen=True)
class Runtime(Checked):
    """Place of the clients, and times that the server waits for them.

    Attributes:
        name: inline, ray or deployment.
        quorum: Share of the clients that must answer every exchange.
        deadline_s: Seconds the server waits for the replies of one exchange.
        connect_s: Seconds the server waits for clients to appear.
        approval_s: Seconds the server waits for people at private sites to approve the run.
        most_records: Largest multiple of the median client's records that one of three or more
            clients may declare; one that declares more is left out.
        largest_share: Share of an average of three or more clients that one may have.
        ray_address: Address of a Ray cluster that runs already; null starts one.
        client_cpus: CPUs of one Ray actor.
        client_gpus: GPUs of one Ray actor, may be a fraction.
        superlink: Name of the SuperLink in Flower's configuration.
    """

    name: Annotated[str, OneOf(RUNTIMES)]
    quorum: ShareAbove0
    deadline_s: Positive
    connect_s: Positive
    approval_s: NonNegative
    most_records: Annotated[float, Between(1)]
    largest_share: ShareAbove0
    ray_address: Text | None
    client_cpus: Annotated[float, LEAST_PART]
    client_gpus: NonNegative
    superlink: Text | None

    def __post_init__(self) -> None:
        """Check the ranges, and that a deployment has its SuperLink."""
        super().__post_init__()
        if self.client_gpus:
            LEAST_PART.check("client_gpus", self.client_gpus, ", or 0")
        if self.name == "deployment" and self.superlink is None:
            raise ConfigError(
                "superlink must be given with runtime=deployment: the name of a SuperLink in "
                "Flower's configuration (config.toml in $FLWR_HOME or ~/.flwr)."
            )
