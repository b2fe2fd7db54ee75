"""ProxylessNAS on one client: steps of the alphas through sampled paths' gates, then of weights.

Cai et al. (2019), arXiv 1812.00332, section 3.2. In every block one op is active and has gate 1;
the gates of the other computed ops are 0. An op with the alpha ``spaces.mbconv.NEVER`` is never
drawn before any other. :func:`search_paths` is the local rule of FDNAS and CFDNAS
(``algorithms/fdnas/strategy.py``). The weight step takes the memory and time of one path, and the
alpha step those of at most two, whatever the number of candidates.

A :class:`PathNetwork` gives the gradients of single records by the weights of one path, or by the
gates of several. The drawing of paths must not depend on records and must not fail on anything that
a server sends: :func:`drawable_alphas`.

Tensor suffixes: B batch, E blocks, O ops, K ops that are computed in a block, the active one first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fednas_flwr.search.objective import CLASSIFICATION, Batch, Objective
from fednas_flwr.search.optimizer_step import Gradients, Optimizers
from fednas_flwr.settings.parser import Checked
from fednas_flwr.spaces.costs import Costs, HardwareLoss, count_parameters
from fednas_flwr.spaces.mbconv import CELL, NEVER, MBConvNetwork
from fednas_flwr.spaces.operations import Choice, OpWeights
from fednas_flwr.spaces.space import Supernet

LARGEST_ALPHA = 1e3  # of alphas for drawing; no Gumbel noise bridges the distance to NEVER


class PathNetwork(nn.Module):
    """A supernet restricted to drawn paths; it shares the supernet's parameters."""

    def __init__(self, supernet: Supernet, paths_EK: Tensor, costs: Costs | None = None) -> None:
        """Restrict the supernet to the paths.

        Args:
            supernet: A supernet of the MBConv space.
            paths_EK: Drawn paths, see :func:`draw_paths`.
            costs: Costs of the space; with costs and gates the expected cost is returned, too.
        """
        super().__init__()
        self.supernet, self.training = supernet, supernet.training
        self.paths_EK, self.costs = paths_EK, costs

    def weights(self) -> dict[str, nn.Parameter]:
        """The weights of the active ops and of the shared layers, under their names."""
        return self.supernet.path_weights(self.paths_EK[:, 0].tolist())

    def forward(self, x: Tensor, op_weights: OpWeights = None) -> Tensor | tuple[Tensor, Tensor]:
        """Logits; with costs and gates ``{"blocks": [B, E, K]}`` also the expected cost [B].

        Without gates only the active ops are computed.
        """
        logits = self.supernet.body(x, op_weights, self.paths_EK.tolist())
        if self.costs is None or op_weights is None:
            return logits
        alphas_EO = self.supernet.alphas()[CELL].detach()
        return logits, expected_cost(self.costs, alphas_EO, self.paths_EK, op_weights[CELL])


def drawable_alphas(supernet: Supernet) -> Tensor:
    """Alphas [E, O] with which only paths that the supernet offers are drawn.

    Alphas that result from a search are returned unchanged; extreme ones that a server can send are
    brought into a range.
    """
    alphas_EO = supernet.alphas()[CELL].detach()
    tame_EO = alphas_EO.nan_to_num().clamp(-LARGEST_ALPHA, LARGEST_ALPHA)
    return tame_EO.masked_fill(~offered_ops(supernet).to(alphas_EO.device), NEVER)


def offered_ops(supernet: Supernet) -> Tensor:
    """Mark the ops that each block offers, bool [E, O]."""
    names = [block.names for block in _blocks(supernet)]
    return torch.tensor([[name is not None for name in row] for row in names])


def covering_paths(supernet: Supernet, *, number: int) -> list[Tensor]:
    """Paths [E, K] with ``number`` = K ops that together compute every op of every block.

    The first paths have the most weights; no others take more memory.
    """
    orders = []
    for block, offered_O in zip(_blocks(supernet), offered_ops(supernet).tolist(), strict=True):
        ops = [block.op(column) for column in range(len(offered_O))]
        sizes = [0 if op is None else count_parameters(op) for op in ops]
        offered = [column for column, is_offered in enumerate(offered_O) if is_offered]
        orders.append(sorted(offered, key=lambda column: -sizes[column]))
    num_ops = supernet.alphas()[CELL].shape[1]
    return [
        torch.tensor([_turned(order, first, num_ops)[:number] for order in orders])
        for first in range(0, max(map(len, orders)), number)
    ]


def _turned(order: list[int], first: int, num_ops: int) -> list[int]:
    """All columns: those of ``order`` from position ``first`` on, then all others."""
    first %= len(order)
    return order[first:] + order[:first] + [c for c in range(num_ops) if c not in order]


def expected_cost(costs: Costs, alphas_EO: Tensor, paths_EK: Tensor, gates: Tensor) -> Tensor:
    """The expected cost E, differentiable in the gates [E, K], or in those of records, [B, E, K].

    An op's gate enters the cost like its probability (section 3.3): E has its value under
    softmax(alphas), and ``dE/dg_j`` is the op's cost. With all ops drawn, the alphas' gradient is
    that of E; with two, it is that of the mean cost of these two.
    """
    zero = gates - gates.detach()  # has the gates' gradient
    p = alphas_EO.softmax(dim=-1).expand(*gates.shape[:-1], -1)
    return costs.expected(p.scatter_add(-1, paths_EK.to(p.device).expand(gates.shape), zero))


def cost_gradient(hardware: HardwareLoss, supernet: Supernet, paths_EK: Tensor) -> Tensor:
    """The alphas' gradient [E, O] of the part of an additive loss that depends on no record."""
    alphas_EO = supernet.alphas()[CELL].detach()
    gates_EK = active_gates(paths_EK, like=alphas_EO)
    cost = expected_cost(hardware.costs, alphas_EO, paths_EK, gates_EK)
    (gradients_EK,) = torch.autograd.grad(hardware(torch.zeros_like(cost), cost), [gates_EK])
    return alpha_gradient(gradients_EK, alphas_EO, paths_EK)


def _blocks(supernet: Supernet) -> list[Choice]:
    if not isinstance(supernet.body, MBConvNetwork):
        raise ValueError("paths are drawn in the MBConv space only: set search_space=mbconv")
    return supernet.body.choices()


def draw_paths(alphas_EO: Tensor, *, number: int, generator: torch.Generator) -> Tensor:
    """The columns of the ops to compute, int64 [E, K] on the CPU, the active one first.

    ``number`` = K ops are drawn from p = softmax(alphas) without replacement. Which of two is
    active is drawn from the softmax over the two (section 3.2.1).

    The draws are the largest of ``alphas + Gumbel noise``: in descending order these are draws
    without replacement, even if probabilities underflow.
    """
    alphas_EO = alphas_EO.detach().cpu().double()
    gumbel_EO = -torch.empty_like(alphas_EO).exponential_(generator=generator).log()
    paths_EK = (alphas_EO + gumbel_EO).argsort(dim=-1, descending=True)[:, :number]
    if number == 2:
        p_second_E1 = alphas_EO.gather(-1, paths_EK).softmax(dim=-1)[:, 1:]
        draw_E1 = torch.rand(len(paths_EK), 1, generator=generator, dtype=torch.float64)
        paths_EK = torch.where(draw_E1 < p_second_E1, paths_EK.flip(-1), paths_EK)
    return paths_EK


def active_gates(paths_EK: Tensor, *, like: Tensor) -> Tensor:
    """The gates [E, K] of drawn paths, 1 for the active op and 0 for the others, as a leaf.

    Args:
        paths_EK: Drawn paths, see :func:`draw_paths`.
        like: A tensor of the dtype and device of the gates.
    """
    gates_EK = torch.zeros(paths_EK.shape, dtype=like.dtype, device=like.device)
    gates_EK[:, 0] = 1
    return gates_EK.requires_grad_()


def alpha_gradient(gate_gradients: Tensor, alphas_EO: Tensor, paths_EK: Tensor) -> Tensor:
    """Compute ``dL/dalpha_i = sum_j dL/dg_j p_j (delta_ij - p_i)`` (Eq. 4), p over the K ops.

    Args:
        gate_gradients: dL/dg, [E, K], or one per example, [B, E, K].
        alphas_EO: The alphas.
        paths_EK: The op of each gate.

    Returns:
        [E, O] or [B, E, O]; zero for ops that were not computed.
    """
    paths_EK = paths_EK.to(alphas_EO.device)
    p_EK = alphas_EO.detach().gather(-1, paths_EK).softmax(dim=-1)
    of_computed = p_EK * (gate_gradients - (p_EK * gate_gradients).sum(dim=-1, keepdim=True))
    of_all = of_computed.new_zeros(*of_computed.shape[:-1], alphas_EO.shape[-1])
    return of_all.scatter(-1, paths_EK.expand_as(of_computed), of_computed)


def rescale(new_EO: Tensor, old_EO: Tensor, paths_EK: Tensor) -> Tensor:
    """The stepped alphas, shifted so that ops that were not computed keep their probabilities.

    ``alpha_i - log(sum_K e^new / sum_K e^old)`` for the computed ops (section 3.2.1); the softmax
    over all ops then has its old denominator.
    """
    paths_EK = paths_EK.to(new_EO.device)
    new_E1, old_E1 = (
        alphas.gather(-1, paths_EK).logsumexp(dim=-1, keepdim=True) for alphas in (new_EO, old_EO)
    )
    return new_EO.scatter_add(-1, paths_EK, (old_E1 - new_E1).expand(paths_EK.shape))


@dataclass(frozen=True)
class SampledPaths(Checked):
    """The steps of a client's local search on sampled paths.

    Attributes:
        warm_up: True if only the weights are trained, on paths that are drawn uniformly.
        hardware: Hardware term in the loss of the alphas; None for none.
    """

    warm_up: bool
    hardware: HardwareLoss | None


def search_paths(
    supernet: Supernet,
    gradients: Gradients,
    optimizers: Optimizers,
    paths: SampledPaths,
    *,
    generator: torch.Generator,
) -> None:
    """Search in place: each step moves the alphas of drawn paths, then the weights of one.

    Weights step by SGD, with Nesterov's momentum if there is any. Alphas step by Adam with betas
    (0, .999), without a first moment, as published. An alpha whose op is not sampled then has a
    step of zero, provided there is no weight decay, which Adam would turn into full steps.

    Deviation: the public code moves the alphas once every few weight steps. Here, as in our other
    searches, every weight step follows an alpha step.

    Args:
        supernet: A supernet of the MBConv space, with the parameters of ``optimizers``.
        gradients: Exact or noised gradients.
        optimizers: Optimisers of weights and, except in a warm-up, of alphas.
        paths: The constants.
        generator: Draws the paths; on the CPU.
    """
    supernet.train()
    for _ in gradients.steps():
        if not paths.warm_up:
            assert optimizers.alphas is not None
            alphas_EO = supernet.alphas()[CELL]
            drawn_EK = draw_paths(drawable_alphas(supernet), number=2, generator=generator)
            gradient_EO = gradients.gates(supernet, drawn_EK, paths.hardware)
            old_EO = alphas_EO.detach().clone()
            optimizers.alphas.step({CELL: gradient_EO})
            with torch.no_grad():
                alphas_EO.copy_(rescale(alphas_EO, old_EO, drawn_EK))
        drawn_EO = drawable_alphas(supernet)
        drawn_EO = uniform_alphas(drawn_EO) if paths.warm_up else drawn_EO
        path_E1 = draw_paths(drawn_EO, number=1, generator=generator)
        # weights outside the path get no gradient: they neither decay nor move
        optimizers.weights.step(gradients.weights(PathNetwork(supernet, path_E1)))


def gate_gradient(
    supernet: Supernet,
    batch: Batch,
    paths_EK: Tensor,
    *,
    hardware: HardwareLoss | None = None,
    objective: Objective = CLASSIFICATION,
) -> tuple[Tensor, Tensor]:
    """Compute dL/dg [E, K] of a batch's mean loss, and the losses [B] without hardware.

    With hardware it is the gradient of the loss that includes :func:`expected_cost`.
    """
    alphas_EO = supernet.alphas()[CELL].detach()
    gates_EK = active_gates(paths_EK, like=alphas_EO)
    logits = supernet.body(batch[0], {CELL: gates_EK}, paths_EK.tolist())
    losses = objective.losses(logits, batch[1])
    loss = losses.mean()
    if hardware is not None:
        loss = hardware(loss, expected_cost(hardware.costs, alphas_EO, paths_EK, gates_EK))
    (gradients_EK,) = torch.autograd.grad(loss, [gates_EK])
    return gradients_EK, losses.detach()


def uniform_alphas(alphas_EO: Tensor) -> Tensor:
    """Alphas with which every op that a block offers is drawn with the same probability."""
    return torch.where(alphas_EO > NEVER / 2, 0.0, NEVER)
