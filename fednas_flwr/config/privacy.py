"""Settings of what clients' replies may tell of their records."""

from __future__ import annotations

from dataclasses import dataclass

from fednas_flwr.errors import ConfigError
from fednas_flwr.names import LARGEST_EPSILON, LARGEST_MICRO_BATCH, LEAST_EPSILON
from fednas_flwr.search.settings import check_least, check_range


@dataclass(frozen=True)
class NoPrivacy:
    """``none``: clients return exact gradients, weights and metrics."""

    name: str


@dataclass(frozen=True)
class Noise:
    """Noise on clipped sums of one kind: std ``noise_multiplier * max_grad_norm``, per release.

    Attributes:
        noise_multiplier: Null calibrates it.
        epsilon: What all releases of this kind may cost alone, from which the noise multiplier
            follows; null leaves it to the run's epsilon.
        max_grad_norm: What one record contributes at most.
    """

    noise_multiplier: float | None
    epsilon: float | None
    max_grad_norm: float

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_noise(self)


@dataclass(frozen=True)
class PrivateRetrain:
    """DP-SGD of the derived network: its noise, see :class:`Noise`, and its steps per round."""

    noise_multiplier: float | None
    epsilon: float | None
    max_grad_norm: float
    local_steps: int

    def __post_init__(self) -> None:
        """Check the ranges."""
        _check_noise(self)
        check_range(self.local_steps >= 1, "local_steps", self.local_steps, "1 or more")


def _check_noise(noise: Noise | PrivateRetrain) -> None:
    """Raise ConfigError for a value out of range, or noise that is given in two ways."""
    for key in ("noise_multiplier", "epsilon", "max_grad_norm"):
        value = getattr(noise, key)
        check_range(value is None or value > 0, key, value, "a number above 0")
    if None not in (noise.noise_multiplier, noise.epsilon):
        raise ConfigError(
            f"noise_multiplier={noise.noise_multiplier} with epsilon={noise.epsilon}: the one "
            "follows from the other; set one of them to null."
        )


@dataclass(frozen=True)
class DifferentialPrivacy:
    """``dp``: clients return noised sums of clipped contributions, each booked in its ledger.

    Noise is calibrated as if each release were charged to the splits that it reads only. Where a
    site's data sets share an ``account``, every release is charged to all splits: the client then
    leaves before the end, unless its budget is larger or the noise is given.

    Attributes:
        data_set: The id that the sites' policies give the data.
        epsilon: What the whole run may cost a record, at ``delta``; retraining's noise is
            calibrated to what search and metrics leave of it. Simulated sites get it as budget.
        delta: Above 0, below 1.
        search_share: Share of ``epsilon`` that the noise of weights and alphas is calibrated to
            where it is not given and retraining reads the same split; else all of it.
        rewards_share: Share of ``epsilon`` that the noise of rewards, search and retraining
            together, is calibrated to where that of alphas follows from the rest; else all of it.
        weights: Of the supernet's weights, in the search.
        alphas: Of the architecture variables.
        rewards: Of FEATHERS' trials; a record's decrease of loss is in units of its bound, so that
            the norm is 1.
        retrain: Of the derived network's weights.
        local_steps: Noised steps per round of a local search, and per trial.
        metrics_noise_multiplier: Of losses and accuracies on clients' records, over a norm of 1 per
            record and measurement; null measures none.
        micro_batch_size: Records whose gradients are held at a time, 1 to 1024.
        sites: Folder of the simulated sites' policies, ledgers and keys; null is ``sites`` in the
            run folder, which gives every run budgets of its own.
        test_seed: For tests of simulations: noise that everybody can repeat. No privacy.
    """

    name: str
    data_set: str
    epsilon: float
    delta: float
    search_share: float
    rewards_share: float
    weights: Noise
    alphas: Noise
    rewards: Noise
    retrain: PrivateRetrain
    local_steps: int
    metrics_noise_multiplier: float | None
    micro_batch_size: int
    sites: str | None
    test_seed: int | None

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_range(
            LEAST_EPSILON <= self.epsilon <= LARGEST_EPSILON,
            "privacy.epsilon",
            self.epsilon,
            "a number from .001 to 1e6",
        )
        check_range(0 < self.delta < 1, "privacy.delta", self.delta, "above 0, below 1")
        for key in ("search_share", "rewards_share"):
            share = getattr(self, key)
            check_range(0 < share < 1, f"privacy.{key}", share, "above 0, below 1")
        check_least(self, "privacy", local_steps=1)
        check_range(
            self.rewards.max_grad_norm == 1,
            "privacy.rewards.max_grad_norm",
            self.rewards.max_grad_norm,
            "1: rewards are bounded by algorithm.loss_bound",
        )
        sigma, size = self.metrics_noise_multiplier, self.micro_batch_size
        check_range(
            sigma is None or sigma > 0,
            "privacy.metrics_noise_multiplier",
            sigma,
            "above 0, or null",
        )
        check_range(
            1 <= size <= LARGEST_MICRO_BATCH,
            "privacy.micro_batch_size",
            size,
            f"a whole number from 1 to {LARGEST_MICRO_BATCH}",
        )

    @property
    def search_norms(self) -> dict[str, float]:
        """Clipping norms of a search by kind of release."""
        kinds = ("weights", "alphas", "rewards")
        return {kind: getattr(self, kind).max_grad_norm for kind in kinds}


PRIVACY: dict[str, type] = {"none": NoPrivacy, "dp": DifferentialPrivacy}
