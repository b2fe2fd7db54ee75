"""Settings of networks: the search space, and the training of the derived or given network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from fednas_flwr.settings import optimizers as opt
from fednas_flwr.settings.names import NORMS, SKIPS
from fednas_flwr.settings.parser import Between, Checked, OneOf, Text

EXCHANGES = ("models", "gradients")

Norm = Annotated[str, OneOf(NORMS)]
Width = Annotated[int, Between(1, 10**6)]
Cells = Annotated[int, Between(1, 1000, reason="no deeper network has been trained")]


@dataclass(frozen=True)
class SearchSpaceSettings(Checked):
    """Base of all; derived networks have the supernet's sizes, except for those of a CellSpace.

    Attributes:
        norm: Normalisation of the supernet: ``batch``, or ``group``, which privacy needs.
        skip: Addition to the logits of supernet and network: ``none``, or those of a ``linear``
            classifier on the input.
    """

    name: str
    norm: Norm
    skip: Annotated[str, OneOf(SKIPS)]


@dataclass(frozen=True)
class CellSpace(SearchSpaceSettings):
    """A search space of repeated cells and its supernet's sizes; ``retrain`` gives the network's.

    Attributes:
        channels: Channels of the first cells.
        num_cells: Number of cells; see the space.
    """

    channels: Width
    num_cells: Cells


@dataclass(frozen=True)
class BlockSpace(SearchSpaceSettings):
    """The MBConv space and the sizes of its supernet, which are also those of derived networks.

    Attributes:
        skeleton: Depth, widths and strides, by name; see ``spaces.mbconv.SKELETONS``.
        candidates: The ops of a block, by the name of their set; see ``CANDIDATES`` there.
        width: Width multiplier.
    """

    skeleton: str
    candidates: str
    width: Annotated[float, Between(0, 16, above=True)]


@dataclass(frozen=True)
class DPCells(SearchSpaceSettings):
    """The DP-friendly space and the sizes of its supernet, also those of derived networks.

    Attributes:
        widths: Channels of each of the three cells' nodes.
        head: Width of the head.
        activation: Activation of the head, by name; see
            ``spaces.dp_cells.ACTIVATIONS``.
    """

    widths: list[Width]
    head: Width
    activation: str


@dataclass(frozen=True)
class Retrain(Checked):
    """Federated training of the derived or given network from scratch.

    Attributes:
        exchange: The clients' answers: ``models`` after all local steps of a round (FedAvg), or
            ``gradients``, one exchange per step (FedSGD); null is ``gradients`` with privacy and
            secure sums, which share the noise of single steps only, else ``models``.
        rounds: Rounds of retraining; each ends with a checkpoint.
        evaluate_every: Rounds between evaluations of the network on the clients' validation
            records, which are then not trained on; 0 is never, and they are.
        local_epochs: A round's passes over a client's records; with ``gradients`` over those of
            the median client.
        batch_size: Records per step of a client; with privacy their expected number, unless
            ``privacy.retrain.rate`` sets the share of the records.
        channels: Channels of the first cells; null takes the supernet's size.
        num_cells: Cells of the network; null takes the supernet's number.
        norm: Normalisation of the network: ``batch``, or ``group``, which privacy needs.
        auxiliary_weight: Weight of the loss of DARTS' auxiliary head; 0 has none.
        drop_path_prob: Probability of drop-path in the last round; it rises linearly from 0.
        weights: The optimiser's constants.
    """

    exchange: Annotated[str, OneOf(EXCHANGES)] | None
    rounds: opt.Count
    evaluate_every: opt.CountOrZero
    local_epochs: opt.Steps
    batch_size: opt.Count
    channels: Width | None
    num_cells: Cells | None
    norm: Norm
    auxiliary_weight: opt.RateOrZero
    drop_path_prob: opt.ShareBelow1
    weights: opt.SGD


@dataclass(frozen=True)
class NetworkLimits(Checked):
    """Limits on the cost of a found network, at the size at which it is trained; null is none.

    Attributes:
        parameters: Most parameters.
        multiply_adds: Most multiply-adds of one example.
        latency_ms: Highest latency by ``table``, a file of ``fednas latency measure``.
        table: See ``latency_ms``.
    """

    parameters: opt.Count | None
    multiply_adds: opt.Count | None
    latency_ms: opt.Positive | None
    table: Text | None

    def conflicts(self) -> Iterable[tuple[object, str]]:
        """Exclude one of limit and table without the other."""
        yield (
            (self.latency_ms is None) != (self.table is None),
            f"limits.latency_ms={self.latency_ms} with limits.table={self.table}: a limit of "
            "latency needs a table, and a table is for that only",
        )


@dataclass(frozen=True)
class Hardware(Checked):
    """Effect of a network's cost on the loss of the alphas; see ``spaces.costs.HardwareLoss``.

    Attributes:
        table: File of ``fednas latency measure``, for targets in ms; null has the clients measure
            before the search, each group's its own.
        unit: Unit of cost: ``ms``, ``multiply_adds`` or ``parameters``.
        target: Target cost T in this unit, by which the loss is scaled; costs below T still lower
            it.
        loss: Form of the loss, a name of ``spaces.costs.LOSSES``.
        scale: Scale of an additive loss.
        exponent: Exponent of the ratio of cost to target.
    """

    table: Text | None
    unit: str
    target: opt.Positive
    loss: str
    scale: Annotated[float, Between(0, 1e6, above=True)]
    exponent: Annotated[float, Between(-10, 10)]

    def conflicts(self) -> Iterable[tuple[object, str]]:
        """Exclude a table of another unit."""
        yield (
            self.unit != "ms" and self.table is not None,
            f"unit={self.unit} with table={self.table}: a table is for ms only; set table=null",
        )
