"""The learning rate by which noise moves every weight as far as it is to."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fednas_flwr.pipeline.later_settings import learning_rate, noise_per_step
from fednas_flwr.privacy.plan import PlannedRelease

RELEASE = PlannedRelease(
    "retrain", "train.weights", "weights", ("train", "validation"), 0.125, 200, 0.1, 1.5
)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clients", [1, 4])
def test_steps_of_mere_noise_move_weights_as_far_as_the_rule_says(momentum, clients):
    """Plain SGD on the mean of clients' noise, each of its own, and on nothing else."""
    torch.manual_seed(0)
    steps, walk = 2000, 0.2
    batches = [64.0] * clients
    noise = noise_per_step(RELEASE, batches, asked=clients)
    lr = learning_rate(walk, noise, steps=steps, momentum=momentum)
    weights = torch.nn.Parameter(torch.zeros(2000))
    optimizer = torch.optim.SGD([weights], lr=lr, momentum=momentum)
    std = 1.5 * 0.1
    for _ in range(steps):
        drawn = std * torch.randn(clients, 2000)
        weights.grad = drawn.sum(0) / sum(batches)
        optimizer.step()
    assert weights.detach().std().item() == pytest.approx(walk, rel=0.1)


@given(st.integers(1, 20), st.floats(1, 1e4), st.floats(0.1, 10), st.floats(0.01, 10))
def test_rates_scale_as_the_noise_does(clients, batch, sigma, norm):
    release = replace(RELEASE, noise_multiplier=sigma, max_grad_norm=norm)
    one = noise_per_step(release, [batch], asked=1)
    many = noise_per_step(release, [batch] * clients, asked=clients)
    assert one == pytest.approx(sigma * norm / batch)
    assert many == pytest.approx(one / math.sqrt(clients))
    release_of_sums = replace(release, shared=True)
    for honest in (clients, 1):  # as few as that have the noise of one client
        told = {"asked": clients, "honest": honest}
        shared = noise_per_step(release_of_sums, [batch] * clients, **told)
        assert shared == pytest.approx(one / math.sqrt(clients * honest))
    some = noise_per_step(release, [batch] * 20 * clients, asked=clients)
    assert some == pytest.approx(many)  # of those who are asked


def test_noise_that_is_not_calibrated_is_no_number():
    with pytest.raises(ValueError, match="not calibrated"):
        noise_per_step(replace(RELEASE, noise_multiplier=None), [1.0], asked=1)
