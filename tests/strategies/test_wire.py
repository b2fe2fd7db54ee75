"""A round whose replies travel rounded, against the same round in float32."""

from __future__ import annotations

import pytest
import torch


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


def test_weights_that_no_candidate_has_trained_travel_as_they_are(compose_config, federate):
    """DPNAS: what is rounded is the difference, which beside all paths is zero."""
    config = compose_config(
        *("algorithm=dpnas", "clients=2", "search_space=dp_cells", "retrain=dp_cells"),
        *("search_space.widths=[8,8,16]", "search_space.head=16", "algorithm.batch_size=16"),
        *("algorithm.trained_candidates=1", "algorithm.final_candidates=1", "wire=int8"),
    )
    fed = federate(config)
    fed.courier.wire = config.wire
    before = fed.strategy.named_arrays().to_torch_state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    fed.strategy.start(fed.grid, num_rounds=1)
    after = fed.strategy.named_arrays().to_torch_state_dict()
    kept = {name for name, tensor in before.items() if torch.allclose(tensor, after[name])}
    assert 0.5 * len(before) < len(kept) < len(before)
