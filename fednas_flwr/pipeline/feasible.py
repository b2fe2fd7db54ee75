"""Facts about a run before it begins, from its configuration and the prepared data.

:func:`check_run` is asked before the first message, and before there is a run folder. What only
the clients know, such as the budgets of real sites, is found out by their answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from fednas_flwr.algorithms.stage_strategies import make_sampling
from fednas_flwr.base.errors import ConfigError, show
from fednas_flwr.client import making
from fednas_flwr.pipeline import schedule
from fednas_flwr.pipeline.buildable import Made, check_buildable
from fednas_flwr.privacy.books.ledger import Ledger
from fednas_flwr.privacy.books.renyi_filter import Reading, RenyiFilter, covered_steps
from fednas_flwr.privacy.mechanism.renyi import booked_unit
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.privacy.policy import Policy, check_action, check_planned
from fednas_flwr.protocol.states import network_states
from fednas_flwr.report.lookup import CellTable, read_table
from fednas_flwr.runs.checkpoints import KEEP
from fednas_flwr.runs.run_folder import check_room, check_writable
from fednas_flwr.settings import Config, DifferentialPrivacy, expanded
from fednas_flwr.settings.incompatible import searches
from fednas_flwr.settings.names import SPLITS


def check_run(config: Config) -> None:
    """Raise ConfigError for what will not run: device, data, networks or simulated sites.

    Leaves nothing but the cache of prepared data.
    """
    given_table(config)
    made = check_buildable(config)
    check_room(config, written_bytes(config, made.networks), "lower the sizes of the networks")
    if isinstance(config.privacy, DifferentialPrivacy):
        check_sites(config, config.privacy, made)


def written_bytes(config: Config, networks: Mapping[str, nn.Module]) -> int:
    """Return a lower bound of the bytes that checkpoints and exported models take on disk.

    Left out are the moments of optimisers, the ONNX file, and networks that the search is to find.

    Args:
        config: The run's.
        networks: The network that each stage trains.
    """
    copies = {"search": min(KEEP, config.rounds)}
    if "search" not in networks and not searches(config):
        copies["retrain"] = min(KEEP, config.retrain.rounds) + ("export" in config.stages)
    return sum(
        copies.get(stage, 0) * tensor.numel() * tensor.element_size()
        for stage, network in networks.items()
        for state in network_states(network).values()
        for tensor in state.values()
    )


def given_table(config: Config) -> CellTable | None:
    """Return the published accuracies in ``dataset.table``; None without one.

    Raises:
        ConfigError: The file cannot be read, or is no such table.
    """
    if (table := config.dataset.table) is None:
        return None
    try:
        return read_table(expanded("dataset.table.file", table.file), table.columns)
    except ConfigError as error:
        raise ConfigError(f"dataset.table.file={show(table.file)}: {error}") from error


def check_sites(
    config: Config,
    privacy: DifferentialPrivacy,
    made: Made,
) -> None:
    """Refuse a schedule that the policies or budgets of too many simulated sites refuse.

    Args:
        config: The run's.
        privacy: Its privacy.
        made: Its records and networks.
    """
    for index in range(config.clients) if privacy.sites is not None else ():
        if (folder := making.simulated_site(config, index)) is not None:
            check_writable("privacy.sites", folder)
    policies = [
        making.simulated_policy(config, index, made.records, rows)
        for index, rows in enumerate(made.parts)
    ]
    for index, policy in enumerate(policies):
        if privacy.data_set not in policy.data_sets:
            raise ConfigError(
                f"privacy.data_set={privacy.data_set}: client {index}'s policy has only "
                f"{', '.join(policy.data_sets)}."
            )
        making.check_unit(policy.data_sets[privacy.data_set].unit, made.records)
    declared = [policy.data_sets[privacy.data_set].by_split for policy in policies]
    sampling = make_sampling(config, declared)
    least = [p.data_sets[privacy.data_set].least_noise_multiplier for p in policies]
    schedules = schedule.make_schedules(
        config, declared, done={}, sampling=sampling, least_noise=least
    )
    turns = schedule.turns_of(config, sampling)
    sizes = {
        (stage, kind): sum(tensor.numel() for tensor in state.values())
        for stage, network in made.networks.items()
        for kind, state in network_states(network).items()
    }
    covers: dict[str, dict[int, dict[str, Any]]] = {}
    for index, policy in enumerate(policies):
        for planned in schedules[index]:
            num_values = sizes.get((planned.stage, planned.kind), 1)
            _check_release(privacy, policy, planned, client=index, num_values=num_values)
        to_do = {stage: len(rounds) for stage, rounds in turns[index].items()}
        for cover in _covers(config, privacy, policy, schedules[index], to_do, client=index):
            covers.setdefault(cover["stage"], {})[index] = cover
    for of_stage in covers.values():
        quorum = max(1, math.ceil(config.runtime.quorum * len(of_stage) - 1e-9))
        schedule.check_covered(privacy, of_stage, quorum)


def _check_release(
    privacy: DifferentialPrivacy,
    policy: Policy,
    planned: PlannedRelease,
    *,
    client: int,
    num_values: int,
) -> None:
    """Refuse what a site's policy refuses, by the names of the settings."""
    secure = privacy.test_seed is None
    try:
        allowed = check_action(
            policy, privacy.data_set, planned.action, secure_noise=secure, test_seed=not secure
        )
        check_planned(allowed, planned, num_values=num_values)
    except ConfigError as error:
        raise ConfigError(f"{_settings(privacy, planned)}: client {client}: {error}") from error


def _settings(privacy: DifferentialPrivacy, planned: PlannedRelease) -> str:
    """The settings that the terms of a release follow from, with their values."""
    name, norm = planned.noise_name, f"max_grad_norm={planned.max_grad_norm:g}"
    given = schedule.given_noise(privacy, name)
    if given is None:
        return f"privacy.epsilon={privacy.epsilon:g} with privacy.{name}.{norm}"
    return given if name in schedule.GIVEN else f"{given} with {norm}"


def _covers(
    config: Config,
    privacy: DifferentialPrivacy,
    policy: Policy,
    releases: schedule.Schedule,
    to_do: Mapping[str, int],
    *,
    client: int,
) -> list[dict[str, Any]]:
    """Return the most rounds of each stage that a simulated site's budget covers.

    Releases may be charged to more splits than they read, which the site finds out by its records.
    """
    allowed = policy.data_sets[privacy.data_set]
    folder = making.simulated_site(config, client)
    ledger, key = making.simulated_ledger(folder) if folder is not None else (None, None)
    if ledger is not None and key is not None and ledger.exists():
        with Ledger(ledger, key) as books:
            unit = booked_unit(allowed.unit, config.dataset.person_column)
            terms = {"epsilon": allowed.epsilon, "delta": allowed.delta}
            left = books.filters(allowed.account, unit, **terms)
    else:
        fresh = RenyiFilter(epsilon=allowed.epsilon, delta=allowed.delta)
        left = dict.fromkeys(SPLITS, fresh)
    stages: dict[str, list[Reading]] = {}
    for planned in releases:
        reading = (planned.release(allowed.by_split), planned.splits)
        stages.setdefault(planned.stage, []).append(reading)
    return schedule.covered_rounds(releases, covered_steps(left, stages), to_do)
