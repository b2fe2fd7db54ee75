"""Time of a training step in bfloat16 over that in float32, by the size of the network.

    python scripts/bench_precision.py [--repeats 9]

Networks of one NAS-Bench-201 cell of 3x3 convolutions per stage, or more, trained on made-up images
by plain steps of SGD on one thread; CPU time, medians of pairs. ``training.precision=auto`` takes
bfloat16 from ``LEAST_MULTIPLY_ADDS`` on.
"""

from __future__ import annotations

import argparse
import itertools
import time
from statistics import median

import torch
from torch.nn import functional

from fednas_flwr.models.networks import computes_in_bfloat16
from fednas_flwr.pipeline.later_settings import LEAST_MULTIPLY_ADDS
from fednas_flwr.search.exact_gradients import computed_in
from fednas_flwr.settings.names import BFLOAT16, FLOAT32
from fednas_flwr.spaces.costs import count_multiply_adds
from fednas_flwr.spaces.nasbench201 import OPS, NASBench201Space

SIZES = list(itertools.product((8, 28), (8, 16, 32), (1, 3)))  # side, channels, cells
BATCH = 32


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(f"instructions for bfloat16: {computes_in_bfloat16(torch.device('cpu'))}")
    print(f"auto: from {LEAST_MULTIPLY_ADDS / 1e6:g} M multiply-adds")
    print("image  channels  cells  multiply-adds (M)  float32 (ms)  bfloat16 / float32")
    for side, channels, cells in SIZES:
        space = NASBench201Space(
            input_shape=(1, side, side), num_classes=10, channels=channels, num_cells=cells
        )
        network = space.network(space.genotype([OPS.index("nor_conv_3x3")] * 6))
        cost = count_multiply_adds(network, space.input_shape) / 1e6
        ratios, singles = [], []
        for i in range(repeats + 1):
            single, half = (step(network, side, precision) for precision in (FLOAT32, BFLOAT16))
            if i:  # the first steps set up
                ratios.append(half / single)
                singles.append(1e3 * single)
        print(
            f"{side:5}  {channels:8}  {cells:5}  {cost:17.2f}  {median(singles):12.1f}  "
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def step(network: torch.nn.Module, side: int, precision: str) -> float:
    """CPU seconds of one step."""
    x, y = torch.randn(BATCH, 1, side, side), torch.randint(10, (BATCH,))
    optimizer = torch.optim.SGD(network.train().parameters(), lr=0.05, momentum=0.9)
    began = time.process_time()
    with computed_in(precision, (x, y)):
        loss = functional.cross_entropy(network(x), y)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return time.process_time() - began


if __name__ == "__main__":
    main()
