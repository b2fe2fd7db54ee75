"""Checks of a private site before it reads a record: request, policy, commitment, computation.

A request that failed on some records and not on others would tell which are there; so whatever can
fail is tried before, inside :func:`before_reading`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fednas_flwr.base.errors import ConfigError, unknown_choice
from fednas_flwr.client.client import Client
from fednas_flwr.client.release_guard import ReleaseGuard
from fednas_flwr.client.shown_sizes import machine, shown_size, structure
from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS, SUPERNET
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.privacy.policy import refused
from fednas_flwr.privacy.self_test import (
    Computation,
    largest_size,
    made_up_labels,
    unwatched,
)
from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.protocol.requests import (
    Commit,
    RewardCandidates,
    Site,
    TakeGradients,
)
from fednas_flwr.protocol.states import network_states
from fednas_flwr.protocol.sum_requests import Kinds
from fednas_flwr.settings.names import CLIENT
from fednas_flwr.settings.optimizers import NORMED_NETWORKS

NUMBERS_OF = {"metrics": 2, "rewards": 1}  # values of a release that are no network's


def admit(
    guard: ReleaseGuard,
    request: Request,
    network: nn.Module | None = None,
    *,
    supernet_norm: str | None = None,
) -> dict[str, PlannedRelease]:
    """Return the plan of each kind of release of a request; empty if it releases nothing.

    Called before a site loads its records, before an action, and by the action with its network.

    Args:
        guard: The site's.
        request: The request.
        network: What it is about, once that is built.
        supernet_norm: Before that, how the run's supernet normalises.

    Raises:
        ConfigError: There is no such private action, or the policy refuses the request.
    """
    action, settings = request.action, request.settings
    if action not in PRIVATE_ACTIONS:
        raise unknown_choice("private action", action, PRIVATE_ACTIONS)
    if request.statistics is not None:  # as public as weights are; standardised_within checks them
        guard.check_action("query.statistics", guard.data_set)
    if settings.of_any_site:
        guard.check_action(action, guard.data_set)
        return {}
    if isinstance(settings, Commit):
        guard.check_action(action, settings.data_set)
        guard.check_plan(settings.releases)
        return {}
    guard.check_action(action, site_of(request).data_set)
    if ACTIONS[action].is_public:
        return {}
    if isinstance(settings, TakeGradients) and settings.order != 1:
        raise refused("first order only", "order", settings.order, "1: second order mixes splits")
    norm = _norm(request, supernet_norm) if network is None else _norm_of(network)
    if norm == "batch":
        reason = "False: it has no per-record gradient and its buffers leak"
        raise refused("no batch_norm", "batch_norm", True, reason)
    kinds = asked_kinds(request, of_client=guard.allowed.unit == CLIENT)
    return {
        kind: guard.admit(
            request.header,
            action,
            kind,
            splits=splits,
            steps=steps,
            num_values=_num_values(request, network, kind),
        )
        for kind, (splits, steps) in kinds.items()
    }


def asked_kinds(request: Request, *, of_client: bool = False) -> Kinds:
    """What a request releases: by kind the splits that it reads, and how many times.

    Args:
        request: Of a private action.
        of_client: Whether the client is protected as a whole.

    Raises:
        ConfigError: It asks for what a private client does not do.
    """
    settings = request.settings
    if of_client:
        return settings.client_releases(request.action)
    return settings.released(request.action)


def site_of(request: Request) -> Site:
    """Return what a request names of the site.

    Raises:
        ConfigError: It names nothing.
    """
    site: Site | None = getattr(request.settings, "site", None)
    if site is None:
        raise refused("data_sets", "data set", None, "an id that this site's policy gives")
    return site


def guard_of(client: Client) -> ReleaseGuard:
    """Return the guard of a private client."""
    assert client.guard is not None
    return client.guard


@contextmanager
def before_reading(request: Request) -> Iterator[None]:
    """Refuse what cannot be computed; inside no record is read, so that the reason may be told.

    The ledger's RuntimeError and OSError are the site's own affair.
    """
    try:
        yield
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"refused, the settings do not fit {request.action}: {type(error).__name__}: "
            f"{str(error)[:200]}."
        ) from error


def rehearse(
    client: Client, computation: Computation, network: nn.Module, kind: str, *chosen: Any
) -> int:
    """Compute on made-up records, shaped like the client's; return the micro-batch size to use.

    First a micro-batch of the site's size, of zeros of the last class: once for everything that the
    server has chosen and on which success could depend, memory included. No computation on records
    takes more. Then the self-test, which takes the size down to one at which no record changes what
    is computed of another.

    Args:
        client: With a guard.
        computation: Of a micro-batch of any size.
        network: What it computes with.
        kind: Of the computation; with the network it says by which kernels it is made.
        chosen: What the server has chosen besides.
    """
    key = json.dumps([kind, *chosen])
    if key in client.rehearsed:
        return client.rehearsed[key]
    size = guard_of(client).allowed.micro_batch_size
    shape, device = tuple(client.data.train.features.shape[1:]), client.device
    num_classes = len(client.class_names)
    x = torch.zeros(size, *shape, device=device)
    multi_label = client.objective.multi_label
    y = made_up_labels([num_classes - 1] * size, num_classes, multi_label=multi_label).to(device)
    try:
        computation(x, y, unwatched)
        client.rehearsed[key] = shown_size(
            [
                *(kind, size, shape, num_classes, multi_label),
                *(*machine(device, client.threads), structure(network)),
            ],
            client.cache,
            partial(
                largest_size,
                *(computation, network, shape),
                num_classes=num_classes,
                size=size,
                device=device,
                multi_label=multi_label,
            ),
        )
    except RuntimeError as error:  # of torch
        raise ValueError(error) from error
    return client.rehearsed[key]


def check_fields(action: str, reply: Reply) -> None:
    """Raise RuntimeError when a private reply has a field that may not leave."""
    leaving = {*reply.states, *reply.shares, *reply.metrics}
    listed = ACTIONS[action]
    if not (
        set(reply.properties) <= listed.properties
        and leaving <= listed.releases
        and set(reply.digests) <= leaving
    ):
        raise RuntimeError(f"{action} must not return {sorted({*reply.properties, *leaving})}")


def _num_values(request: Request, network: nn.Module | None, kind: str) -> int:
    """Return how many values a release of one kind has, 1 where that is not known yet."""
    if isinstance(request.settings, RewardCandidates):
        return request.settings.count
    if network is None or kind in NUMBERS_OF:
        return NUMBERS_OF.get(kind, 1)
    return sum(tensor.numel() for tensor in network_states(network)[kind].values())


def description_of(request: Request) -> Mapping[str, Any]:
    """Return what the network of a request is built from: the supernet if it says nothing else."""
    described = request.settings.described
    return {"name": SUPERNET} if described is None else described


def _norm(request: Request, supernet_norm: str | None) -> str | None:
    """Return how the network that a request describes normalises; None without a network."""
    if STATISTICS in ACTIONS[request.action].releases:
        return None
    described = description_of(request)
    name = described.get("name", SUPERNET)
    if ACTIONS[request.action].of_supernet or name == SUPERNET:
        return supernet_norm
    norm: str | None = described.get("norm", "batch" if name in NORMED_NETWORKS else None)
    return norm


def _norm_of(network: nn.Module) -> str | None:
    norms = nn.modules.batchnorm._BatchNorm
    return "batch" if any(isinstance(m, norms) for m in network.modules()) else None
