"""The schedule of a private run: every kind of release, in order, and the terms of each.

It follows from what the strategies state of each round, the declared numbers of records and the
rounds still to do. :func:`make_schedule` calibrates the noise that is not given
(``calibration.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low

from fednas_flwr.algorithms.fdnas import whole_search
from fednas_flwr.algorithms.stage_strategies import releases_by_round
from fednas_flwr.pipeline.calibration import (
    CALIBRATED,
    calibrated,
    check_own_share,
    metrics_noise,
)
from fednas_flwr.privacy.plan import (
    STATISTICS,
    PlannedRelease,
    PrivateStage,
    add_up,
    largest_round,
    metrics_release,
    statistics_release,
)
from fednas_flwr.server.client_sampling import Sampling
from fednas_flwr.settings import Config, DifferentialPrivacy
from fednas_flwr.settings.incompatible import searches
from fednas_flwr.settings.names import CLIENT, LEAST_CALIBRATED

Schedule = list[PlannedRelease]
Turns = Mapping[str, Sequence[int]]  # by stage, the rounds in which a client may be asked


def make_schedule(
    config: Config,
    records: Sequence[Mapping[str, int]],
    *,
    done: Mapping[str, int],
    spare: bool = False,
) -> Schedule:
    """Return every kind of release of a client that is asked in every round, in order.

    See :func:`make_schedules`.
    """
    return make_schedules(config, records, done=done, spare=spare)[0]


def make_schedules(
    config: Config,
    records: Sequence[Mapping[str, int]],
    *,
    done: Mapping[str, int],
    spare: bool = False,
    sampling: Sampling | None = None,
    least_noise: Sequence[float] = (),
) -> list[Schedule]:
    """Return every kind of release of each client, in order: of the rounds that may ask it.

    Args:
        config: With ``privacy=dp``.
        records: Each client's declared number of records by split.
        done: Rounds of each stage that a checkpoint covers.
        spare: Whether the largest round of each stage counts once more. The noise is calibrated for
            that: a round that was interrupted is released, and booked, twice. It is the same for
            all clients, and enough for the one that needs most.
        sampling: Draws whom a round asks; None asks all.
        least_noise: Noise multipliers below which sites refuse a release. None is calibrated below
            that of most, or of two the lower: a site that asks for more leaves, and does not raise
            the noise of all.

    Raises:
        ConfigError: What comes before costs more than the target epsilon, or noise that is given
            more than the baselines leave of it.
    """
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    sigmas: dict[str, float | None] = {
        **{name: getattr(privacy, name).noise_multiplier for name in CALIBRATED},
        "metrics": privacy.metrics_noise_multiplier,
        STATISTICS: privacy.statistics_noise_multiplier,
    }
    least = median_low(least_noise or [LEAST_CALIBRATED])
    rounds = _rounds(config)
    turns = turns_of(config, sampling) if sampling is not None else [whole_turns(config)]
    # for the whole run, also when it is resumed
    wholes = [_of_turns(rounds, own, done={}, spare=True) for own in turns]
    if sampling is None:
        groups = [(wholes[0], records)]
    else:
        groups = [(whole, [own]) for whole, own in _demanding(wholes, records)]
    for name in CALIBRATED:
        for whole, declared in groups:
            check_own_share(privacy, _with_noise(whole, sigmas), declared)
        if sigmas[name] is None:
            needed = [
                calibrated(privacy, name, own, _with_noise(whole, sigmas), declared)
                for whole, declared in groups
                if (own := [release for release in whole if release.noise_name == name])
            ]
            sigmas[name] = max([*needed, least]) if needed else None
    for whole, declared in groups:
        check_own_share(privacy, _with_noise(whole, sigmas), declared)
    return [_with_noise(_of_turns(rounds, own, done=done, spare=spare), sigmas) for own in turns]


def paying(config: Config, epsilon: float) -> DifferentialPrivacy:
    """Return the privacy of a baseline that may cost so much on every split.

    Noise that was given may cost more. That of trainings and rewards is calibrated, and that of
    metrics no less than they need. A table's statistics are not released again:
    those of the run are public.
    """
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    own = replace(
        privacy,
        epsilon=epsilon,
        baseline_share=None,
        rewards=replace(privacy.rewards, noise_multiplier=None, epsilon=None),
        retrain=replace(privacy.retrain, noise_multiplier=None, epsilon=None),
        statistics_noise_multiplier=None,
    )
    whole = _of_turns(_rounds(config), whole_turns(config), done={}, spare=True)
    return replace(own, metrics_noise_multiplier=metrics_noise(own, whole))


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


def whole_turns(config: Config) -> Turns:
    """Return the turns of a client that every round asks."""
    return {stage: range(1, len(rounds) + 1) for stage, rounds in _rounds(config).items()}


def turns_of(config: Config, sampling: Sampling) -> list[Turns]:
    """Return each client's turns, those in which it stands by among them."""
    turns: list[dict[str, list[int]]] = [{} for _ in range(config.clients)]
    for stage, rounds in _rounds(config).items():
        for number in range(1, len(rounds) + 1):
            for client in sampling.participants(stage, number).candidates:
                turns[client].setdefault(stage, []).append(number)
    return list(turns)


def largest_schedule(schedules: Iterable[Schedule]) -> Schedule:
    """Return of each kind of release that of the client that makes most of them."""
    return largest_round(list(schedules))


def _rounds(config: Config) -> dict[str, list[list[PlannedRelease]]]:
    """Return the releases of each round for a client that takes part in it, by stage."""
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    config = whole_search(config)  # whose clients commit to their groups' rounds, too
    rounds: dict[str, list[list[PlannedRelease]]] = {}
    if privacy.statistics_noise_multiplier is not None:
        rounds[STATISTICS] = [[statistics_release()]]
    if searches(config):
        rounds["search"] = releases_by_round(config, "search", config.rounds)
    if "retrain" not in config.stages:
        return rounds
    rounds["retrain"] = releases_by_round(config, "retrain", config.retrain.rounds)
    measures = privacy.metrics_noise_multiplier is not None
    if measures and "evaluate" in config.stages and config.dataset.fractions["test"] > 0:
        rounds["evaluate"] = [[metrics_release("evaluate", "test")]]
    return rounds


def _of_turns(
    rounds: Mapping[str, Sequence[Sequence[PlannedRelease]]],
    turns: Turns,
    *,
    done: Mapping[str, int],
    spare: bool,
) -> Schedule:
    """Return a client's releases in its rounds after ``done``; see :func:`make_schedules`."""
    planned: Schedule = []
    for stage, of_stage in rounds.items():
        own = [
            of_stage[number - 1] for number in turns.get(stage, ()) if number > done.get(stage, 0)
        ]
        spared = largest_round(own) if spare and stage != "evaluate" else []
        planned += add_up([release for one in own for release in one] + spared)
    return planned


def _demanding(
    wholes: Sequence[Schedule], records: Sequence[Mapping[str, int]]
) -> list[tuple[Schedule, Mapping[str, int]]]:
    """Return the clients that may need most noise: none certainly needs less than another.

    One that takes no more steps of any kind than another, at no higher rates, needs no more.
    """
    keys = sorted({release.key for whole in wholes for release in whole})
    demands: dict[tuple[float, ...], tuple[Schedule, Mapping[str, int]]] = {}
    for whole, own in zip(wholes, records, strict=True):
        if not own:  # not connected
            continue
        of_kind = {release.key: (release.steps, release.rate(own)) for release in whole}
        demands.setdefault(
            tuple(v for key in keys for v in of_kind.get(key, (0, 0.0))), (whole, own)
        )
    vectors = list(demands)
    return [
        demands[vector]
        for vector in vectors
        if not any(
            other != vector and all(a <= b for a, b in zip(vector, other, strict=True))
            for other in vectors
        )
    ]


def _with_noise(planned: Sequence[PlannedRelease], sigmas: Mapping[str, float | None]) -> Schedule:
    return [replace(release, noise_multiplier=sigmas[release.noise_name]) for release in planned]
