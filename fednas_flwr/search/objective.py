"""What networks are trained for and judged by: one object for losses, class factors and scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Output = Tensor | tuple[Tensor, Tensor]  # logits; in training maybe also those of an auxiliary head


@dataclass(frozen=True)
class Objective:
    """Classification: cross-entropy, and predictions by argmax.

    Attributes:
        class_factors: Public factors of the classes' losses, in (0, 1] [classes], on the device of
            the logits; None is 1. They never follow from a client's own counts.
    """

    class_factors: Tensor | None = None

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return each record's loss [B], in nats, times the factor of its class.

        Args:
            logits: [B, classes].
            labels: int64 [B].
        """
        return functional.cross_entropy(logits, labels, weight=self.class_factors, reduction="none")

    def plain_losses(self, output: Output, labels: Tensor, auxiliary_weight: float = 0.0) -> Tensor:
        """Return each record's loss [B] without factors, of all heads of a network.

        Private gradients are clipped before a public factor multiplies them, which clipping would
        cancel otherwise.
        """
        logits, auxiliary = heads(output)
        losses = functional.cross_entropy(logits, labels, reduction="none")
        if auxiliary is None:
            return losses
        further = functional.cross_entropy(auxiliary, labels, reduction="none")
        return losses + auxiliary_weight * further

    def mean_loss(
        self, output: Output, labels: Tensor, auxiliary_weight: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return a batch's mean loss, differentiable, and the losses [B] of its logits.

        With an auxiliary head the mean is ``L + auxiliary_weight * L_auxiliary`` (DARTS, Liu et
        al. 2019, section 3.2).
        """
        logits, auxiliary = heads(output)
        losses = self.losses(logits, labels)
        mean = losses.mean()
        if auxiliary is not None:
            mean = mean + auxiliary_weight * self.losses(auxiliary, labels).mean()
        return mean, losses

    def record_factors(self, labels: Tensor) -> Tensor | None:
        """Return the factor [B] of each record's class; None is 1."""
        return None if self.class_factors is None else self.class_factors.to(labels.device)[labels]

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return which records are predicted right, bool [B]."""
        return logits.argmax(1) == labels

    def scores(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """Return :func:`f1` and, where it is defined, :func:`auroc`, by name.

        Args:
            logits: [N, classes], on the CPU.
            labels: int64 [N], on the CPU.
        """
        found = {"f1": f1(labels, logits.argmax(1), num_classes=logits.shape[1])}
        if len(torch.unique(labels)) > 1 and bool(logits.isfinite().all()):
            found["auroc"] = auroc(labels, logits.double())
        return found


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


def auroc(labels: Tensor, logits: Tensor) -> float:
    """Return the area under the ROC curve, in [0, 1]: of two classes that of the last one.

    Of more, the plain mean over those that occur, each against the rest. Records are ranked by
    their log odds: those above 36 nats all have a probability that rounds to 1, and rounding would
    order equal ones.

    Args:
        labels: int64 [N], of at least two classes.
        logits: float64 [N, classes], finite.
    """
    from sklearn.metrics import roc_auc_score

    classes = [1] if logits.shape[1] == 2 else torch.unique(labels).tolist()
    areas = []
    for c in classes:
        rest = torch.cat([logits[:, :c], logits[:, c + 1 :]], dim=1)
        areas.append(float(roc_auc_score(labels == c, logits[:, c] - rest.logsumexp(1))))
    return sum(areas) / len(areas)


def heads(output: Output) -> tuple[Tensor, Tensor | None]:
    """Return the logits, and those of the auxiliary head if there is one."""
    return output if isinstance(output, tuple) else (output, None)


CLASSIFICATION = Objective()
