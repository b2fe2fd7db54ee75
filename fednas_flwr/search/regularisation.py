"""Terms of the alphas' objective that read no record: beta-DARTS' regulariser.

What reads no record costs no privacy, so a client or the server may add the gradient, with privacy
after the noise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def beta_gradient(alphas: Mapping[str, Tensor], *, weight: float) -> dict[str, Tensor]:
    """Return the gradient of ``weight * mean_e log sum_o exp(alpha_eo)``.

    ``weight * softmax(alpha_e) / E``, the mean over the edges of all kinds of cells (Beta-Decay:
    Ye et al. 2022, beta-DARTS, arXiv 2203.01665, Eq. 11 and the authors' code). It holds back the
    ops that are ahead, so that those that merely train faster, skips and pools, do not run away.

    Args:
        alphas: By kind of cell, [E, O].
        weight: At least 0.

    Returns:
        By kind of cell, shaped like the alphas.
    """
    num_edges = sum(len(alpha) for alpha in alphas.values())
    return {
        kind: weight / num_edges * torch.softmax(alpha.detach(), dim=-1)
        for kind, alpha in alphas.items()
    }


def rising(weight: float, server_round: int, num_rounds: int) -> float:
    """Return the weight of a round: linear, all of ``weight`` in the last round; from 1."""
    return weight * server_round / num_rounds
