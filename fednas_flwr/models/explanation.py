"""Explanation of a network: importance and effects of columns, and surest mistakes on images.

Permutation importance (Breiman 2001; Fisher, Rudin and Dominici 2019, arXiv 1801.01489) and partial
effects (Friedman 2001), both on test records. Correlated columns share their importance, so they
are listed.

Tensor suffixes: N records, F features, C classes, R resamples.
"""

import io
from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.loaders import Split
from fednas_flwr.data.records import CATEGORY, Column, Records, feature_names
from fednas_flwr.models.metrics import resampled, score_of_sums, weighted_sums
from fednas_flwr.search.objective import Objective
from fednas_flwr.settings.names import LOSSES

FEWEST, PERMUTATIONS = 5, 40  # shuffles of each column, each on a resample of the records
MOST_PASSES = 4000  # passes of the network; if there were more, columns get the fewest shuffles
MOST_RECORDS, MOST_VALUES = 2000, 20_000_000  # of a table, and of all that pass at once
MISTAKES, LARGEST_MISTAKE = 12, 48  # images, and pixels along a side
EFFECTS, POINTS = 6, 11
CORRELATED = 0.7  # least correlation with which two columns are listed


@torch.no_grad()
def importance(
    network: nn.Module,
    split: Split,
    schema: Sequence[Column],
    *,
    objective: Objective,
    metric: str,
    sites: np.ndarray,
    seed: int,
) -> dict[str, Any]:
    """Return ``columns``, ``correlated`` and ``effects``, JSON values only.

    ``columns`` have a name, the ``drop`` of the metric when the column's values are shuffled among
    the records of each site, and its 95 % ``interval`` over shuffles and resamples of the records;
    the largest drop comes first. Areas under curves are those of :func:`score_of_sums`.
    ``correlated`` are pairs of columns with their correlation.
    ``effects`` have, for the most important columns, values ``x`` and the mean probability ``y`` of
    the positive class if all records had these values; empty if no class is the positive one.

    Args:
        network: Network in evaluation mode, on the CPU.
        split: Test records of a table.
        schema: Their columns.
        objective: Objective that computes scores and probabilities.
        metric: One of ``names.METRICS``.
        sites: The site of each record [N]; empty if unknown.
        seed: Seed of shuffles and resamples.
    """
    generator = make_generator(seed, "importance")
    chosen = torch.randperm(len(split), generator=generator)[:MOST_RECORDS].sort().values
    x_NF, labels_N = split.batch(chosen, "cpu")
    names = sites if len(sites) else np.zeros(len(split))
    sites_N = torch.from_numpy(np.unique(names, return_inverse=True)[1])[chosen]
    number, places = len(chosen), _places(schema)
    columns: list[dict[str, Any]] = []

    logits_NC = network(x_NF)

    permutations = max(FEWEST, min(PERMUTATIONS, MOST_PASSES // len(places)))
    resamples = torch.split(resampled(permutations, number, generator), 1)

    def scores(logits: Iterable[Tensor]) -> Tensor:
        """The metric [R] of the logits [N, C] that go with each resample."""
        sums = [
            weighted_sums(logits_NC, labels_N, weights_1N, metric=metric, objective=objective)
            for logits_NC, weights_1N in zip(logits, resamples, strict=True)
        ]
        return score_of_sums(torch.cat(sums), metric)

    before_R = scores([logits_NC] * permutations)
    by_site_N = sites_N.argsort(stable=True)

    def shuffled(at: list[int]) -> Tensor:
        order_N = torch.rand(number, generator=generator, dtype=torch.float64)
        changed_NF = x_NF.clone()
        changed_NF[by_site_N[:, None], at] = x_NF[(sites_N + order_N).argsort()[:, None], at]
        return changed_NF

    at_once = max(1, MOST_VALUES // x_NF.numel())
    for name, at in places.items():
        after: list[Tensor] = []
        for some in torch.split(torch.arange(permutations), at_once):
            after += network(torch.cat([shuffled(at) for _ in some])).split(number)
        drop_R = (before_R - scores(after)) * (-1 if metric in LOSSES else 1)
        ends = drop_R.nanquantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
        if bool(ends.isfinite().all()):
            drop = float(drop_R.nanmean())
            columns.append({"name": name, "drop": drop, "interval": ends.tolist()})
    columns.sort(key=lambda row: -row["drop"])
    numbers = [column.name for column in schema if column.kind != CATEGORY]
    size = len(numbers)
    correlation_FF = torch.corrcoef(x_NF[:, :size].T.double()).reshape(size, size)
    correlated = [
        [a, b, float(correlation_FF[i, j])]
        for i, a in enumerate(numbers)
        for j, b in enumerate(numbers[:i])
        if abs(correlation_FF[i, j]) >= CORRELATED
    ]
    positive = objective.positive_class(logits_NC.shape[1])
    effects = []
    for name in [row["name"] for row in columns[: EFFECTS if positive is not None else 0]]:
        column, at = next(c for c in schema if c.name == name), places[name]
        values, settings = _settings(column, x_NF[:, at], at, split)
        shares = []
        for setting in settings:
            changed_NF = x_NF.clone()
            changed_NF[:, at] = setting
            shares.append(float(objective.probabilities(network(changed_NF))[:, positive].mean()))
        effects.append({"name": column.name, "kind": column.kind, "x": values, "y": shares})
    return {"columns": columns, "correlated": correlated, "effects": effects}


def mistakes(records: Records, logits_NC: Tensor, labels_N: Tensor) -> list[dict[str, Any]]:
    """Return the wrong predictions that the network is surest of: image, classes, probability.

    Args:
        records: uint8 images.
        logits_NC: Logits of the records.
        labels_N: Their classes.
    """
    from PIL import Image

    sure_N, called_N = logits_NC.double().softmax(1).max(1)
    wrong = torch.nonzero(called_N != labels_N).flatten()
    rows = wrong[sure_N[wrong].argsort(descending=True)][:MISTAKES].tolist()
    found = []
    for row in rows:
        pixels, file = records.features[row], io.BytesIO()
        pixels = pixels if len(pixels) in (1, 3) else pixels[:1]
        image = Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy())
        image.thumbnail((LARGEST_MISTAKE, LARGEST_MISTAKE))
        image.save(file, "PNG")
        found.append(
            {
                "png": b64encode(file.getvalue()).decode(),
                "true": records.class_names[int(labels_N[row])],
                "predicted": records.class_names[int(called_N[row])],
                "probability": float(sure_N[row]),
            }
        )
    return found


def _places(schema: Sequence[Column]) -> dict[str, list[int]]:
    """Return the positions of each column's features."""
    names = feature_names(schema)
    return {one.name: [names.index(name) for name in feature_names([one])] for one in schema}


def _settings(
    column: Column, own_NF: Tensor, at: list[int], split: Split
) -> tuple[list[Any], list[Tensor]]:
    """Return values of a column, as a person knows them, and its features for each value."""
    if column.kind == CATEGORY:
        return list(column.categories), list(torch.eye(len(at)))
    grid = torch.unique(own_NF[:, 0].quantile(torch.linspace(0.05, 0.95, POINTS)))
    values = grid.double() * split.std[at[0]] + split.mean[at[0]]
    present = torch.zeros(len(at))  # and not missing
    settings = [present.index_put((torch.tensor(0),), value) for value in grid]
    return [float(f"{value:.5g}") for value in values], settings
