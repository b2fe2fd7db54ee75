"""Local steps of ProxylessNAS on one client: gates of sampled paths for the alphas, then weights.

Cai et al. (2019), arXiv 1812.00332, section 3.2. :func:`proxyless_epoch` is the local rule of FDNAS
and CFDNAS (``strategies/fdnas.py``). Memory and time are those of one path in the weight step and
at most of two in the alpha step of mode ``two``, whatever the number of candidates.

Tensor suffixes: E blocks, O ops, K ops that are computed in a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fednas_flwr.errors import unknown_choice
from fednas_flwr.hardware.costs import Costs, HardwareLoss
from fednas_flwr.search.gates import active_gates, alpha_gradient, draw_paths, rescale
from fednas_flwr.search.settings import GATES, SGD, Adam
from fednas_flwr.search.training import Batch, Tally, clip_gradients, record_losses
from fednas_flwr.search_spaces.mbconv import NEVER
from fednas_flwr.search_spaces.mbconv_plan import CELL
from fednas_flwr.search_spaces.space import Supernet


def make_weight_optimizer(supernet: Supernet, settings: SGD) -> torch.optim.SGD:
    """Return SGD over the weights, with Nesterov's momentum where there is any."""
    return torch.optim.SGD(
        supernet.weights().values(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.momentum > 0,
    )


def make_alpha_optimizer(supernet: Supernet, settings: Adam) -> torch.optim.Adam:
    """Return Adam over the alphas with betas (0, .999): without a first moment, as published.

    So an alpha whose op is not sampled has a step of zero, if there is no weight decay, which Adam
    would turn into full steps.
    """
    return torch.optim.Adam(
        supernet.alphas().values(),
        lr=settings.lr,
        betas=(0.0, 0.999),
        weight_decay=settings.weight_decay,
    )


def proxyless_epoch(
    supernet: Supernet,
    train_batches: Iterator[Batch],
    validation_batches: Iterator[Batch],
    *,
    mode: str,
    warm_up: bool,
    hardware: HardwareLoss | None,
    clip_norm: float | None,
    weight_optimizer: torch.optim.Optimizer,
    alpha_optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    class_factors: Tensor | None = None,
) -> tuple[Tally, Tally]:
    """Search for one pass over the training batches; each is paired with a validation batch.

    Deviation: the public code moves the alphas once every few weight steps; here as in our other
    searches every weight step follows an alpha step.

    Args:
        supernet: Of the MBConv space; trained in place, weights and alphas.
        train_batches: Batches for the weights.
        validation_batches: At least as many batches for the alphas.
        mode: ``two`` or ``full`` (:func:`~fednas_flwr.search.gates.draw_paths`).
        warm_up: Whether to train the weights alone, on paths that are drawn uniformly; the
            validation batches stay unused.
        hardware: What cost does to the loss of the alphas; None leaves it out.
        clip_norm: Largest norm of the weights' gradient; None does not clip.
        weight_optimizer: SGD over the weights.
        alpha_optimizer: Adam over the alphas.
        generator: Draws the paths; on the CPU.
        class_factors: See ``training.record_losses``.

    Returns:
        Tallies of the training and of the validation batches, taken before the steps on them.
    """
    if mode not in GATES:
        raise unknown_choice("algorithm.gates", mode, GATES)
    supernet.train()
    train_tally, validation_tally = Tally(), Tally()
    for train_batch in train_batches:
        if not warm_up:
            batch = next(validation_batches)
            losses = alpha_step(
                supernet,
                batch,
                mode=mode,
                hardware=hardware,
                optimizer=alpha_optimizer,
                generator=generator,
                class_factors=class_factors,
            )
            validation_tally.add(losses, None, batch[1])
        logits, losses = weight_step(
            supernet,
            train_batch,
            warm_up=warm_up,
            clip_norm=clip_norm,
            optimizer=weight_optimizer,
            generator=generator,
            class_factors=class_factors,
        )
        train_tally.add(losses, logits, train_batch[1])
    return train_tally, validation_tally


def weight_step(
    supernet: Supernet,
    batch: Batch,
    *,
    warm_up: bool,
    clip_norm: float | None,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    class_factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Train the weights of one drawn path; return logits [B, classes] and losses [B] before it."""
    alphas_EO = supernet.alphas()[CELL].detach()
    if warm_up:
        alphas_EO = uniform_alphas(alphas_EO)
    path = draw_paths(alphas_EO, mode="one", generator=generator).tolist()
    logits = supernet.body(batch[0], paths=path)
    losses = record_losses(logits, batch[1], class_factors)
    optimizer.zero_grad()  # to None: weights beside the path neither decay nor move
    losses.mean().backward()  # type: ignore[no-untyped-call]
    clip_gradients(optimizer, clip_norm)
    optimizer.step()
    return logits.detach(), losses.detach()


def alpha_step(
    supernet: Supernet,
    batch: Batch,
    *,
    mode: str,
    hardware: HardwareLoss | None,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    class_factors: Tensor | None = None,
) -> Tensor:
    """Move the alphas of drawn paths; return the losses [B] before the step.

    In mode ``two`` the alphas are rescaled after it.
    """
    alphas_EO = supernet.alphas()[CELL]
    paths_EK = draw_paths(alphas_EO, mode=mode, generator=generator)
    gradients_EK, losses = gate_gradient(
        supernet, batch, paths_EK, hardware=hardware, class_factors=class_factors
    )
    alphas_EO.grad = alpha_gradient(gradients_EK, alphas_EO, paths_EK)
    move_alphas(alphas_EO, paths_EK, mode=mode, optimizer=optimizer)
    return losses


def move_alphas(
    alphas_EO: Tensor, paths_EK: Tensor, *, mode: str, optimizer: torch.optim.Optimizer
) -> None:
    """Step along the alphas' ``.grad``; in mode ``two`` then rescale those of the paths."""
    old_EO = alphas_EO.detach().clone()
    optimizer.step()
    if mode == "two":
        with torch.no_grad():
            alphas_EO.copy_(rescale(alphas_EO, old_EO, paths_EK))


def gate_gradient(
    supernet: Supernet,
    batch: Batch,
    paths_EK: Tensor,
    *,
    hardware: HardwareLoss | None = None,
    class_factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return dL/dg [E, K] of a batch's mean loss, and the losses [B] without hardware.

    With hardware it is of the loss that :func:`expected_cost` enters.
    """
    alphas_EO = supernet.alphas()[CELL].detach()
    gates_EK = active_gates(paths_EK, like=alphas_EO)
    logits = supernet.body(batch[0], {CELL: gates_EK}, paths_EK.tolist())
    losses = record_losses(logits, batch[1], class_factors)
    loss = losses.mean()
    if hardware is not None:
        loss = hardware(loss, expected_cost(hardware.costs, alphas_EO, paths_EK, gates_EK))
    (gradients_EK,) = torch.autograd.grad(loss, [gates_EK])
    return gradients_EK, losses.detach()


def expected_cost(costs: Costs, alphas_EO: Tensor, paths_EK: Tensor, gates: Tensor) -> Tensor:
    """Return the expected cost E, differentiable in the gates [E, K], or of records, [B, E, K].

    The gate of an op enters it as its probability would (section 3.3): E has its value under
    softmax(alphas) and ``dE/dg_j`` is the op's cost, so that in mode ``full`` the alphas' gradient
    is that of E, and in mode ``two`` that of the two ops' mean cost.
    """
    zero = gates - gates.detach()  # with the gates' gradient
    p = alphas_EO.softmax(dim=-1).expand(*gates.shape[:-1], -1)
    return costs.expected(p.scatter_add(-1, paths_EK.to(p.device).expand(gates.shape), zero))


def uniform_alphas(alphas_EO: Tensor) -> Tensor:
    """Return alphas that draw every op that a block offers with the same probability."""
    return torch.where(alphas_EO > NEVER / 2, 0.0, NEVER)
