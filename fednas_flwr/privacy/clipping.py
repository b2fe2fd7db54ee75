"""Sums over a batch of per-sample gradients, each clipped to a norm: what the noise is added to.

``S = sum_i f_i min(1, R / ||g_i||) g_i`` (DP-SGD: Abadi et al. 2016, arXiv 1607.00133, Alg. 1;
DP-FNAS: arXiv 2110.11025, Eq. 3 and 4 before noise and averaging), where g_i is the gradient of the
loss of record i with respect to all named parameters together. :func:`clipped_gradient_sum` takes
it for the weights of a module, :func:`clipped_alpha_gradient_sum` for the alphas of a supernet. No
noise, no sampling and no accounting here; the
sums are private only once noise of std ``sigma * R`` is on them.

Guarantee:
    Adding or removing one record changes S by a vector of L2 norm at most R. This needs

    * a module and a loss that treat every record apart from the others: batch normalisation is
      refused, but statistics over the batch computed by hand, a contrastive loss, or a loss that
      was divided by the batch size cannot be seen from here and break it;
    * record i at index i of the first dimension wherever a layer with parameters reads it, and row
      i of a stack's leaf used for record i alone: a module that moves another dimension of the
      same size to the front breaks it, unseen as well;
    * class factors and R that are public: never from the client's own counts or gradients;
    * the sum itself: dividing it by the number of records drawn breaks it, dividing it by a
      public number does not.

    Rounding: norms, factors and sums are float64 whatever the module computes in, so that a record
    contributes at most ``R (1 + 1e-14)``. That a kernel rounds the gradient of a record alike
    whatever else is in the batch is not promised by torch, and where it does not, the other
    records' contributions move a little too (more at a kink of a ReLU). On CPU they were seen to
    move only between one and several records at a time; ``micro_batch_size=1`` excludes it.

Edge cases:
    =========================================  ============================================
    no records                                 zeros
    ||g_i|| = 0                                contributes zero
    ||g_i|| not finite: an inf or NaN in g_i,  contributes zero, as if record i were absent;
    or a norm above 1e154                      the others are not touched
    parameter that the loss does not reach     zeros
    =========================================  ============================================

Tensor suffixes: B records of a micro-batch, E edges, O ops, K op weights of an edge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fednas_flwr.privacy.record_gradients import record_gradients, refuse_batch_norm
from fednas_flwr.privacy.record_losses import Group, Loss, differentiate, losses_of

COLUMNS = 8192  # of gradients that are turned into float64 at a time
SMALLEST_MAX_NORM = 1e-100  # squares of much smaller numbers vanish in float64


class Relaxation(NamedTuple):
    """How alphas enter a supernet.

    Attributes:
        op_weights: What the supernet is called with, [E, K] by kind of cell: the weights of all K =
            O ops, or the gates of those that are computed.
        by_alphas: Given a kind and the gradients by its op weights, float64 [B, E, K], returns
            those by its alphas, [B, E, O]: record by record.
    """

    op_weights: Mapping[str, Tensor]
    by_alphas: Callable[[str, Tensor], Tensor]


def clipped_gradient_sum(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss: Loss,
    parameters: Mapping[str, nn.Parameter],
    max_norm: float,
    micro_batch_size: int | None = None,
    class_factors: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return ``sum_i f_i min(1, R / ||g_i||) g_i`` over a batch, by parameter name.

    g_i is the gradient of one record's loss with respect to all of ``parameters``, of which one
    joint norm is taken. Every record gets a copy of the weights, in a leaf [B, ...] of stride 0, so
    that one ordinary backward returns all g_i (``fednas_flwr.layers``). This needs convolutions,
    linear layers and group norms, or a module that ``takes_stack`` (a supernet with the fast
    engine); of any other module Opacus' hooks return the g_i. The module, the parameters'
    ``requires_grad`` and their ``.grad`` are left as they were.

    Args:
        module: Network in training mode; called with x alone.
        x: Features [B, ...].
        y: Labels int64 [B].
        loss: Called with the module's output and labels; returns one loss per record, not a mean.
        parameters: The module's parameters to differentiate by, under the names of the result; all
            others (frozen alphas) are held fixed.
        max_norm: R, at least 1e-100 and finite.
        micro_batch_size: How many records are computed at a time; None means all. Changes memory
            and rounding, not the sum.
        class_factors: Public factors f in (0, 1], one per class; multiply after clipping, since
            clipping would cancel what is multiplied before. None means 1.

    Returns:
        float64 tensors shaped like the parameters, on their device.

    Raises:
        ValueError: The module contains batch normalisation or another layer without per-sample
            gradients, or is not in training mode; a parameter is not the module's; R, the factors
            or the micro-batch size are out of range; the loss is not one number per record.
        RuntimeError: A use of a parameter was missed, e.g. a layer's weight that is used without
            calling the layer.

    Guarantee: sensitivity R under adding or removing one record; see the head of this module.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> x, y = torch.tensor([[3.0], [0.5]]), torch.tensor([0, 0])
        >>> sums = clipped_gradient_sum(
        ...     layer, x, y, loss=lambda out, y: out[:, 0],
        ...     parameters={"weight": layer.weight}, max_norm=1.0,
        ... )  # gradients 3 and .5
        >>> sums["weight"]
        tensor([[1.5000]], dtype=torch.float64)
    """
    _check_arguments(x, y, max_norm, micro_batch_size, class_factors)
    sums: dict[str, Tensor] = {}
    with (
        _only_trainable(module, parameters),
        record_gradients(module, parameters, loss) as gradients,
    ):
        for x_B, y_B in _micro_batches(x, y, micro_batch_size):
            factors_B = _factors(class_factors, y_B)
            _add(sums, _clipped_sum(gradients(x_B, y_B), parameters, max_norm, factors_B))
    return _with_zeros(sums, parameters)


def clipped_alpha_gradient_sum(
    supernet: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss: Loss,
    alphas: Mapping[str, Tensor],
    max_norm: float,
    relaxation: Relaxation | None = None,
    micro_batch_size: int | None = None,
    class_factors: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return ``sum_i f_i min(1, R / ||h_i||) h_i`` over a batch, by kind of cell.

    h_i is the first-order gradient of one record's loss with respect to the alphas of all kinds,
    of which one joint norm is taken; the weights are held fixed. Every record gets op weights
    ``w_i = softmax(alphas)`` of its own, in a leaf [B, E, O] that all cells of a kind read. So one
    backward returns ``v_i = dL_i / dw_i``, summed over cells, and the softmax's Jacobian gives
    ``h_i = w (v_i - sum_o w v_i)``. This costs what the plain gradient of the alphas costs. Another
    ``relaxation`` has another w_i and another Jacobian.

    Args:
        supernet: Called with x and op weights [B, E, K] by kind of cell; returns logits.
        x: Features [B, ...].
        y: Labels int64 [B].
        loss: As for :func:`clipped_gradient_sum`.
        alphas: Architecture parameters [E, O] by kind of cell.
        max_norm: R, at least 1e-100 and finite.
        relaxation: Chosen without looking at records; None is the softmax over all ops.
        micro_batch_size: As for :func:`clipped_gradient_sum`.
        class_factors: As for :func:`clipped_gradient_sum`.

    Returns:
        float64 tensors shaped like the alphas, on their device. Nothing else has changed.

    Raises:
        ValueError: As for :func:`clipped_gradient_sum`, but any mode will do.

    Guarantee: sensitivity R under adding or removing one record; see the head of this module.
    """
    _check_arguments(x, y, max_norm, micro_batch_size, class_factors)
    refuse_batch_norm(supernet)
    sums: dict[str, Tensor] = {}
    op_weights, by_alphas = relaxation or _softmax(alphas)
    with _only_trainable(supernet, {}), torch.enable_grad():
        for x_B, y_B in _micro_batches(x, y, micro_batch_size):
            leaves = {
                kind: w_EK.detach().to(alphas[kind].dtype).repeat(len(x_B), 1, 1).requires_grad_()
                for kind, w_EK in op_weights.items()
            }
            gradients = [
                ([kind], by_alphas(kind, gradient_BEK.double()))
                for kind, gradient_BEK in differentiate(
                    losses_of(supernet(x_B, leaves), y_B, loss), leaves
                ).items()
            ]
            factors_B = _factors(class_factors, y_B)
            _add(sums, _clipped_sum(gradients, alphas, max_norm, factors_B))
    return _with_zeros(sums, alphas)


def _clipped_sum(
    gradients: list[Group],
    parameters: Mapping[str, Tensor],
    max_norm: float,
    factors_B: Tensor | None,
) -> dict[str, Tensor]:
    """Return the clipped sum of the gradients of B records, float64 by name.

    Columns of [B, P] are turned into float64 by parts, in cache; small gradients are joined first.
    """
    if not gradients:
        return {}
    gradients = sorted(gradients, key=lambda group: group[1].shape[1:].numel())
    names = [name for group, _ in gradients for name in group]
    flat = [gradient.flatten(1) for _, gradient in gradients]
    small = [matrix for matrix in flat if matrix.shape[1] < COLUMNS]
    if small:
        flat = [torch.cat(small, dim=1), *flat[len(small) :]]
    parts = [part for matrix in flat for part in torch.split(matrix, COLUMNS, dim=1)]
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts]
    norms_B = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    keep_B = norms_B.isfinite()
    scale_B = (max_norm / norms_B).clamp(max=1.0)  # R / 0 = inf: factor 1
    if factors_B is not None:
        scale_B = scale_B * factors_B.to(scale_B)
    scale_B = scale_B.where(keep_B, 0.0)
    drop_B1 = ~keep_B[:, None]  # 0 * inf would be NaN
    sum_P = torch.cat([scale_B @ part.masked_fill(drop_B1, 0.0).double() for part in parts])
    pieces = torch.split(sum_P, [parameters[name].numel() for name in names])
    return {n: piece.view(parameters[n].shape) for n, piece in zip(names, pieces, strict=True)}


def _add(sums: dict[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Add to ``sums`` by name."""
    for name, other in others.items():
        sums[name] = sums[name] + other if name in sums else other


def _with_zeros(sums: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums in the order of the parameters, zeros where there is none."""
    return {
        name: sums[name] if name in sums else torch.zeros_like(parameter, dtype=torch.float64)
        for name, parameter in parameters.items()
    }


def _softmax(alphas: Mapping[str, Tensor]) -> Relaxation:
    """Return the relaxation of DARTS: all ops, weighted by ``softmax(alphas)``."""
    weights = {kind: a_EO.detach().double().softmax(dim=-1) for kind, a_EO in alphas.items()}

    def by_alphas(kind: str, gradients_BEO: Tensor) -> Tensor:
        w_EO = weights[kind]
        return w_EO * (gradients_BEO - (w_EO * gradients_BEO).sum(-1, keepdim=True))

    return Relaxation(weights, by_alphas)


def _factors(class_factors: Tensor | None, y_B: Tensor) -> Tensor | None:
    return None if class_factors is None else class_factors.to(y_B.device)[y_B]


def _micro_batches(x: Tensor, y: Tensor, size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield consecutive slices of at most ``size`` records, without gradients by x."""
    size = max(len(x), 1) if size is None else size
    for start in range(0, len(x), size):
        yield x[start : start + size].detach(), y[start : start + size]


@contextmanager
def _only_trainable(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let exactly these parameters require gradients inside the block."""
    chosen = {id(parameter) for parameter in parameters.values()}
    own = list(module.parameters())
    if not chosen <= {id(parameter) for parameter in own}:
        raise ValueError("a parameter to differentiate by does not belong to the module")
    if len(chosen) < len(parameters):
        raise ValueError("a parameter to differentiate by is given under two names")
    changed = [p for p in own if p.requires_grad != (id(p) in chosen)]
    try:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)


def _check_arguments(
    x: Tensor,
    y: Tensor,
    max_norm: float,
    micro_batch_size: int | None,
    class_factors: Tensor | None,
) -> None:
    if len(x) != len(y):
        raise ValueError(f"expected one label per record, got {len(x)} records, {len(y)} labels")
    if not SMALLEST_MAX_NORM <= max_norm < math.inf:
        raise ValueError(f"max_norm must be at least 1e-100 and finite, got {max_norm}")
    if micro_batch_size is not None and micro_batch_size < 1:
        raise ValueError(f"micro_batch_size must be at least 1, got {micro_batch_size}")
    if class_factors is not None and not bool(((class_factors > 0) & (class_factors <= 1)).all()):
        raise ValueError(f"class_factors must be in (0, 1], got {class_factors.tolist()}")
