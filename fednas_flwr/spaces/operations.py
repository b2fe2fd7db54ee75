"""The candidate ops of the convolutional search spaces, and the parts that cells are made of.

Every op maps ``[B, C, H, W]`` to ``[B, C, ceil(H / stride), ceil(W / stride)]``, also for odd
sizes, so that the outputs of all ops on an edge can be added. No op changes its input in place: a
state is read by many edges. Definitions: Liu et al. (2019), arXiv 1806.09055, and Dong & Yang
(2020), arXiv 2001.00326. ``none`` is not a module: whoever holds an edge leaves it out. Which names
a space gives to which modules stands in the space's own file.

Tensor suffixes: B batch, C channels, H height, W width, O ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.errors import unknown_choice
from fednas_flwr.base.layers import Stack, linear
from fednas_flwr.settings.names import GROUP, NORMS, Norm
from fednas_flwr.spaces.genotype import Edge

MAX_GROUPS = 8
NOTHING = ("none", "zero")  # ops without a module


def check_norm(norm: str) -> None:
    """Raise ConfigError unless ``norm`` is one of ``NORMS``."""
    if norm not in NORMS:
        raise unknown_choice("search_space.norm", norm, NORMS)


def num_groups(channels: int, *, most: int = MAX_GROUPS) -> int:
    """Return the largest divisor of ``channels`` up to ``most`` that leaves 2 channels a group.

    One channel has one group. Groups of one channel would normalise a 1x1 feature map to zero.

    Example:
        >>> [num_groups(channels) for channels in (1, 4, 7, 16, 36)]
        [1, 2, 1, 8, 6]
    """
    limit = min(most, max(1, channels // 2))
    return max(groups for groups in range(1, limit + 1) if channels % groups == 0)


def make_norm(
    channels: int, *, norm: Norm, affine: bool, most_groups: int = MAX_GROUPS
) -> nn.Module:
    """Return batch normalisation, or group normalisation with :func:`num_groups` groups."""
    if norm == GROUP:
        return nn.GroupNorm(num_groups(channels, most=most_groups), channels, affine=affine)
    return nn.BatchNorm2d(channels, affine=affine)


def relu_conv_norm(
    in_channels: int,
    out_channels: int,
    *,
    kernel_size: int = 1,
    stride: int = 1,
    norm: Norm,
    affine: bool,
) -> nn.Sequential:
    """Return ReLU, convolution, norm (``nor_conv`` of NAS-Bench-201, preprocessing of DARTS)."""
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(
            in_channels,
            out_channels,
            kernel_size,
            stride=stride,
            padding=kernel_size // 2,
            bias=False,
        ),
        make_norm(out_channels, norm=norm, affine=affine),
    )


def depthwise_separable(
    channels: int, *, kernel_size: int, stride: int, dilation: int, norm: Norm, affine: bool
) -> nn.Sequential:
    """Return ReLU, depthwise convolution, pointwise convolution, norm."""
    return nn.Sequential(
        nn.ReLU(),
        nn.Conv2d(
            channels,
            channels,
            kernel_size,
            stride=stride,
            padding=dilation * (kernel_size // 2),
            dilation=dilation,
            groups=channels,
            bias=False,
        ),
        nn.Conv2d(channels, channels, 1, bias=False),
        make_norm(channels, norm=norm, affine=affine),
    )


class FactorizedReduce(nn.Module):
    """Halve height and width: ReLU, two 1x1 stride-2 convolutions side by side, norm.

    The second convolution reads the pixels that the first one leaves out. Deviation: for odd sizes,
    where the published code fails, those pixels are one row and column short and zeros are added.
    The convolutions read a slice, see :func:`every_second`.
    """

    def __init__(self, in_channels: int, out_channels: int, *, norm: Norm, affine: bool) -> None:
        """Split the output channels between the two convolutions."""
        super().__init__()
        first = out_channels // 2
        self.relu = nn.ReLU()
        self.conv_even = nn.Conv2d(in_channels, out_channels - first, 1, bias=False)
        self.conv_odd = nn.Conv2d(in_channels, first, 1, bias=False)
        self.norm = make_norm(out_channels, norm=norm, affine=affine)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return ``[B, out_channels, ceil(H / 2), ceil(W / 2)]``."""
        x_BCHW = self.relu(x_BCHW)
        height, width = x_BCHW.shape[-2:]
        shifted = x_BCHW[:, :, 1:, 1:]
        if height % 2 or width % 2:
            shifted = F.pad(shifted, (0, width % 2, 0, height % 2))
        even, odd = self.conv_even(every_second(x_BCHW)), self.conv_odd(every_second(shifted))
        out: Tensor = self.norm(torch.cat([even, odd], dim=1))
        return out


def every_second(x_BCHW: Tensor) -> Tensor:
    """Return every second row and column: what a 1x1 convolution of stride 2 reads.

    Of fewer than 8 channels that are innermost in memory, torch 2.15's own such convolution writes
    beyond its buffers on processors without AVX-512 (oneDNN), which ends the process.
    """
    return x_BCHW[:, :, ::2, ::2]


def channels_last(x_BCHW: Tensor) -> Tensor:
    """Return the same tensor with channels innermost in memory, a layout that later ops keep.

    Convolutions on CPU need .6 to .8 of the time then. Written as permutations because
    ``contiguous(memory_format=...)`` does not work under ``torch.vmap``.
    """
    return x_BCHW.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def drop_path(x: Tensor, probability: float) -> Tensor:
    """Return ``x`` with whole examples set to zero with this probability, the others scaled up.

    One Bernoulli draw per example (Larsson et al. 2017, arXiv 1605.07648, as used by DARTS), from
    torch's global generator. The expectation is ``x``.

    Raises:
        ValueError: If the probability is not in [0, 1).
    """
    if not 0.0 <= probability < 1.0:
        raise ValueError(f"drop-path probability must be in [0, 1), got {probability}")
    if probability == 0.0:
        return x
    keep = 1.0 - probability
    mask = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(keep)
    return x * (mask / keep)


def add_all(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of one or more tensors, without an intermediate stack of them."""
    return functools.reduce(torch.add, terms)


def discrete_states(
    inputs: Sequence[Tensor],
    edges: Sequence[tuple[int, int]],
    ops: Iterable[nn.Module | None],
    *,
    nodes: range,
    drop_path_prob: float,
) -> list[Tensor]:
    """Return the states of all nodes of a discrete cell, those of its inputs first.

    Every later node is the sum of its edges, or zero without any.

    Args:
        inputs: States of the first nodes.
        edges: (source, target) of every edge.
        ops: The module of every edge; None is left out.
        nodes: The nodes that are no inputs.
        drop_path_prob: Of every edge but identities, see :func:`drop_path`.
    """
    states, wiring = list(inputs), list(zip(edges, ops, strict=True))
    for node in nodes:
        incoming = []
        for (source, target), op in wiring:
            if target == node and op is not None:
                out = op(states[source])
                dropped = not isinstance(op, nn.Identity)
                incoming.append(drop_path(out, drop_path_prob) if dropped else out)
        states.append(add_all(incoming) if incoming else torch.zeros_like(inputs[0]))
    return states


class TwoInputCell(nn.Module):
    """A derived cell whose inputs are the cells before: its output joins its later nodes.

    Args:
        preprocess0: Of the output of the cell before the last.
        preprocess1: Of the last's.
        wiring: The edges.
        edges: The module of each.
        nodes: The nodes that are no inputs.
    """

    def __init__(
        self,
        preprocess0: nn.Module,
        preprocess1: nn.Module,
        wiring: tuple[Edge, ...],
        edges: Iterable[nn.Module],
        *,
        nodes: range,
    ) -> None:
        """See the class."""
        super().__init__()
        self.preprocess0, self.preprocess1 = preprocess0, preprocess1
        self.wiring, self.nodes = wiring, nodes
        self.edges = nn.ModuleList(edges)

    def forward(self, before: Tensor, last: Tensor, drop_path_prob: float) -> Tensor:
        """Return the nodes' states, side by side in dimension 1."""
        inputs = [self.preprocess0(before), self.preprocess1(last)]
        pairs = [(edge.source, edge.target) for edge in self.wiring]
        states = discrete_states(
            inputs, pairs, self.edges, nodes=self.nodes, drop_path_prob=drop_path_prob
        )
        return torch.cat(states[len(inputs) :], dim=1)


def mixed_states(
    inputs: Sequence[Tensor],
    edges: Sequence[tuple[int, int]],
    ops: Iterable[nn.Module],
    weights_EO: Tensor,
) -> list[Tensor]:
    """Return the states of a cell's inputs and nodes, all edges with their mixed ops."""
    states, wiring = list(inputs), list(zip(edges, ops, strict=True))
    for node in range(len(inputs), edges[-1][1] + 1):
        states.append(
            add_all(
                op(states[source], weights_EO[..., index, :])
                for index, ((source, target), op) in enumerate(wiring)
                if target == node
            )
        )
    return states


def path_states(
    inputs: Sequence[Tensor],
    edges: Sequence[tuple[int, int]],
    ops: Iterable[MixedOp],
    columns: Sequence[int],
    gates_E: Tensor,
) -> list[Tensor]:
    """Return the states of a cell's inputs and nodes, with one op on each edge; of stride 1.

    Args:
        inputs: States of the first nodes.
        edges: (source, target) of every edge; every later node has one.
        ops: Of every edge.
        columns: For every edge the column of its op; ``none`` and what is zero without it are left
            out.
        gates_E: What each op's output is multiplied by.
    """
    states: list[Tensor | None] = list(inputs)
    wiring = [(edge, op.op(column)) for edge, op, column in zip(edges, ops, columns, strict=True)]
    for node in range(len(inputs), edges[-1][1] + 1):
        incoming = [
            gates_E[index] * op(state)
            for index, ((source, target), op) in enumerate(wiring)
            if target == node and op is not None and (state := states[source]) is not None
        ]
        states.append(add_all(incoming) if incoming else None)
    return [torch.zeros_like(inputs[0]) if state is None else state for state in states]


class Choice(nn.Module):
    """Candidate ops of which a network computes one, or the weighted sum of all.

    Attributes:
        names: Of the ops, by column; None for a column without an op.
        ops: The modules by name, without those of ``NOTHING``.
    """

    def __init__(self, names: Sequence[str | None], make: Callable[[str], nn.Module]) -> None:
        """Make the modules.

        Args:
            names: In the order of the weights.
            make: Returns the module of a name; not called for those of ``NOTHING``.
        """
        super().__init__()
        self.names = list(names)
        self.ops = nn.ModuleDict({op: make(op) for op in names if op and op not in NOTHING})

    def op(self, column: int) -> nn.Module | None:
        """Return the module of a column; None where it has none."""
        name = self.names[column]
        return self.ops[name] if name and name in self.ops else None


class MixedOp(Choice):
    """One edge of a supernet: ``sum_o w_o * op_o(x)`` (Liu et al. 2019, Eq. 2) without ``none``."""

    def forward(self, x_BCHW: Tensor, weights_O: Tensor) -> Tensor:
        """Return the weighted sum; the weights are [O], or [B, O] for one set per example."""
        columns = [c for c in range(len(self.names)) if self.op(c) is not None]
        return add_all(
            weights_O[..., column, None, None, None] * op(x_BCHW)
            for column, op in zip(columns, self.ops.values(), strict=True)
        )


class SkipNetwork(nn.Module):
    """A network that can have a linear classifier on its input beside all else that it computes.

    With features that suit a linear model and much noise, it carries what deeper layers cannot
    learn.

    Attributes:
        skip: The classifier, whose logits are added; None for none.
    """

    skip: nn.Linear | None

    def __init__(self) -> None:
        """Begin without one."""
        super().__init__()
        self.skip = None

    def joined(self, logits: Tensor, x: Tensor, stack: Stack | None = None) -> Tensor:
        """Return the logits [B, classes] after adding the skip's.

        Args:
            logits: Those of everything else.
            x: What the network was called with, [B, ...].
            stack: Of a supernet whose records have weights each; None for one set of weights.
        """
        if self.skip is None:
            return logits
        if stack is None:
            added: Tensor = self.skip(x.flatten(1))
            return logits + added
        return logits + linear(x.flatten(1), stack([self.skip.weight]), stack([self.skip.bias]))
