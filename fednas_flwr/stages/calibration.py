"""Noise that is not given is calibrated to what a run may cost.

To an epsilon of its own, or the search's to its shares of the target epsilon, then retraining's to
what all others leave of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fednas_flwr.config import DifferentialPrivacy
from fednas_flwr.errors import ConfigError
from fednas_flwr.privacy.accounting import calibrate_noise
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.renyi import Release
from fednas_flwr.privacy.renyi_filter import filter_epsilon

CALIBRATED = ("rewards", "alphas", "weights", "retrain")  # in this order


def calibrated(
    privacy: DifferentialPrivacy,
    name: str,
    own: Sequence[PlannedRelease],
    planned: Sequence[PlannedRelease],
    records: Sequence[Mapping[str, int]],
) -> float:
    """Return the least noise multiplier with which all clients' splits keep a target.

    Counted as enforcement does, so that the run reaches its last step on a fresh budget.

    Args:
        privacy: Gives the target.
        name: Which noise.
        own: The releases that carry it.
        planned: All releases, those with noise that is known already count as others.
        records: Each client's declared number of records by split.
    """
    needed = 0.0
    splits = sorted({split for release in own for split in release.splits})
    given: float | None = getattr(privacy, name).epsilon
    for split in splits:
        target = given or privacy.own_epsilon * _share(privacy, name, split, planned)
        others = [
            release
            for release in planned
            if release.noise_multiplier is not None
            and split in release.splits
            and given is None
            and (name == "retrain" or release.noise_name != "retrain")
        ]
        for declared in {tuple(sorted(c.items())): c for c in records}.values():
            before = [other.release(declared) for other in others]
            used = filter_epsilon(before, privacy.delta)
            if used >= target:
                named = " and ".join(dict.fromkeys(other.noise_name for other in others))
                raise ConfigError(
                    f"privacy.epsilon={privacy.epsilon:g}: {named} alone cost {used:.3g} of "
                    f"{target:.3g} on the {split} records of a client that declares "
                    f"{declared[split]} of them, which leaves nothing for {name}; raise it, "
                    "privacy.fewest_records or the noise multipliers, or take fewer rounds."
                )
            needed = max(needed, _least_noise(privacy, name, target, own, before, declared))
    return needed


def _least_noise(
    privacy: DifferentialPrivacy,
    name: str,
    target: float,
    own: Sequence[PlannedRelease],
    before: Sequence[Release],
    declared: Mapping[str, int],
) -> float:
    """Return the least noise multiplier with which one client keeps the target."""
    steps = sum(release.steps for release in own)
    try:
        return calibrate_noise(
            target_epsilon=target,
            delta=privacy.delta,
            sample_rate=own[0].rate(declared),
            steps=steps,
            others=before,
            accountant=filter_epsilon,
        )
    except ValueError as error:
        given: float | None = getattr(privacy, name).epsilon
        key = "privacy.epsilon" if given is None else f"privacy.{name}.epsilon"
        value = privacy.own_epsilon if given is None else given
        raise ConfigError(
            f"{key}={value:g}: no noise keeps {name} to the {target:.3g} that it has for {steps} "
            f"steps at privacy.delta={privacy.delta:g}; raise {key}, or take fewer rounds."
        ) from error


def _share(
    privacy: DifferentialPrivacy, name: str, split: str, planned: Sequence[PlannedRelease]
) -> float:
    """Return the share of epsilon up to which a kind of release may fill a split."""
    reading = [release for release in planned if split in release.splits]
    if name == "rewards":
        others = [release for release in reading if release.noise_name != name]
        later = any(release.noise_multiplier is None for release in others)
        return privacy.rewards_share if later else 1.0
    later = any(release.noise_name == "retrain" for release in reading)
    return privacy.search_share if later and name != "retrain" else 1.0
