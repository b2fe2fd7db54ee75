"""Means and deviations of a table's columns: a client's own, and those of all clients together.

Clients without declared statistics tell their columns' :class:`Moments`; the server pools them, and
all clients then standardise alike, so that one network fits all of them and whoever uses it later.
Private clients release noised sums of :func:`unit_vectors` instead, once, of which
:func:`from_release` makes statistics: of a table by its ranges, of a backbone's pooled features,
which all have one length, their mean.

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

LEAST_RELATIVE_STD = 1e-7  # float32 cannot tell values that are closer than this
LEAST_STD = 1e-37  # nor divide by less
END = math.sqrt(3)  # of a range, in deviations of numbers that are equally likely everywhere in it
LEAST_REFINED_STD = 1e-3  # of the deviation that a range gives
DROWNED = 4.0  # standard deviations of noise below which a share of known numbers says nothing
Deviation = Annotated[float, Between(0, 1e30, above=True)]
LARGEST_NUMBER = 1e29  # of what a client may say: the squares of many do not overflow
DECIMALS = 3  # of the mean of features, which travels with every request
REACH = 3.0  # times the median client's, by which one client moves what standardises all


@dataclass(frozen=True)
class Statistics(Checked):
    """Statistics by which all clients standardise a table, or pooled features.

    Attributes:
        mean: Per feature; 0 of one that is 0 or 1.
        std: Per feature, above 0; 1 of one that is 0 or 1, and of pooled features.
        target: Mean and deviation of the target, if it is a number without a declared range.
    """

    mean: tuple[float, ...]
    std: tuple[Deviation, ...]
    target: tuple[float, ...] = ()


@dataclass(frozen=True)
class Moments(Checked):
    """Statistics of one column of numbers, without the missing ones.

    Attributes:
        count: How many numbers there are.
        mean: Their mean; 0 of none.
        std: Their standard deviation (by ``count``), 0 of none.
    """

    count: Annotated[int, Between(0)]
    mean: Annotated[float, Between(-LARGEST_NUMBER, LARGEST_NUMBER)]
    std: Annotated[float, Between(0, LARGEST_NUMBER)]


def column_moments(records: Records, rows: Tensor) -> list[Moments]:
    """Return the moments of each leading numeric feature over some rows (int64) of a table.

    Those of a target that is a number are the last.
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
        parties: Moments of the same columns of each.
        records: Of the parties' form: features beyond the columns are 0 or 1, and the last column
            is the target if that is a number.
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
    """Return moments of which none moves the pooled ones far, and the columns that were far.

    A client's reach in a column is the root mean square of its numbers about the median client's
    mean, ``r_k^2 = s_k^2 + (m_k - m)^2``. Where its part in the pooled deviation, ``sqrt(n_k / n)
    r_k``, is more than ``REACH`` times the median client's reach, its mean and deviation are scaled
    about ``(m, 0)`` until it is as much. All other moments stay as they are, bit by bit. Of one or
    two clients, or where most say that a column is constant, nobody can tell who is right.

    Args:
        parties: By client, moments of the same columns.

    Returns:
        By client its moments, and, of those that were scaled, the first such column.
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
    """Return what each record adds to a release of statistics, of a norm of 1 at most.

    Args:
        features: ``[N, F]``, of a table, or of a backbone.
        ranges: As of :func:`bounded_powers`.
        num_columns: D, of a table; 0 of pooled features.

    Returns:
        float64 ``[N, vector_size]``: :func:`bounded_powers` by :func:`largest_norm`, or the
        features by their length.
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
    """Return the statistics that noised means of :func:`unit_vectors` tell.

    A mean of features is shrunk by what noise adds to its square (James and Stein 1961), so that
    one of noise alone is 0, and it is no longer than the features are.

    Args:
        means: float ``[vector_size]``.
        ranges: As of :func:`bounded_powers`.
        num_columns: As of :func:`unit_vectors`.
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
    """Return ``(1, u, u^2)`` of each number, ``u`` being its place in its range, from -1 to 1.

    Numbers beyond the range count as its nearer end, and a missing one as ``(0, 0, 0)``, so that
    the norm of a record is :func:`largest_norm` at most.

    Args:
        numbers_ND: NaN where missing.
        ranges: Of the columns, and maybe of features after them, as
            ``Dataset.column_statistics`` has them.

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
    """Return the statistics that noised means of :func:`bounded_powers` tell.

    With ``k, a, b`` the means of 1, u and u^2, u has mean ``a / k`` and variance
    ``b / k - (a / k)^2``. A variance that noise hides counts as what hides it, ``noise / k``, for
    a deviation that is too small makes features huge; a column of which noise hides whether
    it has any number keeps what its range says.

    Args:
        means: float ``[3 D]``.
        ranges: As of :func:`bounded_powers`.
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
    """Return whether statistics can be those :func:`from_release` within these ranges."""
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
