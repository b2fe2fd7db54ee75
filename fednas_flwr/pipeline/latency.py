"""Latency on the clients' hardware: a run without a table asks for one before it searches.

The answers are in the run folder (``latency.json``), so a run that is resumed does not ask again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fednas_flwr.algorithms.fdnas import FDNASSettings
from fednas_flwr.algorithms.private_rounds import data_set_of
from fednas_flwr.base.errors import ConfigError, ReplyError
from fednas_flwr.base.files import write_atomically
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.models.networks import make_device, supernet_space
from fednas_flwr.pipeline.run_stages import Run
from fednas_flwr.protocol.requests import MeasureLatency
from fednas_flwr.runs.run_folder import LATENCY_FILE
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.server.exchange import Exchange
from fednas_flwr.settings import Config
from fednas_flwr.spaces.genotype import Genotype
from fednas_flwr.spaces.latency_tables import LatencyTable, from_json, median_table, to_json
from fednas_flwr.spaces.mbconv import MBConvSpace
from fednas_flwr.spaces.space_costs import load_table, measure_network, space_costs

BATCH_SIZE, PASSES = 1, 5


def with_latency(run: Run) -> Config:
    """Return the run's configuration, its latency table made by its clients if it needs one.

    Raises:
        QuorumError: Too few clients sent a table of the run's space.
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
    """Return the cost of a searched network beside its target; None without a target.

    With a table of this machine's kind also what it takes, measured here with the table's batch
    and threads.
    """
    algorithm = config.algorithm
    if not isinstance(algorithm, FDNASSettings) or algorithm.hardware is None:
        return None
    if genotype is None or "search" not in config.stages:
        return None
    hardware, device = algorithm.hardware, make_device(config.runtime.device)
    table, space = load_table(hardware), supernet_space(config, prepared)
    assert isinstance(space, MBConvSpace)  # as the configuration has it
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
    config, space = run.config, supernet_space(run.config, run.prepared)
    assert isinstance(space, MBConvSpace)  # as the configuration has it
    request = MeasureLatency(batch_size=BATCH_SIZE, passes=PASSES, data_set=data_set_of(config))
    tables: list[LatencyTable] = []
    sampling = run.cohort.sampling
    participants = None if sampling is None else sampling.participants("latency", 1)
    wanted = len(participants.clients) if participants else run.cohort.num_clients
    for client, reply in run.cohort.ask(
        Exchange("query.latency", stage="latency", settings=request, participants=participants)
    ):
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
