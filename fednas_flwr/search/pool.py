"""Several candidate networks as one module, so that one message holds and trains them all.

Candidates share batches and messages, but no weight: a :class:`Pool`'s gradient is each member's
own (:func:`by_member`), so that a member is trained as it would be alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import nn

T = TypeVar("T")

PREFIX = "members"


class Pool(nn.Module):
    """Networks side by side.

    Attributes:
        members: The networks; their tensors are named ``members.<index>.<own name>``.
    """

    def __init__(self, members: Iterable[nn.Module]) -> None:
        """Take the members."""
        super().__init__()
        self.members = nn.ModuleList(members)

    def __len__(self) -> int:
        """Return how many members there are."""
        return len(self.members)


def by_member(pool: Pool, gradient: Callable[[nn.Module], Mapping[str, T]]) -> dict[str, T]:
    """Return the gradients of all members, under their names in the pool.

    Args:
        pool: The members.
        gradient: Returns that of one member, by the names of its own parameters.
    """
    return {
        f"{PREFIX}.{index}.{name}": value
        for index, member in enumerate(pool.members)
        for name, value in gradient(member).items()
    }


def name_before(name: str, kept: list[int]) -> str:
    """Return the name that a tensor had before only the members ``kept`` were left.

    Args:
        name: Of the tensor now; its first ``members.<index>`` is replaced.
        kept: For each member that is left its index before.

    Example:
        >>> name_before("members.1.stem.weight", [2, 5])
        'members.5.stem.weight'
    """
    before, _, rest = name.partition(f"{PREFIX}.")
    index, _, own = rest.partition(".")
    return f"{before}{PREFIX}.{kept[int(index)]}.{own}"
