"""Settings of which client holds which records, a class per way of dividing them."""

from __future__ import annotations

from dataclasses import dataclass

from fednas_flwr.settings.optimizers import Count, Positive, ShareAbove0
from fednas_flwr.settings.parser import Checked, Text


@dataclass(frozen=True)
class Partition(Checked):
    """``sites``: one folder or file of ``dataset.root`` per client, as at real sites."""

    name: str


@dataclass(frozen=True)
class SavedPartition(Partition):
    """``saved``: a division that a run has written.

    Attributes:
        file: The partition.json.
    """

    file: Text


@dataclass(frozen=True)
class ColumnPartition(Partition):
    """``column``: one client per value of a column of the table.

    Attributes:
        column: Column whose values name the clients.
    """

    column: str | None


@dataclass(frozen=True)
class RandomPartition(Partition):
    """``iid``: equal shares at random.

    Attributes:
        seed: Seed of random divisions; not the run's seed, so that parties keep their records over
            runs.
    """

    seed: int


@dataclass(frozen=True)
class LabelGroups(RandomPartition):
    """``label_groups``: each group of classes goes to clients of its own, evenly.

    Attributes:
        groups: Groups of classes, every class once; empty is FDNAS' three.
        clients_per_group: Number of clients that share each group of classes; as even as possible
            where empty, the last groups having one more (3, 3, 4 for ten).
    """

    groups: list[list[int]]
    clients_per_group: list[Count]


@dataclass(frozen=True)
class DirichletPartition(RandomPartition):
    """``dirichlet``: label skew, as each class is divided by a draw from Dirichlet(alpha).

    Attributes:
        alpha: Concentration of the Dirichlet draws; the smaller, the more unequal.
        min_size: Fewest records of a client, below which is drawn again.
    """

    alpha: Positive
    min_size: Count


@dataclass(frozen=True)
class QuantityPartition(DirichletPartition):
    """``quantity``: unequal sizes at random, drawn from Dirichlet(alpha).

    Attributes:
        fractions: Sizes of the clients, which sum to 1; empty draws them.
    """

    fractions: list[ShareAbove0]


PARTITIONS: dict[str, type] = {
    "iid": RandomPartition,
    "dirichlet": DirichletPartition,
    "label_groups": LabelGroups,
    "quantity": QuantityPartition,
    "column": ColumnPartition,
    "sites": Partition,
    "saved": SavedPartition,
}
