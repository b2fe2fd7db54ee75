"""Settings of where the clients run, a class per place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.settings.optimizers import NonNegative, Positive, ShareAbove0
from fednas_flwr.settings.parser import Between, Checked, OneOf, Text, seconds

DEVICES = ("auto", "cpu", "cuda")
WIRES = ("float32", "float16", "int8")
MOST_THREADS = 1024
LEAST_PART = Between(1e-4, reason="Ray counts no smaller part of a processor")


@dataclass(frozen=True)
class Runtime(Checked):
    """``inline``: all clients in this process, one after the other.

    Attributes:
        device: Device for training; ``auto`` takes CUDA if there is a GPU.
        threads: torch's threads per client, the same in every runtime.
        wire: Number format of tensors in messages, both ways (:mod:`fednas_flwr.protocol.wire`).
        time_limit: Time, as 45s, 30min, 2h or 1h30min, after which no further round is begun that
            would not end in time; the network is then exported as trained so far, or a search is
            left at its checkpoint, and ``resume`` goes on. Baselines come after it, and need a run
            that it has not cut short. Null is none.
        quorum: Share of the clients that must answer every exchange.
        deadline_s: Seconds the server waits for the replies of one exchange.
        approval_s: Seconds the server waits for people at private sites to approve the run.
        most_records: Largest multiple of the median client's records that one of three or more
            clients may declare; one that declares more is left out.
        largest_share: Share of an average of three or more clients that one may have; 1 is no
            limit.
    """

    name: str
    device: Annotated[str, OneOf(DEVICES)]
    threads: Annotated[int, Between(1, MOST_THREADS, reason="no machine has more cores")]
    wire: Annotated[str, OneOf(WIRES)]
    time_limit: Text | None
    quorum: ShareAbove0
    deadline_s: Positive
    approval_s: NonNegative
    most_records: Annotated[float, Between(1)]
    largest_share: ShareAbove0

    def __post_init__(self) -> None:
        """Check the ranges, the device's name and the time."""
        if self.device.startswith("cuda:"):
            number = self.device.removeprefix("cuda:")
            raise ConfigError(
                f"runtime.device={show(self.device)} is unknown: set runtime.device=cuda, and "
                f"choose the GPU by the environment variable CUDA_VISIBLE_DEVICES={show(number)}."
            )
        super().__post_init__()
        if self.time_limit is not None:
            seconds("time_limit", self.time_limit)


@dataclass(frozen=True)
class RayRuntime(Runtime):
    """``ray``: Flower's simulation, clients in parallel processes.

    Attributes:
        ray_address: ``host:port`` of a Ray cluster that runs already; null starts one.
        client_cpus: CPUs of one Ray actor; as many run at a time as there are CPUs for.
        client_gpus: GPUs of one Ray actor, may be a fraction.
    """

    ray_address: Text | None
    client_cpus: Annotated[float, LEAST_PART]
    client_gpus: NonNegative

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        if self.client_gpus:
            LEAST_PART.check("client_gpus", self.client_gpus, ", or 0")


@dataclass(frozen=True)
class Deployment(Runtime):
    """``deployment``: real SuperNodes, by ``flwr run``.

    Attributes:
        connect_s: Seconds the server waits for clients to appear.
        superlink: Name of the SuperLink in Flower's configuration.
    """

    connect_s: Positive
    superlink: Text | None

    def __post_init__(self) -> None:
        """Check the ranges, and that there is a SuperLink."""
        super().__post_init__()
        if self.superlink is None:
            raise ConfigError(
                "superlink must be given with runtime=deployment: the name of a SuperLink in "
                "Flower's configuration (config.toml in $FLWR_HOME or ~/.flwr)."
            )


RUNTIMES: dict[str, type] = {"inline": Runtime, "ray": RayRuntime, "deployment": Deployment}
