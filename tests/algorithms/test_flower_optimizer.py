"""FedAdam of a given network, against Flower's."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam

from fednas_flwr.deploy.flower_patches import begin_task

UNEQUAL = ["clients=2", "partition=quantity", "partition.fractions=[0.65,0.35]"]
ADAM = {"tau": 0.01, "beta_1": 0.8, "beta_2": 0.9}


def message_of(reply):
    """A reply as Flower's strategies take it."""
    arrays = {dtype: Array(vector.numpy()) for dtype, vector in reply.states["weights"].items()}
    metrics = MetricRecord({"num-examples": int(reply.num_examples)})
    return Message(RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}), 1, "train")


@pytest.mark.parametrize("network", ["resnet8_4", "plain_cnn"])
def test_rounds_are_those_of_flowers_strategy(network, search):
    federation = search(
        *("algorithm=fedavg", f"algorithm.network={network}", "retrain.batch_size=32", *UNEQUAL),
        *("server_optimizer=adam", "server_optimizer.lr=0.02"),
        *(f"server_optimizer.{name}={value}" for name, value in ADAM.items()),
        rounds=2,
    )
    weights = federation.asked[0][0].states["weights"]
    begin_task(1)
    flower = FedAdam(eta=0.02, **ADAM)
    for number, (_, replies) in enumerate(federation.asked, start=1):
        flower.current_arrays = {d: v.numpy() for d, v in weights.items()}
        arrays, _ = flower.aggregate_train(number, map(message_of, replies.values()))
        weights = {d: torch.from_numpy(arrays[d].numpy()).float() for d in weights}
    torch.testing.assert_close(federation.strategy.states["weights"], weights, rtol=1e-4, atol=1e-5)
    if "buffers" not in federation.strategy.states:
        assert network == "plain_cnn"
        return
    counts = [reply.num_examples for reply in replies.values()]
    buffers = [reply.states["buffers"]["float32"].double() for reply in replies.values()]
    mean = np.average(np.stack(buffers), axis=0, weights=counts)
    found = federation.strategy.states["buffers"]["float32"]
    np.testing.assert_allclose(found, mean, rtol=1e-4, atol=1e-5)


PRIVATE = ["privacy=dp", "privacy.epsilon=30", "clients=5", "runtime.quorum=1"]


TOO = [
    ["algorithm=fedavg", "aggregate=median", "server_optimizer=adam", *PRIVATE],
    ["algorithm=fedprox", "aggregate=trimmed_mean", *PRIVATE],
    ["algorithm=fedavg", "secure_sum=true", "server_optimizer=adam", "clients=4"],
]


@pytest.mark.parametrize("chosen", TOO)
def test_private_runs_and_secure_sums_have_them_too(chosen, finished_run):
    """What the server makes of releases, and a term without records, cost nothing."""
    assert not finished_run(*chosen, "algorithm.network=linear", "retrain.rounds=2").failed
