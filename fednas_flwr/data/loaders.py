"""Normalised batches of a client's records, and augmentation of such batches.

Records stay where they are, in memory-mapped tensors shared by all clients; a split is a list of
rows in them. Random numbers come from the generators and seeds of the caller.
Shapes: B batch, C channels, H height, W width, F features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.data.records import LIMIT, Records, assign_splits, count_labels, moved, normalised
from fednas_flwr.data.statistics import Statistics, column_moments, pooled
from fednas_flwr.settings.names import SPLITS

_SCANNED = 65536  # records that are scanned together


@dataclass(frozen=True)
class Split:
    """Some rows of prepared records, and how to normalise them.

    Attributes:
        features: uint8 ``[N, C, H, W]`` or float32 ``[N, F]``, of all clients, on the CPU.
        labels: int64 ``[N]`` or ``[N, L]``, see :class:`~fednas_flwr.data.records.Records`.
        rows: int64 ``[n]``, the rows of this split.
        mean: Means per channel of images scaled to 0..1, or per feature of a table.
        std: Standard deviations like ``mean``, above 0.
        persons: int64 ``[n]``, the person of each row: ``0 .. num_units - 1``, each at least once.
            None if every record is a unit of its own.
    """

    features: Tensor
    labels: Tensor
    rows: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]
    persons: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.rows)

    @property
    def num_units(self) -> int:
        """Number of units of privacy: of persons if they are known, else of records."""
        if self.persons is None:
            return len(self)
        return int(self.persons.max()) + 1 if len(self) else 0

    def records_of(self, units: Tensor) -> list[Tensor]:
        """Return the int64 indices of the records of each unit.

        Args:
            units: int64 ``[U]``, each in ``0 .. num_units - 1``.
        """
        if self.persons is None:
            return list(units[:, None])
        counts = torch.bincount(self.persons, minlength=self.num_units)
        by_person = torch.split(self.persons.argsort(stable=True), counts.tolist())
        return [by_person[unit] for unit in units.tolist()]

    def batch(
        self, indices: Tensor, device: torch.device | str, limit: float = LIMIT
    ) -> tuple[Tensor, Tensor]:
        """Return normalised records and labels on the device.

        Args:
            indices: int64 ``[B]`` on the CPU, each in ``0 .. len(self) - 1``.
            device: Device of the batch; bytes are copied there and then normalised.
            limit: Limit of a table's numbers, see :func:`~fednas_flwr.data.records.normalised`.

        Returns:
            float32 ``[B, C, H, W]`` or ``[B, F]``, where missing numbers of a table are 0, the
            mean; and int64 ``[B]`` or ``[B, L]``.
        """
        rows = self.rows.index_select(0, indices)
        y = moved(self.labels.index_select(0, rows), device)
        x = moved(self.features.index_select(0, rows), device)
        return normalised(x, self.mean, self.std, limit), y


@dataclass(frozen=True)
class ClientData:
    """The disjoint parts of one client's records: weight training, alpha training, test.

    A part may be empty if a client has few records.
    """

    train: Split
    validation: Split
    test: Split

    def counts(self, num_classes: int) -> dict[str, Any]:
        """Return numbers of records by class, ``class_counts``, and by split, ``splits``."""
        splits = {name: getattr(self, name) for name in SPLITS}
        labels = torch.cat([split.labels[split.rows] for split in splits.values()])
        return {
            "class_counts": count_labels(labels, num_classes),
            "splits": {name: len(split) for name, split in splits.items()},
        }

    def standardised(self, statistics: Statistics) -> ClientData:
        """Return the same records, standardised by other statistics.

        Raises:
            ConfigError: The statistics are for another number of features.
        """
        num_features = self.train.features.shape[1]
        if not len(statistics.mean) == len(statistics.std) == num_features:
            raise ConfigError(
                f"refused: statistics of {len(statistics.mean)} features, where this client's "
                f"records have {num_features}."
            )
        parts = (self.train, self.validation, self.test)
        return ClientData(*(replace(of, mean=statistics.mean, std=statistics.std) for of in parts))


def make_client_data(
    prepared: Prepared,
    indices: np.ndarray,
    *,
    key: bytes,
    fractions: Mapping[str, float],
    trains: bool = True,
) -> ClientData:
    """Return the parts of one client's records.

    A table without given statistics is standardised by those of this client's train part, until
    those of all clients are known: :meth:`ClientData.standardised`.

    Args:
        prepared: The data set.
        indices: int64 ``[n]``, the client's records in ``prepared.train``.
        key: The site's split key, see :func:`~fednas_flwr.data.records.assign_splits`.
        fractions: Shares of train, validation and test.
        trains: As in that function; false at a private site, where a record's part must not depend
            on others.
    """
    records = prepared.train
    parts = assign_splits(records.ids[indices], key=key, fractions=fractions, trains=trains)
    rows = [torch.from_numpy(indices[parts == part]) for part in range(len(SPLITS))]
    mean, std = _statistics(records, rows[0], prepared.mean, prepared.std)
    return ClientData(
        *(
            Split(records.features, records.labels, part, mean, std, _persons(records, part))
            for part in rows
        )
    )


def _persons(records: Records, rows: Tensor) -> Tensor | None:
    """Return the persons of some rows, numbered from 0; None if the data names no persons."""
    if not records.by_person:
        return None
    _, persons = np.unique(records.ids[rows.numpy()], return_inverse=True)
    return torch.from_numpy(persons.astype(np.int64))


def server_split(records: Records, mean: tuple[float, ...], std: tuple[float, ...]) -> Split:
    """Return all records as one split; a table without given statistics is standardised by its own.

    Args:
        records: The server's public test records.
        mean: ``Prepared.mean``.
        std: ``Prepared.std``.
    """
    rows = torch.arange(len(records))
    return Split(records.features, records.labels, rows, *_statistics(records, rows, mean, std))


def concat_splits(a: Split, b: Split) -> Split:
    """Join two parts of a client's records, those of ``a`` first."""
    persons = None
    if a.persons is not None and b.persons is not None:  # nobody is in two parts
        persons = torch.cat([a.persons, b.persons + a.num_units])
    return replace(a, rows=torch.cat([a.rows, b.rows]), persons=persons)


def largest_feature(split: Split) -> tuple[int, float]:
    """Return the channel or column of the largest magnitude after normalisation, and the magnitude.

    For images it is that of their whole range 0..255; without records it is 0.
    """
    if split.features.dtype == torch.uint8:
        shape = split.features.shape[1:]
        ends = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, shape[0], 1, 1)
        split = replace(split, features=ends, labels=torch.zeros(2).long(), rows=torch.arange(2))
    largest = torch.zeros(split.features.shape[1])
    for indices in torch.split(torch.arange(len(split)), _SCANNED) if len(split) else ():
        x, _ = split.batch(indices, "cpu", limit=0)
        largest = torch.maximum(largest, x.abs().amax((0, *range(2, x.dim()))))
    column = int(largest.argmax())
    return column, float(largest[column])


def epoch_batches(
    num_examples: int, batch_size: int | None, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield int64 ``[B]`` indices that cover all examples once, shuffled.

    Args:
        num_examples: At least 1.
        batch_size: At least 1; the last batch may be smaller. A single example left over joins the
            batch before, since batch norm has no variance of one example. None gives one batch of
            all examples in their order, and draws nothing.
        generator: A CPU generator.
    """
    starts = _starts(num_examples, batch_size)
    order = torch.arange(num_examples)
    if batch_size is not None:
        order = torch.randperm(num_examples, generator=generator)
    yield from order.tensor_split(starts[1:])


def step_batch(
    num_examples: int,
    *,
    batch_size: int | None,
    step: int,
    seed: int,
    purpose: tuple[int | str, ...],
) -> Tensor:
    """Return batch number ``step``, from 0, of an endless sequence of shuffled epochs.

    It keeps no state: epoch ``e`` is the permutation of ``make_generator(seed, *purpose, e)``. A
    resumed run therefore continues with the batch that an uninterrupted one would take.

    Args:
        num_examples: At least 1.
        batch_size: As in :func:`epoch_batches`; None for all examples in their order.
        step: At least 0.
        seed: The run's seed.
        purpose: Purpose of the batches, e.g. ``("search", client)``.

    Returns:
        int64 ``[B]`` indices.
    """
    starts = _starts(num_examples, batch_size)
    if batch_size is None:
        return torch.arange(num_examples)
    epoch, position = divmod(step, len(starts))
    order = torch.randperm(num_examples, generator=make_generator(seed, *purpose, epoch))
    start, end = [*starts, num_examples][position : position + 2]
    return order[start:end]


def _starts(num_examples: int, batch_size: int | None) -> list[int]:
    """Return the first place of each batch of an epoch; the last has all that is left over."""
    size = num_examples if batch_size is None else batch_size
    if num_examples < 1 or size < 1:
        raise ValueError(f"{num_examples=} and {batch_size=} must be at least 1.")
    return [0, *range(size, num_examples - min(size, 2) + 1, size)]


def augment(
    x: Tensor, *, generator: torch.Generator, crop_padding: int, flip: bool, cutout: int
) -> Tensor:
    """Return the batch, each image cropped at random, flipped with probability 1/2, and cut out.

    As in DARTS (Liu et al. 2019, arXiv 1806.09055, section A), with one deviation: padding is 0
    after normalisation, the mean colour, whereas DARTS pads with black before it.

    Args:
        x: float ``[B, C, H, W]``, normalised; not changed.
        generator: Generator, possibly on another device than ``x``; skipped steps draw nothing.
        crop_padding: Pixels of zeros around an image before one of its size is cropped out; 0 for
            no crop.
        flip: True if images are flipped left and right at random.
        cutout: Side in pixels of a square of zeros, centred anywhere in the image and clipped at
            its border; 0 for none.

    Returns:
        ``[B, C, H, W]`` on the device of ``x``.
    """
    if not (crop_padding or flip or cutout):
        return x
    batch, channels, height, width = x.shape

    def draw(stop: int) -> Tensor:
        drawn = torch.randint(stop, (batch, 1), generator=generator, device=generator.device)
        return drawn.to(x.device)

    # The source of each pixel, so that the images are read and written once.
    margin = max(crop_padding, 1)
    rows_BH = torch.arange(margin, margin + height, device=x.device).expand(batch, -1)
    columns_BW = torch.arange(margin, margin + width, device=x.device).expand(batch, -1)
    if flip:
        columns_BW = torch.where(draw(2).bool(), columns_BW.flip(1), columns_BW)
    if crop_padding:
        rows_BH = rows_BH + (draw(2 * crop_padding + 1) - crop_padding)
        columns_BW = columns_BW + (draw(2 * crop_padding + 1) - crop_padding)
    source_BHW = rows_BH[:, :, None] * (width + 2 * margin) + columns_BW[:, None, :]
    if cutout:
        cut_rows_BH = _covered(draw(height), cutout, height)
        cut_columns_BW = _covered(draw(width), cutout, width)
        # The first pixel of a padded image is padding: 0.
        source_BHW.masked_fill_(cut_rows_BH[:, :, None] & cut_columns_BW[:, None, :], 0)
    padded = functional.pad(x, (margin,) * 4).view(batch, channels, -1)
    return padded.gather(2, source_BHW.view(batch, 1, -1).expand(-1, channels, -1)).view(x.shape)


def _covered(centre_B1: Tensor, side: int, size: int) -> Tensor:
    """Return bool ``[B, size]``: true within a stretch of length ``side`` around each centre."""
    place = torch.arange(size, device=centre_B1.device)
    start_B1 = centre_B1 - side // 2
    return (place >= start_B1) & (place < start_B1 + side)


def _statistics(
    records: Records, rows: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std as given, or those of these rows alone if none are given."""
    if mean:
        return mean, std
    of_rows = pooled([column_moments(records, rows)], records)
    return of_rows.mean, of_rows.std
