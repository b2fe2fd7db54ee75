"""ProxylessNAS on one client: steps of the alphas through gates of sampled paths, then of weights.

Cai et al. (2019), arXiv 1812.00332, section 3.2. :func:`search_paths` is the local rule of FDNAS
and CFDNAS (``algorithms/fdnas/strategy.py``). Memory and time are those of one path in the weight
step and at most of two in the alpha step of mode ``two``, whatever the number of candidates.

Tensor suffixes: E blocks, O ops, K ops that are computed in a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fednas_flwr.search.gates import active_gates, draw_paths, rescale
from fednas_flwr.search.gradient_sums import Batch
from fednas_flwr.search.objective import CLASSIFICATION, Objective
from fednas_flwr.search.optimizer_step import Descents, Gradients
from fednas_flwr.search.path_network import PathNetwork, drawable_alphas, expected_cost
from fednas_flwr.settings.optimizers import Gates
from fednas_flwr.settings.parser import Checked
from fednas_flwr.spaces.costs import HardwareLoss, HardwareTerms
from fednas_flwr.spaces.mbconv import NEVER
from fednas_flwr.spaces.mbconv_network import CELL
from fednas_flwr.spaces.space import Supernet


@dataclass(frozen=True)
class SampledPaths(Checked):
    """The steps of a client's local search on sampled paths.

    Attributes:
        gates: ``two`` or ``full`` (:func:`~fednas_flwr.search.gates.draw_paths`).
        warm_up: Whether the weights are trained alone, on paths that are drawn uniformly.
        hardware: What cost does to the loss of the alphas; None leaves it out.
    """

    gates: Gates
    warm_up: bool
    hardware: HardwareTerms | None


def search_paths(
    supernet: Supernet,
    gradients: Gradients,
    descents: Descents,
    paths: SampledPaths,
    *,
    hardware: HardwareLoss | None,
    generator: torch.Generator,
) -> None:
    """Search in place: each step moves the alphas of drawn paths, then the weights of one.

    Weights step by SGD, with Nesterov's momentum where there is any; alphas by Adam with betas (0,
    .999), without a first moment, as published: an alpha whose op is not sampled then has a step of
    zero, if there is no weight decay, which Adam would turn into full steps.

    Deviation: the public code moves the alphas once every few weight steps; here as in our other
    searches every weight step follows an alpha step. In mode ``two`` the alphas are rescaled after
    their step.

    Args:
        supernet: Of the MBConv space; its weights and alphas are those of ``descents``.
        gradients: Exact or noised.
        descents: Of weights and, but in a warm-up, of alphas.
        paths: The constants.
        hardware: The loss of ``paths.hardware``.
        generator: Draws the paths; on the CPU.
    """
    supernet.train()
    for _ in gradients.steps():
        if not paths.warm_up:
            assert descents.alphas is not None
            alphas_EO = supernet.alphas()[CELL]
            drawn_EK = draw_paths(drawable_alphas(supernet), mode=paths.gates, generator=generator)
            gradient_EO = gradients.gates(supernet, drawn_EK, hardware)
            old_EO = alphas_EO.detach().clone()
            descents.alphas.step({CELL: gradient_EO})
            if paths.gates == "two":
                with torch.no_grad():
                    alphas_EO.copy_(rescale(alphas_EO, old_EO, drawn_EK))
        drawn_EO = drawable_alphas(supernet)
        drawn_EO = uniform_alphas(drawn_EO) if paths.warm_up else drawn_EO
        path_E1 = draw_paths(drawn_EO, mode="one", generator=generator)
        # weights beside the path get no gradient: they neither decay nor move
        descents.weights.step(gradients.weights(PathNetwork(supernet, path_E1)))


def gate_gradient(
    supernet: Supernet,
    batch: Batch,
    paths_EK: Tensor,
    *,
    hardware: HardwareLoss | None = None,
    objective: Objective = CLASSIFICATION,
) -> tuple[Tensor, Tensor]:
    """Return dL/dg [E, K] of a batch's mean loss, and the losses [B] without hardware.

    With hardware it is of the loss that ``path_network.expected_cost`` enters.
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
    """Return alphas that draw every op that a block offers with the same probability."""
    return torch.where(alphas_EO > NEVER / 2, 0.0, NEVER)
