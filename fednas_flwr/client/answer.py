"""The single entrance to all actions, in every runtime: admission, answer and secure-sum mask.

A private site checks a request against its policy and the run's commitment (:func:`admit`) before
it reads a record. Main function: :func:`answer`.
"""

import secrets
from dataclasses import asdict, replace
from typing import Any, get_type_hints

import torch

from fednas_flwr.base.errors import ConfigError, check_choice
from fednas_flwr.base.randomness import derive_seed, seed_all
from fednas_flwr.client.client import Client
from fednas_flwr.client.handlers import ANSWERS
from fednas_flwr.client.noised_updates import noised_update
from fednas_flwr.client.release_guard import ReleaseGuard, refused_batch_norm
from fednas_flwr.models.noised_scores import BINS
from fednas_flwr.privacy import plan, policy
from fednas_flwr.privacy.actions import ACTIONS, PRIVATE_ACTIONS, SUPERNET
from fednas_flwr.protocol.messages import Reply, Request, restore_sent, round_reply
from fednas_flwr.protocol.requests import Commit
from fednas_flwr.protocol.secure_sum.sum_site import Answer
from fednas_flwr.protocol.sum_encoding import MASKED, NOT_TOLD, Summands, sizes_of
from fednas_flwr.protocol.sum_requests import PROPERTIES, Kinds, by_text
from fednas_flwr.settings.names import CLIENT
from fednas_flwr.settings.optimizers import NORMED_NETWORKS


def answer(client: Client, request: Request) -> Reply:
    """Return the reply to ``request``, computed with the client's threads and its own randomness.

    The reply is rounded to the client's wire format, or masked as part of a secure sum. If the
    request's weights are rounded, the client works with the rounded ones.

    A client with a release guard answers only the private actions. torch's global generator is
    seeded from (seed, stage, round, client, action), for layers that cannot take a generator
    (drop-path, dropout), and restored afterwards. In private mode nobody knows the seed: draws
    belong to places in a batch, and one more record in it would shift them to other records, which
    would show to anyone who knows the draws.

    Raises:
        ConfigError: The action is unknown, or the site's policy refuses the request.
        BudgetExceededError: The site's privacy budget does not cover it.
        ValueError: The request does not fit the action.
    """
    if client.guard is not None and request.planned is None:
        request = admit(client.guard, request)
    if request.statistics is not None:
        client = client.standardised(request.statistics)
    part = begin_sum(client, request)
    request = replace(request, states=restore_sent(request.states))
    header, threads = request.header, torch.get_num_threads()
    torch.set_num_threads(client.threads)
    try:
        with torch.random.fork_rng(enabled=True):
            purpose = (header.stage, header.round, client.index, request.action)
            private = client.guard is not None
            seed_all(secrets.randbits(63) if private else derive_seed(client.seed, *purpose))
            handler, public = ANSWERS[request.action], ACTIONS[request.action].is_public
            if client.guard is not None and client.guard.allowed.unit == CLIENT and not public:
                reply = noised_update(client, request, handler)
            else:
                reply = handler(client, request, request.settings)
        if client.guard is not None:
            check_fields(request.action, reply)
        if part is not None:
            return masked(request, reply, part)
        generator = client.generator(header, "wire", header.phase)
        return round_reply(reply, request, wire=client.wire, generator=generator)
    finally:
        torch.set_num_threads(threads)


def admit(guard: ReleaseGuard, request: Request, *, supernet_norm: str | None = None) -> Request:
    """Return the request with the plan of each kind of release; without plans it releases nothing.

    Called once, before a site loads its records; ``Client.check_network`` follows.

    Args:
        guard: The site's release guard.
        request: The request.
        supernet_norm: Normalisation of the run's supernet, if it is known.

    Raises:
        ConfigError: There is no such private action, or the policy refuses the request.
    """
    action, settings = request.action, request.settings
    check_choice("private action", action, PRIVATE_ACTIONS)
    if request.statistics is not None:  # as public as the weights; standardised_within checks them
        guard.check_action("query.statistics", guard.data_set)
    named = guard.data_set if settings.of_any_site else getattr(settings, "data_set", None)
    guard.check_action(action, named)
    if isinstance(settings, Commit):
        guard.check_plan(settings.releases)
    if ACTIONS[action].is_public:
        return replace(request, planned={})
    if _norm(request, supernet_norm) == "batch":
        raise refused_batch_norm()
    kinds = asked_kinds(request, of_client=guard.allowed.unit == CLIENT)
    planned = {
        kind: guard.admit(
            request.header,
            action,
            kind,
            splits=splits,
            steps=steps,
            num_values={"metrics": 2, "scores": 2 * BINS, "rewards": settings.count}.get(kind, 1),
        )
        for kind, (splits, steps) in kinds.items()
    }
    return replace(request, planned=planned)


def asked_kinds(request: Request, *, of_client: bool = False) -> Kinds:
    """Kinds of release that a private request asks for: splits that are read, number of releases.

    Args:
        request: Request of a private action.
        of_client: True if the client as a whole is the unit of privacy.

    Raises:
        ConfigError: The request asks for something that a private client does not do.
    """
    settings = request.settings
    return (settings.client_releases if of_client else settings.released)(request.action)


def _norm(request: Request, supernet_norm: str | None) -> str | None:
    """Return the kind of normalisation of a request's network; None without a network."""
    if plan.STATISTICS in ACTIONS[request.action].releases:
        return None
    described = request.network
    name = described.get("name", SUPERNET)
    if ACTIONS[request.action].of_supernet or name == SUPERNET:
        return supernet_norm
    return described.get("norm", "batch" if name in NORMED_NETWORKS else None)


def check_fields(action: str, reply: Reply) -> None:
    """Raise RuntimeError if a private reply has a field that must not leave the site."""
    leaving = {*reply.states, *reply.shares, *reply.metrics}
    listed, (_, properties) = ACTIONS[action], PROPERTIES[action]
    if not (
        set(reply.properties) <= set(get_type_hints(properties))
        and leaving <= listed.releases
        and set(reply.digests) <= leaving
    ):
        raise RuntimeError(f"{action} must not return {sorted({*reply.properties, *leaving})}")


def agreed(client: Client, request: Request) -> dict[str, Any]:
    """Return everything that decides a reply and on which the sites of a sum must agree.

    **Rule.** The context of a secure sum holds every input of a reply that comes from the server,
    and every input in the site's policy or data settings that decides how much content or noise the
    reply has. Masks cancel only among sites that agree on all of these, so that no site's value is
    hidden by less content and noise of others than its own policy and commitment say. The only
    other inputs are secrets, and those that each site may choose alone because no value of them
    makes others add less. ``tests/client/test_agreed.py`` lists every input under one of the three.

    Args:
        client: A client with secure sums.
        request: The request, with the plans by which the site answers.
    """
    guard = client.guard
    return {
        "request": request.digest,
        "settings": client.settings_digest,
        "releases": {kind: asdict(release) for kind, release in request.releases.items()},
        "unit": None if guard is None else guard.allowed.unit,
        "secure_noise": guard is None or guard.is_secure,
        "honest": client.part_of_sums.terms.honest,
        "data": client.data_form,
    }


def begin_sum(client: Client, request: Request) -> Answer | None:
    """Record, once and before any record is read, that a request is answered.

    Args:
        client: The client that is asked.
        request: The request; if the client has a guard, as it was admitted.

    Returns:
        The object that masks the reply; None for requests whose replies are public.

    Raises:
        ConfigError: The client has secure sums and is asked for a plain reply, or the other way
            round; or its policy refuses the exchange.
    """
    if ACTIONS[request.action].is_public:
        return None
    if request.summed is None:
        if client.sums is not None:
            raise ConfigError(
                "refused by the policy, rule secure_sum: this site's replies are sent as part of a "
                "secure sum only; set secure_sum=true."
            )
        return None
    summed, header = request.summed, request.header
    shared = {kind for kind, release in request.releases.items() if release.shared}
    if set(summed.ranges) != shared:
        limit = f"of {sorted(shared)}, whose noise is shared"
        raise policy.refused("secure_sum", "ranges", sorted(summed.ranges), limit)
    return client.part_of_sums.begin(
        run=header.run,
        attempt=summed.attempt,
        stage=header.stage,
        round=header.round,
        phase=header.phase,
        participants=summed.participants,
        agreed=agreed(client, request),
    )


def masked(request: Request, reply: Reply, answer: Answer) -> Reply:
    """Return a masked reply, which reveals nothing but the layout of its tensors.

    Raises:
        ValueError: A value is not finite, or outside the range of the sum.
    """
    assert request.summed is not None
    summands = Summands(
        request.action, sizes_of(reply.states, reply.shares), request.summed, request.states
    )
    vectors = summands.encode(reply)
    boxes = answer.mask(list(vectors.values()))
    return replace(
        reply,
        num_examples=NOT_TOLD,
        metrics={},
        states={MASKED: {dtype: torch.from_numpy(v) for dtype, v in vectors.items()}},
        shares={},
        properties={"context": answer.context.hex(), "boxes": by_text(boxes)},
    )
