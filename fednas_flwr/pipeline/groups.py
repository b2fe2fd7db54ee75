"""CFDNAS' groups of clients; each goes through the stages of a run in its own folder.

``groups/<name>/`` is a run folder like any other, with configuration, events, report and model, so
that everything that reads a run can read a group. The run itself keeps the members of each group
(``groups.json``) and how each group ended (``group_finished`` events).
"""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fednas_flwr.algorithms.base import RoundStrategy
from fednas_flwr.algorithms.fdnas import CFDNASSettings, all_hardware, group_name
from fednas_flwr.algorithms.fdnas.strategy import FDNAS
from fednas_flwr.base.errors import ConfigError, check_choice
from fednas_flwr.base.files import write_atomically
from fednas_flwr.base.foreign import load_json
from fednas_flwr.models.networks import supernet_space
from fednas_flwr.pipeline.beginning import OutOfTimeError, Run, make_checkpoints
from fednas_flwr.protocol.states import Packed
from fednas_flwr.report.html_report import write_report
from fednas_flwr.report.model_card import write_model_card
from fednas_flwr.runs.events import Event, EventLog
from fednas_flwr.runs.numbers import CONFIG_FILE, EVENTS_FILE, read_run
from fednas_flwr.runs.run_folder import GROUPS_FILE, create_run_folder
from fednas_flwr.server.cohort import CONNECT, QuorumError
from fednas_flwr.settings import Config
from fednas_flwr.spaces.costs import check_hardware

Groups = dict[str, list[int]]
# a group's events that are repeated in the run's
REPEATED = {"client_failed", "client_left", "client_back", "out_of_time"}


def run_groups(
    run: Run, *, search: Callable[..., RoundStrategy[Any]], run_group: Callable[[Run], None]
) -> None:
    """Search with all clients, divide them, and take each group through its own stages.

    Zhang et al. (2020), FDNAS, Alg. 2. Groups run one after the other. If a group has too few
    clients left, or no network reaches its target on the hardware that its clients have measured,
    only that group fails.

    Args:
        run: A run of CFDNAS.
        search: Runs a search stage, see ``stages.start_search``.
        run_group: Runs the stages of a group, given a run whose algorithm is FDNAS.

    Raises:
        ConfigError: Too few clients name a group, or a hardware loss belongs to a group that does
            not exist or has a target that no network reaches.
        QuorumError: Every group has failed.
    """
    algorithm, strategy, path = _algorithm(run.config), None, run.folder / GROUPS_FILE
    saved: Groups | None = load_json(path.read_text()) if path.exists() else None
    groups: Groups | None = None
    if algorithm.group_by != "alphas":
        groups = _by_name(run)
        groups = saved or groups  # regardless of who is connected now
        for name in algorithm.group_hardware:
            check_choice("algorithm.group_hardware", name, groups)
    check_hardware(all_hardware(algorithm), supernet_space(run.config, run.prepared))
    if algorithm.inherit:
        of_all = replace(run, config=replace(run.config, algorithm=algorithm.search))
        strategy = search(of_all, prepare=_keep_updates if groups is None else lambda _: None)
    if groups is None:
        groups = saved or _by_alphas(run, strategy)
    write_atomically(path, json.dumps(groups, indent=2) + "\n")
    run.log.emit("groups", group_by=algorithm.group_by, groups=groups)
    states = None if strategy is None else strategy.states
    with run.stage("groups"):
        reasons = [_run_one(run, n, of, states, run_group) for n, of in groups.items()]
    if all(reasons):
        raise QuorumError(f"every group has failed: {'; '.join(r for r in reasons if r)}")


def _algorithm(config: Config) -> CFDNASSettings:
    assert isinstance(config.algorithm, CFDNASSettings)
    return config.algorithm


def _by_name(run: Run) -> Groups:
    """Clients by their tags or hardware (Zhang et al., 2020, Alg. 2); clients without one leave.

    Raises:
        ConfigError: The run's own ``algorithm.client_tags`` name none, or too few are left.
    """
    cohort, algorithm = run.cohort, _algorithm(run.config)
    name, groups = algorithm.group_by, Groups()
    tags = algorithm.client_tags or [""] * run.config.clients
    for client in cohort.clients:
        try:
            label = group_name(cohort.properties[client], client, name)
        except ConfigError as error:
            simulated = run.config.runtime.name != "deployment"
            if simulated and cohort.properties[client].get("tag", "") == tags[client]:
                raise
            cohort.dismiss(client, str(error), CONNECT)
        else:
            groups.setdefault(label, []).append(client)
    if (found := sum(map(len, groups.values()))) < cohort.quorum:
        raise ConfigError(
            f"algorithm.group_by={name}: {found} of {cohort.num_clients} clients name a "
            f"group, {cohort.quorum} are needed: give each node a tag in its --node-config."
        )
    return dict(sorted(groups.items()))


def _keep_updates(strategy: RoundStrategy[Any]) -> None:
    assert isinstance(strategy, FDNAS)  # CFDNAS' first search is of this class
    strategy.keeps_updates = True


def _by_alphas(run: Run, strategy: RoundStrategy[Any] | None) -> Groups:
    """Return the groups of clients with similar updates."""
    algorithm = _algorithm(run.config)
    assert isinstance(strategy, FDNAS)  # the configuration ensures it
    assert algorithm.num_groups is not None
    present = set(run.cohort.clients)
    updates = {client: moved for client, moved in strategy.updates().items() if client in present}
    return group_by_alphas(updates, num_groups=algorithm.num_groups)


def group_by_alphas(updates: Mapping[int, Tensor], *, num_groups: int) -> dict[str, list[int]]:
    """Clients with similar updates of the alphas: average linkage of cosine distances.

    This is for clients without labels and is not in the paper. Groups are named ``1``, ``2``, ...
    in the order of their first clients.

    Args:
        updates: Each client's updates [A], see ``FDNAS.updates``.
        num_groups: Number of groups, from 2 to the number of clients.

    Raises:
        ConfigError: There are fewer clients than groups.
    """
    from sklearn.cluster import AgglomerativeClustering

    clients = sorted(updates)
    if len(clients) < num_groups:
        raise ConfigError(
            f"algorithm.num_groups={num_groups} for {len(clients)} clients: expected at most as "
            "many groups as clients."
        )
    unit_KA = torch.stack([updates[client] for client in clients])
    unit_KA = unit_KA / unit_KA.norm(dim=1, keepdim=True).clamp(min=1e-30)
    labels = AgglomerativeClustering(
        n_clusters=num_groups, metric="precomputed", linkage="average"
    ).fit_predict((1 - unit_KA @ unit_KA.T).clamp(min=0.0).numpy())
    groups: dict[int, list[int]] = {}
    for client, label in zip(clients, labels.tolist(), strict=True):
        groups.setdefault(label, []).append(client)
    return {str(number): group for number, group in enumerate(groups.values(), 1)}


def _group_run(run: Run, name: str, clients: list[int], states: Mapping[str, Packed] | None) -> Run:
    """Return a group's own run; its folder is created."""
    algorithm, folder = _algorithm(run.config), run.folder / "groups" / name
    search = replace(algorithm.search, hardware=algorithm.group_hardware.get(name))
    if algorithm.inherit:
        search = replace(search, warm_up_rounds=0)
    config = replace(
        run.config, algorithm=search, rounds=algorithm.group_rounds, run_dir=str(folder)
    )
    if not (folder / CONFIG_FILE).exists():
        create_run_folder(config)
    log = EventLog(folder / EVENTS_FILE, [partial(_tell, run.log, name)])
    # private clients have committed, under the run's name, to all that it asks of them
    called = run.cohort.run if run.config.dp else f"{run.cohort.run}.{name}"
    return replace(
        run,
        config=config,
        folder=folder,
        log=log,
        cohort=run.cohort.part(clients, run=called, emit=log.emit),
        checkpoints=make_checkpoints(folder, log),
        inherited=states,
    )


def _fields(event: Event) -> Event:
    return {k: v for k, v in event.items() if k not in ("event", "time", "elapsed")}


def _tell(log: EventLog, name: str, event: Event) -> None:
    """Repeat in the run's events those of a group that matter to whoever watches the run."""
    kind = event["event"]
    if kind in REPEATED:
        log.emit(kind, group=name, **_fields(event))
    elif kind == "warning":
        log.emit("warning", message=f"group {name}: {event['message']}")
    elif kind == "stage_finished":
        log.emit("group_stage", group=name, stage=event["stage"], seconds=event["seconds"])


def _run_one(
    run: Run,
    name: str,
    clients: list[int],
    states: Mapping[str, Packed] | None,
    run_group: Callable[[Run], None],
) -> str | None:
    """Run a group; return the reason if it fails, else None."""
    part, started, reason = _group_run(run, name, clients, states), time.monotonic(), None
    with part.log as log:
        resumed = part.checkpoints.latest("search") is not None
        try:
            with log.attempt(resumed=resumed, circumstances=run.circumstances):
                if promised := read_run(run.folder).privacy:  # it covers the whole run
                    members = [of for of in promised["clients"] if of["client"] in clients]
                    log.emit("privacy", **(_fields(promised) | {"clients": members}))
                with suppress(OutOfTimeError):
                    run_group(part)
        except (ConfigError, QuorumError) as error:
            reason = str(error)
    write_report(part.folder)
    if reason is None:
        write_model_card(part.folder)
    run.log.emit(
        "group_finished",
        group=name,
        clients=sorted(part.cohort.properties),
        status="completed" if reason is None else "failed",
        reason=reason,
        seconds=time.monotonic() - started,
        folder=str(part.folder.relative_to(run.folder)),
        results=read_run(part.folder).numbers(),
    )
    return reason
