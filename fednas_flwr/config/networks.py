"""Settings of networks: the search space, and the training of the derived or given network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fednas_flwr.names import NORMS, SKIPS
from fednas_flwr.search.settings import SGD, Count, CountOrZero, RateOrZero, ShareBelow1, Steps
from fednas_flwr.typed import Between, Checked, OneOf

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
        skeleton: Depth, widths and strides, by name; see ``search_spaces.mbconv_plan.SKELETONS``.
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
            ``search_spaces.dp_cells_network.ACTIVATIONS``.
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
    rounds: Count
    evaluate_every: CountOrZero
    local_epochs: Steps
    batch_size: Count
    channels: Width | None
    num_cells: Cells | None
    norm: Norm
    auxiliary_weight: RateOrZero
    drop_path_prob: ShareBelow1
    weights: SGD
