import pytest
import torch
from torch import nn

from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters


def test_convolution_counted_by_hand():
    """Every output element sums over kernel and input channels of its group."""
    convolution = nn.Conv2d(6, 8, (3, 5), stride=2, padding=1, groups=2)
    outputs = 8 * 6 * 4  # (11 + 2 - 3) // 2 + 1 rows, (10 + 2 - 5) // 2 + 1 columns
    assert count_multiply_adds(convolution, (6, 11, 10)) == outputs * 3 * 5 * (6 // 2)
    assert count_parameters(convolution) == 8 * 3 * 3 * 5 + 8


def test_dense_layer_counted_by_hand():
    assert count_multiply_adds(nn.Linear(30, 7), (30,)) == 30 * 7
    assert count_parameters(nn.Linear(30, 7)) == 30 * 7 + 7


def test_pooling_norms_and_activations_count_nothing():
    layers = [nn.AvgPool2d(2), nn.BatchNorm2d(3), nn.ReLU()]
    convolution = nn.Conv2d(3, 3, 1)
    assert count_multiply_adds(nn.Sequential(convolution, *layers), (3, 8, 8)) == 9 * 64
    assert count_parameters(nn.BatchNorm2d(3)) == 6  # weight and bias, not the statistics


@pytest.mark.parametrize("training", [True, False])
def test_counting_leaves_the_network_as_it_was(training):
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)).train(training)
    count_multiply_adds(network, (1, 5, 5))
    assert network.training is training
    assert torch.equal(network[1].running_mean, torch.zeros(2))
