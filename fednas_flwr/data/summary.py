"""Summary of a data set in sentences: columns or classes, missing cells, division over clients.

A run prints :func:`reading_notes` before it begins; ``fednas data`` prints :func:`summary`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fednas_flwr.base.errors import listed
from fednas_flwr.data import records as rd
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.data.oddities import oddities
from fednas_flwr.data.table_files import typed
from fednas_flwr.settings.names import QUANTILES, SPLITS

FEWEST = 20  # with fewer training records, a client is called small
FEW_IMAGES = 5_000  # with fewer images, a pretrained network is suggested
RARE = 0.3  # below this multiple of an equal share of all classes, a class is called rare
_MOST = 12  # names in one sentence


def reading_notes(prepared: Prepared, missing: Mapping[str, int] | None = None) -> list[str]:
    """Return sentences on what a reader has found, for users before a run; none for arrays.

    Args:
        prepared: The data set.
        missing: Its :func:`missing_counts`, if they are known.
    """
    records = prepared.train
    lines = list(records.notes)
    if not records.schema or not (records.label or records.multi_label):
        return lines
    missing = missing_counts(records) if missing is None else missing
    for kind, word in ((rd.NUMBER, "numbers"), (rd.DATE, "dates"), (rd.CATEGORY, "categories")):
        columns = [column for column in records.schema if column.kind == kind]
        texts = [_short(column, missing[column.name]) for column in columns]
        if texts:
            lines.append(f"{word}: {listed(texts, _MOST)}")
    of_columns = f"labels in {records.label}" if records.label else "labels"
    word = of_columns if records.multi_label else f"label {records.label}"
    word = f"number to predict, {records.label}" if records.is_regression else word
    lines.append(f"{word}: {listed(_classes(records), _MOST)}")
    total = sum(missing.values())
    if total:
        more = " (a further feature says so)" if any(c.indicator for c in records.schema) else ""
        rule = f"a number or date counts as the mean{more}, a category as no category"
        lines.append(f"{total:,} cells are missing: {rule}")
    return lines


def summarised(splits: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Return the number of clients, the total records of each split, and quantiles of their sizes.

    Args:
        splits: Each client's number of records, by split.
    """
    totals = [sum(sizes.values()) for sizes in splits]
    return {
        "clients": len(splits),
        "records": {split: sum(sizes[split] for sizes in splits) for split in SPLITS},
        "sizes": np.quantile(totals, QUANTILES, method="nearest").tolist(),
    }


def summary(
    prepared: Prepared, parts: rd.Parts, names: Sequence[str], division: Mapping[str, Any]
) -> list[str]:
    """Return sentences that describe a data set and its division over clients.

    Args:
        prepared: The data set.
        parts: The rows of every client.
        names: The clients' names.
        division: The split ``key``, and the ``fractions`` of train, validation and test.
    """
    records, test = prepared.train, prepared.server_test
    lines = [
        f"{len(records):,} records for clients"
        + (f", {len(test):,} in the server's test set" if test is not None else "")
        + f"; shape of one: {'x'.join(map(str, prepared.input_shape))}"
    ]
    missing = missing_counts(records)
    lines += reading_notes(prepared, missing)
    lines += [f"note: {line}" for line in oddities(records, test, clients=names)]
    if not records.label and not (records.schema and records.multi_label):
        lines.append(
            f"{'labels' if records.multi_label else 'classes'}: {listed(_classes(records), _MOST)}"
        )
    ends: dict[str, list[str]] = {}
    for column in records.schema:
        number = missing[column.name]
        end = f", {'all' if number == len(records) else f'{number:,}'} missing" if number else ""
        values = _values(records, column)
        lines.append(f"column {column.name}: {_contents(values, column)}{end}")
        if len(values):
            ends[column.name] = _ends(values, column)
    lines += _division(records, parts, names, division)
    return lines + [f"suggestion: {line}" for line in _suggestions(prepared, ends)]


def missing_counts(records: rd.Records) -> dict[str, int]:
    """Return the number of missing cells by column; unknown categories count as missing."""
    if not records.schema:
        return {}
    features, names = records.features.numpy(), records.feature_names
    missing = dict(zip(names, np.isnan(features).sum(0).tolist(), strict=True))
    ones = dict(zip(names, np.count_nonzero(features, axis=0).tolist(), strict=True))
    return {
        column.name: len(records) - sum(ones[f"{column.name}={v}"] for v in column.categories)
        if column.kind == rd.CATEGORY
        else missing[column.name]
        for column in records.schema
    }


def _contents(values: np.ndarray, column: rd.Column) -> str:
    """Return a description of a column's contents, without the number of missing cells."""
    if column.kind == rd.CATEGORY:
        return f"one of {listed(column.categories, _MOST)}"
    if not len(values):
        return column.kind
    if column.kind == rd.DATE:
        return f"date, {' to '.join(_ends(values, column))}"
    return f"number, {_spread(values)}"


def _values(records: rd.Records, column: rd.Column) -> np.ndarray:
    """Return the values of a column that are not missing; none for categories."""
    if column.kind == rd.CATEGORY:
        return np.empty(0)
    values = records.features[:, records.feature_names.index(column.name)].numpy().astype(float)
    return values[~np.isnan(values)]


def _ends(values: np.ndarray, column: rd.Column) -> list[str]:
    """Return the smallest and the largest of some values."""
    ends = values.min(), values.max()
    if column.kind == rd.DATE:
        return [str(np.datetime64(int(day), "D")) for day in ends]
    return [f"{end:g}" for end in ends]


def _spread(numbers: np.ndarray) -> str:
    """Return ends and mean of some numbers."""
    return f"{numbers.min():g} to {numbers.max():g}, mean {numbers.mean():g}"


def _division(
    records: rd.Records, parts: rd.Parts, names: Sequence[str], division: Mapping[str, Any]
) -> list[str]:
    """Return the records of each client by split and class, and remarks on what is odd."""
    lines, odd, fractions = [], [], division["fractions"]
    for client, rows in zip(names, parts, strict=True):
        split = rd.assign_splits(records.ids[rows], **division, trains=True)
        sizes = np.bincount(split, minlength=len(SPLITS))
        counts = rd.count_labels(records.labels[rows], len(records.class_names))
        by_split = ", ".join(f"{n:,} {name}" for n, name in zip(sizes, SPLITS, strict=True))
        by_class = [f"{n} {c:,}" for n, c in zip(records.class_names, counts, strict=True)]
        lines.append(f"{client}: {by_split}; {listed(by_class, _MOST)}")
        empty = [name for name, n in zip(SPLITS, sizes, strict=True) if n == 0 < fractions[name]]
        if empty:
            odd.append(f"{client} has no record for {' and '.join(empty)}")
        elif sizes[0] < FEWEST:
            odd.append(f"{client} is small: {sizes[0]} training records")
        lacking = [n for n, c in zip(records.class_names, counts, strict=True) if c == 0]
        if lacking:
            odd.append(f"{client} has no record of {listed(lacking, _MOST)}")
    if not records.by_person:
        doubled = int((np.diff(np.sort(rd.keys_of(records.ids))) == 0).sum())
        if doubled:
            equal = "record equals another" if doubled == 1 else "records equal others"
            odd.append(f"{doubled:,} {equal}; equal ones stay in one part")
    return lines + [f"note: {line}" for line in odd]


def _suggestions(prepared: Prepared, ends: Mapping[str, list[str]]) -> list[str]:
    records = prepared.train
    lines = []
    if len(prepared.input_shape) == 1:
        lines.append("search_space=mlp_small, which is for tables")
    if records.features.dtype == torch.uint8 and len(records) < FEW_IMAGES:
        lines.append(
            "dataset.backbone.name=<timm or torchvision model>, since its features are better than "
            "what so few images teach a network from scratch"
        )
    counts = torch.tensor(rd.count_labels(records.labels, prepared.num_classes))
    shares = counts / max(1, len(records))
    rare = int(shares.argmin())
    rarest = records.class_names[rare]
    one_class = not records.multi_label
    if one_class and prepared.num_classes == 2 and float(shares[rare]) < 0.5:
        lines.append(f"evaluation.positive={rarest}, the rarer class, for AUROC and the like")
    if one_class and float(shares[rare]) < RARE / prepared.num_classes:
        share = f"{100 * float(shares[rare]):.1f} %"
        lines.append(f"training.class_factors: {rarest} is {share} of the records")
    pairs = [(name, ",".join(pair)) for name, pair in ends.items() if len({*pair}) == 2]
    keys = {name: typed(name) for name, _ in pairs}
    odd = [name for name in keys if not re.fullmatch(r"[\w \\()\[\]{}:=,/+.$%*@?|-]+", name, re.A)]
    ranges = ",".join(f"{keys[name]}:[{pair}]" for name, pair in pairs if name not in odd)
    if odd and prepared.uses_own_statistics:
        lines.append(f"other names for {listed(odd, 5)}, which no dataset.ranges can spell")
    declared = [f"'dataset.ranges={{{ranges}}}'"] if ranges else []
    experiment = "private_table"
    if records.is_regression:
        least, most = records.labels.aminmax()
        declared.append(f"dataset.target_range=[{least:g},{most:g}]")
        experiment = "private_numbers"
    if declared and prepared.uses_own_statistics:
        lines.append(
            f"with privacy=dp {' '.join(declared)}, with the ends that are usual in place of "
            f"these, which are of the records, and experiment=fedavg/{experiment}"
        )
    if records.schema and not records.by_person:
        lines.append("dataset.id_column=<column>, if several rows can be of one person")
    return lines


def _classes(records: rd.Records) -> list[str]:
    if records.is_regression:
        return [_spread(records.labels.double().numpy())]
    counts = rd.count_labels(records.labels, len(records.class_names))
    return [f"{name} {n:,}" for name, n in zip(records.class_names, counts, strict=True)]


def _short(column: rd.Column, missing: int) -> str:
    details = [f"{len(column.categories)} values"] if column.kind == rd.CATEGORY else []
    details += [f"{missing:,} missing"] if missing else []
    return f"{column.name} ({', '.join(details)})" if details else column.name
