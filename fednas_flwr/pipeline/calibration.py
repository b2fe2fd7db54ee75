"""Noise that is not given is calibrated to what a run may cost.

To an epsilon of its own, or the search's to its shares of the target epsilon, then retraining's to
what all others leave of it. Noise that is given stands; where baselines have a share of the
epsilon, :func:`check_own_share` refuses what costs more than the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
from fednas_flwr.privacy.mechanism.accounting import calibrate_noise
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.settings import DifferentialPrivacy
from fednas_flwr.settings.privacy_settings import Noise

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
        for declared in _unlike(records):
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


def check_own_share(
    privacy: DifferentialPrivacy,
    planned: Sequence[PlannedRelease],
    records: Sequence[Mapping[str, int]],
) -> None:
    """Refuse given noise with which a run costs more than its baselines leave of epsilon.

    Args:
        privacy: Gives epsilon and the baselines' share; without a share nothing is refused.
        planned: All releases; those with noise that is not known yet do not count.
        records: Each client's declared number of records by split.

    Raises:
        ConfigError: A split of a client would pay more; names the setting and what would fit.
    """
    target, known = privacy.own_epsilon, [p for p in planned if p.noise_multiplier is not None]
    if privacy.baseline_share is None:
        return
    for split in sorted({split for release in known for split in release.splits}):
        reading = [release for release in known if split in release.splits]
        for declared in _unlike(records):
            if (cost := _cost(reading, declared, privacy.delta)) <= target:
                continue
            settings = {name: _given(privacy, name) for name in {p.noise_name for p in reading}}
            alone = {
                name: _cost([p for p in reading if p.noise_name == name], declared, privacy.delta)
                for name, setting in settings.items()
                if setting is not None
            }
            if not alone:  # calibrated noise keeps to it but for rounding
                continue
            dear = max(alone, key=lambda name: alone[name])
            raise ConfigError(
                f"{settings[dear]}: the {split} records of a client that declares "
                f"{declared[split]} of them would pay {cost:.3g} of the {target:.3g} that "
                f"privacy.baseline_share={privacy.baseline_share:g} leaves of privacy.epsilon="
                f"{privacy.epsilon:g} for the run itself: "
                f"{_cure(privacy, dear, planned, records)}, lower privacy.baseline_share, or raise "
                "privacy.epsilon."
            )


def _cost(releases: Sequence[PlannedRelease], declared: Mapping[str, int], delta: float) -> float:
    """Return the epsilon that releases cost a split of a client, as enforcement counts it."""
    return filter_epsilon([release.release(declared) for release in releases], delta)


def metrics_noise(privacy: DifferentialPrivacy, planned: Sequence[PlannedRelease]) -> float | None:
    """Return metrics' noise multiplier: that given, or more where that costs more than epsilon.

    None, with which nothing is measured, where no noise keeps to it. Metrics are of all records of
    a split, so that it does not depend on how many a client has.
    """
    given, steps = privacy.metrics_noise_multiplier, Counter[str]()
    for release in planned:
        if release.noise_name == "metrics":
            steps.update(dict.fromkeys(release.splits, release.steps))
    if given is None or not steps:
        return given
    with suppress(ValueError):
        least = calibrate_noise(
            target_epsilon=privacy.own_epsilon,
            delta=privacy.delta,
            sample_rate=1.0,
            steps=max(steps.values()),
            accountant=filter_epsilon,
        )
        return max(given, least)
    return None


def _unlike(records: Sequence[Mapping[str, int]]) -> Iterable[Mapping[str, int]]:
    """Return the declared numbers of records, without repetitions."""
    return {tuple(sorted(declared.items())): declared for declared in records}.values()


def _given(privacy: DifferentialPrivacy, name: str) -> str | None:
    """Return the setting that gives a kind's noise, with its value; None where it is calibrated."""
    if name in ("metrics", STATISTICS):
        setting = f"{name}_noise_multiplier"
        return f"privacy.{setting}={getattr(privacy, setting):g}"
    noise: Noise = getattr(privacy, name)
    if noise.noise_multiplier is not None:
        return f"privacy.{name}.noise_multiplier={noise.noise_multiplier:g}"
    return None if noise.epsilon is None else f"privacy.{name}.epsilon={noise.epsilon:g}"


def _cure(
    privacy: DifferentialPrivacy,
    name: str,
    planned: Sequence[PlannedRelease],
    records: Sequence[Mapping[str, int]],
) -> str:
    """Return a remedy for the noise of a kind that costs more than the run's epsilon.

    Where other kinds read the same split and their noise is still to be calibrated, this kind may
    fill half of their share.
    """
    if name not in ("metrics", STATISTICS) and getattr(privacy, name).epsilon is not None:
        return "set it to null, with which it has what is left"
    own = [release for release in planned if release.noise_name == name]
    needed = 0.0
    for split in {split for release in own for split in release.splits}:
        mine = [release for release in own if split in release.splits]
        others = [p for p in planned if split in p.splits and p.noise_name != name]
        later = {p.noise_name for p in others if p.noise_multiplier is None}
        filled = min((_share(privacy, kind, split, planned) for kind in later), default=2.0) / 2
        for declared in _unlike(records):
            with suppress(ValueError):  # of others that cost too much alone, whose turn comes next
                least = calibrate_noise(
                    target_epsilon=privacy.own_epsilon * filled,
                    delta=privacy.delta,
                    sample_rate=mine[0].rate(declared),
                    steps=sum(release.steps for release in mine),
                    others=[p.release(declared) for p in others if p.noise_name not in later],
                    accountant=filter_epsilon,
                )
                needed = max(needed, least)
    return f"raise it to {_rounded_up(needed):g}" if needed else "raise it"


def _rounded_up(value: float) -> float:
    """Return the least number of three digits that is no less."""
    unit = 10 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(value / unit) * unit:.6g}")


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
