"""Exact gradients of the next batches: what clients without privacy train by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, count, islice, repeat
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fednas_flwr.privacy.mechanism.clipping import clipped_gradient_sum
from fednas_flwr.search import batch_gradients as bg
from fednas_flwr.search.candidate import Pool, Relaxed, by_member
from fednas_flwr.search.optimizer_step import Gradient, Optimizer, Tensors, trainable_weights
from fednas_flwr.search.proxyless import alpha_gradient, gate_gradient
from fednas_flwr.settings.names import BFLOAT16, FLOAT32
from fednas_flwr.settings.optimizers import DPAware
from fednas_flwr.spaces.costs import HardwareLoss
from fednas_flwr.spaces.mbconv import CELL
from fednas_flwr.spaces.space import Supernet

MICRO_BATCH = 128  # records whose gradients are in memory at a time
Passes = Callable[[], Iterator[bg.Batch]]  # begins another pass over some records


@dataclass
class ExactGradients(bg.BatchGradients):
    """Mean gradients of batches, a new one of each kind in every step; tallies of the last pass.

    Attributes:
        train: Function that begins a pass over train records.
        validation: Function that begins a pass over validation records, as many as the steps of a
            pass over the train records need; None where alphas stay.
        epochs: Passes over the train records, where no number of steps is given.
        num_steps: Number of steps, over as many passes as they need; None takes ``epochs``.
        train_batch: The train batch of the step.
        validation_batch: Its validation batch, where there are validation records.
    """

    train: Passes
    validation: Passes | None = None
    _: KW_ONLY
    epochs: int | None = 1
    num_steps: int | None = None
    train_batch: bg.Batch = field(init=False)
    validation_batch: bg.Batch = field(init=False)
    _validation_batches: Iterator[bg.Batch] = field(default=iter(()), init=False)

    def steps(self) -> Iterator[None]:
        """Yield once for every train batch."""
        for batch in islice(chain.from_iterable(self._passes()), self.num_steps):
            self.train_batch = batch
            if self.validation is not None:
                self.validation_batch = next(self._validation_batches)
            yield

    def _passes(self) -> Iterator[Iterator[bg.Batch]]:
        """All passes over the train records."""
        for _ in range(self.epochs or 0) if self.num_steps is None else count():
            self.train_tally, self.validation_tally = bg.Tally(), bg.Tally()
            if self.validation is not None:
                self._validation_batches = chain.from_iterable(p() for p in repeat(self.validation))
            yield self.train()

    def weights(self, network: nn.Module) -> Gradient:
        """The gradient on the step's train batch; of a pool each member's."""
        if isinstance(network, Pool):
            return by_member(network, self.weights)
        with computed_in(self.precision, self.train_batch):
            return self.weight_gradient(network, self.train_batch)

    def alphas(
        self, supernet: Relaxed, weights: Optimizer, *, rule: str, validation_weight: float
    ) -> Gradient:
        """The gradient of the alphas by any rule."""
        precision = FLOAT32 if rule == "second_order" else self.precision
        with computed_in(precision, self.validation_batch):
            gradient, losses = self._alphas(supernet, weights, rule, validation_weight)
        self.validation_tally.add(losses)
        return gradient

    def _alphas(
        self, supernet: Relaxed, weights: Optimizer, rule: str, validation_weight: float
    ) -> tuple[Tensors, Tensor]:
        """The gradient, and the losses [B] of the validation batch."""
        batches = {"train_batch": self.train_batch, "validation_batch": self.validation_batch}
        if rule == "first_order":
            sums, losses = self.alpha_gradient_sum(supernet, self.validation_batch)
            return {kind: g / len(losses) for kind, g in sums.items()}, losses
        if rule == "mixed_level":
            return self.mixed_level_gradient(
                supernet, **batches, validation_weight=validation_weight
            )
        optimizer = weights.torch_optimizer
        return self.second_order_gradient(
            supernet,
            **batches,
            weights=supernet.weights(),
            virtual_weights=self.virtual_step(supernet, self.train_batch, optimizer=optimizer),
            inner_lr=optimizer.param_groups[0]["lr"],
        )

    def gates(self, supernet: Supernet, paths_EK: Tensor, hardware: HardwareLoss | None) -> Tensor:
        """The gradient [E, O] of the alphas on the step's validation batch."""
        batch = self.validation_batch
        with computed_in(self.precision, batch):
            gradients_EK, losses = gate_gradient(
                supernet, batch, paths_EK, hardware=hardware, objective=self.objective
            )
        self.validation_tally.add(losses)
        return alpha_gradient(gradients_EK, supernet.alphas()[CELL], paths_EK)


@dataclass(kw_only=True)
class ClippedGradients(ExactGradients):
    """DP-SGD's gradient, ``(sum_i clip(g_i) + C N(0, sigma^2 I)) / B``, as a regulariser.

    It protects nobody: batches are not drawn by Poisson sampling, the noise follows from the run's
    seed, and nothing is booked.

    Attributes:
        dp_aware: Clipping norm and noise.
        generator: Source of the noise; on the CPU.
    """

    dp_aware: DPAware
    generator: torch.Generator

    def weights(self, network: nn.Module) -> dict[str, Tensor | None]:
        """The gradient on the step's train batch."""
        x, y = self.train_batch
        objective, clipping = self.objective, self.dp_aware

        def losses(logits: Tensor, labels: Tensor) -> Tensor:
            losses_B = objective.plain_losses(logits, labels)
            self.train_tally.add(losses_B, objective.hits(logits, labels))
            return losses_B

        parts = -(-len(x) // MICRO_BATCH)
        sums = clipped_gradient_sum(
            network,
            x,
            y,
            loss=losses,
            parameters=trainable_weights(network),
            max_norm=clipping.max_grad_norm,
            micro_batch_size=-(-len(x) // parts),
            class_factors=objective.class_factors,
        )
        std = clipping.noise_multiplier * clipping.max_grad_norm
        return {
            name: (
                total + std * torch.randn(total.shape, generator=self.generator).to(total.device)
            )
            / len(y)
            for name, total in sums.items()
        }


@dataclass
class ExactSums(bg.BatchGradients):
    """Sums of gradients over the next batches: what the clients of FNAS and FedSGD return.

    Attributes:
        train: The next train batches.
        validation: The next validation batches; None where no alphas are asked for.
        previous_weights: For alphas of second order (DP-FNAS, arXiv 2110.11025, Eq. 5), whose
            gradients are of batch means, times the batch size: W before the weights' last step, by
            name; None is first order.
        inner_lr: Learning rate of that step, above 0.
    """

    train: Iterator[bg.Batch]
    validation: Iterator[bg.Batch] | None = None
    previous_weights: Mapping[str, Tensor] | None = None
    inner_lr: float = 0.0

    def sums(self, state: str, network: nn.Module) -> tuple[Tensors, float]:
        """The sum of the gradients of ``weights`` or ``alphas`` and the batch size."""
        batches = self.train if state == "weights" else self.validation
        assert batches is not None
        batch = next(batches)
        second_order = state == "alphas" and self.previous_weights is not None
        with computed_in(FLOAT32 if second_order else self.precision, batch):
            return self._sums(state, network, batch), len(batch[1])

    def _sums(self, state: str, network: nn.Module, batch: bg.Batch) -> Tensors:
        """The sum over a batch."""
        if state == "weights":
            return self.weight_gradient_sum(network, batch)
        supernet = cast(Supernet, network)  # alphas are of one
        if self.previous_weights is None:
            sums, losses = self.alpha_gradient_sum(supernet, batch)
        else:
            means, losses = self.second_order_gradient(
                supernet,
                weights=self.previous_weights,
                virtual_weights=supernet.weights(),
                train_batch=next(self.train),
                validation_batch=batch,
                inner_lr=self.inner_lr,
            )
            sums = {kind: gradient * len(batch[1]) for kind, gradient in means.items()}
        self.validation_tally.add(losses)
        return sums


@contextmanager
def computed_in(precision: str, batch: bg.Batch) -> Iterator[None]:
    """Compute gradients of a batch in a precision, on its device, while in this context.

    With ``bfloat16`` torch's autocast computes convolutions and matrix products in it. Parameters,
    their gradients, losses and group norms stay float32, and so does the second order of alphas,
    whose finite difference would be lost in rounding.
    """
    if precision != BFLOAT16:
        yield
        return
    with torch.autocast(batch[0].device.type, torch.bfloat16), _Float32Norms():
        yield


class _Float32Norms(TorchFunctionMode):
    """Lets group norms be computed in float32, as autocast does on GPUs alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        if func is functional.group_norm:
            args = (args[0].float(), *args[1:])
        return func(*args, **(kwargs or {}))
