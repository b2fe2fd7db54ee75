"""Constants of the two optimisers, checked when made; free of torch, so that they load at once.

``conf/`` sets them, strategies send them to clients as JSON, clients make them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fednas_flwr.errors import ConfigError

RULES = ("first_order", "second_order", "mixed_level")


def check_range(condition: bool, key: str, value: object, expected: str) -> None:
    """Raise ConfigError naming key, value and what was expected unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{key}={value} is out of range: expected {expected}.")


@dataclass(frozen=True)
class SGD:
    """Weights: SGD whose learning rate falls along a cosine from ``lr`` to ``min_lr``.

    Attributes:
        lr: Learning rate of the first round, > 0.
        min_lr: Learning rate after the last round, from 0 to ``lr``.
        momentum: From 0 to below 1.
        weight_decay: L2 coefficient, >= 0.
        clip_norm: Largest norm of a batch's mean gradient, > 0; None does not clip.
    """

    lr: float
    min_lr: float
    momentum: float
    weight_decay: float
    clip_norm: float | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(self.lr > 0, "weights.lr", self.lr, "a number above 0")
        check_range(0 <= self.min_lr <= self.lr, "weights.min_lr", self.min_lr, "0 to weights.lr")
        check_range(0 <= self.momentum < 1, "weights.momentum", self.momentum, "0 to below 1")
        check_range(self.weight_decay >= 0, "weights.weight_decay", self.weight_decay, "0 or more")
        check_range(
            self.clip_norm is None or self.clip_norm > 0,
            "weights.clip_norm",
            self.clip_norm,
            "a number above 0, or null",
        )

    def at_round(self, server_round: int, num_rounds: int) -> SGD:
        """Return the constants of one round of ``num_rounds``; rounds count from 1."""
        progress = (server_round - 1) / num_rounds
        lr = self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * progress)) / 2
        return replace(self, lr=lr)


@dataclass(frozen=True)
class Adam:
    """Alphas: Adam with betas (.5, .999) as in DARTS; ``lr`` 0 keeps the alphas as they are."""

    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(self.lr >= 0, "alphas.lr", self.lr, "0 or more")
        check_range(self.weight_decay >= 0, "alphas.weight_decay", self.weight_decay, "0 or more")
