"""Checks of a private site before it reads a record: request, policy, commitment, computation.

A request that failed on some records and not on others would tell which are there; so whatever can
fail is tried before, inside :func:`before_reading`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fednas_flwr.clients.client import Client
from fednas_flwr.clients.release import ReleaseGate
from fednas_flwr.clients.shown_sizes import machine, shown_size, structure
from fednas_flwr.errors import ConfigError, unknown_choice
from fednas_flwr.exchange.messages import Reply, Request
from fednas_flwr.exchange.requests import (
    Amount,
    Commit,
    Describe,
    Evaluate,
    Probe,
    RewardCandidates,
    Search,
    Site,
    TakeGradients,
    TakeNetworkGradient,
    TellStatistics,
    Train,
    TrainCandidates,
)
from fednas_flwr.exchange.states import network_states
from fednas_flwr.exchange.sum_requests import OpenMasks, SignSurvivors
from fednas_flwr.names import CLIENT, SPLITS
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.privacy.policy import refused
from fednas_flwr.privacy.self_test import (
    Computation,
    largest_size,
    made_up_labels,
    unwatched,
)
from fednas_flwr.search.settings import NORMED_NETWORKS
from fednas_flwr.verbs import PRIVATE_VERBS, SPLIT_OF, SUPERNET, VERBS

NUMBERS_OF = {"metrics": 2, "rewards": 1}  # values of a release that are no network's
Kinds = dict[str, tuple[tuple[str, ...], int]]  # kind -> splits that are read, number of releases


def admit(
    gate: ReleaseGate,
    request: Request,
    network: nn.Module | None = None,
    *,
    supernet_norm: str | None = None,
) -> dict[str, PlannedRelease]:
    """Return the plan of each kind of release of a request; empty if it releases nothing.

    Called before a site loads its records, before a verb, and by the verb with its network.

    Args:
        gate: The site's.
        request: The request.
        network: What it is about, once that is built.
        supernet_norm: Before that, how the run's supernet normalises.

    Raises:
        ConfigError: There is no such private verb, or the policy refuses the request.
    """
    verb, settings = request.verb, request.settings
    if verb not in PRIVATE_VERBS:
        raise unknown_choice("private verb", verb, PRIVATE_VERBS)
    if request.statistics is not None:  # as public as weights are; standardised_within checks them
        gate.check_verb("query.statistics", gate.data_set)
    if isinstance(settings, Describe | SignSurvivors | OpenMasks):
        gate.check_verb(verb, gate.data_set)
        return {}
    if isinstance(settings, Commit):
        gate.check_verb(verb, settings.data_set)
        gate.check_plan(settings.releases)
        return {}
    gate.check_verb(verb, site_of(request).data_set)
    if VERBS[verb].is_public:
        return {}
    if isinstance(settings, TakeGradients) and settings.order != 1:
        raise refused("first order only", "order", settings.order, "1: second order mixes splits")
    norm = _norm(request, supernet_norm) if network is None else _norm_of(network)
    if norm == "batch":
        reason = "False: it has no per-record gradient and its buffers leak"
        raise refused("no batch_norm", "batch_norm", True, reason)
    kinds = asked_of_client if gate.allowed.unit == CLIENT else asked_kinds
    return {
        kind: gate.admit(
            request.header,
            verb,
            kind,
            splits=splits,
            steps=steps,
            num_values=_num_values(request, network, kind),
        )
        for kind, (splits, steps) in kinds(request).items()
    }


def asked_of_client(request: Request) -> Kinds:
    """Return what a request releases of a client that is protected as a whole.

    Raises:
        ConfigError: It asks for what such a client does not answer.
    """
    settings = request.settings
    if isinstance(settings, Search):
        if settings.sparse:
            reason = "False: which tensors have changed would tell of the records"
            raise refused("unit", "sparse", True, reason)
        return dict.fromkeys(_trained(settings), (SPLITS, 1))
    if isinstance(settings, Train):
        _check_unvalidated(settings)
        return {"weights": (SPLITS, 1)}
    if isinstance(settings, Probe):
        return {"rewards": (SPLITS, len(settings.trials))}
    limit = "train.search, train.weights or train.probe: this site is protected as a whole"
    raise refused("unit", "verb", request.verb, limit)


def asked_kinds(request: Request) -> Kinds:
    """Return what a request releases: by kind the splits that it reads, and how many times.

    Raises:
        ConfigError: It asks for what a private client does not do.
    """
    settings = request.settings
    if isinstance(settings, Evaluate):
        return {"metrics": (_splits(settings.split), 1)}
    if isinstance(settings, TellStatistics):
        return {STATISTICS: (("train",), 1)}
    if isinstance(settings, RewardCandidates):
        return {"rewards": (("validation",), 1)}
    if isinstance(settings, TrainCandidates):
        if settings.dp_aware is not None or settings.batch_size is not None:
            raise ConfigError(
                "refused: a private client's noise and batches are those committed to; dp_aware "
                "and batch_size must be null."
            )
        return {"weights": (("train",), len(settings.candidates) * settings.local_steps)}
    if isinstance(settings, TakeGradients):
        _check_batch(settings.batch_size)
        states = VERBS[request.verb].gradients_of
        return {state: ((SPLIT_OF[state],), settings.local_steps) for state in states}
    if isinstance(settings, TakeNetworkGradient):
        _check_batch(settings.batch_size)
        return {"weights": (_splits(settings.split), 1)}
    if isinstance(settings, Train):
        _check_unvalidated(settings)
        return {"weights": (_splits(settings.local.split), _steps(settings.local.amount))}
    if isinstance(settings, Search):
        local = settings.local
        if local.alternating is not None and local.alternating.rule != "first_order":
            rule = local.alternating.rule
            raise refused("first order only", "rule", rule, "first_order: others mix splits")
        steps = _steps(local.amount)
        return {state: ((SPLIT_OF[state],), steps) for state in _trained(settings)}
    assert isinstance(settings, Probe)
    steps = len(settings.trials) * _steps(settings.amount)
    if settings.training is None:
        assert settings.search is not None
        kinds = asked_kinds(replace(request, settings=Search(settings.search)))
    else:
        kinds = {"weights": (_splits(settings.training.split), 1)}
    trained = {kind: (splits, steps) for kind, (splits, _) in kinds.items()}
    return trained | {"rewards": (("validation",), len(settings.trials))}


def _trained(settings: Search) -> tuple[str, ...]:
    """Return the states that a local search trains."""
    paths = settings.local.paths
    return ("weights",) if paths is not None and paths.warm_up else tuple(SPLIT_OF)


def _check_unvalidated(settings: Train) -> None:
    if settings.validates:
        raise ConfigError("refused: validates=True would tell a loss without noise.")


def site_of(request: Request) -> Site:
    """Return what a request names of the site.

    Raises:
        ConfigError: It names nothing.
    """
    site: Site | None = getattr(request.settings, "site", None)
    if site is None:
        raise refused("data_sets", "data set", None, "an id that this site's policy gives")
    return site


def gate_of(client: Client) -> ReleaseGate:
    """Return the gate of a private client."""
    assert client.gate is not None
    return client.gate


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
            f"refused, the settings do not fit {request.verb}: {type(error).__name__}: "
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
        client: With a gate.
        computation: Of a micro-batch of any size.
        network: What it computes with.
        kind: Of the computation; with the network it says by which kernels it is made.
        chosen: What the server has chosen besides.
    """
    key = json.dumps([kind, *chosen])
    if key in client.rehearsed:
        return client.rehearsed[key]
    size = gate_of(client).allowed.micro_batch_size
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


def check_fields(verb: str, reply: Reply) -> None:
    """Raise RuntimeError when a private reply has a field that may not leave."""
    leaving = {*reply.states, *reply.shares, *reply.metrics}
    listed = VERBS[verb]
    if not (
        set(reply.facts) <= listed.facts
        and leaving <= listed.releases
        and set(reply.digests) <= leaving
    ):
        raise RuntimeError(f"{verb} must not return {sorted({*reply.facts, *leaving})}")


def _splits(text: str) -> tuple[str, ...]:
    return tuple(text.split("+"))


def _steps(amount: Amount) -> int:
    if amount.steps is None:
        raise ConfigError(
            f"refused: epochs={amount.epochs}: a private client takes steps, each of them booked."
        )
    _check_batch(amount.batch_size)
    return amount.steps


def _check_batch(batch_size: int | None) -> None:
    if batch_size is not None:
        raise ConfigError(
            f"refused: batch_size={batch_size}: a private client's batches are those committed to."
        )


def _num_values(request: Request, network: nn.Module | None, kind: str) -> int:
    """Return how many values a release of one kind has, 1 where that is not known yet."""
    if isinstance(request.settings, RewardCandidates):
        return request.settings.count
    if network is None or kind in NUMBERS_OF:
        return NUMBERS_OF.get(kind, 1)
    return sum(tensor.numel() for tensor in network_states(network)[kind].values())


def description_of(request: Request) -> Mapping[str, Any]:
    """Return what the network of a request is built from: the supernet if it says nothing else."""
    settings = request.settings
    described: Mapping[str, Any] | None = None
    if isinstance(settings, Evaluate | TakeNetworkGradient | RewardCandidates):
        described = settings.network
    elif isinstance(settings, Train):
        described = settings.local.network
    elif isinstance(settings, Probe) and settings.training is not None:
        described = settings.training.network
    return {"name": SUPERNET} if described is None else described


def _norm(request: Request, supernet_norm: str | None) -> str | None:
    """Return how the network that a request describes normalises; None without a network."""
    if isinstance(request.settings, TellStatistics):
        return None
    described = description_of(request)
    name = described.get("name", SUPERNET)
    if VERBS[request.verb].of_supernet or name == SUPERNET:
        return supernet_norm
    norm: str | None = described.get("norm", "batch" if name in NORMED_NETWORKS else None)
    return norm


def _norm_of(network: nn.Module) -> str | None:
    norms = nn.modules.batchnorm._BatchNorm
    return "batch" if any(isinstance(m, norms) for m in network.modules()) else None
