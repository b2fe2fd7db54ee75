"""Cost of noise, and of bookkeeping over the private weight steps to which it belongs.

    python scripts/bench_privacy.py [--repeats 11] [--noise-only]

Bookkeeping is everything that a run adds to its steps, here those of a DARTS supernet and of
NAS-Bench-201's: masks, noise, the ledger's reservations, and the accountants' numbers.
``bench_step.py`` prints the cost of a step itself. Noise, an exact discrete Gaussian, is compared
with the rounded one of Box and Muller (1958) that it replaced.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from bench import Step, arguments, measure, seconds_of, show, summary
from bench_step import CELLS_201, SIZES, S, Space, make_steps

from fednas_flwr.base.randomness import seeded
from fednas_flwr.privacy.books.ledger import Entry, Ledger
from fednas_flwr.privacy.mechanism.accounting import (
    epsilon_per_split,
    gdp_epsilon,
    prv_epsilon,
    rdp_epsilon,
)
from fednas_flwr.privacy.mechanism.noise import SecureGenerator, _Keystream, add_noise
from fednas_flwr.privacy.mechanism.renyi import Release

NUM_STEPS = 5000
NUM_VALUES = 2_000_000


def main() -> None:
    """Measure all sizes and print."""
    parser = arguments(__doc__, repeats=11)
    parser.add_argument("--noise-only", action="store_true", help="measure noise and end")
    options = parser.parse_args()
    measure_noise(options.repeats)
    if options.noise_only:
        return
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    for title, (space, batch_size) in SIZES.items():
        if space in (S, CELLS_201):
            name = "private weights"
            times = measure({name: make_steps(space, batch_size)[name]}, options.repeats)[name]
            print(f"{title}; a private weight step takes {summary(1e3 * times, 0)} ms of CPU time")
            measure_bookkeeping(space, statistics.median(times))


def measure_noise(repeats: int) -> None:
    """Time both kinds of noise in turns; print CPU seconds per million values and their ratio."""
    shape, generator = (NUM_VALUES,), SecureGenerator()
    draws: dict[str, Step] = {
        "Box and Muller": lambda: box_muller(NUM_VALUES, sigma=2**24),
        "discrete Gaussian": lambda: generator.discrete_gaussian(shape, sigma=2**24 + 1),
    }
    times = measure(draws, repeats)
    print(f"noise; CPU ms per million values, median [quartiles] of {repeats}")
    for name, seconds in times.items():
        show(name, 1e9 * seconds / NUM_VALUES, 0)
    ratios = times["discrete Gaussian"] / times["Box and Muller"]
    show("discrete Gaussian / Box and Muller", ratios, 1)


def box_muller(count: int, *, sigma: int) -> torch.Tensor:
    """Return rounded Gaussians from a 64-bit radius and a 53-bit angle; they are not exact."""
    values, stream = torch.empty(count, dtype=torch.float64), _Keystream(os.urandom(32))
    for chunk in values.split(2**15):
        half = len(chunk) // 2
        words = stream.words(2 * half)
        radius = torch.from_numpy((words[:half] + 0.5) * 2.0**-64).log_().mul_(-2).sqrt_()
        angle = torch.from_numpy((words[half:] >> np.uint64(11)) * (2 * math.pi * 2.0**-53))
        torch.mul(radius, angle.cos(), out=chunk[:half])
        torch.mul(radius, angle.sin_(), out=chunk[half:])
        chunk.mul_(sigma).round_()
    return values


def measure_bookkeeping(space: Space, step_s: float) -> None:
    """Book, draw and account for a run of 5,000 steps; print its share of the steps' own time."""
    generator = SecureGenerator()
    with seeded(0, "bench"):
        size = sum(weight.numel() for weight in space.supernet().weights().values())
    entry = Entry(
        *("account", "records", "run", "search", 1, "train.weight_gradient:weights"),
        splits=("train",),
        release=Release(noise_multiplier=1.0, sample_rate=0.02, steps=1),
        committed_steps=NUM_STEPS,
    )

    def book() -> None:
        for _ in range(NUM_STEPS):
            ledger.reserve(entry, epsilon=100.0, delta=1e-5, assignment="a")

    def account() -> None:
        rows = [(row.entry.release, row.entry.splits) for row in ledger.entries()]
        for accountant in (prv_epsilon, rdp_epsilon, gdp_epsilon):
            epsilon_per_split(rows, 1e-5, accountant)

    def draw() -> None:
        for _ in range(20):
            generator.poisson_mask(1000, probability=0.02)
            total = torch.zeros(size, dtype=torch.float64)
            add_noise(total, generator, noise_multiplier=1.0, max_grad_norm=1.0)

    with tempfile.TemporaryDirectory() as folder:
        with Ledger(Path(folder) / "ledger" / "ledger.sqlite", Path(folder) / "key") as ledger:
            # Wall time, which includes the disk's time.
            booked, accounted, drawn = (seconds_of(step)[1] for step in (book, account, draw))
    steps = NUM_STEPS * step_s
    print(f"  {NUM_STEPS} private weight steps: {steps:.0f} s; of that")
    parts = {"ledger": booked, "accounting": accounted, "masks and noise": drawn / 20 * NUM_STEPS}
    for name, value in parts.items():
        print(f"  {name:<34} {value:.1f} s, {value / steps:.2%}")
    share = (booked + accounted) / steps
    print(f"  {'ledger and accounting':<34} {share:.2%} (limit 2 %)")


if __name__ == "__main__":
    main()
