"""CFDNAS' groups: which clients get a network of their own together."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from fednas_flwr.errors import ConfigError, show


def group_by_fact(facts: Mapping[int, Mapping[str, object]], name: str) -> dict[str, list[int]]:
    """Return the clients, ascending, by what each says of itself (Zhang et al., 2020, Alg. 2).

    Args:
        facts: By client, of which each has a :func:`group_name`.
        name: ``tag`` or ``hardware``.
    """
    groups: dict[str, list[int]] = {}
    for client in sorted(facts):
        groups.setdefault(group_name(facts[client], client, name), []).append(client)
    return dict(sorted(groups.items()))


def group_name(facts: Mapping[str, object], client: int, name: str) -> str:
    """Return the group that a client says it is in, which also names a folder.

    Raises:
        ConfigError: It says nothing, or what names no folder.
    """
    label = facts.get(name)
    if not isinstance(label, str) or not label:
        raise ConfigError(
            f"algorithm.group_by={name}, but client {client} has no {name}: give the node a "
            "tag in its --node-config, or simulated clients client_tags=[...]."
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
