"""The modules of the DP-friendly space: three cells whose edges compute one op each.

Cheng et al. (2022), DPNAS, arXiv 2110.08557, section 3.2 and Figure 2. :class:`DPCellNetwork` is
both the supernet's body, with all ops on every edge, and the derived network, with one; equal parts
have equal names in their state dicts.

Tensor suffixes: B batch, C channels, H height, W width, E edges, O ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fednas_flwr.settings.names import Norm
from fednas_flwr.spaces import darts_network
from fednas_flwr.spaces.cell_graph import CELL, candidate_edges
from fednas_flwr.spaces.genotype import SKIP
from fednas_flwr.spaces.operations import add_all, drop_path, make_norm
from fednas_flwr.spaces.skip import SkipNetwork

NODES = range(1, 6)  # K = 5 internal nodes; node 0 is the cell's input
EDGES = candidate_edges(NODES)
CENTRE = 20.0  # of a near-identity, in standard deviations of the noise beside it
NONE = "none"
POOLS: dict[str, Callable[..., nn.Module]] = {
    "max_pool_3x3": nn.MaxPool2d,
    "avg_pool_3x3": nn.AvgPool2d,
}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "tanh": nn.Tanh,
    "linear": nn.Identity,
    "hardtanh": nn.Hardtanh,
    "sigmoid": nn.Sigmoid,
}
CONVOLUTIONS = {f"conv_3x3_{name}": make for name, make in ACTIVATIONS.items()}
OPS = (NONE, *POOLS, SKIP, *CONVOLUTIONS)  # in the order of the published cells' numbers


class DPCellNetwork(SkipNetwork):
    """Stem, three times a cell and a max-pool of 2, head.

    The text leaves out what the parameter counts demand and the authors' code has: the 3x3
    convolutions of the ops are depthwise, norms have no affine part, convolutions no bias; the stem
    is a 3x3 convolution with norm, the pools between cells are 2x2 (the text says 3x3), average
    pools count the zeros around the image. A side of one pixel is not pooled any more. Convolutions
    are initialised as there, with variance ``2 / (kernel area * output channels)``: the norms hide
    it, but the gradients that are clipped are as large as the weights are small.

    Deviation: ``near_identity`` adds a larger number to the centre of each op's kernels, for a
    supernet. Kernels drawn at random make what candidates compute unrelated, so that they cannot
    share a head at first: 1,500 steps on digits leave the loss at ln 10, with it 360 reach 1.8.

    Attributes:
        drop_path_prob: Probability of drop-path on every op but the identity, in [0, 1).
    """

    drop_path_prob: float

    def __init__(
        self,
        ops_of_edges: Sequence[Sequence[str]],
        *,
        input_shape: Sequence[int],
        num_classes: int,
        widths: Sequence[int],
        head: int,
        activation: str,
        norm: Norm,
        groups: int,
        near_identity: bool = False,
    ) -> None:
        """Build the network.

        Args:
            ops_of_edges: For each of ``EDGES`` the names of the ops to choose from.
            input_shape: (channels, height, width) of an image.
            num_classes: Number of classes.
            widths: Channels of each cell's nodes.
            head: Channels of the head's 1x1 convolution and width of its hidden layer.
            activation: Of the hidden layer; a name in ``ACTIVATIONS``.
            norm: ``batch`` or ``group``.
            groups: Most groups of a group norm.
            near_identity: Whether the ops' convolutions begin as identities with noise.
        """
        super().__init__()
        self.drop_path_prob = 0.0
        channels, height, width = input_shape

        def normed(convolution: nn.Conv2d) -> nn.Sequential:
            outputs = convolution.out_channels
            return nn.Sequential(
                convolution, make_norm(outputs, norm=norm, affine=False, most_groups=groups)
            )

        self.stem = normed(nn.Conv2d(channels, widths[0], 3, padding=1, bias=False))
        channels = widths[0]
        self.blocks = nn.ModuleList()
        for inner in widths:
            inputs = normed(nn.Conv2d(channels, inner, 1, bias=False))
            pool = nn.MaxPool2d((min(2, height), min(2, width)))
            edges = [
                ChoiceEdge(names, channels=inner, norm=norm, groups=groups)
                for names in ops_of_edges
            ]
            self.blocks.append(Block(inputs, edges, pool))
            channels, height, width = len(NODES) * inner, max(1, height // 2), max(1, width // 2)
        self.head = nn.Sequential(
            *normed(nn.Conv2d(channels, head, 1, bias=False)),
            nn.Flatten(),
            nn.Linear(head * height * width, head),
            ACTIVATIONS[activation](),
            nn.Linear(head, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=_initial_std(module))
        for edge in self.modules() if near_identity else ():
            if isinstance(edge, ChoiceEdge):
                edge.bring_near_identity()

    def forward(
        self,
        x: Tensor,
        op_weights: Mapping[str, Tensor] | None = None,
        path: Sequence[int] | None = None,
    ) -> Tensor:
        """Return logits [B, classes].

        Args:
            x: Images [B, C, H, W].
            op_weights: ``{"cell": [E, O] or [B, E, O]}``: each edge is the weighted sum of all its
                ops.
            path: Without op weights, for each edge the column of its op, which alone is computed;
                None is the first op of every edge.
        """
        weights_EO = None if op_weights is None else op_weights[CELL]
        drop = self.drop_path_prob if self.training else 0.0
        images, x = x, self.stem(x)
        for block in self.blocks:
            x = block(x, weights_EO, path, drop)
        return self.joined(self.head(x), images)

    def chain(self) -> list[nn.Module]:
        """Return the stem and the cells, in the order of computation."""
        return [self.stem, *self.blocks]

    def checked_path(self, path: Sequence[int]) -> list[int]:
        """Return a path as a list.

        Raises:
            ValueError: It is not one column of an op for each edge.
        """
        block = self.blocks[0]
        assert isinstance(block, Block)
        sizes = [len(edge.names) for edge in block.edges if isinstance(edge, ChoiceEdge)]
        columns = list(path)
        fits = len(columns) == len(sizes) and all(
            type(column) is int and 0 <= column < size
            for column, size in zip(columns, sizes, strict=True)
        )
        if not fits:
            raise ValueError(f"a path must be {len(sizes)} columns of ops, got {str(columns)[:80]}")
        return columns

    def path_parameters(self, path: Sequence[int]) -> Iterator[nn.Parameter]:
        """Yield the parameters with which a path computes: its own and those that all share."""
        yield from self.stem.parameters()
        for block in self.blocks:
            assert isinstance(block, Block)
            yield from block.inputs.parameters()
            for edge, column in zip(block.edges, path, strict=True):
                assert isinstance(edge, ChoiceEdge)
                op = edge.op(column)
                yield from () if op is None else op.parameters()
        yield from self.head.parameters()
        yield from () if self.skip is None else self.skip.parameters()


class Block(nn.Module):
    """A cell and the max-pool behind it.

    Every node is the sum of its edges; the output is the nodes 1 to 5, concatenated.
    """

    def __init__(self, inputs: nn.Module, edges: Sequence[ChoiceEdge], pool: nn.Module) -> None:
        """Take the modules: what makes node 0, one edge for each of ``EDGES``, the pool."""
        super().__init__()
        self.inputs, self.edges, self.pool = inputs, nn.ModuleList(edges), pool

    def forward(
        self,
        x_BCHW: Tensor,
        weights_EO: Tensor | None = None,
        path: Sequence[int] | None = None,
        drop_path_prob: float = 0.0,
    ) -> Tensor:
        """Return [B, 5 C, H / 2, W / 2]; arguments are those of :class:`DPCellNetwork`."""
        states: list[Tensor] = [self.inputs(x_BCHW)]
        for node in NODES:
            terms = []
            for index, (source, target) in enumerate(EDGES):
                if target == node:
                    weights_O = None if weights_EO is None else weights_EO[..., index, :]
                    column = 0 if path is None else path[index]
                    term = self.edges[index](states[source], weights_O, column, drop_path_prob)
                    terms += [] if term is None else [term]
            states.append(add_all(terms) if terms else torch.zeros_like(states[0]))
        out: Tensor = self.pool(torch.cat(states[1:], dim=1))
        return out


class ChoiceEdge(nn.Module):
    """One edge: its candidate ops, without a module for ``none``."""

    def __init__(self, names: Sequence[str], *, channels: int, norm: Norm, groups: int) -> None:
        """Make the ops."""
        super().__init__()
        self.names = list(names)
        self.ops = nn.ModuleDict(
            {
                name: _make_op(name, channels, norm=norm, groups=groups)
                for name in names
                if name != NONE
            }
        )

    def forward(
        self,
        x_BCHW: Tensor,
        weights_O: Tensor | None = None,
        column: int = 0,
        drop_path_prob: float = 0.0,
    ) -> Tensor | None:
        """Return the weighted sum of all ops, or the op of a column; None for ``none``."""
        if weights_O is None:
            op = self.op(column)
            if op is None:
                return None
            spared = self.names[column] == SKIP
            return drop_path(op(x_BCHW), 0.0 if spared else drop_path_prob)
        columns = [column for column, name in enumerate(self.names) if name != NONE]
        return add_all(
            weights_O[..., column, None, None, None] * op(x_BCHW)
            for column, op in zip(columns, self.ops.values(), strict=True)
        )

    @torch.no_grad()
    def bring_near_identity(self) -> None:
        """Add to every convolution one that keeps its input, ``CENTRE`` times as large."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                identity = nn.init.dirac_(torch.empty_like(module.weight), module.groups)
                module.weight += CENTRE * _initial_std(module) * identity

    def op(self, column: int) -> nn.Module | None:
        """Return the op of a column, None for ``none``."""
        name = self.names[column]
        return None if name == NONE else self.ops[name]


def _initial_std(convolution: nn.Conv2d) -> float:
    return math.sqrt(2 / (math.prod(convolution.kernel_size) * convolution.out_channels))


def _make_op(name: str, channels: int, *, norm: Norm, groups: int) -> nn.Module:
    if name == SKIP:
        return nn.Identity()
    if name in POOLS:
        return POOLS[name](3, stride=1, padding=1)
    if name not in CONVOLUTIONS:
        return darts_network.make_operation(name, channels, stride=1, norm=norm, affine=False)
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
        make_norm(channels, norm=norm, affine=False, most_groups=groups),
        CONVOLUTIONS[name](),
    )
