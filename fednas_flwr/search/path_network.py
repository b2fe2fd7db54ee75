"""Drawn paths of an MBConv supernet as a network of their own, and what they cost.

A :class:`PathNetwork` gives the gradients of single records by the weights of one path, or by the
gates of several. How paths are drawn must not depend on records, and neither must it fail on what a
server has sent: :func:`drawable_alphas`.

Tensor suffixes: B batch, E blocks, O ops, K ops that are computed in a block, the active one first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fednas_flwr.search.gates import NUM_PATHS, active_gates, alpha_gradient
from fednas_flwr.spaces.costs import Costs, HardwareLoss
from fednas_flwr.spaces.flops import count_parameters
from fednas_flwr.spaces.mbconv import NEVER
from fednas_flwr.spaces.mbconv_network import CELL, Block, MBConvNetwork
from fednas_flwr.spaces.space import Supernet

LARGEST_ALPHA = 1e3  # of those that are drawn from; no Gumbel noise bridges the way to NEVER


class PathNetwork(nn.Module):
    """A supernet restricted to drawn paths; it shares the supernet's parameters."""

    def __init__(self, supernet: Supernet, paths_EK: Tensor, costs: Costs | None = None) -> None:
        """Take the paths.

        Args:
            supernet: Of the MBConv space.
            paths_EK: See ``search.gates.draw_paths``.
            costs: Of the space; with them and gates the expected cost is returned, too.
        """
        super().__init__()
        self.supernet, self.training = supernet, supernet.training
        self.paths_EK, self.costs = paths_EK, costs

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights of the active ops and of the shared layers, under their names."""
        return self.supernet.path_weights(self.paths_EK[:, 0].tolist())

    def forward(
        self, x: Tensor, op_weights: Mapping[str, Tensor] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits; with costs and gates ``{"blocks": [B, E, K]}`` also the expected cost [B].

        Without gates only the active ops are computed.
        """
        logits: Tensor = self.supernet.body(x, op_weights, self.paths_EK.tolist())
        if self.costs is None or op_weights is None:
            return logits
        alphas_EO = self.supernet.alphas()[CELL].detach()
        return logits, expected_cost(self.costs, alphas_EO, self.paths_EK, op_weights[CELL])


def drawable_alphas(supernet: Supernet) -> Tensor:
    """Return alphas [E, O] from which no path is drawn that the supernet does not offer.

    Those that a search leads to are returned as they are; wild ones that a server can send are
    brought into a range.
    """
    alphas_EO = supernet.alphas()[CELL].detach()
    tame_EO = alphas_EO.nan_to_num().clamp(-LARGEST_ALPHA, LARGEST_ALPHA)
    return tame_EO.masked_fill(~offered_ops(supernet).to(alphas_EO.device), NEVER)


def offered_ops(supernet: Supernet) -> Tensor:
    """Return which ops each block offers, bool [E, O]."""
    names = [block.names for block in _blocks(supernet)]
    return torch.tensor([[name is not None for name in row] for row in names])


def covering_paths(supernet: Supernet, *, mode: str) -> list[Tensor]:
    """Return paths [E, K] that compute every op of every block between them.

    The first ones have the most weights: no others of the mode take more memory.
    """
    orders = []
    for block, offered_O in zip(_blocks(supernet), offered_ops(supernet).tolist(), strict=True):
        ops = [block.op(column) for column in range(len(offered_O))]
        sizes = [0 if op is None else count_parameters(op) for op in ops]
        offered = [column for column, is_offered in enumerate(offered_O) if is_offered]
        orders.append(sorted(offered, key=lambda column: -sizes[column]))
    num_ops = supernet.alphas()[CELL].shape[1]
    num_paths = NUM_PATHS[mode] or num_ops
    return [
        torch.tensor([_turned(order, first, num_ops)[:num_paths] for order in orders])
        for first in range(0, max(map(len, orders)), num_paths)
    ]


def _turned(order: list[int], first: int, num_ops: int) -> list[int]:
    """Return all columns: those of ``order`` from position ``first`` on, then all others."""
    first %= len(order)
    return order[first:] + order[:first] + [c for c in range(num_ops) if c not in order]


def expected_cost(costs: Costs, alphas_EO: Tensor, paths_EK: Tensor, gates: Tensor) -> Tensor:
    """Return the expected cost E, differentiable in the gates [E, K], or of records, [B, E, K].

    The gate of an op enters it as its probability would (section 3.3): E has its value under
    softmax(alphas) and ``dE/dg_j`` is the op's cost, so that in mode ``full`` the alphas' gradient
    is that of E, and in mode ``two`` that of the two ops' mean cost.
    """
    zero = gates - gates.detach()  # with the gates' gradient
    p = alphas_EO.softmax(dim=-1).expand(*gates.shape[:-1], -1)
    return costs.expected(p.scatter_add(-1, paths_EK.to(p.device).expand(gates.shape), zero))


def cost_gradient(hardware: HardwareLoss, supernet: Supernet, paths_EK: Tensor) -> Tensor:
    """Return the alphas' gradient [E, O] of an additive loss's part that knows no record."""
    alphas_EO = supernet.alphas()[CELL].detach()
    gates_EK = active_gates(paths_EK, like=alphas_EO)
    cost = expected_cost(hardware.costs, alphas_EO, paths_EK, gates_EK)
    (gradients_EK,) = torch.autograd.grad(hardware(torch.zeros_like(cost), cost), [gates_EK])
    return alpha_gradient(gradients_EK, alphas_EO, paths_EK)


def _blocks(supernet: Supernet) -> list[Block]:
    if not isinstance(supernet.body, MBConvNetwork):
        raise ValueError("paths are drawn in the MBConv space only: set search_space=mbconv")
    return supernet.body.choices()
