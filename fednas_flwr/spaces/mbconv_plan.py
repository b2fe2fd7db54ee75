"""Networks of the MBConv search space as layers: shapes and strides, before any module is made.

Cai et al. (2019), ProxylessNAS, arXiv 1812.00332; Zhang et al. (2020), FDNAS, arXiv 2011.03372.
:func:`make_plan` fills a :class:`Skeleton` with candidates. Costs are sums over its layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

CELL = "blocks"  # the only kind of cell
ZERO = "zero"
MBCONVS = {  # name: expansion, kernel size
    f"mbconv{expansion}_{kernel}x{kernel}": (expansion, kernel)
    for expansion in range(1, 7)
    for kernel in (3, 5, 7)
}


class Layer(NamedTuple):
    """All that the cost of a layer depends on, but for the norm; shapes are of one example.

    Attributes:
        op: ``conv`` (with norm and ReLU6), a name of ``MBCONVS``, ``zero`` or ``classifier``.
        input_shape: (channels, height, width).
        output_shape: Of one record; of the classifier (classes,).
        expansion: Channels inside the block over input channels; 1 for other ops.
        kernel: Kernel size; 1 for other ops than convolutions.
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
        is_block = self.op in MBCONVS or self.op == ZERO
        return is_block and self.stride == 1 and self.input_shape[0] == self.output_shape[0]


class Plan(NamedTuple):
    """A network as layers: before the blocks, the candidates of every block, and after them."""

    before: tuple[Layer, ...]
    blocks: tuple[tuple[Layer | None, ...], ...]  # [E][O]; None: the block does not offer the op
    after: tuple[Layer, ...]


@dataclass(frozen=True)
class Skeleton:
    """Plan that all networks of an MBConv space share, at width 1.

    Attributes:
        stem: Channels of the first 3x3 convolution.
        stem_stride: Its stride.
        first: Channels of the fixed first block, ``mbconv1_3x3`` of stride 1.
        stages: (channels, number of searchable blocks) each.
        downsampling: Numbers, from 1, of the searchable blocks that have stride 2.
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
    # 19 blocks for 32x32; FDNAS says no more than the number, the stages are of public code.
    "fdnas": Skeleton(32, 1, 16, FDNAS_STAGES, (6, 13), 1280),
    # The same blocks for 224x224: FDNAS' down-sampling layers 1, 3, 6, 8 and 16 are these when the
    # stem is layer 1 and the first block layer 2. Genotypes of about 347 M multiply-adds at 32x32,
    # as FDNAS has, then need 365 to 395 M (the paper: 388 M); other ways of counting give 500 M on.
    "fdnas_imagenet": Skeleton(32, 2, 16, FDNAS_STAGES, (1, 4, 6, 14), 1280),
    "proxyless": Skeleton(32, 2, 16, PROXYLESS_STAGES, (1, 5, 9, 17), 1280),  # 21 blocks, 224x224
    "mobilenet_v2": Skeleton(32, 2, 16, MOBILENET_STAGES, (1, 3, 6, 13), 1280),  # 224x224
    "small": Skeleton(16, 1, 8, ((16, 2), (24, 2), (40, 2)), (1, 3), 160),  # 28x28 and 8x8
}
CANDIDATES = {
    "proxyless": (
        *(f"mbconv{expansion}_{k}x{k}" for k in (3, 5, 7) for expansion in (3, 6)),
        ZERO,
    ),
    "fdnas": (*(f"mbconv{expansion}_3x3" for expansion in range(2, 7)), "mbconv3_5x5"),
}


def make_plan(
    skeleton: Skeleton,
    *,
    candidates: tuple[str, ...],
    width: float,
    input_shape: tuple[int, ...],
    num_classes: int,
) -> Plan:
    """Return the supernet as layers; see ``MBConvSpace`` for the arguments."""
    stem = _layer(
        "conv",
        input_shape,
        scale_channels(skeleton.stem, width),
        kernel=3,
        stride=skeleton.stem_stride,
    )
    first = _op_layer("mbconv1_3x3", stem.output_shape, scale_channels(skeleton.first, width))
    shape, blocks = first.output_shape, []
    widths = [scale_channels(c, width) for c, count in skeleton.stages for _ in range(count)]
    for number, channels in enumerate(widths, 1):
        stride = 2 if number in skeleton.downsampling else 1
        layers = [_op_layer(op, shape, channels, stride=stride) for op in candidates]
        fits = stride == 1 and channels == shape[0]
        blocks.append(tuple(layer if fits or layer.op != ZERO else None for layer in layers))
        shape = layers[0].output_shape
    head = _layer("conv", shape, scale_channels(skeleton.head, max(1.0, width)))
    classifier = Layer("classifier", head.output_shape, (num_classes,))
    return Plan((stem, first), tuple(blocks), (head, classifier))


def scale_channels(channels: int, width: float) -> int:
    """Return ``channels * width`` as the nearest multiple of 8, at least 8 and at least .9 of it.

    As in MobileNetV2 (Sandler et al. 2018).

    Example:
        >>> [scale_channels(24, width) for width in (0.25, 0.75, 1.0, 1.4)]
        [8, 24, 24, 32]
    """
    exact = channels * width
    rounded = max(8, int(exact + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * exact else rounded


def _op_layer(op: str, input_shape: tuple[int, ...], channels: int, *, stride: int = 1) -> Layer:
    expansion, kernel = MBCONVS.get(op, (1, 1))
    return _layer(op, input_shape, channels, expansion=expansion, kernel=kernel, stride=stride)


def _layer(
    op: str,
    input_shape: tuple[int, ...],
    channels: int,
    *,
    expansion: int = 1,
    kernel: int = 1,
    stride: int = 1,
) -> Layer:
    """Return the layer, its output shape worked out."""
    _, *sizes = input_shape
    output_shape = (channels, *(ceil(size / stride) for size in sizes))
    return Layer(op, tuple(input_shape), output_shape, expansion, kernel, stride)
