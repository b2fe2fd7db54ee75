"""Devices, search spaces and networks, including the given networks, the papers' baselines.

A network is built from its description: JSON values that also travel to clients and into files.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError, check_choice, unknown_choice
from fednas_flwr.base.pretrained import Pretrained
from fednas_flwr.base.randomness import seeded
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.data.readers import site_dataset
from fednas_flwr.data.table_files import SITES_FILE
from fednas_flwr.data.tables import inputs_at
from fednas_flwr.models.prediction import MODEL_FILE, Model, read_metadata, read_model
from fednas_flwr.search.candidate import Pool
from fednas_flwr.settings import CellSpace, Config, GivenNetwork, conf_folder, expanded
from fednas_flwr.settings.data_settings import CSV
from fednas_flwr.settings.names import BATCH, Norm
from fednas_flwr.settings.optimizers import NORMED_NETWORKS, RESNET8_WIDTHS, RESNETS
from fednas_flwr.settings.registry import OWN, TABLES
from fednas_flwr.settings.run_settings import SearchSpaceSettings
from fednas_flwr.spaces import space_entry
from fednas_flwr.spaces.genotype import Genotype, from_json, load_genotype, to_json
from fednas_flwr.spaces.operations import conv_norm, every_second, make_norm, tried, zeroed
from fednas_flwr.spaces.space import SearchSpace, Supernet

FINE_TUNED = "fine_tuned"  # name of a network that starts from public weights
KEPT_MODELS = "state", "models"  # of the folder of ``provision``, where a site keeps models
POOL = "pool"  # name of the network that holds several derived ones
Description = Mapping[str, Any]  # all that a network is built from, JSON values only


def make_device(name: str) -> torch.device:
    """Return the device; ``auto`` is CUDA if there is a GPU.

    Afterwards cuDNN computes float32 as float32, not as TF32, with deterministic kernels.

    Raises:
        ConfigError: ``cuda`` was requested and there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "runtime.device=cuda, but torch finds no CUDA device; set runtime.device=cpu or auto."
        )
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    return torch.device(name)


def computes_in_bfloat16(device: torch.device) -> bool:
    """Return true if a device has instructions for bfloat16; AVX-512 BF16 or AMX on processors."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def make_space(name: str, **settings: Any) -> SearchSpace:
    """Return a search space.

    Args:
        name: One of ``SEARCH_SPACES``.
        **settings: ``input_shape``, ``num_classes`` and the settings of ``conf/search_space``.
    """
    space = space_entry(name).make(**settings)
    if space.name != name:
        raise ConfigError(
            f"search_space={name} makes a space that is called {space.name}, and its genotypes "
            "would name that one: give its class the name under which it is registered."
        )
    return space


def supernet_space(config: Config, prepared: Prepared) -> SearchSpace:
    """Return the search space at the supernet's size for the prepared data."""
    settings = config.search_space
    shapes = {"input_shape": prepared.input_shape, "num_classes": prepared.num_classes}
    return make_space(settings.name, norm=settings.norm, **supernet_sizes(settings), **shapes)


def seeded_supernet(config: Config, space: SearchSpace) -> Supernet:
    """Return a space's supernet, initialised from the run's seed."""
    with seeded(config.seed, "supernet"):
        return space.supernet()


def seeded_network(config: Config, description: Description) -> nn.Module:
    """Return the network of a description, initialised from the run's seed or a file of weights.

    Raises:
        ConfigError: The file cannot be read, or is not of that network.
    """
    with seeded(config.seed, "network"):
        network = make_network(description)
    if isinstance(network, FineTuned):
        weights: str = config.algorithm.weights  # type: ignore[attr-defined]
        network.load_weights(expanded("algorithm.weights", weights))
    return network


def given_genotype(config: Config) -> Genotype | None:
    """Return the genotype to retrain, from a file or by its name in conf/; None without one.

    Raises:
        ConfigError: There is no such file or name, or the file holds no genotype.
    """
    if config.genotype is None:
        return None
    shipped = {path.stem: path for path in (conf_folder() / "genotypes").glob("*.json")}
    path = shipped.get(config.genotype, expanded("genotype", config.genotype))
    if not path.suffix and not path.exists():
        raise unknown_choice("genotype", config.genotype, sorted(shipped))
    return load_genotype(path)


def describe_network(
    config: Config, prepared: Prepared, genotype: Genotype | None
) -> dict[str, Any]:
    """Return the description of the network to retrain, for :func:`make_network`.

    Args:
        config: Settings with the sizes of retraining, or the name of a fixed network.
        prepared: Data with the shape and the number of classes.
        genotype: The derived architecture; None for a fixed network.
    """
    shapes = {"input_shape": list(prepared.input_shape), "num_classes": prepared.num_classes}
    if genotype is None:
        if not isinstance(config.algorithm, GivenNetwork):
            raise ValueError("only fedavg and fedex have a network without a genotype")
        algorithm = config.algorithm
        if algorithm.weights is not None:
            moments = {"mean": list(prepared.mean), "std": list(prepared.std), "norm": BATCH}
            about = {"architecture": algorithm.network, "image_size": algorithm.image_size}
            return {"name": FINE_TUNED, **about, **shapes, **moments}
        check_choice("algorithm.network", algorithm.network, FIXED_NETWORKS)
        norm = {"norm": config.retrain.norm} if algorithm.has_norm else {}
        return {"name": algorithm.network, **shapes, **norm}
    sizes, retrain = _retrain_sizes(config, genotype), config.retrain
    auxiliary = retrain.auxiliary_weight > 0
    return describe_derived(genotype, shapes, sizes=sizes, norm=retrain.norm, auxiliary=auxiliary)


def _retrain_sizes(config: Config, genotype: Genotype) -> dict[str, Any]:
    """Return the sizes of the derived network: those in ``retrain``, or a space's own."""
    space, retrain = config.search_space, config.retrain
    sizes = {"channels": retrain.channels, "num_cells": retrain.num_cells}
    keeps_size = space_entry(genotype.space).settings is not CellSpace
    if any((value is None) != keeps_size for value in sizes.values()):
        remedy = "its networks have the supernet's size; set both to null."
        raise ConfigError(
            f"retrain.channels={retrain.channels} with retrain.num_cells={retrain.num_cells} and a "
            f"genotype of {genotype.space}: {remedy if keeps_size else 'set both to numbers.'}"
        )
    if not keeps_size:
        added = {"own_ops": space.own_ops} if space.own_ops else {}
        return {**sizes, "skip": space.skip, **added}
    if space.name != genotype.space:
        raise ConfigError(
            f"the genotype is of {genotype.space}, but search_space={space.name}, which does not "
            f"give its network's size: set search_space={genotype.space}."
        )
    return supernet_sizes(space)


def supernet_sizes(space: SearchSpaceSettings) -> dict[str, Any]:
    """Return the settings of a space, besides the norm, that belong into descriptions."""
    sizes = {key: getattr(space, key) for key in space_entry(space.name).sizes}
    return sizes if space.own_ops else {k: v for k, v in sizes.items() if k != "own_ops"}


def describe_derived(
    genotype: Genotype,
    shapes: Mapping[str, Any],
    *,
    sizes: Mapping[str, Any],
    norm: str,
    auxiliary: bool,
) -> dict[str, Any]:
    """Return the description of a genotype's network, for :func:`make_network`."""
    network = {"name": "derived", "genotype": json.loads(to_json(genotype)), **shapes, **sizes}
    return network | {"norm": norm, "auxiliary": auxiliary}


def candidate_settings(config: Config, prepared: Prepared) -> dict[str, Any]:
    """Return arguments of :func:`describe_derived` for a candidate of the search, at its size."""
    return {
        "shapes": {"input_shape": list(prepared.input_shape), "num_classes": prepared.num_classes},
        "sizes": supernet_sizes(config.search_space),
        "norm": config.search_space.norm,
        "auxiliary": False,
    }


def describe_pool(genotypes: Sequence[Genotype], **settings: Any) -> dict[str, Any]:
    """Return the description of a pool, networks side by side, for :func:`make_network`.

    Args:
        genotypes: Genotypes of one space, at least one.
        **settings: See :func:`describe_derived`.
    """
    described = [describe_derived(genotype, **settings) for genotype in genotypes]
    alone = {key: value for key, value in described[0].items() if key != "genotype"}
    return {**alone, "name": POOL, "genotypes": [one["genotype"] for one in described]}


def make_network(description: Description) -> nn.Module:
    """Return a newly initialised network; draws from torch's global generator.

    Raises:
        ConfigError: No network can be built with the description's name, genotype or sizes.
    """
    input_shape, name = tuple(description["input_shape"]), description["name"]
    if name in OWN["network"]:
        return _own_network(name, input_shape, description["num_classes"])
    if name in FIXED_NETWORKS:
        norm = {"norm": description.get("norm")} if name in NORMED_NETWORKS else {}
        return FIXED_NETWORKS[name](input_shape, description["num_classes"], **norm)
    if name == POOL:
        alone = {key: value for key, value in description.items() if key != "genotypes"}
        return Pool(
            make_network({**alone, "name": "derived", "genotype": genotype})
            for genotype in description["genotypes"]
        )
    if name == FINE_TUNED:
        return FineTuned(description)
    if name != "derived":
        raise unknown_choice("network", name, ["derived", POOL, FINE_TUNED, *FIXED_NETWORKS])
    space, genotype = described_space(description)
    return space.network(genotype, auxiliary=description["auxiliary"])


def _own_network(name: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Return a network from outside the package, after a try on two records, and on one alone."""
    x = torch.linspace(-1, 1, 2 * math.prod(shape)).view(2, *shape)
    make = TABLES["network"][name]
    network, out, alone = tried(f"network {name}", make, (shape, num_classes), x)
    wrong, known = "", not out.is_meta
    if out.shape != (2, num_classes) or (
        known and not torch.allclose(out[:1], alone, rtol=1e-3, atol=1e-4)
    ):
        wrong = (
            f"turns {[2, *shape]} into {list(out.shape)}: expected {[2, num_classes]}, a finite "
            "score per class, which depends on no other record and is the same each time"
        )
    elif known and num_classes > 1 and out.min() >= 0 and (out.sum(1) - 1).abs().max() < 1e-3:
        wrong = "returns probabilities: leave out its softmax, which training and export add"
    if wrong:
        raise ConfigError(f"the network {name} of your own {wrong}.")
    return network.train()


def described_space(description: Description) -> tuple[SearchSpace, Genotype]:
    """Return the space and the genotype in a description of a derived network."""
    genotype = from_json(json.dumps(description["genotype"]))
    sizes = space_entry(genotype.space).sizes
    space = make_space(
        genotype.space,
        input_shape=tuple(description["input_shape"]),
        num_classes=description["num_classes"],
        norm=description["norm"],
        **{size: description[size] for size in sizes if size in description},  # no skip in some
    )
    return space, genotype


def load(run_folder: str | Path) -> Model:
    """Return the trained model of a run, on the CPU; it takes raw data.

    A model that a site keeps, in ``state/models`` of the folder that ``fednas provision`` wrote,
    reads tables as the site's ``dataset.yaml`` says.

    Args:
        run_folder: A run's folder, a folder made from it by ``fednas export``, or a model file.

    Raises:
        ConfigError: The folder holds no exported model.

    Example:
        ``load("runs/<run folder>").predict("patients.csv").labels``
    """
    path = Path(run_folder)
    path = path if path.name == MODEL_FILE else path / MODEL_FILE
    model, folder = read_model(path, make_network), path.absolute().parent
    if folder.parts[-3:-1] == KEPT_MODELS and model.inputs.is_table:
        file = folder.parents[2] / SITES_FILE
        settings = site_dataset(file, cache=str(folder)) if file.is_file() else None
        if isinstance(settings, CSV):
            model.inputs = inputs_at(settings, model.inputs)
    return model


def load_description(run_folder: Path) -> Description:
    """Return the description of the exported network of a run.

    Raises:
        ConfigError: The folder holds no exported model.
    """
    return read_metadata(run_folder / MODEL_FILE)[0]


class FineTuned(Pretrained):
    """A network of timm or torchvision that takes images normalised by the data set."""

    def __init__(self, description: Description) -> None:
        """Build the newly initialised network; raises the errors of :class:`Pretrained`."""
        sizes = {"image_size": description["image_size"], "num_classes": description["num_classes"]}
        _image_shape(description["architecture"], tuple(description["input_shape"]))
        super().__init__(description["architecture"], **sizes)
        self.shift, self.scale = description["mean"], description["std"]

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of normalised images ``[B, C, H, W]``."""
        scale, shift = (x.new_tensor(of)[:, None, None] for of in (self.scale, self.shift))
        return super().forward(x * scale + shift)


# The baselines in the papers' tables: given networks, without a search.


def torchvision_network(
    input_shape: tuple[int, ...], num_classes: int, *, name: str, norm: Norm
) -> nn.Module:
    """Return a newly initialised network of torchvision, for images of any channel count.

    Below 64 pixels the first convolution has stride 1 instead of 2, as usual for 32x32 images.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: Number of classes.
        name: ``mobilenet_v2`` or ``efficientnet_b0``, whose first convolutions have 32 filters.
        norm: ``batch``, or ``group``, which private training needs.

    Raises:
        ConfigError: The examples are no images, or there is no such norm.
    """
    from torchvision import models

    channels, height, _ = _image_shape(name, input_shape)
    network: nn.Module = models.get_model(
        name, num_classes=num_classes, norm_layer=partial(make_norm, norm=norm, affine=True)
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
        inputs: Number of input channels.
        outputs: Number of output channels.
        stride: 1 or 2.
        norm: ``batch`` or ``group``.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int, norm: Norm) -> None:
        """Build the block; a shortcut of another shape is a 1x1 convolution with a norm."""
        super().__init__()
        self.relu = nn.ReLU()
        make = partial(conv_norm, norm=norm, affine=True)
        self.first = make(inputs, outputs, size=3, stride=stride)
        self.second = make(outputs, outputs, size=3)
        self.halves = stride == 2
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.shortcut = make(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, outputs, H / stride, W / stride]``, sides rounded up."""
        residual = self.second(self.relu(self.first(x)))
        return self.relu(residual + self.shortcut(every_second(x) if self.halves else x))


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
        conv_norm(channels, width, size=3, norm=norm, affine=True),
        nn.ReLU(),
        ResidualBlock(width, width, stride=1, norm=norm),
        ResidualBlock(width, 2 * width, stride=2, norm=norm),
        ResidualBlock(2 * width, 4 * width, stride=2, norm=norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )


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
    """Return a linear layer on the flattened input, initialised with zeros.

    Random initial weights would remain where few records have an influence.
    """
    return nn.Sequential(nn.Flatten(), zeroed(nn.Linear(math.prod(input_shape), num_classes)))


class OneLayer(nn.Module):
    """A layer of ReLU units beside a linear model, both on the flattened input.

    For tables with privacy, where it learns more from few records than deeper networks
    (scripts/results/README.md, "Tables with privacy").
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, width: int) -> None:
        """Build both; ``width`` is the number of units."""
        super().__init__()
        dense = (nn.Linear(math.prod(input_shape), width), nn.ReLU(), nn.Linear(width, num_classes))
        self.layer = nn.Sequential(nn.Flatten(), *dense)
        self.beside = linear(input_shape, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits [B, classes]."""
        return self.layer(x) + self.beside(x)


def private_cnn(
    input_shape: tuple[int, ...], num_classes: int, *, activation: type[nn.Module]
) -> nn.Module:
    """Return the CNN of Papernot et al. (2021), arXiv 2007.14191; one of its forms is CNN-Tanh.

    It is the baseline of DPNAS' Table 1 and, with other activations, of its Table 4 and Figure
    5(c): the smaller network for grey images (.03 M parameters at 28x28), the larger one for others
    (.55 M at 32x32). Its pools are max-pools here; the paper's differ from table to table.

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
    layers = [nn.Conv2d(channels, 16, 8, stride=2, padding=3), activation(), nn.MaxPool2d(2, 1)]
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
    kind.__name__.lower(): kind
    for kind in (nn.ReLU, nn.ReLU6, nn.ELU, nn.SELU, nn.Tanh, nn.Hardtanh)
} | {"leaky_relu": nn.LeakyReLU}
FIXED_NETWORKS: dict[str, Callable[..., nn.Module]] = TABLES["network"]
FIXED_NETWORKS |= {
    "efficientnet_b0": partial(torchvision_network, name="efficientnet_b0"),
    "mobilenet_v2": partial(torchvision_network, name="mobilenet_v2"),
    "plain_cnn": plain_cnn,
    "linear": linear,
    "mlp_64": partial(OneLayer, width=64),
    **{
        name: partial(resnet8, width=width)
        for name, width in zip(RESNETS, RESNET8_WIDTHS, strict=True)
    },
    **{f"cnn_{name}": partial(private_cnn, activation=a) for name, a in CNN_ACTIVATIONS.items()},
}
