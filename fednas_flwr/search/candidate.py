"""One candidate of a search as a network of its own: a path through a supernet's shared weights.

Pham et al. (2018), ENAS, arXiv 1802.03268: candidates inherit what others have trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from fednas_flwr.search_spaces.dp_cells_network import DPCellNetwork
from fednas_flwr.search_spaces.space import Supernet


class Candidate(nn.Module):
    """A supernet of which one path is computed; parameters are shared with it."""

    def __init__(self, supernet: Supernet, path: Sequence[int]) -> None:
        """Take the path.

        Args:
            supernet: Of the space ``dp_cells``.
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
        own = {id(weight) for weight in self.body.path_parameters(self.path)}
        return {n: w for n, w in self.supernet.weights().items() if id(w) in own}

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        logits: Tensor = self.body(x, path=self.path)
        return logits
