"""Records and their division over clients, in simulations and on real sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from inspect import signature
from typing import Any

import numpy as np
import torch

from fednas_flwr.config import Config, Dataset, expanded
from fednas_flwr.data.datasets import Prepared, prepare
from fednas_flwr.data.partitioners import load_partition, partition
from fednas_flwr.data.records import Records
from fednas_flwr.data.schema import Column
from fednas_flwr.data.sources import check_sites
from fednas_flwr.errors import ConfigError
from fednas_flwr.names import NO_TRANSFORM, PARTITIONS, SCATTERING
from fednas_flwr.typed import parse


def make_data(config: Config) -> tuple[Prepared, list[np.ndarray]]:
    """Return the prepared records and the rows of every client."""
    split = config.partition
    prepared = _prepare(config, sites=split.name == "sites", server_test=config.dataset.server_test)
    if split.file is not None:
        parts = load_partition(expanded("partition.file", split.file))
        _check_partition(
            parts, file=split.file, clients=config.clients, records=len(prepared.train)
        )
        return prepared, parts
    own = {setting: getattr(split, setting) for setting in PARTITIONS.get(split.name, ())}
    return prepared, partition(prepared.train, name=split.name, clients=config.clients, **own)


def make_site_data(config: Config) -> tuple[Prepared, list[np.ndarray]]:
    """Return the records in ``dataset.root`` on a real site: all are the client's, whichever it is.

    An official test part stays unused: the keyed hash of each record fixes what it is for.
    """
    check_sites(config.dataset.name)
    prepared = _prepare(config, sites=False, server_test=False)
    return prepared, [np.arange(len(prepared.train))] * config.clients


def make_server_data(config: Config, facts: Mapping[str, Any]) -> Prepared:
    """Return what the server of real sites knows of their data: shapes and names, no records.

    Where ``dataset.root`` names data on the server and ``dataset.server_test`` is true, all of
    that is the public test set.

    Args:
        config: Of a run with real sites.
        facts: What every client says of its data: one client's facts.

    Raises:
        ConfigError: The server's test set does not fit the clients, or the run names a transform of
            images that is not theirs.
    """
    shape, names = tuple(facts["input_shape"]), tuple(facts["class_names"])
    schema = tuple(parse(Column, column, key="schema") for column in facts["schema"])
    image_shape, scattering = tuple(facts["image_shape"]), tuple(facts["scattering"])
    dtype = torch.float32 if len(shape) == 1 or scattering else torch.uint8
    features = torch.empty(0, *shape, dtype=dtype)
    settings = config.dataset
    if (given := _transform(settings)) not in ((), scattering):
        raise ConfigError(
            f"the run has {_transform_text(given)}, but its sites {_transform_text(scattering)}: "
            "set the same in every site's dataset.yaml (transform, scattering), or leave it to "
            "these with dataset.transform=none."
        )
    label = settings.label if schema and settings.label != "last" else ""
    labels = torch.empty(0, *([len(names)] if facts["multi_label"] else [])).long()
    nobody = (features, labels, np.empty(0, "S32"), names)
    empty = Records(*nobody, schema=schema, label=label, image_shape=image_shape)
    # by which the sites standardise, and hence the exported model: a private one's own file says it
    mean, std = tuple(facts["mean"]), tuple(facts["std"])
    if not settings.server_test or settings.root is None:
        return Prepared(empty, None, mean, std, tuple(settings.intensity or ()), scattering)
    own = _prepare(config, sites=False, server_test=False)
    test = own.train
    found = (own.input_shape, own.scattering, test.schema, test.class_names, test.multi_label)
    if found != (shape, scattering, schema, names, facts["multi_label"]):
        raise ConfigError(
            f"the server's test set dataset.root={config.dataset.root} does not fit the clients: "
            f"it has shape {own.input_shape} and classes {', '.join(test.class_names)}, they have "
            f"{shape} and {', '.join(names)}"
            + (", of which a record can have several." if facts["multi_label"] else ".")
        )
    empty = replace(empty, label=test.label, label_separator=test.label_separator)
    return Prepared(empty, test, mean or own.mean, std or own.std, own.intensity, scattering)


def _transform(settings: Dataset) -> tuple[int, ...]:
    """Return scales and angles of the transform that makes features of images; else empty."""
    if settings.transform != SCATTERING:
        return ()
    return settings.scattering.scales, settings.scattering.angles


def _transform_text(transform: tuple[int, ...]) -> str:
    """Return a transform as the settings name it."""
    if not transform:
        return f"transform={NO_TRANSFORM}"
    scales, angles = transform
    return f"transform={SCATTERING} of scales={scales} and angles={angles}"


def _prepare(config: Config, *, sites: bool, server_test: bool) -> Prepared:
    settings, taken = config.dataset, signature(prepare).parameters
    own = {f.name: getattr(settings, f.name) for f in fields(settings) if f.name in taken}
    own["cache"] = expanded("dataset.cache", settings.cache)
    own["root"] = expanded("dataset.root", settings.root) if settings.root else None
    own["scattering"] = None if settings.transform != SCATTERING else asdict(settings.scattering)
    own |= {"sites": sites, "server_test": server_test}
    return prepare(**own)


def _check_partition(parts: list[np.ndarray], *, file: str, clients: int, records: int) -> None:
    if len(parts) != clients:
        raise ConfigError(f"{file} divides over {len(parts)} clients, but clients={clients}.")
    largest = max(int(part.max()) for part in parts)
    if largest >= records:
        raise ConfigError(
            f"{file} names record {largest}, but there are {records}: it is of another data set."
        )
