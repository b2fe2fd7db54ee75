"""Losses of the records of a batch, and their gradients: shared by both ways to records' gradients.

Tensor suffixes: B records of a batch, I inputs and O outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]  # (output of the module, labels [B]) -> losses [B]


class OuterProducts(NamedTuple):
    """Gradients [B, O, I] of a linear layer: one product of two vectors per record.

    Attributes:
        left_BO: Gradients by what the layer has returned.
        right_BI: What it was given.
    """

    left_BO: Tensor
    right_BI: Tensor

    def products(self) -> Tensor:
        """Return them as they are, [B, O, I]."""
        return self.left_BO[:, :, None] * self.right_BI[:, None, :]


# Names of parameters of one shape, and their gradients, joined along dim 1, [B, ...].
Group = tuple[list[str], Tensor | OuterProducts]
RecordGradients = Callable[[Tensor, Tensor], list[Group]]  # of features [B, ...] and labels [B]


def differentiate(losses_B: Tensor, by: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of the losses' sum by each tensor that it depends on."""
    if not losses_B.requires_grad:
        return {}
    gradients = torch.autograd.grad(losses_B.sum(), list(by.values()), allow_unused=True)
    return {n: g for n, g in zip(by, gradients, strict=True) if g is not None}


def losses_of(output: Tensor, y_B: Tensor, loss: Loss) -> Tensor:
    """Return the losses [B]; raises ValueError if the loss returns anything else."""
    losses_B = loss(output, y_B)
    if losses_B.shape != (len(y_B),):
        shape = tuple(losses_B.shape)
        raise ValueError(f"the loss must be one number per record, [{len(y_B)}], got {shape}")
    return losses_B
