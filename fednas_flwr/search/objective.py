"""The objective of training and evaluation: one object for losses, class factors and scores."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.search.optimizer_step import Tensors
from fednas_flwr.settings import names

REACH = 6.0  # range, in deviations, of a number without a declared range
NUMBER_LOSSES: dict[str, Callable[..., Tensor]] = {
    names.SQUARED: functional.mse_loss,
    names.ABSOLUTE: functional.l1_loss,
    names.HUBER: functional.huber_loss,  # squared up to one deviation
}

Batch = tuple[Tensor, Tensor]  # features [B, ...], labels int64 [B] or [B, L]
Output = Tensor | tuple[Tensor, Tensor]  # logits; in training also an auxiliary head's, if any


OwnLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Objective:
    """Classification with one class per record, or with several labels at once for a record.

    With one class the loss is cross-entropy, and predictions are by argmax. With several labels
    (``multi_label``) a record's loss is the mean of logistic losses over the labels, and a label is
    predicted from a probability of 1/2 on.

    In this class, ``labels`` are int64 [N] classes, or int64 [N, L] of 0 and 1; "classes" also
    means the L labels.

    Attributes:
        class_factors: Public factors of the classes' losses, in (0, 1] [classes], on the device of
            the logits; None means 1. They never follow from a client's own counts. Several labels
            have none.
        positive: Class for which scores are computed; None means the last of two classes, or else
            the mean over all.
        multi_label: True if a record can have several labels, or none.
        threshold: Probability from which on a record is assigned to the positive class, or to a
            label; None predicts the most probable class, or labels from 1/2 on.
        own_loss: Loss of training, called with logits [B, classes] and labels, returns [B]; None
            takes the loss above, with which networks are tested in any case.
    """

    class_factors: Tensor | None = None
    positive: int | None = None
    multi_label: bool = False
    threshold: float | None = None
    own_loss: OwnLoss | None = None
    predicts_numbers: ClassVar[bool] = False

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Each record's loss [B] in training, in nats, times the factor of its class.

        Args:
            logits: [B, classes].
            labels: int64, in the form that the class documents.
        """
        return self._losses(logits, labels, self.class_factors)

    def _losses(self, logits: Tensor, labels: Tensor, factors: Tensor | None) -> Tensor:
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        if self.own_loss is not None:
            losses = _own_losses(self.own_loss, logits, labels)
            return losses if factors is None else losses * factors[labels]
        if self.multi_label:
            return functional.binary_cross_entropy_with_logits(
                logits, labels.to(logits.dtype), reduction="none"
            ).mean(1)
        return functional.cross_entropy(logits, labels, weight=factors, reduction="none")

    def plain_losses(self, output: Output, labels: Tensor, auxiliary_weight: float = 0.0) -> Tensor:
        """Each record's loss [B] without factors, of all heads of a network.

        Private gradients are clipped before a public factor multiplies them; clipping would
        otherwise cancel the factor.
        """
        logits, auxiliary = heads(output)
        losses = self._losses(logits, labels, None)
        if auxiliary is None:
            return losses
        return losses + auxiliary_weight * self._losses(auxiliary, labels, None)

    def tested_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Each record's loss [B] in tests of a network; a user's own loss is not used."""
        return replace(self, own_loss=None).plain_losses(logits, labels)

    def batch_loss(
        self,
        output: Output,
        labels: Tensor,
        auxiliary_weight: float = 0.0,
        reduce: Callable[[Tensor], Tensor] = torch.mean,
    ) -> tuple[Tensor, Tensor]:
        """A batch's mean loss, differentiable, and the losses [B] of its logits.

        With an auxiliary head the mean is ``L + auxiliary_weight * L_auxiliary`` (DARTS, Liu et
        al. 2019, section 3.2). With ``reduce=torch.sum`` it is the sum.
        """
        logits, auxiliary = heads(output)
        losses = self.losses(logits, labels)
        total = reduce(losses)
        if auxiliary is not None:
            total = total + auxiliary_weight * reduce(self.losses(auxiliary, labels))
        return total, losses

    def reported(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a network that are reported, from clients' mean loss and hits."""
        return dict(metrics)

    def standardised(self, target: tuple[float, ...]) -> "Objective":
        """The same objective with the mean and deviation of a number that clients have found."""
        return self

    def record_factors(self, labels: Tensor) -> Tensor | None:
        """The factor [B] of each record's class; None means 1."""
        return None if self.class_factors is None else self.class_factors.to(labels.device)[labels]

    def guessing_loss(self, num_classes: int) -> float:
        """The loss, in nats, of giving every class the same probability."""
        return math.log(2 if self.multi_label else max(2, num_classes))

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probability of each class [B, classes]: softmax, or sigmoid of each label."""
        return logits.sigmoid() if self.multi_label else logits.softmax(1)

    def predictions(self, logits: Tensor) -> Tensor:
        """Predict each record's label, in the form of ``labels``."""
        if self.threshold is None:
            return (logits >= 0).long() if self.multi_label else logits.argmax(1)
        return self.decided(self.probabilities(logits))

    def decided(self, probabilities: Tensor) -> Tensor:
        """The labels that :meth:`probabilities` [B, classes] give, in the form of ``labels``."""
        positive = self.positive_class(probabilities.shape[1])
        if self.multi_label:
            return (probabilities >= (0.5 if self.threshold is None else self.threshold)).long()
        if self.threshold is not None and positive is not None:  # above all others from then on
            probabilities = probabilities.clone()
            reached = probabilities[:, positive] >= self.threshold
            probabilities[:, positive] = torch.where(reached, 2.0, -1.0)
        return probabilities.argmax(1)

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The hits of predictions [B]: bool, or the share of correct labels, float64."""
        right = self.predictions(logits) == labels
        return right.double().mean(1) if self.multi_label else right

    def members(self, labels: Tensor, of_class: int) -> Tensor:
        """Mark the records of a class, or with a label, bool [N]."""
        return labels[:, of_class] == 1 if self.multi_label else labels == of_class

    def positive_class(self, num_classes: int) -> int | None:
        """The class for which scores are computed: the given one or the last of two; else None."""
        if self.positive is None and num_classes == 2 and not self.multi_label:
            return 1
        return self.positive

    def scored_classes(self, num_classes: int) -> Sequence[int]:
        """The classes over which scores are means: only the positive one if there is one."""
        positive = self.positive_class(num_classes)
        return range(num_classes) if positive is None else [positive]

    def ranks(self, logits: Tensor) -> Tensor:
        """The log odds of each class, which rank the records, float64 [N, classes]."""
        return logits.double() if self.multi_label else log_odds(logits.double())

    def scores(self, logits: Tensor, labels: Tensor) -> dict[str, float]:
        """Compute ``f1`` and, where they are defined, ``auroc`` and ``average_precision``.

        They are computed for the positive class against the rest, with its ``sensitivity`` and
        ``specificity``; without one they are plain means over the classes that occur (macro).

        Args:
            logits: [N, classes], on the CPU.
            labels: int64, in the form that the class documents; on the CPU.
        """
        ones = torch.ones(1, len(labels), dtype=torch.float64)
        scores = self.weighted_scores(logits, labels, ones)
        return {name: float(value) for name, value in scores.items() if bool(value.isfinite())}

    def weighted_scores(self, logits: Tensor, labels: Tensor, weights_RN: Tensor) -> Tensors:
        """The :meth:`scores` under each of R weightings of the records, float64 [R].

        Scores that are not defined are NaN; a weight of 2 counts a record twice, as resampling
        does.

        Args:
            logits: [N, classes], on the CPU.
            labels: int64, in the form that the class documents; on the CPU.
            weights_RN: float64 [R, N], 0 or more.
        """
        positive = self.positive_class(logits.shape[1])
        classes = self.scored_classes(logits.shape[1])
        predictions = self.predictions(logits)
        members = [self.members(labels, c) for c in classes]
        called = [self.members(predictions, c) for c in classes]
        pairs = zip(members, called, strict=True)
        f1s = [f1(positive_N, called_N, weights_RN) for positive_N, called_N in pairs]
        scores = {"f1": torch.stack(f1s).nanmean(0)}
        if positive is not None:  # a class that is never predicted and does not occur
            scores["f1"] = scores["f1"].nan_to_num(nan=0.0)
            right_N = members[0] == called[0]
            for name, of_N in (("sensitivity", members[0]), ("specificity", ~members[0])):
                scores[name] = weights_RN[:, of_N & right_N].sum(1) / weights_RN[:, of_N].sum(1)
        if bool(logits.isfinite().all()):
            ranks = self.ranks(logits)
            areas = [
                ranked_areas(positive_N, ranks[:, c], weights_RN)
                for c, positive_N in zip(classes, members, strict=True)
            ]
            scores["auroc"] = torch.stack([area for area, _ in areas]).nanmean(0)
            scores["average_precision"] = torch.stack([mean for _, mean in areas]).nanmean(0)
        return scores


def check_own_loss(name: str, loss: OwnLoss, logits: Tensor, labels: Tensor) -> None:
    """Refuse a loss of the user's that fails on some records, or has no gradient there."""
    try:
        losses = _own_losses(loss, logits.requires_grad_(), labels)
        torch.autograd.grad(losses.sum(), logits)
    except Exception as error:
        reason = textwrap.shorten(str(error), 200)
        raise ConfigError(
            f"training.loss={name} of your own fails: {reason.rstrip('.')}. It is computed for one "
            "record at a time, by torch.vmap, and differentiated: use tensor operations only."
        ) from error
    if losses.min() < 0:
        raise ConfigError(
            f"training.loss={name} of your own is {losses.min():.3g} for some outputs: expected 0 "
            "or more; add a constant, or clamp it."
        )
    if _divides_by_weights(loss, logits, labels):
        raise ConfigError(
            f"training.loss={name} of your own divides by its records' weights, which cancel as it "
            "is computed for one record at a time: sum (reduction='sum'), or set "
            "training.class_factors."
        )


def _divides_by_weights(loss: OwnLoss, logits: Tensor, labels: Tensor) -> bool:
    """True if a mean over records of two classes has unequal shares, the same for any outputs."""
    if labels.shape[1:] or labels.is_floating_point() or logits.shape[1] < 2:
        return False
    pairs = [logits[:2].detach() * scale for scale in (0.1, 0.2)]
    for place in range(1, logits.shape[1]):
        two = torch.tensor([0, place], device=logits.device)
        try:
            first, again = (_share(loss, pair, two) for pair in pairs)
        except Exception:  # not for several records
            return False
        if 0 < first < 1 and abs(first - 0.5) > 1e-3 > abs(first - again):
            return True
    return False


def _share(loss: OwnLoss, logits: Tensor, labels: Tensor) -> float:
    """The share of the first of two records in a loss of both."""
    one, other = _own_losses(loss, logits, labels)
    return float((loss(logits, labels).mean() - other) / (one - other))


def _own_losses(loss: OwnLoss, logits: Tensor, labels: Tensor) -> Tensor:
    """The losses [B] of records by a user's function, which receives one record at a time."""
    return torch.vmap(partial(_own_loss, loss))(logits, labels)


def _own_loss(loss: OwnLoss, logits: Tensor, label: Tensor) -> Tensor:
    """The loss of one record by a user's function."""
    value = loss(logits[None], label[None])
    if value.numel() != 1:
        raise ConfigError(
            f"your own loss returns {list(value.shape)} for the logits of one record: expected [1]."
        )
    return value.reshape(())


def f1(positive_N: Tensor, called_N: Tensor, weights_RN: Tensor) -> Tensor:
    """Compute ``2 TP / (2 TP + FP + FN)``, in [0, 1], float64 [R]; 0 / 0 gives NaN.

    Args:
        positive_N: True for records of the class.
        called_N: True for records that are predicted to be in the class.
        weights_RN: Weightings of the records, float64 [R, N], 0 or more.
    """
    both = weights_RN[:, positive_N & called_N].sum(1)
    return 2 * both / (weights_RN[:, positive_N].sum(1) + weights_RN[:, called_N].sum(1))


def log_odds(logits: Tensor) -> Tensor:
    """Each class's log odds against all others, float64 [N, classes].

    Records are ranked by log odds: above 36 nats all probabilities round to 1, and rounding would
    order equal ones.

    Args:
        logits: float64 [N, classes], finite; at least two classes.
    """
    classes = range(logits.shape[1])
    rest = [torch.cat([logits[:, :c], logits[:, c + 1 :]], dim=1).logsumexp(1) for c in classes]
    return logits - torch.stack(rest, dim=1)


def ranked_areas(positive_N: Tensor, ranks_N: Tensor, weights_RN: Tensor) -> tuple[Tensor, Tensor]:
    """The area under the ROC curve and the average precision, in [0, 1], float64 [R].

    The average precision is ``sum_k (R_k - R_(k-1)) P_k`` over distinct ranks, not interpolated, as
    in scikit-learn. Equal ranks count half in the area under the ROC curve. Both are NaN unless
    there are records of both kinds.

    Args:
        positive_N: True for records of the class.
        ranks_N: float64; larger is more likely positive.
        weights_RN: Weightings of the records, float64 [R, N], 0 or more.
    """
    order_N = ranks_N.argsort(descending=True)
    ordered_N = ranks_N[order_N]
    ends_K = torch.nonzero(torch.cat([ordered_N[1:] != ordered_N[:-1], torch.tensor([True])]))[:, 0]
    sorted_RN, is_positive_N = weights_RN[:, order_N], positive_N[order_N].double()
    found_RK = (sorted_RN * is_positive_N).cumsum(1)[:, ends_K]
    wrong_RK = (sorted_RN * (1 - is_positive_N)).cumsum(1)[:, ends_K]
    zero = torch.zeros(len(weights_RN), 1, dtype=torch.float64)
    hits_RK, misses_RK = found_RK.diff(prepend=zero), wrong_RK.diff(prepend=zero)
    positives, negatives = found_RK[:, -1], wrong_RK[:, -1]
    area = (misses_RK * (found_RK - hits_RK / 2)).sum(1) / (positives * negatives)
    precision_RK = (found_RK / (found_RK + wrong_RK)).nan_to_num(nan=0.0)  # before the first record
    return area, ((hits_RK * precision_RK).sum(1) / positives).where(negatives > 0, torch.nan)


def heads(output: Output) -> tuple[Tensor, Tensor | None]:
    """The logits, and those of the auxiliary head if there is one."""
    return output if isinstance(output, tuple) else (output, None)


CLASSIFICATION = Objective()


@dataclass(frozen=True)
class Regression(Objective):
    """Regression: a network's only output is the standardised number of the target.

    ``labels`` are float32 [N] in the target's unit, "logits" [N, 1]. If the target has a range,
    labels and predictions outside it count as its nearer end.

    Attributes:
        target: Mean and deviation, and the ends of the range if it has one, see ``Inputs.target``.
        loss: Loss of a standardised difference, a name from ``NUMBER_LOSSES``.
    """

    target: tuple[float, ...] = (0.0, 1.0)
    loss: str = names.SQUARED
    predicts_numbers = True

    @property
    def span(self) -> float:
        """The length of the range, which is the largest difference that counts."""
        _, std, *ends = self.target
        return ends[1] - ends[0] if ends else REACH * std

    def standardised(self, target: tuple[float, ...]) -> "Regression":
        """The same objective with statistics that clients have found, unless the range is known."""
        return replace(self, target=target) if target and len(self.target) == 2 else self

    def _held(self, numbers: Tensor) -> Tensor:
        ends = self.target[2:]
        return numbers.clamp(*ends) if ends else numbers

    def scaled(self, labels: Tensor) -> Tensor:
        """The numbers [B] that a network is to return."""
        return (self._held(labels) - self.target[0]) / self.target[1]

    def _losses(self, logits: Tensor, labels: Tensor, factors: Tensor | None) -> Tensor:
        if self.own_loss is not None:
            return _own_losses(self.own_loss, logits, self.scaled(labels))
        far = logits[:, 0] - self.scaled(labels)  # at least float32
        return NUMBER_LOSSES[self.loss](far, torch.zeros_like(far), reduction="none")

    def _errors(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.predictions(logits) - self._held(labels.double())

    def tested_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Each record's squared difference in deviations [B], within the range, float64."""
        return (self._errors(logits, labels) / self.target[1]) ** 2

    def guessing_loss(self, num_classes: int) -> float:
        """Half the largest squared difference within the range, in deviations."""
        return (self.span / self.target[1]) ** 2 / 2

    def predictions(self, logits: Tensor) -> Tensor:
        """Predict each record's number, float64 [N]."""
        return self._held(logits[:, 0].double() * self.target[1] + self.target[0])

    def probabilities(self, logits: Tensor) -> Tensor:
        """The :meth:`predictions`, float32 [N, 1]."""
        return self.predictions(logits).float()[:, None]

    def hits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The closeness [B] of predictions: 1 minus their error as a share of the range."""
        return (1 - self._errors(logits, labels).abs() / self.span).nan_to_num(nan=0.0).clamp(0, 1)

    def reported(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics without closeness; an error in the target's unit is added if missing."""
        found = {name: value for name, value in metrics.items() if name != names.ACCURACY}
        if "loss" in metrics:
            found.setdefault(names.RMSE, self.target[1] * math.sqrt(max(0.0, metrics["loss"])))
        return found

    def terms(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The terms whose sums :meth:`scores_of` takes, float64 [N, 6], all 0 or more."""
        errors, centred = self.predictions(logits) - labels, labels.double() - self.target[0]
        one, above, below = torch.ones_like(errors), centred.clamp(min=0), (-centred).clamp(min=0)
        return torch.stack([one, above, below, centred**2, errors**2, errors.abs()], 1)

    def weighted_scores(self, logits: Tensor, labels: Tensor, weights_RN: Tensor) -> Tensors:
        """``r2``, ``rmse`` and ``mae`` under each weighting; see :meth:`scores_of`."""
        return self.scores_of(weights_RN @ self.terms(logits, labels))

    @staticmethod
    def scores_of(sums_R6: Tensor) -> dict[str, Tensor]:
        """R squared, and the root of the mean squared and the mean absolute error, [R].

        ``R^2 = 1 - sum (p - y)^2 / sum (y - mean)^2``; NaN if all targets are equal.

        Args:
            sums_R6: Sums over records of :meth:`terms`.
        """
        number, above, below, squares, errors, distances = sums_R6.unbind(-1)
        spread = squares - (above - below) ** 2 / number
        spread = spread.where(spread > 1e-12 * squares, torch.nan)
        return {
            names.R2: 1 - errors / spread,
            names.RMSE: (errors / number).sqrt(),
            names.MAE: distances / number,
        }
