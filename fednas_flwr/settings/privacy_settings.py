"""Settings of what clients' replies may tell of their records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from fednas_flwr.settings import names
from fednas_flwr.settings.optimizers import LARGEST_NORM, Steps
from fednas_flwr.settings.parser import Between, Checked, OneOf, Text

Epsilon = Annotated[float, Between(names.LEAST_EPSILON, names.LARGEST_EPSILON)]
NoiseMultiplier = Annotated[
    float, Between(names.LEAST_NOISE_MULTIPLIER, names.LARGEST_NOISE_MULTIPLIER)
]
GradNorm = Annotated[
    float, Between(0, LARGEST_NORM, above=True, reason="the noise grows with it, and hides less")
]
Part = Annotated[float, Between(0, 1, above=True, below=True)]
Walk = Annotated[float, Between(0, 1e3, above=True)]
Rate = Annotated[float, Between(0, 1, above=True)]


@dataclass(frozen=True)
class NoPrivacy:
    """``none``: clients return exact gradients, weights and metrics."""

    name: str


@dataclass(frozen=True)
class Noise(Checked):
    """Noise on clipped sums of one kind: std ``noise_multiplier * max_grad_norm``, per release.

    Attributes:
        noise_multiplier: Standard deviation of noise over ``max_grad_norm``; null calibrates it.
        epsilon: Bound of all releases of this kind alone, from which the noise multiplier follows;
            null leaves it to the run's epsilon.
        max_grad_norm: Largest norm of one record's contribution.
    """

    noise_multiplier: NoiseMultiplier | None
    epsilon: Epsilon | None
    max_grad_norm: GradNorm

    def conflicts(self) -> Iterable[tuple[object, str]]:
        """Exclude noise that is given in two ways."""
        yield (
            None not in (self.noise_multiplier, self.epsilon),
            f"noise_multiplier={self.noise_multiplier} with epsilon={self.epsilon}: the one "
            "follows from the other; set one of them to null",
        )


@dataclass(frozen=True)
class PrivateRetrain(Noise):
    """DP-SGD of the derived network: its noise, and its steps per round.

    Attributes:
        local_steps: Noised steps of a client per round.
        rate: Probability with which a step draws each record; null is that of expected batches of
            ``retrain.batch_size``.
        noise_walk: Standard deviation that the noise of all steps gives a weight, from which the
            learning rate follows; null is ``retrain.weights``'.
    """

    local_steps: Steps
    rate: Rate | None
    noise_walk: Walk | None


@dataclass(frozen=True)
class DifferentialPrivacy(Checked):
    """``dp``: clients return noised sums of clipped contributions, each booked in its ledger.

    Noise is calibrated as if each release were charged to the splits that it reads only. Where a
    site's data sets share an ``account``, every release is charged to all splits: the client then
    leaves before the end, unless its budget is larger or the noise is given.

    Attributes:
        data_set: The id that the sites' policies give the data.
        unit: ``record``: one record is protected, or one person with all records where the data
            says whose each is. ``client``: all records of a client. It trains by epochs without
            noise, its whole update is clipped to ``max_grad_norm``, and secure sums share the
            noise. No privacy amplification by client sampling is claimed.
        epsilon: Bound of the whole run for a record, at ``delta``; retraining's noise is calibrated
            to what search and metrics leave of it. Simulated sites get it as budget.
        delta: The probability with which ``epsilon`` need not hold; below 1 / records.
        large_delta: If true, ``delta`` may be 1 / records of a client or more, with which
            publishing one record outright would count as private.
        search_share: Share of ``epsilon`` that the noise of weights and alphas is calibrated to
            where it is not given and retraining reads the same split; else all of it.
        rewards_share: Share of ``epsilon`` that the noise of rewards, search and retraining
            together, is calibrated to where that of alphas follows from the rest; else all of it.
        baseline_share: Share of ``epsilon`` that real sites spend on the baselines of a run
            together, to equal parts, on every split; search, metrics and retraining have the rest,
            and noise that is given must keep to it. Null trains none
            there. Simulated sites have a ledger for each baseline instead.
        weights: Noise on gradients of the supernet's weights, in the search.
        alphas: Noise on gradients of the architecture variables.
        rewards: Noise on rewards of FEATHERS' trials; a record's decrease of loss is in units of
            its bound, so that the norm is 1.
        retrain: Noise on gradients of the derived network's weights.
        local_steps: Noised steps per round of a local search, and per trial.
        rate: Probability with which a step of the search draws each record; null is that of
            expected batches of ``algorithm.batch_size``.
        metrics_noise_multiplier: Noise on losses and accuracies of clients' records, over a norm of
            1 per record and measurement; null measures none.
        statistics_noise_multiplier: Noise on the means and deviations by which clients standardise
            a table: one release of each, within ``dataset.ranges``, over a norm of 1 per record;
            null standardises by the ranges alone.
        fewest_records: Least share of the median client's records that one of three or more clients
            must declare of each split; one that declares fewer is left out. Noise is calibrated to
            the client that needs most.
        micro_batch_size: Records that a simulated site computes at a time, 1 to 1024. A real site's
            own policy says it.
        sites: Folder of the simulated sites' policies, ledgers and keys; null is ``sites`` in the
            run folder, which gives every run budgets of its own.
        test_seed: Seed of noise that everybody can repeat, for tests of simulations. No privacy.
    """

    name: str
    data_set: Text
    unit: Annotated[str, OneOf((names.RECORD, names.CLIENT))]
    epsilon: Epsilon
    delta: Part
    large_delta: bool
    search_share: Part
    rewards_share: Part
    baseline_share: Part | None
    weights: Noise
    alphas: Noise
    rewards: Noise
    retrain: PrivateRetrain
    local_steps: Steps
    rate: Rate | None
    metrics_noise_multiplier: NoiseMultiplier | None
    statistics_noise_multiplier: NoiseMultiplier | None
    fewest_records: Annotated[float, Between(0, 1)]
    micro_batch_size: Annotated[int, Between(1, names.LARGEST_MICRO_BATCH)]
    sites: Text | None
    test_seed: int | None

    def conflicts(self) -> Iterable[tuple[object, str]]:
        """Exclude another norm of rewards."""
        norm = self.rewards.max_grad_norm
        yield (
            norm != 1,
            f"rewards.max_grad_norm={norm} is out of range: expected 1: rewards are bounded by "
            "algorithm.loss_bound",
        )

    @property
    def own_epsilon(self) -> float:
        """Epsilon that is left for the run itself.

        A run of this and baselines of the rest cost ``epsilon`` at most, since the epsilons of
        Renyi filters add up: that of a sum of curves is no more than their sum.
        """
        return self.epsilon * (1 - (self.baseline_share or 0.0))

    @property
    def search_norms(self) -> dict[str, float]:
        """Clipping norms of a search by kind of release."""
        kinds = ("weights", "alphas", "rewards")
        return {kind: getattr(self, kind).max_grad_norm for kind in kinds}


PRIVACY: dict[str, type] = {"none": NoPrivacy, "dp": DifferentialPrivacy}
