"""Candidates of a search: one as a network of its own, or several beside each other.

Pham et al. (2018), ENAS, arXiv 1802.03268: a candidate is a path through a supernet and inherits
the weights that others have trained. :func:`train_candidates` is lines 4 to 8 of DPNAS' Alg. 1
(Cheng et al. 2022, arXiv 2110.08557).

The networks of a :class:`Pool` share batches and messages, but no weight: its gradient is each
member's (:func:`by_member`), so that a member is trained as it would be alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import TypeVar

from torch import Tensor, nn

from fednas_flwr.search.optimizer_step import MOMENTS, Gradients, Optimizer
from fednas_flwr.spaces.dp_cells import DPCellNetwork
from fednas_flwr.spaces.space import Supernet

T = TypeVar("T")

PREFIX = "members"


class Candidate(nn.Module):
    """A supernet restricted to one path; it shares the supernet's parameters."""

    def __init__(self, supernet: Supernet, path: Sequence[int]) -> None:
        """Take the path.

        Args:
            supernet: Of the space ``dp_cells`` or ``dp_cells_darts``.
            path: For every edge the column of its op.

        Raises:
            ValueError: The supernet is of another space, or the path does not fit it.
        """
        super().__init__()
        if not isinstance(supernet.body, DPCellNetwork):
            raise ValueError("candidates are paths of search_space=dp_cells: set it")
        self.supernet, self.body = supernet, supernet.body
        self.path = supernet.body.checked_path(path)
        self.training = supernet.training

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights that the path computes with, under their names in the supernet."""
        return self.supernet.path_weights(self.path)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        logits: Tensor = self.body(x, path=self.path)
        return logits


def path_states(supernet: Supernet, paths: Iterable[Sequence[int]]) -> dict[str, set[str]]:
    """Return the names of tensors that training any of these paths reads or moves, by state.

    Server and clients compute it alike from the paths: messages about them carry nothing else.
    """
    weights = {name for path in paths for name in Candidate(supernet, path).weights()}
    moments = {f"weights.{moment}.{name}" for moment in MOMENTS["weights"] for name in weights}
    return {"weights": weights, "moments": moments}


def all_alike(supernet: Supernet) -> list[list[int]]:
    """Return for every op the path with that op on all edges.

    No path computes or keeps more than one of these: the ops of an edge have one shape.
    """
    edges, ops = next(iter(supernet.alphas().values())).shape
    return [[op] * edges for op in range(ops)]


def train_candidates(
    supernet: Supernet,
    paths: Sequence[Sequence[int]],
    gradients: Gradients,
    weights: Optimizer,
    *,
    steps: int,
) -> None:
    """Train the shared weights in place on one path after the other.

    Weights beside a path neither move nor decay in its steps; momentum goes from one to the next.

    Args:
        supernet: Its weights are those of ``weights``.
        paths: The candidates.
        gradients: Exact, clipped (``exact_gradients.ClippedGradients``) or noised; they yield
            ``steps`` times for each candidate.
        weights: The step.
        steps: Of each candidate.
    """
    supernet.train()
    chosen = (candidate for path in paths for candidate in repeat(Candidate(supernet, path), steps))
    for candidate, _ in zip(chosen, gradients.steps(), strict=True):
        weights.step(gradients.weights(candidate))


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
        """Return the number of members."""
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
    index, _, tensor = rest.partition(".")
    return f"{before}{PREFIX}.{kept[int(index)]}.{tensor}"
