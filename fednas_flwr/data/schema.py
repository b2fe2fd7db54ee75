"""Schema of raw records, and how they become inputs of networks: kept with every model.

:class:`Column` is one column of a table, :class:`Inputs` all that a model needs to know of its raw
inputs; both are JSON in an exported model. :func:`normalised` is the one place where numbers are
standardised, in training as in prediction.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
from torch import Tensor

from fednas_flwr.settings.data_settings import ANY_FORM, TableForm
from fednas_flwr.settings.parser import Checked, OneOf, parse

NUMBER, DATE, CATEGORY = "number", "date", "category"
KINDS = (NUMBER, DATE, CATEGORY)


@dataclass(frozen=True)
class Column(Checked):
    """A column of a table.

    A missing number or date counts as the mean. A category that is missing or unknown belongs to
    none of the ``categories``: all its features are 0.

    Attributes:
        name: As in the table's header.
        kind: ``number``; ``date``, in days since 1970; or ``category``.
        categories: Of a category the values, one feature each.
        indicator: True if a further feature, 0 or 1, says that a number or date is missing.
    """

    name: str
    kind: Annotated[str, OneOf(KINDS)] = NUMBER
    categories: tuple[str, ...] = ()
    indicator: bool = False


def feature_names(schema: Iterable[Column]) -> tuple[str, ...]:
    """Return the features' names: numbers and dates, then indicators, then categories."""
    schema = list(schema)
    return (
        *(column.name for column in schema if column.kind != CATEGORY),
        *(f"{column.name} is missing" for column in schema if column.indicator),
        *(f"{column.name}={value}" for column in schema for value in column.categories),
    )


@dataclass(frozen=True)
class Inputs(Checked):
    """Raw inputs of a model, their normalisation, and the meaning of its outputs.

    Attributes:
        shape: Of one raw record: ``(C, H, W)`` or ``(F,)``.
        schema: The columns of a table; empty for images.
        mean: Per channel of images scaled to 0..1, or per feature of a table.
        std: As ``mean``; all above 0.
        class_names: One name per output.
        label: Name of a table's label column; empty if it has none, or one per label.
        multi_label: True if a record can have several labels: outputs are probabilities of each.
        label_separator: Of the labels in the label column, see
            :func:`~fednas_flwr.data.records.label_sets`.
        form: How a table's cells are written: what was set, and what training found.
        intensity: Intensities of 16-bit images that become 0 and 255; empty is 0 to 65535.
        scattering: Scales and angles of the transform that makes the network's features of images;
            empty where it takes the images.
    """

    shape: tuple[int, ...]
    schema: tuple[Column, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    label: str = ""
    multi_label: bool = False
    label_separator: str = ""
    form: TableForm = ANY_FORM
    intensity: tuple[float, ...] = ()
    scattering: tuple[int, ...] = ()

    @property
    def is_table(self) -> bool:
        """True if records are rows of a table."""
        return len(self.shape) == 1

    def to_json(self) -> str:
        """Text for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Inputs:
        """Return the inputs that a model's metadata says.

        Raises:
            ConfigError: The text says none.
        """
        inputs: Inputs = parse(Inputs, json.loads(text), key="inputs", defaults=True)
        return inputs


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the CPU on a device; if that is a GPU, nothing waits for it."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def normalised(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return raw records as networks take them, float32, on their device.

    Args:
        x: uint8 ``[B, C, H, W]`` from 0 to 255; float32 ``[B, C, H, W]`` from 0 to 1; or float32
            ``[B, F]`` rows of a table, NaN where missing, which becomes 0, the mean.
        mean: Per channel of images scaled to 0..1, or per feature of a table; a single 0, with a
            std of 1, for features that are as networks take them.
        std: As ``mean``, above 0.
    """
    if x.dim() == 4 and x.is_floating_point() and (mean, std) == ((0.0,), (1.0,)):
        return x
    if x.dim() == 4:
        scale = moved(torch.tensor([1 / (255 * s) for s in std]), x.device)
        shift = moved(torch.tensor([m / s for m, s in zip(mean, std, strict=True)]), x.device)
        pixels = x * 255 if x.is_floating_point() else x.float()
        return pixels.mul_(scale[:, None, None]).sub_(shift[:, None, None])
    standard = (x - moved(torch.tensor(mean), x.device)) / moved(torch.tensor(std), x.device)
    return standard.nan_to_num(nan=0.0)
