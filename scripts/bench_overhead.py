"""What federation costs beside the local steps: ratios, all measured in one run, interleaved.

    python scripts/bench_overhead.py [--parts inline processes first] [--repeats 5]

inline: a federated DARTS search in this process, over a bare PyTorch loop that does the same local
steps and ends in the same tensors. processes: the wall time of a round in the processes of a plain
run, and on 2 of Ray's actors, over that of the same round in one process, of 4 clients that work
for 5 s or more each. first: seconds from typing a command to its end, on all cores and on one.
Numbers are medians with their spread (smallest to largest), but processes compares the fastest
rounds; run it on an otherwise idle machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench import arguments, compare, is_met, spread
from torch.nn import functional

from fednas_flwr.algorithms.fed_darts import FedDARTSSettings
from fednas_flwr.algorithms.stage_strategies import make_search
from fednas_flwr.base.processes import ALONE
from fednas_flwr.base.randomness import make_generator, seeded
from fednas_flwr.client.making import make_client
from fednas_flwr.data.loaders import epoch_batches
from fednas_flwr.data.prepared import make_data
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.models.networks import supernet_space
from fednas_flwr.pipeline.beginning import make_cohort
from fednas_flwr.protocol.states import network_states, pack
from fednas_flwr.runs.checkpoints import CheckpointFolder
from fednas_flwr.runs.events import EventLog
from fednas_flwr.runs.numbers import EVENTS_FILE, Run, read_run
from fednas_flwr.settings import Config, dump_config
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree

LIMITS = {"inline": 1.05, "processes": 1 / 1.8, "first": 45.0}
CLIENTS = 4  # of a round in several processes
FIRST = {"fednas run": (), "recommended": ("experiment=search/recommended",)}
EQUAL_WORK = (
    *("rounds=4", "stages=[search]", "runtime.device=cpu", "runtime.threads=1", "trackers=[]"),
    *("search_space=nasbench201_small", "algorithm.local_epochs=20"),
)


def main() -> int:
    """Measure the parts that were asked for; exit code 1 when a ratio is above its limit."""
    parser = arguments(__doc__, repeats=5)
    parser.add_argument("--parts", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    options = parser.parse_args()
    parts: dict[str, Callable[[], float]] = {
        "inline": lambda: measure_inline(options.repeats),
        "processes": lambda: measure_processes(min(3, options.repeats)),
        "first": measure_first_runs,
    }
    met = [is_met(name, parts[name](), LIMITS[name]) for name in options.parts]
    return 0 if all(met) else 1


def measure_inline(repeats: int) -> float:
    """Return the CPU time of an inline search over that of the bare loop, the median of pairs."""
    settings = ("rounds=3", "search_space=nasbench201_small", "runtime.device=cpu")
    config = configured(*settings, "algorithm.beta_decay=0")
    data = make_data(config)
    prepared = data[0]
    clients = [make_client(config, i, data=data, networks={}) for i in range(config.clients)]
    splits = {
        (i, part): getattr(client.data, part).batch(torch.arange(len(split)), "cpu")
        for i, client in enumerate(clients)
        for part, split in (("train", client.data.train), ("validation", client.data.validation))
    }
    client_app = make_client_app(dump_config(config))

    def inline() -> list[torch.Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            with EventLog(Path(folder) / EVENTS_FILE) as log:
                cohort = make_cohort(config, run="bench", emit=log.emit)
                checkpoints = CheckpointFolder(Path(folder) / "checkpoints", warn=print)
                strategy = make_search(config, prepared, cohort, checkpoints)
                strategy.start(InProcessGrid(client_app, config.clients), num_rounds=config.rounds)
        return [strategy.states[name]["float32"] for name in ("weights", "alphas", "buffers")]

    def bare() -> list[torch.Tensor]:
        with seeded(config.seed, "supernet"):
            supernet = supernet_space(config, prepared).supernet()
        state = bare_search(config, supernet, splits)
        supernet.load_state_dict(state)
        return [
            pack(network_states(supernet)[n])["float32"] for n in ("weights", "alphas", "buffers")
        ]

    for ours, theirs in zip(inline(), bare(), strict=True):  # the same steps
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    return compare({"inline": inline, "bare loop": bare}, repeats)


def bare_search(
    config: Config,
    supernet: torch.nn.Module,
    splits: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """Return the global state after federated DARTS as a plain PyTorch script would write it."""
    settings = config.algorithm
    assert isinstance(settings, FedDARTSSettings)
    alphas = list(supernet.alphas().values())  # type: ignore[operator]
    weights = list(supernet.weights().values())  # type: ignore[operator]
    state = {name: tensor.clone() for name, tensor in supernet.state_dict().items()}
    supernet.train()
    for server_round in range(1, config.rounds + 1):
        lr = settings.weights.at_round(server_round, config.rounds).lr
        mean = {name: torch.zeros_like(t, dtype=torch.float64) for name, t in state.items()}
        total = sum(len(splits[i, "train"][1]) for i in range(config.clients))
        for client in range(config.clients):
            supernet.load_state_dict(state)
            own, decay = settings.weights, settings.alphas.weight_decay
            sgd = torch.optim.SGD(
                weights, lr=lr, momentum=own.momentum, weight_decay=own.weight_decay
            )
            adam = torch.optim.Adam(
                alphas, lr=settings.alphas.lr, betas=(0.5, 0.999), weight_decay=decay
            )
            generator = make_generator(config.seed, "search", server_round, client, "search")
            x_train, y_train = splits[client, "train"]
            x_validation, y_validation = splits[client, "validation"]
            validation = endless(len(y_validation), settings.batch_size, generator)
            loss_sum, correct = 0.0, 0
            for rows in epoch_batches(
                len(y_train), batch_size=settings.batch_size, generator=generator
            ):
                other = next(validation)
                loss = functional.cross_entropy(supernet(x_validation[other]), y_validation[other])
                for alpha, gradient in zip(alphas, torch.autograd.grad(loss, alphas), strict=True):
                    alpha.grad = gradient
                adam.step()
                logits = supernet(x_train[rows])
                loss = functional.cross_entropy(logits, y_train[rows])
                gradients = torch.autograd.grad(loss, weights)
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.grad = gradient
                torch.nn.utils.clip_grad_norm_(weights, settings.weights.clip_norm or 1e9)
                sgd.step()
                loss_sum += loss.item() * len(rows)
                correct += int((logits.argmax(1) == y_train[rows]).sum())
            for name, tensor in supernet.state_dict().items():
                mean[name] += tensor * (len(y_train) / total)
        state = {name: tensor.to(state[name].dtype) for name, tensor in mean.items()}
    return state


def endless(
    num_examples: int, batch_size: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Yield shuffled batches, epoch after epoch."""
    while True:
        yield from epoch_batches(num_examples, batch_size=batch_size, generator=generator)


def measure_first_runs() -> float:
    """Return the seconds of the recommended command on all cores, and print others'."""
    cores, seconds = sorted(os.sched_getaffinity(0)), dict[tuple[str, int], float]()
    for name, overrides in FIRST.items():
        for some in (cores, cores[:1]):
            own = partial(os.sched_setaffinity, 0, some)
            seconds[name, len(some)], _ = timed_run(*overrides, preexec_fn=own)
            print(f"  {name}, {len(some)} cores: {seconds[name, len(some)]:.1f} s", flush=True)
    return seconds["recommended", len(cores)]


def timed_run(*overrides: str, **given: Any) -> tuple[float, Run]:
    """Return the seconds from typing a run's command to its end, and the run."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["fednas", "run", f"run_dir={folder}/run", *overrides]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **given)
        return time.perf_counter() - started, read_run(Path(folder) / "run")


def measure_processes(repeats: int) -> float:
    """Return the wall time of a round in several processes over that of the same round in one.

    That of a plain run or of Ray's, whichever is longer. Of each the fastest round counts, of
    several runs and without each run's first round, in which processes make data and networks: of a
    busy machine these say most.
    """
    cpus = len(os.sched_getaffinity(0))
    runtimes = {
        "one process": ("runtime=inline",),
        "plain run": ("runtime=inline",),
        "ray, 2 actors": ("runtime=ray", f"runtime.client_cpus={cpus / 2:g}"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runtimes}
    for _ in range(repeats):
        for name, runtime in runtimes.items():
            own = os.environ | ({ALONE: "1"} if name == "one process" else {})
            _, run = timed_run(*EQUAL_WORK, f"clients={CLIENTS}", *runtime, env=own)
            seconds[name] += [event["seconds"] for event in run.rounds("search")[1:]]
    alone, *others = (min(found) for found in seconds.values())
    print(f"processes: {CLIENTS} clients per round, {alone:.2f} s of work in all")
    for name, found in seconds.items():
        print(f"  {name}: {spread(found)} s per round, {min(found) / alone:.3f}")
    return max(others) / alone


def configured(*overrides: str) -> Config:
    """Return the checked configuration of the quickstart with ``overrides``."""
    return parse_config(compose_tree(overrides))


if __name__ == "__main__":
    sys.exit(main())
