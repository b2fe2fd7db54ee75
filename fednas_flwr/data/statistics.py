"""Means and deviations of a table's columns: a client's own, and those of all clients together.

Clients without declared statistics tell their columns' :class:`Moments`; the server pools them, and
all clients then standardise alike, so that one network fits all of them and whoever uses it later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import Tensor

from fednas_flwr.data.records import Records
from fednas_flwr.typed import Between, Checked

LEAST_RELATIVE_STD = 1e-7  # float32 cannot tell values that are closer than this
Deviation = Annotated[float, Between(0, 1e30, above=True)]


@dataclass(frozen=True)
class Statistics(Checked):
    """By what all clients standardise a table.

    Attributes:
        mean: Per feature; 0 of one that is 0 or 1.
        std: Likewise, above 0; 1 of one that is 0 or 1.
    """

    mean: tuple[float, ...]
    std: tuple[Deviation, ...]


@dataclass(frozen=True)
class Moments(Checked):
    """Of one column of numbers, without the missing ones.

    Attributes:
        count: How many numbers there are.
        mean: Their mean; 0 of none.
        std: Their standard deviation (by ``count``), 0 of none.
    """

    count: Annotated[int, Between(0)]
    mean: float
    std: Annotated[float, Between(0)]


def column_moments(records: Records, rows: Tensor) -> list[Moments]:
    """Return the moments of each leading numeric feature over some rows (int64) of a table."""
    numbers = records.features[rows, : records.num_numeric].double().numpy()
    known = ~np.isnan(numbers)
    count = known.sum(axis=0)
    divisor = np.maximum(count, 1)
    mean = np.where(known, numbers, 0).sum(axis=0) / divisor
    std = np.sqrt((np.where(known, numbers - mean, 0) ** 2).sum(axis=0) / divisor)
    return [Moments(*of) for of in zip(count.tolist(), mean.tolist(), std.tolist(), strict=True)]


def pooled(parties: Sequence[Sequence[Moments]], *, num_features: int) -> Statistics:
    """Return the statistics of all parties' records together, in float64.

    ``mean = sum_k n_k m_k / n`` and ``var = sum_k n_k (s_k^2 + (m_k - mean)^2) / n`` (Chan et al.
    1979). A column that is constant or missing everywhere gets std 1.

    Args:
        parties: Moments of the same columns of each.
        num_features: Number of features, those beyond the columns being 0 or 1.
    """
    mean, std = [], []
    for column in zip(*parties, strict=True):
        total = max(sum(of.count for of in column), 1)
        centre = sum(of.count * of.mean for of in column) / total
        square = sum(of.count * (of.std**2 + (of.mean - centre) ** 2) for of in column) / total
        deviation = float(np.sqrt(square))
        mean.append(float(centre))
        std.append(deviation if deviation > LEAST_RELATIVE_STD * abs(centre) else 1.0)
    rest = num_features - len(mean)
    return Statistics((*mean, *(0.0,) * rest), (*std, *(1.0,) * rest))
