"""Table: the noise's walk by which private runs choose their learning rate, on held-out images.

    python scripts/tune_recipe.py --root <folder with FashionMNIST>

A linear model on scattering features by DP-SGD, its noise calibrated to a budget, for several
numbers of records, clients and steps, rates and walks (``privacy.retrain.noise_walk``). All images
are of Fashion-MNIST's train part, without the 8,000 of the tables (``dataset.limit_train=8000``):
the accuracy is that on 4,000 which are not trained on. Prints a line per setting.
"""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednas_flwr import compose
from fednas_flwr.builders.data import make_data
from fednas_flwr.data.scattering import Scattering
from fednas_flwr.privacy.accounting import calibrate_noise
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.recipe import LAST_RATE, learning_rate, noise_per_step
from fednas_flwr.privacy.renyi_filter import filter_epsilon
from fednas_flwr.randomness import make_generator

DELTA, NORM, MOMENTUM = 1e-5, 0.1, 0.9
HELD_OUT = 4000
TABLED = 8000  # images that the tables of scripts/results train on
WALKS = (0.12, 0.2, 0.3)
SETTINGS = [  # budget, records, clients
    *((8.0, 8000, 1), (8.0, 8000, 8), (8.0, 1400, 3)),
    *((3.0, 8000, 4), (1.0, 8000, 1), (1.0, 1400, 3)),
]
LENGTHS = [(1 / 8, 50), (1 / 8, 100), (1 / 8, 200), (1 / 4, 100), (1 / 16, 200)]  # rate, steps


@dataclass(frozen=True)
class Examples:
    """Features and their labels."""

    x: Tensor
    y: Tensor


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    most = max(records for _, records, _ in SETTINGS)
    features = load(options.root, most + HELD_OUT)
    held_out = Examples(features.x[most:], features.y[most:])
    for (epsilon, records, clients), (rate, steps) in itertools.product(SETTINGS, LENGTHS):
        sigma = calibrate_noise(
            target_epsilon=epsilon,
            delta=DELTA,
            sample_rate=rate,
            steps=steps,
            accountant=filter_epsilon,
        )
        part = Examples(features.x[:records], features.y[:records])
        found = [
            train(part, held_out, clients=clients, rate=rate, steps=steps, sigma=sigma, walk=walk)
            for walk in WALKS
        ]
        shown = "  ".join(f"{w:g}: {100 * a:.1f} %" for w, a in zip(WALKS, found, strict=True))
        print(
            f"budget {epsilon:g}, {records} records, {clients} clients, rate {rate:g}, {steps} "
            f"steps, noise multiplier {sigma:.2f}; by walk {shown}",
            flush=True,
        )


def load(root: Path, number: int) -> Examples:
    """Return scattering features of some train images, none of which a table is trained on."""
    chosen = ("dataset=fashion_mnist", f"dataset.root={root}")
    every, tabled = (
        make_data(compose(*chosen, *limit))[0].train
        for limit in ((), (f"dataset.limit_train={TABLED}",))
    )
    free = np.flatnonzero(~np.isin(every.ids, tabled.ids))
    order = torch.randperm(len(free), generator=make_generator(0, "tune_recipe"))[:number]
    rows = torch.from_numpy(free)[order]
    transform = Scattering((1, 28, 28), scales=2, angles=8)
    with torch.no_grad():
        parts = [transform(every.features[own] / 255).flatten(1) for own in rows.split(64)]
    return Examples(torch.cat(parts), every.labels[rows])


def train(
    examples: Examples,
    held_out: Examples,
    *,
    clients: int,
    rate: float,
    steps: int,
    sigma: float,
    walk: float,
) -> float:
    """Return the held-out accuracy after DP-SGD of clients that each add their own noise."""
    plan = PlannedRelease(
        "retrain", "train.weights", "weights", ("train",), rate, steps, NORM, sigma
    )
    batches = [rate * len(examples.y) / clients] * clients
    noise = noise_per_step(plan, batches, asked=clients)
    highest = learning_rate(walk, noise, steps=steps, momentum=MOMENTUM)
    weights = torch.zeros(10, examples.x.shape[1] + 1)
    velocity, generator = torch.zeros_like(weights), make_generator(0, "steps")
    for step in range(steps):
        drawn = torch.rand(len(examples.y), generator=generator) < rate
        x = _with_bias(examples.x[drawn])
        residuals = torch.softmax(x @ weights.T, 1)
        residuals[torch.arange(len(x)), examples.y[drawn]] -= 1
        norms = residuals.norm(dim=1) * x.norm(dim=1)
        gradient = (residuals * (NORM / norms.clamp_min(NORM))[:, None]).T @ x / sum(batches)
        gradient += noise * torch.randn(weights.shape, generator=generator)
        velocity = MOMENTUM * velocity + gradient
        falling = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2
        weights -= falling * highest * velocity
    right = (_with_bias(held_out.x) @ weights.T).argmax(1) == held_out.y
    return right.double().mean().item()


def _with_bias(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1)], 1)


if __name__ == "__main__":
    main()
