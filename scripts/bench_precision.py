"""Time of training a fixed network, over a bare loop of PyTorch, and of bfloat16 over float32.

    python scripts/bench_precision.py [--repeats 9]

The networks have one or more NAS-Bench-201 cells of 3x3 convolutions per stage, or DARTS' cells or
MBConv blocks, whose convolutions are grouped. They are trained on made-up images by steps of SGD on
one thread, taken by a client or by a loop of ten lines. Numbers are CPU time, medians of pairs.
``training.precision=auto`` takes bfloat16 from ``LEAST_MULTIPLY_ADDS`` on, and never with grouped
convolutions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch
from bench import Step, arguments, measure, spread
from torch.nn import functional

from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.loaders import Split, epoch_batches
from fednas_flwr.models.networks import computes_in_bfloat16
from fednas_flwr.pipeline.later_settings import LEAST_MULTIPLY_ADDS
from fednas_flwr.search.exact_gradients import ExactGradients
from fednas_flwr.search.objective import Batch
from fednas_flwr.search.optimizer_step import Optimizer, train, trainable_weights
from fednas_flwr.settings.names import BFLOAT16, FLOAT32
from fednas_flwr.spaces.costs import count_multiply_adds
from fednas_flwr.spaces.darts import DARTSSpace
from fednas_flwr.spaces.mbconv import SKELETONS, MBConvSpace
from fednas_flwr.spaces.nasbench201 import OPS, NASBench201Space
from fednas_flwr.spaces.space import SearchSpace

SIZES = list(itertools.product((8, 28), (8, 16, 32), (1, 3)))  # side, channels, cells
OF_IMAGES = {"input_shape": (1, 28, 28), "num_classes": 10}
GROUPED = {
    "DARTS' cells, C 20": DARTSSpace(**OF_IMAGES, channels=20, num_cells=3),
    "MBConv blocks": MBConvSpace(**OF_IMAGES, skeleton=SKELETONS["small"]),
}
BATCH, STEPS = 32, 8
SGD_SETTINGS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 3e-4}


def main() -> None:
    """Measure and print."""
    repeats = arguments(__doc__, repeats=9).parse_args().repeats
    print(f"instructions for bfloat16: {computes_in_bfloat16(torch.device('cpu'))}")
    print(f"auto: from {LEAST_MULTIPLY_ADDS / 1e6:g} M multiply-adds")
    print(
        "network               image  multiply-adds (M)  bare (ms)  of a client / bare  "
        "bfloat16 / bare"
    )
    for name, space, network in networks():
        cost = count_multiply_adds(network, space.input_shape) / 1e6
        split = made_up(side := space.input_shape[1])
        steps: dict[str, Step] = {
            "bare": partial(in_a_loop, network, split),
            **{p: partial(of_a_client, network, split, p) for p in (FLOAT32, BFLOAT16)},
        }
        times = measure(steps, repeats)
        bare_ms = 1e3 * median(times["bare"]) / STEPS
        ratios = [spread(times[p] / times["bare"], 2) for p in (FLOAT32, BFLOAT16)]
        print(f"{name:20}  {side:5}  {cost:17.2f}  {bare_ms:9.1f}  {ratios[0]}  {ratios[1]}")


def networks() -> Iterator[tuple[str, SearchSpace, torch.nn.Module]]:
    """Networks with their names and spaces."""
    for side, channels, cells in SIZES:
        sizes = {"input_shape": (1, side, side), "num_classes": 10, "channels": channels}
        space = NASBench201Space(**sizes, num_cells=cells)
        network = space.network(space.genotype([OPS.index("nor_conv_3x3")] * 6))
        yield f"C {channels}, {cells} cells", space, network
    for name, grouped in GROUPED.items():
        yield name, grouped, grouped.network(grouped.random_genotype(make_generator(0, "bench")))


def made_up(side: int) -> Split:
    """Images for some batches, and random classes."""
    images = torch.randint(256, (STEPS * BATCH, 1, side, side), dtype=torch.uint8)
    rows = torch.arange(len(images))
    return Split(images, torch.randint(10, rows.shape), rows, (0.3,), (0.4,))


def in_a_loop(network: torch.nn.Module, split: Split) -> None:
    """Train with the steps of a bare loop."""
    optimizer = torch.optim.SGD(network.train().parameters(), **SGD_SETTINGS)
    for rows in torch.randperm(len(split)).split(BATCH):
        x = (split.features[rows].float() / 255 - split.mean[0]) / split.std[0]
        loss = functional.cross_entropy(network(x), split.labels[rows])
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()


def of_a_client(network: torch.nn.Module, split: Split, precision: str) -> None:
    """Train with the steps of a client."""
    sgd = torch.optim.SGD(network.parameters(), **SGD_SETTINGS)
    weights = Optimizer(trainable_weights(network), sgd)
    generator = make_generator(0)

    def batches() -> Iterator[Batch]:
        for rows in epoch_batches(len(split), batch_size=BATCH, generator=generator):
            yield split.batch(rows, "cpu")

    train(network, ExactGradients(batches, precision=precision), weights)


if __name__ == "__main__":
    main()
