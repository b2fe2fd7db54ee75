"""The MBConv search space of ProxylessNAS, FDNAS and CFDNAS: the op of each block in a chain.

Cai et al. (2019), arXiv 1812.00332; Zhang et al. (2020), FDNAS, arXiv 2011.03372. The search uses
no smaller proxy: the derived network has the supernet's depth and width. The op is that of
MobileNetV2 (Sandler et al. 2018, arXiv 1801.04381).

:class:`MBConvSpace` gives the supernet, the way from alphas to a genotype and the derived network.
A network is first planned as layers, shapes and strides: :class:`MBConvSpace` fills a
:class:`Skeleton`, the fixed shape around the choices, with candidates. Costs are sums over layers.
:func:`make_layer` turns each layer into a module, so that a latency table times exactly what a
network runs. :class:`MBConvNetwork` is both the supernet's body, with several candidates in each
block, and the derived network, with one. Equal parts have equal names in their state dicts.

Tensor suffixes: B batch, E blocks, O ops, K ops that are computed in a block, C channels.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError, check_choice, unknown_choice
from fednas_flwr.settings.names import Norm
from fednas_flwr.settings.parser import Between
from fednas_flwr.spaces import operations as ops
from fednas_flwr.spaces.genotype import Edge, Genotype
from fednas_flwr.spaces.space import SearchSpace, Supernet

# The alpha of an op that a block does not offer. Its softmax and its gradient are exactly zero in
# every dtype, so that samplers, entropies, averages and checkpoints need no special case.
NEVER = -1e4
CELL = "blocks"  # the only kind of cell
ZERO = "zero"
MBCONVS = {  # name: expansion, kernel size
    f"mbconv{expansion}_{kernel}x{kernel}": (expansion, kernel)
    for expansion in range(1, 7)
    for kernel in (3, 5, 7)
}


class Layer(NamedTuple):
    """Everything on which a layer's cost depends, except the norm; shapes are of one example.

    Attributes:
        op: ``conv`` (with norm and ReLU6), a name of ``MBCONVS``, ``zero`` or ``classifier``.
        input_shape: (channels, height, width).
        output_shape: Shape for one record; (classes,) for the classifier.
        expansion: Ratio of the channels inside the block to input channels; 1 for other ops.
        kernel: Kernel size; 1 for ops other than convolutions.
        stride: 1 or 2.
    """

    op: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    expansion: int = 1
    kernel: int = 1
    stride: int = 1

    @property
    def is_residual(self) -> bool:
        """True if the input is added to the output."""
        is_block = self.op not in ("conv", "classifier")
        return is_block and self.stride == 1 and self.input_shape[0] == self.output_shape[0]


class Plan(NamedTuple):
    """A network as layers: those before the blocks, the candidates of every block, those after."""

    before: tuple[Layer, ...]
    blocks: tuple[tuple[Layer | None, ...], ...]  # [E][O]; None if the block does not offer the op
    after: tuple[Layer, ...]


@dataclass(frozen=True)
class Skeleton:
    """The plan that all networks of an MBConv space share, at width 1.

    Attributes:
        stem: Channels of the first 3x3 convolution.
        stem_stride: Its stride.
        first: Channels of the fixed first block, ``mbconv1_3x3`` of stride 1.
        stages: (channels, number of searchable blocks) of each stage.
        downsampling: Numbers, from 1, of the searchable blocks with stride 2.
        head: Channels of the last 1x1 convolution.
    """

    stem: int
    stem_stride: int
    first: int
    stages: tuple[tuple[int, int], ...]
    downsampling: tuple[int, ...]
    head: int


PROXYLESS_WIDTHS = (24, 40, 80, 96, 192, 320)
FDNAS_STAGES = tuple(zip(PROXYLESS_WIDTHS, (2, 3, 4, 3, 4, 3), strict=True))
PROXYLESS_STAGES = tuple(zip(PROXYLESS_WIDTHS, (4, 4, 4, 4, 4, 1), strict=True))
MOBILENET_STAGES = ((24, 2), (32, 3), (64, 4), (96, 3), (160, 3), (320, 1))
SKELETONS = {
    # 19 blocks for 32x32; FDNAS states only this number, the stages are from public code.
    "fdnas": Skeleton(32, 1, 16, FDNAS_STAGES, (6, 13), 1280),
    # The same blocks for 224x224: FDNAS' down-sampling layers 1, 3, 6, 8 and 16 are these if the
    # stem is layer 1 and the first block layer 2. Genotypes of about 347 M multiply-adds at 32x32,
    # as in FDNAS, then need 365 to 395 M (the paper: 388 M); other ways of counting give 500 M or
    # more.
    "fdnas_imagenet": Skeleton(32, 2, 16, FDNAS_STAGES, (1, 4, 6, 14), 1280),
    "proxyless": Skeleton(32, 2, 16, PROXYLESS_STAGES, (1, 5, 9, 17), 1280),  # 21 blocks, 224x224
    "mobilenet_v2": Skeleton(32, 2, 16, MOBILENET_STAGES, (1, 3, 6, 13), 1280),  # 224x224
    "small": Skeleton(16, 1, 8, ((16, 2), (24, 2), (40, 2)), (1, 3), 160),  # 28x28 and 8x8
}
CANDIDATES = {
    "proxyless": (*(f"mbconv{expansion}_{k}x{k}" for k in (3, 5, 7) for expansion in (3, 6)), ZERO),
    "fdnas": (*(f"mbconv{expansion}_3x3" for expansion in range(2, 7)), "mbconv3_5x5"),
}


@dataclass(frozen=True, kw_only=True)
class MBConvSpace(SearchSpace):
    """The MBConv search space for images of one shape.

    Attributes:
        input_shape: (channels, height, width) of an image; any size.
        num_classes: Number of classes.
        skeleton: Depth, widths and strides.
        candidates: The ops to choose from: names from ``MBCONVS``, and ``zero``, which is offered
            by blocks of stride 1 with as many output as input channels.
        width: Width multiplier; channels are rounded to multiples of 8, the head never shrinks.
        norm: ``batch``, or ``group`` (needed for privacy), in search and in retraining.
    """

    name = "mbconv"
    kinds = (CELL,)

    skeleton: Skeleton = SKELETONS["fdnas"]
    candidates: tuple[str, ...] = CANDIDATES["fdnas"]
    width: Annotated[float, Between(0, 16, above=True)] = 1.0

    def __post_init__(self) -> None:
        """Refuse spaces that cannot be built or offer no choice."""
        object.__setattr__(self, "ops", self.candidates)
        super().__post_init__()
        for op in self.candidates:
            if op not in (*MBCONVS, ZERO):
                raise unknown_choice("candidate", op, (*MBCONVS, ZERO))
        convolutions = set(self.candidates) - {ZERO}
        if len(convolutions) < 2 or len(set(self.candidates)) < len(self.candidates):
            raise ConfigError(
                f"candidates={', '.join(self.candidates)}: at least two different ops other than "
                "zero are needed, each named once."
            )

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]
        """The searchable blocks, a chain."""
        return tuple((block, block + 1) for block in range(len(self.plan.blocks)))

    @property
    def offered(self) -> list[list[int]]:
        """The columns of the ops that each block offers."""
        return [[i for i, layer in enumerate(row) if layer is not None] for row in self.plan.blocks]

    @cached_property
    def plan(self) -> Plan:
        """The supernet as layers."""
        skeleton, width = self.skeleton, self.width
        channels = scale_channels(skeleton.stem, width)
        stem = _layer("conv", self.input_shape, channels, kernel=3, stride=skeleton.stem_stride)
        first = _layer("mbconv1_3x3", stem.output_shape, scale_channels(skeleton.first, width))
        shape, blocks = first.output_shape, []
        widths = [scale_channels(c, width) for c, count in skeleton.stages for _ in range(count)]
        for number, channels in enumerate(widths, 1):
            stride = 2 if number in skeleton.downsampling else 1
            layers = [_layer(op, shape, channels, stride=stride) for op in self.ops]
            fits = stride == 1 and channels == shape[0]
            blocks.append(tuple(layer if fits or layer.op != ZERO else None for layer in layers))
            shape = layers[0].output_shape
        head = _layer("conv", shape, scale_channels(skeleton.head, max(1.0, width)))
        classifier = Layer("classifier", head.output_shape, (self.num_classes,))
        return Plan((stem, first), tuple(blocks), (head, classifier))

    def body(self) -> "MBConvNetwork":
        """Build the body of a supernet."""
        return MBConvNetwork(self.plan, norm=self.norm)

    def supernet(self) -> Supernet:
        """Build a newly initialised supernet; ops that a block lacks have the alpha ``NEVER``.

        Without op weights a block is the sum of all ops weighted by softmax(alphas), as in DARTS;
        with one-hot gates and paths (:class:`MBConvNetwork`) it is ProxylessNAS' supernet.
        """
        supernet = super().supernet()
        missing_EO = torch.tensor([[layer is None for layer in row] for row in self.plan.blocks])
        with torch.no_grad():
            supernet.alphas()[CELL].masked_fill_(missing_EO, NEVER)
        return supernet

    def check_cell(self, kind: str, edges: Sequence[Edge]) -> None:
        """Raise ConfigError unless each block, in order, has one of the ops that it offers."""
        super().check_cell(kind, edges)
        for edge, row in zip(edges, self.plan.blocks, strict=True):
            if row[self.ops.index(edge.op)] is None:
                raise ConfigError(
                    f"block {edge.target} cannot be {edge.op}: it changes the size or the channels."
                )

    def discrete(self, genotype: Genotype, *, auxiliary: bool) -> "MBConvNetwork":
        """Build the derived network."""
        pairs = zip(self.plan.blocks, self.path(genotype), strict=True)
        chosen = tuple((row[op],) for row, op in pairs)
        return MBConvNetwork(self.plan._replace(blocks=chosen), norm=self.norm)


def named_space(*, skeleton: str, candidates: str, **settings: Any) -> MBConvSpace:
    """Return the space with a skeleton and candidates, given by their names.

    Raises:
        ConfigError: There are none with these names.
    """
    check_choice("search_space.skeleton", skeleton, SKELETONS)
    check_choice("search_space.candidates", candidates, CANDIDATES)
    return MBConvSpace(skeleton=SKELETONS[skeleton], candidates=CANDIDATES[candidates], **settings)


def scale_channels(channels: int, width: float) -> int:
    """Return ``channels * width`` as the nearest multiple of 8, at least 8 and at least .9 of it.

    The rule is that of MobileNetV2 (Sandler et al. 2018).

    Example:
        >>> [scale_channels(24, width) for width in (0.25, 0.75, 1.0, 1.4)]
        [8, 24, 24, 32]
    """
    exact = channels * width
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * exact else rounded


def _layer(
    op: str, input_shape: tuple[int, ...], channels: int, *, kernel: int = 1, stride: int = 1
) -> Layer:
    """Plan a layer: its output shape and, for a block, the properties in its name."""
    _, *sizes = input_shape
    output_shape = (channels, *(ceil(size / stride) for size in sizes))
    return Layer(op, tuple(input_shape), output_shape, *MBCONVS.get(op, (1, kernel)), stride)


def make_layer(layer: Layer, *, norm: Norm) -> nn.Module:
    """Return the newly initialised module of one layer; a block has its residual connection."""
    if layer.op == "conv":
        inputs, outputs = layer.input_shape[0], layer.output_shape[0]
        sizes = {"kernel": layer.kernel, "stride": layer.stride}
        parts = _layers("conv", inputs, outputs, norm=norm, relu=True, **sizes)
        return nn.Sequential(*parts.values())
    if layer.op == "classifier":
        linear = nn.Linear(layer.input_shape[0], layer.output_shape[0])
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
    return Block([layer], norm=norm)


class MBConvNetwork(ops.SkipNetwork):
    """Stem, first block, searchable blocks, head and classifier.

    It is initialised like MobileNetV2: convolutions He-normal by fan-out, the classifier with std
    .01.
    """

    def __init__(self, plan: Plan, *, norm: Norm) -> None:
        """Build the planned layers."""
        super().__init__()
        self.before = nn.Sequential(*(make_layer(layer, norm=norm) for layer in plan.before))
        self.blocks = nn.ModuleList(Block(layers, norm=norm) for layers in plan.blocks)
        self.after = nn.Sequential(*(make_layer(layer, norm=norm) for layer in plan.after))

    def forward(
        self,
        x: Tensor,
        op_weights: ops.OpWeights = None,
        paths: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Return logits [B, classes].

        Other ops are neither computed nor stored: one path costs as much as the derived network,
        whatever the number of candidates.

        Args:
            x: Images [B, C, H, W].
            op_weights: ``{"blocks": tensor}``. Without ``paths``, the weight of every op, [E, O] or
                [B, E, O]: each block is the weighted sum of all ops that it offers. With ``paths``,
                the gates, [E, K] or [B, E, K]: one for the first op of a path and zero for the
                others.
            paths: For every block, the columns of the K ops to compute, the active one first. The
                others are computed without a graph, since nothing flows back through a gate of
                zero; the gate's own gradient is still ``<dL/dy, o_j(x)>``. If ``op_weights`` is
                None too, None computes the first op of each block.
        """
        gates_EK = None if op_weights is None else op_weights[CELL]
        images = x
        x = ops.channels_last(self.before(x))
        for index, block in enumerate(self.blocks):
            gates_K = None if gates_EK is None else gates_EK[..., index, :]
            x = block(x, gates_K, None if paths is None else paths[index], self.dropped)
        return self.joined(self.after(x), images)

    def choices(self) -> list[ops.Choice]:
        """Return the searchable blocks."""
        return [block for block in self.blocks if isinstance(block, Block)]

    def chain(self) -> list[nn.Module]:
        """Return the stem, the first block, the searchable blocks and the head's convolution."""
        return [*self.before, *self.blocks, self.after[0]]


class Block(ops.Choice):
    """A searchable block: the candidate ops between two feature maps, plus the input if it fits.

    ``zero`` adds nothing: the block is the identity.
    """

    def __init__(self, layers: Sequence[Layer | None], *, norm: Norm) -> None:
        """Build the modules of the layers; None leaves a column without an op."""
        offered = {layer.op: layer for layer in layers if layer is not None}
        super().__init__(
            [None if layer is None else layer.op for layer in layers],
            lambda op: _candidate(offered[op], norm=norm),
        )
        self.is_residual = next(iter(offered.values())).is_residual

    def forward(
        self,
        x: Tensor,
        gates_K: Tensor | None = None,
        path: Sequence[int] | None = None,
        drop_path_prob: float = 0.0,
    ) -> Tensor:
        """Return the block's output; arguments are those of :class:`MBConvNetwork` for one block.

        Without gates only the first op of the path counts.
        """
        out: Tensor | None = None
        if gates_K is None:
            op = self.op(0 if path is None else path[0])
            if op is not None:
                out = ops.drop_path(op(x), drop_path_prob if self.is_residual else 0.0)
        else:
            for position, column in enumerate(range(len(self.names)) if path is None else path):
                op = self.op(column)
                if op is not None:
                    has_graph = torch.is_grad_enabled() and (path is None or position == 0)
                    with torch.set_grad_enabled(has_graph):
                        term = op(x)
                    term = gates_K[..., position, None, None, None] * term
                    out = term if out is None else out + term
        if out is None:
            return x
        return out + x if self.is_residual else out


def _candidate(layer: Layer, *, norm: Norm) -> nn.Sequential:
    """Return the module of a block's op; a user's registered op is projected, too.

    A name from ``MBCONVS`` is a 1x1 expansion (omitted if it is 1), a depthwise convolution and a
    1x1 projection.
    """
    inputs, outputs = layer.input_shape[0], layer.output_shape[0]
    if layer.op not in MBCONVS:
        after = ops.make_norm(inputs, norm=norm, affine=True)
        op = ops.OwnOp(layer.op, inputs, after, stride=layer.stride, sides=layer.input_shape[1:])
        return nn.Sequential(op, *_layers("project", inputs, outputs, norm=norm).values())
    inner = inputs * layer.expansion
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if layer.expansion > 1:
        parts |= _layers("expand", inputs, inner, norm=norm, relu=True)
    sizes = {"kernel": layer.kernel, "stride": layer.stride, "groups": inner}
    parts |= _layers("depthwise", inner, inner, norm=norm, relu=True, **sizes)
    return nn.Sequential(parts | _layers("project", inner, outputs, norm=norm))


def _layers(
    name: str,
    inputs: int,
    outputs: int,
    *,
    norm: Norm,
    relu: bool = False,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
) -> OrderedDict[str, nn.Module]:
    """Return a convolution, its norm and, with ``relu``, ReLU6, by their names in a block."""
    convolution = nn.Conv2d(
        inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
    )
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out")
    parts = OrderedDict[str, nn.Module]({name: convolution})
    parts[f"{name}_norm"] = ops.make_norm(outputs, norm=norm, affine=True)
    if relu:
        parts[f"{name}_relu"] = nn.ReLU6()
    return parts
