"""Replies that the server reads only as part of a sum: what a client with secure sums sends."""

from __future__ import annotations

from dataclasses import replace

import torch

from fednas_flwr.clients.client import Client
from fednas_flwr.errors import ConfigError
from fednas_flwr.exchange.messages import Reply, Request
from fednas_flwr.exchange.secure_sum.site import Answer, SumSite
from fednas_flwr.exchange.sum_requests import by_text
from fednas_flwr.exchange.summands import MASKED, NOT_TOLD, Summands, sizes_of
from fednas_flwr.verbs import VERBS


def sums_of(client: Client) -> SumSite:
    """Return a client's part of secure sums.

    Raises:
        ConfigError: It has none.
    """
    if client.sums is None:
        raise ConfigError("refused: this site takes no part in secure sums.")
    return client.sums


def begin_sum(client: Client, request: Request) -> Answer | None:
    """Record that a request is answered, once, before it reads a record.

    Returns:
        What masks the reply; None of requests whose replies are public.

    Raises:
        ConfigError: The client has secure sums and is asked for a reply that is none, or the other
            way round; or its policy refuses the exchange.
    """
    if VERBS[request.verb].is_public:
        return None
    if request.summed is None:
        if client.sums is not None:
            raise ConfigError(
                "refused by the policy, rule secure_sum: this site's replies are sent as part of a "
                "secure sum only; set secure_sum=true."
            )
        return None
    summed, header = request.summed, request.header
    return sums_of(client).begin(
        run=header.run,
        attempt=summed.attempt,
        stage=header.stage,
        round=header.round,
        phase=header.phase,
        participants=summed.participants,
        request=request.digest,
    )


def masked(client: Client, request: Request, reply: Reply, answer: Answer) -> Reply:
    """Return a reply of which nothing can be read but the layout of its tensors.

    Raises:
        ValueError: A value is not finite, or beyond the range of the sum.
    """
    assert request.summed is not None
    summands = Summands(request.verb, sizes_of(reply.states), request.summed, request.states)
    vectors = summands.encode(reply, projects=client.gate is not None)
    boxes = answer.mask(list(vectors.values()))
    return replace(
        reply,
        num_examples=NOT_TOLD,
        metrics={},
        states={MASKED: {dtype: torch.from_numpy(v) for dtype, v in vectors.items()}},
        facts={"context": answer.context.hex(), "boxes": by_text(boxes)},
    )
