"""Sums over records in which no record changes what another contributes, not by one bit.

Kernels round the rows of a batch differently in batches of another size. So records are computed in
micro-batches of one size, which made-up rows fill and which whoever holds the records fixes; and
floating-point sums depend on order and on what else is added. So contributions are whole numbers of
a unit, whose sums are exact. That rows are rounded alike at every position of a micro-batch, and
beside every neighbour, is what :mod:`~fednas_flwr.privacy.self_test` shows.

Tensor suffix: B rows of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

UNIT_BITS = 40


def micro_batches(x: Tensor, y: Tensor, size: int | None) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield records in parts of exactly ``size``, at least one part.

    Args:
        x: Features [N, ...]; the parts carry no gradients by them.
        y: Labels int64 [N].
        size: B, at least 1; None makes one part of all records, of whatever size.

    Yields:
        Features [B, ...], labels [B] and how many of the rows, the first ones, are records; the
        others are zeros, of class 0. Each part is a copy in memory of its own, so that none is
        aligned otherwise than another.
    """
    size = max(1, len(x)) if size is None else size
    for start in range(0, max(1, len(x)), size):
        x_B, y_B = x[start : start + size].detach(), y[start : start + size]
        yield filled(x_B, size), filled(y_B, size), len(y_B)


def filled(rows: Tensor, size: int) -> Tensor:
    """Return a copy [size, ...] of up to ``size`` rows, zeros after them."""
    copy = rows.new_zeros(size, *rows.shape[1:])
    copy[: len(rows)] = rows
    return copy


def in_units(values: Tensor, *, bound: float) -> Tensor:
    """Return values as whole numbers of a unit, int64: cut towards zero, so that no norm grows.

    The unit is a power of two from 2^-40 to 2^-39 of ``bound``. Sums of up to 2^22 vectors of norm
    at most ``bound`` fit, and are exact in any order.

    Args:
        values: Finite.
        bound: Above 0.
    """
    return (values.double() / _unit(bound)).to(torch.int64)


def from_units(sums: Tensor, *, bound: float) -> Tensor:
    """Return sums in units, int64, as float64: nothing is rounded below 2^13 times ``bound``."""
    return sums.double() * _unit(bound)


def exact_sum(rows: Tensor, *, bound: float) -> Tensor:
    """Return the sum over rows [N, V] of vectors of norm at most ``bound``, float64 [V]."""
    return from_units(in_units(rows, bound=bound).sum(0), bound=bound)


def _unit(bound: float) -> float:
    return math.ldexp(1.0, math.frexp(bound)[1] - UNIT_BITS)
