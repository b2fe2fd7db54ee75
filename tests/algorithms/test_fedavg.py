"""FedAvg and FedProx against a local loop per client and numpy's weighted average."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fednas_flwr.algorithms.fedavg.strategy import LONGER, planned
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.data.loaders import augment, epoch_batches
from fednas_flwr.models.networks import make_network
from fednas_flwr.protocol.states import network_states

from ..refusals import refuses
from .plain import average, copied, make_sgd, rate_of_round, step

ROUNDS = 3


PLAIN = "algorithm=fedavg algorithm.network=plain_cnn"
PROXIMAL = "algorithm=fedprox algorithm.network=plain_cnn algorithm.proximal=2"
AUGMENTED = f"{PLAIN} retrain.unaugmented=0.4 dataset.flip=true dataset.crop_padding=1"


@pytest.fixture(scope="module", params=[PLAIN, AUGMENTED, PROXIMAL])
def trained(search, request):
    sizes = "clients=3 partition=quantity partition.fractions=[0.6,0.25,0.15]"
    steps = "retrain.batch_size=16 retrain.local_epochs=2"
    federation = search(request.param, sizes, steps, rounds=ROUNDS)
    federation.strategy.load_into(federation.network)
    return federation


LENGTHS = [
    (479, (1, 8, 8), 20, 1),  # 15 batches of 32 in a pass
    (479, (1, 16, 16), 20 * LONGER, 1),
    (479, (256,), 20, 1),  # a table, or features
    (150, (13,), 40, 1),
    (128, (13,), 38, 2),  # 8 steps in a round
    (60, (13,), 40, 3),
    (20, (13,), 40, 5),
    (60, (1, 8, 8), 40, 1),
    (60, (3, 32, 32), 40 * LONGER, 1),
    (20_000, (3, 32, 32), 10, 1),
]


@pytest.mark.parametrize(("records", "input_shape", "rounds", "passes"), LENGTHS)
def test_retraining_lasts_as_the_records_ask(compose_config, records, input_shape, rounds, passes):
    config = compose_config("retrain.batch_size=32", "retrain.rounds=7")
    assert planned(config, records, input_shape, 0.0) == config.retrain
    config = replace(config, retrain=replace(config.retrain, rounds=None))
    made = planned(config, records, input_shape, 0.0)
    assert (made.rounds, made.local_epochs) == (rounds, passes)
    config = replace(config, retrain=replace(config.retrain, exchange="gradients"))
    assert planned(config, records, input_shape, 0.0).local_epochs == 1  # their momentum stays


def test_rounds_equal_local_loops_and_a_weighted_average(trained):
    """FedProx has (mu / 2) |w - w_0|^2 beside the loss."""
    config, sgd = trained.config, trained.config.retrain.weights
    mu = config.algorithm.proximal if config.algorithm.name == "fedprox" else 0.0
    with seeded(config.seed, "network"):
        network = make_network(trained.description).train()
    state = copied(network.state_dict())
    # Retraining may use all but the test records.
    counts = [len(c.data.train) + len(c.data.validation) for c in trained.clients]
    losses = []
    for number in range(1, ROUNDS + 1):
        augmented = config.dataset.flip and number == 1  # not in the last 40 % of three rounds
        states, local_losses = [], []
        for client in trained.clients:
            network.load_state_dict(state)
            split = client.split("train+validation")
            generator = make_generator(config.seed, "retrain", number, client.index, "weights")
            optimizer = make_sgd(network.parameters(), sgd, rate_of_round(sgd, number, ROUNDS))
            for _ in range(2):
                total = 0.0
                for rows in epoch_batches(len(split), batch_size=16, generator=generator):
                    x, y = split.batch(rows, "cpu")
                    if augmented:
                        x = augment(x, generator=generator, crop_padding=1, flip=True, cutout=0)
                    loss = torch.nn.functional.cross_entropy(network(x), y)
                    total += loss.item() * len(y)
                    for name, weight in network.named_parameters():
                        loss = loss + mu / 2 * (weight - state[name].float()).square().sum()
                    step(optimizer, loss, sgd.clip_norm)
            local_losses.append(total / len(split))
            states.append(copied(network.state_dict()))
        state = average(states, counts)
        losses.append(np.average(local_losses, weights=counts))
    for name, tensor in trained.network.state_dict().items():
        expected = state[name] if tensor.is_floating_point() else state[name].round()
        torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=1e-3, atol=1e-4)
    rounds = trained.named("round")
    assert [e["metrics"]["train_loss"] for e in rounds] == pytest.approx(losses, rel=1e-4)
    assert rounds[-1]["metrics"]["train_loss"] < rounds[0]["metrics"]["train_loss"]


def test_a_plain_network_has_no_alphas_to_send(trained):
    assert "alphas" not in trained.strategy.states
    states = network_states(trained.network)
    assert set(trained.strategy.states) == {name for name, own in states.items() if own}
    refuses("does not search", trained.strategy.derive, error=ValueError)
    assert "alpha_entropy" not in trained.named("round")[0]["metrics"]
