"""Single paths drawn with Gumbel noise: GDAS (Dong and Yang 2019, arXiv 1910.04465).

A :class:`GumbelPath` takes the place of a supernet in a step: of every edge one op is drawn and
computed, and the alphas get a gradient through the softmax that it was drawn by.

Tensor suffixes: B batch, E edges, O ops.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fednas_flwr.spaces.nasbench201 import NASBench201Body, NASBench201Space
from fednas_flwr.spaces.space import CELL, Supernet

SPACE = NASBench201Space(input_shape=(1, 1, 1), num_classes=1)  # whose cells are those of any size
TRIES = 100  # of uniform draws one in eight is refused


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
        columns: By kind of cell for every edge the column of the drawn op.
    """

    def __init__(
        self, supernet: Supernet, *, temperature: float, generator: torch.Generator
    ) -> None:
        """Draw the path.

        Args:
            supernet: Of the space ``nasbench201``.
            temperature: T, above 0.
            generator: On the CPU.

        Raises:
            ValueError: The supernet is of another space.
        """
        super().__init__()
        if not isinstance(supernet.body, NASBench201Body):
            raise ValueError("single paths are drawn in search_space=nasbench201 only: set it")
        self.supernet, self.body, self.training = supernet, supernet.body, supernet.training
        self.temperature = temperature
        alphas = {kind: alpha.detach() for kind, alpha in supernet.alphas().items()}
        for _ in range(TRIES):
            self._noise = {
                kind: -torch.empty(alpha.shape).exponential_(generator=generator).log().to(alpha)
                for kind, alpha in alphas.items()
            }
            self.columns = {
                kind: (alpha + self._noise[kind]).argmax(dim=-1).tolist()
                for kind, alpha in alphas.items()
            }
            if not SPACE.is_degenerate(SPACE.genotype(self.columns[CELL])):
                break

    def alphas(self) -> dict[str, nn.Parameter]:
        """Return the supernet's."""
        return self.supernet.alphas()

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights that the path computes with, under their names in the supernet."""
        return self.supernet.path_weights(self.columns[CELL])

    def gates(self) -> dict[str, Tensor]:
        """Return the gates [E] of the drawn ops, all 1, differentiable in the alphas."""
        gates = {}
        for kind, alphas_EO in self.alphas().items():
            p_EO = ((alphas_EO + self._noise[kind]) / self.temperature).softmax(dim=-1)
            p_E = p_EO.gather(-1, torch.tensor(self.columns[kind], device=p_EO.device)[:, None])[
                :, 0
            ]
            gates[kind] = 1 + p_E - p_E.detach()
        return gates

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.body.path(x, self.columns, self.gates())


Relaxed = Supernet | GumbelPath  # what has alphas with a gradient
