"""The gradient of every record's loss in a batch, to be clipped before the gradients are added.

Every record gets a copy of the weights, in a leaf [B, ...] of stride 0; one ordinary backward then
returns one gradient per record (``fednas_flwr.base.layers``). Modules with layers that cannot do
this use Opacus' hooks. A large linear layer's gradients are kept as the factors of one outer
product per record.

Tensor suffixes: B records of a batch, I inputs and O outputs of a linear layer.
"""

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fednas_flwr.base import layers
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.privacy.self_test import Watch

Parameters = Mapping[str, nn.Parameter]  # by name
Loss = Callable[[Tensor, Tensor], Tensor]  # (output of the module, labels [B]) -> losses [B]


class OuterProducts(NamedTuple):
    """Gradients [B, O, I] of a linear layer: one product of two vectors per record.

    Attributes:
        left_BO: Gradients by the layer's outputs.
        right_BI: The layer's inputs.
    """

    left_BO: Tensor
    right_BI: Tensor

    def products(self) -> Tensor:
        """Return the products, [B, O, I]."""
        return self.left_BO[:, :, None] * self.right_BI[:, None, :]


# Names of parameters of one shape, and their gradients, joined along dim 1, [B, ...].
Group = tuple[list[str], Tensor | OuterProducts]
RecordGradients = Callable[[Tensor, Tensor], list[Group]]  # from features [B, ...] and labels [B]


def differentiate(losses_B: Tensor, by: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Return the gradient of the losses' sum by each tensor on which it depends."""
    if not losses_B.requires_grad:
        return {}
    gradients = torch.autograd.grad(losses_B.sum(), list(by.values()), allow_unused=True)
    return {n: g for n, g in zip(by, gradients, strict=True) if g is not None}


def losses_of(output: Any, y_B: Tensor, loss: Loss, watch: Watch) -> Tensor:
    """Return the losses [B], shown to ``watch``; raises ValueError if they have another form."""
    losses_B = loss(output, y_B)
    if losses_B.shape != (len(y_B),):
        shape = tuple(losses_B.shape)
        raise ValueError(f"the loss must be one number per record, [{len(y_B)}], got {shape}")
    for tensor in (*(output if isinstance(output, tuple) else (output,)), losses_B):
        watch(tensor)
    return losses_B


LARGE = 2048  # from this size of a linear layer's weight on, its gradients are kept as factors


class RecordWeights:
    """Joins parameters like ``torch.cat``, with a copy of the result for each of B records.

    Args:
        num_records: B.
        names: Names of the parameters that require gradients, by their ids.

    Attributes:
        leaves: The leaf [B, ...] for each tuple of names of joined parameters.
        factors: For each large linear layer's weight, by name, and each call: a leaf [B, O] whose
            gradient is that by the output, and the input [B, I].
    """

    def __init__(self, num_records: int, names: Mapping[int, str]) -> None:
        """Start without joined parameters."""
        self.num_records, self._names = num_records, names
        self.leaves: dict[tuple[str, ...], Tensor] = {}
        self.factors: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, parameters: list[Tensor]) -> Tensor:
        """Return a leaf of stride 0, which takes no memory before it has a gradient.

        If none of the parameters requires gradients, they are joined without copies.
        """
        if not any(parameter.requires_grad for parameter in parameters):
            return torch.cat(parameters)
        group = tuple(self._names[id(parameter)] for parameter in parameters)
        if group not in self.leaves:
            joined = torch.cat([parameter.detach() for parameter in parameters])
            self.leaves[group] = joined.expand(self.num_records, *joined.shape).requires_grad_()
        return self.leaves[group]

    def linear(self, x_BI: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output [B, O] of a layer whose gradients are kept as factors."""
        out_BO = layers.linear(x_BI, weight.detach(), bias)
        leaf_BO = torch.zeros_like(out_BO[:1, :1]).expand_as(out_BO).requires_grad_()
        self.factors.setdefault(self._names[id(weight)], []).append((leaf_BO, x_BI.detach()))
        return out_BO + leaf_BO


def record_gradients(
    module: nn.Module, parameters: Parameters, loss: Loss, watch: Watch
) -> RecordGradients:
    """Return a function from a batch to the gradients of its records.

    Parameters that the loss does not reach are omitted. Afterwards the module is as before.

    Args:
        module: The module in training mode; called with features alone. A module with
            ``takes_stack`` (a supernet of images) joins parameters with ``base.layers.stacked``.
        parameters: The module's parameters to differentiate by, which all require gradients; no
            other parameter does.
        loss: Called with the module's output and labels; one loss per record.
        watch: Receives outputs and losses.

    Raises:
        ValueError: The module has no per-sample gradients.
        RuntimeError: (from the function) A use of a parameter was missed.
    """
    refuse_batch_norm(module)
    if not module.training:
        raise ValueError("the module must be in training mode: call train() first")
    records = _Records(module, parameters, loss, watch)
    chosen = _layers(module, parameters)
    if any("forward" in vars(layer) for layer in chosen):
        raise ValueError("a layer's forward was replaced: per-sample gradients would miss it")
    if all(map(_is_covered, chosen)):
        return records.from_leaves
    if getattr(module, "takes_stack", False):
        raise ValueError(
            "an op of your own has layers whose gradients are not known for each record: build it "
            "of nn.Conv2d, nn.Linear and nn.GroupNorm."
        )
    _check(module)
    return records.from_hooks


def refuse_batch_norm(module: nn.Module) -> None:
    """Raise ConfigError for layers that keep or use statistics of the batch, trainable or not.

    Opacus' validator checks only trainable layers, and a supernet's norms have no weights. The
    check concerns only the structure, as an error that depended on the records would be a release.
    """
    for submodule in module.modules():
        if isinstance(submodule, nn.modules.batchnorm._BatchNorm) or (
            isinstance(submodule, nn.modules.batchnorm._NormBase) and submodule.track_running_stats
        ):
            name = next(name for name, other in module.named_modules() if other is submodule)
            raise ConfigError(
                f"{name or 'the module'} is batch normalisation or keeps running statistics, which "
                "mixes the records of a batch: a private run needs group normalisation "
                "(search_space.norm=group, or nn.GroupNorm in a network of your own)."
            )


@dataclass(frozen=True)
class _Records:
    """The arguments of :func:`record_gradients`, with the two ways to take gradients."""

    module: nn.Module
    parameters: Parameters
    loss: Loss
    watch: Watch

    def from_leaves(self, x_B: Tensor, y_B: Tensor) -> list[Group]:
        """Return the gradients of a batch's records, by one plain backward."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        stack = RecordWeights(len(x_B), names)
        with torch.enable_grad():
            with layers.stacking(stack), _computed_with(stack, self.module, self.parameters):
                output = self.module(x_B)
            by: dict[Any, Tensor] = {**stack.leaves, **self.parameters}
            for name, calls in stack.factors.items():
                by |= {(name, i): leaf_BO for i, (leaf_BO, _) in enumerate(calls)}
            reached = differentiate(losses_of(output, y_B, self.loss, self.watch), by)
        uses = Counter([*stack.factors, *(name for group in stack.leaves for name in group)])
        missed = [n for n in self.parameters if n in reached or uses[n] > 1]
        if missed:
            raise RuntimeError(f"no per-sample gradient of every use of {missed[0]}")
        found: list[Group] = [(list(of), reached[of]) for of in stack.leaves if of in reached]
        for name, calls in stack.factors.items():
            seen = [(reached.get((name, i)), x_BI) for i, (_, x_BI) in enumerate(calls)]
            several = [
                OuterProducts(left_BO, x_BI) for left_BO, x_BI in seen if left_BO is not None
            ]
            if len(several) == 1:
                found.append(([name], several[0]))
            elif several:
                one, *others = (each.products() for each in several)
                found.append(([name], sum(others, one)))
        return found

    def from_hooks(self, x_B: Tensor, y_B: Tensor) -> list[Group]:
        """Return the gradients of a batch's records, by Opacus' hooks; no attribute is changed."""
        parts = (*self.module.modules(), *self.module.parameters())
        before = [(part, dict(vars(part))) for part in parts]
        hooked = _hooks()[1](self.module, loss_reduction="sum")
        rounding = layers.own_linear_layers(self.module)  # they round all rows alike
        gradients: list[Group] = []
        try:
            with torch.enable_grad(), warnings.catch_warnings(), rounding:
                warnings.filterwarnings("ignore", message="Full backward hook is firing")
                losses_B = losses_of(hooked(x_B), y_B, self.loss, self.watch)
                # Not backward(), which would add to .grad. Only the names of the sums are used.
                reached = differentiate(losses_B, self.parameters)
            for name in reached:
                gradient = vars(self.parameters[name])["grad_sample"]
                if gradient is None or gradient.shape != (len(x_B), *self.parameters[name].shape):
                    raise RuntimeError(f"Opacus has no per-sample gradient of every use of {name}")
                gradients.append(([name], gradient))
        finally:
            hooked.remove_hooks()
            for part, attributes in before:
                vars(part).clear()
                vars(part).update(attributes)
        return gradients


def _is_covered(layer: nn.Module) -> bool:
    """Return True if ``fednas_flwr.base.layers`` can compute this layer."""
    if not set(layer._parameters) <= {"weight", "bias"}:
        return False
    if type(layer) is nn.Conv2d:
        return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) in (nn.Linear, nn.GroupNorm)


def _layers(module: nn.Module, parameters: Parameters) -> list[Any]:
    """Return the modules that hold the parameters themselves."""
    chosen = {id(parameter) for parameter in parameters.values()}
    return [
        submodule
        for submodule in module.modules()
        if any(id(parameter) in chosen for parameter in submodule._parameters.values())
    ]


def _computed_with(
    stack: RecordWeights, module: nn.Module, parameters: Parameters
) -> AbstractContextManager[None]:
    """Let layers compute, inside the block, with weights as ``stack`` returns them."""
    pools = [
        submodule
        for submodule in module.modules()
        if type(submodule) in (nn.MaxPool2d, nn.AvgPool2d) and "forward" not in vars(submodule)
    ]
    forwards = {layer: partial(_forward, layer, stack) for layer in _layers(module, parameters)}
    return layers.with_forwards(forwards | {pool: partial(_pool, pool, stack) for pool in pools})


def _pool(layer: Any, _: RecordWeights, x: Tensor) -> Tensor:
    """Return the usual result, computed with channels of all records innermost: faster on CPU."""
    if x.dim() != 4 or getattr(layer, "return_indices", False):
        return type(layer).forward(layer, x)
    B, C, H, W = x.shape
    x_SP = _Transposed.apply(x.reshape(B * C, H * W))
    x_1PHW = x_SP.view(1, H, W, B * C).permute(0, 3, 1, 2)
    out_1Phw = type(layer).forward(layer, x_1PHW)
    h, w = out_1Phw.shape[2:]
    out_PS = _Transposed.apply(out_1Phw.permute(0, 2, 3, 1).reshape(h * w, B * C))
    return out_PS.view(B, C, h, w)


class _Transposed(torch.autograd.Function):
    """A matrix transposed by a copy, which torch makes in blocks for matrices; this saves half."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        return matrix.t().contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        return grad.contiguous().t().contiguous()


def _forward(layer: Any, stack: RecordWeights, x: Tensor) -> Tensor:
    is_large = layer.weight.requires_grad and layer.weight.numel() >= LARGE
    if is_large and isinstance(layer, nn.Linear) and x.dim() == 2:
        return stack.linear(x, layer.weight, _own(layer.bias, stack))
    if isinstance(layer, nn.GroupNorm):
        weight, bias = _own(layer.weight, stack), _own(layer.bias, stack)
        return layers.group_norm(x, layer.num_groups, weight, bias, eps=layer.eps)
    return layers.computed(layer, x)


def _own(parameter: Any, stack: RecordWeights) -> Any:
    """Return copies, one per record, of a parameter to differentiate by; else the parameter."""
    return stack([parameter]) if parameter is not None and parameter.requires_grad else parameter


@cache
def _hooks() -> Any:
    """Return Opacus' validator, and its hooks without two silent errors (as of version 1.6.0).

    Opacus is imported here, as its 3 s should be spent only if hooks are needed.
    """
    handlers = logging.root.handlers[:]
    from opacus.grad_sample import GradSampleModule  # type: ignore[import-untyped]
    from opacus.validators import ModuleValidator  # type: ignore[import-untyped]

    logging.root.handlers[:] = handlers  # Opacus adds one to the root logger when it is imported

    class PerSampleModule(GradSampleModule):  # type: ignore[misc]
        """Hooks of every module."""

        def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
            """Return each module once; two paths would give it two hooks and twice its gradient."""
            return dict.fromkeys(super().iterate_submodules(module))

        def rearrange_grad_samples(self, **arguments: Any) -> tuple[list[Tensor], Tensor]:
            """Return activations with the strides of a plain NCHW tensor, and output gradients.

            Opacus unfolds a convolution's input by ``as_strided`` and assumes these strides: with
            channels-last inputs its gradients are wrong. ``contiguous`` would keep the strides of
            1x1 maps.
            """
            activations, backprops = super().rearrange_grad_samples(**arguments)
            return [tensor.flatten().view(tensor.shape) for tensor in activations], backprops

    return ModuleValidator, PerSampleModule


def _check(module: nn.Module) -> None:
    """Raise ValueError for modules whose gradients Opacus' hooks cannot compute correctly."""
    for error in [error for check in _hooks() for error in check.validate(module)]:
        raise ValueError(f"no per-sample gradients of this network: {error}")
    for name, submodule in module.named_modules():
        direct = any(parameter.requires_grad for parameter in submodule.parameters(recurse=False))
        if direct and next(submodule.children(), None) is not None:
            raise ValueError(
                f"{name or 'the module'} has parameters of its own beside submodules, whose "
                "gradients Opacus may count twice: put them into a submodule."
            )
