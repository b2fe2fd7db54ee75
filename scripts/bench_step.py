"""Cost of one private search step: engines, Opacus' hooks, peak memory, other networks.

    scripts/bench_step.sh [--quick] [--filling-only]

Steps of one size alternate, so that a slow minute of the machine hits all of them; printed are
medians with quartiles, and medians of the paired ratios, which are what counts, and how many
multiply-adds the plain step makes of those that a matrix product makes in its time. Times are
process CPU time of one thread; memory is what the process's resident set grows by at its peak, each
step in a process of its own. With FEDNAS_DEVICE=cuda steps are on a GPU, in wall time and without
memory.
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from bench import DEVICE, Step, Times, arguments, measure, summary
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.memory import keep_freed_memory
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.privacy.mechanism.clipping import clipped_alpha_gradient_sum, clipped_gradient_sum
from fednas_flwr.search.exact_gradients import BatchGradients
from fednas_flwr.spaces.costs import count_multiply_adds
from fednas_flwr.spaces.darts import DARTSSpace
from fednas_flwr.spaces.mbconv import SKELETONS, MBConvSpace
from fednas_flwr.spaces.nasbench201 import NASBench201Space
from fednas_flwr.spaces.space import Supernet

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.reference_engine import by_ops  # noqa: E402 (from the checkout)

Space = DARTSSpace | NASBench201Space

MAX_NORM = 1.0
CLASSES = 10
PRODUCT = 2048  # rows and columns of a matrix product that shows the peak
S = DARTSSpace(input_shape=(1, 28, 28), num_classes=10, channels=4, num_cells=3, norm="group")
L = DARTSSpace(input_shape=(3, 32, 32), num_classes=10, channels=16, num_cells=8, norm="group")
CELLS_201 = NASBench201Space(
    input_shape=(1, 28, 28), num_classes=10, channels=8, num_cells=1, norm="group"
)
BLOCKS = MBConvSpace(
    input_shape=(3, 32, 32), num_classes=10, skeleton=SKELETONS["small"], norm="group"
)
SIZES: dict[str, tuple[Space, int]] = {
    "S: darts, 28x28x1, C 4, 3 cells, B 16": (S, 16),
    "L: darts, 32x32x3, C 16, 8 cells, B 8": (L, 8),
    "nasbench201, 28x28x1, C 8, N 1, B 16": (CELLS_201, 16),
}
# (sums of steps), (over sums of steps), limit by the size's first letter
RATIOS: tuple[tuple[tuple[str, ...], tuple[str, ...], dict[str, float]], ...] = (
    (("plain, batch norm",), ("reference, batch norm",), {"S": 0.35, "L": 0.45}),
    (("private weights",), ("reference weights",), {"S": 0.60, "L": 0.70}),
    (("private weights",), ("plain weights",), {"S": 1.12, "L": 1.12}),
    (("private alphas",), ("plain alphas",), {"S": 1.10, "L": 1.10}),
    (("private weights", "private alphas"), ("opacus weights", "opacus alphas"), {"S": 0.45}),
)
MEMORY_LIMIT = 1.0
NETWORK_LIMIT, LIMITED = 1.3, "a DARTS network, C 16, 6 cells"  # MBConv's steps are short: 1.5
FILLING_LIMIT = 1.15
FILLED = ((32, 8), (64, 8), (256, 32))  # expected batches of the papers' runs, and micro-batches


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__, repeats=11, told="of S; a third of it of L")
    parser.add_argument("--quick", action="store_true", help="S alone, 3 repeats")
    parser.add_argument("--filling-only", action="store_true", help="measure filling and end")
    options = parser.parse_args()
    keep_freed_memory()  # as processes of clients do
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    if options.filling_only:
        measure_filling(options.repeats)
        return
    for title, (space, batch_size) in SIZES.items():
        repeats = 3 if options.quick else max(3, options.repeats // (3 if space is L else 1))
        times = measure(make_steps(space, batch_size), repeats)
        print_ratios(title, times, repeats)
        multiply_adds = count_multiply_adds(by_ops(make_supernet(space)), space.input_shape)
        made = 3 * batch_size * multiply_adds  # forward, and backward by both factors
        share = made / peak() / statistics.median(times["plain, batch norm"])
        print(f"  {'multiply-adds of the plain step / of a matrix product':<58} {share:.2f}")
        if DEVICE == "cpu":
            print_memory(title, space, batch_size)
        if options.quick:
            return
    measure_networks(options.repeats)
    measure_filling(options.repeats)


def print_ratios(title: str, times: Times, repeats: int) -> None:
    """Print the medians of all steps, and the paired ratios with their limits."""
    print(f"{title}; ms, median [quartiles] of {repeats}")
    for name, seconds in times.items():
        print(f"  {name:<58} {summary(1e3 * seconds, 0)}")
    for upper, lower, limits in RATIOS:
        ratios = np.divide(*(sum(times[name] for name in names) for names in (upper, lower)))
        limit = f"  (limit {limits[title[0]]:.2f})" if title[0] in limits else ""
        print(f"  {' + '.join(upper) + ' / ' + ' + '.join(lower):<58} {summary(ratios, 2)}{limit}")


def make_steps(space: Space, batch_size: int) -> dict[str, Step]:
    """Return the steps to be compared, on one batch and equal parameters."""
    x, y = make_batch(space.input_shape, batch_size)
    reference, fast, *batch_normed = (
        computed(make_supernet(replace(space, norm=norm)))
        for norm in (space.norm, "batch")
        for computed in (by_ops, lambda supernet: supernet)
    )
    private = {"loss": cross_entropy, "max_norm": MAX_NORM}
    weights, alphas = fast.weights(), fast.alphas()
    names = ("reference, batch norm", "plain, batch norm")  # weight steps
    return {
        **{
            name: functools.partial(BatchGradients().weight_gradient_sum, network, (x, y))
            for name, network in zip(names, batch_normed, strict=True)
        },
        "reference weights": lambda: BatchGradients().weight_gradient_sum(reference, (x, y)),
        "plain weights": lambda: BatchGradients().weight_gradient_sum(fast, (x, y)),
        "private weights": lambda: clipped_gradient_sum(fast, x, y, parameters=weights, **private),
        "opacus weights": opacus_step(space, x, y, by_alphas=False),
        "reference alphas": lambda: BatchGradients().alpha_gradient_sum(reference, (x, y)),
        "plain alphas": lambda: BatchGradients().alpha_gradient_sum(fast, (x, y)),
        "private alphas": lambda: clipped_alpha_gradient_sum(fast, x, y, alphas=alphas, **private),
        "opacus alphas": opacus_step(space, x, y, by_alphas=True),
    }


def print_memory(title: str, space: Space, batch_size: int) -> None:
    """Print the peak memory of the weight steps, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    peaks = {}
    for name in ("reference weights", "plain weights", "private weights"):
        with spawn.Pool(1) as pool:
            peaks[name] = pool.apply(peak_memory, (space, batch_size, name))
        print(f"  peak memory, {name:<45} {peaks[name] / 2**20:.0f} MiB")
    limit = f"  (limit {MEMORY_LIMIT:.2f})" if title[0] in "SL" else ""
    for lower in ("reference weights", "plain weights"):
        ratio = peaks["private weights"] / peaks[lower]
        print(f"  {'peak memory, private weights / ' + lower:<58} {ratio:.2f}{limit}")


def peak_memory(space: Space, batch_size: int, name: str) -> int:
    """Return by how many bytes the resident set grows at most during a step (Linux)."""
    torch.set_num_threads(1)
    small = make_steps(space, 1)[name]
    small()  # what kernels and code keep is not the step's
    step = make_steps(space, batch_size)[name]
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM to VmRSS
    step()
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    """Return a size that Linux tells about this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def measure_networks(repeats: int) -> None:
    """Print the private over the non-private step of networks that are not supernets."""
    x, y = make_batch((3, 32, 32), 16)
    with seeded(0, "bench"):
        genotype = S.random_genotype(make_generator(0, "genotype"))
        space = replace(S, input_shape=(3, 32, 32), channels=16, num_cells=6)
        networks = {
            "a DARTS network, C 16, 6 cells": space.network(genotype),
            "MBConv blocks": BLOCKS.network(BLOCKS.random_genotype(make_generator(0, "blocks"))),
        }
    for title, network in networks.items():
        weights = dict(network.train().to(DEVICE).named_parameters())
        steps: dict[str, Step] = {
            "plain": functools.partial(BatchGradients().weight_gradient_sum, network, (x, y)),
            "private": functools.partial(
                *(clipped_gradient_sum, network, x, y),
                loss=cross_entropy,
                parameters=weights,
                max_norm=MAX_NORM,
            ),
        }
        times = measure(steps, repeats)
        ratios = times["private"] / times["plain"]
        text = f"{title}, 32x32x3, B 16: private / plain"
        limit = f"  (limit {NETWORK_LIMIT:.2f})" if title == LIMITED else ""
        print(f"{text:<60} {summary(ratios, 2)}{limit}")


def measure_filling(repeats: int) -> None:
    """Print the weight step of S on Poisson batches with filled micro-batches over unfilled ones.

    Every pair of steps is of a batch of its own.
    """
    supernet = make_supernet(S)
    generator = make_generator(0, "filling")
    for expected, size in FILLED:
        ratios = []
        for _ in range(repeats):
            drawn = int(torch.poisson(torch.tensor(float(expected)), generator=generator))
            x, y = make_batch(S.input_shape, max(1, drawn))

            def summed(x: Tensor, y: Tensor, size: int | None) -> object:
                return clipped_gradient_sum(
                    *(supernet, x, y),
                    loss=cross_entropy,
                    parameters=supernet.weights(),
                    max_norm=MAX_NORM,
                    micro_batch_size=size,
                )

            def unfilled(x: Tensor, y: Tensor, size: int) -> None:
                for part in zip(x.split(size), y.split(size), strict=True):
                    summed(*part, None)

            steps: dict[str, Step] = {
                "filled": functools.partial(summed, x, y, size),
                "unfilled": functools.partial(unfilled, x, y, size),
            }
            times = measure(steps, 1)
            ratios += [*(times["filled"] / times["unfilled"])]
        text = f"expected batch {expected}, micro-batches of {size}: filled / unfilled"
        print(f"{text:<60} {summary(ratios, 2)}  (limit {FILLING_LIMIT:.2f})", flush=True)


def peak() -> float:
    """Return the multiply-adds per second of a large matrix product."""
    matrix = torch.ones(PRODUCT, PRODUCT, device=DEVICE)
    times = measure({"product": lambda: matrix @ matrix}, 5)["product"]
    return PRODUCT**3 / statistics.median(times)


def make_batch(shape: tuple[int, ...], batch_size: int) -> tuple[Tensor, Tensor]:
    """Return normal features and labels, on the device of all steps."""
    generator = make_generator(0, "bench")
    x = torch.randn(batch_size, *shape, generator=generator)
    return x.to(DEVICE), torch.randint(CLASSES, (batch_size,), generator=generator).to(DEVICE)


def make_supernet(space: Space) -> Supernet:
    """Return the same supernet in every call."""
    with seeded(0, "bench"):
        return space.supernet().train().to(DEVICE)


class HookedSupernet(nn.Module):
    """A supernet whose alphas Opacus can see, as a layer from ones [B] to op weights [B, E, O]."""

    def __init__(self, supernet: Supernet, *, by_alphas: bool) -> None:
        """Freeze the alphas or everything else."""
        super().__init__()
        self.body = supernet.body.requires_grad_(not by_alphas)
        self.alphas = nn.ModuleDict({k: OpWeights(a) for k, a in supernet.alphas().items()})
        self.alphas.requires_grad_(by_alphas)
        self.frozen_alphas = not by_alphas

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        if self.frozen_alphas:
            op_weights = {k: a.alphas.softmax(-1) for k, a in self.alphas.items()}
        else:
            op_weights = {k: a(x.new_ones(len(x))) for k, a in self.alphas.items()}
        return self.body(x, op_weights)


class OpWeights(nn.Module):
    """softmax(alphas) for every record."""

    def __init__(self, alphas: Tensor) -> None:
        """Copy the alphas."""
        super().__init__()
        self.alphas = nn.Parameter(alphas.detach().clone())

    def forward(self, ones_B: Tensor) -> Tensor:
        """Return [B, E, O]."""
        return ones_B[:, None, None] * self.alphas.softmax(-1)


def opacus_step(space: Space, x: Tensor, y: Tensor, *, by_alphas: bool) -> Step:
    """Return the step as Opacus' optimizer makes it, on a reference model that keeps its hooks."""
    supernet = by_ops(make_supernet(space))
    model = GradSampleModule(HookedSupernet(supernet, by_alphas=by_alphas), loss_reduction="sum")
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        cross_entropy(model(x), y).sum().backward()
        samples = [p.grad_sample for p in parameters]
        norms_B = torch.stack([g.flatten(1).norm(dim=1) for g in samples], dim=1).norm(dim=1)
        scale_B = (MAX_NORM / (norms_B + 1e-6)).clamp(max=1.0)
        return [torch.einsum("i,i...", scale_B, g) for g in samples]

    return step


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return losses [B]."""
    return F.cross_entropy(logits, y, reduction="none")


if __name__ == "__main__":
    main()
