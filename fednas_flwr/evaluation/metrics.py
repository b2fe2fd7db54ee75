"""Loss and accuracy of a network on a split, and the linear model it has to beat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional

from fednas_flwr.data.loaders import Split

BATCH_SIZE = 256  # of evaluation; the result does not depend on it but for rounding


@dataclass(frozen=True)
class Metrics:
    """Mean cross-entropy in nats, share of correct predictions, number of examples."""

    loss: float
    accuracy: float
    num_examples: int

    def as_dict(self) -> dict[str, float]:
        """Return loss and accuracy by name, without the number of examples."""
        return {"loss": self.loss, "accuracy": self.accuracy}

    def as_json(self) -> dict[str, float]:
        """Return all three by name."""
        return asdict(self)


@torch.no_grad()
def evaluate(network: nn.Module, split: Split, device: torch.device) -> Metrics:
    """Return the metrics of ``network`` in evaluation mode; its mode is restored.

    Raises:
        ValueError: The split is empty.
    """
    if len(split) == 0:
        raise ValueError("the split is empty: there is nothing to evaluate on")
    loss_sum, correct = 0.0, 0
    for logits, y in _outputs(network, split, device):
        loss_sum += float(functional.cross_entropy(logits, y, reduction="sum"))
        correct += int((logits.argmax(1) == y).sum())
    return Metrics(loss_sum / len(split), correct / len(split), len(split))


@torch.no_grad()
def record_losses(network: nn.Module, split: Split, device: torch.device) -> torch.Tensor:
    """Return the cross-entropy of every record in evaluation mode, float64 [records] on the CPU."""
    losses = [
        functional.cross_entropy(logits, y, reduction="none").double().cpu()
        for logits, y in _outputs(network, split, device)
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *losses])


def _outputs(
    network: nn.Module, split: Split, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits and labels by batch, in evaluation mode; the network's mode is restored."""
    was_training = network.training
    network.eval()
    for indices in torch.split(torch.arange(len(split)), BATCH_SIZE):
        x, y = split.batch(indices, device)
        yield network(x), y
    network.train(was_training)


def linear_accuracy(train: list[Split], test: Split) -> float:
    """Return the test accuracy of logistic regression on the pooled ``train`` splits.

    The reference of the report: scikit-learn's default L2 penalty on the same normalised features.
    Only a simulation can pool records; a deployment has no such number.
    """
    from sklearn.linear_model import LogisticRegression

    def arrays(splits: list[Split]) -> tuple[torch.Tensor, torch.Tensor]:
        batches = [s.batch(torch.arange(len(s)), torch.device("cpu")) for s in splits]
        return torch.cat([x.flatten(1) for x, _ in batches]), torch.cat([y for _, y in batches])

    x, y = arrays(train)
    x_test, y_test = arrays([test])
    model = LogisticRegression(max_iter=1000).fit(x.numpy(), y.numpy())
    return float(model.score(x_test.numpy(), y_test.numpy()))
