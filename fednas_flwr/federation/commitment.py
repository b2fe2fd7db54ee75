"""What a private run promises its clients before anything is released: the schedule of releases.

The schedule follows from the configuration, the declared numbers of records and the rounds still to
do. Noise that is not given is calibrated: to an epsilon of its own, or the search's to its shares
of the target epsilon, then retraining's to what all others leave of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fednas_flwr.clients.release import ACCOUNTANTS
from fednas_flwr.config import (
    CandidateSearch,
    Config,
    DifferentialPrivacy,
    FixedNetwork,
    GradientSearch,
    HyperparameterSearch,
    LocalSearch,
    Noise,
    PathSearch,
    PrivateRetrain,
)
from fednas_flwr.errors import ConfigError, ReplyError
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.gate import check_facts
from fednas_flwr.privacy.accounting import calibrate_noise, epsilon_per_split
from fednas_flwr.privacy.renyi import Release, poisson_rate
from fednas_flwr.privacy.renyi_filter import filter_epsilon
from fednas_flwr.search.bandit import Bandit
from fednas_flwr.strategies.feathers import explores
from fednas_flwr.strategies.fnas import evaluates

NEEDED_FACTS = ("splits", "budget", "secure_noise")  # that every client must tell of itself
RETRAIN_SPLITS = ["train", "validation"]
CALIBRATED = ("rewards", "alphas", "weights", "retrain")  # in this order
Item = dict[str, Any]  # one kind of release: its place in the run, its terms


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
        own = [item for item in items if _noise_of(item) == name]
        if own and sigmas[name] is None:
            sigmas[name] = _calibrated(privacy, name, own, _with_noise(items, sigmas), records)
    return [item for item in _with_noise(_items(config, done), sigmas) if item["steps"] > 0]


def commit(
    courier: Courier,
    config: Config,
    schedule: Sequence[Item],
    *,
    done: Mapping[str, int],
    resumed: bool,
) -> None:
    """Have every client keep the schedule, and tell in an event what it costs each of them.

    The event also tells how many rounds of each stage each client's budget covers.

    Args:
        courier: Connected to clients that have told ``NEEDED_FACTS``.
        config: With ``privacy=dp``.
        schedule: From :func:`make_schedule`.
        done: Rounds of each stage that a checkpoint covers: with any, a run goes on for as long as
            its budgets last.
        resumed: Whether the run may have released something before.

    Raises:
        QuorumError: Too few clients accept it; the message names the rule that it breaks.
        ConfigError: No round is done, and too few clients' budgets cover the first stage.
    """
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    settings = {"data_set": privacy.data_set, "schedule": list(schedule)}
    committed = {split for item in schedule for split in item["splits"]}
    clients, search_epsilons = [], {}
    for client, reply in courier.ask("query.commit", stage="commit", settings=settings):
        facts = courier.facts[client]
        try:
            check_facts(reply.facts, needed=("epsilon", "covered_steps"))
            missing = sorted(committed - set(reply.facts["epsilon"]["prv"]))
            if missing:
                raise ReplyError(f"does not say its epsilon of {', '.join(missing)}")
        except ReplyError as error:
            place = {"stage": "commit", "round": 0, "verb": "query.commit", "client": client}
            courier.emit("client_left", **place, reason=str(error))
            courier.dismiss(client, str(error))
            continue
        declared = tuple(sorted(facts["splits"].items()))
        if declared not in search_epsilons:
            search_epsilons[declared] = _search_epsilon(schedule, facts["splits"], privacy.delta)
        clients.append(
            {
                "client": client,
                "search_epsilon": search_epsilons[declared],
                "records": facts["splits"],
                "rates": [_rate(item, facts["splits"]) for item in schedule],
                "budget": facts["budget"],
                "secure_noise": facts["secure_noise"],
                "epsilon": reply.facts["epsilon"],
                "covers": _covered_rounds(config, schedule, reply.facts["covered_steps"], done),
            }
        )
    for client in set(courier.clients) - {told["client"] for told in clients}:
        courier.dismiss(client, "it did not accept the schedule in time")
    courier.emit("privacy", data_set=privacy.data_set, schedule=list(schedule), clients=clients)
    if any(done.values()):
        return
    first = {c["client"]: c["covers"][0] for c in clients if schedule}
    short = {client: f["rounds"] for client, f in first.items() if f["rounds"] < f["of"]}
    if short and len(first) - len(short) < courier.quorum:
        rounds = ", ".join(f"client {client}: {number}" for client, number in short.items())
        raise ConfigError(
            f"privacy: {schedule[0]['stage']} takes {first[min(first)]['of']} rounds, more than "
            f"what is left of budgets covers ({rounds}), and {courier.quorum} of "
            f"{courier.num_clients} clients must stay: take fewer rounds or more noise, or lower "
            f"runtime.quorum. Nothing {'more ' if resumed else ''}was released."
        )


def _search_epsilon(
    schedule: Sequence[Item], declared: Mapping[str, int], delta: float
) -> float | None:
    """Return what the search alone costs a client's worst split, by PRV; None is infinite."""
    releases = [
        (_release(item, declared), item["splits"]) for item in schedule if item["stage"] == "search"
    ]
    by_split = epsilon_per_split(releases, delta, ACCOUNTANTS["prv"])
    epsilon = max(by_split.values(), default=0.0)
    return epsilon if math.isfinite(epsilon) else None


def _covered_rounds(
    config: Config,
    schedule: Sequence[Item],
    covered_steps: Mapping[str, int],
    done: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Return for each stage, in order, how many ``rounds`` ``of`` those to do are covered."""
    rounds = {"search": config.rounds, "retrain": config.retrain.rounds, "evaluate": 1}
    longest: dict[str, int] = {}
    for item in schedule:
        longest[item["stage"]] = max(item["steps"], longest.get(item["stage"], 0))
    to_do = {stage: rounds[stage] - done.get(stage, 0) for stage in longest}
    return [
        {
            "stage": stage,
            "rounds": covered_steps.get(stage, 0) * to_do[stage] // steps,
            "of": to_do[stage],
        }
        for stage, steps in longest.items()
    ]


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
    local = isinstance(config.algorithm, LocalSearch | PathSearch | HyperparameterSearch)
    return settings | ({"local_steps": privacy.local_steps} if local else {})


def _items(config: Config, done: Mapping[str, int]) -> list[Item]:
    """Return the releases of the rounds that are still to do, in the order of the stages."""
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    items: list[Item] = []
    if "search" in config.stages and not isinstance(config.algorithm, FixedNetwork):
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
    if isinstance(algorithm, CandidateSearch):
        return _candidates(algorithm, privacy, done, config.rounds)
    assert isinstance(algorithm, GradientSearch | LocalSearch | PathSearch | HyperparameterSearch)
    terms = {
        "weights": ("weights", ["train"], algorithm.batch_size, privacy.weights),
        "alphas": ("alphas", ["validation"], algorithm.batch_size, privacy.alphas),
    }
    if isinstance(algorithm, GradientSearch):
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
    if isinstance(algorithm, PathSearch):  # whose warm-up releases no alphas
        rounds_of["alphas"] -= max(0, algorithm.warm_up_rounds - max(0, done))
    items = [
        _item("search", "train.search", *terms[kind], number * privacy.local_steps)
        for kind, number in rounds_of.items()
        if number > 0
    ]
    if isinstance(algorithm, HyperparameterSearch):
        trials = _most_trials(algorithm, done, config.rounds)
        steps = trials * privacy.local_steps
        items += [_item("search", "train.probe", *terms[kind], steps) for kind in terms]
        items += [_rewards("search", privacy, trials)]
    return items


def _candidates(
    algorithm: CandidateSearch, privacy: DifferentialPrivacy, done: int, rounds: int
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
    splits = ["train"] if isinstance(algorithm, HyperparameterSearch) else RETRAIN_SPLITS
    terms = ("weights", splits, config.retrain.batch_size, privacy.retrain)
    items = [_item("retrain", "train.weights", *terms, steps)]
    if isinstance(algorithm, HyperparameterSearch):
        trials = _most_trials(algorithm, done, rounds)
        steps = trials * privacy.retrain.local_steps
        items += [_item("retrain", "train.probe", *terms, steps)]
        items += [_rewards("retrain", privacy, trials)]
    return items


def _most_trials(algorithm: HyperparameterSearch, done: int, rounds: int) -> int:
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


def _noise_of(item: Item) -> str:
    """Return which of the privacy settings gives an item's noise."""
    retrained = item["stage"] == "retrain" and item["kind"] == "weights"
    return "retrain" if retrained else str(item["kind"])


def _with_noise(items: Sequence[Item], sigmas: Mapping[str, float | None]) -> list[Item]:
    return [item | {"noise_multiplier": sigmas[_noise_of(item)]} for item in items]


def _calibrated(
    privacy: DifferentialPrivacy,
    name: str,
    own: Sequence[Item],
    items: Sequence[Item],
    records: Sequence[Mapping[str, int]],
) -> float:
    """Return the least noise multiplier with which all clients' splits keep a target.

    Counted as enforcement does, so that the run reaches its last step on a fresh budget.

    Args:
        privacy: Gives the target.
        name: Which noise.
        own: The releases that carry it.
        items: All releases, those with noise that is known already count as others.
        records: Each client's declared number of records by split.
    """
    needed = 0.0
    splits = sorted({split for item in own for split in item["splits"]})
    given: float | None = getattr(privacy, name).epsilon
    for split in splits:
        target = given or privacy.epsilon * _share(privacy, name, split, items)
        others = [
            item
            for item in items
            if item["noise_multiplier"] is not None
            and split in item["splits"]
            and given is None
            and (name == "retrain" or _noise_of(item) != "retrain")
        ]
        for declared in {tuple(sorted(c.items())): c for c in records}.values():
            before = [_release(other, declared) for other in others]
            used = filter_epsilon(before, privacy.delta)
            if used >= target:
                named = " and ".join(dict.fromkeys(_noise_of(other) for other in others))
                raise ConfigError(
                    f"privacy.epsilon={privacy.epsilon:g}: {named} alone cost {used:.3g} of "
                    f"{target:.3g} on the {split} records, which leaves nothing for {name}; raise "
                    "it or the noise multipliers, or take fewer rounds."
                )
            sigma = calibrate_noise(
                target_epsilon=target,
                delta=privacy.delta,
                sample_rate=_rate(own[0], declared),
                steps=sum(item["steps"] for item in own),
                others=before,
                accountant=filter_epsilon,
            )
            needed = max(needed, sigma)
    return needed


def _share(privacy: DifferentialPrivacy, name: str, split: str, items: Sequence[Item]) -> float:
    """Return the share of epsilon up to which a kind of release may fill a split."""
    if name == "rewards":
        others = [i for i in items if _noise_of(i) != name and split in i["splits"]]
        later = any(item["noise_multiplier"] is None for item in others)
        return privacy.rewards_share if later else 1.0
    later = any(_noise_of(item) == "retrain" and split in item["splits"] for item in items)
    return privacy.search_share if later and name != "retrain" else 1.0


def _release(item: Item, declared: Mapping[str, int]) -> Release:
    """Return what a client with these declared records releases."""
    return Release(
        noise_multiplier=item["noise_multiplier"],
        sample_rate=_rate(item, declared),
        steps=item["steps"],
    )


def _rate(item: Item, declared: Mapping[str, int]) -> float:
    """Return the rate at which a client with these declared records draws each of them."""
    return poisson_rate(item["batch_size"], sum(declared[split] for split in item["splits"]))
