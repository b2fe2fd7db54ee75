from __future__ import annotations

import itertools

import pytest
import torch

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.spaces.nasbench201 import (
    EDGES,
    OPS,
    NASBench201Space,
    ResidualBlock,
    from_arch_string,
    to_arch_string,
)

from ..reference_engine import by

CIFAR = NASBench201Space(input_shape=(3, 32, 32), num_classes=10)
SMALL = NASBench201Space(input_shape=(1, 8, 8), num_classes=10, channels=4, num_cells=1)
NONE = "|none~0|+|none~0|none~1|+|none~0|none~1|none~2|"


def all_of(op):
    return from_arch_string(NONE.replace("none", op))


def test_there_are_15625_cells_and_strings_go_both_ways():
    strings = set()
    for ops in itertools.product(OPS, repeat=len(EDGES)):
        a, b, c, d, e, f = ops
        text = f"|{a}~0|+|{b}~0|{c}~1|+|{d}~0|{e}~1|{f}~2|"
        genotype = from_arch_string(text)
        assert tuple(edge.op for edge in genotype.cells["cell"]) == ops
        assert to_arch_string(genotype) == text
        SMALL.check(genotype)
        strings.add(text)
    assert len(strings) == 15_625


@pytest.mark.parametrize(
    "text",
    [
        "",
        NONE + "\n",
        NONE[:-1],
        NONE.replace("none~2", "none~1"),
        NONE.replace("none~2", "sep_conv_3x3~2"),
        NONE.replace("|none~0|+", "", 1),
        NONE + "+" + NONE,
    ],
)
def test_other_strings_are_refused(text):
    with pytest.raises(ConfigError, match="is not a NAS-Bench-201 cell"):
        from_arch_string(text)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        # Smallest and largest network of the benchmark's tables for CIFAR-10: .073306, 1.531546 M.
        (NONE, 73_306),
        (NONE.replace("none", "nor_conv_3x3"), 1_531_546),
        # .802426 M by the benchmark's own query, as quoted in NATS-Bench, issue 36.
        (
            "|skip_connect~0|+|none~0|nor_conv_3x3~1|"
            "+|avg_pool_3x3~0|nor_conv_3x3~1|nor_conv_3x3~2|",
            802_426,
        ),
    ],
)
def test_networks_have_the_published_number_of_parameters(text, parameters):
    network = CIFAR.network(from_arch_string(text))
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


def test_derive_takes_the_largest_alpha_none_included():
    alphas = torch.zeros(6, 5)
    for edge, op in enumerate([4, 0, 3, 1, 2, 0]):
        alphas[edge, op] = 0.1
    assert to_arch_string(SMALL.derive({"cell": alphas})) == (
        "|avg_pool_3x3~0|+|none~0|nor_conv_3x3~1|+|skip_connect~0|nor_conv_1x1~1|none~2|"
    )


def test_all_skips_give_four_times_the_input():
    # Nodes are 1, 2 and 4 times the input: node = sum over the edges from all earlier nodes.
    network = SMALL.network(all_of("skip_connect")).eval()
    cell = network.skeleton.stages[0][0]
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
    supernet = by("reference", NASBench201Space(**sizes).supernet())  # calls its modules
    shapes = []
    for stage in supernet.body.skeleton.stages:
        for cell in stage:
            cell.register_forward_hook(lambda m, i, out: shapes.append(tuple(out.shape[1:])))
    supernet(torch.randn(2, 3, 28, 28))
    assert shapes == [(2, 28, 28)] * 2 + [(4, 14, 14)] * 2 + [(8, 7, 7)] * 2


@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_residual_block_halves_any_size(size):
    block = ResidualBlock(4, norm="group", affine=False)
    assert block(torch.randn(1, 4, size, size)).shape == (1, 8, -(-size // 2), -(-size // 2))
