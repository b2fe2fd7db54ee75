"""Settings that a run learns from its clients: learning rate of private retraining, latency.

Learning rates of DP-SGD follow from its noise, so that one setting serves many data sets and
budgets. The noise of T steps moves every weight in a random walk. At too high a rate the walk is so
long that it drowns what is learnt; at too low a rate steps are wasted. The best length in between
hardly depends on the number of records and clients, the budget or the number of steps.

A run without a table of latencies asks its clients for one before it searches. The answers are
saved in the run folder (``latency.json``), so a resumed run does not ask again.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fednas_flwr.algorithms.fdnas import FDNASSettings
from fednas_flwr.base.errors import ConfigError, ReplyError
from fednas_flwr.base.files import write_atomically
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models import networks
from fednas_flwr.pipeline.beginning import Run
from fednas_flwr.pipeline.schedule import given_noise
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.requests import MeasureLatency
from fednas_flwr.report.templates import render
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.runs.run_folder import LATENCY_FILE
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings import Config, Hardware
from fednas_flwr.settings.incompatible import chooses_rates, follows_noise
from fednas_flwr.settings.names import AUTO, BFLOAT16, FLOAT32, SPLITS
from fednas_flwr.settings.optimizers import LARGEST_STEP
from fednas_flwr.spaces.costs import load_table, measure_network, space_costs, timed_space
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.latency_tables import LatencyTable, from_json, median_table, to_json

LAST_RATE = 0.1  # share of the learning rate that is left in the last round
LEAST_MULTIPLY_ADDS = 10_000_000  # per record; from this number on bfloat16 is faster


def with_learning_rate(run: Run) -> Config:
    """Return the run's configuration with the learning rate that retraining is to use.

    A resumed run keeps its first learning rate, regardless of which clients are connected now.
    """
    config, privacy = run.config, run.config.dp
    if not privacy or not follows_noise(config):
        return config
    known = read_run(run.folder).last("learning_rate")
    weights, walk = config.retrain.weights, privacy.retrain.noise_walk
    if known:
        lr = known["lr"]
    else:
        (release,) = (planned for planned in run.schedule if planned.noise_name == "retrain")
        noise = _noise_of_mean(run, release)
        steps = config.retrain.planned * privacy.retrain.local_steps
        assert walk is not None
        lr = learning_rate(walk, noise, steps=steps, momentum=weights.momentum)
        lr = min(lr, LARGEST_STEP)
        rates = {"lr": lr, "min_lr": LAST_RATE * lr}
        run.log.emit("learning_rate", **rates, noise=noise, steps=steps, walk=walk)
    weights = replace(weights, lr=lr, min_lr=LAST_RATE * lr)
    return replace(config, retrain=replace(config.retrain, weights=weights))


def with_precision(run: Run, config: Config, description: networks.Description) -> Config:
    """The configuration with the number format of retraining, chosen if it is ``auto``.

    It is bfloat16 if this processor computes in it, the clients run on this machine, and the
    network has no grouped convolutions and so many multiply-adds that its steps become faster
    (``scripts/bench_precision.py``). It is float32 with privacy and on a GPU, where the time of a
    step is that of starting its kernels. A resumed run keeps its first format.
    """
    if config.training.precision != AUTO:
        return config
    events = read_run(run.folder)
    if known := events.last("precision"):
        precision = known["precision"]
    else:
        with torch.device("meta"):
            layers = list(networks.make_network(description).modules())
        grouped = any(getattr(layer, "groups", 1) > 1 for layer in layers)
        many = events.last("derived")["multiply_adds"] >= LEAST_MULTIPLY_ADDS
        address = getattr(config.runtime, "ray_address", None)
        elsewhere = config.runtime.name == "deployment" or address
        device = networks.make_device(config.runtime.device)
        has_it = device.type == "cpu" and networks.computes_in_bfloat16(device)
        suits = many and not grouped and has_it and not elsewhere and not config.dp
        precision = BFLOAT16 if suits else FLOAT32
        run.log.emit("precision", precision=precision)
    return replace(config, training=replace(config.training, precision=precision))


def explained(run: Run) -> list[str]:
    """Explain each kind of release of a private run, and the origin of its terms."""
    config, privacy = run.config, run.config.private
    known = [properties["splits"] for properties in run.cohort.properties.values()]
    rated = config.retrains and not chooses_rates(config)
    text = render(
        "calibration.txt.j2",
        records={split: [splits.get(split, 0) for splits in known] for split in SPLITS},
        releases=[
            (
                release,
                [release.expected_batch(splits) for splits in known],
                _noise_of_mean(run, release),
                given_noise(privacy, release.noise_name),
            )
            for release in run.schedule
        ],
        rated=with_learning_rate(run).retrain.weights if rated else None,
        follows_noise=follows_noise(config),
        asked=config.asked,
        privacy=privacy,
        span=_span,
    )
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n") if paragraph.strip()]


def _noise_of_mean(run: Run, release: PlannedRelease) -> float:
    """Return the noise in each value of a step's mean over the clients."""
    known = list(run.cohort.properties.values())
    batches = [release.expected_batch(one["splits"]) for one in known]
    asked, honest = min(run.config.asked, len(batches)), known[0].get("honest_sites", 1)
    return noise_per_step(release, batches, asked=asked, honest=honest)


def _span(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def noise_per_step(
    release: PlannedRelease, batches: Sequence[float], *, asked: int, honest: int = 1
) -> float:
    """The standard deviation of the noise in a value of a step's mean gradient.

    Args:
        release: A stage's releases of gradients, with calibrated noise.
        batches: Every client's expected batch.
        asked: Number of clients that answer in a step.
        honest: Number of clients whose noise a secure sum needs; if all answer, it has more noise.
    """
    if release.noise_multiplier is None:
        raise ValueError(f"the noise of {release.key} is not calibrated yet")
    noises = asked / honest if release.shared else asked
    whole = asked * sum(batches) / len(batches)
    return release.noise_multiplier * release.max_grad_norm * math.sqrt(noises) / whole


def learning_rate(walk: float, noise: float, *, steps: int, momentum: float) -> float:
    """The learning rate at which the noise of all steps gives each weight a deviation of ``walk``.

    ``walk (1 - m) / (noise sqrt(T))``: with momentum m, a step moves a weight in the end by ``lr /
    (1 - m)`` times its noise.

    Args:
        walk: The standard deviation, > 0, computed as if the rate never fell.
        noise: Result of :func:`noise_per_step`.
        steps: T, at least 1.
        momentum: m, from 0 to below 1.
    """
    return walk * (1 - momentum) / (noise * math.sqrt(steps))


BATCH_SIZE, PASSES = 1, 5


def with_latency(run: Run) -> Config:
    """Return the run's configuration, with a latency table from its clients if it needs one.

    Raises:
        QuorumError: Too few clients sent a table for the run's search space.
    """
    config, path = run.config, run.folder / LATENCY_FILE
    algorithm = config.algorithm
    if not isinstance(algorithm, FDNASSettings) or algorithm.hardware is None:
        return config
    hardware = algorithm.hardware
    if hardware.unit != "ms" or hardware.table is not None:
        return config
    if not path.exists():
        with run.stage("latency"):
            write_atomically(path, to_json(_ask(run)))
    hardware = replace(hardware, table=str(path))
    return replace(config, algorithm=replace(algorithm, hardware=hardware))


def cost_of(config: Config, prepared: Prepared, genotype: Genotype | None) -> dict[str, Any] | None:
    """Return the cost of a searched network and its target; None without a target.

    If the table is of this machine's kind, the result also has the latency measured here, with the
    table's batch size and threads.
    """
    algorithm, device = config.algorithm, networks.make_device(config.runtime.device)
    hardware = getattr(algorithm, "hardware", None) if config.searches else None
    limits = getattr(getattr(algorithm, "pool", algorithm), "limits", None)
    if limits is not None and limits.table is not None:
        hardware = Hardware(limits.table, "ms", limits.latency_ms, "additive", 1.0, 1.0)
    if hardware is None or genotype is None:
        return None
    table, space = load_table(hardware), timed_space(networks.supernet_space(config, prepared))
    measured = None if table is None else measure_network(space, table, genotype, device=device)
    return {
        "unit": hardware.unit,
        "target": hardware.target,
        "predicted": space_costs(space, table).of_path(space.path(genotype)),
        "measured": measured,
        "machine": None if table is None else table.machine,
    }


def _ask(run: Run) -> LatencyTable:
    """Return the median of the tables that the run's clients measure."""
    config, space = run.config, timed_space(networks.supernet_space(run.config, run.prepared))
    request = MeasureLatency(batch_size=BATCH_SIZE, passes=PASSES, data_set=config.private_data_set)
    tables: list[LatencyTable] = []
    participants = run.cohort.participants("latency", 1)
    wanted = len(participants.clients) if participants else run.cohort.num_clients
    exchange = Exchange("query.latency", "latency", request, participants=participants)
    for client, reply in run.cohort.ask(exchange):
        try:
            table = from_json(reply.properties["latency"], origin=f"the table of client {client}")
            space_costs(space, table)
            if table.batch_size != BATCH_SIZE:
                raise ReplyError(f"measured batches of {table.batch_size} instead of {BATCH_SIZE}")
        except (ReplyError, ConfigError) as error:
            place = {"stage": "latency", "round": 0, "action": "query.latency", "client": client}
            run.cohort.emit("client_failed", **place, reason=str(error))
        else:
            tables.append(table)
    if len(tables) < (quorum := run.cohort.quorum_of(wanted)):
        raise QuorumError(
            f"{len(tables)} of {wanted} clients sent a latency table of this "
            f"search space, {quorum} are needed."
        )
    return median_table(tables)
