"""Steps on the weights of a supernet or of a derived network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fednas_flwr.search.settings import SGD, Adam

Tensors = dict[str, Tensor]  # name -> tensor
Batch = tuple[Tensor, Tensor]  # features [B, ...], labels int64 [B]


def make_sgd(parameters: Iterable[Tensor], settings: SGD) -> torch.optim.SGD:
    """Return torch's SGD with the constants of ``settings``, at ``settings.lr``."""
    return torch.optim.SGD(
        parameters,
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )


def make_adam(parameters: Iterable[Tensor], settings: Adam) -> torch.optim.Adam:
    """Return torch's Adam with DARTS' betas and the constants of ``settings``."""
    return torch.optim.Adam(
        parameters, lr=settings.lr, betas=(0.5, 0.999), weight_decay=settings.weight_decay
    )


@dataclass
class Tally:
    """Running sums over batches; ``loss`` and ``accuracy`` are means over examples."""

    loss_sum: float = 0.0
    correct: int = 0
    num_examples: int = 0

    def add(self, losses: Tensor, logits: Tensor | None, labels: Tensor) -> None:
        """Add a batch: losses [B], logits [B, classes] (None leaves accuracy out), labels [B]."""
        self.loss_sum += float(losses.detach().sum())
        self.num_examples += len(labels)
        if logits is not None:
            self.correct += int((logits.detach().argmax(1) == labels).sum())

    @property
    def loss(self) -> float:
        """Mean loss; NaN before the first batch."""
        return self.loss_sum / self.num_examples if self.num_examples else float("nan")

    @property
    def accuracy(self) -> float:
        """Share of correct predictions; NaN before the first batch."""
        return self.correct / self.num_examples if self.num_examples else float("nan")


def record_losses(logits: Tensor, labels: Tensor, class_factors: Tensor | None = None) -> Tensor:
    """Return each record's cross-entropy [B], times the public factor of its class.

    Args:
        logits: [B, classes].
        labels: int64 [B].
        class_factors: In (0, 1] by class [classes], on the device of the logits; None means 1.
    """
    return functional.cross_entropy(logits, labels, weight=class_factors, reduction="none")


def weight_gradient_sum(
    network: nn.Module, batch: Batch, tally: Tally, *, class_factors: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the sum over a batch of per-sample gradients of the weights, by parameter name.

    ``sum_i grad_W L(x_i, y_i, A, W)`` (DP-FNAS, arXiv 2110.11025, Eq. 3 before averaging).
    Parameters that the loss does not depend on get zeros. Alphas are left out. The batch is added
    to ``tally``.
    """
    weights = trainable_weights(network)
    logits = network(batch[0])
    losses = record_losses(logits, batch[1], class_factors)
    tally.add(losses, logits, batch[1])
    gradients = torch.autograd.grad(losses.sum(), list(weights.values()), allow_unused=True)
    return {
        name: torch.zeros_like(weight) if gradient is None else gradient
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
    }


def periodic_gradients(
    gradient_sums: Callable[[], Mapping[str, tuple[Tensors, float]]],
    parameters: Mapping[str, Mapping[str, nn.Parameter]],
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


def train_epoch(
    network: nn.Module,
    batches: Iterator[Batch],
    *,
    optimizer: torch.optim.Optimizer,
    clip_norm: float | None,
    auxiliary_weight: float = 0.0,
    class_factors: Tensor | None = None,
) -> Tally:
    """Train the weights on every batch once and return the tally of what was seen on the way.

    A network with an auxiliary head returns ``(logits, auxiliary logits)`` in training mode; its
    loss is ``CE + auxiliary_weight * CE_auxiliary`` (DARTS, section 3.2).
    """
    network.train()
    tally = Tally()
    for x, y in batches:
        optimizer.zero_grad()
        output = network(x)
        logits, auxiliary = output if isinstance(output, tuple) else (output, None)
        losses = record_losses(logits, y, class_factors)
        loss = losses.mean()
        if auxiliary is not None:
            loss = loss + auxiliary_weight * record_losses(auxiliary, y, class_factors).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_gradients(optimizer, clip_norm)
        optimizer.step()
        tally.add(losses, logits, y)
    return tally


def clip_gradients(optimizer: torch.optim.Optimizer, clip_norm: float | None) -> None:
    """Scale the gradients of an optimiser's parameters to a norm of at most ``clip_norm``."""
    if clip_norm is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, clip_norm)


def trainable_weights(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters but the alphas, by name."""
    weights: Callable[[], dict[str, nn.Parameter]] | None = getattr(network, "weights", None)
    return weights() if weights is not None else dict(network.named_parameters())
