"""Single paths drawn with Gumbel noise: GDAS (Dong and Yang 2019, arXiv 1910.04465).

A :class:`GumbelPath` takes the place of a supernet in a step: of every edge one op is drawn and
computed, and the alphas get a gradient through the softmax that it was drawn by.

Tensor suffixes: B batch, E edges, O ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fednas_flwr.search.auxiliary_skip import AuxiliarySkip
from fednas_flwr.search_spaces.cell_graph import CELL
from fednas_flwr.search_spaces.nasbench201 import NASBench201Space
from fednas_flwr.search_spaces.nasbench201_network import NASBench201Body
from fednas_flwr.search_spaces.space import Supernet

TRIES = 100  # of uniform draws one in eight is refused


class GumbelPath(nn.Module):
    """A supernet of which a drawn op of every edge is computed; parameters are shared with it.

    With Gumbel noise g the op of edge e is ``k = argmax_o (alpha_eo + g_eo)``, which has the
    probability ``softmax(alpha_e)_k``. In the forward pass its gate h_e is 1, in the backward pass
    p_ek with ``p_e = softmax((alpha_e + g_e) / T)``, so that ``dL/dalpha_eo = dL/dh_e p_ek
    (delta_ko - p_eo) / T`` (section 3.2). Ops that are not drawn are not computed: nothing flows
    through their gates. The authors' code adds those to the feature map, where they are 0, and so
    has a further term. The noise is drawn once: every forward is of the same path.

    Attributes:
        columns: By kind of cell for every edge the column of the drawn op.
    """

    def __init__(
        self, supernet: Supernet, *, temperature: float, generator: torch.Generator
    ) -> None:
        """Draw the path.

        Args:
            supernet: Of the space ``nasbench201``; by either engine.
            temperature: T, above 0.
            generator: On the CPU.

        Raises:
            ValueError: The supernet is of another space.
        """
        super().__init__()
        self.supernet, self.body, self.training = supernet, _body(supernet), supernet.training
        self.temperature = temperature
        self._noise, self.columns = draw_path(supernet, supernet.alphas(), generator)

    def alphas(self) -> dict[str, nn.Parameter]:
        """Return the supernet's."""
        return self.supernet.alphas()

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights that the path computes with, under their names in the supernet."""
        beside = {id(w) for op in self.body.ops_beside(self.columns) for w in op.parameters()}
        return {n: w for n, w in self.supernet.weights().items() if id(w) not in beside}

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


def draw_path(
    supernet: Supernet, alphas: Mapping[str, Tensor], generator: torch.Generator
) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """Return Gumbel noise for every alpha, and the column of the op that it draws on every edge.

    Deviation: noise by which no op with weights is on a way from the cell's input to its output is
    drawn again, as often as ``TRIES``: a step on such a path would move nothing.

    Args:
        supernet: Whose path it is.
        alphas: By kind of cell, [E, O]; the noise is on their device and of their dtype.
        generator: On the CPU.

    Raises:
        ValueError: The supernet is of another space.
    """
    _body(supernet)
    for _ in range(TRIES):
        noise = {
            kind: -torch.empty(own.shape).exponential_(generator=generator).log().to(own)
            for kind, own in alphas.items()
        }
        columns = {
            kind: (own.detach() + noise[kind]).argmax(dim=-1).tolist()
            for kind, own in alphas.items()
        }
        if not NASBench201Space.is_degenerate(NASBench201Space.genotype(columns[CELL])):
            break
    return noise, columns


def path_tensors(
    supernet: Supernet, columns: Mapping[str, Sequence[int]]
) -> tuple[set[str], set[str]]:
    """Return the names of the weights, and of the buffers, that a path computes with.

    Raises:
        ValueError: The supernet is of another space.
    """
    ops = _body(supernet).ops_beside(columns)
    beside = {id(tensor) for op in ops for tensor in (*op.parameters(), *op.buffers())}
    weights = {name for name, weight in supernet.weights().items() if id(weight) not in beside}
    buffers = {name for name, buffer in supernet.named_buffers() if id(buffer) not in beside}
    return weights, buffers


def _body(supernet: Supernet) -> NASBench201Body:
    if not isinstance(supernet.body, NASBench201Body):
        raise ValueError("single paths are drawn in search_space=nasbench201 only: set it")
    return supernet.body


Relaxed = Supernet | AuxiliarySkip | GumbelPath  # what has alphas with a gradient
