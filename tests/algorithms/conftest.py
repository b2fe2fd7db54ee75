"""Federations that have searched."""

import pytest

from ..asked import spied


@pytest.fixture(scope="session")
def search(compose_config, federate):
    """``search(*overrides)``: a federation after some rounds, and what its clients were ``asked``.

    The strategy gets ``change(exchange, client, reply)`` in a reply's place.
    """

    def searched(*overrides, rounds=1, change=None, checkpoints=None):
        federation = federate(compose_config(*overrides), checkpoints=checkpoints)
        federation.asked = spied(federation, change)
        federation.strategy.start(federation.grid, num_rounds=rounds)
        return federation

    return searched
