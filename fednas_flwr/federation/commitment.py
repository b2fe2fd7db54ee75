"""What a private run promises its clients before anything is released: the schedule of releases.

The schedule follows from the configuration, the declared numbers of records and the rounds still to
do. Noise that is not given is calibrated: the search's to its share of the target epsilon, then
retraining's to what search and metrics leave of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fednas_flwr.config import Config, DifferentialPrivacy, FixedNetwork, GradientSearch
from fednas_flwr.errors import ConfigError, ReplyError
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.gate import check_facts
from fednas_flwr.privacy.accounting import calibrate_noise
from fednas_flwr.privacy.renyi import Release, poisson_rate
from fednas_flwr.privacy.renyi_filter import filter_epsilon
from fednas_flwr.strategies.fnas import evaluates

NEEDED_FACTS = ("splits", "budget", "secure_noise")  # that every client must tell of itself
RETRAIN_SPLITS = ["train", "validation"]
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
    privacy = _with_search_noise(config, privacy, records)
    sigma = privacy.retrain.noise_multiplier
    if sigma is None and "retrain" in config.stages:
        # For the whole run, also when it is resumed, and with a round to spare in each stage: a
        # round that was interrupted is released, and booked, twice.
        items = _items(config, privacy, 1.0, {"search": -1, "retrain": -1})
        (retrain,) = (item for item in items if item["stage"] == "retrain")
        others = [item for item in items if item is not retrain]
        sigma = _calibrated(privacy, privacy.epsilon, retrain, others, records)
    items = _items(config, privacy, sigma, done)
    return [item for item in items if item["steps"] > 0]


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
    clients = []
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
        clients.append(
            {
                "client": client,
                "records": facts["splits"],
                "rates": [_rate(item, facts["splits"]) for item in schedule],
                "budget": facts["budget"],
                "secure_noise": facts["secure_noise"],
                "epsilon": reply.facts["epsilon"],
                "covers": _covered_rounds(config, schedule, reply.facts["covered_steps"]),
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


def _covered_rounds(
    config: Config, schedule: Sequence[Item], covered_steps: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return for each stage, in order, how many ``rounds`` ``of`` those to do are covered."""
    assert isinstance(config.privacy, DifferentialPrivacy)
    per_round = {"retrain": config.privacy.retrain.local_steps}
    if isinstance(config.algorithm, GradientSearch):
        per_round["search"] = config.algorithm.local_steps
    longest: dict[str, int] = {}
    for item in schedule:
        longest[item["stage"]] = max(item["steps"], longest.get(item["stage"], 0))
    return [
        {
            "stage": stage,
            "rounds": covered_steps.get(stage, 0) // per_round.get(stage, 1),
            "of": steps // per_round.get(stage, 1),
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
    return settings | ({"local_steps": privacy.retrain.local_steps} if stage == "retrain" else {})


def _with_search_noise(
    config: Config, privacy: DifferentialPrivacy, records: Sequence[Mapping[str, int]]
) -> DifferentialPrivacy:
    """Return the settings with the search's noise multipliers, calibrated where they are null."""
    if privacy.weights.noise_multiplier is not None:
        return privacy
    items = _search(config, privacy, -1)  # as for retraining
    metrics = [item for item in items if item["kind"] == "metrics"]
    target = privacy.epsilon * (privacy.search_share if "retrain" in config.stages else 1.0)
    sigmas = [
        _calibrated(privacy, target, item, metrics, records)
        for item in items
        if item["kind"] != "metrics"
    ]
    sigma = max(sigmas, default=None)  # none without a search
    return replace(
        privacy,
        weights=replace(privacy.weights, noise_multiplier=sigma),
        alphas=replace(privacy.alphas, noise_multiplier=sigma),
    )


def _items(
    config: Config,
    privacy: DifferentialPrivacy,
    retrain_sigma: float | None,
    done: Mapping[str, int],
) -> list[Item]:
    """Return the releases of the rounds that are still to do, in the order of the stages."""
    items = _search(config, privacy, done.get("search", 0))
    if "retrain" not in config.stages:
        return items
    rounds = config.retrain.rounds - done.get("retrain", 0)
    retrain = {
        **_place("retrain", "train.weights", "weights", RETRAIN_SPLITS),
        "noise_multiplier": retrain_sigma,
        "batch_size": config.retrain.batch_size,
        "steps": rounds * privacy.retrain.local_steps,
        "max_grad_norm": privacy.retrain.max_grad_norm,
    }
    items.append(retrain)
    if "evaluate" in config.stages and config.dataset.fractions["test"] > 0:
        items += _metrics(privacy, "evaluate", "test", 1)
    return items


def _search(config: Config, privacy: DifferentialPrivacy, done: int) -> list[Item]:
    """Return the releases of the search's rounds that are still to do."""
    algorithm = config.algorithm
    if "search" not in config.stages or isinstance(algorithm, FixedNetwork):
        return []
    assert isinstance(algorithm, GradientSearch)
    steps = (config.rounds - done) * algorithm.local_steps
    verbs = {"weights": "train.weight_gradient", "alphas": "train.alpha_gradient"}
    splits = {"weights": ["train"], "alphas": ["validation"]}
    noises = {"weights": privacy.weights, "alphas": privacy.alphas}
    items: list[Item] = [
        {
            **_place(
                "search", "train.gradients" if algorithm.fused else verbs[kind], kind, splits[kind]
            ),
            "noise_multiplier": noise.noise_multiplier,
            "batch_size": algorithm.batch_size,
            "steps": steps,
            "max_grad_norm": noise.max_grad_norm,
        }
        for kind, noise in noises.items()
    ]
    measured = sum(
        evaluates(algorithm.evaluate_every, server_round, config.rounds)
        for server_round in range(done + 1, config.rounds + 1)
    )
    return items + _metrics(privacy, "search", "validation", measured)


def _metrics(privacy: DifferentialPrivacy, stage: str, split: str, steps: int) -> list[Item]:
    """Return the release of loss and accuracy over all records of a split."""
    if privacy.metrics_noise_multiplier is None:
        return []
    return [
        {
            **_place(stage, "evaluate.model", "metrics", [split]),
            "noise_multiplier": privacy.metrics_noise_multiplier,
            "batch_size": None,
            "steps": steps,
            "max_grad_norm": 1.0,
        }
    ]


def _place(stage: str, verb: str, kind: str, splits: list[str]) -> Item:
    return {"stage": stage, "verb": verb, "kind": kind, "splits": splits}


def _calibrated(
    privacy: DifferentialPrivacy,
    target: float,
    item: Item,
    others: Sequence[Item],
    records: Sequence[Mapping[str, int]],
) -> float:
    """Return the least noise multiplier of an item with which all clients' splits keep a target.

    Counted as enforcement does, so that the run reaches its last step on a fresh budget.
    """
    needed = 0.0
    for declared in {tuple(sorted(counts.items())): counts for counts in records}.values():
        for split in item["splits"]:
            before = [_release(other, declared) for other in others if split in other["splits"]]
            used = filter_epsilon(before, privacy.delta)
            if used >= target:
                alone = "metrics" if item["stage"] == "search" else "search and metrics"
                raise ConfigError(
                    f"privacy.epsilon={privacy.epsilon:g}: {alone} alone cost {used:.3g} of "
                    f"{target:.3g} on the {split} records; raise it or the noise multipliers, or "
                    "take fewer rounds."
                )
            sigma = calibrate_noise(
                target_epsilon=target,
                delta=privacy.delta,
                sample_rate=_rate(item, declared),
                steps=item["steps"],
                others=before,
                accountant=filter_epsilon,
            )
            needed = max(needed, sigma)
    return needed


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
