"""Commitment of a private run to its clients before anything is released: the schedule."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.pipeline.schedule import Schedule, largest_schedule, turns_of, whole_turns
from fednas_flwr.privacy.mechanism.accounting import ACCOUNTANTS, epsilon_per_split
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.requests import Commit
from fednas_flwr.runs.events import Event
from fednas_flwr.server.cohort import Cohort, QuorumError
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings import Config, DifferentialPrivacy
from fednas_flwr.settings.names import PRV

APPROVAL_POLL_S = 10.0
NEEDED_PROPERTIES = (
    "splits",
    "budget",
    "secure_noise",
    "unit",
)  # that every client must tell of itself


def commit(
    cohort: Cohort,
    config: Config,
    schedules: Sequence[Schedule],
    *,
    done: Mapping[str, int],
    resumed: bool,
) -> None:
    """Have every client accept its schedule, and report its cost for each of them in an event.

    The event also tells how many rounds of each stage each client's budget covers.

    Args:
        cohort: Connected to clients that have told ``NEEDED_PROPERTIES``.
        config: With ``privacy=dp``.
        schedules: From :func:`~fednas_flwr.pipeline.schedule.make_schedules`: each client's, or the
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
        schedules = [*schedules] * cohort.num_clients
    schedule = largest_schedule(schedules)
    requests = {
        c: Commit(data_set=privacy.data_set, releases=tuple(schedules[c])) for c in cohort.clients
    }
    sampling = cohort.sampling
    turns = None if sampling is None else turns_of(config, sampling)
    clients, search_epsilons = [], {}
    for client, reply in _agreed(cohort, requests, config.runtime.approval_s):
        properties, own = cohort.properties[client], schedules[client]
        of = whole_turns(config) if turns is None else turns[client]
        to_do = {s: sum(r > done.get(s, 0) for r in rounds) for s, rounds in of.items()}
        committed = {split for planned in own for split in planned.splits}
        silent = [name for name in ("epsilon", "covered_steps") if name not in reply.properties]
        if not silent and (rest := committed - set(reply.properties["epsilon"][PRV])):
            silent = [f"epsilon of {', '.join(sorted(rest))}"]
        if silent:
            reason = f"does not say its {silent[0]}"
            place = {"stage": "commit", "round": 0, "action": "query.commit", "client": client}
            cohort.emit("client_left", **place, reason=reason)
            cohort.dismiss(client, reason)
            continue
        terms = (tuple(own), tuple(sorted(properties["splits"].items())))
        if terms not in search_epsilons:
            search_epsilons[terms] = _search_epsilon(own, properties["splits"], privacy.delta)
        clients.append(
            {
                "client": client,
                "search_epsilon": search_epsilons[terms],
                "records": properties["splits"],
                "rates": [planned.rate(properties["splits"]) for planned in schedule],
                "budget": properties["budget"],
                "secure_noise": properties["secure_noise"],
                "unit": properties["unit"],
                "epsilon": reply.properties["epsilon"],
                **{
                    name: reply.properties[name]
                    for name in ("uncounted",)
                    if name in reply.properties
                },
                **_alone(own, properties, privacy.delta),
                **({} if turns is None else {"turns": to_do}),
                "covers": covered_rounds(own, reply.properties["covered_steps"], to_do),
            }
        )
    for client in set(cohort.clients) - {told["client"] for told in clients}:
        cohort.dismiss(client, "it did not accept the schedule in time")
    drawn = None if sampling is None else {"by": sampling.by, "per_round": sampling.per_round}
    terms_of_all = [asdict(planned) for planned in schedule]
    cohort.emit(
        "privacy", data_set=privacy.data_set, schedule=terms_of_all, clients=clients, drawn=drawn
    )
    if any(rounds for stage, rounds in done.items() if stage != STATISTICS):
        return
    stage = next((planned.stage for planned in schedule if planned.stage != STATISTICS), "")
    covers = [(told["client"], cover) for told in clients for cover in told["covers"]]
    first = {client: cover for client, cover in covers if cover["stage"] == stage}
    short = {client: f["rounds"] for client, f in first.items() if f["rounds"] < f["of"]}
    quorum = cohort.quorum if sampling is None else cohort.quorum_of(len(first))
    if short and len(first) - len(short) < quorum:
        rounds = ", ".join(f"client {client}: {number}" for client, number in short.items())
        raise ConfigError(
            f"privacy: {stage} takes {max(f['of'] for f in first.values())} rounds, more than "
            f"what is left of budgets covers ({rounds}), and {quorum} of "
            f"{cohort.num_clients} clients must stay: take fewer rounds or more noise, or lower "
            f"runtime.quorum. Nothing {'more ' if resumed else ''}was released."
        )


def _agreed(
    cohort: Cohort, requests: Mapping[int, Commit], approval_s: float
) -> list[tuple[int, Reply]]:
    """Return the clients that keep their schedules and their replies, after approvals.

    A client at which a person must approve the schedule is asked again until that is done; the
    event ``approval_awaited`` names the run, so that one that ended here can go on under its name.
    """
    request = next(iter(requests.values()))
    exchange = Exchange("query.commit", stage="commit", settings=request, settings_of=requests)
    replies = dict(cohort.ask(exchange))
    deadline = time.monotonic() + approval_s
    told: dict[int, str] = {}
    while waiting := _awaited(replies):
        if waiting != told:
            schedules = [{"client": c, "schedule": awaited} for c, awaited in waiting.items()]
            cohort.emit("approval_awaited", run=cohort.run, clients=schedules)
            told = waiting
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        cohort.wait(min(APPROVAL_POLL_S, left_s))
        agreed = {c: reply for c, reply in replies.items() if c not in waiting}
        replies = agreed | dict(cohort.ask(replace(exchange, among=waiting)))
    for client, awaited in waiting.items():
        reason = (
            f"its schedule {awaited} waits for a person's approval: have `fednas approve "
            f"{awaited}` typed at that site, then resume this run"
        )
        place = {"stage": "commit", "round": 0, "action": "query.commit", "client": client}
        cohort.emit("client_left", **place, reason=reason)
        cohort.dismiss(client, reason)
        del replies[client]
    if waiting and len(replies) < cohort.quorum:
        reasons = "; ".join(f"client {c}: {why}" for c, why in cohort.left.items())
        raise QuorumError(
            f"{reasons} ({len(replies)} of {cohort.num_clients} clients have agreed to the "
            f"schedule, {cohort.quorum} are needed). Nothing was released."
        )
    return sorted(replies.items())


def _awaited(replies: Mapping[int, Reply]) -> dict[int, str]:
    """Return the schedule that each client waits to have approved."""
    said = {client: reply.properties for client, reply in replies.items()}
    return {client: of["awaits"] for client, of in said.items() if "awaits" in of}


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
    schedule: Sequence[PlannedRelease], properties: Mapping[str, Any], delta: float
) -> dict[str, Any]:
    """Return the cost of the schedule for a client whose secure sums are broken.

    Its own share is then all that hides its records: of h honest sites' noise ``1 / sqrt(h)``.
    """
    honest = properties.get("honest_sites")
    if honest is None or not any(planned.shared for planned in schedule):
        return {}
    alone = [
        replace(planned, noise_multiplier=(planned.noise_multiplier or 0.0) / math.sqrt(honest))
        if planned.shared
        else planned
        for planned in schedule
    ]
    return {"honest_sites": honest, "alone_epsilon": _epsilon(alone, properties["splits"], delta)}


def _search_epsilon(
    schedule: Sequence[PlannedRelease], declared: Mapping[str, int], delta: float
) -> float | None:
    """Return the epsilon of the search alone on a client's worst split; None is infinite."""
    return _epsilon([p for p in schedule if p.stage == "search"], declared, delta)


def _epsilon(
    schedule: Sequence[PlannedRelease], declared: Mapping[str, int], delta: float
) -> float | None:
    """Return the epsilon of releases on a client's worst split, by PRV; None is infinite."""
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
