"""Published networks fall out of the blocks; a path is the derived network and all that runs."""

import dataclasses

import pytest
import torch

from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.search.candidate import Candidate
from fednas_flwr.settings import conf_folder
from fednas_flwr.spaces.costs import count_parameters
from fednas_flwr.spaces.dp_cells import EDGES, OPS, DPCellSpace
from fednas_flwr.spaces.genotype import load_genotype

from ..refusals import refuses

SMALL = DPCellSpace(input_shape=(2, 8, 8), num_classes=5, widths=(8, 8, 16), head=16)
GREY = {"input_shape": (1, 28, 28), "num_classes": 10}
CIFAR = {"input_shape": (3, 32, 32), "num_classes": 10, "activation": "selu"}


PUBLISHED = [
    ("cifar10", CIFAR | {"widths": (48, 96, 192)}, 529_434),  # Table 1: .53 M
    ("mnist", GREY, 213_418),  # .21 M
    ("fashion_mnist", GREY, 214_570),  # .21 M: seven convolutions in its cell, MNIST's has six
    ("fashion_mnist", GREY | {"widths": (16, 16, 32), "head": 40}, 29_522),  # "-S": .03 M
]


@pytest.mark.parametrize(("name", "sizes", "parameters"), PUBLISHED)
def test_published_cells_have_the_published_size(name, sizes, parameters):
    published = load_genotype(conf_folder() / "genotypes" / f"dpnas_{name}.json")
    network = DPCellSpace(**sizes).network(published)
    assert count_parameters(network) == parameters
    assert network(torch.zeros(2, *sizes["input_shape"])).shape == (2, 10)


def test_the_cell_is_the_sum_and_concatenation_of_the_text():
    """By hand: the cell of section 3.2, written once more without the network's own loop."""
    with seeded(0, "network"):
        network = SMALL.network(SMALL.random_genotype(make_generator(0, "genotype"))).double()
    block, x = network.blocks[1], torch.randn(3, 40, 5, 4, dtype=torch.float64)
    f = {0: block.inputs(x)}
    for j in range(1, 6):
        f[j] = torch.zeros_like(f[0])
        for i in range(j):
            (op,) = block.edges[EDGES.index((i, j))].ops.values() or (None,)
            f[j] = f[j] + (op(f[i]) if op is not None else 0.0)
    expected = torch.nn.functional.max_pool2d(torch.cat([f[j] for j in range(1, 6)], dim=1), 2)
    torch.testing.assert_close(block(x), expected, rtol=0, atol=0)


def test_norms_have_4_groups_in_search_and_8_in_training():
    space = dataclasses.replace(SMALL, widths=(16, 16, 16))
    convolutions = SMALL.genotype([OPS.index("conv_3x3_tanh")] * len(EDGES))
    assert [
        {m.num_groups for m in network.modules() if isinstance(m, torch.nn.GroupNorm)}
        for network in (space.supernet(), space.network(convolutions))
    ] == [{4}, {8}]


def test_only_the_path_runs_and_is_trained():
    with seeded(0, "supernet"):
        supernet = SMALL.supernet()
    path = SMALL.path(SMALL.random_genotype(make_generator(3, "path")))
    ran = set()
    for index, block in enumerate(supernet.body.blocks):
        for number, edge in enumerate(block.edges):
            for name, op in edge.ops.items():
                op.register_forward_hook(lambda *_, key=(index, number, name): ran.add(key))
    candidate = Candidate(supernet, path)
    candidate(torch.randn(2, *SMALL.input_shape)).sum().backward()
    chosen = {(b, e, OPS[op]) for b in range(3) for e, op in enumerate(path) if OPS[op] != "none"}
    assert ran == chosen
    trained = {name for name, w in supernet.named_parameters() if w.grad is not None}
    assert trained == set(candidate.weights())


@pytest.mark.parametrize("path", [[0] * 14, [10] + [0] * 14, [-1] + [0] * 14, [True] * 15])
def test_paths_that_are_none_are_refused(path):
    refuses("a path must be 15 columns of ops", Candidate, SMALL.supernet(), path, error=ValueError)


def test_the_skip_is_trained_with_every_path():
    supernet = dataclasses.replace(SMALL, skip="linear").supernet()
    shared = Candidate(supernet, [0] * len(EDGES)).weights()
    assert {"body.skip.weight", "body.skip.bias"} <= set(shared)
