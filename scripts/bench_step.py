"""Cost of one private search step: engines, Opacus' hooks, filled micro-batches.

    scripts/bench_step.sh [--filling-only]

Steps of one size alternate, so that a slow minute of the machine affects all of them. The script
prints medians with quartiles and, as the main result, medians of the paired ratios. It also prints
the multiply-adds of the plain step as a share of those that a matrix product makes in the same
time. Times are process CPU time of one thread. With FEDNAS_DEVICE=cuda steps run on a GPU, in wall
time.
"""

from __future__ import annotations

import functools
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from bench import DEVICE, Step, Times, arguments, measure, show
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.base.memory import keep_freed_memory
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.privacy.mechanism.clipping import clipped_alpha_gradient_sum, clipped_gradient_sum
from fednas_flwr.search.exact_gradients import BatchGradients
from fednas_flwr.spaces.costs import count_multiply_adds
from fednas_flwr.spaces.darts import DARTSSpace
from fednas_flwr.spaces.nasbench201 import NASBench201Space
from fednas_flwr.spaces.space import Supernet

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.reference_engine import by_ops  # noqa: E402 (from the checkout)

Space = DARTSSpace | NASBench201Space

MAX_NORM = 1.0
CLASSES = 10
PRODUCT = 2048  # rows and columns of the matrix product that measures the peak
S = DARTSSpace(input_shape=(1, 28, 28), num_classes=10, channels=4, num_cells=3, norm="group")
L = DARTSSpace(input_shape=(3, 32, 32), num_classes=10, channels=16, num_cells=8, norm="group")
CELLS_201 = NASBench201Space(
    input_shape=(1, 28, 28), num_classes=10, channels=8, num_cells=1, norm="group"
)
SIZES: dict[str, tuple[Space, int]] = {
    "S: darts, 28x28x1, C 4, 3 cells, B 16": (S, 16),
    "L: darts, 32x32x3, C 16, 8 cells, B 8": (L, 8),
    "nasbench201, 28x28x1, C 8, N 1, B 16": (CELLS_201, 16),
}
# (sum of these steps), (over sum of these), limits by the size's first letter
RATIOS: tuple[tuple[tuple[str, ...], tuple[str, ...], dict[str, float]], ...] = (
    (("plain, batch norm",), ("reference, batch norm",), {"S": 0.35, "L": 0.45}),
    (("private weights",), ("reference weights",), {"S": 0.60, "L": 0.70}),
    (("private weights",), ("plain weights",), {"S": 1.12, "L": 1.12}),
    (("private alphas",), ("plain alphas",), {"S": 1.10, "L": 1.10}),
    (("private weights", "private alphas"), ("opacus weights", "opacus alphas"), {"S": 0.45}),
)
FILLING_LIMIT = 1.15
FILLED = ((32, 8), (64, 8), (256, 32))  # expected batches of the papers' runs, and micro-batches


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__, repeats=11, told="of S; a third of it of L")
    parser.add_argument("--filling-only", action="store_true", help="measure filling and end")
    options = parser.parse_args()
    keep_freed_memory()  # as in processes of clients
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    if not options.filling_only:
        for title, (space, batch_size) in SIZES.items():
            repeats = max(3, options.repeats // (3 if space is L else 1))
            times = measure(make_steps(space, batch_size), repeats)
            print_ratios(title, times, repeats)
            multiply_adds = count_multiply_adds(by_ops(make_supernet(space)), space.input_shape)
            made = 3 * batch_size * multiply_adds  # forward, and backward for both factors
            share = made / (peak() * times["plain, batch norm"])
            show("multiply-adds of the plain step / of a matrix product", share, 2)
    measure_filling(options.repeats)


def print_ratios(title: str, times: Times, repeats: int) -> None:
    """Print the medians of all steps, and the paired ratios with their limits."""
    print(f"{title}; ms, median [quartiles] of {repeats}")
    for name, seconds in times.items():
        show(name, 1e3 * seconds, 0)
    for upper, lower, limits in RATIOS:
        ratios = np.divide(*(sum(times[name] for name in names) for names in (upper, lower)))
        show(" / ".join(map(" + ".join, (upper, lower))), ratios, 2, limit=limits.get(title[0]))


def make_steps(space: Space, batch_size: int) -> dict[str, Step]:
    """Return the steps to compare, on one batch and with equal parameters."""
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


def measure_filling(repeats: int) -> None:
    """Print the weight step of S on Poisson batches with filled micro-batches over unfilled ones.

    Every pair of steps has its own batch.
    """
    supernet = make_supernet(S)
    generator = make_generator(0, "filling")
    for expected, size in FILLED:
        ratios = np.empty(repeats)
        for repeat in range(repeats):
            drawn = int(torch.poisson(torch.tensor(float(expected)), generator=generator))
            batch = make_batch(S.input_shape, max(1, drawn))
            step = functools.partial(
                clipped_gradient_sum,
                supernet,
                loss=cross_entropy,
                parameters=supernet.weights(),
                max_norm=MAX_NORM,
            )
            parts = list(zip(*(values.split(size) for values in batch), strict=True))
            steps: dict[str, Step] = {
                "filled": functools.partial(step, *batch, micro_batch_size=size),
                "unfilled": functools.partial(each, step, parts),
            }
            times = measure(steps, 1)
            ratios[repeat] = (times["filled"] / times["unfilled"]).item()
        name = f"expected batch {expected}, micro-batches of {size}: filled / unfilled"
        show(name, ratios, 2, limit=FILLING_LIMIT)


def each(step: Callable[[Tensor, Tensor], object], parts: list[tuple[Tensor, Tensor]]) -> None:
    """Take a step on every part of a batch."""
    for x, y in parts:
        step(x, y)


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
    """Return the step of Opacus' optimizer, on a reference model that keeps its hooks."""
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
