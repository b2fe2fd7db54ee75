"""The candidate ops of the convolutional search spaces, and the parts of cells.

Every op maps ``[B, C, H, W]`` to ``[B, C, ceil(H / stride), ceil(W / stride)]``, also for odd
sizes, so that the outputs of all ops on an edge can be added. No op changes its input in place, as
many edges read a state. Definitions: Liu et al. (2019), arXiv 1806.09055, and Dong & Yang (2020),
arXiv 2001.00326. ``none`` is not a module; the holder of an edge omits it. The file of each space
maps names to modules.

A supernet computes once what the edges that leave a state have in common (:func:`node_states`):
they share the ReLU and the pools, and their kernels are stacked into one call of
``fednas_flwr.base.layers``. The result is that of the single modules.

Tensor suffixes: B batch, C channels, H height, W width, E edges of a state, O ops.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.errors import ConfigError, check_choice
from fednas_flwr.base.layers import called, depthwise
from fednas_flwr.settings.names import GROUP, NO_NORM, NORMS, Norm
from fednas_flwr.settings.registry import TABLES

MAX_GROUPS = 8
Compute = Callable[[nn.Module, Tensor], Tensor]
OpWeights = Mapping[str, Tensor] | None  # [E, O] by kind of cell; None: one op per edge
Part = tuple[Tensor, Sequence[str]]  # outputs of some ops, and the names of the ops
NOTHING = ("none", "zero")  # ops without a module


def num_groups(channels: int, *, most: int = MAX_GROUPS) -> int:
    """Return the largest divisor of ``channels`` up to ``most`` with at least 2 channels per group.

    A single channel has one group. Groups of one channel would normalise a 1x1 feature map to zero.

    Example:
        >>> [num_groups(channels) for channels in (1, 4, 7, 16, 36)]
        [1, 2, 1, 8, 6]
    """
    limit = min(most, max(1, channels // 2))
    return max(groups for groups in range(1, limit + 1) if channels % groups == 0)


def make_norm(
    channels: int, *, norm: Norm, affine: bool, most_groups: int = MAX_GROUPS
) -> nn.Module:
    """Build batch normalisation, group normalisation with :func:`num_groups` groups, or none.

    Raises:
        ConfigError: There is no such norm.
    """
    check_choice("search_space.norm", norm, NORMS)
    if norm == NO_NORM:
        return nn.Identity()
    if norm == GROUP:
        return nn.GroupNorm(num_groups(channels, most=most_groups), channels, affine=affine)
    return nn.BatchNorm2d(channels, affine=affine)


def conv_norm(
    inputs: int, outputs: int, *, size: int = 1, stride: int = 1, norm: Norm, affine: bool
) -> nn.Sequential:
    """Return a convolution without bias that keeps sizes at stride 1, and a norm."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, make_norm(outputs, norm=norm, affine=affine))


def relu_conv_norm(inputs: int, outputs: int, **how: Any) -> nn.Sequential:
    """Return ReLU, convolution, norm (``nor_conv`` of NAS-Bench-201, preprocessing of DARTS)."""
    return nn.Sequential(nn.ReLU(), *conv_norm(inputs, outputs, **how))


def zeroed(linear: nn.Linear) -> nn.Linear:
    """Return the layer with its parameters set to zero."""
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


class FactorizedReduce(nn.Module):
    """Halve height and width: ReLU, two 1x1 stride-2 convolutions side by side, norm.

    The second convolution reads the pixels that the first one skips. Deviation: for odd sizes, with
    which the published code fails, those pixels are one row and column short and zeros are added.
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
        return self.norm(torch.cat([even, odd], dim=1))


def every_second(x_BCHW: Tensor) -> Tensor:
    """Return every second row and column, which a 1x1 convolution of stride 2 reads.

    With fewer than 8 channels that are innermost in memory, torch 2.15's own such convolution
    writes beyond its buffers on processors without AVX-512 (oneDNN), which ends the process.
    """
    return x_BCHW[:, :, ::2, ::2]


def channels_last(x_BCHW: Tensor) -> Tensor:
    """Return the same tensor with channels innermost in memory, a layout that later ops keep.

    Convolutions on CPU then need .6 to .8 of the time. The function uses permutations because
    ``contiguous(memory_format=...)`` does not work under ``torch.vmap``.
    """
    return x_BCHW.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def drop_path(x: Tensor, probability: float) -> Tensor:
    """Return ``x`` with whole examples set to zero with this probability, the others scaled up.

    One Bernoulli draw per example (Larsson et al. 2017, arXiv 1605.07648, as used by DARTS), from
    torch's global generator. The expectation is ``x``; the probability is in [0, 1).
    """
    if probability == 0.0:
        return x
    keep = 1.0 - probability
    return x * (x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(keep) / keep)


def add_all(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum of one or more tensors, without stacking them."""
    return functools.reduce(torch.add, terms)


def summed_states(
    inputs: Sequence[Tensor],
    edges: Sequence[tuple[int, int]],
    compute: Callable[[int, Any], Tensor | None],
    *,
    nodes: range,
    empty: Tensor | None,
) -> list[Any]:
    """Compute the states of all nodes of a cell, those of its inputs first.

    Args:
        inputs: States of the first nodes.
        edges: (source, target) of every edge.
        compute: Computes an edge, given by its index, from the state of its source; a result of
            None is omitted.
        nodes: The nodes that are not inputs; each is the sum of its edges.
        empty: State of a node without edges.
    """
    states: list[Any] = list(inputs)
    for node in nodes:
        outs = [
            compute(index, states[source])
            for index, (source, target) in enumerate(edges)
            if target == node
        ]
        incoming = [out for out in outs if out is not None]
        states.append(add_all(incoming) if incoming else empty)
    return states


def discrete_states(
    inputs: Sequence[Tensor],
    edges: Sequence[tuple[int, int]],
    ops: Sequence[nn.Module | None] | nn.ModuleList,
    nodes: range,
    drop_path_prob: float,
) -> list[Tensor]:
    """Compute the states of a discrete cell (:func:`summed_states`); without edges they are 0.

    Args:
        inputs: States of the first nodes.
        edges: (source, target) of every edge.
        ops: The module of every edge; None is omitted.
        nodes: The nodes that are not inputs.
        drop_path_prob: Probability for every edge except identities, see :func:`drop_path`.
    """

    def compute(index: int, state: Tensor) -> Tensor | None:
        op = ops[index]
        if op is None:
            return None
        out = op(state)
        return out if isinstance(op, nn.Identity) else drop_path(out, drop_path_prob)

    return summed_states(inputs, edges, compute, nodes=nodes, empty=torch.zeros_like(inputs[0]))


class OwnOp(nn.Sequential):
    """An op that a user has registered, followed by a norm."""

    def __init__(
        self, name: str, channels: int, norm: nn.Module, *, stride: int = 1, sides: Sequence[int]
    ) -> None:
        """Make the op's module.

        Args:
            name: Name of the op.
            channels: Number of channels of input and output.
            norm: Norm for this number of channels.
            stride: 1 or 2.
            sides: Height and width with which the op is tried; empty for rows of a table.

        Raises:
            ConfigError: There is no op with this name, it fails, its output has another shape or
                is random, or a record depends on the others.
        """
        check_choice("op", name, TABLES["op"])
        expected = (2, channels, *(-(-side // stride) for side in sides))
        x = torch.linspace(-1, 1, 2 * channels * math.prod(sides)).view(2, channels, *sides)
        module, out, alone = tried(f"op {name}", TABLES["op"][name].make, (channels, stride), x)
        if out.shape != expected or not (out.is_meta or torch.allclose(out[:1], alone, atol=1e-5)):
            raise ConfigError(
                f"the op {name} of your own turns {list(x.shape)} into {list(out.shape)} at stride "
                f"{stride}: expected {list(expected)}, and each record computed by itself, the "
                "same each time."
            )
        super().__init__(module.train(), norm)


def tried(
    what: str, make: Callable[..., nn.Module], arguments: Sequence[Any], x: Tensor
) -> tuple[nn.Module, Tensor, Tensor]:
    """A user's own module in evaluation mode, and its outputs for x and for the first row of x.

    Raises:
        ConfigError: The module fails, or cannot be trained by clients and exported.
    """
    try:
        module = make(*arguments).eval()
        _check_tensors(module)
        module.requires_grad_(False)
        outputs = module(x), module(x[:1])
        if not isinstance(outputs[0], Tensor):
            raise TypeError(f"it returns a {type(outputs[0]).__name__}, expected one tensor")
        if outputs[0].requires_grad:
            raise ValueError("it has weights unknown to torch, keep lists of layers as ModuleList")
        module.requires_grad_(True)
    except Exception as error:
        raise ConfigError(f"the {what} of your own fails: {error}.") from error
    return module, *outputs


def _check_tensors(module: nn.Module) -> None:
    """Refuse tensors of a user's own module that clients cannot train, average or export."""
    names: dict[int, str] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet, give the layer its input size")
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            raise ValueError(f"{name} is frozen, make it a buffer (register_buffer)")
        if names.setdefault(id(tensor), name) != name:
            raise ValueError(f"{name} and {names[id(tensor)]} are one tensor, name it once")


class Choice(nn.Module):
    """Candidate ops; a network computes one of them, or the weighted sum of all.

    Attributes:
        names: Names of the ops by column; None for a column without an op.
        ops: The modules by name, without those of ``NOTHING``.
    """

    def __init__(self, names: Sequence[str | None], make: Callable[[str], nn.Module]) -> None:
        """Build the modules.

        Args:
            names: Names in the order of the weights.
            make: Returns the module for a name; it is not called for names in ``NOTHING``.
        """
        super().__init__()
        self.names = list(names)
        self.ops = nn.ModuleDict({op: make(op) for op in names if op and op not in NOTHING})

    def op(self, column: int) -> nn.Module | None:
        """Return the module of a column; None if it has none."""
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


def node_states(
    inputs: Sequence[Tensor],
    edges: Sequence[tuple[int, int]],
    leave: Callable[[Tensor, list[int]], Tensor],
) -> list[Tensor]:
    """Return the states of all nodes of a cell, those of its inputs first.

    Args:
        inputs: States of the first nodes.
        edges: (source, target) of every edge; every later node has at least one.
        leave: Function from a state and the indices of the edges that leave it to their outputs [B,
            E, ...].
    """
    states, last = list(inputs), max(target for _, target in edges)
    incoming: dict[int, list[Tensor]] = {node: [] for node in range(last + 1)}
    for source in range(last):
        if source >= len(inputs):
            states.append(add_all(incoming[source]))
        indices = [index for index, edge in enumerate(edges) if edge[0] == source]
        outs = leave(states[source], indices).unbind(1)
        for index, out in zip(indices, outs, strict=True):
            incoming[edges[index][1]].append(out)
    return [*states, add_all(incoming[last])]


def normalised(x_BCHW: Tensor, modules: Sequence[Any]) -> Tensor:
    """Return the channels normalised by norms without affine part, each on its share of channels.

    Either all or none of the batch norms train. Their running statistics move as they would one by
    one.
    """
    first = modules[0]
    if isinstance(first, nn.GroupNorm):
        return F.group_norm(x_BCHW, len(modules) * first.num_groups, eps=first.eps)
    buffers = [[m.running_mean for m in modules], [m.running_var for m in modules]]
    mean, variance = (torch.cat(each) for each in buffers)
    momentum = first.momentum
    if momentum is None:  # as in torch: the mean over all batches
        momentum = 1 / (int(first.num_batches_tracked) + 1)
    out = F.batch_norm(
        x_BCHW, mean, variance, training=first.training, momentum=momentum, eps=first.eps
    )
    if first.training:
        for module, mean_C, variance_C in zip(
            modules, mean.chunk(len(modules)), variance.chunk(len(modules)), strict=True
        ):
            module.running_mean.copy_(mean_C)
            module.running_var.copy_(variance_C)
            module.num_batches_tracked.add_(1)
    return out


def own_parts(edges: Sequence[Any], x: Tensor) -> list[Part]:
    """Outputs, for :func:`mix`, of users' registered ops on the edges of a state."""
    user_ops = [name for name in edges[0].names if name in TABLES["op"]]
    outs = [torch.stack([edge.ops[name](x) for edge in edges], dim=1) for name in user_ops]
    return [(out[:, None], [name]) for out, name in zip(outs, user_ops, strict=True)]


def max_pool(x_BCHW: Tensor, *, stride: int = 1) -> Tensor:
    """Return 3x3 maxima, computed with all channels innermost in memory, which costs .2 as much."""
    batch, channels, height, width = x_BCHW.shape
    side_by_side = x_BCHW.reshape(1, batch * channels, height, width)
    out = F.max_pool2d(side_by_side.contiguous(memory_format=torch.channels_last), 3, stride, 1)
    return out.contiguous().view(batch, channels, *out.shape[2:])


def average_pool(x_BCHW: Tensor, *, stride: int = 1) -> Tensor:
    """Return 3x3 means over the pixels inside the image, as a depthwise convolution."""
    ones = x_BCHW.new_ones(1, 1, 3, 3)
    inside = F.conv2d(ones.new_ones(1, 1, *x_BCHW.shape[2:]), ones, stride=stride, padding=1)
    return depthwise(x_BCHW, [ones.expand(x_BCHW.shape[1], 1, 3, 3)], stride=stride) / inside


def mix(parts: Sequence[Part], weights_BEO: Tensor, *, ops: Sequence[str]) -> Tensor:
    """Return the weighted sum of all ops for the edges of a state, [B, E, C, H, W].

    Args:
        parts: Outputs [B, o, E (or 1: the same for all edges), C, H, W], and the names of their o
            ops.
        weights_BEO: Weight of every op on every edge.
        ops: Names of the O ops.
    """

    def weighted(out: Tensor, names: Sequence[str]) -> Tensor:
        columns = [weights_BEO[..., ops.index(name)] for name in names]
        return (out * torch.stack(columns, dim=1)[..., None, None, None]).sum(1)

    return add_all(weighted(out, names) for out, names in parts)


class SkipNetwork(nn.Module):
    """A network that can have an additional linear classifier on its input.

    With much noise and features that suit a linear model, the classifier learns what deeper layers
    cannot.

    Attributes:
        skip: The classifier, whose logits are added; None if there is none.
        drop_path_prob: Probability of drop-path, in [0, 1), on every edge except identities, or on
            every block with a residual connection; a trainer raises it from 0.
        takes_stack: True for supernets' bodies whose weights come from ``base.layers.stacked``.
    """

    def __init__(self) -> None:
        """Begin without a skip and without drop-path."""
        super().__init__()
        self.skip: nn.Linear | None = None
        self.drop_path_prob = 0.0
        self.takes_stack = False

    @property
    def dropped(self) -> float:
        """Current probability of drop-path, which is 0 in evaluation mode."""
        return self.drop_path_prob if self.training else 0.0

    def choices(self) -> list[Choice]:
        """Return the edges, or blocks, whose ops a path chooses."""
        return [module for module in self.modules() if isinstance(module, Choice)]

    def joined(self, logits: Tensor, x: Tensor, compute: Compute = called) -> Tensor:
        """Return the logits [B, classes] plus those of the skip.

        Args:
            logits: Logits of the rest of the network.
            x: Input of the network, [B, ...].
            compute: Computes the skip.
        """
        return logits if self.skip is None else logits + compute(self.skip, x.flatten(1))
