"""Public features of images: a fixed transform in front of all networks, and a part of the model.

They are made once per image and cached. Scattering (``data.scattering``) learns nothing; a backbone
is a network that was trained on public images. Each image is transformed by itself, because in a
batch rounding would depend on its position. So no bit of its features depends on another record,
and they cost no privacy.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

import torch
from rich.console import Console
from rich.progress import track

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.memory import check_fits
from fednas_flwr.base.pretrained import Frozen, load_frozen
from fednas_flwr.data.records import Records
from fednas_flwr.data.scattering import Scattering
from fednas_flwr.settings import Dataset, expanded
from fednas_flwr.settings import data_settings as ds

BACKBONE, SCATTERING = KINDS = ("backbone", "scattering")
MIRRORED, MAP = "mirrored", "map"
Description = tuple[str, ...]  # kind and sizes of a transform; for a backbone also its hash


def transform_of(dataset: Dataset) -> Description:
    """Return the description of the transform of images; empty if networks take the records.

    It is ``("scattering", scales, angles)`` or ``("backbone", name, image size, hash)``. Before the
    hash comes ``"mirrored"`` with ``dataset.flip``, by which mirror images mean the same, and
    ``"map"`` if features have positions.

    Raises:
        ConfigError: The backbone's weights cannot be read.
    """
    settings = dataset.transform
    if isinstance(settings, ds.Scattering):
        return SCATTERING, str(settings.scales), str(settings.angles)
    if settings is None:
        return ()
    is_mirrored = isinstance(dataset, ds.Images) and dataset.flip
    backbone = load_backbone(settings, is_mirrored=is_mirrored)
    more = compress((MIRRORED, MAP), (is_mirrored, backbone.is_map))
    return BACKBONE, settings.name, str(backbone.image_size), *more, backbone.digest


def kept_as(described: Description) -> torch.dtype:
    """Return the dtype in which features are stored; maps take half the memory."""
    return torch.float16 if MAP in described[3:] else torch.float32


def make_transform(
    described: Description, shape: Sequence[int], settings: ds.Transform | None = None
) -> Scattering | Frozen | None:
    """Return a described transform for images of a shape; None for an empty description.

    Args:
        described: From :func:`transform_of`.
        shape: ``(C, H, W)`` of an image.
        settings: Settings of the transform, with a backbone's weights; None loads no weights.

    Raises:
        ConfigError: The records are no images, or too small.
    """
    if not described:
        return None
    kind, *sizes = described
    if kind == SCATTERING:
        return Scattering(shape, scales=int(sizes[0]), angles=int(sizes[1]))
    if len(shape) != 3:
        raise ConfigError(
            f"dataset.backbone={sizes[0]} needs images, but the records have the shape "
            f"{tuple(shape)}: set dataset.backbone=null."
        )
    is_mirrored = MIRRORED in sizes[2:]
    if isinstance(settings, ds.Backbone):
        return load_backbone(settings, is_mirrored=is_mirrored)
    return Frozen(sizes[0], int(sizes[1]), is_mirrored=is_mirrored, is_map=MAP in sizes[2:])


def load_backbone(settings: ds.Backbone, *, is_mirrored: bool = False) -> Frozen:
    """Return the frozen network with its weights, which are read once per process.

    Raises:
        ConfigError: The weights cannot be read, or are not those of that network.
    """
    path = settings.weights and expanded("dataset.backbone.weights", settings.weights)
    of_images = {"is_mirrored": is_mirrored, "is_map": settings.output == MAP}
    return load_frozen(settings.name, settings.image_size, path or None, **of_images)


@torch.no_grad()
def transformed(
    records: Records, transform: Scattering | Frozen, dtype: torch.dtype = torch.float32
) -> Records:
    """Return the records with features of ``dtype`` in place of uint8 images.

    A note has their size and the time that they took.

    Raises:
        ConfigError: Features don't fit in memory.
    """
    shape, number = transform.output_shape, len(records)
    kind = BACKBONE if isinstance(transform, Frozen) else SCATTERING
    smaller = "lower dataset.scattering.scales or angles, or " if kind == SCATTERING else ""
    size = number * math.prod(shape) * dtype.itemsize
    check_fits(size, f"dataset.{kind} of {number} images", f"{smaller}set dataset.limit_train")
    started = time.monotonic()
    features, size_mb = torch.empty(number, *shape, dtype=dtype), size / 1e6
    console = Console(stderr=True)
    for row in track(
        range(number),
        description=f"{kind} features of {number} images, {size_mb:.0f} MB",
        console=console,
        disable=not console.is_terminal,
    ):
        features[row] = transform(records.features[row : row + 1].float() / 255)[0]
    took = time.monotonic() - started
    each = f"{1000 * took / max(1, number):.1f} s per 1,000 images"
    note = f"{kind} features: {shape}, {size_mb:.0f} MB, {took:.1f} s, {each}"
    image_shape, notes = tuple(records.features.shape[1:]), (*records.notes, note)
    return replace(records, features=features, image_shape=image_shape, notes=notes)
