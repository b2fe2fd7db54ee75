"""The beginning of a run, in which clients connect and private ones commit; state of all stages."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from flwr.serverapp import Grid

from fednas_flwr.algorithms.base import RoundStrategy
from fednas_flwr.algorithms.fedavg.strategy import association, planned, retrained_on
from fednas_flwr.algorithms.stage_strategies import make_sampling
from fednas_flwr.base.errors import ConfigError, ReplyError
from fednas_flwr.client.making import simulated_properties
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.data.oddities import oddities, off_declared
from fednas_flwr.data.prepared import client_names, make_data, make_server_data, save_partition
from fednas_flwr.data.records import fingerprint
from fednas_flwr.data.statistics import Statistics
from fednas_flwr.data.summary import reading_notes, summarised
from fednas_flwr.pipeline import pooled_statistics, schedule
from fednas_flwr.pipeline.schedule import Schedule, Turns
from fednas_flwr.privacy.mechanism.accounting import ACCOUNTANTS, epsilon_per_split
from fednas_flwr.privacy.plan import STATISTICS, PlannedRelease
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.requests import Commit
from fednas_flwr.protocol.states import Packed
from fednas_flwr.runs.checkpoints import CheckpointFolder
from fednas_flwr.runs.events import Event, EventLog
from fednas_flwr.runs.numbers import of_splits, read_run
from fednas_flwr.runs.run_folder import PARTITION_FILE
from fednas_flwr.server.cohort import Cohort, Emit, QuorumError, ignore_events
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings import Config
from fednas_flwr.settings.incompatible import has_real_sites
from fednas_flwr.settings.names import LEAST_CALIBRATED, MOST_SHOWN, PRV
from fednas_flwr.settings.parser import seconds
from fednas_flwr.settings.run_settings import Deployment

APPROVAL_POLL_S = 10.0
CONNECT_S = 60.0  # for simulated clients, which exist from the start
COMMIT = Exchange("query.commit", "commit", Commit(data_set="", releases=()))
PROPERTIES = ("budget", "secure_noise", "unit")  # that a private client must report
INPUT_PROPERTIES = ("input_shape", "image_shape", "transform", "schema", "mean", "std")
# What each real site must report; the server builds networks from it
SITE_PROPERTIES = (*INPUT_PROPERTIES, "class_names", "multi_label", "target")
GROWTH_POINTS = 6  # points of the curve of epsilon over rounds


def begin(
    config: Config,
    grid: Grid,
    log: EventLog,
    circumstances: dict[str, Any],
    *,
    earlier: Sequence[Event],
) -> Run:
    """A run whose clients are connected and, with privacy, have committed to its schedule.

    Args:
        config: Configuration, as for :func:`~fednas_flwr.pipeline.stages.run_stages`.
        grid: Reaches the clients.
        log: Receives the events.
        circumstances: Versions and machine.
        earlier: Earlier events of a run that is resumed; empty for a new run.
    """
    limit, folder = config.runtime.time_limit, config.folder
    ends_at = None if limit is None else time.monotonic() + seconds(limit)
    agreements = [e for e in earlier if e["event"] in ("approval_awaited", "privacy")]
    # a run that ended while it waited for approvals keeps its name: it has released nothing
    waited = agreements and agreements[-1]["event"] == "approval_awaited"
    name = agreements[-1]["run"] if waited else f"{folder.name}.{secrets.token_hex(4)}"
    cohort = make_cohort(config, run=name, emit=log.emit)
    prepared = _connect(config, grid, cohort, folder)
    data = "" if config.dp else fingerprint(prepared.train)  # which would tell private records
    if data and {*filter(None, (event.get("data") for event in earlier))} - {data}:
        raise ConfigError(
            f"resume={config.run_dir}: the data has changed since this run began, in records, "
            "labels or the order of columns: restore it, or start a new run."
        )
    for event in earlier:
        if event.get("expelled"):
            cohort.dismiss(event["client"], event["reason"], expelled=True)
    statistics = pooled_statistics.known_statistics(earlier)
    if prepared.uses_own_statistics and not config.dp:
        statistics = statistics or pooled_statistics.found_statistics(prepared, cohort)
    splits: list[Mapping[str, int]] = [known["splits"] for known in cohort.properties.values()]
    begun = [event for event in earlier if event["event"] == "partition" and event.get("splits")]
    if begun:  # nothing is known about clients that were not connected then
        cohort.declared = dict(zip(begun[0]["clients"], begun[0]["splits"], strict=True))
    records = median(retrained_on(config.retrain, known) for known in cohort.declared.values())
    cohort.predicts_numbers = prepared.train.is_regression
    cohort.names = _names(config, cohort, prepared)
    _tell_partition(config, cohort, prepared, log, data)
    unlike = read_run(folder).of_kind("partition")[0].get("association", 0.0)
    config = replace(config, retrain=planned(config, records, prepared.input_shape, unlike))
    if config.samples:
        splits = [cohort.declared.get(client, {}) for client in range(cohort.num_clients)]
        cohort.sampling = make_sampling(config, splits)
    checkpoints = make_checkpoints(folder, log)
    run = Run(
        config, folder, grid, log, cohort, checkpoints, prepared, [], circumstances, ends_at=ends_at
    )
    if config.dp:
        statistics = _agree(run, splits, statistics, resumed=bool(earlier))
    if statistics is not None:
        cohort.statistics = statistics
        run.prepared = prepared.standardised(statistics)
    return run


def _connect(config: Config, grid: Grid, cohort: Cohort, folder: Path) -> Prepared:
    """Connect the clients and return the data; real sites' data as the first site describes it."""
    needed = ("client", "splits", *(PROPERTIES if config.dp else ()))
    if has_real_sites(config):
        alike = (*SITE_PROPERTIES, *(("honest_sites",) if config.secure_sum else ()))
        cohort.connect(grid, needed=(*needed, *alike), alike=alike)
        return make_server_data(config, next(iter(cohort.properties.values())))
    prepared, parts = make_data(config)
    if not (folder / PARTITION_FILE).exists():
        save_partition(folder / PARTITION_FILE, parts)
    cohort.connect(grid, needed=needed, known=simulated_properties(config, (prepared, parts)))
    return prepared


def _tell_partition(
    config: Config, cohort: Cohort, prepared: Prepared, log: EventLog, data: str
) -> None:
    """Emit the numbers of records by client and class, and the notes of the reader."""
    properties = list(cohort.properties.values())
    splits = [known["splits"] for known in properties]
    counts = [known.get("class_counts", []) for known in properties]
    all_count = all(len(count) == prepared.num_classes for count in counts)  # not if private
    whole = len(splits) <= MOST_SHOWN or has_real_sites(config)  # resuming needs sites' numbers
    records: dict[str, Any] = {"summary": summarised(splits)}
    if whole:
        records = {"splits": splits, "clients": sorted(cohort.properties)}
        if cohort.names:
            records["names"] = list(cohort.names.values())
    log.emit(
        "partition",
        label=prepared.train.label,
        class_names=list(prepared.train.class_names),
        multi_label=prepared.train.multi_label,
        number=prepared.train.is_regression,
        counts=counts if all_count and whole else None,
        association=association(counts) if all_count else 0.0,
        **records,
        data=data,
        server_test=len(prepared.server_test) if prepared.server_test is not None else 0,
    )
    notes, odd, of_table = list[str](), list[str](), tuple[str, ...]()
    if len(prepared.train) and not config.dp:
        clients = client_names(prepared.train, config.partition)
        odd = oddities(prepared.train, prepared.server_test, clients=clients)
        notes = reading_notes(prepared)
        of_table = prepared.train.notes if prepared.train.schema else ()
    if prepared.server_test is not None:
        declared = prepared.mean, prepared.std, prepared.target
        odd += [f"test set: {words}" for words in off_declared(prepared.server_test, *declared)]
    if notes or odd:
        log.emit("data", found=[*notes, *odd], odd=[*of_table, *odd])


def _names(config: Config, cohort: Cohort, prepared: Prepared) -> dict[int, str]:
    """Names of the connected clients; empty if they have none, or if private records would decide.

    A real site states its own name, from ``sites.yaml``.
    """
    clients = sorted(cohort.properties)
    if has_real_sites(config):
        names = {client: cohort.properties[client].get("tag", "") for client in clients}
        return names if all(names.values()) and len({*names.values()}) == len(names) else {}
    column = getattr(config.partition, "column", None)
    declared = column is None or column in getattr(config.dataset, "categories", ())
    if config.dp and not declared:
        return {}
    found = client_names(prepared.train, config.partition)
    return {client: found[client] for client in clients} if found else {}


def _agree(
    run: Run, declared: Sequence[Mapping[str, int]], statistics: Statistics | None, *, resumed: bool
) -> Statistics | None:
    """Have private clients commit to the run's schedule; return the statistics that they release.

    Args:
        run: The run; its schedule is set.
        declared: Each client's number of records by split.
        statistics: Statistics that are already known.
        resumed: True if the run may have released something before.
    """
    cohort = run.cohort
    least = [p.get("least_noise_multiplier", LEAST_CALIBRATED) for p in cohort.properties.values()]
    run.config = config = schedule.for_data(run.config, run.prepared, least_noise=least)
    latest = {stage: run.checkpoints.latest(stage) for stage in ("search", "retrain")}
    done = {stage: point.round for stage, point in latest.items() if point is not None}
    if statistics is not None or done:
        done[STATISTICS] = 1  # a run that released none keeps its features as they are
    schedules = schedule.make_schedules(
        config, declared, done=done, sampling=cohort.sampling, least_noise=least
    )
    commit(cohort, config, schedules, done=done, resumed=resumed)
    run.schedule = schedule.largest_schedule(schedules)
    if statistics is None and any(planned.kind == STATISTICS for planned in run.schedule):
        return pooled_statistics.noised_statistics(
            run.prepared, cohort, run.schedule, data_set=config.private_data_set
        )
    return statistics


def commit(
    cohort: Cohort,
    config: Config,
    schedules: Sequence[Schedule],
    *,
    done: Mapping[str, int],
    resumed: bool,
) -> None:
    """Have every client accept its schedule; report the cost for each client in an event.

    The event also has the number of rounds of each stage that each client's budget covers.

    Args:
        cohort: Connected to clients that have reported ``PROPERTIES``.
        config: Configuration with ``privacy=dp``.
        schedules: Each client's, from :func:`~fednas_flwr.pipeline.schedule.make_schedules`.
        done: Rounds of each stage that a checkpoint covers. If there are any, the run continues for
            as long as its budgets last.
        resumed: True if the run may have released something before.

    Raises:
        QuorumError: Too few clients accept their schedules; the message names the rule that a
            schedule breaks, or says that a person has not approved it in time.
        ConfigError: No round is done, and too few clients' budgets cover the first stage.
    """
    privacy, sampling = config.private, cohort.sampling
    of_all, turns = schedule.largest_schedule(schedules), schedule.turns_of(config, sampling)
    clients, epsilon = [], cache(_epsilon)
    requests = {
        c: Commit(data_set=privacy.data_set, releases=tuple(schedules[c])) for c in cohort.clients
    }
    for client, reply in _agreed(cohort, requests, config.runtime.approval_s):
        releases = schedules[client]
        to_do = {s: sum(r > done.get(s, 0) for r in rounds) for s, rounds in turns[client].items()}
        try:
            cost = _cost(releases, reply)
        except ReplyError as error:
            cohort.dismiss(client, str(error), COMMIT)
            continue
        properties = cohort.properties[client]
        records = tuple(sorted(properties["splits"].items()))
        search = tuple(planned for planned in releases if planned.stage == "search")
        clients.append(
            {
                "client": client,
                "search_epsilon": epsilon(search, records, privacy.delta),
                "records": properties["splits"],
                "rates": [planned.rate(properties["splits"]) for planned in of_all],
                **{name: properties[name] for name in ("budget", "secure_noise", "unit")},
                **cost,
                **_alone(releases, properties, privacy.delta),
                **({} if sampling is None else {"turns": to_do}),
                "covers": schedule.covered_rounds(
                    releases, reply.properties["covered_steps"], to_do
                ),
            }
        )
    for client in set(cohort.clients) - {promise["client"] for promise in clients}:
        cohort.dismiss(client, "it did not accept the schedule in time")
    cohort.emit(
        "privacy",
        data_set=privacy.data_set,
        schedule=[asdict(planned) for planned in of_all],
        clients=clients,
        growth=_growth(clients, schedules, turns, privacy.delta),
        drawn=sampling and {"by": sampling.by, "per_round": sampling.per_round},
    )
    if any(rounds for stage, rounds in done.items() if stage != STATISTICS):
        return
    stage = next((planned.stage for planned in of_all if planned.stage != STATISTICS), "")
    covers = {
        p["client"]: cover for p in clients for cover in p["covers"] if cover["stage"] == stage
    }
    quorum = cohort.quorum if sampling is None else cohort.quorum_of(len(covers))
    remark = f" Nothing {'more ' if resumed else ''}was released."
    schedule.check_covered(privacy, covers, quorum, remark=remark)


def _cost(releases: Schedule, reply: Reply) -> dict[str, Any]:
    """Return the cost that a client declares for its schedule.

    Raises:
        ReplyError: The client omits a part of the cost, or a split.
    """
    said, splits = reply.properties, {split for planned in releases for split in planned.splits}
    silent = [name for name in ("epsilon", "covered_steps") if name not in said]
    covered = said.get("epsilon", {PRV: splits})[PRV]
    silent += [f"epsilon of {split}" for split in sorted(splits.difference(covered))]
    if silent:
        raise ReplyError(f"does not say its {silent[0]}")
    return {name: said[name] for name in ("epsilon", "uncounted") if name in said}


def _agreed(
    cohort: Cohort, requests: Mapping[int, Commit], approval_s: float
) -> list[tuple[int, Reply]]:
    """The clients that commit to their schedules, and their replies, after approvals.

    If a person must approve the schedule at a client, that client is asked again until this is
    done. The event ``approval_awaited`` names the run, so that a run that ended here can continue
    under its name.
    """
    exchange = replace(COMMIT, settings_of=requests)
    replies = dict(cohort.ask(exchange))
    deadline = time.monotonic() + approval_s
    reported: dict[int, str] = {}
    while waiting := {
        c: reply.properties["awaits"]
        for c, reply in replies.items()
        if "awaits" in reply.properties
    }:
        if waiting != reported:
            schedules = [{"client": c, "schedule": awaited} for c, awaited in waiting.items()]
            cohort.emit("approval_awaited", run=cohort.run, clients=schedules)
            reported = waiting
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
        cohort.dismiss(client, reason, COMMIT)
        del replies[client]
    if waiting and len(replies) < cohort.quorum:
        reasons = "; ".join(f"{cohort.named(c)}: {why}" for c, why in cohort.left.items())
        raise QuorumError(
            f"{reasons} ({len(replies)} of {cohort.num_clients} clients have agreed to the "
            f"schedule, {cohort.quorum} are needed). Nothing was released."
        )
    return sorted(replies.items())


def _alone(releases: Schedule, properties: Mapping[str, Any], delta: float) -> dict[str, Any]:
    """Cost of the schedule for a client whose secure sums are broken.

    Then only its own share of the noise hides its records: ``1 / sqrt(h)`` of the noise with h
    honest sites.
    """
    honest = properties.get("honest_sites")
    if honest is None or not any(planned.shared for planned in releases):
        return {}
    alone = [
        replace(planned, noise_multiplier=(planned.noise_multiplier or 0.0) / math.sqrt(honest))
        if planned.shared
        else planned
        for planned in releases
    ]
    records = tuple(properties["splits"].items())
    return {"honest_sites": honest, "alone_epsilon": _epsilon(tuple(alone), records, delta)}


def _epsilon(
    releases: tuple[PlannedRelease, ...], records: tuple[tuple[str, int], ...], delta: float
) -> float | None:
    """The epsilon of releases on a client's worst split, by PRV; None is infinite."""
    read = [(planned.release(dict(records)), planned.splits) for planned in releases]
    epsilon = max(epsilon_per_split(read, delta, ACCOUNTANTS[PRV]).values(), default=0.0)
    return epsilon if math.isfinite(epsilon) else None


def _growth(
    clients: Sequence[Event], schedules: Sequence[Schedule], turns: Sequence[Turns], delta: float
) -> list[tuple[int, float | None]]:
    """Rounds since the run began, and epsilon by then, for the client that spends most."""
    if not clients:
        return []
    most = max(clients, key=lambda client: of_splits(client, PRV) or math.inf)
    schedule, records = schedules[most["client"]], tuple(sorted(most["records"].items()))
    order = [stage for stage, asked in turns[most["client"]].items() for _ in asked]
    points: list[tuple[int, float | None]] = []
    parts = range(1, GROWTH_POINTS + 1)
    for reached in sorted({round(len(order) * k / GROWTH_POINTS) for k in parts}):
        done = {stage: order[:reached].count(stage) / order.count(stage) for stage in set(order)}
        steps = [math.ceil(p.steps * done.get(p.stage, 1)) for p in schedule]
        pairs = zip(schedule, steps, strict=True)
        released = tuple(replace(planned, steps=number) for planned, number in pairs if number)
        points.append((reached, _epsilon(released, records, delta)))
    return points


def make_cohort(config: Config, *, run: str, emit: Emit = ignore_events) -> Cohort:
    """The server's cohort of clients, with the runtime's quorum, deadlines and limits."""
    privacy, runtime = config.dp, config.runtime
    return Cohort(
        run=run,
        num_clients=config.clients,
        quorum_share=runtime.quorum,
        deadline_s=runtime.deadline_s,
        connect_s=runtime.connect_s if isinstance(runtime, Deployment) else CONNECT_S,
        wire=runtime.wire,
        fewest_records=privacy.fewest_records if privacy else 0.0,
        most_records=runtime.most_records,
        largest_share=runtime.largest_share,
        secure_sum=config.secure_sum is not None,
        emit=emit,
    )


class OutOfTimeError(RuntimeError):
    """The search has reached the run's time limit; its checkpoint is saved."""


def make_checkpoints(folder: Path, log: EventLog) -> CheckpointFolder:
    """The checkpoints of a run folder; their warnings become events."""
    return CheckpointFolder(
        folder / "checkpoints", warn=lambda message: log.emit("warning", message=message)
    )


@dataclass
class Run:
    """State that the stages share."""

    config: Config
    folder: Path
    grid: Grid
    log: EventLog
    cohort: Cohort
    checkpoints: CheckpointFolder
    prepared: Prepared
    schedule: Schedule  # the releases of a private run
    circumstances: dict[str, Any]  # versions and machine
    ends_at: float | None = None  # deadline on the clock time.monotonic(), from time_limit
    inherited: Mapping[str, Packed] | None = None  # states from which the search continues

    def start(self, strategy: RoundStrategy[Any], rounds: int) -> None:
        """Run the rounds of a stage; if time does not allow all of them, an event says so."""
        stage = strategy.stage
        with self.stage(stage, rounds):
            strategy.ends_at = self.ends_at
            strategy.start(self.grid, num_rounds=rounds)
        if (done := strategy.rounds_done) < rounds:
            self.log.emit("out_of_time", stage=stage, round=done, rounds=rounds)
            self.log.emit(
                "warning",
                message=f"the time limit has ended the {stage} after round {done} of {rounds}; "
                "resume=<run folder> goes on",
            )

    @contextmanager
    def stage(self, name: str, rounds: int | None = None) -> Iterator[None]:
        """Emit that a stage begins and, unless it fails, that it has finished."""
        started = time.monotonic()
        counts: dict[str, Any] = {"rounds": rounds}
        if name == "retrain" and not self.config.dp:
            server = {"server_optimizer": asdict(self.config.server_optimizer)}
            counts["training"] = asdict(self.config.retrain) | server
        self.log.emit("stage_started", stage=name, **counts)
        yield
        self.log.emit("stage_finished", stage=name, seconds=time.monotonic() - started)
