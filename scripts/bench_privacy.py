"""Cost of the private steps, over non-private ones and Opacus hooks, and of the bookkeeping.

    python scripts/bench_privacy.py [--repeats 11]

Prints the CPU time of each step and ratios, medians over repeats with the middle half of them.
Every repeat runs all steps once, and a ratio is taken within a repeat, so that what else the
machine does meets both sides alike. One thread. Bookkeeping is what a run adds to its steps: masks,
noise, the ledger's reservations, and the accountants' numbers for the report.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from opacus import GradSampleModule
from torch import Tensor, nn
from torch.nn import functional as F

from fednas_flwr.privacy.accounting import epsilon_per_split, prv_epsilon, rdp_epsilon
from fednas_flwr.privacy.clipping import clipped_alpha_gradient_sum, clipped_gradient_sum
from fednas_flwr.privacy.gdp import gdp_epsilon
from fednas_flwr.privacy.ledger import Entry, Ledger
from fednas_flwr.privacy.noise import SecureGenerator, add_noise
from fednas_flwr.privacy.renyi import Release
from fednas_flwr.randomness import make_generator, seeded
from fednas_flwr.search.architect import alpha_gradient_sum
from fednas_flwr.search.training import Tally, weight_gradient_sum
from fednas_flwr.search_spaces import DARTSSpace, NASBench201Space
from fednas_flwr.search_spaces.space import Supernet

SIZES: dict[str, tuple[DARTSSpace | NASBench201Space, int]] = {
    "S: darts, 28x28x1, C 4, 3 cells, B 16": (
        DARTSSpace(input_shape=(1, 28, 28), num_classes=10, channels=4, num_cells=3, norm="group"),
        16,
    ),
    "nasbench201, 28x28x1, C 8, N 1, B 16": (
        NASBench201Space(
            input_shape=(1, 28, 28), num_classes=10, channels=8, num_cells=1, norm="group"
        ),
        16,
    ),
}
RATIOS = (
    ("private weights", "plain weights"),
    ("private weights", "opacus weights"),
    ("private alphas", "plain alphas"),
    ("private alphas", "opacus alphas"),
)
MAX_NORM = 1.0
NUM_STEPS = 5000


def main() -> None:
    """Measure all sizes and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    for title, (space, batch_size) in SIZES.items():
        times = measure(make_steps(space, batch_size), repeats)
        print(f"{title}; CPU ms, median [quartiles] of {repeats}")
        for name, seconds in times.items():
            print(f"  {name:<34} {summary([1e3 * s for s in seconds], 0)}")
        for upper, lower in RATIOS:
            paired = [a / b for a, b in zip(times[upper], times[lower], strict=True)]
            print(f"  {upper + ' / ' + lower:<34} {summary(paired, 2)}")
        measure_bookkeeping(space, times)


def measure_bookkeeping(
    space: DARTSSpace | NASBench201Space, times: dict[str, list[float]]
) -> None:
    """Book, draw and account for a run of 5,000 steps; print its share of the steps' own time."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger" / "ledger.sqlite", Path(folder) / "key")
        generator = SecureGenerator()
        release = Release(noise_multiplier=1.0, sample_rate=0.02, steps=1)
        entry = Entry(
            *("account", "records", "run", "search", 1, "train.weight_gradient:weights"),
            splits=("train",),
            release=release,
            committed_steps=NUM_STEPS,
        )
        start = time.perf_counter()  # the wall, which counts the disk's time
        for _ in range(NUM_STEPS):
            ledger.reserve(entry, epsilon=100.0, delta=1e-5)
        seconds["ledger"] = time.perf_counter() - start
        start = time.perf_counter()
        rows = ledger.entries()
        for accountant in (prv_epsilon, rdp_epsilon, gdp_epsilon):
            epsilon_per_split([(r.entry.release, r.entry.splits) for r in rows], 1e-5, accountant)
        seconds["accounting"] = time.perf_counter() - start
        ledger.close()
    with seeded(0, "bench"):
        size = sum(weight.numel() for weight in space.supernet().weights().values())
    start = time.perf_counter()
    for _ in range(20):
        generator.poisson_mask(1000, probability=0.02)
        total = torch.zeros(size, dtype=torch.float64)
        add_noise(total, generator, noise_multiplier=1.0, max_grad_norm=1.0)
    seconds["masks and noise"] = (time.perf_counter() - start) / 20 * NUM_STEPS
    steps = NUM_STEPS * statistics.median(times["private weights"])
    print(f"  {NUM_STEPS} private weight steps: {steps:.0f} s; of that")
    for name, value in seconds.items():
        print(f"  {name:<34} {value:.1f} s, {value / steps:.2%}")
    share = (seconds["ledger"] + seconds["accounting"]) / steps
    print(f"  {'ledger and accounting':<34} {share:.2%} (limit 2 %)")


def make_steps(
    space: DARTSSpace | NASBench201Space, batch_size: int
) -> dict[str, Callable[[], object]]:
    """Return the steps to be compared, on one supernet and one batch."""
    generator = make_generator(0, "bench")
    x = torch.randn(batch_size, *space.input_shape, generator=generator)
    y = torch.randint(10, (batch_size,), generator=generator)
    with seeded(0, "bench"):
        supernet = space.supernet()
    weights, alphas = supernet.weights(), supernet.alphas()
    clip = {"loss": cross_entropy, "max_norm": MAX_NORM}
    return {
        "plain weights": lambda: weight_gradient_sum(supernet, (x, y), Tally()),
        "private weights": lambda: clipped_gradient_sum(supernet, x, y, parameters=weights, **clip),
        "opacus weights": opacus_step(space, x, y, by_alphas=False),
        "plain alphas": lambda: alpha_gradient_sum(supernet, (x, y)),
        "private alphas": lambda: clipped_alpha_gradient_sum(supernet, x, y, alphas=alphas, **clip),
        "opacus alphas": opacus_step(space, x, y, by_alphas=True),
    }


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


def opacus_step(
    space: DARTSSpace | NASBench201Space, x: Tensor, y: Tensor, *, by_alphas: bool
) -> Callable[[], object]:
    """Return the step as Opacus' optimizer makes it, on a model that keeps its hooks."""
    with seeded(0, "bench"):
        model = GradSampleModule(
            HookedSupernet(space.supernet(), by_alphas=by_alphas), loss_reduction="sum"
        )
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


def measure(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Return the CPU seconds of every step in every repeat, after one repeat that is not counted.

    Every other repeat runs the steps in the opposite order.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name in list(steps)[:: 1 if repeat % 2 else -1]:
            start = time.process_time()
            steps[name]()
            if repeat > 0:
                times[name].append(time.process_time() - start)
    return times


def summary(values: list[float], decimals: int) -> str:
    """Return ``median [lower quartile, upper quartile]``."""
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{decimals}f} [{lower:.{decimals}f}, {upper:.{decimals}f}]"


if __name__ == "__main__":
    main()
