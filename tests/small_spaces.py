"""A small search space of every kind, and one of drawn paths with its costs."""

import torch

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.spaces.costs import Costs
from fednas_flwr.spaces.darts import DARTSSpace
from fednas_flwr.spaces.dp_cells import DARTSOpsSpace, DPCellSpace
from fednas_flwr.spaces.mbconv import CANDIDATES, SKELETONS, MBConvSpace, Skeleton
from fednas_flwr.spaces.mlp import MLPSpace
from fednas_flwr.spaces.nasbench201 import NASBench201Space

CLASSES = 5
IMAGES = {"input_shape": (3, 8, 8), "num_classes": CLASSES}
SPACES = {
    "dp_cells": DPCellSpace(**IMAGES, widths=(8, 8, 16), head=16),
    "dp_cells_darts": DARTSOpsSpace(**IMAGES, widths=(4, 4, 8), head=8),
    "darts": DARTSSpace(**IMAGES, channels=4, num_cells=3),
    "nasbench201": NASBench201Space(**IMAGES, channels=4, num_cells=1),
    "mlp": MLPSpace(input_shape=(7,), num_classes=CLASSES, channels=8, num_cells=2),
    "mbconv": MBConvSpace(**IMAGES, skeleton=SKELETONS["small"], width=0.5),
}
PROXYLESS = {"skeleton": SKELETONS["small"], "candidates": CANDIDATES["proxyless"]}
WITH_ZERO = MBConvSpace(**IMAGES, width=0.5, **PROXYLESS)

# Two blocks may be zero, the third changes the channels.
PATH_SPACE = MBConvSpace(
    input_shape=(2, 4, 4),
    num_classes=3,
    skeleton=Skeleton(8, 1, 8, ((8, 2), (16, 1)), (3,), 8),
    candidates=("mbconv2_3x3", "mbconv3_5x5", "mbconv3_3x3", "zero"),
    norm="group",
)
PATH_COSTS = Costs("ms", 2.0, [[3.0, 5.0, 4.0, 0.1], [3.0, 6.0, 4.0, 0.1], [2.0, 3.0, 2.5, None]])


def alphas_of(space, seed, scale=1.0):
    """Draw alphas of a space, by kind of cell."""
    generator = make_generator(seed, "alphas")
    return {
        kind: scale * torch.randn(edges, len(space.ops), generator=generator)
        for kind, edges in space.cell_kinds.items()
    }
