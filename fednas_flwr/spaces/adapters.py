"""The search space of adapters: which stages of a frozen network get one, and of which kind.

A network that was trained on public images is not changed. After each of its stages there is
nothing, a low-rank map (Hu et al. 2022, arXiv 2106.09685) or a bottleneck with a ReLU (Houlsby et
al. 2019, arXiv 1902.00751) of 4 or 16 channels, added to the stage's output; a linear classifier
reads the pooled features. Adapters and classifier begin with zeros, so that the initial network is
the frozen one. Only they are trained, sent and saved in checkpoints; the exported model holds the
frozen tensors, too. :class:`AdapterSpace` gives the supernet and the derived network.

Tensor suffixes: B batch, E stages, O ops, C channels.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fednas_flwr.base.layers import hooked
from fednas_flwr.base.pretrained import Frozen, has_channels_last, load_frozen
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.operations import Choice, OpWeights, SkipNetwork, drop_path, zeroed
from fednas_flwr.spaces.space import CELL, SearchSpace

OPS = ("none", "low_rank_4", "low_rank_16", "bottleneck_4", "bottleneck_16")


@dataclass(frozen=True, kw_only=True)
class AdapterSpace(SearchSpace):
    """Adapters in one frozen network, for images of one shape.

    Attributes:
        input_shape: (channels, height, width) of an image.
        num_classes: Number of classes.
        backbone: Name of the frozen network in timm or torchvision.
        weights: File of its weights; None leaves the frozen tensors to ``load_state_dict``.
        image_size: Side in pixels of its inputs; None for that of its training.
        mean: Mean, per channel, of the images' normalisation, which is undone; if empty, .5.
        std: Deviation of the same, like ``mean``.
        norm: Without effect: adapters have no norm, and the frozen network keeps its own.
    """

    name = "adapters"
    ops = OPS

    backbone: str
    weights: str | None
    image_size: int | None
    mean: Sequence[float]
    std: Sequence[float]

    def frozen(self) -> Frozen:
        """Return the frozen network, the same object at each call."""
        if self.weights is None:
            return Frozen(self.backbone, self.image_size)
        return load_frozen(self.backbone, self.image_size, Path(self.weights).expanduser())

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:  # type: ignore[override]
        """The stages, a chain."""
        return tuple((stage, stage + 1) for stage in range(len(self.frozen().stages())))

    def body(self) -> "AdaptedNetwork":
        """Build the body of a supernet."""
        return AdaptedNetwork(self, [self.ops] * len(self.edges))

    def discrete(self, genotype: Genotype, *, auxiliary: bool) -> "AdaptedNetwork":
        """Build the derived network."""
        return AdaptedNetwork(self, [(edge.op,) for edge in genotype.cells[CELL]])


class AdaptedNetwork(SkipNetwork):
    """A frozen network with adapters after its stages, and its own classifier."""

    def __init__(self, space: AdapterSpace, rows: Sequence[Sequence[str]]) -> None:
        """Build the adapters of each stage by their ops."""
        super().__init__()
        frozen = space.frozen()
        self._frozen = (frozen,)  # in a tuple: none of this network's parameters or buffers
        self._moments = [[*values] or [0.5] for values in (space.mean, space.std)]
        widths = frozen.stage_widths
        self.adapters = nn.ModuleList(
            Choice(row, partial(Adapter, width)) for row, width in zip(rows, widths, strict=True)
        )
        self.classifier = zeroed(nn.Linear(frozen.output_shape[0], space.num_classes))

    def forward(self, x: Tensor, op_weights: OpWeights = None) -> Tensor:
        """Return logits [B, classes] of normalised images [B, C, H, W].

        Args:
            x: The images.
            op_weights: Weight of every op after every stage, ``{"cell": [E, O] or [B, E, O]}``;
                None computes the first op of each.
        """
        mean, std = (x.new_tensor(values)[:, None, None] for values in self._moments)
        weights_EO = None if op_weights is None else op_weights[CELL]
        with ExitStack() as stack:
            for index, stage in enumerate(self._frozen[0].stages()):
                stack.enter_context(hooked([stage], partial(self._adapted, weights_EO, index)))
            features = self._frozen[0](x * std + mean)
        return self.joined(self.classifier(features), x)

    def _adapted(
        self, weights_EO: Tensor | None, index: int, stage: nn.Module, _: Any, out: Tensor
    ) -> Tensor:
        """Return the output of a stage plus the outputs of its adapters."""
        choice: Any = self.adapters[index]
        total = out
        for column in range(len(choice.names)):
            if (op := choice.op(column)) is not None:
                added = drop_path(op(out), self.dropped)
                if weights_EO is not None:
                    weight = weights_EO[..., index, column]
                    added = weight.reshape(-1, *[1] * (out.dim() - 1)) * added
                total = total + added
        return total

    def chain(self) -> list[nn.Module]:
        """Return the stages of the frozen network."""
        return self._frozen[0].stages()

    def _apply(self, fn: Any, recurse: bool = True) -> "AdaptedNetwork":
        """Move the frozen tensors along with the network's own."""
        self._frozen[0]._apply(fn)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Put the frozen tensors into the state dict, from which the exported model is made."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        self._frozen[0].state_dict(destination=destination, prefix=f"{prefix}frozen.")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        """Take the frozen tensors from a state dict."""
        start = f"{prefix}frozen."
        named = {key: tensor for key, tensor in state_dict.items() if key.startswith(start)}
        self._frozen[0].load_state_dict({key[len(start) :]: t for key, t in named.items()})
        super()._load_from_state_dict(
            {key: t for key, t in state_dict.items() if key not in named}, prefix, *rest
        )


class Adapter(nn.Sequential):
    """A map down to a few channels and back, from [B, C, H, W], [B, H, W, C] or [B, T, C]."""

    def __init__(self, width: int, op: str) -> None:
        """Build an op of ``OPS`` except ``none``; the map back begins with zeros."""
        kind, _, rank = op.rpartition("_")
        down, up = nn.Linear(width, int(rank), bias=False), nn.Linear(int(rank), width, bias=False)
        nn.init.zeros_(up.weight)
        super().__init__(down, nn.ReLU() if kind == "bottleneck" else nn.Identity(), up)

    def forward(self, x: Tensor) -> Tensor:
        """Return the tensor to add."""
        down, between, up = self
        is_last = has_channels_last(x)
        added: Tensor = up(between(down(x if is_last else x.permute(0, 2, 3, 1))))
        return added if is_last else added.permute(0, 3, 1, 2)
