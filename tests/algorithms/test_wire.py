"""A round whose messages travel rounded, against the same round in float32."""

import pytest
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.protocol.messages import restore_sent, round_sent
from fednas_flwr.protocol.states import pack


def round_with(compose_config, federate, wire, *, sent=None):
    """Return the states before and after a round, and the bytes in both directions.

    ``sent`` are weights to begin with in place of the initial ones.
    """
    own = ("rounds=1", "clients=2", "search_space.channels=8", f"runtime.wire={wire}")
    fed = federate(compose_config(*own))
    fed.cohort.wire = wire
    before = {n: p["float32"].clone() for n, p in fed.strategy.states.items()}
    if sent is not None:
        fed.strategy.states["weights"]["float32"].copy_(sent)
    fed.strategy.start(fed.grid, num_rounds=1)
    assert fed.events[-1]["event"] in ("alphas", "round")
    after = {n: p["float32"] for n, p in fed.strategy.states.items()}
    return before, after, (fed.cohort.bytes_sent, fed.cohort.bytes_received)


WIRES = [("float16", 0.52, 2e-3), ("int8", 0.28, 2e-2)]


@pytest.mark.parametrize(("wire", "bytes_share", "error"), WIRES)
def test_a_rounded_round_is_alike_but_for_noise(compose_config, federate, wire, bytes_share, error):
    """Clients train what rounding leaves; their updates are added to what it was before."""
    before, rounded, few = round_with(compose_config, federate, wire)
    packed = {"weights": {"float32": before["weights"]}}
    sent = restore_sent(round_sent(packed, action="train.search", wire=wire))["weights"]["float32"]
    assert 0 < (sent - before["weights"]).norm() < error * before["weights"].norm()
    _, exact, whole = round_with(compose_config, federate, "float32", sent=sent)
    assert all(own < bytes_share * all_ for own, all_ in zip(few, whole, strict=True))
    update = exact["weights"] - sent
    assert 0 < (rounded["weights"] - before["weights"] - update).norm() < error * update.norm()
    assert (rounded["alphas"] == exact["alphas"]).all()  # they are short


@pytest.mark.parametrize("wire", ["float16", "int8"])
def test_what_a_server_sends_is_rounded_to_the_nearest_value_and_only_to_be_trained(wire):
    weights = {"a": torch.linspace(-3, 5, 300), "b": torch.tensor([1e-9, -2.0])}
    states = {name: pack(weights) for name in ("weights", "moments", "previous_weights")}
    assert round_sent(states, action="evaluate.model", wire=wire) == states
    assert round_sent(states, action="train.weights", wire="float32") == states
    found = restore_sent(round_sent(states, action="train.weights", wire=wire))
    assert all(found[name] is states[name] for name in ("moments", "previous_weights"))
    vector = states["weights"]["float32"]
    steps = torch.stack([block.abs().max() for block in vector.split(256)])
    steps = steps.repeat_interleave(256)[:302] * (1 / 127 if wire == "int8" else 2.0**-10)
    assert bool(((found["weights"]["float32"] - vector).abs() <= steps / 2 * (1 + 1e-5)).all())
    again = round_sent({"weights": found["weights"]}, action="train.weights", wire=wire)
    assert torch.equal(restore_sent(again)["weights"]["float32"], found["weights"]["float32"])


@pytest.mark.parametrize("scales", [[], [1.0], [1.0, 1.0, 1.0]])
def test_a_client_refuses_rounded_weights_without_a_scale_for_each_block(scales):
    sent = {"rounded:int8": torch.ones(257, dtype=torch.int8)}
    if scales:
        sent["scales:float32"] = torch.tensor(scales)
    with pytest.raises(ConfigError, match="weights has 257 rounded values and .* one for each 256"):
        restore_sent({"weights": sent})


@pytest.mark.usefixtures("one_cell")
def test_weights_that_no_candidate_has_trained_travel_as_they_are(compose_config, federate):
    """DPNAS: what is rounded is the difference, which beside all paths is zero."""
    config = compose_config(
        *("algorithm=dpnas", "clients=2", "search_space=dp_cells", "retrain=dp_cells"),
        *("search_space.widths=[8]", "search_space.head=16", "algorithm.batch_size=16"),
        *("algorithm.trained_candidates=1", "algorithm.final_candidates=1", "runtime.wire=int8"),
    )
    fed = federate(config)
    fed.cohort.wire = config.runtime.wire
    before = fed.strategy.named_arrays().to_torch_state_dict()
    before = {name: tensor.clone() for name, tensor in before.items()}
    fed.strategy.start(fed.grid, num_rounds=1)
    after = fed.strategy.named_arrays().to_torch_state_dict()
    kept = {name for name, tensor in before.items() if torch.allclose(tensor, after[name])}
    assert 0.5 * len(before) < len(kept) < len(before)
