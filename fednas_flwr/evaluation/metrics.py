"""Loss, accuracy and F1 of a network on a split, and the linear model it has to beat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fednas_flwr.data.loaders import Split

BATCH_SIZE = 256  # of evaluation; the result does not depend on it but for rounding


@dataclass(frozen=True)
class Metrics:
    """Of predictions by argmax.

    Attributes:
        loss: Mean cross-entropy in nats.
        accuracy: Share of correct predictions.
        num_examples: Number of examples.
        f1: See :func:`f1`; None where it was not asked for.
    """

    loss: float
    accuracy: float
    num_examples: int
    f1: float | None = None

    def as_dict(self) -> dict[str, float]:
        """Return what clients send: loss and accuracy by name."""
        return {"loss": self.loss, "accuracy": self.accuracy}

    def as_json(self) -> dict[str, float | None]:
        """Return all of them by name."""
        return asdict(self)


@torch.no_grad()
def evaluate(
    network: nn.Module, split: Split, device: torch.device, *, with_f1: bool = False
) -> Metrics:
    """Return the metrics of ``network`` in evaluation mode; its mode is restored.

    Args:
        network: Returns logits.
        split: The records.
        device: That of the network.
        with_f1: Whether to compute F1, which loads scikit-learn.

    Raises:
        ValueError: The split is empty.
    """
    if len(split) == 0:
        raise ValueError("the split is empty: there is nothing to evaluate on")
    loss_sum, labels, predictions = 0.0, [], []
    for logits, y in _outputs(network, split, device):
        loss_sum += float(functional.cross_entropy(logits, y, reduction="sum"))
        labels.append(y.cpu())
        predictions.append(logits.argmax(1).cpu())
    label, prediction = torch.cat(labels), torch.cat(predictions)
    accuracy = int((prediction == label).sum()) / len(split)
    score = f1(label, prediction, num_classes=logits.shape[1]) if with_f1 else None
    return Metrics(loss_sum / len(split), accuracy, len(split), score)


def f1(labels: Tensor, predictions: Tensor, *, num_classes: int) -> float:
    """Return ``2 TP / (2 TP + FP + FN)``, in [0, 1].

    Of two classes it is that of the last one, which is taken for the rare one (fraud, ill); of
    more, the plain mean over those that occur (macro). A class that is never predicted has 0.

    Args:
        labels: int64 [N].
        predictions: int64 [N].
        num_classes: Number of classes.
    """
    from sklearn.metrics import f1_score

    average = "binary" if num_classes == 2 else "macro"
    return float(f1_score(labels, predictions, average=average, zero_division=0.0))


@torch.no_grad()
def record_losses(network: nn.Module, split: Split, device: torch.device) -> Tensor:
    """Return the cross-entropy of every record in evaluation mode, float64 [records] on the CPU."""
    losses = [
        functional.cross_entropy(logits, y, reduction="none").double().cpu()
        for logits, y in _outputs(network, split, device)
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *losses])


def _outputs(
    network: nn.Module, split: Split, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield logits and labels by batch, in evaluation mode; the network's mode is restored."""
    was_training = network.training
    network.eval()
    for indices in torch.split(torch.arange(len(split)), BATCH_SIZE):
        x, y = split.batch(indices, device)
        yield network(x), y
    network.train(was_training)


def linear_baseline(train: list[Split], test: Split, *, num_classes: int) -> dict[str, float]:
    """Return test accuracy and F1 of logistic regression on the pooled ``train`` splits.

    The reference of the report: scikit-learn's default L2 penalty on the same normalised features.
    Only a simulation can pool records; a deployment has no such number.
    """
    from sklearn.linear_model import LogisticRegression

    def arrays(splits: list[Split]) -> tuple[Tensor, Tensor]:
        batches = [s.batch(torch.arange(len(s)), torch.device("cpu")) for s in splits]
        return torch.cat([x.flatten(1) for x, _ in batches]), torch.cat([y for _, y in batches])

    x, y = arrays(train)
    x_test, y_test = arrays([test])
    model = LogisticRegression(max_iter=1000).fit(x.numpy(), y.numpy())
    predictions = torch.from_numpy(model.predict(x_test.numpy()))
    accuracy = int((predictions == y_test).sum()) / len(y_test)
    return {"accuracy": accuracy, "f1": f1(y_test, predictions, num_classes=num_classes)}
