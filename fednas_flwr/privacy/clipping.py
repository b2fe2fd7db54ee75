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

Tensor suffixes: B records of a micro-batch, E edges, O ops.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_handlers = logging.root.handlers[:]
from opacus.grad_sample import GradSampleModule  # type: ignore[import-untyped]  # noqa: E402
from opacus.validators import ModuleValidator  # type: ignore[import-untyped]  # noqa: E402

logging.root.handlers[:] = _handlers  # Opacus adds one to the root logger when it is imported

Loss = Callable[[Tensor, Tensor], Tensor]  # (output of the module, labels [B]) -> losses [B]

SMALLEST_MAX_NORM = 1e-100  # squares of much smaller numbers vanish in float64


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
    joint norm is taken. A module that takes its weights per record (``takes_stack``: a supernet
    with the fast engine) is given a leaf [B, ...] of them, and one ordinary backward returns all
    g_i. Of any other module per-sample gradients come from Opacus' hooks, which are removed again:
    the module, the parameters' ``requires_grad`` and their ``.grad`` are left as they were.

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
    _refuse_batch_norm(module)
    sums = _zeros(parameters)
    per_record = _from_leaves if getattr(module, "takes_stack", False) else _from_hooks
    with _only_trainable(module, parameters), per_record(module, parameters, loss) as gradients:
        for x_B, y_B in _micro_batches(x, y, micro_batch_size):
            _add_clipped(
                sums, gradients(x_B, y_B), max_norm=max_norm, factors_B=_factors(class_factors, y_B)
            )
    return sums


def clipped_alpha_gradient_sum(
    supernet: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    loss: Loss,
    alphas: Mapping[str, Tensor],
    max_norm: float,
    micro_batch_size: int | None = None,
    class_factors: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return ``sum_i f_i min(1, R / ||h_i||) h_i`` over a batch, by kind of cell.

    h_i is the first-order gradient of one record's loss with respect to the alphas of all kinds,
    of which one joint norm is taken; the weights are held fixed. Every record gets op weights
    ``w_i = softmax(alphas)`` of its own, in a leaf [B, E, O] that all cells of a kind read. So one
    backward returns ``v_i = dL_i / dw_i``, summed over cells, and the softmax's Jacobian gives
    ``h_i = w (v_i - sum_o w v_i)``. This costs what the plain gradient of the alphas costs.

    Args:
        supernet: Called with x and op weights [B, E, O] by kind of cell; returns logits.
        x: Features [B, ...].
        y: Labels int64 [B].
        loss: As for :func:`clipped_gradient_sum`.
        alphas: Architecture parameters [E, O] by kind of cell.
        max_norm: R, at least 1e-100 and finite.
        micro_batch_size: As for :func:`clipped_gradient_sum`.
        class_factors: As for :func:`clipped_gradient_sum`.

    Returns:
        float64 tensors shaped like the alphas, on their device. Nothing else has changed.

    Raises:
        ValueError: As for :func:`clipped_gradient_sum`, but any mode will do.

    Guarantee: sensitivity R under adding or removing one record; see the head of this module.
    """
    _check_arguments(x, y, max_norm, micro_batch_size, class_factors)
    _refuse_batch_norm(supernet)
    sums = _zeros(alphas)
    weights = {kind: a_EO.detach().double().softmax(dim=-1) for kind, a_EO in alphas.items()}
    with _only_trainable(supernet, {}), torch.enable_grad():
        for x_B, y_B in _micro_batches(x, y, micro_batch_size):
            leaves = {
                kind: w_EO.to(alphas[kind].dtype).repeat(len(x_B), 1, 1).requires_grad_()
                for kind, w_EO in weights.items()
            }
            gradients = [
                ([kind], _through_softmax(gradient_BEO.double(), weights[kind]))
                for kind, gradient_BEO in _differentiate(
                    _losses(supernet(x_B, leaves), y_B, loss), leaves
                ).items()
            ]
            _add_clipped(sums, gradients, max_norm=max_norm, factors_B=_factors(class_factors, y_B))
    return sums


# Gradients of several parameters of one shape, joined along dim 0: their names, and [B, ...].
_Group = tuple[list[str], Tensor]


class RecordWeights:
    """Joins parameters like ``torch.cat``, with a copy of the result for each of B records.

    Attributes:
        groups: What was joined: the parameters and their leaf [B, ...].
    """

    def __init__(self, num_records: int) -> None:
        """Join nothing yet."""
        self.num_records = num_records
        self.groups: list[tuple[tuple[Tensor, ...], Tensor]] = []

    def __call__(self, parameters: list[Tensor]) -> Tensor:
        """Return a leaf of stride 0, which takes no memory before its gradient is there."""
        joined = torch.cat([parameter.detach() for parameter in parameters])
        leaf = joined.expand(self.num_records, *joined.shape).requires_grad_()
        self.groups.append((tuple(parameters), leaf))
        return leaf


@contextmanager
def _from_leaves(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], loss: Loss
) -> Iterator[Callable[[Tensor, Tensor], list[_Group]]]:
    """Yield a function from a batch to the gradients of its records, by one plain backward."""
    names = {id(parameter): name for name, parameter in parameters.items()}

    def gradients(x_B: Tensor, y_B: Tensor) -> list[_Group]:
        with torch.enable_grad():
            stack = RecordWeights(len(x_B))
            losses_B = _losses(module(x_B, stack=stack), y_B, loss)
            used = [id(parameter) for group, _ in stack.groups for parameter in group]
            if sorted(used) != sorted(names):
                raise RuntimeError(
                    "no per-sample gradients: the module does not use each parameter exactly once"
                )
            leaves = {str(i): leaf for i, (_, leaf) in enumerate(stack.groups)}
            reached = _differentiate(losses_B, leaves)
        return [
            ([names[id(parameter)] for parameter in group], reached[str(i)])
            for i, (group, _) in enumerate(stack.groups)
            if str(i) in reached
        ]

    yield gradients


class _PerSampleModule(GradSampleModule):  # type: ignore[misc]
    """Opacus' hooks without two silent errors of theirs (as of version 1.6.0)."""

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """Name every module once; one with two paths would get two hooks and twice its gradient."""
        return dict.fromkeys(super().iterate_submodules(module))

    def rearrange_grad_samples(self, **arguments: Any) -> tuple[list[Tensor], Tensor]:
        """Return activations with the strides of a plain NCHW tensor, and output gradients.

        Opacus unfolds a convolution's input by ``as_strided`` and assumes these strides: with
        channels-last inputs its gradients are wrong. ``contiguous`` would keep those of 1x1 maps.
        """
        activations, backprops = super().rearrange_grad_samples(**arguments)
        return [tensor.flatten().view(tensor.shape) for tensor in activations], backprops


@contextmanager
def _from_hooks(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], loss: Loss
) -> Iterator[Callable[[Tensor, Tensor], list[_Group]]]:
    """Yield the same for any module, with Opacus' hooks, of which nothing remains after the block.

    Opacus' own clean-up leaves activations of dead branches and the mark of a full backward hook.
    """
    _check_module(module, parameters)
    modules = list(module.modules())
    marks = [submodule._is_full_backward_hook for submodule in modules]
    owners: list[nn.Module | nn.Parameter] = [*modules, *module.parameters()]
    names = [set(vars(owner)) for owner in owners]
    hooked = None
    try:
        hooked = _PerSampleModule(module, loss_reduction="sum")
        yield partial(_hooked_gradients, hooked, parameters, loss)
    finally:
        if hooked is not None:
            hooked.remove_hooks()
        for owner, before in zip(owners, names, strict=True):
            for name in set(vars(owner)) - before:
                delattr(owner, name)
        for submodule, mark in zip(modules, marks, strict=True):
            submodule._is_full_backward_hook = mark


def _hooked_gradients(
    hooked: GradSampleModule,
    parameters: Mapping[str, nn.Parameter],
    loss: Loss,
    x_B: Tensor,
    y_B: Tensor,
) -> list[_Group]:
    """Return the gradients [B, ...] of all parameters that the loss reaches."""
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        # Not backward(), which would add to .grad. Of the sums only the names are used.
        reached = _differentiate(_losses(hooked(x_B), y_B, loss), parameters)
    gradients = []
    for name in reached:
        gradient = parameters[name].grad_sample  # type: ignore[attr-defined]
        if gradient is None or gradient.shape != (len(x_B), *parameters[name].shape):
            raise RuntimeError(f"Opacus has no per-sample gradient of every use of {name}")
        gradients.append(([name], gradient))
    for parameter in parameters.values():
        parameter.grad_sample = None  # type: ignore[attr-defined]
        parameter._forward_counter = 0  # type: ignore[attr-defined]
    for submodule in hooked.modules():  # calls that the loss did not reach would be waiting here
        vars(submodule).pop("activations", None)
        vars(submodule).pop("max_batch_len", None)
    return gradients


def _differentiate(losses_B: Tensor, by: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of the losses' sum by each tensor that it depends on."""
    if not losses_B.requires_grad:
        return {}
    gradients = torch.autograd.grad(losses_B.sum(), list(by.values()), allow_unused=True)
    return {n: g for n, g in zip(by, gradients, strict=True) if g is not None}


def _add_clipped(
    sums: dict[str, Tensor],
    gradients: list[_Group],
    *,
    max_norm: float,
    factors_B: Tensor | None,
) -> None:
    """Add the clipped sum of per-sample gradients to ``sums``; empties ``gradients``."""
    if not gradients:
        return
    norms = [
        torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=torch.float64) for _, g in gradients
    ]
    norms_B = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    keep_B = norms_B.isfinite()
    scale_B = (max_norm / norms_B).clamp(max=1.0)  # R / 0 = inf: factor 1
    if factors_B is not None:
        scale_B = scale_B * factors_B.to(scale_B)
    scale_B = scale_B.where(keep_B, 0.0)
    while gradients:
        names, gradient = gradients.pop()
        kept = gradient.flatten(1).where(keep_B[:, None], 0.0)  # 0 * inf would be NaN
        total = scale_B @ kept.double()
        for name, part in zip(names, total.chunk(len(names)), strict=True):
            sums[name] += part.view_as(sums[name])


def _through_softmax(gradients_BEO: Tensor, weights_EO: Tensor) -> Tensor:
    """Return the gradients by the alphas, from those by ``weights = softmax(alphas)``."""
    mean_BE1 = (weights_EO * gradients_BEO).sum(-1, keepdim=True)
    return weights_EO * (gradients_BEO - mean_BE1)


def _losses(output: Tensor, y_B: Tensor, loss: Loss) -> Tensor:
    losses_B = loss(output, y_B)
    if losses_B.shape != (len(y_B),):
        shape = tuple(losses_B.shape)
        raise ValueError(f"the loss must be one number per record, [{len(y_B)}], got {shape}")
    return losses_B


def _factors(class_factors: Tensor | None, y_B: Tensor) -> Tensor | None:
    return None if class_factors is None else class_factors.to(y_B.device)[y_B]


def _micro_batches(x: Tensor, y: Tensor, size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield consecutive slices of at most ``size`` records, without gradients by x."""
    size = max(len(x), 1) if size is None else size
    for start in range(0, len(x), size):
        yield x[start : start + size].detach(), y[start : start + size]


def _zeros(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
        for name, parameter in parameters.items()
    }


@contextmanager
def _only_trainable(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Let exactly these parameters require gradients inside the block."""
    chosen = {id(parameter) for parameter in parameters.values()}
    before = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    try:
        for parameter, _ in before:
            parameter.requires_grad_(id(parameter) in chosen)
        yield
    finally:
        for parameter, required in before:
            parameter.requires_grad_(required)


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


def _refuse_batch_norm(module: nn.Module) -> None:
    """Raise ValueError for layers that keep or use statistics of the batch, trainable or not.

    Opacus' validator looks at trainable layers alone, and a supernet's norms have no weights.
    """
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.modules.batchnorm._BatchNorm) or (
            isinstance(submodule, nn.modules.batchnorm._NormBase) and submodule.track_running_stats
        ):
            raise ValueError(
                f"{name or 'the module'} is batch normalisation or keeps running statistics, which "
                "mixes the records of a batch: a private run needs group normalisation "
                "(search_space.norm=group)."
            )


def _check_module(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ValueError for what per-sample gradients cannot be taken of.

    All checks are of the structure: an error that depended on the records would be a release.
    """
    _refuse_batch_norm(module)
    for error in [*ModuleValidator.validate(module), *GradSampleModule.validate(module)]:
        raise ValueError(f"no per-sample gradients of this network: {error}")
    own = {id(parameter) for parameter in module.parameters()}
    for name, parameter in parameters.items():
        if id(parameter) not in own:
            raise ValueError(f"parameter {name} does not belong to the module")
    for name, submodule in module.named_modules():
        direct = any(parameter.requires_grad for parameter in submodule.parameters(recurse=False))
        if direct and next(submodule.children(), None) is not None:
            raise ValueError(
                f"{name or 'the module'} has parameters of its own beside submodules, whose "
                "gradients Opacus may count twice: put them into a submodule."
            )
