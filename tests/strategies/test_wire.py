"""A round whose replies travel rounded, against the same round in float32."""

from __future__ import annotations

import pytest


def round_with(compose_config, federate, wire):
    fed = federate(
        compose_config("rounds=1", "clients=2", "search_space.channels=8", f"wire={wire}")
    )
    fed.courier.wire = wire
    before = {n: p["float32"].clone() for n, p in fed.strategy.states.items()}
    fed.strategy.start(fed.grid, num_rounds=1)
    assert fed.events[-1]["event"] in ("alphas", "round")
    after = {n: p["float32"] for n, p in fed.strategy.states.items()}
    return before, after, fed.courier.bytes_received


@pytest.mark.parametrize(
    ("wire", "bytes_share", "error"), [("float16", 0.52, 2e-3), ("int8", 0.28, 2e-2)]
)
def test_a_rounded_round_is_the_same_but_for_noise(
    compose_config, federate, wire, bytes_share, error
):
    before, exact, whole = round_with(compose_config, federate, "float32")
    _, rounded, received = round_with(compose_config, federate, wire)
    assert received < bytes_share * whole
    update = (exact["weights"] - before["weights"]).norm()
    assert 0 < (rounded["weights"] - exact["weights"]).norm() < error * update
    assert (rounded["alphas"] == exact["alphas"]).all()  # they are short
