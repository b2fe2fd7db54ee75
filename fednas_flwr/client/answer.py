"""The one entrance to all actions, for every runtime."""

from __future__ import annotations

import secrets
from dataclasses import replace

import torch

from fednas_flwr.base.randomness import derive_seed
from fednas_flwr.client.admission import admit, check_fields
from fednas_flwr.client.agreement import begin_sum, masked
from fednas_flwr.client.client import Client
from fednas_flwr.client.handlers import ANSWERS
from fednas_flwr.client.noised_updates import noised_update
from fednas_flwr.privacy.actions import ACTIONS
from fednas_flwr.protocol.messages import Reply, Request
from fednas_flwr.protocol.wire import restore_sent, round_reply
from fednas_flwr.settings.names import CLIENT


def answer(client: Client, request: Request) -> Reply:
    """Return the reply to ``request``, computed with the client's threads and its own randomness.

    It is rounded to what the client's replies travel as, or masked as part of a secure sum. Where
    the request's weights are rounded, they are what the client works with.

    A client with a release guard answers the private actions only. torch's global generator is
    seeded from (seed, stage, round, client, action), for layers that cannot take a generator
    (drop-path,
    dropout), and restored afterwards. In private mode the seed is nobody's: what is drawn per place
    in a batch would be drawn for other records if one more were in it, and whoever knows the
    draws could tell.

    Raises:
        ConfigError: The action is unknown, or the site's policy refuses the request.
        BudgetExceededError: The site's privacy budget does not cover it.
        ValueError: The request does not fit the action.
    """
    planned = {} if client.guard is None else admit(client.guard, request)
    if request.statistics is not None:
        client = client.standardised(request.statistics)
    part = begin_sum(client, request, planned)
    request = replace(request, states=restore_sent(request.states))
    header = request.header
    threads = torch.get_num_threads()
    torch.set_num_threads(client.threads)
    try:
        with torch.random.fork_rng(enabled=True):
            purpose = (header.stage, header.round, client.index, request.action)
            private = client.guard is not None
            seed = secrets.randbits(63) if private else derive_seed(client.seed, *purpose)
            torch.manual_seed(seed)
            reply = _answered(client, request)
        if client.guard is not None:
            check_fields(request.action, reply)
        if part is not None:
            return masked(request, reply, part)
        generator = client.generator(header, "wire", header.phase)
        return round_reply(reply, request, wire=client.wire, generator=generator)
    finally:
        torch.set_num_threads(threads)


def _answered(client: Client, request: Request) -> Reply:
    """Return the action's reply, where the unit of privacy is the client as one noised update."""

    def exact(client: Client) -> Reply:
        return ANSWERS[request.action](client, request, request.settings)

    whole = client.guard is not None and client.guard.allowed.unit == CLIENT
    if whole and not ACTIONS[request.action].is_public:
        return noised_update(client, request, exact)
    return exact(client)
