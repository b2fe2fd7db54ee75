"""An estimate of a run's cost from a few steps: time, traffic, memory, disk and epsilon.

Everything is as in the run, in a folder that is removed afterwards, with two differences: stages
end after their first round, and clients take one step of local training instead of many. One client
takes a few steps, from which the time of a step follows. Main function: :func:`estimate`.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from flwr.app import Message

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.memory import peak_memory
from fednas_flwr.base.processes import at_once
from fednas_flwr.data.features import KINDS
from fednas_flwr.deploy import client_app, local_actors
from fednas_flwr.deploy.grids import InProcessGrid, places, this_node
from fednas_flwr.models.networks import given_genotype, make_device, supernet_space
from fednas_flwr.pipeline import baselines, later_settings
from fednas_flwr.pipeline.beginning import OutOfTimeError, Run, begin
from fednas_flwr.pipeline.stages import describe, retrain, start_search
from fednas_flwr.protocol.messages import Request, decode_request, encode_states
from fednas_flwr.protocol.messages import encode_request as encode
from fednas_flwr.report.templates import paragraphs, render, sentence
from fednas_flwr.runs import events, numbers, run_folder
from fednas_flwr.runs.checkpoints import KEEP
from fednas_flwr.settings import Config, dump_config, expanded, run_settings
from fednas_flwr.settings.parser import seconds

FEW = 4  # steps that are timed
G = TypeVar("G", bound="SteppedGrid")


@dataclass(frozen=True)
class StageEstimate:
    """Estimate of one stage.

    Attributes:
        name: ``search``, ``retrain``, or ``others`` for networks that are compared.
        rounds: Number of rounds.
        round_s: Seconds of the first round.
        round_bytes: Bytes of that round's tensors, in both directions.
        checkpoint_bytes: Bytes of the checkpoint that it leaves.
    """

    name: str
    rounds: int
    round_s: float
    round_bytes: int
    checkpoint_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of all rounds if they are like the first."""
        return self.rounds * self.round_s

    @property
    def num_bytes(self) -> int:
        """Bytes of the messages of all rounds."""
        return self.rounds * self.round_bytes


@dataclass(frozen=True)
class Estimate:
    """Estimate of a run on this machine.

    Attributes:
        stages: Estimates of the stages, in order.
        memory_bytes: Peak memory of this process, which holds server and clients.
        gpu_bytes: Peak memory on the GPU; None without one.
        disk_bytes: Bytes of the checkpoints that are kept, if they are as large as in the first
            rounds.
        free_bytes: Free bytes on the disk of the run's folder.
        privacy: (epsilon, delta) and the unit that they protect; empty without privacy.
        at_once: Number of clients that are computed side by side.
        processes: Number of processes of clients, slightly above that of cores, see
            ``processes.at_once``.
        features: Sizes and times of features of images.
        limit: Seconds that the run may take; infinite without a limit.
    """

    stages: tuple[StageEstimate, ...]
    memory_bytes: int
    gpu_bytes: int | None
    disk_bytes: int
    free_bytes: int
    privacy: str
    at_once: int
    processes: int
    features: tuple[str, ...]
    limit: float

    def lines(self) -> list[str]:
        """Return the lines that ``fednas run --dry-run`` prints."""
        return render("dry_run.txt.j2", **vars(self)).splitlines()


def estimate(config: Config) -> Estimate:
    """Return the estimate for a checked configuration; only the cache of data stays behind.

    Raises:
        ConfigError: The clients' data is on other machines.
        QuorumError: Clients refuse, as they would in the run.
    """
    _, factor = config.algorithm.rehearsed(config.search_space.name)  # for the server's own work
    device, free = make_device(config.runtime.device), run_folder.free_bytes(config)
    torch.set_num_threads(config.runtime.threads)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with begun(config, MeasuringGrid) as (run, grid):
        run.ends_at = -math.inf
        grid.properties = run.cohort.properties
        stages, config = [], run.config
        if config.searches:
            with suppress(OutOfTimeError):
                start_search(run)
            stages.append(_stage(run, grid, "search", config.rounds, factor))
        if config.retrains:
            retrain(run, described_at_random(run), None)
            stages.append(_stage(run, grid, "retrain", config.retrain.planned))
            if rounds := baselines.compared_rounds(config):
                stages.append(replace(stages[-1], name="others", rounds=rounds))
        return Estimate(
            tuple(stages),
            memory_bytes=peak_memory()["process"],
            disk_bytes=sum(min(KEEP, stage.rounds) * stage.checkpoint_bytes for stage in stages),
            free_bytes=free,
            gpu_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            privacy=_promised(run),
            at_once=grid.at_once,
            processes=grid.processes,
            features=tuple(n for n in run.prepared.train.notes if n.startswith(KINDS)),
            limit=seconds(limit) if (limit := config.runtime.time_limit) else math.inf,
        )


def private_terms(config: Config) -> list[str]:
    """Return lines on the noise, batches and learning rate of a private run, with the reasons.

    Raises:
        ConfigError: The run is not private, or its clients' data is on other machines.
        QuorumError: Clients refuse, as they would in the run.
    """
    if not config.dp:
        raise ConfigError("privacy=none: nothing is to be calibrated; set privacy=dp.")
    with begun(config, SteppedGrid) as (run, _):
        why = paragraphs("less_than_budget", numbers.read_run(run.folder).privacy)
        return [*later_settings.explained(run), f"(epsilon, delta) at most {_promised(run)}", *why]


@contextmanager
def begun(config: Config, make_grid: Callable[[Config], G]) -> Iterator[tuple[Run, G]]:
    """Begin a run and its clients in a folder that is removed afterwards; real budgets pay nothing.

    Raises:
        ConfigError: The clients' data is on other machines.
        QuorumError: Clients refuse, as they would in the run.
    """
    if config.runtime.name == "deployment":
        raise ConfigError(
            "runtime=deployment: only the sites know their records and machines; try this with "
            "runtime=inline on data like theirs."
        )
    with tempfile.TemporaryDirectory(prefix="fednas-dry-run-") as folder:
        config = _moved(config, Path(folder))
        with events.EventLog(config.folder / numbers.EVENTS_FILE) as log:
            grid = make_grid(config)
            yield begin(config, grid, log, {}, earlier=[]), grid


def described_at_random(run: Run) -> dict[str, Any]:
    """Describe the network to retrain: the given one, else a random one from the search space."""
    genotype = given_genotype(run.config)
    if genotype is None and run.config.searches:
        space = supernet_space(run.config, run.prepared)
        genotype = space.random_genotype(torch.Generator().manual_seed(run.config.seed))
    return describe(run, genotype, None)


def _moved(config: Config, folder: Path) -> Config:
    """Return the configuration of the run to measure; its folder is created."""
    config, privacy = config.algorithm.whole_search(config), config.dp
    algorithm, _ = config.algorithm.rehearsed(config.search_space.name)
    config = replace(config, algorithm=algorithm)
    if privacy and privacy.sites is not None:
        sites = expanded("privacy.sites", privacy.sites)
        if sites.exists():  # copied, so that real budgets pay nothing
            shutil.copytree(sites, folder / "sites")
        config = replace(config, privacy=replace(privacy, sites=str(folder / "sites")))
    return run_folder.create_run_folder(replace(config, run_dir=str(folder / "run")))


def _promised(run: Run) -> str:
    """Return the sentence on a run's guarantee of privacy; empty if it has none."""
    promised = numbers.read_run(run.folder).privacy
    return sentence("overall_text", promised) if promised else ""


def _stage(
    run: Run, grid: MeasuringGrid, name: str, rounds: int, factor: float = 1.0
) -> StageEstimate:
    """Estimate a stage by its first round, which has just been measured.

    Args:
        run: The run.
        grid: The run's clients.
        name: Name of the stage.
        rounds: Number of rounds of the stage.
        factor: Factor of the server's own seconds.
    """
    first = numbers.read_run(run.folder).rounds(name)[0]
    # the server's own seconds, and those of clients that work at the same time
    round_s = max(0.0, first["seconds"] - grid.spent_s) * factor + sum(
        max(max(clients_s), sum(clients_s) / grid.at_once) for clients_s in grid.clients_s.values()
    )
    sent = first["bytes_sent"] + first["bytes_received"]
    grid.spent_s, grid.clients_s = 0.0, {}
    left = sum(file.stat().st_size for file in run.folder.glob(f"checkpoints/{name}-*"))
    return StageEstimate(name, rounds, round_s, sent, left)


class SteppedGrid(InProcessGrid):
    """The clients of a run in this process, which may answer with fewer steps."""

    def __init__(self, config: Config) -> None:
        """Create the clients."""
        super().__init__(client_app.make_client_app(dump_config(config)), config.clients)

    def after(self, message: Message, request: Request, steps: int) -> Message:
        """Return the reply to a request, decoded from the message, with that number of steps."""
        few = replace(request, settings=request.settings.with_steps(steps))
        states = encode_states(few.states)
        message.content = encode(few.header, few.settings, states, few.statistics, few.summed)
        return super().answer(message)


class MeasuringGrid(SteppedGrid):
    """Clients that take one step when asked for many; the grid estimates the time of all steps.

    Args:
        config: Configuration of the run.

    Attributes:
        properties: Properties that each client states.
        clients_s: For each exchange, the seconds that each client would take.
        spent_s: Seconds that answering has taken.
        at_once: Number of clients that would be computed side by side.
        processes: Number of processes for them.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.properties: Mapping[int, Mapping[str, Any]] = {}
        self.clients_s: dict[tuple[Any, ...], list[float]] = {}
        self.spent_s = 0.0
        self._step_s: dict[tuple[Any, ...], float] = {}
        if isinstance(config.runtime, run_settings.RayRuntime):
            self.at_once = min(config.clients, max(1, places(config.runtime, this_node())))
            self.processes = self.at_once
        else:
            self.at_once = local_actors.side_by_side(config)
            self.processes = at_once(config.clients, threads=config.runtime.threads)

    def answer(self, message: Message) -> Message:
        """Return the reply after one step, or a few, of local training."""
        action = message.metadata.message_type
        if action.startswith("query."):
            return super().answer(message)
        began = time.monotonic()
        request = decode_request(action, message.content)
        header = request.header
        exchange = (header.stage, header.round, header.phase, action)
        steps = request.settings.num_steps(self.properties[header.client]["splits"])
        taken = steps if request.summed is None and steps <= 2 * FEW else 1
        few_s = None
        if taken < steps and request.summed is None and exchange not in self._step_s:
            self._timed(message, request, 1)  # builds what later calls reuse
            few_s = self._timed(message, request, FEW)[1]
        reply, seconds = self._timed(message, request, taken)
        if few_s is not None:
            self._step_s[exchange] = max(0.0, few_s - seconds) / (FEW - 1)
        # in a secure sum each client answers once
        seconds += self._step_s.get(exchange, seconds) * (steps - taken)
        self.clients_s.setdefault(exchange, []).append(seconds)
        self.spent_s += time.monotonic() - began
        return reply

    def _timed(self, message: Message, request: Request, steps: int) -> tuple[Message, float]:
        """Return the reply to a request with that number of steps, and the seconds it took."""
        began = time.monotonic()
        return self.after(message, request, steps), time.monotonic() - began
