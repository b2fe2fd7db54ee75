"""The stages of a run, in order: search, derive, retrain, export, evaluate, report.

Runs on the server, over any Grid. Each round leaves a checkpoint, so a run that was killed goes
through the same stages again and finds its rounds done.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import flwr
import torch
from flwr.serverapp import Grid
from torch import nn

import fednas_flwr
from fednas_flwr.algorithms.base import RoundStrategy
from fednas_flwr.algorithms.fdnas import CFDNASSettings
from fednas_flwr.algorithms.sampled_rounds import make_sampling
from fednas_flwr.algorithms.stage_strategies import make_retraining, make_search
from fednas_flwr.client.making import make_objective, simulated_properties
from fednas_flwr.data.loaders import concat_splits, make_client_data, server_split
from fednas_flwr.data.prepared import make_data, make_server_data, save_partition
from fednas_flwr.data.summary import found, summarised
from fednas_flwr.models.export import export_onnx, export_safetensors
from fednas_flwr.models.metrics import (
    accuracies_of_parts,
    best_threshold,
    detailed,
    measured,
    pooled_baselines,
    predicted,
    shares_at,
)
from fednas_flwr.models.networks import describe_network, given_genotype, make_device, make_network
from fednas_flwr.models.prediction import Model
from fednas_flwr.pipeline.buildable import pools_records
from fednas_flwr.pipeline.commitment import NEEDED_PROPERTIES, awaited_run, commit
from fednas_flwr.pipeline.feasible import given_table
from fednas_flwr.pipeline.groups import run_groups
from fednas_flwr.pipeline.handover import hand_over
from fednas_flwr.pipeline.latency import cost_of, with_latency
from fednas_flwr.pipeline.learning_rates import with_learning_rate
from fednas_flwr.pipeline.pooled_statistics import (
    found_statistics,
    inherited_statistics,
    known_statistics,
    noised_statistics,
)
from fednas_flwr.pipeline.run_stages import OutOfTimeError, Run
from fednas_flwr.pipeline.schedule import Schedule, largest_schedule, make_schedules, private_stage
from fednas_flwr.privacy.plan import STATISTICS
from fednas_flwr.protocol.requests import (
    Amount,
    Describe,
    Evaluate,
    LocalTraining,
    Personalise,
    Settings,
    Site,
)
from fednas_flwr.protocol.states import Packed
from fednas_flwr.report.lookup import CellTable, percentiles_by_round
from fednas_flwr.runs.checkpoints import CheckpointFolder
from fednas_flwr.runs.events import Event, EventLog, clients_of, read_events
from fednas_flwr.runs.numbers import EVENTS_FILE
from fednas_flwr.runs.run_folder import GENOTYPE_FILE, PARTITION_FILE
from fednas_flwr.search.objective import Objective
from fednas_flwr.server.cohort import TOTAL, Cohort, Emit, QuorumError, ignore_events
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings import Config, DifferentialPrivacy, GivenNetwork
from fednas_flwr.settings.incompatible import has_real_sites
from fednas_flwr.settings.names import LEAST_CALIBRATED, MOST_SHOWN, SPLITS
from fednas_flwr.settings.optimizers import Configuration
from fednas_flwr.settings.parser import seconds
from fednas_flwr.settings.run_settings import Deployment
from fednas_flwr.spaces.costs import count_multiply_adds, count_parameters
from fednas_flwr.spaces.genotype import Genotype, save_genotype, to_json
from fednas_flwr.spaces.operations import SkipNetwork

# What each real site must tell of its data, from which the server builds networks.
CONNECT_S = 60.0  # for simulated clients, which are there from the start
SITE_PROPERTIES = (
    *("input_shape", "image_shape", "scattering"),
    *("schema", "mean", "std", "class_names", "multi_label"),
)


def run_stages(config: Config, grid: Grid, log: EventLog, *, resumed: bool) -> None:
    """Run all stages that ``config.stages`` names and write their results into the run folder.

    Args:
        config: With ``run_dir`` set to an existing folder.
        grid: Flower's way to the clients.
        log: Receives every event.
        resumed: Whether the folder held a run that is continued.

    Raises:
        QuorumError: Too few clients answered.
        ConfigError: A setting does not fit the data.
    """
    torch.set_num_threads(config.runtime.threads)
    circumstances = _circumstances()
    if config.runtime.name == "inline":  # elsewhere every client's process chooses its own
        circumstances["device"] = str(make_device(config.runtime.device))
    with log.attempt(resumed=resumed, circumstances=circumstances):
        _run_stages(config, grid, log, circumstances, resumed=resumed)


def _run_stages(
    config: Config, grid: Grid, log: EventLog, circumstances: dict[str, Any], *, resumed: bool
) -> None:
    if config.run_dir is None:
        raise ValueError("config.run_dir must name the run folder")
    # A resumed run books under another name, since what it repeats is released again; but one that
    # people have approved meanwhile keeps the name that they have approved.
    earlier = read_events(Path(config.run_dir) / EVENTS_FILE) if resumed else []
    run = begin(config, grid, log, circumstances, earlier=earlier)
    with suppress(OutOfTimeError):
        _run_and_report_spending(run)


def begin(
    config: Config,
    grid: Grid,
    log: EventLog,
    circumstances: dict[str, Any],
    *,
    earlier: Sequence[Event],
) -> Run:
    """Return a run whose clients are connected and, with privacy, keep its schedule.

    Args:
        config: As of :func:`run_stages`.
        grid: Reaches the clients.
        log: Takes the events.
        circumstances: Versions and machine.
        earlier: Events of the run that goes on; empty of a new one.
    """
    resumed = bool(earlier)
    limit = config.runtime.time_limit
    ends_at = None if limit is None else time.monotonic() + seconds("time_limit", limit)
    folder = Path(str(config.run_dir))
    table = given_table(config)
    name = awaited_run(earlier) or f"{folder.name}.{secrets.token_hex(4)}"
    cohort = make_cohort(config, run=name, emit=log.emit)
    private = isinstance(config.privacy, DifferentialPrivacy)
    needed = ("client", *(NEEDED_PROPERTIES if private else ()))
    if has_real_sites(config):
        alike = (*SITE_PROPERTIES, *(("honest_sites",) if config.secure_sum else ()))
        cohort.connect(grid, needed=(*needed, *alike), alike=alike)
        prepared = make_server_data(config, next(iter(cohort.properties.values())))
    else:
        prepared, parts = make_data(config)
        if not (folder / PARTITION_FILE).exists():
            save_partition(folder / PARTITION_FILE, parts)
        cohort.connect(grid, needed=needed, known=simulated_properties(config, (prepared, parts)))
    for event in earlier:
        if event.get("expelled"):
            cohort.expel(event["client"], event["reason"])
    statistics = known_statistics(earlier)
    if prepared.uses_own_statistics and not private:
        statistics = statistics or found_statistics(prepared, cohort, log)
    if private and not _releases_statistics(config):
        statistics = statistics or inherited_statistics(folder, log)
    properties = [known for _, known in sorted(cohort.properties.items())]
    splits = [known.get("splits", dict.fromkeys(SPLITS, 0)) for known in properties]
    declared: Sequence[Mapping[str, int]] = splits
    if config.samples:
        declared = _declared_at_first(cohort, earlier)
        cohort.sampling = make_sampling(config, declared)
    counts = [known.get("class_counts", []) for known in properties]
    told = all(len(count) == prepared.num_classes for count in counts)  # not in private runs
    whole = len(splits) <= MOST_SHOWN or has_real_sites(config)  # whose numbers a resume needs
    log.emit(
        "partition",
        class_names=list(prepared.train.class_names),
        multi_label=prepared.train.multi_label,
        counts=counts if told and whole else None,
        **(
            {"splits": splits, "clients": sorted(cohort.properties)}
            if whole
            else {"summary": summarised(splits)}
        ),
        server_test=len(prepared.server_test) if prepared.server_test is not None else 0,
    )
    if len(prepared.train) and not private and (lines := found(prepared)):
        log.emit("data", found=lines)
    checkpoints = CheckpointFolder(
        folder / "checkpoints", warn=lambda message: log.emit("warning", message=message)
    )
    schedule: Schedule = []
    if isinstance(config.privacy, DifferentialPrivacy):
        latest = {stage: checkpoints.latest(stage) for stage in ("search", "retrain")}
        done = {stage: point.round for stage, point in latest.items() if point is not None}
        if statistics is not None:
            done[STATISTICS] = 1
        least = [known.get("least_noise_multiplier", LEAST_CALIBRATED) for known in properties]
        schedules = make_schedules(
            config, declared, done=done, sampling=cohort.sampling, least_noise=least
        )
        commit(cohort, config, schedules, done=done, resumed=resumed)
        schedule = largest_schedule(schedules)
        if statistics is None and any(planned.kind == STATISTICS for planned in schedule):
            data_set = config.privacy.data_set
            statistics = noised_statistics(prepared, cohort, schedule, log, data_set=data_set)
    if statistics is not None:
        cohort.statistics = statistics
        prepared = replace(prepared, mean=statistics.mean, std=statistics.std)
    shared = (prepared, schedule, circumstances, table)
    return Run(config, folder, grid, log, cohort, checkpoints, *shared, ends_at=ends_at)


def _releases_statistics(config: Config) -> bool:
    """Return whether private clients release means and deviations of a table for this run."""
    privacy = config.privacy
    return isinstance(privacy, DifferentialPrivacy) and (
        privacy.statistics_noise_multiplier is not None
    )


def _declared_at_first(cohort: Cohort, earlier: Sequence[Event]) -> list[Mapping[str, int]]:
    """Return the records that each client declared when the run began, by split.

    A resumed run draws its clients by the same numbers, whoever is connected now; of one that was
    not connected then nothing is known.
    """
    told = {client: known.get("splits", {}) for client, known in cohort.properties.items()}
    begun = [event for event in earlier if event["event"] == "partition" and event.get("splits")]
    if begun:
        told = dict(zip(clients_of(begun[0]), begun[0]["splits"], strict=True))
    return [told.get(client, {}) for client in range(cohort.num_clients)]


def _run_from_search(run: Run) -> None:
    """Search, retrain, export and evaluate, as far as the configuration says.

    A network that is trained is exported before anything can go wrong with its test.
    """
    config = run.config
    if isinstance(config.algorithm, CFDNASSettings):
        run_groups(run, search=start_search, run_group=_run_and_report_spending)
        return
    genotype, configuration = _search(run)
    if genotype is None and not isinstance(config.algorithm, GivenNetwork):
        return
    description = describe(run, genotype, configuration)
    if "retrain" not in config.stages:
        return
    network, states = retrain(run, description, configuration)
    if "export" in config.stages:
        with run.stage("export"):
            model = Model(network, run.prepared.inputs, description)
            export_safetensors(model, run.folder)
            path, difference = export_onnx(model, run.folder)
            files = ["model.safetensors", path.name]
            inputs = asdict(model.inputs)
            run.log.emit("exported", files=files, onnx_max_difference=difference, inputs=inputs)
    if "evaluate" in config.stages:
        _evaluate(run, description, network, states)
    if "export" in config.stages:
        hand_over(run)


def _run_and_report_spending(run: Run) -> None:
    """Take a run, or one of its groups, through its stages; report its spending."""
    try:
        _run_from_search(run)
    finally:
        if isinstance(run.config.privacy, DifferentialPrivacy):
            _report_spending(run)


def _search(run: Run) -> tuple[Genotype | None, Configuration | None]:
    """Return the searched or given genotype, None for a network by name; and what to retrain with.

    The latter is None where the retrain settings stand.
    """
    config, configuration = run.config, None
    if "search" in config.stages and not isinstance(config.algorithm, GivenNetwork):
        strategy = start_search(run)
        genotype, configuration = strategy.derive(), strategy.configuration()
        if run.table is not None:
            _look_up(run, run.table)
    else:
        given = given_genotype(config)
        if given is None:
            return None, None
        genotype = given
    save_genotype(run.folder / GENOTYPE_FILE, genotype)
    return genotype, configuration


def _look_up(run: Run, table: CellTable) -> None:
    """Tell the percentiles of the cells that stood best in the rounds."""
    events = read_events(run.folder / EVENTS_FILE)
    snapshots = [event for event in events if event["event"] in ("alphas", "rewarded", "best")]
    percentiles = percentiles_by_round(table, snapshots)
    run.log.emit("looked_up", cells=len(table.percentiles), percentiles=sorted(percentiles.items()))


def start_search(
    run: Run, *, prepare: Callable[[RoundStrategy[Any]], None] = lambda _: None
) -> RoundStrategy[Any]:
    """Return the strategy of the search stage after its last round.

    Args:
        run: The run.
        prepare: Called with the strategy before the first round.

    Raises:
        OutOfTimeError: The run's time has ended before.
    """
    run.config = config = with_latency(run)
    private = private_stage(config, run.schedule, "search")
    strategy = make_search(config, run.prepared, run.cohort, run.checkpoints, private)
    if run.inherited is not None:
        strategy.inherit(run.inherited)
    prepare(strategy)
    with run.stage("search", config.rounds):
        strategy.ends_at = run.ends_at
        strategy.start(run.grid, num_rounds=config.rounds)
    if strategy.rounds_done < config.rounds:
        run.tell_cut("search", strategy.rounds_done, config.rounds)
        raise OutOfTimeError
    return strategy


def describe(
    run: Run, genotype: Genotype | None, configuration: Configuration | None
) -> dict[str, Any]:
    """Describe the network to retrain, and report its cost."""
    with run.stage("derive"):
        description = describe_network(run.config, run.prepared, genotype)
        network = make_network(description | {"auxiliary": False})
        run.log.emit(
            "derived",
            genotype=json.loads(to_json(genotype)) if genotype else None,
            configuration=asdict(configuration) if configuration else None,
            num_parameters=count_parameters(network),
            multiply_adds=count_multiply_adds(network, run.prepared.input_shape),
            cost=cost_of(run.config, run.prepared, genotype),
        )
    return description


def retrain(
    run: Run, description: dict[str, Any], configuration: Configuration | None
) -> tuple[nn.Module, dict[str, Packed]]:
    """Return the trained network and its packed states."""
    private = private_stage(run.config, run.schedule, "retrain")
    config = with_learning_rate(run)
    strategy, network = make_retraining(
        config, description, run.cohort, run.checkpoints, private, configuration
    )
    rounds = run.config.retrain.rounds
    with run.stage("retrain", rounds):
        strategy.ends_at = run.ends_at
        strategy.start(run.grid, num_rounds=rounds)
    if strategy.rounds_done < rounds:
        run.tell_cut("retrain", strategy.rounds_done, rounds)
    strategy.load_into(network)
    return network, strategy.model


def _evaluate(
    run: Run, description: dict[str, Any], network: nn.Module, states: dict[str, Packed]
) -> None:
    """Measure the network on the server's test set and on every client's own test records."""
    config, prepared = run.config, run.prepared
    device = make_device(config.runtime.device)
    with run.stage("evaluate"):
        private = private_stage(config, run.schedule, "evaluate")
        shows_clients = not (config.secure_sum or isinstance(config.privacy, DifferentialPrivacy))
        threshold, central = None, None
        objective = make_objective(config, prepared.train, torch.device("cpu"))
        if shows_clients and objective.positive_class(prepared.num_classes) is not None:
            threshold = _threshold(run, description, states)
        if prepared.server_test is not None:
            test = server_split(prepared.server_test, prepared.mean, prepared.std)
            logits, labels = predicted(network.to(device), test, device)
            metrics = measured(logits, labels, objective=objective, with_scores=True)
            central = metrics.as_json() | detailed(
                logits, labels, objective=objective, threshold=threshold, seed=config.seed
            )
            if isinstance(network, SkipNetwork) and network.skip is not None:
                central |= accuracies_of_parts(network, test, device, objective=objective)
            network.cpu()
        baselines = _baselines(run, objective) if pools_records(config) else {}
        site = None if private is None else Site(private.data_set)
        results: dict[str, Any] = {"clients": [], "personalised": []}
        if config.dataset.fractions["test"] > 0:
            if private is None or private.noise_multiplier("metrics") is not None:
                request = Evaluate(
                    network=description, split="test", site=site, with_scores=shows_clients
                )
                tested = _ask_tests(run, "evaluate.model", request, states, threshold=threshold)
                if config.secure_sum:
                    results["total"] = tested[0] if tested else None
                else:
                    results["clients"] = tested
            if config.evaluation.personalised:
                last = Personalise(local=_last_round(config, description))
                results["personalised"] = _ask_tests(run, "evaluate.personalised", last, states)
        told = {name: baselines.get(name) for name in ("linear", "trees")}
        run.log.emit("evaluated", central=central, **told, **results)


def _threshold(run: Run, description: dict[str, Any], states: dict[str, Packed]) -> float | None:
    """Return the probability from which a record counts as positive, by validation records.

    None where no client has such records of both kinds, or too few clients answer.
    """
    cohort = run.cohort
    having = [c for c in _testers(run) if cohort.properties[c].get("splits", {}).get("validation")]
    histograms, weights = [], []
    with suppress(QuorumError):
        for _, reply in cohort.ask(
            Exchange(
                "evaluate.model",
                stage="evaluate",
                settings=Evaluate(network=description, split="validation", with_scores=True),
                states=states,
                among=having,
            )
        ):
            if "histogram" in reply.properties:
                histograms.append(reply.properties["histogram"])
                weights.append(reply.num_examples)  # and not what it has counted
    return best_threshold(histograms, weights) if histograms else None


def _testers(run: Run) -> list[int]:
    """Return the clients that test the network: as many as a round asks."""
    clients, sampling = run.cohort.clients, run.cohort.sampling
    if sampling is None:
        return clients
    return sorted(set(clients) & set(sampling.participants("evaluate", 1).clients))


def _ask_tests(
    run: Run,
    action: str,
    settings: Settings,
    states: dict[str, Packed],
    *,
    threshold: float | None = None,
) -> list[dict[str, Any]]:
    """Collect the results of all clients that have test records; warn if they are few."""
    results: list[dict[str, Any]] = []
    cohort = run.cohort
    having = [c for c in _testers(run) if cohort.properties[c].get("splits", {}).get("test") != 0]
    if not having:
        return results
    if len(having) < len(cohort.clients):
        cohort = cohort.part(having, run=cohort.run, emit=cohort.emit)
    try:
        for client, reply in cohort.ask(
            Exchange(
                action, stage="evaluate", settings=settings, states=states, releases=run.schedule
            )
        ):
            fields: dict[str, Any] = {"client": client, "num_examples": reply.num_examples}
            if client == TOTAL:
                fields = {"sites": reply.sites, "num_examples": reply.num_examples}
            fields |= reply.properties.get("scores", {})
            if threshold is not None and "histogram" in reply.properties:
                fields |= shares_at(reply.properties["histogram"], threshold)
            results.append(dict(reply.metrics) | fields)
    except QuorumError as error:  # the trained network is worth more than its test
        run.log.emit("warning", message=f"few clients could test the network: {error}")
    return results


def _last_round(config: Config, description: dict[str, Any]) -> LocalTraining:
    """Return how clients train in the last round of retraining."""
    retrain = config.retrain
    return LocalTraining(
        description,
        "train+validation",
        Amount(retrain.local_epochs, None, retrain.batch_size),
        retrain.weights.at_round(retrain.rounds, retrain.rounds),
        retrain.auxiliary_weight,
        retrain.drop_path_prob,
    )


def _report_spending(run: Run) -> None:
    """Ask the clients what their budgets have paid; a run that has failed may not learn it."""
    spent = []
    with suppress(QuorumError):
        for client, reply in run.cohort.ask(
            Exchange("query.describe", stage="evaluate", settings=Describe(), also_left=True)
        ):
            if "spent" in reply.properties:
                spent.append({"client": client, "spent": reply.properties["spent"]})
    run.log.emit("privacy_spent", clients=spent)


def _baselines(run: Run, objective: Objective) -> dict[str, dict[str, float]]:
    """Return the test scores of models fitted to the pooled records that the network trains on."""
    prepared = run.prepared
    if prepared.server_test is None:
        return {}
    settings, held_out = run.config.dataset, run.config.retrain.evaluate_every > 0
    key, fractions = settings.split_key.encode(), settings.fractions
    clients = (
        make_client_data(prepared, part, key=key, fractions=fractions)
        for part in make_data(run.config)[1]
    )
    train = [
        client.train if held_out else concat_splits(client.train, client.validation)
        for client in clients
    ]
    test = server_split(prepared.server_test, prepared.mean, prepared.std)
    return pooled_baselines(train, test, num_classes=prepared.num_classes, objective=objective)


def _circumstances() -> dict[str, Any]:
    """Describe the machine and the software of a run, for its readers."""
    return {
        "versions": {
            "fednas_flwr": fednas_flwr.__version__,
            "flwr": flwr.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "commit": _commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
    }


def _commit() -> str | None:
    """Return the git commit of the package's folder, None when it is not a checkout."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def make_cohort(config: Config, *, run: str, emit: Emit = ignore_events) -> Cohort:
    """Return the server's way to the clients, with the runtime's quorum, deadlines and limits."""
    privacy, runtime = config.privacy, config.runtime
    return Cohort(
        run=run,
        num_clients=config.clients,
        quorum_share=runtime.quorum,
        deadline_s=runtime.deadline_s,
        connect_s=runtime.connect_s if isinstance(runtime, Deployment) else CONNECT_S,
        wire=runtime.wire,
        fewest_records=privacy.fewest_records if isinstance(privacy, DifferentialPrivacy) else 0.0,
        most_records=runtime.most_records,
        largest_share=runtime.largest_share,
        secure_sum=config.secure_sum is not None,
        emit=emit,
    )
