"""Tables by which the rules of private training were chosen, on held-out images.

    python scripts/tune_recipe.py --root <folder with FashionMNIST> [--variants]

A linear model on scattering features is trained by DP-SGD, with noise calibrated to a budget, for
several numbers of records, clients and steps, rates and walks (``privacy.retrain.noise_walk``).
With ``--variants`` it is trained instead with three ways to bound a record's gradient: clipping;
automatic clipping, which normalises every gradient (Bu et al. 2023, arXiv 2206.07136); and clipping
of the mean gradient of four flipped and shifted copies (augmentation multiplicity, De et al. 2022,
arXiv 2204.13650); and with the mean of the weights after the last four of eight rounds instead of
the last. All images are from Fashion-MNIST's train part, without the 8,000 of the tables
(``dataset.limit_train=8000``). The accuracy is that on 4,000 images that are not trained on, the
mean over draws of images and noise. The script prints a line per setting.

Tensor suffixes: N records, A copies of each, F features with the bias's 1, K classes.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednas_flwr import compose
from fednas_flwr.base.randomness import make_generator
from fednas_flwr.data.features import Scattering
from fednas_flwr.data.loaders import augment
from fednas_flwr.data.prepared import make_data
from fednas_flwr.pipeline.later_settings import LAST_RATE, learning_rate, noise_per_step
from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
from fednas_flwr.privacy.mechanism.accounting import calibrate_noise
from fednas_flwr.privacy.plan import PlannedRelease

DELTA, NORM, MOMENTUM = 1e-5, 0.1, 0.9
HELD_OUT = 4000
TABLED = 8000  # images that the tables of scripts/results train on
DRAWS = 3  # of images and noise
WALKS = (0.12, 0.2, 0.3)
SETTINGS = [  # budget, records, clients
    *((8.0, 8000, 1), (8.0, 8000, 8), (8.0, 1400, 3)),
    *((3.0, 8000, 4), (1.0, 8000, 1), (1.0, 1400, 3)),
]
LENGTHS = [(1 / 8, 50), (1 / 8, 100), (1 / 8, 200), (1 / 4, 100), (1 / 16, 200)]  # rate, steps
RULE = (1 / 8, 200)  # the chosen rate and steps
VARIED = [  # the same, for the ways to bound a gradient
    *((8.0, 8000, 1), (1.0, 8000, 1), (3.0, 8000, 1)),
    *((8.0, 1400, 1), (1.0, 1400, 1)),
]
COPIES, MOST_SHIFT = 4, 2  # copies of a record; pixels
ROUND = 25  # steps, like privacy.retrain.local_steps
STABILITY = 0.01  # added to a norm by automatic clipping, as in Bu et al.


class Variant(NamedTuple):
    """A way to bound a record's contribution to a sum of gradients.

    Attributes:
        name: Name to print.
        factor: Factor of a gradient, given its norm; at most ``NORM`` over the norm.
        copies: If true, a gradient is the mean over flipped and shifted copies.
        averaged: Number of last rounds whose weights are averaged.
    """

    name: str
    factor: Callable[[Tensor], Tensor]
    copies: bool = False
    averaged: int = 1


class Setting(NamedTuple):
    """A training: budget, records, clients, rate at which records are drawn, steps, variant."""

    epsilon: float
    records: int
    clients: int
    rate: float
    steps: int
    variant: Variant


def clipped(norms: Tensor) -> Tensor:
    """Leave gradients that are short enough unchanged."""
    return NORM / norms.clamp_min(NORM)


def normalised(norms: Tensor) -> Tensor:
    """Make all gradients nearly equally long."""
    return NORM / (norms + STABILITY)


CLIPPING = Variant("clipping", clipped)
VARIANTS = (
    CLIPPING,
    Variant("automatic clipping", normalised),
    Variant(f"{COPIES} copies", clipped, copies=True),
    Variant("averaged weights", clipped, averaged=4),
)


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--variants", action="store_true", help="compare bounds of a gradient")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draws = [load(options.root, draw, copies=options.variants) for draw in range(DRAWS)]
    compared = (VARIED, [RULE], VARIANTS) if options.variants else (SETTINGS, LENGTHS, [CLIPPING])
    for of, length, variant in itertools.product(*compared):
        own = Setting(*of, *length, variant)
        sigma = calibrate_noise(
            target_epsilon=own.epsilon,
            delta=DELTA,
            sample_rate=own.rate,
            steps=own.steps,
            accountant=filter_epsilon,
        )
        found = {
            walk: fmean(train(*drawn, own, sigma, walk) for drawn in enumerate(draws))
            for walk in WALKS
        }
        shown = "  ".join(f"{walk:g}: {100 * accuracy:.1f} %" for walk, accuracy in found.items())
        print(
            f"budget {own.epsilon:g}, {own.records} records, {own.clients} clients, rate "
            f"{own.rate:g}, {own.steps} steps, noise multiplier {sigma:.2f}, "
            f"{own.variant.name}; by walk {shown}",
            flush=True,
        )


class Draw(NamedTuple):
    """Scattering features of images [N, A, F] and labels [N], to train on and held out.

    Attributes:
        x: Features of the images, with A = 1.
        copies: Features of flipped and shifted copies; None if they are not needed.
        y: Labels.
        held_out_x: Features [N, F] of images that are not trained on.
        held_out_y: Their labels.
    """

    x: Tensor
    copies: Tensor | None
    y: Tensor
    held_out_x: Tensor
    held_out_y: Tensor


def load(root: Path, draw: int, *, copies: bool) -> Draw:
    """Return scattering features of some train images, on none of which a table is trained."""
    chosen = ("dataset=fashion_mnist", f"dataset.root={root}")
    every, tabled = (
        make_data(compose(*chosen, *limit))[0].train
        for limit in ((), (f"dataset.limit_train={TABLED}",))
    )
    free = np.flatnonzero(~np.isin(every.ids, tabled.ids))
    generator = make_generator(draw, "tune_recipe")
    most = max(records for _, records, _ in SETTINGS)
    order = torch.randperm(len(free), generator=generator)[: most + HELD_OUT]
    rows = torch.from_numpy(free)[order]
    images, y = every.features[rows] / 255, every.labels[rows]
    x, moved = scattered(images), None
    if copies:
        drawn = {"generator": generator, "crop_padding": MOST_SHIFT, "flip": True, "cutout": 0}
        moved = torch.stack([scattered(augment(images[:most], **drawn)) for _ in range(COPIES)], 1)
    return Draw(x[:most, None], moved, y[:most], x[most:], y[most:])


def scattered(images: Tensor) -> Tensor:
    """Return images' features and a 1 for the bias, [N, F]."""
    transform = Scattering((1, 28, 28), scales=2, angles=8)
    with torch.no_grad():
        parts = [transform(own).flatten(1) for own in images.split(64)]
    return torch.cat([torch.cat(parts), torch.ones(len(images), 1)], 1)


def train(draw: int, drawn: Draw, own: Setting, sigma: float, walk: float) -> float:
    """Return the held-out accuracy after DP-SGD by clients that each add their own noise."""
    rate, steps, variant, sent = own.rate, own.steps, own.variant, ("train.weights", "weights")
    plan = PlannedRelease("retrain", *sent, ("train",), rate, steps, NORM, sigma)
    batches = [rate * own.records / own.clients] * own.clients
    noise = noise_per_step(plan, batches, asked=own.clients)
    highest = learning_rate(walk, noise, steps=steps, momentum=MOMENTUM)
    examples = drawn.copies if variant.copies else drawn.x
    assert examples is not None
    weights = torch.zeros(10, examples.shape[-1])
    velocity, generator = torch.zeros_like(weights), make_generator(draw, "steps")
    after_rounds = []
    for step in range(steps):
        rows = torch.rand(own.records, generator=generator) < rate
        x, y = examples[: own.records][rows], drawn.y[: own.records][rows]
        gradient = bounded_sum(x, y, weights, variant.factor) / sum(batches)
        gradient += noise * torch.randn(weights.shape, generator=generator)
        velocity = MOMENTUM * velocity + gradient
        falling = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * step / steps)) / 2
        weights -= falling * highest * velocity
        if (step + 1) % ROUND == 0:
            after_rounds.append(weights.clone())
    weights = torch.stack(after_rounds[-variant.averaged :]).mean(0)
    right = (drawn.held_out_x @ weights.T).argmax(1) == drawn.held_out_y
    return right.double().mean().item()


def bounded_sum(
    x_NAF: Tensor, y_N: Tensor, weights_KF: Tensor, factor: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the sum [K, F] of records' gradients of the cross-entropy, each bounded.

    A record's gradient is ``1/A sum_a r_a x_a'`` with residuals r: the mean over its copies. So its
    squared norm is the mean over all pairs of copies of ``(r_a . r_b) (x_a . x_b)``.
    """
    residuals_NAK = torch.softmax(x_NAF @ weights_KF.T, -1)
    residuals_NAK[torch.arange(len(x_NAF)), :, y_N] -= 1
    pairs_NAA = (residuals_NAK @ residuals_NAK.mT) * (x_NAF @ x_NAF.mT)
    norms_N = pairs_NAA.mean((1, 2)).clamp_min(0).sqrt()
    weighted_NAK = residuals_NAK * (factor(norms_N) / x_NAF.shape[1])[:, None, None]
    return weighted_NAK.flatten(0, 1).T @ x_NAF.flatten(0, 1)


if __name__ == "__main__":
    main()
