"""A further skip connection beside every edge of a supernet: DARTS-minus.

Chu et al. (2021), DARTS-, arXiv 2009.01027. A skip lets a deep supernet train, whatever it is worth
in the derived network, and so its alpha grows. The auxiliary skip does that in its place, and
fades out.

Tensor suffixes: E edges, O ops.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from fednas_flwr.search_spaces.space import Supernet


class AuxiliarySkip(nn.Module):
    """A supernet whose edges give ``beta x + sum_o softmax(alpha)_o o(x)`` (Eq. 4).

    Parameters are shared with the supernet. As the skip is one of the ops, its weight is raised by
    beta, by either engine; the softmax, and so the alphas' gradient through it, stays.

    Deviation: beside an edge of stride 2, whose skip has weights, the auxiliary skip is that op
    again instead of a module of its own.
    """

    def __init__(self, supernet: Supernet, *, column: int, beta: float) -> None:
        """Take the supernet.

        Args:
            supernet: Of cells of edges.
            column: Of the skip among its ops.
            beta: At least 0.
        """
        super().__init__()
        self.supernet, self.training = supernet, supernet.training
        self.column, self.beta = column, beta

    def alphas(self) -> dict[str, nn.Parameter]:
        """Return the supernet's."""
        return self.supernet.alphas()

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the supernet's."""
        return self.supernet.weights()

    def op_weights(self) -> Mapping[str, Tensor]:
        """Return what the ops are weighted by, [E, O] by kind of cell."""
        weights = {kind: alphas.softmax(dim=-1) for kind, alphas in self.alphas().items()}
        for kind, weights_EO in weights.items():
            beside_O = weights_EO.new_zeros(weights_EO.shape[-1])
            beside_O[self.column] = self.beta
            weights[kind] = weights_EO + beside_O
        return weights

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        logits: Tensor = self.supernet(x, self.op_weights())
        return logits
