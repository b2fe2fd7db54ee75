"""Records, as every reader returns them: operations on them, and their division into splits.

A record's id is stable: it depends on that record alone. The part, train, validation or test, is a
function of that id and the site's key, never of other records, their order or a run's seed: a
record read as training data once is never test data later, and a privacy ledger can add up what was
spent on each part (:func:`assign_splits`).

:class:`Column` is one column of a table, :class:`Inputs` all that a model needs to know of its raw
inputs; both are JSON in an exported model. :func:`normalised` is the one place where numbers are
standardised, in training as in prediction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fednas_flwr.base.errors import ConfigError, listed
from fednas_flwr.data.cells import Cells
from fednas_flwr.data.notation import places_among
from fednas_flwr.settings.data_settings import ANY_FORM, TableForm
from fednas_flwr.settings.names import SPLITS
from fednas_flwr.settings.parser import Checked, OneOf, parse

NUMBER, DATE, CATEGORY = "number", "date", "category"
KINDS = (NUMBER, DATE, CATEGORY)
ID = np.dtype("S32")  # of a record's id
_CHUNK = 65_536  # ids that are objects of Python at a time
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xABC98388FB8FAC03, 1], np.uint64)
LIMIT = 5.0  # deviations from the mean, of numbers of a table


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
        target: Where a number is predicted, its mean and deviation, by which it is standardised,
            and the ends of its range if that is declared; else empty.
        label_separator: Of the labels in the label column, see
            :func:`~fednas_flwr.data.records.label_names`.
        form: How a table's cells are written: what was set, and what training found.
        id_column: Column of a table, or of a labels file, that says whose each record is.
        intensity: Intensities of 16-bit images that become 0 and 255; empty is 0 to 65535.
        transform: Description of what makes the network's features of images (``data.features``);
            empty where it takes the images.
        positive: Number of the positive class; None is the last of two.
        threshold: Probability from which a record is of that class; None takes the most probable.
        limit: Of a table's numbers, see :func:`normalised`; 0 where the model was made without.
    """

    shape: tuple[int, ...]
    schema: tuple[Column, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    class_names: tuple[str, ...]
    label: str = ""
    multi_label: bool = False
    target: tuple[float, ...] = ()
    label_separator: str = ""
    form: TableForm = ANY_FORM
    id_column: str = ""
    intensity: tuple[float, ...] = ()
    transform: tuple[str, ...] = ()
    positive: int | None = None
    threshold: float | None = None
    limit: float = 0.0

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
        return parse(Inputs, json.loads(text), key="inputs", defaults=True)


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the CPU on a device; if that is a GPU, nothing waits for it."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def normalised(
    x: Tensor, mean: tuple[float, ...], std: tuple[float, ...], limit: float = LIMIT
) -> Tensor:
    """Return raw records as networks take them, float32, on their device.

    Args:
        x: uint8 ``[B, C, H, W]`` from 0 to 255; float32 ``[B, C, H, W]`` from 0 to 1; or float32
            ``[B, F]`` rows of a table, NaN where missing, which becomes 0, the mean.
        mean: Per channel of images scaled to 0..1, or per feature of a table; a single 0, with a
            std of 1, for features that are as networks take them.
        std: As ``mean``, above 0.
        limit: Deviations from the mean to which numbers of a table are clipped, lest a network
            extrapolates from the few in a column's long tail; 0 leaves them.
    """
    if x.dim() == 4 and x.is_floating_point() and (mean, std) == ((0.0,), (1.0,)):
        return x.float()
    if x.dim() == 4:
        scale = moved(torch.tensor([1 / (255 * s) for s in std]), x.device)
        shift = moved(torch.tensor([m / s for m, s in zip(mean, std, strict=True)]), x.device)
        pixels = x * 255 if x.is_floating_point() else x.float()
        return pixels.mul_(scale[:, None, None]).sub_(shift[:, None, None])
    standard = (x - moved(torch.tensor(mean), x.device)) / moved(torch.tensor(std), x.device)
    known = standard.nan_to_num(nan=0.0)
    return known.clamp(-limit, limit) if limit else known


@dataclass(frozen=True)
class Records:
    """Labelled records, images or rows of a table.

    Attributes:
        features: uint8 ``[N, C, H, W]`` images, or float32 ``[N, F]`` rows with NaN where missing;
            float32 ``[N, K, h, w]`` where a transform has been at the images, float16 of a
            network's maps.
        labels: int64 ``[N]``, in ``0 .. len(class_names) - 1``; or ``[N, len(class_names)]`` of 0
            and 1, where a record can have several labels; or float32 ``[N]``, the numbers to
            predict.
        ids: S32 ``[N]``, hex of :func:`record_ids`; equal for records that must not be separated.
        class_names: One name per class or label; the target's of numbers to predict.
        columns: ``[N]`` strings per column by which a table or sites can be partitioned.
        schema: Columns of a table, in the order of its features; empty for images.
        label: Name of a table's label column; empty if it has none, or one per label.
        label_separator: Of the labels in that column, see :func:`label_names`; empty where it holds
            a class.
        form: How a table's cells are written, as was set and found.
        id_column: Column that says whose each record is, and gave the ids, which then are the same
            in every export of the data. A person stays in one part and, where clients are drawn,
            with one of them, and is the unit of privacy. Empty where ids were hashed from what the
            records hold.
        image_shape: ``(C, H, W)`` of the images that a transform made features of; else empty.
        notes: Sentences on what the reader has found and done, for people.
    """

    features: Tensor
    labels: Tensor
    ids: np.ndarray
    class_names: tuple[str, ...]
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    schema: tuple[Column, ...] = ()
    label: str = ""
    label_separator: str = ""
    form: TableForm = ANY_FORM
    id_column: str = ""
    image_shape: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that every part has the same number of records."""
        sizes = {"features": len(self.features), "labels": len(self.labels), "ids": len(self.ids)}
        sizes |= {name: len(values) for name, values in self.columns.items()}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"records need one entry of each kind per record, got {sizes}.")

    @property
    def feature_names(self) -> tuple[str, ...]:
        """One name per feature of a table, those to standardise first; empty for images."""
        return feature_names(self.schema)

    @property
    def num_numeric(self) -> int:
        """Number of leading features that are numbers to standardise; the others are 0 or 1."""
        return sum(column.kind != CATEGORY for column in self.schema)

    @property
    def multi_label(self) -> bool:
        """True if a record can have several labels."""
        return self.labels.dim() == 2

    @property
    def is_regression(self) -> bool:
        """True if the labels are numbers to predict."""
        return self.labels.is_floating_point()

    @property
    def by_person(self) -> bool:
        """True if it is known whose each record is."""
        return bool(self.id_column)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.labels)


RecordsPair = tuple[Records, Records | None]  # train part, and the official test part if any
Parts = list[np.ndarray]  # the rows of every client


def record_ids(contents: Iterable[bytes]) -> np.ndarray:
    """Return S32 ``[N]``: the keyless blake2b-128, in hex, of each record's content or given id."""
    return np.frombuffer(_digests(contents, hashlib.blake2b(digest_size=16)).hex().encode(), ID)


def _digests(contents: Iterable[bytes], begun: hashlib.blake2b) -> bytearray:
    """The digests of some contents, one after the other, of a hash that has begun."""
    digests = bytearray()
    for content in contents:
        digest = begun.copy()  # faster than to make each anew
        digest.update(content)
        digests += digest.digest()
    return digests


def chunks(number: int) -> Iterator[slice]:
    """Rows in parts so small that objects of Python for each don't fill the memory."""
    return (slice(first, first + _CHUNK) for first in range(0, number, _CHUNK))


def keys_of(ids: np.ndarray) -> np.ndarray:
    """Keys that are equal where ids are and, but by a chance of N^2 / 2^65, not elsewhere.

    Args:
        ids: S32 ``[N]``.

    Returns:
        uint64 ``[N]``, which numpy sorts far faster.
    """
    return np.ascontiguousarray(ids, ID).view(np.uint64).reshape(-1, 4) @ _FACTORS


def record_id(content: bytes) -> str:
    """Return one of :func:`record_ids`."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def text_id(text: str) -> bytes:
    """Hash an id that is a text, such as a person's name, as :func:`record_ids` does."""
    return record_id(text.encode("utf-8", "surrogatepass")).encode()


def readable(unreadable: Mapping[str, np.ndarray]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return int64 ``[n]``, the records that can be read, and a note on the others, if any.

    Args:
        unreadable: By the reason, which records cannot be read, bool ``[N]``.
    """
    wrong = np.logical_or.reduce(list(unreadable.values()))
    rows = np.flatnonzero(~wrong)
    if len(rows) == len(wrong):
        return rows, ()
    places = {reason: (np.flatnonzero(of) + 1).tolist() for reason, of in unreadable.items()}
    causes = [f"{of} {len(at):,} (records {listed(at)})" for of, at in places.items() if at]
    share = f"{wrong.sum():,} of {len(wrong):,} records left out ({wrong.mean():.1%})"
    return rows, (f"{share}, which cannot be read: {'; '.join(causes)}",)


def canonical(numbers: np.ndarray) -> np.ndarray:
    """Return numbers as float32 whose bytes are equal where they are: one zero and one NaN."""
    numbers = np.asarray(numbers, dtype=np.float32) + np.float32(0)  # -0 + 0 = 0
    numbers[np.isnan(numbers)] = np.nan
    return numbers


def select_records(records: Records, rows: np.ndarray) -> Records:
    """Return a copy of the given rows (int64), in their order."""
    index = torch.from_numpy(np.asarray(rows, dtype=np.int64))
    return replace(
        records,
        features=records.features[index],
        labels=records.labels[index],
        ids=records.ids[rows],
        columns={name: values[rows] for name, values in records.columns.items()},
    )


def join_sites(sites: Mapping[str, Records]) -> Records:
    """Return the records of all sites, in the given order, with a column ``site``.

    Raises:
        ConfigError: Two sites differ in classes, feature columns or the shape of a record.
    """
    first_name, first = next(iter(sites.items()))
    for name, records in sites.items():
        check_alike(f"site {first_name}", first, f"site {name}", records)
    everyone = list(sites.values())
    shared = set.intersection(*(set(records.columns) for records in everyone)) - {"site"}
    columns = {c: np.concatenate([r.columns[c] for r in everyone]) for c in sorted(shared)}
    columns["site"] = np.repeat(np.array(list(sites)), [len(records) for records in everyone])
    return replace(
        first,
        features=torch.cat([records.features for records in everyone]),
        labels=torch.cat([records.labels for records in everyone]),
        ids=np.concatenate([records.ids for records in everyone]),
        columns=columns,
        form=replace(ANY_FORM, **agreed(records.form for records in everyone)),
        notes=tuple(f"{site}: {note}" for site, of in sites.items() for note in of.notes),
    )


def agreed(forms: Iterable[TableForm]) -> dict[str, Any]:
    """What several forms have in common, by name."""
    first, *others = map(vars, forms)
    return {name: value for name, value in first.items() if all(of[name] == value for of in others)}


def check_alike(first: str, records: Records, second: str, others: Records) -> None:
    """Refuse records of two sources that no one network could learn from.

    Raises:
        ConfigError: They differ in classes, labels, feature columns or the form of a record.
    """
    one, other = (f"{of.features.dtype} {tuple(of.features.shape[1:])}" for of in (records, others))
    only = sorted(set(others.feature_names) ^ set(records.feature_names))
    tables = records.schema and others.schema
    forms = {(of.labels.dtype, of.labels.dim()) for of in (records, others)}
    differences = {
        f"classes: {listed(records.class_names)}, and {listed(others.class_names)}; name "
        "alike what is one, or set dataset.class_names to all of them": others.class_names
        != records.class_names,
        "form of labels: one has a class per record, the other several labels or a number; write "
        "them in one form": len(forms) > 1,
        f"feature columns (they differ in {listed(only) or 'order'}): set dataset.numeric, "
        "dataset.categorical and dataset.categories to those of all": others.schema
        != records.schema
        and (tables or one == other),
        f"form of records, {one} and {other}: bring them to one form (images: dataset.image_size "
        "and dataset.channels)": one != other,
    }
    for difference in [text for text, is_so in differences.items() if is_so]:
        raise ConfigError(f"{first} and {second} do not have the same {difference}.")


def encode_labels(
    cells: Cells, class_names: Sequence[str], separator: str | None = None, *, where: str
) -> Tensor:
    """Return the labels of cells.

    Args:
        cells: A class each; with a separator, see :func:`label_names`, any number of labels.
        class_names: All that there are.
        separator: Between the labels in a cell.
        where: Where the cells come from, for messages.

    Returns:
        int64 ``[N]``, the position of each name among the class names; or ``[N, L]``, 1 where a
        record has a label.

    Raises:
        ConfigError: A name is not among them.
    """
    found = {name for text in cells.different for name in label_names(text, separator)}
    names = cells if separator is None else Cells(sorted(found))
    places = places_among(names, class_names)
    setting = f"dataset.class_names={listed(class_names)}"
    check_known(names[places < 0].tolist(), class_names, f"{where} has the label", setting)
    if separator is None:
        return torch.from_numpy(places)
    place_of = dict(zip(names.tolist(), places.tolist(), strict=True))

    def marks(text: str) -> list[bool]:
        chosen = {place_of[name] for name in label_names(text, separator)}
        return [place in chosen for place in range(len(class_names))]

    return torch.from_numpy(cells.each(marks, np.int64))


def check_known(names: Iterable[str], known: Iterable[str], says: str, setting: str) -> None:
    """Raise ConfigError for a name in some records, as a sentence says, that a setting lacks."""
    for name in sorted(set(names) - set(known)):
        raise ConfigError(
            f"{says} {name}, which is not in {setting}: add it, or correct or remove these records."
        )


def count_labels(labels: Tensor, num_classes: int) -> list[int]:
    """Return the number of records of each class, or with each label, or in all of numbers.

    Args:
        labels: See :class:`Records`.
        num_classes: Their number.
    """
    if labels.is_floating_point():
        return [len(labels)]
    counts = labels.sum(0) if labels.dim() == 2 else torch.bincount(labels, minlength=num_classes)
    return list(map(int, counts))


def label_names(text: str, separator: str | None) -> tuple[str, ...]:
    """List the labels in a cell, by their names; an empty cell has none.

    Args:
        text: Such as ``a;b``; spaces around a name do not count, nor do brackets and quotes of a
            list as ``['a', 'b']``.
        separator: Between names; None if a cell is a class.
    """
    if separator is None:
        return (text,)
    is_list = text[0:1] == "[" and text[-1:] == "]"
    text, around = (text[1:-1], " '\"") if is_list else (text, None)
    return tuple(name for part in text.split(separator) if (name := part.strip(around)))


def hash_positions(ids: np.ndarray, *, key: bytes) -> np.ndarray:
    """Return float64 ``[N]`` in [0, 1): the keyed blake2b of each id, as a fraction.

    Args:
        ids: ``[N]`` byte strings.
        key: 1 to 64 bytes; to everybody without it the positions are random.

    Raises:
        ValueError: The key is empty or longer than 64 bytes.
    """
    if not 1 <= len(key) <= 64:
        raise ValueError(f"a split key needs 1 to 64 bytes, got {len(key)}.")
    keyed = hashlib.blake2b(key=key, digest_size=8, person=b"fednas split")
    digests = _digests(chain.from_iterable(ids[rows].tolist() for rows in chunks(len(ids))), keyed)
    # 53 bits are what a float64 in [0, 1) holds exactly; with 64 the largest would round to 1.
    return (np.frombuffer(digests, dtype=">u8") >> np.uint64(11)).astype(float) * 2.0**-53


def assign_splits(ids: np.ndarray, *, key: bytes, fractions: Mapping[str, float]) -> np.ndarray:
    """Return int8 ``[N]``: 0 for train, 1 for validation, 2 for test.

    A record with position ``h`` (see :func:`hash_positions`) is train where ``h < train``,
    validation where ``h < train + validation``, and test otherwise.

    Args:
        ids: ``[N]`` byte strings; equal ids get the same part.
        key: The site's key, 1 to 64 bytes.
        fractions: Share of ``train``, ``validation`` and ``test``, each in [0, 1], summing to 1.

    Returns:
        The parts; their sizes meet the fractions in expectation, not exactly.

    Example:
        >>> ids = np.array([b"a", b"b", b"c", b"d"])
        >>> shares = {"train": 0.5, "validation": 0.25, "test": 0.25}
        >>> parts = assign_splits(ids, key=b"secret", fractions=shares)
        >>> bool((assign_splits(ids[2:], key=b"secret", fractions=shares) == parts[2:]).all())
        True
    """
    shares = np.array([fractions[name] for name in SPLITS], dtype=float)
    edges = np.cumsum(shares)[:2]
    # Rounding must not send a record to a part whose share is 0.
    for position in (1, 0):
        if shares[position + 1 :].sum() == 0:
            edges[position] = 1.0
    return np.searchsorted(edges, hash_positions(ids, key=key), side="right").astype(np.int8)


def assignment_digest(
    ids: np.ndarray, *, key: bytes, fractions: Mapping[str, float], id_column: str
) -> str:
    """Return the blake2b-128, in hex, of what decides which part each of some records is in.

    That is the key and the fractions, with the name of the column that gives ids, whose records may
    come and go without changing sides. Ids that are hashes of records' content may be the same
    records' in another form, so without such a column all ids count, in any order.

    Args:
        ids: ``[N]`` byte strings.
        key: As of :func:`assign_splits`.
        fractions: As of :func:`assign_splits`.
        id_column: ``Records.id_column``.
    """
    shares = [[name, float(fractions[name])] for name in SPLITS]
    digest = hashlib.blake2b(digest_size=16, person=b"fednas parts")
    digest.update(json.dumps([key.hex(), shares, id_column]).encode())
    if not id_column:
        for record_id in sorted(ids.tolist()):
            digest.update(record_id.ljust(32, b"\0"))
    return digest.hexdigest()
