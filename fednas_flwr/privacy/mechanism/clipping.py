"""Sums over a batch of per-sample gradients, each clipped to a norm; noise is added to them.

``S = sum_i f_i min(1, R / ||g_i||) g_i`` (DP-SGD: Abadi et al. 2016, arXiv 1607.00133, Alg. 1;
DP-FNAS: arXiv 2110.11025, Eq. 3 and 4 before noise and averaging), where g_i is the gradient of the
loss of record i with respect to all named parameters together. :func:`clipped_gradient_sum` takes
it for the weights of a module, :func:`clipped_alpha_gradient_sum` for the alphas of a supernet.
There is no noise, sampling or accounting here. The sums are private only once noise of std ``sigma
* R`` is added to them.

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

    Rounding: norms and factors are float64 whatever the module computes in, so that a record
    contributes at most ``R (1 + 1e-14)``. Contributions are cut to multiples of a unit of 2^-40 R
    or little more, whose sums are exact (``micro_batches``): S is the same in any order and in any
    micro-batches. For a large linear layer, whose contributions are outer products, each of the two
    factors is cut instead, in steps of 2^-20 of its largest possible norm. That a kernel rounds the
    gradient of a record alike whatever else is in the batch is not promised by torch. With weights
    that cancel, a last bit reverses gradients, so it is needed: give a ``micro_batch_size`` that
    the self-test allows (``self_test``), or 1. Without one S may move by more than R.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from fednas_flwr.base.layers import own_linear_layers
from fednas_flwr.privacy.mechanism import micro_batches as mb
from fednas_flwr.privacy.mechanism import record_gradients as rg
from fednas_flwr.privacy.self_test import Watch, unwatched
from fednas_flwr.settings.parser import Between, Checked, Where

Named = Mapping[str, Tensor]  # tensors by name
COLUMNS = 2048  # columns of gradients that are converted to float64 at a time
SMALLEST_MAX_NORM = 1e-100  # squares of much smaller numbers underflow in float64


class Relaxation(NamedTuple):
    """The way in which alphas enter a supernet.

    Attributes:
        op_weights: Argument of the supernet, [E, K] by kind of cell: the weights of all K = O ops,
            or the gates of those that are computed.
        by_alphas: Given a kind and the gradients by its op weights, float64 [B, E, K], returns the
            gradients by its alphas, [B, E, O], record by record.
    """

    op_weights: Named
    by_alphas: Callable[[str, Tensor], Tensor]


def clipped_gradient_sum(
    module: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss: rg.Loss,
    parameters: rg.Parameters,
    **terms: Any,
) -> mb.ClippedSum:
    """Return ``sum_i f_i min(1, R / ||g_i||) g_i`` over a batch, by parameter name.

    g_i is the gradient of one record's loss with respect to all of ``parameters``, and ||g_i|| its
    norm over all of them. Every record gets a copy of the weights, in a leaf [B, ...] of stride 0,
    so that one ordinary backward returns all g_i (``fednas_flwr.base.layers``). This needs
    convolutions, linear layers and group norms, or a module that ``takes_stack`` (a supernet); for
    any other module Opacus' hooks return the g_i. The module, the parameters' ``requires_grad`` and
    their ``.grad`` are left as they were.

    Args:
        module: Network in training mode; called with x alone.
        x: Features [B, ...].
        y: Labels int64 [B].
        loss: Called with the module's output and labels; returns one loss per record, not a mean.
        parameters: The module's parameters to differentiate by, under the names of the result; all
            others (frozen alphas) are held fixed.
        **terms: Fields of :class:`Clipping`: R and possibly more.

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
    clipping = Clipping(**terms)
    with _only_trainable(module, parameters):
        gradients = rg.record_gradients(module, parameters, loss, clipping.watch)
        return clipping.sum(x, y, gradients, parameters)


def clipped_alpha_gradient_sum(
    supernet: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss: rg.Loss,
    alphas: Named,
    relaxation: Relaxation | None = None,
    **terms: Any,
) -> mb.ClippedSum:
    """Return ``sum_i f_i min(1, R / ||h_i||) h_i`` over a batch, by kind of cell.

    h_i is the first-order gradient of one record's loss with respect to the alphas of all kinds,
    with one joint norm; the weights are held fixed. Every record gets op weights ``w_i =
    softmax(alphas)`` of its own, in a leaf [B, E, O] that all cells of a kind read. So one backward
    returns ``v_i = dL_i / dw_i``, summed over cells, and the softmax's Jacobian gives ``h_i = w
    (v_i - sum_o w v_i)``. This costs as much as the plain gradient of the alphas. Another
    ``relaxation`` has other w_i and another Jacobian.

    Args:
        supernet: Called with x and op weights [B, E, K] by kind of cell; returns logits.
        x: Features [B, ...].
        y: Labels int64 [B].
        loss: As for :func:`clipped_gradient_sum`.
        alphas: Architecture parameters [E, O] by kind of cell.
        relaxation: Chosen without looking at records; None is the softmax over all ops.
        **terms: As for :func:`clipped_gradient_sum`.

    Returns:
        float64 tensors shaped like the alphas, on their device. Nothing else is changed.

    Raises:
        ValueError: As for :func:`clipped_gradient_sum`, but any mode is allowed.

    Guarantee: sensitivity R under adding or removing one record; see the head of this module.
    """
    clipping = Clipping(**terms)
    rg.refuse_batch_norm(supernet)
    op_weights, by_alphas = relaxation or _softmax(alphas)

    def gradients(x_B: Tensor, y_B: Tensor) -> list[rg.Group]:
        leaves = {
            kind: w_EK.detach().to(alphas[kind].dtype).repeat(len(x_B), 1, 1).requires_grad_()
            for kind, w_EK in op_weights.items()
        }
        losses_B = rg.losses_of(supernet(x_B, leaves), y_B, loss, clipping.watch)
        found = rg.differentiate(losses_B, leaves)
        return [([kind], by_alphas(kind, grad_BEK.double())) for kind, grad_BEK in found.items()]

    with _only_trainable(supernet, {}), own_linear_layers(supernet), torch.enable_grad():
        return clipping.sum(x, y, gradients, alphas)


def _are_shares(factors: Tensor) -> bool:
    return bool(((factors > 0) & (factors <= 1)).all())


@dataclass(frozen=True)
class Clipping(Checked):
    """Terms of a clipped sum over records.

    Attributes:
        max_norm: R, at least 1e-100 and finite.
        micro_batch_size: Number of records that are computed at a time. Made-up records, which
            contribute nothing, fill the last micro-batch. None means all. It changes memory and
            rounding, not the sum.
        class_factors: Public factors f in (0, 1], one per class. They multiply after clipping,
            since clipping would cancel an earlier factor. None means 1.
        persons: The person of each record, int64 [B], ascending from 0. g_i and f_i are then means
            over the records of person i, whose presence changes the sum by at most R. All records
            must be in one micro-batch. None means that every record counts for itself.
        watch: Receives everything that the sum is made of, record by record, for the self-test.
    """

    max_norm: Annotated[float, Between(SMALLEST_MAX_NORM)]
    micro_batch_size: Annotated[int, Between(1)] | None = None
    class_factors: Annotated[Tensor, Where(_are_shares, "in (0, 1]")] | None = None
    persons: Tensor | None = None
    watch: Watch = unwatched

    def sum(self, x: Tensor, y: Tensor, gradients: rg.RecordGradients, by: Named) -> mb.ClippedSum:
        """Return the sum over records of their clipped gradients; zeros if there are none."""
        size, factors = self.micro_batch_size, self.class_factors
        if self.persons is not None and size is not None and len(x) > size:
            raise ValueError(f"{len(x)} records of persons must be in one micro-batch")
        sums: dict[str, Tensor] = {}
        for x_B, y_B, count in mb.micro_batches(x, y, size):
            factors_B = None if factors is None else factors.to(y_B.device)[y_B]
            parts = self._clipped_sum(gradients(x_B, y_B), by, factors_B, count)
            for name, part in parts.items():
                sums[name] = sums[name] + part if name in sums else part
        tensors = {
            name: mb.from_units(sums[name], bound=self.max_norm)
            if name in sums
            else torch.zeros_like(tensor, dtype=torch.float64)
            for name, tensor in by.items()
        }
        return mb.ClippedSum(tensors, norm=self.max_norm)

    def _clipped_sum(
        self, gradients: Sequence[rg.Group], parameters: Named, factors_B: Tensor | None, count: int
    ) -> dict[str, Tensor]:
        """Return the clipped sum of the gradients of B rows, in units, by name.

        The first ``count`` rows are records; ``factors_B`` are their public factors. Columns of [B,
        P] are converted to float64 in parts that fit the cache; small gradients are joined first.
        """
        if not gradients:
            return {}
        outer: dict[str, rg.OuterProducts] = {}
        whole: list[tuple[list[str], Tensor]] = []
        for group, gradient in gradients:
            if isinstance(gradient, Tensor):
                whole.append((group, gradient))
            elif self.persons is None:
                outer[group[0]] = gradient
            else:  # a mean of outer products is not an outer product
                whole.append((group, gradient.products()))
        whole.sort(key=lambda both: both[1].shape[1:].numel())
        names = [name for group, _ in whole for name in group]
        flat = [gradient.flatten(1) for _, gradient in whole]
        small = [matrix for matrix in flat if matrix.shape[1] < COLUMNS]
        if small:
            flat = [torch.cat(small, dim=1), *flat[len(small) :]]
        parts = [part for matrix in flat for part in torch.split(matrix, COLUMNS, dim=1)]
        for shown in (*parts, *(factor for pair in outer.values() for factor in pair)):
            self.watch(shown)
        if self.persons is not None:
            parts = [mb.person_means(part, self.persons) for part in parts]
        norms = [_norms(part) for part in parts]
        norms += [_norms(left_BO) * _norms(right_BI) for left_BO, right_BI in outer.values()]
        scales_B = self._scales(norms, factors_B, count)
        by_name, sums, contributes = {}, [], []

        def show(contribution: Tensor) -> None:
            if self.watch is not unwatched:
                self.watch(contribution)
                contributes.append(contribution.flatten(1).any(1, keepdim=True))

        for name, (left_BO, right_BI) in outer.items():
            by_name[name], *cut = mb.sum_in_units(
                left_BO, right_BI, bound=self.max_norm, factors_B=scales_B
            )
            for factor in cut:
                show(factor)
        for part in parts:
            units = mb.in_units(part, bound=self.max_norm, factors_B=scales_B)
            show(units)
            sums.append(units.sum(0))
        if contributes:
            self.watch(torch.stack(contributes).any(0))
        sizes = [parameters[name].numel() for name in names]
        pieces = torch.split(torch.cat(sums), sizes) if sums else ()
        by_name |= dict(zip(names, pieces, strict=True))
        return {name: piece.view(parameters[name].shape) for name, piece in by_name.items()}

    def _scales(self, norms: list[Tensor], factors_B: Tensor | None, count: int) -> Tensor:
        """Return the factors of rows with these norms of parts, float64 [B]; 0 omits a row.

        Omitted are rows that are no records, and records (or persons) whose gradient is not finite.
        """
        if self.persons is not None:
            count = int(self.persons.max()) + 1 if count else 0
            if factors_B is not None:
                factors_B = mb.person_means(factors_B[:, None], self.persons)[:, 0]
        norms_B = torch.linalg.vector_norm(torch.stack(norms, dim=1), dim=1)
        scale_B: Tensor = (self.max_norm / norms_B).clamp(max=1.0)  # R / 0 = inf: factor 1
        if factors_B is not None:
            scale_B = scale_B * factors_B.to(scale_B)
        scale_B = scale_B.where(norms_B.isfinite(), 0.0)
        scale_B[count:] = 0.0
        return scale_B


def _norms(rows: Tensor) -> Tensor:
    """Return the norms of rows [B, ...], float64 [B]."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def _softmax(alphas: Named) -> Relaxation:
    """Return the relaxation of DARTS: all ops, weighted by ``softmax(alphas)``."""
    weights = {kind: a_EO.detach().double().softmax(dim=-1) for kind, a_EO in alphas.items()}

    def by_alphas(kind: str, gradients_BEO: Tensor) -> Tensor:
        w_EO = weights[kind]
        return w_EO * (gradients_BEO - (w_EO * gradients_BEO).sum(-1, keepdim=True))

    return Relaxation(weights, by_alphas)


@contextmanager
def _only_trainable(module: nn.Module, parameters: rg.Parameters) -> Iterator[None]:
    """Let exactly these parameters require gradients inside the block."""
    chosen = {id(parameter) for parameter in parameters.values()}
    every = list(module.parameters())
    if not chosen <= {id(parameter) for parameter in every}:
        raise ValueError("a parameter to differentiate by does not belong to the module")
    if len(chosen) < len(parameters):
        raise ValueError("a parameter to differentiate by is given under two names")
    changed = [p for p in every if p.requires_grad != (id(p) in chosen)]
    try:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(not parameter.requires_grad)
