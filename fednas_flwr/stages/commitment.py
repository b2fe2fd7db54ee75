"""Commitment of a private run to its clients before anything is released: the schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fednas_flwr.config import Config, DifferentialPrivacy
from fednas_flwr.errors import ConfigError, ReplyError
from fednas_flwr.exchange.courier import Courier, QuorumError
from fednas_flwr.exchange.gate import check_facts
from fednas_flwr.exchange.messages import Reply
from fednas_flwr.exchange.requests import Commit
from fednas_flwr.names import PRV
from fednas_flwr.privacy.accounting import ACCOUNTANTS, epsilon_per_split
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.reporting.events import Event
from fednas_flwr.stages.schedule import Schedule, largest_schedule, turns_of, whole_turns

APPROVAL_POLL_S = 10.0
NEEDED_FACTS = ("splits", "budget", "secure_noise", "unit")  # that every client must tell of itself


def commit(
    courier: Courier,
    config: Config,
    schedules: Sequence[Schedule],
    *,
    done: Mapping[str, int],
    resumed: bool,
) -> None:
    """Have every client keep its schedule, and tell in an event what it costs each of them.

    The event also tells how many rounds of each stage each client's budget covers.

    Args:
        courier: Connected to clients that have told ``NEEDED_FACTS``.
        config: With ``privacy=dp``.
        schedules: From :func:`~fednas_flwr.stages.schedule.make_schedules`: each client's, or the
            one of all.
        done: Rounds of each stage that a checkpoint covers: with any, a run goes on for as long as
            its budgets last.
        resumed: Whether the run may have released something before.

    Raises:
        QuorumError: Too few clients accept it; the message names the rule that it breaks, or the
            person who has not approved it in time.
        ConfigError: No round is done, and too few clients' budgets cover the first stage.
    """
    privacy = config.privacy
    assert isinstance(privacy, DifferentialPrivacy)
    if len(schedules) == 1:
        schedules = [*schedules] * courier.num_clients
    schedule = largest_schedule(schedules)
    requests = {c: Commit(privacy.data_set, tuple(schedules[c])) for c in courier.clients}
    sampling = courier.sampling
    turns = None if sampling is None else turns_of(config, sampling)
    clients, search_epsilons = [], {}
    for client, reply in _agreed(courier, requests, config.runtime.approval_s):
        facts, own = courier.facts[client], schedules[client]
        of = whole_turns(config) if turns is None else turns[client]
        to_do = {s: sum(r > done.get(s, 0) for r in rounds) for s, rounds in of.items()}
        committed = {split for planned in own for split in planned.splits}
        try:
            check_facts(reply.facts, needed=("epsilon", "covered_steps"))
            missing = sorted(committed - set(reply.facts["epsilon"][PRV]))
            if missing:
                raise ReplyError(f"does not say its epsilon of {', '.join(missing)}")
        except ReplyError as error:
            place = {"stage": "commit", "round": 0, "verb": "query.commit", "client": client}
            courier.emit("client_left", **place, reason=str(error))
            courier.dismiss(client, str(error))
            continue
        terms = (tuple(own), tuple(sorted(facts["splits"].items())))
        if terms not in search_epsilons:
            search_epsilons[terms] = _search_epsilon(own, facts["splits"], privacy.delta)
        clients.append(
            {
                "client": client,
                "search_epsilon": search_epsilons[terms],
                "records": facts["splits"],
                "rates": [planned.rate(facts["splits"]) for planned in schedule],
                "budget": facts["budget"],
                "secure_noise": facts["secure_noise"],
                "unit": facts["unit"],
                "epsilon": reply.facts["epsilon"],
                **{name: reply.facts[name] for name in ("uncounted",) if name in reply.facts},
                **_alone(own, facts, privacy.delta),
                **({} if turns is None else {"turns": to_do}),
                "covers": covered_rounds(own, reply.facts["covered_steps"], to_do),
            }
        )
    for client in set(courier.clients) - {told["client"] for told in clients}:
        courier.dismiss(client, "it did not accept the schedule in time")
    drawn = None if sampling is None else {"by": sampling.by, "per_round": sampling.per_round}
    terms_of_all = [asdict(planned) for planned in schedule]
    courier.emit(
        "privacy", data_set=privacy.data_set, schedule=terms_of_all, clients=clients, drawn=drawn
    )
    if any(rounds for stage, rounds in done.items() if stage != STATISTICS):
        return
    stage = next((planned.stage for planned in schedule if planned.stage != STATISTICS), "")
    covers = [(told["client"], cover) for told in clients for cover in told["covers"]]
    first = {client: cover for client, cover in covers if cover["stage"] == stage}
    short = {client: f["rounds"] for client, f in first.items() if f["rounds"] < f["of"]}
    quorum = courier.quorum if sampling is None else courier.quorum_of(len(first))
    if short and len(first) - len(short) < quorum:
        rounds = ", ".join(f"client {client}: {number}" for client, number in short.items())
        raise ConfigError(
            f"privacy: {stage} takes {max(f['of'] for f in first.values())} rounds, more than "
            f"what is left of budgets covers ({rounds}), and {quorum} of "
            f"{courier.num_clients} clients must stay: take fewer rounds or more noise, or lower "
            f"runtime.quorum. Nothing {'more ' if resumed else ''}was released."
        )


def _agreed(
    courier: Courier, requests: Mapping[int, Commit], approval_s: float
) -> list[tuple[int, Reply]]:
    """Return the clients that keep their schedules and their replies, after approvals.

    A client at which a person must approve the schedule is asked again until that is done; the
    event ``approval_awaited`` names the run, so that one that ended here can go on under its name.
    """
    request = next(iter(requests.values()))
    terms: dict[str, Any] = {"settings": request, "own_settings": requests}
    ask = partial(courier.ask, "query.commit", stage="commit", **terms)
    replies = dict(ask())
    deadline = time.monotonic() + approval_s
    told: dict[int, str] = {}
    while waiting := _awaited(replies):
        if waiting != told:
            schedules = [{"client": c, "schedule": awaited} for c, awaited in waiting.items()]
            courier.emit("approval_awaited", run=courier.run, clients=schedules)
            told = waiting
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        courier.wait(min(APPROVAL_POLL_S, left_s))
        replies = {c: r for c, r in replies.items() if c not in waiting} | dict(ask(among=waiting))
    for client, awaited in waiting.items():
        reason = (
            f"its schedule {awaited} waits for a person's approval: have `fednas approve "
            f"{awaited}` typed at that site, then resume this run"
        )
        place = {"stage": "commit", "round": 0, "verb": "query.commit", "client": client}
        courier.emit("client_left", **place, reason=reason)
        courier.dismiss(client, reason)
        del replies[client]
    if waiting and len(replies) < courier.quorum:
        reasons = "; ".join(f"client {c}: {why}" for c, why in courier.left.items())
        raise QuorumError(
            f"{reasons} ({len(replies)} of {courier.num_clients} clients have agreed to the "
            f"schedule, {courier.quorum} are needed). Nothing was released."
        )
    return sorted(replies.items())


def _awaited(replies: Mapping[int, Reply]) -> dict[int, str]:
    """Return the schedule that each client waits to have approved; malformed ones are none."""
    awaited = {}
    for client, reply in replies.items():
        with suppress(ReplyError):
            check_facts(reply.facts, needed=("awaits",))
            awaited[client] = reply.facts["awaits"]
    return awaited


def awaited_run(events: Sequence[Event]) -> str | None:
    """Return the name of a run that ended as it waited for approvals, which has released nothing.

    Args:
        events: Of a run folder.
    """
    agreements = [e for e in events if e["event"] in ("approval_awaited", "privacy")]
    if not agreements or agreements[-1]["event"] == "privacy":
        return None
    return str(agreements[-1]["run"])


def _alone(
    schedule: Sequence[PlannedRelease], facts: Mapping[str, Any], delta: float
) -> dict[str, Any]:
    """Return what the schedule costs a client whose secure sums are broken, if it shares noise.

    Its own share is then all that hides its records: of h honest sites' noise ``1 / sqrt(h)``.
    """
    honest = facts.get("honest_sites")
    if honest is None or not any(planned.shared for planned in schedule):
        return {}
    alone = [
        replace(planned, noise_multiplier=(planned.noise_multiplier or 0.0) / math.sqrt(honest))
        if planned.shared
        else planned
        for planned in schedule
    ]
    return {"honest_sites": honest, "alone_epsilon": _epsilon(alone, facts["splits"], delta)}


def _search_epsilon(
    schedule: Sequence[PlannedRelease], declared: Mapping[str, int], delta: float
) -> float | None:
    """Return what the search alone costs a client's worst split, by PRV; None is infinite."""
    return _epsilon([p for p in schedule if p.stage == "search"], declared, delta)


def _epsilon(
    schedule: Sequence[PlannedRelease], declared: Mapping[str, int], delta: float
) -> float | None:
    """Return what releases cost a client's worst split, by PRV; None is infinite."""
    releases = [(planned.release(declared), planned.splits) for planned in schedule]
    by_split = epsilon_per_split(releases, delta, ACCOUNTANTS[PRV])
    epsilon = max(by_split.values(), default=0.0)
    return epsilon if math.isfinite(epsilon) else None


def covered_rounds(
    schedule: Sequence[PlannedRelease],
    covered_steps: Mapping[str, int],
    to_do: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Return for each stage, in order, how many ``rounds`` ``of`` those to do are covered."""
    longest: dict[str, int] = {}
    for planned in schedule:
        longest[planned.stage] = max(planned.steps, longest.get(planned.stage, 0))
    return [
        {
            "stage": stage,
            "rounds": covered_steps.get(stage, 0) * to_do[stage] // steps,
            "of": to_do[stage],
        }
        for stage, steps in longest.items()
    ]
