"""CFDNAS' groups: which clients get a network of their own together."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from fednas_flwr.algorithms.fdnas import CFDNASSettings
from fednas_flwr.base.errors import ConfigError, show, unknown_choice
from fednas_flwr.settings import Config


def check_groups(config: Config) -> None:
    """Refuse groups that cannot come about; real nodes tell their own tags when they connect."""
    algorithm = config.algorithm
    if not isinstance(algorithm, CFDNASSettings):
        return
    if algorithm.num_groups is not None and algorithm.num_groups > config.clients:
        raise ConfigError(
            f"algorithm.num_groups={algorithm.num_groups} with clients={config.clients}: expected "
            "at most one group per client; lower it."
        )
    if algorithm.group_by != "tag" or config.runtime.name == "deployment":
        return
    tags = algorithm.client_tags
    if not tags or "" in tags:
        raise ConfigError(
            f"algorithm.group_by=tag with algorithm.client_tags={show(tags)}: every simulated "
            f"client needs a tag; give one for each of clients={config.clients}."
        )
    for client, tag in enumerate(tags):
        group_name({"tag": tag}, client, "tag")
    for name in algorithm.group_hardware:
        if name not in tags:
            raise unknown_choice("algorithm.group_hardware", name, set(tags))


def group_by_fact(
    properties: Mapping[int, Mapping[str, object]], name: str
) -> dict[str, list[int]]:
    """Return the clients, ascending, by what each says of itself (Zhang et al., 2020, Alg. 2).

    Args:
        properties: By client, of which each has a :func:`group_name`.
        name: ``tag`` or ``hardware``.
    """
    groups: dict[str, list[int]] = {}
    for client in sorted(properties):
        groups.setdefault(group_name(properties[client], client, name), []).append(client)
    return dict(sorted(groups.items()))


def group_name(properties: Mapping[str, object], client: int, name: str) -> str:
    """Return the group that a client says it is in, which also names a folder.

    Raises:
        ConfigError: It says nothing, or what names no folder.
    """
    label = properties.get(name)
    if not isinstance(label, str) or not label:
        raise ConfigError(
            f"algorithm.group_by={name}, but client {client} has no {name}: give the node a "
            "tag in its --node-config, or simulated clients algorithm.client_tags=[...]."
        )
    # in UTF-8 up to 240 bytes, where file systems take 255
    if not re.fullmatch(r"[\w .-]{1,60}", label) or label.startswith("."):
        raise ConfigError(
            f"group {show(label)!r} cannot name a folder: expected up to 60 letters, digits, "
            "spaces, dots, hyphens and underscores."
        )
    return label


def group_by_alphas(updates: Mapping[int, Tensor], *, num_groups: int) -> dict[str, list[int]]:
    """Return clients with similar updates of the alphas: average linkage of cosine distances.

    For clients without labels; not in the text. Groups are named ``1``, ``2``, ... by their first
    client.

    Args:
        updates: By client, [A]: see ``FDNAS.updates``.
        num_groups: From 2 to the number of clients.

    Raises:
        ConfigError: There are fewer clients than groups.
    """
    from sklearn.cluster import AgglomerativeClustering

    clients = sorted(updates)
    if len(clients) < num_groups:
        raise ConfigError(
            f"algorithm.num_groups={num_groups} for {len(clients)} clients: expected at most as "
            "many groups as clients."
        )
    unit_KA = torch.stack([updates[client] for client in clients])
    unit_KA = unit_KA / unit_KA.norm(dim=1, keepdim=True).clamp(min=1e-30)
    distances_KK = (1 - unit_KA @ unit_KA.T).clamp(min=0.0)
    labels = AgglomerativeClustering(
        n_clusters=num_groups, metric="precomputed", linkage="average"
    ).fit_predict(distances_KK.numpy())
    names = {label: str(n) for n, label in enumerate(dict.fromkeys(labels.tolist()), 1)}
    groups: dict[str, list[int]] = {name: [] for name in names.values()}
    for client, label in zip(clients, labels.tolist(), strict=True):
        groups[names[label]].append(client)
    return groups
