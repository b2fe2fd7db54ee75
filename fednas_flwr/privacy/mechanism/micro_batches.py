"""Sums over records in which no record changes another's contribution, not even by one bit.

Kernels round the rows of a batch differently in batches of another size. Records are therefore
computed in micro-batches of one size, which the holder of the records fixes and made-up rows fill.
Floating-point sums depend on the order and on the other summands. Contributions are therefore whole
numbers of a unit, whose sums are exact. :mod:`~fednas_flwr.privacy.self_test` tests that rows are
rounded alike at every position of a micro-batch and beside every neighbour.

Tensor suffix: B rows of a micro-batch.
"""

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

UNIT_BITS = 40
_RIGHT_BITS = 20  # of a unit's bits, those in the second factor of a product
_TOGETHER = 1024  # products that are added up in float64
_TINY = 1e-300
_SLACK = 1 + 1e-12  # for the rounding of a computed norm


class ClippedSum(dict[str, Tensor]):
    """Sum of one contribution per unit of privacy, by name, with the bound that scales the noise.

    Only functions that clip create it. Any other computation on its tensors gives plain tensors,
    which are not released.

    Args:
        tensors: The sum.

    Attributes:
        norm: Largest joint L2 norm of a unit's contribution, over all tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, norm: float) -> None:
        super().__init__(tensors)
        self.norm = norm

    @classmethod
    def side_by_side(cls, sums: "Mapping[str, ClippedSum]") -> "ClippedSum":
        """Return sums over the same units as one, by ``<key>.<name>``; squares of norms add up."""
        tensors = {f"{key}.{name}": t for key, of in sums.items() for name, t in of.items()}
        return cls(tensors, norm=math.hypot(*(of.norm for of in sums.values())))


def micro_batches(x: Tensor, y: Tensor, size: int | None) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield records in parts of exactly ``size``, at least one part.

    Args:
        x: Features [N, ...]; the parts carry no gradients with respect to them.
        y: Labels int64 [N].
        size: B, at least 1; None makes one part of all records, of whatever size.

    Yields:
        Features [B, ...], labels [B] and the number of records, which are the first rows; the
        others are zeros, of class 0. Each part is a separate copy in memory, so that all are
        aligned alike.
    """
    size = max(1, len(x)) if size is None else size
    for start in range(0, max(1, len(x)), size):
        x_B, y_B = x[start : start + size].detach(), y[start : start + size]
        yield filled(x_B, size), filled(y_B, size), len(y_B)


def filled(rows: Tensor, size: int) -> Tensor:
    """Return a copy [size, ...] of up to ``size`` rows, with zeros after them."""
    copy = rows.new_zeros(size, *rows.shape[1:])
    copy[: len(rows)] = rows
    return copy


def by_person(groups: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the records of persons in parts of at most ``size``, at least one part.

    No person is in two parts. For a person with more records, every call draws ``size`` of them
    anew; nobody can foresee which.

    Args:
        groups: Indices of each person's records, int64.
        size: At least 1.

    Yields:
        Indices [N], and the person of each [N]: 0, 1, ... in the order of the part.
    """
    generator = torch.Generator().manual_seed(secrets.randbits(63))
    part: list[Tensor] = []
    for group in groups:
        group = group[torch.randperm(len(group), generator=generator)[:size].sort().values]
        if sum(map(len, part)) + len(group) > size:
            yield joined(part)
            part = []
        part.append(group)
    yield joined(part)


def joined(groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the indices of all persons' records [N], and the person of each [N]; may be empty."""
    empty = torch.empty(0, dtype=torch.int64)
    persons = [torch.full((len(group),), person) for person, group in enumerate(groups)]
    return torch.cat([empty, *groups]), torch.cat([empty, *persons])


def person_means(rows: Tensor, persons: Tensor) -> Tensor:
    """Return the mean of each person's rows, one row per person, float64 [B, V]; zeros after them.

    A person's rows are added in their order, so that the mean does not depend, in any bit, on the
    other persons.

    Args:
        rows: [B, V]; rows after the first N are ignored.
        persons: int64 [N], ascending from 0, each person at least once.
    """
    sums = rows.new_zeros(rows.shape, dtype=torch.float64)
    counts = torch.bincount(persons, minlength=len(rows)).to(rows.device)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
    for k in range(int(counts.max()) if len(rows) else 0):
        having = (counts > k).nonzero().flatten()
        sums[having] += rows[first[having] + k].double()
    return sums / counts.clamp(min=1)[:, None]


def in_units(values: Tensor, *, bound: float, factors_B: Tensor | None = None) -> Tensor:
    """Return values as whole numbers of a unit, int64: cut towards zero, so that no norm grows.

    The unit is a power of two from 2^-40 to 2^-39 of ``bound``. Sums of up to 2^22 vectors of norm
    at most ``bound`` fit, and are exact in any order.

    Args:
        values: Finite, except in rows whose factor is 0, which become zeros.
        bound: Above 0.
        factors_B: Factors by which rows are multiplied first, float64 [B]; None means 1.
    """
    unit = _unit(bound)
    if factors_B is None:
        return (values.double() / unit).to(torch.int64)
    # A power of two rounds nothing. In place, in few passes over memory. 0 * inf is NaN.
    scaled = values.to(torch.float64, copy=True).mul_((factors_B / unit)[:, None])
    return scaled.nan_to_num_(nan=0.0).to(torch.int64)


def sum_in_units(
    left_BO: Tensor, right_BI: Tensor, *, bound: float, factors_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of outer products ``f_b l_b r_b^T``, each cut towards zero, int64 [O, I].

    Both factors are cut to whole numbers of at most 2^20, whose product is at most 2^40 units. No
    entry of a record's product grows, and sums of 2^12 products are exact in float64, whatever
    their order.

    Args:
        left_BO: Finite, except in rows whose factor is 0, which count as zeros.
        right_BI: As ``left_BO``.
        bound: At least the norm of every ``f_b l_b r_b^T``; above 0.
        factors_B: float64 [B].

    Returns:
        The sum, and both factors as float64 [B, O] and [B, I].
    """
    left_BO, right_BI = (
        factor.double().where(factors_B[:, None] > 0, 0.0) for factor in (left_BO, right_BI)
    )
    norms_B = torch.linalg.vector_norm(right_BI, dim=1)
    whole = 2.0**_RIGHT_BITS
    right_BI = (right_BI * (whole / norms_B.clamp_min(_TINY))[:, None]).trunc_()
    left_BO = (left_BO * (factors_B * norms_B / (_unit(bound) * whole))[:, None]).trunc_()
    sums = left_BO.new_zeros(left_BO.shape[1], right_BI.shape[1], dtype=torch.int64)
    for rows in torch.split(torch.arange(len(left_BO), device=left_BO.device), _TOGETHER):
        sums += (left_BO[rows].mT @ right_BI[rows]).to(torch.int64)
    return sums, left_BO, right_BI


def from_units(sums: Tensor, *, bound: float) -> Tensor:
    """Return sums in units, int64, as float64; below 2^13 times ``bound`` nothing is rounded."""
    return sums.double() * _unit(bound)


def clipped_row_sum(name: str, rows: Tensor, *, max_norm: float) -> ClippedSum:
    """Return the sum [V], float64, over rows [N, V] that are each scaled down to a norm.

    A row that is not finite counts as zeros.

    Args:
        name: Name of the sum.
        rows: One row for each unit.
        max_norm: Above 0.
    """
    norms_N = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    factors_N = torch.where(norms_N <= max_norm * _SLACK, 1.0, max_norm / norms_N)
    factors_N = factors_N.where(norms_N.isfinite(), 0.0)
    total = in_units(rows, bound=max_norm, factors_B=factors_N).sum(0)
    return ClippedSum({name: from_units(total, bound=max_norm)}, norm=max_norm)


def sum_of_parts(parts: Iterator[ClippedSum], *, bound: float) -> ClippedSum:
    """Return the sum of sums over different units; their tensors are whole numbers of one unit.

    Args:
        parts: At least one part, all with the same names and norm; one at a time is in memory.
        bound: See :func:`in_units`.
    """
    first = next(parts)
    totals = {name: in_units(total, bound=bound) for name, total in first.items()}
    for part in parts:
        if part.norm != first.norm:
            raise ValueError(f"sums of contributions of one norm, got {part.norm}, {first.norm}")
        for name, total in part.items():
            totals[name] += in_units(total, bound=bound)
    sums = {name: from_units(total, bound=bound) for name, total in totals.items()}
    return ClippedSum(sums, norm=first.norm)


def _unit(bound: float) -> float:
    return math.ldexp(1.0, math.frexp(bound)[1] - UNIT_BITS)
