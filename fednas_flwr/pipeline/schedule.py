"""The schedule of a private run: every kind of release, in order, with its terms.

It follows from the releases that the strategies state for each round, the declared numbers of
records and the rounds still to do. Noise that is not given is calibrated to the cost that a run may
have. A kind of noise with an epsilon of its own is calibrated to that. Otherwise the noise of the
search is calibrated to its shares of the target epsilon, then that of retraining to what all others
leave of it. Noise that is given is not changed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import le
from statistics import median_low
from typing import Any

from fednas_flwr.algorithms.stage_strategies import releases_by_round
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models.noised_scores import planned_noise
from fednas_flwr.privacy import plan
from fednas_flwr.privacy.books.renyi_filter import filter_epsilon
from fednas_flwr.privacy.mechanism.accounting import calibrate_noise
from fednas_flwr.privacy.mechanism.renyi import Release
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.server.exchange import Sampling
from fednas_flwr.settings import Config, DifferentialPrivacy
from fednas_flwr.settings.names import LEAST_CALIBRATED

CALIBRATED = ("rewards", "alphas", "weights", "retrain")  # in this order
GIVEN = ("metrics", "scores", STATISTICS)  # kinds whose noise is not calibrated here
RARER = 0.1  # share of records in the rarer class for which the error of scores is planned
_CURES = {  # of too small an epsilon, by kind
    "scores": "set privacy.scores_error=null",
    STATISTICS: "set privacy.statistics_share=0",
}
SCORES_SHARE = 0.25  # largest share of epsilon that scores cost if they are released alone

Records = Sequence[Mapping[str, int]]  # each client's declared number of records, by split
Schedule = list[PlannedRelease]
Turns = Mapping[str, Sequence[int]]  # for each stage, the rounds in which a client may be asked


def make_schedules(
    config: Config,
    records: Records,
    *,
    done: Mapping[str, int],
    spare: bool = False,
    sampling: Sampling | None = None,
    least_noise: Sequence[float] = (),
) -> list[Schedule]:
    """Every kind of release of each client, in order, in the rounds that may ask the client.

    Args:
        config: Configuration with ``privacy=dp``.
        records: Each client's declared number of records by split.
        done: Rounds of each stage that a checkpoint covers.
        spare: If true, the largest round of each stage except evaluation counts once more. The
            noise is always calibrated for that, since an interrupted round is released, and booked,
            twice. It is the same for all clients, and enough for the client that needs most.
        sampling: Draws the clients that a round asks; None asks all.
        least_noise: Noise multipliers below which sites refuse a release. No noise is calibrated
            below their median, or the lower of two: a site that requires more leaves instead of
            raising the noise of all.

    Raises:
        ConfigError: Earlier releases cost all of the target epsilon, or no noise keeps the cost
            within it.
    """
    privacy = config.private
    sigmas: dict[str, float | None] = {
        **{name: getattr(privacy, name).noise_multiplier for name in CALIBRATED},
        **{name: getattr(privacy, f"{name}_noise_multiplier") for name in ("metrics", STATISTICS)},
        "scores": _scores_noise(config, records),
    }
    least = _least_accepted(least_noise)
    rounds, turns = _rounds(config), turns_of(config, sampling)
    if sampling is None:
        turns = turns[:1]  # the same for all clients
    # those of the whole run, also when it is resumed
    wholes = [_of_turns(rounds, turn, done={}, spare=True) for turn in turns]
    demanding = _demanding(wholes if sampling else wholes * len(records), records)
    for name in CALIBRATED:
        if sigmas[name] is None:
            needed = [
                _calibrated(privacy, name, _with_noise(whole, sigmas), declared)
                for whole, declared in demanding
                if any(release.noise_name == name for release in whole)
            ]
            sigmas[name] = max([*needed, least]) if needed else None
    schedules = [_with_noise(_of_turns(rounds, turn, done, spare=spare), sigmas) for turn in turns]
    return schedules if sampling is not None else schedules * config.clients


def _least_accepted(least_noise: Sequence[float]) -> float:
    return median_low(least_noise or [LEAST_CALIBRATED])


def turns_of(config: Config, sampling: Sampling | None) -> list[Turns]:
    """Each client's rounds, including those in which it stands by; all rounds without sampling."""
    numbers = {stage: range(1, len(rounds) + 1) for stage, rounds in _rounds(config).items()}
    if sampling is None:
        return [numbers] * config.clients
    turns: list[dict[str, list[int]]] = [{} for _ in range(config.clients)]
    for stage, of_stage in numbers.items():
        for number in of_stage:
            for client in sampling.participants(stage, number).candidates:
                turns[client].setdefault(stage, []).append(number)
    return list(turns)


def largest_schedule(schedules: Iterable[Schedule]) -> Schedule:
    """The releases of each kind by the client that makes the most of them."""
    return plan.largest_round(list({id(schedule): schedule for schedule in schedules}.values()))


def covered_rounds(
    schedule: Schedule, covered_steps: Mapping[str, int], to_do: Mapping[str, int]
) -> list[dict[str, Any]]:
    """For each stage, in order, the ``rounds`` that a budget covers, out of ``of`` to do."""
    longest: dict[str, int] = {}
    for planned in schedule:
        longest[planned.stage] = max(planned.steps, longest.get(planned.stage, 0))
    return [
        {"stage": s, "rounds": covered_steps.get(s, 0) * to_do[s] // steps, "of": to_do[s]}
        for s, steps in longest.items()
    ]


def check_covered(
    privacy: DifferentialPrivacy,
    covers: Mapping[int, Mapping[str, Any]],
    quorum: int,
    *,
    remark: str = "",
) -> None:
    """Refuse a stage that too few clients' budgets cover.

    Args:
        privacy: The run's privacy settings.
        covers: For each client, one entry of :func:`covered_rounds`.
        quorum: Number of clients whose budgets must cover the stage.
        remark: End of the message.
    """
    short = {c: cover["rounds"] for c, cover in covers.items() if cover["rounds"] < cover["of"]}
    if len(covers) - len(short) >= quorum or not short:
        return
    longest = max(covers.values(), key=lambda cover: cover["of"])
    covered = ", ".join(f"client {client}: {number}" for client, number in short.items())
    rounds = "1 round" if longest["of"] == 1 else f"{longest['of']} rounds"
    cure, stage = "take fewer rounds or more noise", longest["stage"]
    if stage in ("evaluate", STATISTICS):
        measures = "scores" if privacy.metrics_noise_multiplier is None else "metrics"
        noise = given_noise(privacy, STATISTICS if stage == STATISTICS else measures)
        cure = f"raise {noise} or set it to null"
        if stage == STATISTICS and privacy.statistics_share:
            cure = "set privacy.statistics_share=0"
    raise ConfigError(
        f"privacy.epsilon={privacy.epsilon:g}: {stage} takes {rounds}, more than what is "
        f"left of budgets covers ({covered}), and {quorum} of {len(covers)} clients must stay: "
        f"{cure}, or lower runtime.quorum.{remark}"
    )


def given_noise(privacy: DifferentialPrivacy, name: str) -> str | None:
    """The setting that gives a kind's noise, with its value; None if the noise is calibrated.

    An epsilon of its own counts as given, although noise is calibrated to it.
    """
    if name == "scores":
        return f"privacy.scores_error={privacy.scores_error:g}"
    if name == STATISTICS and privacy.statistics_share:
        return f"privacy.statistics_share={privacy.statistics_share:g}"
    if name in GIVEN:
        setting = f"{name}_noise_multiplier"
        return f"privacy.{setting}={getattr(privacy, setting):g}"
    noise = getattr(privacy, name)
    for setting in ("noise_multiplier", "epsilon"):
        if (value := getattr(noise, setting)) is not None:
            return f"privacy.{name}.{setting}={value:g}"
    return None


def _calibrated(
    privacy: DifferentialPrivacy, name: str, planned: Schedule, declared: Mapping[str, int]
) -> float:
    """The least noise multiplier with which all of a client's splits keep within a target.

    The cost is counted as in enforcement, so that the run reaches its last step on a fresh budget.

    Args:
        privacy: Privacy settings with the target.
        name: Name of the noise.
        planned: All releases; those whose noise is already known count as other costs.
        declared: The client's number of records by split.
    """
    releases = [release for release in planned if release.noise_name == name]
    steps = sum(release.steps for release in releases)
    epsilon: float | None = getattr(privacy, name).epsilon
    needed = 0.0
    for split in sorted({split for release in releases for split in release.splits}):
        share = _share(privacy, name, split, planned)
        target = epsilon or privacy.epsilon * share
        # of what retraining fills up to epsilon, statistics are no part of the search's share
        later = ("retrain", STATISTICS) if share < 1 else ("retrain",)
        others = [
            release
            for release in planned
            if release.noise_multiplier is not None
            and split in release.splits
            and epsilon is None
            and (name == "retrain" or release.noise_name not in later)
        ]
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
        rate = releases[0].rate(declared)
        needed = max(needed, _least_noise(privacy, name, target, rate, steps, before))
    return needed


def _least_noise(
    privacy: DifferentialPrivacy,
    name: str,
    target: float,
    rate: float,
    steps: int,
    others: Sequence[Release] = (),
) -> float:
    """The least noise multiplier of some steps with which one client keeps within a target epsilon.

    Raises:
        ConfigError: No noise is enough.
    """
    try:
        return calibrate_noise(
            target_epsilon=target,
            delta=privacy.delta,
            sample_rate=rate,
            steps=steps,
            others=others,
            accountant=filter_epsilon,
        )
    except ValueError as error:
        epsilon = getattr(getattr(privacy, name, None), "epsilon", None)
        key = "privacy.epsilon" if epsilon is None else f"privacy.{name}.epsilon"
        raise ConfigError(
            f"{key}={epsilon or privacy.epsilon:g}: no noise keeps {name} to the {target:.3g} that "
            f"it has for {steps} steps at privacy.delta={privacy.delta:g}; raise {key}, or "
            f"{_CURES.get(name, 'take fewer rounds')}."
        ) from error


def _share(privacy: DifferentialPrivacy, name: str, split: str, planned: Schedule) -> float:
    """The share of a split's epsilon up to which this kind of release may be calibrated."""
    reading = [release for release in planned if split in release.splits]
    if name == "rewards":
        others = [release for release in reading if release.noise_name != name]
        later = any(release.noise_multiplier is None for release in others)
        return privacy.rewards_share if later else 1.0
    later = any(release.noise_name == "retrain" for release in reading)
    return privacy.search_share if later and name != "retrain" else 1.0


def _scores_noise(config: Config, records: Records) -> float | None:
    """The noise multiplier of scores' counts: from AUROC's allowed error, but at a limited cost.

    Unless noise is shared, each client adds the full noise.
    """
    privacy = config.private
    if privacy.scores_error is None:
        return None
    known = [sum(declared.values()) for declared in records if declared]
    noises = 1 if config.secure_sum else len(known)
    wanted = planned_noise(privacy.scores_error, records=sum(known), rarer=RARER)
    cheap = _least_noise(privacy, "scores", SCORES_SHARE * privacy.epsilon, 1.0, 1)
    return max(wanted / math.sqrt(noises), cheap)


def for_data(config: Config, prepared: Prepared, *, least_noise: Sequence[float]) -> Config:
    """The configuration with the releases that the data call for.

    Scores are released for two classes only. The mean of a backbone's pooled features makes up most
    of each feature. It is released if neither its own noise nor that of retraining is given, and
    then its noise follows from ``statistics_share``. Otherwise ``statistics_share`` becomes 0.

    Args:
        config: The run's configuration.
        prepared: The run's data.
        least_noise: As for :func:`make_schedules`.

    Raises:
        ConfigError: No noise keeps statistics within their share.
    """
    privacy, train = config.dp, prepared.train
    if not privacy:
        return config
    if len(train.class_names) != 2 or train.multi_label:
        privacy = replace(privacy, scores_error=None)
    is_pooled = bool(prepared.transform) and len(prepared.input_shape) == 1
    is_free = privacy.statistics_noise_multiplier is None and not given_noise(privacy, "retrain")
    if not (is_pooled and is_free and privacy.statistics_share) or config.by_client:
        return replace(config, privacy=replace(privacy, statistics_share=0.0))
    target = privacy.statistics_share * privacy.epsilon
    least = _least_noise(privacy, STATISTICS, target, 1.0, 1)
    noise = max(least, _least_accepted(least_noise))
    return replace(config, privacy=replace(privacy, statistics_noise_multiplier=noise))


def _rounds(config: Config) -> dict[str, list[list[PlannedRelease]]]:
    """The releases of each round for a client that takes part in it, by stage."""
    privacy = config.private
    # in CFDNAS, clients commit to their groups' rounds, too
    config = config.algorithm.whole_search(config)
    rounds: dict[str, list[list[PlannedRelease]]] = {}
    if privacy.statistics_noise_multiplier is not None:
        rounds[STATISTICS] = [[plan.statistics_release(shared=config.secure_sum is not None)]]
    if config.searches:
        rounds["search"] = releases_by_round(config, "search", config.rounds)
    if not config.retrains:
        return rounds
    rounds["retrain"] = releases_by_round(config, "retrain", config.retrain.planned)
    measures = privacy.metrics_noise_multiplier is not None
    if measures and "evaluate" in config.stages and config.dataset.fractions["test"] > 0:
        rounds["evaluate"] = [[plan.metrics_release("evaluate", "test")]]
    if privacy.scores_error is not None and not config.by_client and "evaluate" in config.stages:
        released = plan.scores_release(shared=config.secure_sum is not None)
        rounds.setdefault("evaluate", [[]])[0].append(released)
    return rounds


def _of_turns(
    rounds: Mapping[str, Sequence[Schedule]], turns: Turns, done: Mapping[str, int], *, spare: bool
) -> Schedule:
    """A client's releases in its rounds after ``done``; see :func:`make_schedules`."""
    planned: Schedule = []
    for stage, of_stage in rounds.items():
        rest = [
            of_stage[number - 1] for number in turns.get(stage, ()) if number > done.get(stage, 0)
        ]
        spared = plan.largest_round(rest) if spare and stage != "evaluate" else []
        planned += plan.add_up([release for one in rest for release in one] + spared)
    return planned


def _demanding(
    wholes: Sequence[Schedule], records: Records
) -> list[tuple[Schedule, Mapping[str, int]]]:
    """The clients that may need the most noise: none of them certainly needs less than another.

    A client with no more steps of any kind than another, at no higher rates, needs no more noise.
    """
    keys = sorted({release.key for whole in wholes for release in whole})
    demands: dict[tuple[float, ...], tuple[Schedule, Mapping[str, int]]] = {}
    for whole, known in zip(wholes, records, strict=True):
        if not known:  # not connected
            continue
        of_kind = {release.key: (release.steps, release.rate(known)) for release in whole}
        vector = tuple(value for key in keys for value in of_kind.get(key, (0, 0.0)))
        demands.setdefault(vector, (whole, known))

    def is_most(vector: tuple[float, ...]) -> bool:
        others = (other for other in demands if other != vector)
        return not any(all(map(le, vector, other)) for other in others)

    return [demand for vector, demand in demands.items() if is_most(vector)]


def _with_noise(planned: Schedule, sigmas: Mapping[str, float | None]) -> Schedule:
    return [replace(release, noise_multiplier=sigmas[release.noise_name]) for release in planned]
