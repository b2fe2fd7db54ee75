"""Candidates of a search: paths through a supernet, or several networks side by side.

Pham et al. (2018), ENAS, arXiv 1802.03268: a :class:`Candidate` is a path through a supernet and
inherits the weights that others have trained.

The networks of a :class:`Pool` share batches and messages, but no weights. The gradient is each
member's own, so that a member is trained as it would be alone.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from fednas_flwr.spaces.dp_cells import EDGES, DPCellNetwork
from fednas_flwr.spaces.space import Supernet

PREFIX = "members"


class Candidate(nn.Module):
    """A supernet restricted to one path; it shares the supernet's parameters."""

    def __init__(self, supernet: Supernet, path: Sequence[int]) -> None:
        """Restrict the supernet to the path.

        Args:
            supernet: A supernet of the space ``dp_cells`` or ``dp_cells_darts``.
            path: For every edge, the column of its op.

        Raises:
            ValueError: The supernet is of another space, or the path does not fit it.
        """
        super().__init__()
        if not isinstance(supernet.body, DPCellNetwork):
            raise ValueError("candidates are paths of search_space=dp_cells: set it")
        self.supernet, self.body = supernet, supernet.body
        columns, sizes = list(path), [len(edge.names) for edge in self.body.choices()[: len(EDGES)]]
        offered = zip(columns, map(range, sizes), strict=False)
        fit = all(type(column) is int and column in ops for column, ops in offered)
        if not fit or len(columns) != len(sizes):
            raise ValueError(f"a path must be {len(sizes)} columns of ops, got {str(columns)[:80]}")
        self.path = columns
        self.training = supernet.training

    def weights(self) -> dict[str, nn.Parameter]:
        """The weights with which the path computes, under their names in the supernet."""
        return self.supernet.path_weights(self.path)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes]."""
        return self.body(x, path=self.path)


def all_alike(supernet: Supernet) -> list[list[int]]:
    """For every op, the path with that op on all edges.

    No path computes or stores more than the largest of these, as the ops of an edge have one shape.
    """
    edges, ops = next(iter(supernet.alphas().values())).shape
    return [[op] * edges for op in range(ops)]


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
        """The number of members."""
        return len(self.members)


def name_before(name: str, indices: list[int]) -> str:
    """The name that a tensor had before only the members ``indices`` were kept.

    Args:
        name: Current name of the tensor; its first ``members.<index>`` is replaced.
        indices: The former index of each member that is left.

    Example:
        >>> name_before("members.1.stem.weight", [2, 5])
        'members.5.stem.weight'
    """
    before, _, rest = name.partition(f"{PREFIX}.")
    index, _, tensor = rest.partition(".")
    return f"{before}{PREFIX}.{indices[int(index)]}.{tensor}"
