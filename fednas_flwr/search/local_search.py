"""Local steps of searches on one client.

:func:`alternate` alternates between an alpha step and a weight step. :func:`train_candidates`
implements lines 4 to 8 of DPNAS' Alg. 1 (Cheng et al. 2022, arXiv 2110.08557).

There are three rules for the alpha step: ``first_order`` and ``second_order`` (DARTS, Liu et al.,
2019, arXiv 1806.09055, Alg. 1) and ``mixed_level`` (MiLeNAS, the rule of FedNAS). beta-DARTS'
regulariser reads no record and so costs no privacy. A client or the server may add its gradient,
with privacy after the noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from fednas_flwr.search import optimizer_step as opt
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.settings.optimizers import NonNegative, Rule
from fednas_flwr.settings.parser import Checked
from fednas_flwr.spaces.space import Supernet


@dataclass(frozen=True)
class Alternating(Checked):
    """The steps of a client's local search on all ops.

    Attributes:
        rule: Rule of the alphas' gradient, one of ``RULES``.
        proximal: mu, at least 0, of :class:`~fednas_flwr.search.optimizer_step.Proximal`, w_0 are
            the weights with which the search began.
        beta_decay: Weight of beta-DARTS' regulariser of the alphas, at least 0; see
            ``local_search.beta_gradient``.
    """

    rule: Rule
    proximal: NonNegative = 0.0
    beta_decay: NonNegative = 0.0


def alternate(
    supernet: Supernet,
    gradients: opt.Gradients,
    optimizers: opt.Optimizers,
    alternating: Alternating,
) -> None:
    """Search in place: each step moves the alphas, then the weights.

    Args:
        supernet: The supernet, with the parameters of ``optimizers``.
        gradients: Exact or noised gradients.
        optimizers: Optimisers of weights and alphas.
        alternating: The constants.
    """
    assert optimizers.alphas is not None
    supernet.train()
    proximal = opt.Proximal(alternating.proximal, supernet.weights())
    for _ in gradients.steps():
        gradient = gradients.alphas(supernet, optimizers.weights, rule=alternating.rule)
        if alternating.beta_decay:
            further = beta_gradient(supernet.alphas(), weight=alternating.beta_decay)
            gradient = opt.add_gradients(gradient, further)
        optimizers.alphas.step(gradient)
        optimizers.weights.step(proximal.added_to(gradients.weights(supernet)))


def train_candidates(
    supernet: Supernet,
    paths: Sequence[Sequence[int]],
    gradients: opt.Gradients,
    weights: opt.Optimizer,
    *,
    steps: int,
) -> None:
    """Train the shared weights in place on one path after the other.

    Weights outside a path neither move nor decay in its steps; momentum carries over to the next.

    Args:
        supernet: The supernet, with the parameters of ``weights``.
        paths: The candidates.
        gradients: Exact, clipped (``exact_gradients.ClippedGradients``) or noised; they yield
            ``steps`` times for each candidate.
        weights: Optimiser of the shared weights.
        steps: Number of steps for each candidate.
    """
    supernet.train()
    chosen = (candidate for path in paths for candidate in repeat(Candidate(supernet, path), steps))
    for candidate, _ in zip(chosen, gradients.steps(), strict=True):
        weights.step(gradients.weights(candidate))


def beta_gradient(alphas: opt.Named, *, weight: float) -> dict[str, torch.Tensor]:
    """The gradient of ``weight * mean_e log sum_o exp(alpha_eo)``.

    ``weight * softmax(alpha_e) / E``, the mean over the edges of all kinds of cells (Beta-Decay:
    Ye et al. 2022, beta-DARTS, arXiv 2203.01665, Eq. 11 and the authors' code). It restrains the
    ops that are ahead, so that ops that merely train faster, such as skips and pools, do not
    dominate.

    Args:
        alphas: Alphas [E, O] by kind of cell.
        weight: Weight of the regulariser, at least 0.

    Returns:
        Gradients by kind of cell, shaped like the alphas.
    """
    num_edges = sum(len(alpha) for alpha in alphas.values())
    return {
        kind: weight / num_edges * alpha.detach().softmax(dim=-1) for kind, alpha in alphas.items()
    }


def rising(weight: float, server_round: int, num_rounds: int) -> float:
    """The weight of a round, numbered from 1: it rises linearly to ``weight`` in the last round."""
    return weight * server_round / num_rounds


def alpha_entropy(alphas: opt.Named) -> float:
    """The mean entropy over edges of softmax(alphas), in nats, from 0 to ln(ops)."""
    kinds = [alpha.detach().double() for alpha in alphas.values()]
    entropies = [-(rows.softmax(-1) * rows.log_softmax(-1)).sum(-1) for rows in kinds]
    return float(torch.cat(entropies).mean())
