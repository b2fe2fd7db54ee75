"""Loss, accuracy and F1 of a network on a split, and the models it has to beat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.data.loaders import Split
from fednas_flwr.search.objective import CLASSIFICATION, Objective
from fednas_flwr.spaces.operations import SkipNetwork

BATCH_SIZE = 256  # of evaluation; the result does not depend on it but for rounding
UNSEEN = -1e300  # logit of a class without training records: its log odds are all the same


@dataclass(frozen=True)
class Metrics:
    """Metrics of a network's predictions.

    Attributes:
        loss: Mean loss, in nats, without class factors.
        accuracy: Share of correct predictions; of several labels the mean of each label's.
        num_examples: Number of examples.
        f1: See ``Objective.scores``; None where it was not asked for.
        auroc: The same for AUROC; None also where it is not defined.
        average_precision: The same for average precision.
    """

    loss: float
    accuracy: float
    num_examples: int
    f1: float | None = None
    auroc: float | None = None
    average_precision: float | None = None

    def as_dict(self) -> dict[str, float]:
        """Loss and accuracy by name, as clients send them."""
        return {"loss": self.loss, "accuracy": self.accuracy}

    def as_json(self) -> dict[str, float | None]:
        """Return all of them by name."""
        return asdict(self)


def accuracies_of_parts(
    network: SkipNetwork, split: Split, device: torch.device, *, objective: Objective
) -> dict[str, float]:
    """Return the accuracies of a network ``without_skip`` and ``without_cells``.

    Args:
        network: With a skip, which it has again when this returns.
        split: The records, at least one.
        device: That of the network.
        objective: Gives the hits.
    """
    skip = network.skip
    if skip is None:
        raise ValueError("the network has no skip")
    alone = nn.Sequential(nn.Flatten(), skip)
    network.skip = None
    try:
        rest = evaluate(network, split, device, objective=objective).accuracy
    finally:
        network.skip = skip
    linear = evaluate(alone, split, device, objective=objective).accuracy
    return {"without_skip": rest, "without_cells": linear}


def evaluate(
    network: nn.Module,
    split: Split,
    device: torch.device,
    *,
    objective: Objective = CLASSIFICATION,
    with_scores: bool = False,
) -> Metrics:
    """Return the metrics of ``network`` in evaluation mode; its mode is restored.

    Args:
        network: Returns logits.
        split: The records.
        device: That of the network.
        objective: See :func:`measured`.
        with_scores: See :func:`measured`.

    Raises:
        ValueError: The split is empty.
    """
    logits, labels = predicted(network, split, device)
    return measured(logits, labels, objective=objective, with_scores=with_scores)


def measured(
    logits: Tensor, labels: Tensor, *, objective: Objective, with_scores: bool = False
) -> Metrics:
    """Return the metrics of predictions.

    Args:
        logits: ``[N, classes]``, N at least 1.
        labels: See ``Objective``.
        objective: Gives losses, hits and scores.
        with_scores: Whether to compute its scores, which loads scikit-learn.
    """
    loss_sum, correct, number = 0.0, 0.0, len(labels)
    batches = (torch.split(tensor, BATCH_SIZE) for tensor in (logits, labels))
    for part, y in zip(*batches, strict=True):
        loss_sum += float(objective.plain_losses(part, y).sum())
        correct += float(objective.hits(part, y).sum())
    scores = objective.scores(logits, labels) if with_scores else {}
    return Metrics(loss_sum / number, correct / number, number, **scores)


@torch.no_grad()
def record_losses(
    network: nn.Module,
    split: Split,
    device: torch.device,
    *,
    objective: Objective = CLASSIFICATION,
) -> Tensor:
    """Return the loss of every record in evaluation mode, without factors, float64 on the CPU."""
    losses = [
        objective.plain_losses(logits, y).double().cpu()
        for logits, y in _outputs(network, split, device)
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *losses])


def _outputs(
    network: nn.Module, split: Split, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and labels by batch, in evaluation mode; the network's mode is restored."""
    was_training = network.training
    network.eval()
    for indices in torch.split(torch.arange(len(split)), BATCH_SIZE) if len(split) else ():
        x, y = split.batch(indices, device)
        yield network(x), y
    network.train(was_training)


@torch.no_grad()
def predicted(network: nn.Module, split: Split, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return logits [N, classes] and labels [N] of all records of a split, on the CPU.

    Raises:
        ValueError: The split is empty.
    """
    if len(split) == 0:
        raise ValueError("the split is empty: there is nothing to evaluate on")
    outputs = [(logits.cpu(), y.cpu()) for logits, y in _outputs(network, split, device)]
    logits, labels = zip(*outputs, strict=True)
    return torch.cat(logits), torch.cat(labels)


def pooled_baselines(
    train: list[Split],
    test: Split,
    *,
    num_classes: int,
    objective: Objective = CLASSIFICATION,
) -> dict[str, dict[str, float]]:
    """Return test accuracy and scores of models that were fitted to the pooled ``train`` splits.

    The references of the report, by scikit-learn with its defaults: ``linear``, logistic regression
    with an L2 penalty on the same normalised features; and of a table ``trees``, gradient-boosted
    trees (``HistGradientBoostingClassifier``). Of several labels, one model each. Only a simulation
    can pool records; a deployment has no such numbers.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.linear_model import LogisticRegression

    def arrays(splits: list[Split]) -> tuple[Tensor, Tensor]:
        batches = [s.batch(torch.arange(len(s)), torch.device("cpu")) for s in splits]
        return torch.cat([x.flatten(1) for x, _ in batches]), torch.cat([y for _, y in batches])

    x, y = arrays(train)
    x_test, y_test = arrays([test])
    models = {"linear": LogisticRegression(max_iter=1000)}
    if test.features.dim() == 2:
        models["trees"] = HistGradientBoostingClassifier(random_state=0)
    found = {}

    def fitted(model: Any, y: Tensor, num_classes: int) -> Tensor:
        """Return test logits [N, classes] of a model that is fitted to classes."""
        model.fit(x.numpy(), y.numpy())
        decisions = torch.from_numpy(model.decision_function(x_test.numpy())).double()
        if decisions.dim() == 1:  # of two classes those of the second
            decisions = torch.stack([torch.zeros_like(decisions), decisions], 1)
        logits = torch.full((len(y_test), num_classes), UNSEEN, dtype=torch.float64)
        logits[:, torch.from_numpy(model.classes_)] = decisions
        return logits

    def of_label(model: Any, y: Tensor) -> Tensor:
        """Return test logits [N] of one label; one that all or none have is always told so."""
        if bool((y == y[0]).all()):
            return torch.full((len(y_test),), UNSEEN if not y.any() else -UNSEEN).double()
        return fitted(model, y, 2)[:, 1]

    for name, model in models.items():
        if objective.multi_label:  # a model per label
            logits = torch.stack([of_label(model, y[:, c]) for c in range(num_classes)], 1)
        else:
            logits = fitted(model, y, num_classes)
        accuracy = float(objective.hits(logits, y_test).sum()) / len(y_test)
        found[name] = {"accuracy": accuracy, **objective.scores(logits, y_test)}
    return found
