"""Replies that the server reads only as part of a sum: what a client with secure sums sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.client import Client
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.policy import refused
from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.protocol.secure_sum.sum_site import Answer, SumSite
from fednas_flwr.protocol.sum_encoding import MASKED, NOT_TOLD, Summands, sizes_of
from fednas_flwr.protocol.sum_requests import by_text

Plan = Mapping[str, PlannedRelease]  # by kind of release


def sums_of(client: Client) -> SumSite:
    """Return a client's part of secure sums.

    Raises:
        ConfigError: It has none.
    """
    if client.sums is None:
        raise ConfigError("refused: this site takes no part in secure sums.")
    return client.sums


def agreed(client: Client, request: Request, planned: Plan) -> dict[str, Any]:
    """Return all by which a reply is computed and on which the sites of a sum must agree.

    **Rule.** An input of a reply that comes from the server, or that stands in the site's policy or
    data settings and decides how much content or noise the reply has, is in the context of its
    secure sum: masks cancel among sites that agree on all of these, so that no site's value lies
    under less content and noise of others than its own policy and commitment say. Beside these are
    only what each site may have to itself, because no value of it makes others add less, and
    secrets; ``tests/client/test_agreed.py`` lists every input in one of the three.

    Args:
        client: With secure sums.
        request: What is asked.
        planned: The plan of each kind of release by which the site answers; empty without privacy.
    """
    guard = client.guard
    return {
        "request": request.digest,
        "settings": client.settings_digest,
        "releases": {kind: asdict(release) for kind, release in planned.items()},
        "unit": None if guard is None else guard.allowed.unit,
        "secure_noise": guard is None or guard.is_secure,
        "honest": sums_of(client).terms.honest,
        "data": client.data_form,
    }


def begin_sum(client: Client, request: Request, planned: Plan) -> Answer | None:
    """Record that a request is answered, once, before it reads a record.

    Args:
        client: Asked.
        request: What is asked.
        planned: As for :func:`agreed`.

    Returns:
        What masks the reply; None of requests whose replies are public.

    Raises:
        ConfigError: The client has secure sums and is asked for a reply that is none, or the other
            way round; or its policy refuses the exchange.
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
    shared = {kind for kind, release in planned.items() if release.shared}
    if set(summed.ranges) != shared:
        limit = f"of {sorted(shared)}, whose noise is shared"
        raise refused("secure_sum", "ranges", sorted(summed.ranges), limit)
    return sums_of(client).begin(
        run=header.run,
        attempt=summed.attempt,
        stage=header.stage,
        round=header.round,
        phase=header.phase,
        participants=summed.participants,
        agreed=agreed(client, request, planned),
    )


def masked(request: Request, reply: Reply, answer: Answer) -> Reply:
    """Return a reply of which nothing can be read but the layout of its tensors.

    Raises:
        ValueError: A value is not finite, or beyond the range of the sum.
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
