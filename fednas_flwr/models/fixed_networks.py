"""Networks that are given, not searched: the baselines of the papers' tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.settings.names import Norm
from fednas_flwr.settings.optimizers import RESNET8_WIDTHS, RESNETS
from fednas_flwr.spaces.operations import every_second, make_norm


def torchvision_network(
    input_shape: tuple[int, ...], num_classes: int, *, name: str, norm: Norm
) -> nn.Module:
    """Return a network of torchvision, newly initialised, for images of any channel count.

    Below 64 pixels the first convolution has stride 1 instead of 2, as is usual for 32x32 images.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: Number of classes.
        name: ``mobilenet_v2`` or ``efficientnet_b0``: those whose first convolution has 32 filters.
        norm: ``batch``, or ``group``, as private training needs.

    Raises:
        ConfigError: The examples are no images, or there is no such norm.
    """
    from torchvision import models

    channels, height, _ = _image_shape(name, input_shape)
    network: nn.Module = models.get_model(
        name,
        num_classes=num_classes,
        norm_layer=partial(make_norm, norm=norm, affine=True),
    )
    for module in network.modules():
        if isinstance(module, nn.ReLU6 | nn.SiLU):
            module.inplace = False  # per-record gradients by Opacus' hooks need it
    stem = nn.Conv2d(channels, 32, 3, stride=1 if height < 64 else 2, padding=1, bias=False)
    nn.init.kaiming_normal_(stem.weight, mode="fan_out")
    network.set_submodule("features.0.0", stem)
    return network


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with norms beside a shortcut (He et al. 2016, CVPR, figure 2).

    Args:
        inputs: Channels.
        outputs: Channels.
        stride: 1, or 2.
        norm: ``batch`` or ``group``.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int, norm: Norm) -> None:
        """Build the block; a shortcut of another shape is a 1x1 convolution with a norm."""
        super().__init__()
        self.relu = nn.ReLU()
        self.first = _conv_norm(inputs, outputs, kernel_size=3, stride=stride, norm=norm)
        self.second = _conv_norm(outputs, outputs, kernel_size=3, stride=1, norm=norm)
        self.halves = stride == 2
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = _conv_norm(inputs, outputs, kernel_size=1, stride=1, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, outputs, H / stride, W / stride]``, sides rounded up."""
        residual = self.second(self.relu(self.first(x)))
        out: Tensor = self.relu(residual + self.shortcut(every_second(x) if self.halves else x))
        return out


def resnet8(input_shape: tuple[int, ...], num_classes: int, *, width: int, norm: Norm) -> nn.Module:
    """Return the ResNet of He et al. (2016), section 4.2, with one block per stage.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: Number of classes.
        width: Channels of the first stage, the paper's 16; the others have 2 and 4 times as many.
        norm: ``batch`` or ``group``.

    Raises:
        ConfigError: The examples are no images, or there is no such norm.
    """
    channels, _, _ = _image_shape(f"resnet8_{width}", input_shape)
    return nn.Sequential(
        _conv_norm(channels, width, kernel_size=3, stride=1, norm=norm),
        nn.ReLU(),
        ResidualBlock(width, width, stride=1, norm=norm),
        ResidualBlock(width, 2 * width, stride=2, norm=norm),
        ResidualBlock(2 * width, 4 * width, stride=2, norm=norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )


def _conv_norm(
    inputs: int, outputs: int, *, kernel_size: int, stride: int, norm: Norm
) -> nn.Sequential:
    conv = nn.Conv2d(
        inputs, outputs, kernel_size, stride=stride, padding=kernel_size // 2, bias=False
    )
    return nn.Sequential(conv, make_norm(outputs, norm=norm, affine=True))


def plain_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return two 3x3 convolutions with pooling and two dense layers, as in FedAvg's experiments.

    McMahan et al. (2017), section 3, with 3x3 instead of 5x5 kernels and 16 and 32 channels.
    """
    channels, height, width = _image_shape("plain_cnn", input_shape)

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        pool = nn.MaxPool2d(2, ceil_mode=True)
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), pool]

    features = 32 * math.ceil(height / 4) * math.ceil(width / 4)
    head = [nn.Flatten(), nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, num_classes)]
    return nn.Sequential(*block(channels, 16), *block(16, 32), *head)


def linear(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def private_cnn(
    input_shape: tuple[int, ...], num_classes: int, *, activation: type[nn.Module]
) -> nn.Module:
    """Return the CNN of Papernot et al. (2021), arXiv 2007.14191, of which CNN-Tanh is one.

    The baseline of DPNAS' Table 1, with other activations of its Table 4 and Figure 5(c): the
    smaller network for grey images (.03 M parameters at 28x28), the larger one for others (.55 M at
    32x32), whose pools are max-pools here; the paper's differ from table to table.

    Raises:
        ConfigError: Images are smaller than 14 pixels (grey) or 8 pixels (others).
    """
    channels, height, width = _image_shape("cnn", input_shape)
    least = 14 if channels == 1 else 8
    if min(height, width) < least:
        raise ConfigError(
            f"the cnn_* networks need images of at least {least}x{least} pixels with {channels} "
            f"channels, got {height}x{width}: choose plain_cnn or linear."
        )
    if channels > 1:
        return _large_private_cnn(input_shape, num_classes, activation)
    sides = [((side // 2 - 1) // 2 - 1) - 1 for side in (height, width)]
    first = nn.Conv2d(channels, 16, 8, stride=2, padding=3)
    layers = [first, activation(), nn.MaxPool2d(2, 1)]
    layers += [nn.Conv2d(16, 32, 4, stride=2), activation(), nn.MaxPool2d(2, 1)]
    layers += [nn.Flatten(), nn.Linear(32 * math.prod(sides), 32), activation()]
    return nn.Sequential(*layers, nn.Linear(32, num_classes))


def _large_private_cnn(
    input_shape: tuple[int, ...], num_classes: int, activation: type[nn.Module]
) -> nn.Module:
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for outputs in (32, 64, 128):
        for inputs in (channels, outputs):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), activation()]
        layers.append(nn.MaxPool2d(2))
        channels = outputs
    features = channels * (height // 8) * (width // 8)
    head = (nn.Flatten(), nn.Linear(features, 128), activation(), nn.Linear(128, num_classes))
    return nn.Sequential(*layers, *head)


def _image_shape(name: str, input_shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(input_shape) != 3:
        raise ConfigError(
            f"algorithm.network={name} needs images of shape (channels, height, width), but the "
            f"data set's examples have the shape {input_shape}: choose linear."
        )
    channels, height, width = input_shape
    return channels, height, width


CNN_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "tanh": nn.Tanh,
    "hardtanh": nn.Hardtanh,
    "leaky_relu": nn.LeakyReLU,
}
FIXED_NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "efficientnet_b0": partial(torchvision_network, name="efficientnet_b0"),
    "mobilenet_v2": partial(torchvision_network, name="mobilenet_v2"),
    "plain_cnn": plain_cnn,
    "linear": linear,
    **{
        name: partial(resnet8, width=width)
        for name, width in zip(RESNETS, RESNET8_WIDTHS, strict=True)
    },
    **{f"cnn_{name}": partial(private_cnn, activation=a) for name, a in CNN_ACTIVATIONS.items()},
}
