"""Settings of networks: the search space, and the training of the derived or given network."""

from __future__ import annotations

from dataclasses import dataclass

from fednas_flwr.errors import unknown_choice
from fednas_flwr.names import NORMS
from fednas_flwr.search.settings import SGD, check_least, check_range


@dataclass(frozen=True)
class SearchSpaceSettings:
    """Base of all; derived networks have the supernet's sizes, except for those of a CellSpace."""

    name: str
    norm: str

    def __post_init__(self) -> None:
        """Check the norm."""
        if self.norm not in NORMS:
            raise unknown_choice("search_space.norm", self.norm, NORMS)


@dataclass(frozen=True)
class CellSpace(SearchSpaceSettings):
    """A search space of repeated cells and its supernet's sizes; ``retrain`` gives the network's.

    Attributes:
        channels: Of the first cells.
        num_cells: See the space.
    """

    channels: int
    num_cells: int

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_least(self, "search_space", channels=1, num_cells=1)
        super().__post_init__()


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
    width: float

    def __post_init__(self) -> None:
        """Check the ranges; ``builders`` knows the names."""
        check_range(0 < self.width <= 16, "search_space.width", self.width, "above 0, to 16")
        super().__post_init__()


@dataclass(frozen=True)
class DPCells(SearchSpaceSettings):
    """The DP-friendly space and the sizes of its supernet, also those of derived networks.

    Attributes:
        widths: Channels of each of the three cells' nodes.
        head: Width of the head.
        activation: Of the head, by name; see ``search_spaces.dp_cells_network.ACTIVATIONS``.
    """

    widths: list[int]
    head: int
    activation: str


@dataclass(frozen=True)
class Retrain:
    """FedAvg training of the derived or given network from scratch.

    ``channels`` and ``num_cells`` are null where the derived network has the supernet's size.
    """

    rounds: int
    local_epochs: int
    batch_size: int
    channels: int | None
    num_cells: int | None
    norm: str
    auxiliary_weight: float
    drop_path_prob: float
    weights: SGD

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_least(self, "retrain", rounds=1, local_epochs=1, batch_size=1)
        for key in ("channels", "num_cells"):
            value = getattr(self, key)
            check_range(value is None or value >= 1, f"retrain.{key}", value, "1 or more, or null")
        check_range(
            0 <= self.drop_path_prob < 1,
            "retrain.drop_path_prob",
            self.drop_path_prob,
            "0 to below 1",
        )
        check_least(self, "retrain", auxiliary_weight=0)
        if self.norm not in NORMS:
            raise unknown_choice("retrain.norm", self.norm, NORMS)
