"""The one entrance to all verbs, for every runtime."""

from __future__ import annotations

import secrets
from dataclasses import replace

import torch

from fednas_flwr.clients.admission import admit, check_fields
from fednas_flwr.clients.client import Client
from fednas_flwr.clients.noised_updates import noised_update
from fednas_flwr.clients.summed import begin_sum, masked
from fednas_flwr.clients.verbs import ANSWERS
from fednas_flwr.exchange.messages import Reply, Request
from fednas_flwr.exchange.wire import restore_sent, round_reply
from fednas_flwr.names import CLIENT
from fednas_flwr.randomness import derive_seed
from fednas_flwr.verbs import VERBS


def answer(client: Client, request: Request) -> Reply:
    """Return the reply to ``request``, computed with the client's threads and its own randomness.

    It is rounded to what the client's replies travel as, or masked as part of a secure sum. Where
    the request's weights are rounded, they are what the client works with.

    A client with a release gate answers the private verbs only. torch's global generator is seeded
    from (seed, stage, round, client, verb), for layers that cannot take a generator (drop-path,
    dropout), and restored afterwards. In private mode the seed is nobody's: what is drawn per place
    in a batch would be drawn for other records if one more were in it, and whoever knows the
    draws could tell.

    Raises:
        ConfigError: The verb is unknown, or the site's policy refuses the request.
        BudgetExceededError: The site's privacy budget does not cover it.
        ValueError: The request does not fit the verb.
    """
    planned = {} if client.gate is None else admit(client.gate, request)
    if request.statistics is not None:
        client = client.standardised(request.statistics)
    part = begin_sum(client, request, planned)
    request = replace(request, states=restore_sent(request.states))
    header = request.header
    threads = torch.get_num_threads()
    torch.set_num_threads(client.threads)
    try:
        with torch.random.fork_rng(enabled=True):
            purpose = (header.stage, header.round, client.index, request.verb)
            private = client.gate is not None
            seed = secrets.randbits(63) if private else derive_seed(client.seed, *purpose)
            torch.manual_seed(seed)
            reply = _answered(client, request)
        if client.gate is not None:
            check_fields(request.verb, reply)
        if part is not None:
            return masked(request, reply, part)
        generator = client.generator(header, "wire", header.phase)
        return round_reply(reply, request, wire=client.wire, generator=generator)
    finally:
        torch.set_num_threads(threads)


def _answered(client: Client, request: Request) -> Reply:
    """Return the verb's reply, where the unit of privacy is the client as one noised update."""

    def exact(client: Client) -> Reply:
        return ANSWERS[request.verb](client, request, request.settings)

    whole = client.gate is not None and client.gate.allowed.unit == CLIENT
    if whole and not VERBS[request.verb].is_public:
        return noised_update(client, request, exact)
    return exact(client)
