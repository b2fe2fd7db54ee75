"""Candidates of a search: paths through a supernet, or several networks beside each other.

Pham et al. (2018), ENAS, arXiv 1802.03268: a :class:`Candidate` is a path through a supernet and
inherits the weights that others have trained. A :class:`GumbelPath`, drawn anew for every gradient,
takes the place of a supernet in the steps of GDAS (Dong and Yang 2019, arXiv 1910.04465): one op of
every edge is computed, and the alphas get a gradient through the softmax that it was drawn by.

The networks of a :class:`Pool` share batches and messages, but no weight: its gradient is each
member's, so that a member is trained as it would be alone.

Tensor suffixes: B batch, E edges, O ops.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fednas_flwr.spaces.dp_cells import EDGES, DPCellNetwork
from fednas_flwr.spaces.nasbench201 import NASBench201Network, NASBench201Space
from fednas_flwr.spaces.space import CELL, Supernet

PREFIX = "members"
# whose cells are those of networks of any size
CELL_SPACE = NASBench201Space(input_shape=(1, 1, 1), num_classes=1)
TRIES = 100  # of uniform draws one in eight is refused


class Candidate(nn.Module):
    """A supernet restricted to one path; it shares the supernet's parameters."""

    def __init__(self, supernet: Supernet, path: Sequence[int]) -> None:
        """Take the path.

        Args:
            supernet: A supernet of the space ``dp_cells`` or ``dp_cells_darts``.
            path: For every edge the column of its op.

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
        """The weights that the path computes with, under their names in the supernet."""
        return self.supernet.path_weights(self.path)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes]."""
        return self.body(x, path=self.path)


def all_alike(supernet: Supernet) -> list[list[int]]:
    """For every op the path with that op on all edges.

    No path computes or keeps more than one of these: the ops of an edge have one shape.
    """
    edges, ops = next(iter(supernet.alphas().values())).shape
    return [[op] * edges for op in range(ops)]


class GumbelPath(nn.Module):
    """A supernet restricted to one drawn op per edge; it shares the supernet's parameters.

    With Gumbel noise g the op of edge e is ``k = argmax_o (alpha_eo + g_eo)``, which has the
    probability ``softmax(alpha_e)_k``. In the forward pass its gate h_e is 1, in the backward pass
    p_ek with ``p_e = softmax((alpha_e + g_e) / T)``, so that ``dL/dalpha_eo = dL/dh_e p_ek
    (delta_ko - p_eo) / T`` (section 3.2). Ops that are not drawn are not computed: nothing flows
    through their gates. The authors' code adds those to the feature map, where they are 0, and so
    has a further term. The noise is drawn once: every forward is of the same path.

    Deviation: noise by which no op with weights is on a way from the cell's input to its output is
    drawn again, as often as ``TRIES``: a step on such a path would move nothing.

    Attributes:
        columns: For every edge the column of the drawn op.
    """

    def __init__(
        self, supernet: Supernet, *, temperature: float, generator: torch.Generator
    ) -> None:
        """Draw the path.

        Args:
            supernet: A supernet of the space ``nasbench201``.
            temperature: T, above 0.
            generator: On the CPU.

        Raises:
            ValueError: The supernet is of another space.
        """
        super().__init__()
        if not isinstance(supernet.body, NASBench201Network):
            raise ValueError("single paths are drawn in search_space=nasbench201 only: set it")
        self.supernet, self.body, self.training = supernet, supernet.body, supernet.training
        self.temperature = temperature
        alphas_EO = supernet.alphas()[CELL].detach()
        for _ in range(TRIES):
            exponential_EO = torch.empty(alphas_EO.shape).exponential_(generator=generator)
            self._noise_EO = -exponential_EO.log().to(alphas_EO)
            self.columns: list[int] = (alphas_EO + self._noise_EO).argmax(dim=-1).tolist()
            if not CELL_SPACE.is_degenerate(CELL_SPACE.genotype(self.columns)):
                break

    def alphas(self) -> dict[str, nn.Parameter]:
        """The supernet's alphas."""
        return self.supernet.alphas()

    def weights(self) -> dict[str, nn.Parameter]:
        """The weights that the path computes with, under their names in the supernet."""
        return self.supernet.path_weights(self.columns)

    def gates(self) -> Tensor:
        """The gates [E] of the drawn ops, all 1, differentiable in the alphas."""
        p_EO = ((self.alphas()[CELL] + self._noise_EO) / self.temperature).softmax(dim=-1)
        p_E = p_EO.gather(-1, torch.tensor(self.columns, device=p_EO.device)[:, None])[:, 0]
        return 1 + p_E - p_E.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes]."""
        return self.body.path(x, self.columns, self.gates())


Relaxed = Supernet | GumbelPath  # what has alphas with a gradient


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
    """The name that a tensor had before only the members ``indices`` were left.

    Args:
        name: Name of the tensor now; its first ``members.<index>`` is replaced.
        indices: For each member that is left its index before.

    Example:
        >>> name_before("members.1.stem.weight", [2, 5])
        'members.5.stem.weight'
    """
    before, _, rest = name.partition(f"{PREFIX}.")
    index, _, tensor = rest.partition(".")
    return f"{before}{PREFIX}.{indices[int(index)]}.{tensor}"
