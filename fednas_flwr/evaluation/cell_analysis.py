"""Ops of a searched cell of the DP-friendly space, and its variants of one kind of op.

For the tables of ``fednas analyse``; works on paths and genotypes, trains nothing.

Tensor suffixes: N paths, E edges, O ops.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fednas_flwr.search_spaces.dp_cells import DPCellSpace
from fednas_flwr.search_spaces.dp_cells_network import ACTIVATIONS, POOLS
from fednas_flwr.search_spaces.genotype import Genotype

FAMILIES = {  # ops that take each other's place, by the short name of each
    "activations": {f"conv_3x3_{name}": name for name in ACTIVATIONS},
    "pools": {op: op.removesuffix("_pool_3x3") for op in POOLS},
}
FOUND = "found"


def op_shares(paths_NE: Tensor, num_ops: int) -> Tensor:
    """Return for every edge the share of paths that have each op there, float64 [E, O].

    Args:
        paths_NE: Columns of ops, 0 to ``num_ops - 1``, int64; at least one path.
        num_ops: O.
    """
    return torch.nn.functional.one_hot(paths_NE, num_ops).double().mean(0)


def variants(genotype: Genotype) -> dict[str, Genotype]:
    """Return the genotype and, by name, those with all activations or all pools of one kind.

    Cheng et al. (2022), DPNAS, arXiv 2110.08557, Tables 6 and 7. A variant that changes nothing is
    left out, and so are all of a genotype of another space.

    Example:
        >>> space = DPCellSpace(input_shape=(1, 8, 8), num_classes=2)
        >>> list(variants(space.genotype([5, 1] + [3] * 13)))[:3]
        ['found', 'activations-relu', 'activations-tanh']
    """
    found = {FOUND: genotype}
    if genotype.space != DPCellSpace.name:
        return found
    for family, ops in FAMILIES.items():
        for op, short in ops.items():
            changed = _with_one_kind(genotype, ops, op)
            if changed != genotype:
                found[f"{family}-{short}"] = changed
    return found


def _with_one_kind(genotype: Genotype, ops: dict[str, str], op: str) -> Genotype:
    """Return the genotype with ``op`` wherever it has one of ``ops``."""
    cells = {
        kind: tuple(replace(edge, op=op) if edge.op in ops else edge for edge in edges)
        for kind, edges in genotype.cells.items()
    }
    return Genotype(space=genotype.space, cells=cells)
