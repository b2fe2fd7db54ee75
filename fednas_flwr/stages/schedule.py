"""The schedule of a private run: every kind of release, in order, and the terms of each.

It follows from what the strategies state of each round, the declared numbers of records and the
rounds still to do. :func:`make_schedule` calibrates the noise that is not given
(``calibration.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fednas_flwr.builders.refusals import searches
from fednas_flwr.builders.strategies import retrain_releases, search_releases
from fednas_flwr.config import Config, DifferentialPrivacy
from fednas_flwr.names import CLIENT
from fednas_flwr.privacy.plan import (
    PlannedRelease,
    PrivateStage,
    RoundReleases,
    add_up,
    largest_round,
    metrics_release,
)
from fednas_flwr.stages.calibration import CALIBRATED, calibrated

Schedule = list[PlannedRelease]


def make_schedule(
    config: Config,
    records: Sequence[Mapping[str, int]],
    *,
    done: Mapping[str, int],
    spare: bool = False,
) -> Schedule:
    """Return every kind of release of a run, in order.

    Args:
        config: With ``privacy=dp``.
        records: Each client's declared number of records by split.
        done: Rounds of each stage that a checkpoint covers.
        spare: Whether the largest round of each stage counts once more. The noise is calibrated for
            that: a round that was interrupted is released, and booked, twice.

    Raises:
        ConfigError: What comes before costs more than the target epsilon.
    """
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    sigmas: dict[str, float | None] = {
        **{name: getattr(privacy, name).noise_multiplier for name in CALIBRATED},
        "metrics": privacy.metrics_noise_multiplier,
    }
    # for the whole run, also when it is resumed
    whole = _planned(config, done={}, spare=True)
    for name in CALIBRATED:
        own = [release for release in whole if release.noise_name == name]
        if own and sigmas[name] is None:
            sigmas[name] = calibrated(privacy, name, own, _with_noise(whole, sigmas), records)
    return _with_noise(_planned(config, done=done, spare=spare), sigmas)


def private_stage(
    config: Config, schedule: Sequence[PlannedRelease], stage: str
) -> PrivateStage | None:
    """Return the private terms of a stage, None without privacy."""
    privacy = config.privacy
    if not isinstance(privacy, DifferentialPrivacy):
        return None
    steps = privacy.retrain.local_steps if stage == "retrain" else privacy.local_steps
    return PrivateStage(
        privacy.data_set,
        None if privacy.unit == CLIENT else steps,
        tuple(release for release in schedule if release.stage == stage),
    )


def _planned(config: Config, *, done: Mapping[str, int], spare: bool) -> Schedule:
    """Return the releases of the rounds that are still to do, in the order of the stages."""
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    planned: Schedule = []
    if searches(config):
        planned += _of_rounds(search_releases(config), config.rounds, done.get("search", 0), spare)
    if "retrain" not in config.stages:
        return planned
    retrained = done.get("retrain", 0)
    planned += _of_rounds(retrain_releases(config), config.retrain.rounds, retrained, spare)
    measures = privacy.metrics_noise_multiplier is not None
    if measures and "evaluate" in config.stages and config.dataset.fractions["test"] > 0:
        planned += [metrics_release("evaluate", "test")]
    return planned


def _of_rounds(releases: RoundReleases, num_rounds: int, done: int, spare: bool) -> Schedule:
    """Return what all rounds after ``done`` release, and with ``spare`` the largest once more."""
    rounds = [releases(number, num_rounds) for number in range(done + 1, num_rounds + 1)]
    spared = largest_round(rounds) if spare else []
    return add_up([release for one in rounds for release in one] + spared)


def _with_noise(planned: Sequence[PlannedRelease], sigmas: Mapping[str, float | None]) -> Schedule:
    return [replace(release, noise_multiplier=sigmas[release.noise_name]) for release in planned]
