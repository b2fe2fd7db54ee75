"""The schedule of a private run: every kind of release, in order, and the terms of each.

It follows from the configuration, the declared numbers of records and the rounds still to do.
:func:`make_schedule` calibrates the noise that is not given (``calibration.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fednas_flwr.config import (
    Config,
    DifferentialPrivacy,
    DPNASSettings,
    FDNASSettings,
    FEATHERSSettings,
    FedAvgSettings,
    FedDARTSSettings,
    FNASSettings,
    Noise,
    PrivateRetrain,
)
from fednas_flwr.search.bandit import Bandit
from fednas_flwr.stages.calibration import CALIBRATED, Item, calibrated, noise_of
from fednas_flwr.strategies.feathers import explores
from fednas_flwr.strategies.fnas import evaluates

RETRAIN_SPLITS = ["train", "validation"]


def make_schedule(
    config: Config, records: Sequence[Mapping[str, int]], *, done: Mapping[str, int]
) -> list[Item]:
    """Return every kind of release of a run, in order; see ``ReleaseGate.commit`` for the keys.

    Args:
        config: With ``privacy=dp``.
        records: Each client's declared number of records by split.
        done: Rounds of each stage that a checkpoint covers.

    Raises:
        ConfigError: What comes before costs more than the target epsilon.
    """
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    sigmas: dict[str, float | None] = {
        **{name: getattr(privacy, name).noise_multiplier for name in CALIBRATED},
        "metrics": privacy.metrics_noise_multiplier,
    }
    # For the whole run, also when it is resumed, and with a round to spare in each stage: a round
    # that was interrupted is released, and booked, twice.
    items = _items(config, {"search": -1, "retrain": -1})
    for name in CALIBRATED:
        own = [item for item in items if noise_of(item) == name]
        if own and sigmas[name] is None:
            sigmas[name] = calibrated(privacy, name, own, _with_noise(items, sigmas), records)
    return [item for item in _with_noise(_items(config, done), sigmas) if item["steps"] > 0]


def private_settings(config: Config, schedule: Sequence[Item], stage: str) -> dict[str, Any] | None:
    """Return what the requests of a stage name besides, see ``RoundStrategy``; None if not private.

    Only the terms of releases that the schedule holds are given.
    """
    privacy = config.privacy
    if not isinstance(privacy, DifferentialPrivacy):
        return None
    terms = ("noise_multiplier", "batch_size", "max_grad_norm")
    settings = {
        "data_set": privacy.data_set,
        "micro_batch_size": privacy.micro_batch_size,
        "releases": {
            item["kind"]: {term: item[term] for term in terms}
            for item in schedule
            if item["stage"] == stage
        },
    }
    if stage == "retrain":
        return settings | {"local_steps": privacy.retrain.local_steps}
    local = isinstance(config.algorithm, FedDARTSSettings | FDNASSettings | FEATHERSSettings)
    return settings | ({"local_steps": privacy.local_steps} if local else {})


def _items(config: Config, done: Mapping[str, int]) -> list[Item]:
    """Return the releases of the rounds that are still to do, in the order of the stages."""
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    items: list[Item] = []
    if "search" in config.stages and not isinstance(config.algorithm, FedAvgSettings):
        items += _search(config, privacy, done.get("search", 0))
    if "retrain" not in config.stages:
        return items
    items += _retraining(config, privacy, done.get("retrain", 0))
    if "evaluate" in config.stages and config.dataset.fractions["test"] > 0:
        items += _metrics(privacy, "evaluate", "test", 1)
    return items


def _search(config: Config, privacy: DifferentialPrivacy, done: int) -> list[Item]:
    """Return the releases of the search's rounds that are still to do."""
    algorithm, rounds = config.algorithm, config.rounds - done
    if isinstance(algorithm, DPNASSettings):
        return _candidates(algorithm, privacy, done, config.rounds)
    assert isinstance(algorithm, FNASSettings | FedDARTSSettings | FDNASSettings | FEATHERSSettings)
    terms = {
        "weights": ("weights", ["train"], algorithm.batch_size, privacy.weights),
        "alphas": ("alphas", ["validation"], algorithm.batch_size, privacy.alphas),
    }
    if isinstance(algorithm, FNASSettings):
        verbs = {"weights": "train.weight_gradient", "alphas": "train.alpha_gradient"}
        if algorithm.fused:
            verbs = dict.fromkeys(verbs, "train.gradients")
        steps = rounds * algorithm.local_steps
        measured = sum(
            evaluates(algorithm.evaluate_every, server_round, config.rounds)
            for server_round in range(done + 1, config.rounds + 1)
        )
        return [
            *(_item("search", verbs[kind], *terms[kind], steps) for kind in terms),
            *_metrics(privacy, "search", "validation", measured),
        ]
    rounds_of = dict.fromkeys(terms, rounds)
    if isinstance(algorithm, FDNASSettings):  # whose warm-up releases no alphas
        rounds_of["alphas"] -= max(0, algorithm.warm_up_rounds - max(0, done))
    items = [
        _item("search", "train.search", *terms[kind], number * privacy.local_steps)
        for kind, number in rounds_of.items()
        if number > 0
    ]
    if isinstance(algorithm, FEATHERSSettings):
        trials = _most_trials(algorithm, done, config.rounds)
        steps = trials * privacy.local_steps
        items += [_item("search", "train.probe", *terms[kind], steps) for kind in terms]
        items += [_rewards("search", privacy, trials)]
    return items


def _candidates(
    algorithm: DPNASSettings, privacy: DifferentialPrivacy, done: int, rounds: int
) -> list[Item]:
    """Return the releases of DPNAS' rounds after ``done``.

    A round to spare, ``done=-1``, is the last one, which measures twice.
    """
    steps = (rounds - done) * algorithm.trained_candidates * algorithm.local_steps
    measured = rounds - done - max(0, algorithm.warm_up_rounds - max(0, done))
    last = max(0, -done) + (done < rounds)
    train = ("weights", ["train"], algorithm.batch_size, privacy.weights)
    rewards = ("rewards", ["validation"], None, privacy.rewards)
    return [
        _item("search", "train.candidate", *train, steps),
        _item("search", "evaluate.candidates", *rewards, max(0, measured) + last),
    ]


def _retraining(config: Config, privacy: DifferentialPrivacy, done: int) -> list[Item]:
    """Return the releases of the retraining rounds that are still to do."""
    algorithm, rounds = config.algorithm, config.retrain.rounds
    steps = (rounds - done) * privacy.retrain.local_steps
    splits = ["train"] if isinstance(algorithm, FEATHERSSettings) else RETRAIN_SPLITS
    terms = ("weights", splits, config.retrain.batch_size, privacy.retrain)
    items = [_item("retrain", "train.weights", *terms, steps)]
    if isinstance(algorithm, FEATHERSSettings):
        trials = _most_trials(algorithm, done, rounds)
        steps = trials * privacy.retrain.local_steps
        items += [_item("retrain", "train.probe", *terms, steps)]
        items += [_rewards("retrain", privacy, trials)]
    return items


def _most_trials(algorithm: FEATHERSSettings, done: int, rounds: int) -> int:
    """Return how many trials the rounds after ``done`` can take: kappa is largest at first.

    A round to spare, ``done=-1``, is one that explores.
    """
    num_arms = len(algorithm.configurations) or algorithm.num_configurations
    most = Bandit.of(num_arms, algorithm.bandit).num_trials()
    phases = sum(explores(r, algorithm.nas_rounds) for r in range(max(0, done) + 1, rounds + 1))
    return most * (phases + max(0, -done))


def _rewards(stage: str, privacy: DifferentialPrivacy, trials: int) -> Item:
    """Return the release of the decreases of all validation records."""
    return _item(stage, "train.probe", "rewards", ["validation"], None, privacy.rewards, trials)


def _metrics(privacy: DifferentialPrivacy, stage: str, split: str, steps: int) -> list[Item]:
    """Return the release of loss and accuracy over all records of a split."""
    sigma = privacy.metrics_noise_multiplier
    if sigma is None:
        return []
    noise = Noise(noise_multiplier=sigma, epsilon=None, max_grad_norm=1.0)
    return [_item(stage, "evaluate.model", "metrics", [split], None, noise, steps)]


def _item(
    stage: str,
    verb: str,
    kind: str,
    splits: list[str],
    batch_size: int | None,
    noise: Noise | PrivateRetrain,
    steps: int,
) -> Item:
    """Return one kind of release; how much noise it carries is not decided yet."""
    return {
        "stage": stage,
        "verb": verb,
        "kind": kind,
        "splits": splits,
        "noise_multiplier": None,
        "batch_size": batch_size,
        "steps": steps,
        "max_grad_norm": noise.max_grad_norm,
    }


def _with_noise(items: Sequence[Item], sigmas: Mapping[str, float | None]) -> list[Item]:
    return [item | {"noise_multiplier": sigmas[noise_of(item)]} for item in items]
