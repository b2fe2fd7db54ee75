"""Per-sample gradients of any module by Opacus' hooks, for what `base.layers` lacks."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.layers import own_linear_layers
from fednas_flwr.privacy.mechanism.record_losses import (
    Group,
    Loss,
    RecordGradients,
    differentiate,
    losses_of,
)

_handlers = logging.root.handlers[:]
from opacus.grad_sample import GradSampleModule  # type: ignore[import-untyped]  # noqa: E402
from opacus.validators import ModuleValidator  # type: ignore[import-untyped]  # noqa: E402

logging.root.handlers[:] = _handlers  # Opacus adds one to the root logger when it is imported


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
def from_hooks(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], loss: Loss
) -> Iterator[RecordGradients]:
    """Yield a function from a batch to the gradients of its records; no hook remains afterwards.

    Opacus' own clean-up leaves activations of dead branches and the mark of a full backward hook.
    """
    _check(module)
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
) -> list[Group]:
    """Return the gradients [B, ...] of all parameters that the loss reaches."""
    own = own_linear_layers(hooked)  # which round all rows alike
    with torch.enable_grad(), warnings.catch_warnings(), own:
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        # Not backward(), which would add to .grad. Of the sums only the names are used.
        reached = differentiate(losses_of(hooked(x_B), y_B, loss), parameters)
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


def _check(module: nn.Module) -> None:
    """Raise ValueError for what Opacus' hooks cannot count right."""
    for error in [*ModuleValidator.validate(module), *GradSampleModule.validate(module)]:
        raise ValueError(f"no per-sample gradients of this network: {error}")
    for name, submodule in module.named_modules():
        direct = any(parameter.requires_grad for parameter in submodule.parameters(recurse=False))
        if direct and next(submodule.children(), None) is not None:
            raise ValueError(
                f"{name or 'the module'} has parameters of its own beside submodules, whose "
                "gradients Opacus may count twice: put them into a submodule."
            )
