"""Checks of a private site before it reads a record: request, policy, commitment, network.

A request that failed on some records and not on others would tell which are there; so whatever can
fail is tried before, inside :func:`before_reading`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_type_hints

from torch import nn

from fednas_flwr.base.errors import ConfigError, unknown_choice
from fednas_flwr.client.client import Client
from fednas_flwr.client.release_guard import ReleaseGuard
from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS, SUPERNET
from fednas_flwr.privacy.plan import STATISTICS
from fednas_flwr.privacy.policy import refused
from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.protocol.states import network_states
from fednas_flwr.protocol.sum_requests import PROPERTIES, Kinds
from fednas_flwr.settings.names import CLIENT
from fednas_flwr.settings.optimizers import NORMED_NETWORKS


def admit(guard: ReleaseGuard, request: Request, *, supernet_norm: str | None = None) -> Request:
    """Return the request with the plan of each kind of release; without any it releases nothing.

    Called once, before a site loads its records; :func:`check_network` follows once there is one.

    Args:
        guard: The site's.
        request: The request.
        supernet_norm: Normalisation of the run's supernet, if it is known.

    Raises:
        ConfigError: There is no such private action, or the policy refuses the request.
    """
    action, settings = request.action, request.settings
    if action not in PRIVATE_ACTIONS:
        raise unknown_choice("private action", action, PRIVATE_ACTIONS)
    if request.statistics is not None:  # as public as weights are; the client checks them
        guard.check_action("query.statistics", guard.data_set)
    data_set = settings.of_data_set
    guard.check_action(action, guard.data_set if data_set is None else data_set)
    guard.check_plan(settings.committed)
    if ACTIONS[action].is_public:
        return replace(request, planned={})
    if _norm(request, supernet_norm) == "batch":
        raise _refused_batch_norm()
    kinds = asked_kinds(request, of_client=guard.allowed.unit == CLIENT)
    planned = {
        kind: guard.admit(
            *(request.header, action, kind),
            splits=splits,
            steps=steps,
            num_values={"metrics": 2, "rewards": settings.count}.get(kind, 1),
        )
        for kind, (splits, steps) in kinds.items()
    }
    return replace(request, planned=planned)


def asked_kinds(request: Request, *, of_client: bool = False) -> Kinds:
    """Kinds of release that a private request asks for: splits that are read, number of releases.

    Args:
        request: Of a private action.
        of_client: True if the client is protected as a whole.

    Raises:
        ConfigError: It asks for what a private client does not do.
    """
    settings = request.settings
    return (settings.client_releases if of_client else settings.released)(request.action)


def check_network(client: Client, request: Request, network: nn.Module) -> None:
    """Refuse, at a private client, a network for which no noised release can be made.

    Raises:
        ConfigError: It has batch norm, or is larger than the run has committed to.
    """
    if client.guard is None:
        return
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in network.modules()):
        raise _refused_batch_norm()
    states = network_states(network)
    for kind in request.releases.keys() & states.keys():
        num_values = sum(tensor.numel() for tensor in states[kind].values())
        client.guard.check_size(request.releases[kind], request.header.run, num_values)


def sent_network(client: Client, request: Request) -> nn.Module:
    """Return the network that a request describes, with the states that it carries, checked.

    Raises:
        ConfigError: See :func:`check_network`.
        ValueError: The states are not of this network.
    """
    network = client.network(description_of(request), request.network_states)
    check_network(client, request, network)
    return network


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


def check_fields(action: str, reply: Reply) -> None:
    """Raise RuntimeError when a private reply has a field that may not leave."""
    leaving = {*reply.states, *reply.shares, *reply.metrics}
    listed, (_, properties) = ACTIONS[action], PROPERTIES[action]
    if not (
        set(reply.properties) <= set(get_type_hints(properties))
        and leaving <= listed.releases
        and set(reply.digests) <= leaving
    ):
        raise RuntimeError(f"{action} must not return {sorted({*reply.properties, *leaving})}")


def description_of(request: Request) -> Mapping[str, Any]:
    """Return the description of a request's network, by default that of the supernet."""
    described = request.settings.described
    return {"name": SUPERNET} if described is None else described


def _norm(request: Request, supernet_norm: str | None) -> str | None:
    """Return the kind of normalisation of a request's network; None without a network."""
    if STATISTICS in ACTIONS[request.action].releases:
        return None
    described = description_of(request)
    name = described.get("name", SUPERNET)
    if ACTIONS[request.action].of_supernet or name == SUPERNET:
        return supernet_norm
    norm: str | None = described.get("norm", "batch" if name in NORMED_NETWORKS else None)
    return norm


def _refused_batch_norm() -> ConfigError:
    reason = "False: it has no per-record gradient and its buffers leak"
    return refused("no batch_norm", "batch_norm", True, reason)
