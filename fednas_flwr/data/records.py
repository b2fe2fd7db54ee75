"""Records, as every reader returns them: operations on them, and their division into splits.

A record's id is stable: it depends on that record alone. The part of a record (train, validation or
test) is a function of that id and the site's key, never of other records, their order or a run's
seed. So a record once read as training data is never test data later, and a privacy ledger can add
up what was spent on each part (:func:`assign_splits`).

:class:`Column` is one column of a table. :class:`Inputs` has all that a model needs to know about
its raw inputs. Both are JSON in an exported model. :func:`normalised` is the only place where
numbers are standardised, in training and in prediction.
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
from fednas_flwr.data.notation import Cells, places_among
from fednas_flwr.settings.data_settings import ANY_FORM, TableForm
from fednas_flwr.settings.names import SPLITS
from fednas_flwr.settings.parser import Checked, OneOf, parse

NUMBER, DATE, CATEGORY = "number", "date", "category"
KINDS = (NUMBER, DATE, CATEGORY)
ID = np.dtype("S32")  # type of a record's id
_CHUNK = 65_536  # ids that are Python objects at the same time
_FACTORS = np.array([0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xABC98388FB8FAC03, 1], np.uint64)
LIMIT = 5.0  # for numbers of a table, in standard deviations from the mean


@dataclass(frozen=True)
class Column(Checked):
    """A column of a table.

    A missing number or date counts as the mean. A missing or unknown category is none of the
    ``categories``: all its features are 0.

    Attributes:
        name: Name in the table's header.
        kind: ``number``; ``date``, in days since 1970; or ``category``.
        categories: Values of a category, one feature each.
        indicator: True if a further feature, 0 or 1, flags a missing number or date.
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
        shape: Shape of one raw record, ``(C, H, W)`` or ``(F,)``.
        schema: The columns of a table; empty for images.
        mean: Means per channel of images scaled to 0..1, or per feature of a table.
        std: Standard deviations like ``mean``, all above 0.
        class_names: One name per output.
        label: Name of a table's label column; empty if it has none, or one per label.
        multi_label: True if a record can have several labels; outputs are then a probability each.
        target: For a number to predict, its mean and deviation, by which it is standardised, and
            the ends of its range if that is declared; else empty.
        label_separator: Separator of the labels in the label column, see
            :func:`~fednas_flwr.data.records.label_names`.
        form: Format of a table's cells, as set and as found in training.
        id_column: Column of a table, or of a labels file, that names the person of each record.
        intensity: Intensities of 16-bit images that become 0 and 255; empty is 0 to 65535.
        transform: Description of the transform that makes the network's features of images
            (``data.features``); empty if the network takes the images.
        positive: Number of the positive class; None is the last of two.
        threshold: Least probability of that class with which a record is labelled so; None labels
            by the most probable class.
        limit: Limit of a table's numbers, see :func:`normalised`; 0 for a model made without one.
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
        """Return the inputs in a model's metadata.

        Raises:
            ConfigError: The text does not describe inputs.
        """
        return parse(Inputs, json.loads(text), key="inputs", defaults=True)


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return a tensor of the CPU on a device; the copy to a GPU is not waited for."""
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def normalised(
    x: Tensor, mean: tuple[float, ...], std: tuple[float, ...], limit: float = LIMIT
) -> Tensor:
    """Return raw records as networks take them, float32, on their device.

    Args:
        x: uint8 ``[B, C, H, W]`` from 0 to 255; float32 ``[B, C, H, W]`` from 0 to 1; or float32
            ``[B, F]`` rows of a table, with NaN where missing; NaN becomes 0, the mean.
        mean: Means per channel of images scaled to 0..1, or per feature of a table; a single 0,
            with a std of 1, for features that are already as networks take them.
        std: Standard deviations like ``mean``, above 0.
        limit: Deviations from the mean to which numbers of a table are clipped, so that a network
            does not extrapolate from the few in a column's long tail; 0 does not clip.
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
        features: uint8 ``[N, C, H, W]`` images, or float32 ``[N, F]`` rows with NaN where missing.
            After a transform of images, float32 ``[N, K, h, w]``, or float16 for a network's maps.
        labels: int64 ``[N]``, in ``0 .. len(class_names) - 1``; or ``[N, len(class_names)]`` of 0
            and 1, if a record can have several labels; or float32 ``[N]``, the numbers to predict.
        ids: S32 ``[N]``, hex of :func:`record_ids`; equal for records that must not be separated.
        class_names: One name per class or label; for numbers to predict, the target's name.
        columns: ``[N]`` strings per column by which a table or sites can be partitioned.
        schema: Columns of a table, in the order of its features; empty for images.
        label: Name of a table's label column; empty if it has none, or one per label.
        label_separator: Separator of the labels in that column, see :func:`label_names`; empty if
            it holds a class.
        form: Format of a table's cells, as set and as found.
        id_column: Column that names the person of each record. The ids are made from it, and so
            are the same in every export of the data. A person stays in one part and, where clients
            are drawn, with one client, and is the unit of privacy. Empty if ids are hashes of the
            records' content.
        image_shape: ``(C, H, W)`` of the images that a transform made features of; else empty.
        notes: Sentences about what the reader has found and done, for people.
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
        """Names of a table's features, those to standardise first; empty for images."""
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
        """True if the person of each record is known."""
        return bool(self.id_column)

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.labels)


RecordsPair = tuple[Records, Records | None]  # train part, and the official test part if any
Parts = list[np.ndarray]  # the rows of every client


def record_ids(contents: Iterable[bytes]) -> np.ndarray:
    """Return S32 ``[N]``: keyless blake2b-128, in hex, of each record's content or given id."""
    return np.frombuffer(_digests(contents, hashlib.blake2b(digest_size=16)).hex().encode(), ID)


def _digests(contents: Iterable[bytes], begun: hashlib.blake2b) -> bytearray:
    """Return the digests of contents, one after the other, each continuing the hash ``begun``."""
    digests = bytearray()
    for content in contents:
        digest = begun.copy()  # faster than to make each anew
        digest.update(content)
        digests += digest.digest()
    return digests


def chunks(number: int) -> Iterator[slice]:
    """Yield slices of rows, so small that Python objects for all of them do not fill memory."""
    return (slice(first, first + _CHUNK) for first in range(0, number, _CHUNK))


def keys_of(ids: np.ndarray) -> np.ndarray:
    """Return keys that are equal where ids are and, except with chance N^2 / 2^65, not elsewhere.

    Args:
        ids: S32 ``[N]``.

    Returns:
        uint64 ``[N]``, which numpy sorts far faster than ids.
    """
    return np.ascontiguousarray(ids, ID).view(np.uint64).reshape(-1, 4) @ _FACTORS


def record_id(content: bytes) -> str:
    """Return the id of one record, see :func:`record_ids`."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def text_id(text: str) -> bytes:
    """Hash an id that is a text, such as a person's name, as :func:`record_ids` does."""
    return record_id(text.encode("utf-8", "surrogatepass")).encode()


def readable(unreadable: Mapping[str, np.ndarray]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return int64 ``[n]``, the records that can be read, and a note about the others, if any.

    Args:
        unreadable: For each reason, bool ``[N]``: true for records that cannot be read.
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
    """Return numbers as float32 with one zero and one NaN, so that equal ones have equal bytes."""
    numbers = np.asarray(numbers, dtype=np.float32) + np.float32(0)  # -0 + 0 = 0
    numbers[np.isnan(numbers)] = np.nan
    return numbers


def select_records(records: Records, rows: np.ndarray) -> Records:
    """Return a copy of the given rows (int64), in the order given."""
    index = torch.from_numpy(np.asarray(rows, dtype=np.int64))
    return replace(
        records,
        features=records.features[index],
        labels=records.labels[index],
        ids=records.ids[rows],
        columns={name: values[rows] for name, values in records.columns.items()},
    )


def fingerprint(records: Records) -> str:
    """Return a hash of all records, and of the names of a table's columns and of the classes.

    Images count by their ids, so that it is the same for features that are made of them.
    """
    names = repr((records.schema, records.class_names)).encode()
    digest = hashlib.blake2b(names, digest_size=16)
    tables = [records.features.numpy()] if records.schema else []
    for values in (records.labels.numpy(), records.ids, *tables):
        digest.update(np.ascontiguousarray(values).view(np.uint8).data)
    return digest.hexdigest()


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
    notes = [f"{site}: {note}" for site, of in sites.items() for note in of.notes]
    seen: dict[bytes, str] = {}
    for name, records in sites.items():
        twin = seen.setdefault(np.sort(records.ids).tobytes(), name)
        notes += [f"{name} holds the records of {twin}: the same file?"] if twin != name else []
    return replace(
        first,
        features=torch.cat([records.features for records in everyone]),
        labels=torch.cat([records.labels for records in everyone]),
        ids=np.concatenate([records.ids for records in everyone]),
        columns=columns,
        form=replace(ANY_FORM, **agreed(records.form for records in everyone)),
        notes=tuple(notes),
    )


def agreed(forms: Iterable[TableForm]) -> dict[str, Any]:
    """Return the settings in which several forms agree, by name."""
    first, *others = map(vars, forms)
    return {name: value for name, value in first.items() if all(of[name] == value for of in others)}


def check_alike(first: str, records: Records, second: str, others: Records) -> None:
    """Refuse records of two sources that one network could not learn from.

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
        cells: One class each; with a separator any number of labels, see :func:`label_names`.
        class_names: All names of classes or labels.
        separator: Separator of the labels in a cell.
        where: Source of the cells, for messages.

    Returns:
        int64 ``[N]``, the position of each name among the class names; or ``[N, L]``, 1 where a
        record has a label.

    Raises:
        ConfigError: A name is not among the class names.
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
    """Raise ConfigError, beginning with ``says``, for a name that a setting lacks."""
    for name in sorted(set(names) - set(known)):
        raise ConfigError(
            f"{says} {name}, which is not in {setting}: add it, or correct or remove these records."
        )


def count_labels(labels: Tensor, num_classes: int) -> list[int]:
    """Return the number of records of each class or label; for numbers to predict, of all records.

    Args:
        labels: See :class:`Records`.
        num_classes: Number of classes or labels.
    """
    if labels.is_floating_point():
        return [len(labels)]
    counts = labels.sum(0) if labels.dim() == 2 else torch.bincount(labels, minlength=num_classes)
    return list(map(int, counts))


def label_names(text: str, separator: str | None) -> tuple[str, ...]:
    """Return the names of the labels in a cell; an empty cell has none.

    Args:
        text: Text such as ``a;b``. Spaces around a name do not count, nor do the brackets and
            quotes of a list such as ``['a', 'b']``.
        separator: Separator of the names; None if a cell is a class.
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
        key: 1 to 64 bytes; without it, the positions look random.

    Raises:
        ValueError: The key is empty or longer than 64 bytes.
    """
    if not 1 <= len(key) <= 64:
        raise ValueError(f"a split key needs 1 to 64 bytes, got {len(key)}.")
    keyed = hashlib.blake2b(key=key, digest_size=8, person=b"fednas split")
    digests = _digests(chain.from_iterable(ids[rows].tolist() for rows in chunks(len(ids))), keyed)
    # A float64 in [0, 1) holds 53 bits exactly; with 64 the largest would round to 1.
    return (np.frombuffer(digests, dtype=">u8") >> np.uint64(11)).astype(float) * 2.0**-53


def assign_splits(
    ids: np.ndarray, *, key: bytes, fractions: Mapping[str, float], trains: bool = False
) -> np.ndarray:
    """Return int8 ``[N]``: 0 for train, 1 for validation, 2 for test.

    A record with position ``h`` (see :func:`hash_positions`) is train if ``h < train``, else
    validation if ``h < train + validation``, and test otherwise.

    Args:
        ids: ``[N]`` byte strings; equal ids get the same part.
        key: The site's key, 1 to 64 bytes.
        fractions: Share of ``train``, ``validation`` and ``test``, each in [0, 1], summing to 1.
        trains: True if all records are train where fewer than two would be, which batch norm needs;
            for the records of one client.

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
    parts = np.searchsorted(edges, hash_positions(ids, key=key), side="right").astype(np.int8)
    return np.zeros_like(parts) if trains and shares[0] > 0 and (parts == 0).sum() < 2 else parts


def assignment_digest(
    ids: np.ndarray, *, key: bytes, fractions: Mapping[str, float], id_column: str
) -> str:
    """Return the blake2b-128, in hex, of everything that decides the part of each record.

    That is the key, the fractions and the name of the column that gives ids; with such a column,
    records may come and go while the others stay in their parts. Without it ids are hashes of
    content, and the same record in another form has another id. So all ids count then, in any
    order.

    Args:
        ids: ``[N]`` byte strings.
        key: As in :func:`assign_splits`.
        fractions: As in :func:`assign_splits`.
        id_column: ``Records.id_column``.
    """
    shares = [[name, float(fractions[name])] for name in SPLITS]
    digest = hashlib.blake2b(digest_size=16, person=b"fednas parts")
    digest.update(json.dumps([key.hex(), shares, id_column]).encode())
    if not id_column:
        for record_id in sorted(ids.tolist()):
            digest.update(record_id.ljust(32, b"\0"))
    return digest.hexdigest()
