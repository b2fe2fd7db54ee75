"""The modules of the MBConv search space: a chain of blocks with one computed op each.

Cai et al. (2019), ProxylessNAS, arXiv 1812.00332; the op is MobileNetV2's (Sandler et al. 2018,
arXiv 1801.04381). A network is planned first as layers (``mbconv_plan.py``), and
:func:`make_layer` turns each into a module: what a latency table times is what a network runs.
:class:`MBConvNetwork` is both the supernet's body, with several candidates in each block, and the
derived network, with one; equal parts have equal names in their state dicts.

Tensor suffixes: B batch, E blocks, O ops, K ops that are computed in a block, C channels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fednas_flwr.settings.names import Norm
from fednas_flwr.spaces.mbconv_plan import CELL, ZERO, Layer, Plan
from fednas_flwr.spaces.operations import channels_last, drop_path, make_norm
from fednas_flwr.spaces.skip import SkipNetwork


def make_layer(layer: Layer, *, norm: Norm) -> nn.Module:
    """Return the newly initialised module of one layer; of a block with its residual connection."""
    if layer.op == "conv":
        return _conv_norm(layer, norm=norm)
    if layer.op == "classifier":
        linear = nn.Linear(layer.input_shape[0], layer.output_shape[0])
        nn.init.normal_(linear.weight, std=0.01)
        nn.init.zeros_(linear.bias)
        return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear)
    return Block([layer], norm=norm)


class MBConvNetwork(SkipNetwork):
    """Stem, first block, searchable blocks, head and classifier.

    Initialised as MobileNetV2: convolutions He-normal by fan-out, the classifier with std .01.

    Attributes:
        drop_path_prob: Probability of drop-path on blocks with a residual connection, in [0, 1).
    """

    drop_path_prob: float

    def __init__(self, plan: Plan, *, norm: Norm) -> None:
        """Build the planned layers."""
        super().__init__()
        self.drop_path_prob = 0.0
        self.before = nn.Sequential(*(make_layer(layer, norm=norm) for layer in plan.before))
        self.blocks = nn.ModuleList(Block(layers, norm=norm) for layers in plan.blocks)
        self.after = nn.Sequential(*(make_layer(layer, norm=norm) for layer in plan.after))

    def forward(
        self,
        x: Tensor,
        op_weights: Mapping[str, Tensor] | None = None,
        paths: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Return logits [B, classes].

        Other ops are neither computed nor stored: one path costs what the derived network
        costs, whatever the number of candidates.

        Args:
            x: Images [B, C, H, W].
            op_weights: ``{"blocks": tensor}``. Without ``paths`` the weight of every op, [E, O] or
                [B, E, O]: each block is the weighted sum of all that it offers. With ``paths`` the
                gates, [E, K] or [B, E, K], one on the first op of a path and zero on the others.
            paths: For every block the columns of the K ops to compute, the active one first. The
                others are computed without a graph, since nothing flows back through a gate of
                zero, but the gate's own gradient is ``<dL/dy, o_j(x)>``. None with ``op_weights``
                None computes the first op of each block.
        """
        gates_EK = None if op_weights is None else op_weights[CELL]
        drop = self.drop_path_prob if self.training else 0.0
        images = x
        x = channels_last(self.before(x))
        for index, block in enumerate(self.blocks):
            gates_K = None if gates_EK is None else gates_EK[..., index, :]
            path = None if paths is None else paths[index]
            x = block(x, gates_K, path, drop)
        return self.joined(self.after(x), images)

    def chain(self) -> list[nn.Module]:
        """Return the stem, the first block, the searchable blocks and the head's convolution."""
        return [*self.before, *self.blocks, self.after[0]]


class Block(nn.Module):
    """One searchable block: the candidate ops between two feature maps, plus the input if it fits.

    ``zero`` adds nothing: the block is the identity.
    """

    def __init__(self, layers: Sequence[Layer | None], *, norm: Norm) -> None:
        """Make the modules of the layers; None leaves a column without an op."""
        super().__init__()
        self.names = [None if layer is None else layer.op for layer in layers]
        self.is_residual = next(layer for layer in layers if layer is not None).is_residual
        self.ops = nn.ModuleDict(
            {layer.op: _mbconv(layer, norm=norm) for layer in layers if layer and layer.op != ZERO}
        )

    def forward(
        self,
        x: Tensor,
        gates_K: Tensor | None = None,
        path: Sequence[int] | None = None,
        drop_path_prob: float = 0.0,
    ) -> Tensor:
        """Return the block's output; arguments are those of :class:`MBConvNetwork`, of one block.

        Without gates only the first op of the path counts.
        """
        out: Tensor | None = None
        if gates_K is None:
            op = self.op(0 if path is None else path[0])
            if op is not None:
                out = drop_path(op(x), drop_path_prob if self.is_residual else 0.0)
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

    def op(self, column: int) -> nn.Module | None:
        """Return the op of a column; None for ``zero`` and for what the block does not offer."""
        name = self.names[column]
        return None if name is None or name == ZERO else self.ops[name]


def _mbconv(layer: Layer, *, norm: Norm) -> nn.Sequential:
    """Return 1x1 expansion (left out if it is 1), depthwise convolution, 1x1 projection.

    A norm follows each, ReLU6 the first two.
    """
    inputs, outputs = layer.input_shape[0], layer.output_shape[0]
    inner = inputs * layer.expansion
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if layer.expansion > 1:
        parts["expand"] = _convolution(inputs, inner)
        parts["expand_norm"] = make_norm(inner, norm=norm, affine=True)
        parts["expand_relu"] = nn.ReLU6()
    parts["depthwise"] = _convolution(
        inner, inner, kernel=layer.kernel, stride=layer.stride, groups=inner
    )
    parts["depthwise_norm"] = make_norm(inner, norm=norm, affine=True)
    parts["depthwise_relu"] = nn.ReLU6()
    parts["project"] = _convolution(inner, outputs)
    parts["project_norm"] = make_norm(outputs, norm=norm, affine=True)
    return nn.Sequential(parts)


def _conv_norm(layer: Layer, *, norm: Norm) -> nn.Sequential:
    inputs, outputs = layer.input_shape[0], layer.output_shape[0]
    convolution = _convolution(inputs, outputs, kernel=layer.kernel, stride=layer.stride)
    return nn.Sequential(convolution, make_norm(outputs, norm=norm, affine=True), nn.ReLU6())


def _convolution(
    inputs: int, outputs: int, *, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Conv2d:
    convolution = nn.Conv2d(
        inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False
    )
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out")
    return convolution
