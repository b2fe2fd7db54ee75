"""Records and their division over clients, in simulations and on real sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.datasets import Prepared, intensity_of, prepare, scattering_of
from fednas_flwr.data.partitioners import load_partition, partition
from fednas_flwr.data.readers import check_sites
from fednas_flwr.data.records import Records
from fednas_flwr.data.schema import Column
from fednas_flwr.settings import Config, expanded
from fednas_flwr.settings.data_settings import LabelTable, SavedPartition
from fednas_flwr.settings.parser import parse


def make_data(config: Config) -> tuple[Prepared, list[np.ndarray]]:
    """Return the prepared records and the rows of every client."""
    split = config.partition
    prepared = prepare(config.dataset, sites=split.name == "sites")
    if isinstance(split, SavedPartition):
        parts = load_partition(expanded("partition.file", split.file))
        _check_partition(
            parts, file=split.file, clients=config.clients, records=len(prepared.train)
        )
        return prepared, parts
    return prepared, partition(prepared.train, split, clients=config.clients)


def make_site_data(config: Config) -> tuple[Prepared, list[np.ndarray]]:
    """Return the records in ``dataset.root`` on a real site: all are the client's, whichever it is.

    An official test part stays unused: the keyed hash of each record fixes what it is for.
    """
    check_sites(config.dataset.name)
    prepared = prepare(replace(config.dataset, server_test=False))
    return prepared, [np.arange(len(prepared.train))] * config.clients


def make_server_data(config: Config, properties: Mapping[str, Any]) -> Prepared:
    """Return what the server of real sites knows of their data: shapes and names, no records.

    Where ``dataset.root`` names data on the server and ``dataset.server_test`` is true, all of
    that is the public test set.

    Args:
        config: Of a run with real sites.
        properties: What every client says of its data: one client's properties.

    Raises:
        ConfigError: The server's test set does not fit the clients, or the run names a transform of
            images that is not theirs.
    """
    shape, names = tuple(properties["input_shape"]), tuple(properties["class_names"])
    schema = tuple(parse(Column, column, key="schema") for column in properties["schema"])
    image_shape, scattering = tuple(properties["image_shape"]), tuple(properties["scattering"])
    dtype = torch.float32 if len(shape) == 1 or scattering else torch.uint8
    features = torch.empty(0, *shape, dtype=dtype)
    settings = config.dataset
    if (sizes := scattering_of(settings)) not in ((), scattering):
        raise ConfigError(
            f"the run has {_scattering_text(sizes)}, but its sites {_scattering_text(scattering)}: "
            "set the same in every site's dataset.yaml (scattering), or leave it to these with "
            "dataset.scattering=null."
        )
    label = ""
    if schema and isinstance(settings, LabelTable) and settings.names_label:
        label = settings.label
    labels = torch.empty(0, *([len(names)] if properties["multi_label"] else [])).long()
    nobody = (features, labels, np.empty(0, "S32"), names)
    empty = Records(*nobody, schema=schema, label=label, image_shape=image_shape)
    # by which the sites standardise, and hence the exported model: a private one's own file says it
    mean, std = tuple(properties["mean"]), tuple(properties["std"])
    if not settings.server_test or settings.place is None:
        return Prepared(empty, None, mean, std, intensity_of(settings), scattering)
    server = prepare(replace(settings, server_test=False))
    test = server.train
    found = (server.input_shape, server.scattering, test.schema, test.class_names, test.multi_label)
    if found != (shape, scattering, schema, names, properties["multi_label"]):
        raise ConfigError(
            f"the server's test set dataset.root={settings.place} does not fit the clients: "
            f"it has shape {server.input_shape} and classes {', '.join(test.class_names)}, they "
            f"have {shape} and {', '.join(names)}"
            + (", of which a record can have several." if properties["multi_label"] else ".")
        )
    empty = replace(empty, label=test.label, label_separator=test.label_separator)
    return Prepared(
        empty, test, mean or server.mean, std or server.std, server.intensity, scattering
    )


def _scattering_text(sizes: tuple[int, ...]) -> str:
    """The transform of images as settings name it, given its scales and angles."""
    if not sizes:
        return "scattering=null"
    scales, angles = sizes
    return f"scattering={{scales: {scales}, angles: {angles}}}"


def _check_partition(parts: list[np.ndarray], *, file: str, clients: int, records: int) -> None:
    if len(parts) != clients:
        raise ConfigError(f"{file} divides over {len(parts)} clients, but clients={clients}.")
    largest = max(int(part.max()) for part in parts)
    if largest >= records:
        raise ConfigError(
            f"{file} names record {largest}, but there are {records}: it is of another data set."
        )
