"""Estimate of a run's cost from a few steps: time, traffic, memory, disk and epsilon.

Everything is as in the run, in a folder that is removed, but the stages end after their first round
and the clients take one step of local training where the run takes many; one client takes a few,
which tell what a step takes. Main function: :func:`estimate`.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp

from fednas_flwr.algorithms.base import RoundStrategy
from fednas_flwr.algorithms.fdnas import whole_search
from fednas_flwr.algorithms.successive_halving import SuccessiveHalvingSettings
from fednas_flwr.algorithms.zero_cost import ZeroCostSettings
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.deploy.ray_clusters import places
from fednas_flwr.models.networks import given_genotype, make_device, supernet_space
from fednas_flwr.pipeline.beginning import begin
from fednas_flwr.pipeline.learning_rates import explained
from fednas_flwr.pipeline.run_stages import OutOfTimeError
from fednas_flwr.pipeline.stages import describe, retrain, start_search
from fednas_flwr.protocol.messages import Request, decode_request, encode_states
from fednas_flwr.protocol.messages import encode_request as encode
from fednas_flwr.report.guarantee import overall_text
from fednas_flwr.report.quantities import duration, num_bytes
from fednas_flwr.runs.checkpoints import KEEP
from fednas_flwr.runs.events import EventLog, read_events
from fednas_flwr.runs.numbers import EVENTS_FILE
from fednas_flwr.runs.run_folder import create_run_folder, free_bytes
from fednas_flwr.settings import (
    Config,
    DifferentialPrivacy,
    dump_config,
    expanded,
)
from fednas_flwr.settings.incompatible import searches
from fednas_flwr.settings.runtimes import RayRuntime

FEW = 4  # steps that tell what one takes
DRAWS = 4  # of zero_cost, likewise


@dataclass(frozen=True)
class StageEstimate:
    """Estimate of one stage.

    Attributes:
        name: ``search`` or ``retrain``.
        rounds: Number of rounds.
        round_s: Seconds of the first one.
        round_bytes: Of its messages' tensors, both directions.
        checkpoint_bytes: Of the one that it leaves.
    """

    name: str
    rounds: int
    round_s: float
    round_bytes: int
    checkpoint_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of all rounds, if they are like the first."""
        return self.rounds * self.round_s


@dataclass(frozen=True)
class Estimate:
    """Estimate of a run on this machine.

    Attributes:
        stages: In their order.
        memory_bytes: Peak of this process, which holds server and clients.
        gpu_bytes: Peak on the GPU; None without one.
        disk_bytes: Of the checkpoints that stay, as large as those of the first rounds.
        free_bytes: What the disk of the run's folder has free.
        privacy: (epsilon, delta) and what they protect; empty without.
        at_once: Clients that are computed side by side.
    """

    stages: tuple[StageEstimate, ...]
    memory_bytes: int
    gpu_bytes: int | None
    disk_bytes: int
    free_bytes: int
    privacy: str
    at_once: int

    def lines(self) -> list[str]:
        """Return what ``fednas run --dry-run`` prints."""
        shown = [
            f"{stage.name:8} {stage.rounds} round{'s' * (stage.rounds != 1)} of "
            f"{duration(stage.round_s)}: {duration(stage.seconds)}, "
            f"{num_bytes(stage.rounds * stage.round_bytes)} of traffic"
            for stage in self.stages
        ]
        seconds = sum(stage.seconds for stage in self.stages)
        traffic = sum(stage.rounds * stage.round_bytes for stage in self.stages)
        shown.append(f"together {duration(seconds)}, {num_bytes(traffic)} of traffic")
        memory = f"memory   {num_bytes(self.memory_bytes)} in this process, clients included"
        gpu = "" if self.gpu_bytes is None else f"; {num_bytes(self.gpu_bytes)} on the GPU"
        shown.append(memory + gpu)
        short = ": too little" if self.disk_bytes > self.free_bytes else ""
        shown.append(
            f"disk     {num_bytes(self.disk_bytes)} of checkpoints, "
            f"{num_bytes(self.free_bytes)} free{short}"
        )
        if self.privacy:
            shown.append(f"privacy  (epsilon, delta) at most {self.privacy}")
        side = f", {self.at_once} clients side by side" if self.at_once > 1 else ""
        shown.append(
            f"Measured by a few steps on this machine{side}, as if all rounds were like the first. "
            "What is retrained after a search is a random network of the space. Not counted: "
            "evaluation, export, baselines, and the scores of the pool of successive_halving."
        )
        return shown


def estimate(config: Config) -> Estimate:
    """Return what a checked configuration would take; leaves nothing but the cache of data.

    Raises:
        ConfigError: The clients' data lies on other machines.
        QuorumError: Clients refuse, as they would in the run.
    """
    if config.runtime.name == "deployment":
        raise ConfigError(
            "--dry-run with runtime=deployment: only the sites know their data and machines; "
            "measure runtime=inline on data like theirs."
        )
    with tempfile.TemporaryDirectory(prefix="fednas-dry-run-") as folder:
        return replace(_estimate(own_folder(config, Path(folder))), free_bytes=free_bytes(config))


def private_terms(config: Config) -> list[str]:
    """Return what a private run's noise, batches and learning rate would be, and why.

    Raises:
        ConfigError: The run is not private, or its clients' data lies on other machines.
        QuorumError: Clients refuse, as they would in the run.
    """
    if not isinstance(config.privacy, DifferentialPrivacy):
        raise ConfigError("privacy=none: nothing is to be calibrated; set privacy=dp.")
    if config.runtime.name == "deployment":
        raise ConfigError(
            "runtime=deployment: only the sites know how many records they have; calibrate "
            "runtime=inline on data like theirs."
        )
    with tempfile.TemporaryDirectory(prefix="fednas-calibrate-") as folder:
        config = own_folder(config, Path(folder))
        grid = InProcessGrid(make_client_app(dump_config(config)), config.clients)
        with EventLog(Path(str(config.run_dir)) / EVENTS_FILE) as log:
            run = begin(config, grid, log, {}, earlier=[])
            events = read_events(run.folder / EVENTS_FILE)
            (promised,) = [event for event in events if event["event"] == "privacy"]
            return [*explained(run), f"(epsilon, delta) at most {overall_text(promised)}"]


def own_folder(config: Config, folder: Path) -> Config:
    """Return the configuration of the run that is measured, whose folder is made."""
    algorithm, privacy = config.algorithm, config.privacy
    config = whole_search(config)
    if isinstance(algorithm, SuccessiveHalvingSettings):
        keep = algorithm.pool.size(config.search_space.name)
        pool = replace(algorithm.pool, draws=keep, keep=keep, by=[], shortlist=None)
        config = replace(config, algorithm=replace(algorithm, pool=pool))
    if isinstance(privacy, DifferentialPrivacy) and privacy.sites is not None:
        sites = expanded("privacy.sites", privacy.sites)
        if sites.exists():  # whose real budgets pay nothing
            shutil.copytree(sites, folder / "sites")
        config = replace(config, privacy=replace(privacy, sites=str(folder / "sites")))
    return create_run_folder(replace(config, run_dir=str(folder / "run")))


def _estimate(config: Config) -> Estimate:
    torch.set_num_threads(config.runtime.threads)
    folder, device = Path(str(config.run_dir)), make_device(config.runtime.device)
    grid = MeasuringGrid(make_client_app(dump_config(config)), config)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stages = []
    with EventLog(folder / EVENTS_FILE) as log:
        run = begin(config, grid, log, {}, earlier=[])
        run.ends_at = -math.inf
        grid.properties = run.cohort.properties
        genotype, factor = given_genotype(config), 1.0
        if searches(config):

            def few(strategy: RoundStrategy[Any]) -> None:
                nonlocal factor
                settings = strategy.settings
                if isinstance(settings, ZeroCostSettings) and settings.draws > DRAWS:
                    factor = settings.draws / DRAWS
                    strategy.settings = replace(
                        settings, draws=DRAWS, evolution=None, shortlist=None
                    )

            with suppress(OutOfTimeError):
                start_search(run, prepare=few)
            stages.append(_stage(grid, folder, "search", config.rounds, factor))
            space = supernet_space(run.config, run.prepared)
            genotype = space.random_genotype(torch.Generator().manual_seed(config.seed))
        if "retrain" in config.stages:
            retrain(run, describe(run, genotype, None), None)
            stages.append(_stage(grid, folder, "retrain", config.retrain.rounds, 1.0))
    events = read_events(folder / EVENTS_FILE)
    promised = [event for event in events if event["event"] == "privacy"]
    return Estimate(
        tuple(stages),
        memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        disk_bytes=sum(min(KEEP, stage.rounds) * stage.checkpoint_bytes for stage in stages),
        free_bytes=0,
        gpu_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        privacy=overall_text(promised[-1]) if promised else "",
        at_once=grid.at_once,
    )


def _stage(
    grid: MeasuringGrid, folder: Path, name: str, rounds: int, factor: float
) -> StageEstimate:
    """Return what the stage takes by its first round, which has just been measured."""
    events = read_events(folder / EVENTS_FILE)
    first = next(e for e in events if e["event"] == "round" and e["stage"] == name)
    server_s = max(0.0, first["seconds"] - grid.spent_s) * factor
    round_s = server_s + sum(map(grid.exchange_s, grid.clients_s.values()))
    sent = first["bytes_sent"] + first["bytes_received"]
    grid.spent_s, grid.clients_s = 0.0, {}
    left = sum(file.stat().st_size for file in folder.glob(f"checkpoints/{name}-*"))
    return StageEstimate(name, rounds, round_s, sent, left)


class MeasuringGrid(InProcessGrid):
    """Clients that take one step where they are asked for many, and how long all would take.

    Args:
        client_app: Answers every message.
        config: Of the run.

    Attributes:
        properties: What each client says of itself.
        clients_s: By exchange what each client would take, in seconds.
        spent_s: What answering has taken.
        at_once: Clients that would be computed side by side.
    """

    def __init__(self, client_app: ClientApp, config: Config) -> None:
        """See the class."""
        super().__init__(client_app, config.clients)
        self.properties: Mapping[int, Mapping[str, Any]] = {}
        self.clients_s: dict[tuple[Any, ...], list[float]] = {}
        self.spent_s = 0.0
        self._step_s: dict[tuple[Any, ...], float] = {}
        nodes = (((os.cpu_count() or 1), float(torch.cuda.device_count())),)
        self.at_once = 1
        if isinstance(config.runtime, RayRuntime):
            self.at_once = min(config.clients, max(1, places(config.runtime, nodes)))

    def exchange_s(self, clients_s: list[float]) -> float:
        """Return how long the clients of an exchange take together."""
        return max(max(clients_s), sum(clients_s) / self.at_once)

    def answer(self, message: Message) -> Message:
        """Return the reply after one step, or a few, of local training."""
        action = message.metadata.message_type
        if action.startswith("query."):
            return super().answer(message)
        began = time.monotonic()
        request = decode_request(action, message.content)
        header = request.header
        exchange = (header.stage, header.round, header.phase, action)
        records = self.properties[header.client]["splits"]
        steps = request.settings.num_steps(records)
        if request.summed is not None:  # of which every client answers the same one, once
            reply, one_s = self._timed(message, request, 1)
            seconds = one_s * steps
        elif steps <= 2 * FEW:
            reply, seconds = self._timed(message, request, steps)
        elif exchange not in self._step_s:
            self._timed(message, request, 1)  # builds what later ones find
            _, one_s = self._timed(message, request, 1)
            reply, few_s = self._timed(message, request, FEW)
            self._step_s[exchange] = max(0.0, few_s - one_s) / (FEW - 1)
            seconds = few_s + self._step_s[exchange] * (steps - FEW)
        else:
            reply, one_s = self._timed(message, request, 1)
            seconds = one_s + self._step_s[exchange] * (steps - 1)
        self.clients_s.setdefault(exchange, []).append(seconds)
        self.spent_s += time.monotonic() - began
        return reply

    def _timed(self, message: Message, request: Request, steps: int) -> tuple[Message, float]:
        """Return the reply to a request for that many steps, and the seconds it took."""
        own = replace(request, settings=request.settings.with_steps(steps))
        states = encode_states(own.states)
        message.content = encode(own.header, own.settings, states, own.statistics, own.summed)
        began = time.monotonic()
        reply = super().answer(message)
        return reply, time.monotonic() - began
