import pytest
import torch

from fednas_flwr.report.lookup import read_cell
from fednas_flwr.spaces.nasbench201 import OPS, NASBench201Space

from ..reference_engine import by_ops

CIFAR = NASBench201Space(input_shape=(3, 32, 32), num_classes=10)
SMALL = NASBench201Space(input_shape=(1, 8, 8), num_classes=10, channels=4, num_cells=1)
NONE = "|none~0|+|none~0|none~1|+|none~0|none~1|none~2|"


def cell(text):
    return SMALL.genotype(OPS.index(op) for op in read_cell(text))


def all_of(op):
    return cell(NONE.replace("none", op))


PUBLISHED = [
    # Smallest and largest network of the benchmark's tables for CIFAR-10: .073306, 1.531546 M.
    (NONE, 73_306),
    (NONE.replace("none", "nor_conv_3x3"), 1_531_546),
    # .802426 M by the benchmark's own query, as quoted in NATS-Bench, issue 36.
    (
        "|skip_connect~0|+|none~0|nor_conv_3x3~1|+|avg_pool_3x3~0|nor_conv_3x3~1|nor_conv_3x3~2|",
        802_426,
    ),
]


@pytest.mark.parametrize(("text", "parameters"), PUBLISHED)
def test_networks_have_the_published_number_of_parameters(text, parameters):
    network = CIFAR.network(cell(text))
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_all_skips_give_four_times_the_input():
    # Nodes are 1, 2 and 4 times the input: node = sum over the edges from all earlier nodes.
    cell = SMALL.network(all_of("skip_connect")).eval().skeleton.stages[0][0]
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(cell(x, 0.0), 4 * x)


def test_drop_path_spares_identities():
    network = SMALL.network(all_of("skip_connect"))
    x = torch.randn(4, 1, 8, 8)
    before = network(x)
    network.drop_path_prob = 0.9
    assert torch.equal(network(x), before)


def test_stages_double_the_channels_and_halve_the_size():
    sizes = {"input_shape": (3, 28, 28), "num_classes": 10, "channels": 2, "num_cells": 2}
    supernet = by_ops(NASBench201Space(**sizes).supernet())  # calls its modules
    shapes = []
    for stage in supernet.body.skeleton.stages:
        for cell in stage:
            cell.register_forward_hook(lambda m, i, out: shapes.append(tuple(out.shape[1:])))
    supernet(torch.randn(2, 3, 28, 28))
    assert shapes == [(2, 28, 28)] * 2 + [(4, 14, 14)] * 2 + [(8, 7, 7)] * 2
