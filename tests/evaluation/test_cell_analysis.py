"""Shares of ops against a count by hand, and variants against the words of their names."""

from __future__ import annotations

import torch

from fednas_flwr.evaluation.cell_analysis import op_shares, variants
from fednas_flwr.search_spaces import DARTSSpace, DPCellSpace

SPACE = DPCellSpace(input_shape=(1, 8, 8), num_classes=2)


def test_shares_are_counts_over_paths():
    shares = op_shares(torch.tensor([[0, 2], [0, 1], [1, 2], [0, 2]]), 3)
    assert shares.tolist() == [[0.75, 0.25, 0.0], [0.0, 0.25, 0.75]]


def test_a_variant_changes_the_ops_of_one_family_and_no_other():
    path = [*range(10), 4, 1, 1, 5, 9]
    made = variants(SPACE.genotype(path))
    kinds = ("relu", "selu", "tanh", "linear", "hardtanh", "sigmoid")
    assert list(made) == [
        "found",
        *(f"activations-{kind}" for kind in kinds),
        *("pools-max", "pools-avg"),
    ]
    assert SPACE.path(made["found"]) == path
    for column, kind in enumerate(kinds, start=4):
        expected = [column if op >= 4 else op for op in path]
        assert SPACE.path(made[f"activations-{kind}"]) == expected
    for column, kind in ((1, "max"), (2, "avg")):
        expected = [column if op in (1, 2) else op for op in path]
        assert SPACE.path(made[f"pools-{kind}"]) == expected


def test_what_changes_nothing_is_no_variant():
    assert list(variants(SPACE.genotype([0, 3, 1] * 5))) == ["found", "pools-avg"]
    darts = DARTSSpace(input_shape=(3, 8, 8), num_classes=2, channels=2, num_cells=3)
    assert list(variants(darts.random_genotype(torch.Generator()))) == ["found"]
