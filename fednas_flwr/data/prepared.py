"""Records and their division over clients, in simulations and on real sites.

A division is one ascending index array per client, the same on every machine for the same arguments
(:func:`partition`). It is for experiments on one pooled set; a real site has its own records.
Dirichlet label skew uses flwr-datasets' ``DirichletPartitioner``. Iid and the others are a few
lines of numpy, because importing flwr-datasets takes several seconds, which the default run avoids.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.base.files import write_atomically
from fednas_flwr.base.foreign import load_json
from fednas_flwr.base.randomness import derive_seed
from fednas_flwr.data.datasets import Data, Prepared, intensity_of, prepare
from fednas_flwr.data.features import BACKBONE, kept_as, transform_of
from fednas_flwr.data.readers import check_sites
from fednas_flwr.data.records import Parts, Records, check_alike, select_records
from fednas_flwr.settings import Config, expanded
from fednas_flwr.settings import data_settings as ds

# Zhang et al., FDNAS (arXiv 2011.03372): three groups of classes over ten clients.
FDNAS_GROUPS = ((0, 1, 2), (3, 4, 5), (6, 7, 8, 9))
TENTHS = tuple(map(str, range(10)))  # classes that replace numbers
_ATTEMPTS = 100


def prepare_run(config: Config) -> Prepared:
    """Return the records of a run.

    The column that divides a table's records over clients is no feature, unless the user names it
    as one.
    """
    split, dataset = config.partition, config.dataset
    if isinstance(dataset, ds.CSV) and isinstance(split, ds.ColumnPartition) and split.column:
        asked = {*dataset.numeric, *dataset.dates, *dataset.categorical, *dataset.categories}
        if not {split.column} & {*asked, *dataset.ignore, dataset.label, dataset.id_column}:
            dataset = replace(dataset, ignore=[*dataset.ignore, split.column])
    return prepare(dataset, sites=split.name == "sites")


def make_data(config: Config) -> Data:
    """Return the prepared records and the rows of every client."""
    prepared, split = prepare_run(config), config.partition
    if not isinstance(split, ds.SavedPartition):
        return prepared, partition(_in_classes(prepared), split, clients=config.clients)
    parts = load_partition(expanded("partition.file", split.file))
    largest, number = max(int(part[-1]) for part in parts), len(prepared.train)
    if len(parts) != config.clients or largest >= number:
        raise ConfigError(
            f"partition.file={split.file} is of another data set or run: it divides records up to "
            f"number {largest} over {len(parts)} clients, but clients={config.clients} have "
            f"{number} records."
        )
    return prepared, parts


def _in_classes(prepared: Prepared) -> Records:
    """Return records with classes to divide by; for numbers, ten parts of the range, or deciles.

    Deciles are those of all records, which only a simulation knows.
    """
    records, ends = prepared.train, prepared.target[2:]
    if not records.is_regression:
        return records
    numbers, shares = records.labels.numpy(), np.linspace(0, 1, len(TENTHS) + 1)[1:-1]
    edges = np.quantile(ends or numbers, shares)  # equally far apart between two ends
    tenths = np.searchsorted(edges, numbers, side="right")
    return replace(records, labels=torch.from_numpy(tenths), class_names=TENTHS)


def client_names(records: Records, settings: ds.Partition) -> list[str]:
    """Return the names of the clients, the values of the dividing column; empty without one."""
    return list(map(str, np.unique(sites_of(records, settings)).tolist()))


def sites_of(records: Records, settings: ds.Partition) -> np.ndarray:
    """Return the cells of the column that divides records over clients; empty without one."""
    column = str(getattr(settings, "column", "site" if settings.name == "sites" else ""))
    return records.columns.get(column, np.empty(0))


def make_site_data(config: Config) -> Data:
    """Return the records in ``dataset.root`` on a real site: all belong to its client.

    An official test part stays unused: the keyed hash of each record fixes its split.
    """
    check_sites(config.dataset.name)
    prepared = prepare(replace(config.dataset, server_test=False))
    return prepared, [np.arange(len(prepared.train))] * config.clients


def make_server_data(config: Config, properties: Mapping[str, Any]) -> Prepared:
    """Return the data as the server of real sites knows it: shapes and names, no records.

    If ``dataset.root`` names data on the server and ``dataset.server_test`` is true, all of that
    data is the public test set.

    Args:
        config: Settings of a run with real sites.
        properties: The properties of one client's data, in which all clients agree.

    Raises:
        ConfigError: The server's test set does not fit the clients, or the run names another
            transform of images than theirs.
    """
    settings = config.dataset
    names = ("input_shape", "image_shape", "transform", "schema", "class_names")
    shape, image_shape, transform, schema, classes, mean, std, target = (
        tuple(properties[name]) for name in (*names, "mean", "std", "target")
    )
    ours = transform_of(settings)
    if ours != transform and (ours or transform[0] == BACKBONE):
        raise ConfigError(
            f"the run has the features {show(list(ours)) or None}, but its sites "
            f"{show(list(transform))}: set the same scattering, or backbone and flip, in the run's "
            "dataset and in every site's dataset.yaml; scattering is left to these with "
            "dataset.scattering=null."
        )
    label = classes[0] if schema and target else ""  # a number is named after its column
    if schema and isinstance(settings, ds.LabelTable) and settings.names_label:
        label = settings.label
    form = [len(classes)] if properties["multi_label"] else []
    empty = Records(
        torch.empty(0, *shape, dtype=kept_as(transform) if schema or transform else torch.uint8),
        torch.empty(0, *form, dtype=torch.float32 if target else torch.int64),
        np.empty(0, "S32"),
        classes,
        schema=schema,
        label=label,
        image_shape=image_shape,
    )
    # the sites standardise by this mean and std, and so does the exported model
    if not settings.server_test or settings.place is None:
        return Prepared(empty, None, mean, std, intensity_of(settings), transform, target)
    server = prepare(replace(settings, server_test=False))
    test = server.train
    check_alike(
        f"the server's test set dataset.root={settings.place}", test, "the clients' records", empty
    )
    empty = replace(empty, label=test.label, label_separator=test.label_separator)
    return Prepared(
        empty, test, mean or server.mean, std or server.std, server.intensity, transform, target
    )


def partition(records: Records, settings: ds.Partition, *, clients: int) -> Parts:
    """Return ascending int64 record indices per client: disjoint, and none left over.

    If the persons of records are known, a random division is one of persons. Each keeps all of its
    records, and counts as one record of the class of its first.

    Args:
        records: The records that clients hold.
        settings: The way of dividing them. ``sites`` makes a client per value of the column
            ``site``.
        clients: Number of clients; for column and sites, the number that there is.

    Raises:
        ConfigError: The records cannot be divided over the clients with these settings.
    """
    name = settings.name
    if not 1 <= clients <= len(records):
        raise ConfigError(
            f"clients={clients} does not fit {len(records)} records: give at least 1 client and "
            "at most one per record."
        )
    if name in ("dirichlet", "label_groups") and records.multi_label:
        raise ConfigError(
            f"partition={name} divides records by the class of each, but these can have several "
            "labels: use partition=iid, quantity or column."
        )
    owners = None
    if records.by_person and isinstance(settings, ds.RandomPartition):
        _, first, owners = np.unique(records.ids, return_index=True, return_inverse=True)
        records = select_records(records, first)
    parts = _divided(records, settings, clients)
    if owners is not None:
        parts = [np.flatnonzero(np.isin(owners, part)) for part in parts]
    parts = [np.sort(part).astype(np.int64) for part in parts]
    empty = [client for client, part in enumerate(parts) if len(part) == 0]
    if empty:
        raise ConfigError(
            f"partition={name} leaves client {empty[0]} of {clients} without records: ask for "
            "fewer clients or less skew."
        )
    return parts


def _divided(records: Records, settings: ds.Partition, clients: int) -> Parts:
    """Return the parts, by one of the ways to divide, with their records in any order."""
    name = settings.name
    if not isinstance(settings, ds.RandomPartition):
        column = settings.column if isinstance(settings, ds.ColumnPartition) else "site"
        return _by_column(records, clients=clients, name=name, column=column)
    rng = np.random.default_rng(derive_seed(settings.seed, "partition", name))
    if isinstance(settings, ds.LabelGroups):
        return _label_groups(records, settings, clients, rng)
    if isinstance(settings, ds.QuantityPartition):
        size, shares = len(records), np.asarray(settings.fractions)
        if not settings.fractions:
            shares = _drawn_shares(size, settings, clients, rng)
        if len(shares) != clients or abs(shares.sum() - 1) > 1e-6:
            raise ConfigError(
                f"partition.fractions={shares.tolist()} must be {clients} shares above 0, 1 in all."
            )
        return np.split(rng.permutation(size), _cuts(size, shares)[1:-1])
    if isinstance(settings, ds.DirichletPartition):
        return _dirichlet(records, settings, clients, rng)
    return np.array_split(rng.permutation(len(records)), clients)


def save_partition(path: Path, parts: Parts) -> None:
    """Write the partition as JSON, ``{"clients": [[index, ...], ...]}``, atomically."""
    write_atomically(path, json.dumps({"clients": [part.tolist() for part in parts]}))


def load_partition(path: Path) -> Parts:
    """Return the partition in a file, in the form of :func:`partition`.

    Raises:
        ConfigError: The file is missing or holds no partition.
    """
    try:
        clients = load_json(path.read_text(encoding="utf-8"))["clients"]
        parts = [np.array(indices) for indices in clients]
        joined = np.concatenate(parts)
        ascending = all(len(part) and (np.diff(part) > 0).all() for part in parts)
        whole = joined.dtype.kind == "i" and joined.ndim == 1 and joined.min() >= 0
        if not (ascending and whole and len(np.unique(joined)) == len(joined)):
            raise ValueError(
                "expected a list of ascending record numbers per client, none empty, none twice"
            )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"partition.file={path} cannot be read as a saved partition: {error}."
        ) from error
    return parts


def _dirichlet(
    records: Records, settings: ds.DirichletPartition, clients: int, rng: np.random.Generator
) -> Parts:
    """Return parts by flwr-datasets of shuffled records, since it cuts classes in file order."""
    from datasets import Dataset
    from flwr_datasets.partitioner import DirichletPartitioner

    order = rng.permutation(len(records))
    partitioner = DirichletPartitioner(
        num_partitions=clients,
        partition_by="label",
        alpha=settings.alpha,
        min_partition_size=settings.min_size,
        shuffle=False,
        seed=int(rng.integers(2**32)),
    )
    labels = records.labels.numpy()[order]
    partitioner.dataset = Dataset.from_dict({"label": labels, "record": order})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns at each repeated draw
            parts = [partitioner.load_partition(i) for i in range(clients)]
    except ValueError as error:
        raise _too_skewed(settings, clients) from error
    return [np.asarray(part[:]["record"], dtype=np.int64) for part in parts]


def _label_groups(
    records: Records, settings: ds.LabelGroups, clients: int, rng: np.random.Generator
) -> Parts:
    """Return each group's records, divided evenly over the clients of the group."""
    groups = settings.groups or FDNAS_GROUPS
    classes = sorted(label for group in groups for label in group)
    if classes != list(range(len(records.class_names))):
        raise ConfigError(
            f"partition.groups={[list(group) for group in groups]} must hold each of the "
            f"{len(records.class_names)} classes 0, 1, ... exactly once."
        )
    counts = list(settings.clients_per_group) or [
        (i + 1) * clients // len(groups) - i * clients // len(groups) for i in range(len(groups))
    ]
    if len(counts) != len(groups) or sum(counts) != clients or min(counts) < 1:
        raise ConfigError(
            f"partition.clients_per_group={counts} must give each of the {len(groups)} groups at "
            f"least one client and {clients} in all."
        )
    labels = records.labels.numpy()
    parts: Parts = []
    for group, count in zip(groups, counts, strict=True):
        members = np.flatnonzero(np.isin(labels, list(group)))
        parts += np.array_split(rng.permutation(members), count)
    return parts


def _drawn_shares(
    size: int, settings: ds.DirichletPartition, clients: int, rng: np.random.Generator
) -> np.ndarray:
    """Return shares from Dirichlet(alpha), drawn again until each gives ``min_size`` records."""
    for _ in range(_ATTEMPTS):
        shares: np.ndarray = rng.dirichlet(np.full(clients, settings.alpha))
        if np.diff(_cuts(size, shares)).min() >= settings.min_size:
            return shares
    raise _too_skewed(settings, clients)


def _cuts(size: int, shares: np.ndarray) -> np.ndarray:
    """Return the bounds, from 0 to the size, of consecutive parts with the given shares."""
    cuts: np.ndarray = np.rint(np.append(0, np.cumsum(shares)) * size).astype(np.int64)
    cuts[-1] = size
    return cuts


def _by_column(records: Records, *, clients: int, name: str, column: str | None) -> Parts:
    """Return one part per value of the column, in the order of the sorted values."""
    if column is None or column not in records.columns:
        raise ConfigError(
            f"partition={name} needs the column {column or 'partition.column'}, but these records "
            f"have {', '.join(records.columns) or 'no columns'}."
        )
    values, owners = np.unique(records.columns[column], return_inverse=True)
    if "" in values:
        raise ConfigError(f"{column} is empty in {(owners == 0).sum()} rows: name whose they are.")
    if len(values) != clients:
        raise ConfigError(
            f"partition={name} makes {len(values)} clients, one per value of {column}, but "
            f"clients={clients}: set clients={len(values)}."
        )
    return [np.flatnonzero(owners == client) for client in range(clients)]


def _too_skewed(settings: ds.DirichletPartition, clients: int) -> ConfigError:
    """Return the error for repeated draws that all leave a client with too few records."""
    return ConfigError(
        f"partition={settings.name} with alpha={settings.alpha} over {clients} clients always "
        f"leaves one below min_size={settings.min_size} records: raise partition.alpha, "
        "or lower partition.min_size or clients."
    )
