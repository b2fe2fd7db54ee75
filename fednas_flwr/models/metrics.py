"""Measures of a classifier on a split, for reports, and simpler models to compare with.

:func:`evaluate` returns loss and accuracy; :func:`pooled_baselines` the scores of models that a
network has to beat; :func:`detailed` clinical measures per class and at a threshold, with intervals
and calibration. The threshold is chosen on other records, from :func:`histogram`s that clients send
of their validation records (:func:`best_threshold`).

Tensor suffixes: N records, C classes, B bins, R resamples.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.layers import evaluating
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.base.shares import wilson
from fednas_flwr.data.loaders import Split
from fednas_flwr.search.objective import CLASSIFICATION, Objective, Regression, ranked_areas
from fednas_flwr.settings.names import ACCURACY, AUROC, LOG_LOSS, NUMBER_METRICS
from fednas_flwr.settings.registry import TABLES
from fednas_flwr.spaces.operations import SkipNetwork

BATCH_SIZE = 256  # in evaluation; the result depends on it by rounding only
UNSEEN = -1e300  # logit of a class without training records: its log odds are all the same
BINS = 100  # of probabilities, whose edges are possible thresholds
CALIBRATION_BINS = 10
MOST_CURVES, CURVE_POINTS = 10, 50  # classes, and points of each curve
RESAMPLED = 50  # resamples of validation records, by which candidates are compared
RANKS, LARGEST_RANK = 400, 10.0  # bins of log odds, and their end
FEWEST_RANKS, ALL_RANKS = 4, 4000  # of a class, and in all: more would not fit into a reply
RESAMPLES = 1000  # of the bootstrap
RESAMPLES_TOLD = 200  # resamples that are saved, by which two networks are compared
MOST_PAIRS = 2000  # records whose predicted and true number a report shows
MOST_RESAMPLED = 5_000_000  # records in all resamples together
AT_ONCE = 50  # resamples at a time
LEVEL = 0.95
SCORES = ("f1", "auroc", "average_precision", "sensitivity", "specificity", *NUMBER_METRICS)


@dataclass(frozen=True)
class Metrics:
    """Metrics of a network's predictions.

    Attributes:
        loss: Mean loss, in nats, without class factors.
        accuracy: Share of correct predictions: for several labels, the mean over labels; for
            predicted numbers, their closeness.
        num_examples: Number of examples.
    """

    loss: float
    accuracy: float
    num_examples: int

    def as_dict(self) -> dict[str, float]:
        """Return loss and accuracy by name, as clients send them."""
        return {"loss": self.loss, "accuracy": self.accuracy}


def accuracies_of_parts(
    network: SkipNetwork, split: Split, device: torch.device, *, objective: Objective
) -> dict[str, float]:
    """Return the accuracies of a network ``without_skip`` and ``without_cells``, if it has both.

    If a threshold was chosen, it is for the whole network, and the parts are not measured.

    Args:
        network: The network; its skip is removed and put back.
        split: The records, at least one.
        device: Device of the network.
        objective: Objective that decides which predictions are right.
    """
    skip = network.skip
    if skip is None:
        return {}
    alone = nn.Sequential(nn.Flatten(), skip)
    network.skip = None
    try:
        rest = evaluate(network, split, device, objective=objective).accuracy
    finally:
        network.skip = skip
    linear = evaluate(alone, split, device, objective=objective).accuracy
    return {"without_skip": rest, "without_cells": linear}


def evaluate(
    network: nn.Module, split: Split, device: torch.device, *, objective: Objective = CLASSIFICATION
) -> Metrics:
    """Return the metrics of ``network`` in evaluation mode; its mode is restored.

    Args:
        network: Network that returns logits.
        split: The records.
        device: Device of the network.
        objective: See :func:`measured`.

    Raises:
        ValueError: The split is empty.
    """
    return measured(*predicted(network, split, device), objective=objective)


def measured(logits: Tensor, labels: Tensor, *, objective: Objective) -> Metrics:
    """Return the metrics of predictions.

    Args:
        logits: ``[N, classes]``, N at least 1.
        labels: See ``Objective``.
        objective: Objective that computes losses and hits.
    """
    loss_sum, correct, number = 0.0, 0.0, len(labels)
    batches = (torch.split(tensor, BATCH_SIZE) for tensor in (logits, labels))
    for part, y in zip(*batches, strict=True):
        loss_sum += float(objective.tested_losses(part, y).sum())
        correct += float(objective.hits(part, y).sum())
    return Metrics(loss_sum / number, correct / number, number)


@torch.no_grad()
def record_losses(
    network: nn.Module, split: Split, device: torch.device, *, objective: Objective = CLASSIFICATION
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
    with evaluating(network):
        for indices in torch.split(torch.arange(len(split)), BATCH_SIZE) if len(split) else ():
            x, y = split.batch(indices, device)
            yield network(x), y


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
    train: list[Split], test: Split, num_classes: int, objective: Objective, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return test accuracy and scores of models that were fitted to the pooled ``train`` splits.

    They come with ``intervals`` and ``resamples``, of the same resamples as in :func:`detailed`.

    They are the report's references, by scikit-learn with its defaults. ``linear`` is logistic
    regression with an L2 penalty on the same normalised features; ``trees``, for tables, are
    gradient-boosted trees (``HistGradientBoostingClassifier``). For several labels there is one
    model per label; for a number to predict, ridge regression and the trees' regressor. Only a
    simulation can pool records; a deployment has no such numbers.
    """
    from sklearn import ensemble, linear_model

    def arrays(splits: list[Split]) -> tuple[Tensor, Tensor]:
        batches = [s.batch(torch.arange(len(s)), "cpu", limit=0) for s in splits]
        return torch.cat([x.flatten(1) for x, _ in batches]), torch.cat([y for _, y in batches])

    x, y = arrays(train)
    x_test, y_test = arrays([test])
    models: dict[str, Any] = {"linear": linear_model.LogisticRegression(max_iter=1000)}
    trees = ensemble.HistGradientBoostingClassifier
    if objective.predicts_numbers:
        models, trees = {"linear": linear_model.Ridge()}, ensemble.HistGradientBoostingRegressor
    if test.features.dim() == 2 and len(test.mean) == test.features.shape[1]:  # else images
        models["trees"] = trees(random_state=0)
    results = {}

    def fitted(model: Any, y: Tensor, num_classes: int) -> Tensor:
        """Return test logits [N, classes] of a fitted model, or of the class of all records."""
        logits = torch.full((len(y_test), num_classes), UNSEEN, dtype=torch.float64)
        if len(classes := torch.unique(y)) == 1:
            logits[:, classes] = -UNSEEN
            return logits
        model.fit(x.numpy(), y.numpy())
        decisions = torch.from_numpy(model.decision_function(x_test.numpy())).double()
        if decisions.dim() == 1:  # for two classes, those of the second
            decisions = torch.stack([torch.zeros_like(decisions), decisions], 1)
        logits[:, classes] = decisions
        return logits

    for name, model in models.items():
        if isinstance(objective, Regression):
            model.fit(x.numpy(), objective.scaled(y).numpy())
            logits = torch.from_numpy(model.predict(x_test.numpy())).double()[:, None]
        elif objective.multi_label:  # one model per label
            logits = torch.stack([fitted(model, y[:, c], 2)[:, 1] for c in range(num_classes)], 1)
        else:
            logits = fitted(model, y, num_classes)
        accuracy = float(objective.hits(logits, y_test).sum()) / len(y_test)
        found: dict[str, Any] = objective.reported({ACCURACY: accuracy})
        found |= objective.scores(logits, y_test)
        measure = partial(weighted_scores, logits, y_test, objective=objective)
        found |= intervals(measure, len(y_test), seed=seed)
        loss = float(objective.tested_losses(logits, y_test).mean())
        if ACCURACY in found and loss < -UNSEEN / 1e9:
            found["loss"] = loss
        else:  # of a class that no training record has, or of numbers
            for kind in ("intervals", "resamples"):
                found[kind].pop(LOG_LOSS, None)
        if ACCURACY in found and not objective.multi_label:
            found["intervals"][ACCURACY] = list(wilson(accuracy, len(y_test)))
        results[name] = found
    return results


def histogram(probabilities_N: Tensor, positive_N: Tensor) -> list[list[int]]:
    """Return ``[2][BINS]``: counts of records by probability of being positive, negatives first.

    Args:
        probabilities_N: Probabilities of being positive, in [0, 1].
        positive_N: True for records that are positive, bool.
    """
    bins_N = (probabilities_N * BINS).long().clamp(0, BINS - 1)
    return [torch.bincount(bins_N[positive_N == c], minlength=BINS).tolist() for c in (False, True)]


def sums(
    logits_NC: Tensor, labels_N: Tensor, *, metric: str, objective: Objective, seed: int
) -> Tensor:
    """Return sums over records from which :func:`score_of_sums` has the metric of all clients.

    Args:
        logits_NC: Logits on the CPU.
        labels_N: Labels as in :meth:`Objective.scores`.
        metric: One of ``names.METRICS``.
        objective: Says which class is the positive one.
        seed: Seed of the resamples: sums of two networks over the same records have the same ones.

    Returns:
        float64 [1 + RESAMPLED, ...]: sums over the records, and over bootstrap resamples of them.
    """
    resampled_RN = resampled(RESAMPLED, len(labels_N), make_generator(seed, "resamples"))
    weights_RN = torch.cat([torch.ones_like(resampled_RN[:1]), resampled_RN])
    return weighted_sums(logits_NC, labels_N, weights_RN, metric=metric, objective=objective)


def weighted_sums(
    logits_NC: Tensor, labels_N: Tensor, weights_RN: Tensor, *, metric: str, objective: Objective
) -> Tensor:
    """Return :func:`sums` under each weighting of the records, float64 [R, ...]."""
    if isinstance(objective, Regression):
        return weights_RN @ objective.terms(logits_NC, labels_N)
    if metric in (ACCURACY, LOG_LOSS):
        of_record = objective.hits if metric == ACCURACY else objective.tested_losses
        values_N = of_record(logits_NC, labels_N).double()
        return torch.stack([weights_RN.sum(1), weights_RN @ values_N], 1)
    predictions_N, ranks_NC = objective.predictions(logits_NC), objective.ranks(logits_NC)
    of_classes, scored = [], objective.scored_classes(logits_NC.shape[1])
    bins = _num_ranks(len(scored))
    places_NC = ((ranks_NC + LARGEST_RANK) * (bins / 2 / LARGEST_RANK)).long().clamp(0, bins - 1)
    for c in scored:
        member_N = objective.members(labels_N, c)
        if metric == "f1":
            called_N = objective.members(predictions_N, c)
            chosen = (member_N & called_N, member_N, called_N)
            of_classes.append(torch.stack([weights_RN[:, of].sum(1) for of in chosen], 1))
        else:
            cells_N = places_NC[:, c] + bins * member_N
            counts_RB = torch.zeros(len(weights_RN), 2 * bins, dtype=torch.float64)
            of_classes.append(counts_RB.index_add_(1, cells_N, weights_RN))
    return torch.stack(of_classes, 1)


def _num_ranks(classes: int) -> int:
    """Return the number of ranks that are distinguished in each class."""
    return max(FEWEST_RANKS, min(RANKS, ALL_RANKS // classes))


def resampled(resamples: int, number: int, generator: torch.Generator) -> Tensor:
    """Return float64 [R, N]: how often each of N records counts in each bootstrap resample."""
    rows_RN = torch.randint(number, (resamples, number), generator=generator)
    weights_RN = torch.zeros(resamples, number, dtype=torch.float64)
    return weights_RN.scatter_add_(1, rows_RN, torch.ones_like(weights_RN))


def summed(values: Sequence[float], metric: str, classes: int, number: float) -> Tensor | None:
    """Return a client's :func:`sums` in their form; None if they cannot be of so many records."""
    sizes = {ACCURACY: [2], LOG_LOSS: [2], "f1": [classes, 3], **dict.fromkeys(NUMBER_METRICS, [6])}
    shape = [1 + RESAMPLED, *sizes.get(metric, [classes, 2 * _num_ranks(classes)])]
    if len(values) != math.prod(shape):
        return None
    sums = torch.tensor(values, dtype=torch.float64).reshape(shape)
    counts = sums if metric in (ACCURACY, "f1") else sums.sum(-1)
    if metric in (LOG_LOSS, *NUMBER_METRICS):  # the rest are losses, or squares
        counts = sums[..., 0]
    return sums if counts.max() <= number else None


def score_of_sums(total: Tensor, metric: str) -> Tensor:
    """Return the metric [R] of clients' added :func:`sums`; NaN where undefined.

    Ranks are log odds from -10 to 10, with up to ten classes in steps of a twentieth.
    """
    if metric in (ACCURACY, LOG_LOSS):
        return total[:, 1] / total[:, 0]
    if metric in NUMBER_METRICS:
        return Regression.scores_of(total)[metric]
    if metric == "f1":
        of_classes = 2 * total[..., 0] / (total[..., 1] + total[..., 2])
        is_one = of_classes.shape[1] == 1  # its F1 is 0 where it neither occurs nor is predicted
        return (of_classes.nan_to_num(nan=0.0) if is_one else of_classes).nanmean(1)
    bins = total.shape[-1] // 2
    ranks_B = torch.arange(bins, dtype=torch.float64).repeat(2)
    positive_B = torch.arange(2 * bins) >= bins
    areas = [ranked_areas(positive_B, ranks_B, counts_RB) for counts_RB in total.unbind(1)]
    return torch.stack([area[metric != AUROC] for area in areas]).nanmean(0)


def best_threshold(
    histograms: Sequence[Sequence[Sequence[int]]], weights: Sequence[float]
) -> float | None:
    """Return the probability from which on a record counts as positive, in (0, 1).

    It maximises sensitivity + specificity - 1 (Youden 1950) over all records; the middle one of
    equally good ones is taken. None if there are no positive or no negative records.

    Args:
        histograms: Result of :func:`histogram` for each client.
        weights: Number of records that each counts for, regardless of the number in its histogram.
    """
    counts_K2B = torch.tensor(histograms, dtype=torch.float64)
    weights_K = torch.tensor(weights, dtype=torch.float64) / counts_K2B.sum((1, 2)).clamp(min=1)
    negative_B, positive_B = (counts_K2B * weights_K[:, None, None]).sum(0)
    if not (negative_B.sum() and positive_B.sum()):
        return None
    specificity_B = negative_B.cumsum(0)[:-1] / negative_B.sum()  # for thresholds 1, 2, ... bins
    youden_B = specificity_B + (1 - positive_B.cumsum(0)[:-1] / positive_B.sum())  # sensitivity
    best = torch.nonzero(youden_B >= youden_B.max() - 1e-12).flatten()
    return float(best[len(best) // 2] + 1) / BINS


def calibration(probabilities_NC: Tensor, labels_N: Tensor) -> dict[str, Any]:
    """Return the expected calibration error and the reliability of each bin of confidence.

    ``sum_b n_b / n |accuracy_b - confidence_b|`` over ten bins of the largest probability (Guo et
    al. 2017, arXiv 1706.04599, Eq. 3). ``bins`` has confidence, accuracy and number of records of
    each bin that is not empty.
    """
    confidence_N, predicted_N = probabilities_NC.double().max(1)
    hit_N = (predicted_N == labels_N).double()
    bin_N = (confidence_N * CALIBRATION_BINS).long().clamp(max=CALIBRATION_BINS - 1)
    bins = []
    for b in range(CALIBRATION_BINS):
        own_N = bin_N == b
        if bool(own_N.any()):
            means = float(confidence_N[own_N].mean()), float(hit_N[own_N].mean())
            bins.append([*means, int(own_N.sum())])
    error = sum(n * abs(hits - confidence) for confidence, hits, n in bins) / max(1, len(labels_N))
    return {"expected_error": error, "bins": bins}


def per_class(
    logits_NC: Tensor, labels_N: Tensor, *, objective: Objective
) -> list[dict[str, float | None]]:
    """Return each class's ``precision``, ``recall``, ``f1`` and ``count``, 0 where undefined.

    Also ``auroc`` and ``average_precision`` of the class against the rest, or of the label; None
    where undefined.
    """
    from sklearn.metrics import precision_recall_fscore_support

    classes = range(logits_NC.shape[1])
    columns = precision_recall_fscore_support(
        labels_N, objective.predictions(logits_NC), labels=list(classes), zero_division=0.0
    )
    names = ("precision", "recall", "f1", "count", "auroc", "average_precision")
    areas: list[Sequence[Any]] = [(math.nan, math.nan) for _ in classes]
    if bool(logits_NC.isfinite().all()):
        ranks_NC = objective.ranks(logits_NC)
        ones = torch.ones(1, len(labels_N), dtype=torch.float64)
        areas = [
            ranked_areas(objective.members(labels_N, c), ranks_NC[:, c], ones) for c in classes
        ]
    rows = [(*row, *area) for row, area in zip(zip(*columns, strict=True), areas, strict=True)]
    return [
        {n: float(v) if math.isfinite(v) else None for n, v in zip(names, row, strict=True)}
        for row in rows
    ]


def curves(logits_NC: Tensor, labels_N: Tensor, *, objective: Objective) -> dict[str, Any]:
    """Return ``roc`` and ``precision_recall``, ``{class: [x, y]}``, of the scored classes.

    They are empty with more than ``MOST_CURVES`` classes. A class that no record or every record
    has is left out. Each curve has at most ``CURVE_POINTS`` points.
    """
    from sklearn.metrics import precision_recall_curve, roc_curve

    found: dict[str, dict[str, Any]] = {"roc": {}, "precision_recall": {}}
    classes, ranks_NC = objective.scored_classes(logits_NC.shape[1]), objective.ranks(logits_NC)
    for c in classes if len(classes) <= MOST_CURVES and bool(ranks_NC.isfinite().all()) else ():
        member_N = objective.members(labels_N, c)
        if bool(member_N.any()) and not bool(member_N.all()):
            precision, recall, _ = precision_recall_curve(member_N, ranks_NC[:, c])
            for kind, pair in (
                ("roc", roc_curve(member_N, ranks_NC[:, c])[:2]),
                ("precision_recall", (recall, precision)),
            ):
                last = len(pair[0]) - 1
                at = sorted({round(k * last / (CURVE_POINTS - 1)) for k in range(CURVE_POINTS)})
                found[kind][str(c)] = [values[at].round(4).tolist() for values in pair]
    return found


def intervals(
    measure: Callable[[Tensor], Mapping[str, Tensor]], num_records: int, *, seed: int
) -> dict[str, dict[str, list[float]]]:
    """Return the 95 % ``intervals`` [low, high] of each number, by the percentile bootstrap.

    Efron (1979): 1000 resamples of the records with replacement, fewer if records are very many.
    Records are resampled one by one, even if several are of one person. Resamples in which a number
    is undefined do not count. A number that is the same in all of them has no interval, since too
    few records disagree. The numbers in the first ``resamples`` are also returned: those of two
    networks are of the same records, so that their differences are paired.

    Args:
        measure: Function from the count of each record, float64 [R, N], to numbers [R] by name.
        num_records: Number of records.
        seed: Seed of the draws.
    """
    generator = make_generator(seed, "bootstrap")
    resamples = max(100, min(RESAMPLES, MOST_RESAMPLED // max(1, num_records)))
    found: dict[str, list[Tensor]] = {}
    for start in range(0, resamples, AT_ONCE):
        number = min(AT_ONCE, resamples - start)
        for name, values in measure(resampled(number, num_records, generator)).items():
            found.setdefault(name, []).append(values)
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    joined = {name: torch.cat(parts).double() for name, parts in found.items()}
    results = {
        "intervals": {name: numbers.nanquantile(ends) for name, numbers in joined.items()},
        "resamples": {name: numbers[:RESAMPLES_TOLD] for name, numbers in joined.items()},
    }
    results["intervals"] = {k: pair for k, pair in results["intervals"].items() if pair.diff() > 0}
    return {
        kind: {name: t.tolist() for name, t in numbers.items() if bool(t.isfinite().all())}
        for kind, numbers in results.items()
    }


def own_scores(probabilities_NC: Tensor, labels_N: Tensor) -> dict[str, float]:
    """Return the value of every metric that users have registered.

    Raises:
        ConfigError: A metric fails, or its value is not a finite number.
    """
    results = {}
    for name, metric in TABLES["metric"].items():
        try:
            own = probabilities_NC.numpy().copy(), labels_N.numpy().copy()  # which it may change
            results[name] = float(metric(*own))
            if not math.isfinite(results[name]):
                raise ValueError(f"it gives {results[name]}")
        except Exception as error:
            raise ConfigError(
                f"the metric {name} of your own fails ({error}): let it return one finite number, "
                "and go on by fednas run resume=<run folder>."
            ) from error
    return results


def weighted_scores(
    logits_NC: Tensor, labels_N: Tensor, weights_RN: Tensor, *, objective: Objective
) -> dict[str, Tensor]:
    """Return each of ``names.METRICS`` under each weighting of the records, float64 [R]."""
    scores = objective.weighted_scores(logits_NC, labels_N, weights_RN)
    if objective.predicts_numbers:
        return scores
    for name, of_record in ((ACCURACY, objective.hits), (LOG_LOSS, objective.tested_losses)):
        scores[name] = weights_RN @ of_record(logits_NC, labels_N).double() / weights_RN.sum(1)
    return scores


def detailed(
    logits_NC: Tensor, labels_N: Tensor, *, objective: Objective, seed: int = 0
) -> dict[str, Any]:
    """Return all results of a report on test records, including metrics, as JSON values only.

    Intervals of shares of records are Wilson's; all others are those of :func:`intervals`.

    Args:
        logits_NC: float, on the CPU.
        labels_N: See :class:`~fednas_flwr.search.objective.Objective`; on the CPU.
        objective: Objective with the positive class and its threshold.
        seed: Seed of the bootstrap.
    """
    tested = asdict(measured(logits_NC, labels_N, objective=objective))
    scores = dict.fromkeys(SCORES) | objective.scores(logits_NC, labels_N)  # None if undefined
    metrics = objective.reported(tested | scores)
    measure = partial(weighted_scores, logits_NC, labels_N, objective=objective)
    if isinstance(objective, Regression):
        predicted_N = objective.predictions(logits_NC)
        shown = [tensor[:MOST_PAIRS].tolist() for tensor in (labels_N, predicted_N)]
        return metrics | {
            **intervals(measure, len(labels_N), seed=seed),
            "own": own_scores(predicted_N[:, None], labels_N),
            "pairs": list(zip(*shown, strict=True)),  # true and predicted
        }
    num_classes = logits_NC.shape[1]
    positive = objective.positive_class(num_classes)
    probabilities_NC = objective.probabilities(logits_NC.double())
    if objective.multi_label:  # each label of each record is a prediction of its own
        sure_NC = torch.stack([1 - probabilities_NC, probabilities_NC], dim=2)
        calibrated = calibration(sure_NC.flatten(0, 1), labels_N.flatten())
    else:
        calibrated = calibration(probabilities_NC, labels_N)
    # of the most probable class
    half = 0.5 if num_classes == 2 and not objective.multi_label else None
    results: dict[str, Any] = metrics | {
        "per_class": per_class(logits_NC, labels_N, objective=objective),
        "calibration": calibrated,
        "curves": curves(logits_NC, labels_N, objective=objective),
        **intervals(measure, len(labels_N), seed=seed),
        "positive": positive,
        "threshold": half if objective.threshold is None else objective.threshold,
        "own": own_scores(probabilities_NC, labels_N),
    }
    if not objective.multi_label:
        predicted_N = objective.predictions(logits_NC)
        occurring = torch.unique(predicted_N).tolist()
        results["only_class"] = occurring[0] if len(occurring) == 1 else None
        shares = torch.bincount(labels_N).double() / len(labels_N)
        results["majority"] = float(shares.max())
        results["shares_log_loss"] = float(torch.special.entr(shares).sum())
        cells = torch.bincount(labels_N * num_classes + predicted_N, minlength=num_classes**2)
        results["confusion"] = cells.view(num_classes, num_classes).tolist()  # by true class first
    whole = measure(torch.ones(1, len(labels_N), dtype=torch.float64))
    positives = 0 if positive is None else int(objective.members(labels_N, positive).sum())
    records = {"sensitivity": positives, "specificity": len(labels_N) - positives}
    records[ACCURACY] = 0 if objective.multi_label else len(labels_N)
    for name, number in records.items():
        if name in whole and number:
            results.setdefault(name, float(whole[name]))
            results["intervals"][name] = list(wilson(results[name], number))
    return results
