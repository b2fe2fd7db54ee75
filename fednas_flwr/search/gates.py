"""Path gates of ProxylessNAS: which ops are computed, and the gradient of the alphas from them.

Cai et al. (2019), arXiv 1812.00332, section 3.2. In every block one op is active, its gate is 1;
the gates of the other computed ops are 0. Pure functions on tensors: nothing here knows of networks
or losses. An op with an alpha of ``spaces.mbconv.NEVER`` is never drawn before any other.

Tensor suffixes: E blocks, O ops, K ops that are computed in a block, the active one first.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_PATHS = {"one": 1, "two": 2, "full": None}  # K by mode; None is O


def draw_paths(alphas_EO: Tensor, *, mode: str, generator: torch.Generator) -> Tensor:
    """Return the columns of the ops to compute, int64 [E, K] on the CPU, the active one first.

    ``one``: an op with its probability p = softmax(alphas). ``two``: two ops drawn from p without
    replacement; which of them is active is drawn by the softmax over the two (section 3.2.1).
    ``full``: all ops, the active one drawn from p.

    Drawn as the largest of ``alphas + Gumbel noise``: in descending order these are draws without
    replacement, also where probabilities underflow.
    """
    alphas_EO = alphas_EO.detach().cpu().double()
    gumbel_EO = -torch.empty_like(alphas_EO).exponential_(generator=generator).log()
    paths_EK = (alphas_EO + gumbel_EO).argsort(dim=-1, descending=True)[:, : NUM_PATHS[mode]]
    if mode == "two":
        p_second_E1 = alphas_EO.gather(-1, paths_EK).softmax(dim=-1)[:, 1:]
        draw_E1 = torch.rand(len(paths_EK), 1, generator=generator, dtype=torch.float64)
        paths_EK = torch.where(draw_E1 < p_second_E1, paths_EK.flip(-1), paths_EK)
    return paths_EK


def active_gates(paths_EK: Tensor, *, like: Tensor) -> Tensor:
    """Return the gates [E, K] of drawn paths, 1 for the active op and 0 for the others, as a leaf.

    Args:
        paths_EK: What :func:`draw_paths` returns.
        like: Gives dtype and device.
    """
    gates_EK = torch.zeros(paths_EK.shape, dtype=like.dtype, device=like.device)
    gates_EK[:, 0] = 1
    return gates_EK.requires_grad_()


def alpha_gradient(gate_gradients: Tensor, alphas_EO: Tensor, paths_EK: Tensor) -> Tensor:
    """Return ``dL/dalpha_i = sum_j dL/dg_j p_j (delta_ij - p_i)`` (Eq. 4), p over the K ops.

    Args:
        gate_gradients: dL/dg, [E, K], or one for each example, [B, E, K].
        alphas_EO: The alphas.
        paths_EK: Which op each gate belongs to.

    Returns:
        [E, O] or [B, E, O]; zero for ops that were not computed.
    """
    paths_EK = paths_EK.to(alphas_EO.device)
    p_EK = alphas_EO.detach().gather(-1, paths_EK).softmax(dim=-1)
    mean = (p_EK * gate_gradients).sum(dim=-1, keepdim=True)
    of_computed = p_EK * (gate_gradients - mean)
    of_all = of_computed.new_zeros(*of_computed.shape[:-1], alphas_EO.shape[-1])
    return of_all.scatter(-1, paths_EK.expand_as(of_computed), of_computed)


def rescale(new_EO: Tensor, old_EO: Tensor, paths_EK: Tensor) -> Tensor:
    """Return the stepped alphas, shifted so that ops not computed keep their probabilities.

    ``alpha_i - log(sum_K e^new / sum_K e^old)`` for the computed ops (section 3.2.1); the softmax
    over all ops then has its old denominator.
    """
    paths_EK = paths_EK.to(new_EO.device)
    new_E1, old_E1 = (
        alphas.gather(-1, paths_EK).logsumexp(dim=-1, keepdim=True) for alphas in (new_EO, old_EO)
    )
    return new_EO.scatter_add(-1, paths_EK, (old_E1 - new_E1).expand(paths_EK.shape))
