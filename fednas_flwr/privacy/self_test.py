"""A self-test on made-up records: are a batch's rows computed alike at every position?

Sensitivity is that of one record only if no record changes, in any bit, what is computed for
another. This depends on the kernels, so before a private client computes with a network, it is
tested for its machine, threads, libraries and layers. The test cannot detect a kernel that is
chosen by the values of a record; torch is not known to have any.

Main function: :func:`largest_size`. Tensor suffix: B rows.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fednas_flwr.base.randomness import make_generator

# Receives tensors [B, ...] whose row i belongs to record i; the last tensor is not zero if the
# record contributes.
Watch = Callable[[Tensor], object]
# A function of features [B, ...] and labels [B] that passes outputs, losses, gradients and
# contributions to ``watch``.
Computation = Callable[..., object]

ALL_KEPT = 1e-30  # a probability of dropping paths at which none is dropped, though it is computed


def unwatched(_: Tensor) -> None:
    """Ignore the tensor."""


def largest_size(
    computation: Computation, network: nn.Module, shape: Sequence[int], *, size: int, **batch: Any
) -> int:
    """Return the largest micro-batch size at which all rows are computed alike; 1 if there is none.

    The function tries ``size`` and the powers of two below it, with made-up weights, and then
    restores the network's own.

    Args:
        computation: Computes with the network.
        network: The network, in the mode in which records will be computed.
        shape: Shape of a record's features.
        size: Micro-batch size, at least 1.
        **batch: Number of classes and device, see :func:`rows_are_alike`.
    """
    with _made_up_weights(network):
        while size > 1 and not rows_are_alike(computation, shape, size=size, **batch):
            size = 1 << (size - 1).bit_length() - 1
    return size


def rows_are_alike(
    computation: Computation,
    shape: Sequence[int],
    *,
    num_classes: int,
    size: int,
    device: torch.device,
    multi_label: bool = False,
) -> bool:
    """Return True if a record's rows are equal in every bit at every position, beside any others.

    Records are numbers of very different sizes whose neighbours in memory nearly cancel. One record
    is placed at all positions at once, then at every second position beside another record, zeros,
    numbers that overflow, denormals, infinities and NaN. All of these are compared with themselves,
    too.

    Args:
        computation: Computes with a network.
        shape: Shape of a record's features.
        num_classes: See :func:`made_up_labels`.
        size: Micro-batch size, at least 1.
        device: Device of the network.
        multi_label: See :func:`made_up_labels`.

    Returns:
        False also if the test could detect nothing, because the record's values are not finite or
        its contribution is zero.
    """
    generator = make_generator(0, "self-test", *shape)
    record, other = (_numbers((1, *shape), generator, sign=1.0)[0] for _ in range(2))
    constants = [torch.full(tuple(shape), value) for value in (0.0, math.inf, math.nan)]
    kinds = [record, other, 1e30 * other, 1e-40 * other.sign(), *constants]
    expected: list[list[Tensor]] = [[] for _ in kinds]  # values of the first of each kind

    def is_seen_as_before(placed: Sequence[int]) -> bool:
        """Compute a batch of these kinds; compare every row with the first of its kind."""
        shown: list[Tensor] = []
        computation(
            torch.stack([kinds[kind] for kind in placed]).to(device),
            made_up_labels(placed, num_classes, multi_label=multi_label).to(device),
            watch=lambda tensor: shown.append(tensor.detach()),
        )
        for kind in set(placed):
            rows = torch.tensor([i for i, other in enumerate(placed) if other == kind])
            of_kind = [tensor[rows.to(tensor.device)] for tensor in shown]
            expected[kind] = expected[kind] or [rows[:1].clone() for rows in of_kind]
            if not all(map(_same_bits, of_kind, expected[kind])):
                return False
        return True

    others = cycle(range(1, len(kinds)))
    turns = max(2, -(-(len(kinds) - 1) // (size // 2)))
    arrangements = [[0] * size] + [
        [0 if (place + turn) % 2 else next(others) for place in range(size)]
        for turn in range(turns)
    ]
    if not all(map(is_seen_as_before, arrangements)):
        return False
    return all(bool(row.isfinite().all()) for row in expected[0]) and bool(expected[0][-1].any())


def made_up_labels(kinds: Sequence[int], num_classes: int, *, multi_label: bool) -> Tensor:
    """Return int64 [B] classes below ``num_classes``, or [B, num_classes] with one label each."""
    classes = torch.tensor(kinds) % num_classes
    return one_hot(classes, num_classes) if multi_label else classes


def _same_bits(rows: Tensor, row: Tensor) -> bool:
    """Return True if all rows equal this one bit by bit; all NaNs count as equal."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[row.element_size()]
    same = rows.contiguous().view(integers) == row.contiguous().view(integers)
    if row.is_floating_point():
        same |= rows.isnan() & row.isnan()
    return bool(same.all())


def _numbers(shape: Sequence[int], generator: torch.Generator, *, sign: float) -> Tensor:
    """Return numbers over nine binary orders of magnitude, in pairs of nearly equal ones.

    In a sum of products of such rows, whose pairs have equal signs in one factor (``sign`` 1) and
    opposite signs in the other (-1), most digits cancel, and any change of order shows in the rest.
    """
    exponents = torch.randint(-4, 5, tuple(shape), generator=generator)
    numbers = torch.randn(tuple(shape), generator=generator) * 2.0**exponents
    rows = numbers.view(shape[0], -1)
    even = rows[:, 0 : rows.shape[1] // 2 * 2 : 2]
    noise = torch.randn(even.shape, generator=generator) * 2.0**-10
    rows[:, 1::2] = sign * even * (1 + noise)
    return numbers


@contextmanager
def _made_up_weights(network: nn.Module) -> Iterator[None]:
    """Give a network made-up weights inside the block; no paths and no units are dropped."""
    generator = make_generator(0, "self-test", "weights")
    saved = [(parameter, parameter.detach().clone()) for parameter in network.parameters()]
    dropped = [
        (module, name, getattr(module, name))
        for module in network.modules()
        for name in ("drop_path_prob", "p")
        if isinstance(getattr(module, name, None), float)
    ]
    try:
        for parameter, _ in saved:
            if parameter.dim() > 1:
                numbers = _numbers(parameter.shape, generator, sign=-1.0)
                numbers /= numbers.flatten(1).norm(dim=1).clamp(min=1e-3).mean()
            else:
                numbers = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(numbers)
        for module, name, probability in dropped:
            setattr(module, name, ALL_KEPT if probability > 0 else 0.0)
        yield
    finally:
        for parameter, values in saved:
            parameter.data.copy_(values)
        for module, name, probability in dropped:
            setattr(module, name, probability)
