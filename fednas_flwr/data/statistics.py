"""Means and deviations of a table's columns: a client's own, and those of all clients together.

Clients without declared statistics send their columns' :class:`Moments`. The server pools them, and
all clients then standardise alike, so that one network fits all clients and later users.
Private clients instead release noised sums of :func:`unit_vectors`, once. :func:`from_release`
turns these into statistics: for a table with the help of its ranges; for a backbone's pooled
features, which all have one length, into their mean.

Tensor suffixes: N records, D columns of numbers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fednas_flwr.base.pretrained import LENGTH
from fednas_flwr.data.records import Records
from fednas_flwr.settings.names import FEWEST_VOTES
from fednas_flwr.settings.parser import Between, Checked

LEAST_RELATIVE_STD = 1e-7  # float32 cannot distinguish values that are closer than this
LEAST_STD = 1e-37  # float32 cannot divide by less
END = math.sqrt(3)  # end of a range, in standard deviations of the uniform distribution over it
LEAST_REFINED_STD = 1e-3  # relative to the deviation that a range gives
DROWNED = 4.0  # standard deviations of noise below which a share of known numbers says nothing
Deviation = Annotated[float, Between(0, 1e30, above=True)]
LARGEST_NUMBER = 1e29  # that a client may send: the squares of many do not overflow
DECIMALS = 3  # of the mean of features, which is part of every request
REACH = 3.0  # multiple of the median client's reach by which one client may move the statistics


@dataclass(frozen=True)
class Statistics(Checked):
    """Statistics by which all clients standardise a table, or pooled features.

    Attributes:
        mean: Mean of each feature; 0 for features that are 0 or 1.
        std: Standard deviation of each feature, above 0; 1 for features that are 0 or 1, and for
            pooled features.
        target: Mean and deviation of the target, if it is a number without a declared range.
    """

    mean: tuple[float, ...]
    std: tuple[Deviation, ...]
    target: tuple[float, ...] = ()


@dataclass(frozen=True)
class Moments(Checked):
    """Statistics of one column of numbers, without the missing ones.

    Attributes:
        count: Number of values.
        mean: Their mean; 0 if there are none.
        std: Their standard deviation (divided by ``count``); 0 if there are none.
    """

    count: Annotated[int, Between(0)]
    mean: Annotated[float, Between(-LARGEST_NUMBER, LARGEST_NUMBER)]
    std: Annotated[float, Between(0, LARGEST_NUMBER)]


def column_moments(records: Records, rows: Tensor) -> list[Moments]:
    """Return the moments of each leading numeric feature over some rows (int64) of a table.

    If the target is a number, its moments are the last.
    """
    columns = [records.features[rows, : records.num_numeric]]
    columns += [records.labels[rows, None]] if records.is_regression else []
    numbers = torch.cat(columns, dim=1).double().numpy()
    known = ~np.isnan(numbers)
    count = known.sum(axis=0)
    divisor = np.maximum(count, 1)
    mean = np.where(known, numbers, 0).sum(axis=0) / divisor
    std = np.sqrt((np.where(known, numbers - mean, 0) ** 2).sum(axis=0) / divisor)
    return [Moments(*of) for of in zip(count.tolist(), mean.tolist(), std.tolist(), strict=True)]


def pooled(parties: Sequence[Sequence[Moments]], records: Records) -> Statistics:
    """Return the statistics of all parties' records together, in float64.

    ``mean = sum_k n_k m_k / n`` and ``var = sum_k n_k (s_k^2 + (m_k - mean)^2) / n`` (Chan et al.
    1979). A column that is constant or missing everywhere gets std 1.

    Args:
        parties: Each party's moments, of the same columns.
        records: Records of the parties' form: features beyond the columns are 0 or 1, and the last
            column is the target if that is a number.
    """
    mean, std = [], []
    for column in zip(*parties, strict=True):
        total = max(sum(of.count for of in column), 1)
        centre = sum(of.count * of.mean for of in column) / total
        square = sum(of.count * (of.std**2 + (of.mean - centre) ** 2) for of in column) / total
        deviation = float(np.sqrt(square))
        mean.append(float(centre))
        least = max(LEAST_RELATIVE_STD * abs(centre), LEAST_STD)
        std.append(deviation if deviation > least else 1.0)
    target = (mean.pop(), std.pop()) if records.is_regression else ()
    rest = records.features.shape[1] - len(mean)
    return Statistics((*mean, *(0.0,) * rest), (*std, *(1.0,) * rest), target)


def bounded(
    parties: Mapping[int, Sequence[Moments]],
) -> tuple[dict[int, list[Moments]], dict[int, int]]:
    """Return moments none of which moves the pooled ones far, and the columns that were scaled.

    A client's reach in a column is the root mean square of its numbers about the median client's
    mean, ``r_k^2 = s_k^2 + (m_k - m)^2``. If its part in the pooled deviation, ``sqrt(n_k / n)
    r_k``, exceeds ``REACH`` times the median client's reach, its mean and deviation are scaled
    about ``(m, 0)`` until they are equal. All other moments stay bit for bit as they are. Nothing
    is scaled with one or two clients, or in columns that most call constant: nobody can know then
    who is right.

    Args:
        parties: Each client's moments, of the same columns.

    Returns:
        Each client's moments and, for those that were scaled, the first such column.
    """
    limited = {client: list(columns) for client, columns in parties.items()}
    far: dict[int, int] = {}
    for column in range(min(map(len, limited.values()), default=0)):
        voters = {client: of[column] for client, of in limited.items() if of[column].count}
        if len(voters) < FEWEST_VOTES:
            continue
        centre = median(of.mean for of in voters.values())
        total = sum(of.count for of in voters.values())
        reach = {c: math.hypot(of.std, of.mean - centre) for c, of in voters.items()}
        usual = median(reach.values())
        for client, of in voters.items() if usual > LEAST_STD else ():
            most = REACH * usual * math.sqrt(total / of.count)
            if reach[client] > most:
                scale = most / reach[client]
                mean = centre + scale * (of.mean - centre)
                limited[client][column] = Moments(of.count, mean, scale * of.std)
                far.setdefault(client, column)
    return limited, far


def unit_vectors(features: Tensor, ranges: Statistics, *, num_columns: int) -> Tensor:
    """Return each record's contribution to a release of statistics, of norm at most 1.

    Args:
        features: ``[N, F]``, of a table or of a backbone.
        ranges: As in :func:`bounded_powers`.
        num_columns: D for a table; 0 for pooled features.

    Returns:
        float64 ``[N, vector_size]``: :func:`bounded_powers` divided by :func:`largest_norm`, or the
        features divided by their length.
    """
    if not num_columns:
        return features.double() / LENGTH
    return bounded_powers(features[:, :num_columns], ranges) / largest_norm(num_columns)


def vector_size(num_features: int, *, num_columns: int) -> int:
    """Return the length of each of :func:`unit_vectors`."""
    return 3 * num_columns or num_features


def from_release(
    means: Tensor, ranges: Statistics, *, num_columns: int, noise: float
) -> Statistics:
    """Return the statistics that follow from noised means of :func:`unit_vectors`.

    A mean of features is shrunk by what noise adds to its square (James and Stein 1961). So a mean
    of noise alone becomes 0, and no mean is longer than the features.

    Args:
        means: float ``[vector_size]``.
        ranges: As in :func:`bounded_powers`.
        num_columns: As in :func:`unit_vectors`.
        noise: Standard deviation of the noise on each of ``means``.
    """
    if num_columns:
        norm = largest_norm(num_columns)
        return refined(norm * means, ranges, noise=norm * noise)
    square = max(float(means.double().square().sum()), 1e-12)
    kept = max(0.0, 1 - len(means) * noise**2 / square)
    centre = LENGTH * min(kept, square**-0.5) * means.double()
    mean = tuple(round(value, DECIMALS) for value in centre.tolist())
    return Statistics(mean, (1.0,) * len(mean), ranges.target)


def bounded_powers(numbers_ND: Tensor, ranges: Statistics) -> Tensor:
    """Return ``(1, u, u^2)`` of each number, with ``u`` its position in its range, from -1 to 1.

    Numbers outside the range count as its nearer end, and missing ones as ``(0, 0, 0)``. The norm
    of a record is therefore at most :func:`largest_norm`.

    Args:
        numbers_ND: Numbers, NaN where missing.
        ranges: Ranges of the columns, and possibly of features after them, in the form of
            ``Dataset.column_statistics``.

    Returns:
        float64 ``[N, 3 D]``: all of 1, then all of u, then all of u^2.
    """
    mean_D, std_D = _of_columns(ranges, numbers_ND.shape[1])
    known_ND = ~numbers_ND.isnan()
    u_ND = ((numbers_ND.double() - mean_D) / (END * std_D)).clamp(-1, 1)
    u_ND = torch.where(known_ND, u_ND, 0.0)
    return torch.cat([known_ND.double(), u_ND, u_ND**2], dim=1)


def largest_norm(num_columns: int) -> float:
    """Return the largest norm of a record's :func:`bounded_powers`, ``sqrt(3 D)``."""
    return math.sqrt(3 * num_columns)


def refined(means: Tensor, ranges: Statistics, *, noise: float) -> Statistics:
    """Return the statistics that follow from noised means of :func:`bounded_powers`.

    With ``k, a, b`` the means of 1, u and u^2, u has mean ``a / k`` and variance
    ``b / k - (a / k)^2``. A variance below the level of the noise is set to that level,
    ``noise / k``, since a deviation that is too small makes features huge. A column keeps the
    statistics of its range if noise hides whether it has any number.

    Args:
        means: float ``[3 D]``.
        ranges: As in :func:`bounded_powers`.
        noise: Standard deviation of the noise on each of ``means``.
    """
    known, first, second = means.double().reshape(3, -1)
    mean_D, std_D = _of_columns(ranges, len(known))
    share = known.clamp(min=1e-12)
    centre = (first / share).clamp(-1, 1)
    least = (noise / share).clamp(LEAST_REFINED_STD**2 / 3, 1)
    variance = (second / share - centre**2).clamp(max=1).maximum(least)
    is_known = known > DROWNED * noise
    mean = torch.where(is_known, mean_D + END * std_D * centre, mean_D).tolist()
    std = torch.where(is_known, END * std_D * variance.sqrt(), std_D).tolist()
    return Statistics((*mean, *ranges.mean[len(mean) :]), (*std, *ranges.std[len(std) :]))


def are_within(statistics: Statistics, ranges: Statistics, *, num_columns: int) -> bool:
    """Return true if :func:`from_release` can give these statistics within these ranges."""
    if not num_columns:
        half = 0.5 * 10**-DECIMALS * math.sqrt(len(statistics.mean))
        is_short = math.hypot(*statistics.mean) <= LENGTH + half
        return is_short and set(statistics.std) == {1.0} and statistics.target == ranges.target
    mean, std = _of_columns(statistics, num_columns)
    own_mean, own_std = _of_columns(ranges, num_columns)
    slack = 1 + 1e-6
    return (
        statistics.target == ranges.target
        and statistics.mean[num_columns:] == ranges.mean[num_columns:]
        and statistics.std[num_columns:] == ranges.std[num_columns:]
        and bool(((mean - own_mean).abs() <= slack * END * own_std).all())
        and bool((std <= slack * END * own_std).all())
        and bool((slack * std >= LEAST_REFINED_STD * own_std).all())
    )


def _of_columns(statistics: Statistics, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return mean and std of the leading columns, float64 [D]."""
    mean, std = statistics.mean[:num_columns], statistics.std[:num_columns]
    return torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
