"""Gradients of batches by the weights of a supernet or of a derived network, and their tally."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.search.objective import CLASSIFICATION, Objective, heads
from fednas_flwr.search.optimizer_step import Tensors, trainable_weights

Batch = tuple[Tensor, Tensor]  # features [B, ...], labels int64 [B] or [B, L]


@dataclass
class Tally:
    """Running sums over batches; ``loss`` and ``accuracy`` are means over examples.

    The sums stay on the batches' device until they are asked for: no step waits for a GPU.
    """

    loss_sum: Tensor | float = 0.0
    correct: Tensor | float = 0.0
    num_examples: int = 0

    def add(self, losses: Tensor, hits: Tensor | None = None) -> None:
        """Add a batch: losses [B], and how right predictions were [B] (None leaves it out)."""
        self.loss_sum = self.loss_sum + losses.detach().sum().double()
        self.num_examples += len(losses)
        if hits is not None:
            self.correct = self.correct + hits.sum()

    @property
    def loss(self) -> float:
        """Mean loss; NaN before the first batch."""
        return float(self.loss_sum) / self.num_examples if self.num_examples else float("nan")

    @property
    def accuracy(self) -> float:
        """Share of correct predictions; NaN before the first batch."""
        return float(self.correct) / self.num_examples if self.num_examples else float("nan")


def weight_gradient(
    network: nn.Module,
    batch: Batch,
    tally: Tally,
    *,
    objective: Objective = CLASSIFICATION,
    auxiliary_weight: float = 0.0,
    reduce: Callable[[Tensor], Tensor] = torch.mean,
) -> dict[str, Tensor | None]:
    """Return the gradient of a batch's mean loss by a network's weights; None where it has none.

    Args:
        network: In training mode; may return auxiliary logits beside its logits.
        batch: The records.
        tally: The batch is added to it.
        objective: Gives the losses.
        auxiliary_weight: Of the auxiliary head's loss.
        reduce: Makes one loss of those of all records; the mean, or the sum.
    """
    weights, output = trainable_weights(network), network(batch[0])
    loss, losses = objective.batch_loss(output, batch[1], auxiliary_weight, reduce)
    tally.add(losses, objective.hits(heads(output)[0], batch[1]))
    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return dict(zip(weights, gradients, strict=True))


def weight_gradient_sum(
    network: nn.Module, batch: Batch, tally: Tally, **options: Any
) -> dict[str, Tensor]:
    """Return the sum over a batch of per-sample gradients of the weights, by parameter name.

    ``sum_i grad_W L(x_i, y_i, A, W)`` (DP-FNAS, arXiv 2110.11025, Eq. 3 before averaging).
    Parameters that the loss does not depend on get zeros. Alphas are left out. Arguments as
    :func:`weight_gradient`.
    """
    weights = trainable_weights(network)
    sums = weight_gradient(network, batch, tally, reduce=torch.sum, **options)
    return {name: torch.zeros_like(weights[name]) if g is None else g for name, g in sums.items()}


def periodic_gradients(
    gradient_sums: Callable[[], Mapping[str, tuple[Tensors, float]]],
    parameters: Mapping[str, Mapping[str, Tensor]],
    *,
    steps: int,
    local_lrs: Mapping[str, float],
) -> tuple[dict[str, Tensors], float]:
    """Return the gradients of states (weights, alphas, or both) accumulated over local steps.

    After each step but the last every state moves by ``-local_lr`` times its batch's mean gradient,
    and the next gradients are taken there: the periodic updates that DP-FNAS leaves as future
    work. With one step and one state this is what ``gradient_sums`` returns.

    Args:
        gradient_sums: Takes the next batches; returns for each state the sum of its gradients by
            name, and the batch size B that the sum is divided by.
        parameters: For each state its parameters by name; moved in place.
        steps: At least 1.
        local_lrs: For each state the learning rate of the local steps.

    Returns:
        For each state the sum over steps of mean gradients, times B, so that dividing by B gives
        what the local steps moved in all; and B, the first state's mean batch size.
    """
    totals: dict[str, Tensors] = {}
    sizes = []
    for step in range(1, steps + 1):
        sums = gradient_sums()
        sizes.append(next(iter(sums.values()))[1])
        if steps == 1 == len(sums):
            return {state: gradients for state, (gradients, _) in sums.items()}, sizes[0]
        for state, (gradients, batch_size) in sums.items():
            means = {name: gradient / batch_size for name, gradient in gradients.items()}
            before = totals.get(state)
            totals[state] = {n: before[n] + g for n, g in means.items()} if before else means
            if step < steps:
                with torch.no_grad():
                    for name, mean in means.items():
                        parameters[state][name].sub_(mean, alpha=local_lrs[state])
    size = sum(sizes) / len(sizes)
    return {s: {n: g * size for n, g in total.items()} for s, total in totals.items()}, size
