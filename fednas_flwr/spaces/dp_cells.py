"""The search space of DPNAS: one cell whose 15 edges each compute one of ten ops.

Cheng et al. (2022), DPNAS, arXiv 2110.08557, section 3.2 and Figure 2. Six of the ops are a
convolution with different activations; the search is for the one that suits private training.
:class:`DPCellSpace` gives the supernet, the way from alphas or a path to a genotype and the derived
network. :class:`DPCellNetwork` is both the supernet's body, with all ops on every edge, and the
derived network, with one op per edge. Equal parts have equal names in their state dicts.

Tensor suffixes: B batch, C channels, H height, W width, E edges, O ops.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError, check_choice
from fednas_flwr.settings import optimizers, parser, registry
from fednas_flwr.settings.names import GROUP, NORMS, Norm
from fednas_flwr.spaces import cell_graph, darts, operations
from fednas_flwr.spaces.genotype import SKIP, Genotype
from fednas_flwr.spaces.space import CELL, SearchSpace

NODES = range(1, 6)  # K = 5 internal nodes; node 0 is the cell's input
EDGES = cell_graph.candidate_edges(NODES)
CENTRE = 20.0  # value of a near-identity's centre, in standard deviations of the noise around it
POOLS: dict[str, type[nn.Module]] = {"max_pool_3x3": nn.MaxPool2d, "avg_pool_3x3": nn.AvgPool2d}
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "tanh": nn.Tanh,
    "linear": nn.Identity,
    "hardtanh": nn.Hardtanh,
    "sigmoid": nn.Sigmoid,
}
CONVOLUTIONS = {f"conv_3x3_{name}": make for name, make in ACTIVATIONS.items()}
OPS = ("none", *POOLS, SKIP, *CONVOLUTIONS)  # in the order of the published cells' numbers
SEARCH_GROUPS, TRAINING_GROUPS = 4, 8  # of group norms, as in the authors' code
BLOCKS = 3


@dataclass(frozen=True, kw_only=True)
class DPCellSpace(SearchSpace):
    """The DP-friendly search space for images of one shape.

    Attributes:
        input_shape: (channels, height, width) of an image; any size.
        num_classes: Number of classes.
        widths: Channels of the nodes in each of the three cells (48, 96, 192 for CIFAR-10; 32, 32,
            64 for MNIST and Fashion-MNIST).
        head: Width of the head, 128 in the paper's networks.
        activation: Activation of the head's hidden layer, one of ``ACTIVATIONS``; the paper has
            selu for CIFAR-10, else tanh.
        norm: ``batch``, or ``group`` (needed for privacy; the only one in the paper).
    """

    name = "dp_cells"
    ops = OPS
    edges = EDGES
    outputs = NODES
    routes = cell_graph.routes(EDGES, outputs=NODES)

    widths: tuple[int, ...] = (32, 32, 64)
    head: optimizers.Count = 128
    activation: str = "tanh"
    norm: Annotated[Norm, parser.OneOf(NORMS)] = GROUP

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be built."""
        object.__setattr__(self, "widths", tuple(self.widths))  # JSON has no tuples
        super().__post_init__()
        check_choice("search_space.activation", self.activation, ACTIVATIONS)
        if len(self.widths) != BLOCKS or min(self.widths) < 1:
            raise ConfigError(
                f"search_space.widths={list(self.widths)} must be {BLOCKS} numbers of channels, "
                "each at least 1: one for each cell."
            )

    def body(self) -> "DPCellNetwork":
        """Build the body of a supernet, with the weights of all ops on all edges.

        With a path it computes only that path. Without one the supernet is the relaxation of DARTS
        on this space, which is not in the paper.
        """
        ops = [self.ops] * len(EDGES)
        return DPCellNetwork(self, ops, groups=SEARCH_GROUPS, near_identity=True)

    def discrete(self, genotype: Genotype, *, auxiliary: bool) -> "DPCellNetwork":
        """Build the derived network."""
        ops = [[edge.op] for edge in genotype.cells[CELL]]
        return DPCellNetwork(self, ops, groups=TRAINING_GROUPS)


class DARTSOpsSpace(DPCellSpace):
    """The same cells with the candidate ops of DARTS, which offer no choice of activation.

    It serves Figure 3(a), which shows the value of the choice of ops. Deviations: the paper also
    uses DARTS' cells, of two kinds; here pools have no norm, and norms have no affine part.
    """

    name = "dp_cells_darts"
    ops = darts.OPS


class DPCellNetwork(operations.SkipNetwork):
    """Stem, three times a cell and a max-pool of 2, head.

    Some details are missing in the paper; they follow from its parameter counts and the authors'
    code. The 3x3 convolutions of the ops are depthwise, norms have no affine part, and convolutions
    no bias. The stem is a 3x3 convolution with norm, the pools between cells are 2x2 (the paper
    says 3x3), and average pools count the zeros around the image. A side of one pixel is not pooled
    any more. Convolutions are initialised as in that code, with variance ``2 / (kernel area *
    output channels)``: norms hide the scale, but the smaller the weights, the larger the gradients
    that are clipped.

    Deviation: ``near_identity`` adds a larger number to the centre of each op's kernels, for a
    supernet. With kernels drawn at random the outputs of candidates are unrelated, so that they
    cannot share a head at first: 1,500 steps on digits leave the loss at ln 10, while with
    ``near_identity`` 360 steps reach 1.8.
    """

    def __init__(
        self,
        space: DPCellSpace,
        ops_of_edges: Sequence[Sequence[str]],
        *,
        groups: int,
        near_identity: bool = False,
    ) -> None:
        """Build the network.

        Args:
            space: Space with the network's sizes.
            ops_of_edges: For each of ``EDGES``, the names of the ops to choose from.
            groups: Largest number of groups of a group norm.
            near_identity: True if the ops' convolutions begin as identities plus noise.
        """
        super().__init__()
        channels, height, width = space.input_shape
        widths, head, norm = space.widths, space.head, space.norm

        how: Any = {"norm": norm, "affine": False, "most_groups": groups}

        def normed(convolution: nn.Conv2d) -> nn.Sequential:
            return nn.Sequential(convolution, operations.make_norm(convolution.out_channels, **how))

        self.stem = normed(nn.Conv2d(channels, widths[0], 3, padding=1, bias=False))
        channels = widths[0]
        self.blocks = nn.ModuleList()
        for inner in widths:
            inputs = normed(nn.Conv2d(channels, inner, 1, bias=False))
            pool = nn.MaxPool2d((min(2, height), min(2, width)))
            make = partial(_make_op, channels=inner, norm=norm, groups=groups)
            edges = [operations.MixedOp(names, make) for names in ops_of_edges]
            self.blocks.append(Block(inputs, edges, pool))
            channels, height, width = len(NODES) * inner, max(1, height // 2), max(1, width // 2)
        self.head = nn.Sequential(
            *normed(nn.Conv2d(channels, head, 1, bias=False)),
            nn.Flatten(),
            nn.Linear(head * height * width, head),
            ACTIVATIONS[space.activation](),
            nn.Linear(head, space.num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=_initial_std(module))
        for block in self.blocks if near_identity else ():
            block.bring_near_identity()  # type: ignore[operator]

    def forward(
        self, x: Tensor, op_weights: operations.OpWeights = None, path: Sequence[int] | None = None
    ) -> Tensor:
        """Return logits [B, classes].

        Args:
            x: Images [B, C, H, W].
            op_weights: ``{"cell": [E, O] or [B, E, O]}``: each edge is the weighted sum of all its
                ops.
            path: Without op weights, the column of the only op to compute on each edge; None takes
                the first op of every edge.
        """
        weights_EO = None if op_weights is None else op_weights[CELL]
        images, x = x, self.stem(x)
        for block in self.blocks:
            x = block(x, weights_EO, path, self.dropped)
        return self.joined(self.head(x), images)

    def chain(self) -> list[nn.Module]:
        """Return the stem and the cells, in the order of computation."""
        return [self.stem, *self.blocks]


class Block(nn.Module):
    """A cell and the max-pool that follows it.

    Every node is the sum of its edges; the output is the nodes 1 to 5, concatenated.
    """

    def __init__(
        self, inputs: nn.Module, edges: Sequence[operations.MixedOp], pool: nn.Module
    ) -> None:
        """Store the modules: that of node 0, one edge for each of ``EDGES``, and the pool."""
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
        inputs: list[Tensor] = [self.inputs(x_BCHW)]
        edges: Any = self.edges
        if weights_EO is None:
            columns = [0] * len(EDGES) if path is None else path
            ops = [edge.op(column) for edge, column in zip(edges, columns, strict=True)]
            states = operations.discrete_states(inputs, EDGES, ops, NODES, drop_path_prob)
        else:

            def mixed(index: int, state: Tensor) -> Tensor:
                return edges[index](state, weights_EO[..., index, :])

            states = operations.summed_states(inputs, EDGES, mixed, nodes=NODES, empty=None)
        return self.pool(torch.cat(states[1:], dim=1))

    @torch.no_grad()
    def bring_near_identity(self) -> None:
        """Add identity kernels, ``CENTRE`` times as large, to the ops' convolutions."""
        for module in self.edges.modules():
            if isinstance(module, nn.Conv2d):
                identity = nn.init.dirac_(torch.empty_like(module.weight), module.groups)
                module.weight += CENTRE * _initial_std(module) * identity


def _initial_std(convolution: nn.Conv2d) -> float:
    return math.sqrt(2 / (math.prod(convolution.kernel_size) * convolution.out_channels))


def _make_op(name: str, channels: int, *, norm: Norm, groups: int) -> nn.Module:
    if name == SKIP:
        return nn.Identity()
    if name in POOLS:
        return POOLS[name](3, stride=1, padding=1)
    after = operations.make_norm(channels, norm=norm, affine=False, most_groups=groups)
    if name in registry.TABLES["op"]:
        return operations.OwnOp(name, channels, after, sides=(5, 5))
    if name not in CONVOLUTIONS:
        return darts.make_operation(name, channels, stride=1, norm=norm, affine=False)
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
        after,
        CONVOLUTIONS[name](),
    )
