"""Local epochs of differentiable search on one client: an alpha step, then a weight step.

Three rules for the alpha step: ``first_order`` and ``second_order`` (DARTS, Liu et al., 2019,
Alg. 1) and ``mixed_level`` (MiLeNAS, the rule of FedNAS).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fednas_flwr.errors import unknown_choice
from fednas_flwr.search.architect import (
    alpha_gradient_sum,
    mixed_level_gradient,
    second_order_gradient,
    virtual_step,
)
from fednas_flwr.search.settings import RULES, SGD
from fednas_flwr.search.training import Batch, Tally, clip_gradients, record_losses
from fednas_flwr.search_spaces.space import Supernet


def search_epoch(
    supernet: Supernet,
    train_batches: Iterator[Batch],
    validation_batches: Iterator[Batch],
    *,
    rule: str,
    validation_weight: float,
    weight_settings: SGD,
    weight_optimizer: torch.optim.Optimizer,
    alpha_optimizer: torch.optim.Optimizer,
    class_factors: Tensor | None = None,
) -> tuple[Tally, Tally]:
    """Search for one pass over the training batches; each is paired with a validation batch.

    Args:
        supernet: Trained in place, weights and alphas.
        train_batches: Batches for the weights.
        validation_batches: At least as many batches for the alphas.
        rule: One of ``RULES``.
        validation_weight: Weight of the validation loss under ``mixed_level``.
        weight_settings: Gives clip norm and, under ``second_order``, the virtual step.
        weight_optimizer: SGD over the weights.
        alpha_optimizer: Adam over the alphas.
        class_factors: See ``training.record_losses``.

    Returns:
        Tallies of the training and of the validation batches, taken before the steps on them.
    """
    if rule not in RULES:
        raise unknown_choice("rule", rule, RULES)
    supernet.train()
    weights = list(supernet.weights().values())
    train_tally, validation_tally = Tally(), Tally()
    for train_batch, validation_batch in zip(train_batches, validation_batches, strict=False):
        gradients, losses = _alpha_gradient(
            supernet,
            train_batch,
            validation_batch,
            rule=rule,
            validation_weight=validation_weight,
            weight_settings=weight_settings,
            weight_optimizer=weight_optimizer,
            class_factors=class_factors,
        )
        for kind, alpha in supernet.alphas().items():
            alpha.grad = gradients[kind]
        alpha_optimizer.step()
        validation_tally.add(losses, None, validation_batch[1])

        x, y = train_batch
        logits = supernet(x)
        losses = record_losses(logits, y, class_factors)
        for weight, gradient in zip(
            weights,
            torch.autograd.grad(losses.mean(), weights, allow_unused=True),
            strict=True,
        ):
            weight.grad = gradient
        clip_gradients(weight_optimizer, weight_settings.clip_norm)
        weight_optimizer.step()
        train_tally.add(losses, logits, y)
    return train_tally, validation_tally


def _alpha_gradient(
    supernet: Supernet,
    train_batch: Batch,
    validation_batch: Batch,
    *,
    rule: str,
    validation_weight: float,
    weight_settings: SGD,
    weight_optimizer: torch.optim.Optimizer,
    class_factors: Tensor | None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradient of the alphas by the chosen rule, of batch means."""
    if rule == "first_order":
        sums, losses = alpha_gradient_sum(supernet, validation_batch, class_factors=class_factors)
        return {kind: g / len(validation_batch[1]) for kind, g in sums.items()}, losses
    if rule == "mixed_level":
        return mixed_level_gradient(
            supernet,
            train_batch=train_batch,
            validation_batch=validation_batch,
            validation_weight=validation_weight,
            class_factors=class_factors,
        )
    virtual_weights = virtual_step(
        supernet,
        train_batch,
        inner_lr=weight_settings.lr,
        momentum=weight_settings.momentum,
        weight_decay=weight_settings.weight_decay,
        optimizer=weight_optimizer,
        class_factors=class_factors,
    )
    return second_order_gradient(
        supernet,
        weights=supernet.weights(),
        virtual_weights=virtual_weights,
        train_batch=train_batch,
        validation_batch=validation_batch,
        inner_lr=weight_settings.lr,
        class_factors=class_factors,
    )
