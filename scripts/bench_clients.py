"""Cost of adding clients: peak memory of the server process, and seconds per round.

    python scripts/bench_clients.py --root <folder with FashionMNIST> [--runtimes inline ray]
        [--clients 5 10 50 100] [--settings feathers fedavg]
    python scripts/bench_clients.py --root <folder with FashionMNIST> --sampled 100 10000
        [--runtimes inline]
    python scripts/bench_clients.py --paths 1 2 10

Every client has 20 images, so that a round's work grows only with the number of clients. feathers
searches with a small supernet; fedavg trains MobileNetV2, whose 2.2 M weights fill the server's
memory. With the inline runtime the server's process is also that of the clients. The exit code is 1
if a server took more than 4 GB, or if a client of the largest federation costs more than 1.5 times
as much as one of the second smallest. Run it on an otherwise idle machine.

With --sampled a round asks 50 of the given numbers of clients, with 6 images each: FedAvg of a
small CNN. Memory and time per round (inline: CPU time) are compared with those of the smallest
number. The exit code is 1 if more clients need more than 1.1 times as much of either, or if a
process takes 2 GB.

With --paths DPNAS searches on digits with the given numbers of candidates per message, with
runtime.wire=float32 and int8; the bytes of its messages in both directions are printed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from fednas_flwr import compose, run
from fednas_flwr.runs.numbers import read_run

IMAGES = 20  # per client
RUNTIMES = ("inline", "ray")
LIMIT_MB = 4000
LARGEST_RATIO = 1.5  # of costs per client
ROUNDS = 4  # the first is not counted, as networks are built in it
SETTINGS = {
    "feathers": (
        *("experiment=feathers/fashion_mnist", "stages=[search]", f"rounds={ROUNDS}"),
        "algorithm.nas_rounds=1000",  # the counted rounds explore nothing
    ),
    "fedavg": (
        *("algorithm=fedavg", "algorithm.network=mobilenet_v2", "stages=[retrain]"),
        *("dataset=fashion_mnist", "dataset.limit_train=2000", "dataset.limit_test=2000"),
        *("dataset.fractions={train:0.8,validation:0.2,test:0.0}", "retrain=small"),
        *("retrain.batch_size=32", f"retrain.rounds={ROUNDS}"),
    ),
}
ASKED, SAMPLED_IMAGES = 50, 6  # clients per round, images per client
SAMPLED_RATIO, SAMPLED_LIMIT_MB = 1.1, 2000
SAMPLED = (
    *("algorithm=fedavg", "algorithm.network=plain_cnn", "retrain.local_epochs=1"),
    *("retrain.batch_size=32", "stages=[retrain,evaluate]", f"sampling.per_round={ASKED}"),
    "retrain.rounds=10",
    *("dataset=fashion_mnist", "dataset.fractions={train:1.0,validation:0.0,test:0.0}"),
)
PATHS = (
    *("experiment=dpnas/digits", "search_space.widths=[32,32,64]", "search_space.head=128"),
    *("stages=[search]", "rounds=4", "algorithm.warm_up_rounds=1", "algorithm.local_steps=1"),
)
CHILD = """
import json, resource, sys, time
import fednas_flwr
cpu_s = []
def note(event):
    if event["event"] == "round":
        cpu_s.append(time.process_time())
fednas_flwr.run(fednas_flwr.compose(*sys.argv[1:]), listeners=[note])
used, others = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
largest = max(used.ru_maxrss, others.ru_maxrss)
rounds = [after - before for before, after in zip(cpu_s, cpu_s[1:])]
print(json.dumps([largest, used.ru_utime + used.ru_stime, rounds]))
"""


def main() -> int:
    """Measure and print line by line; the exit code is 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path)
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=RUNTIMES)
    parser.add_argument("--clients", nargs="+", type=int, default=[5, 10, 50, 100])
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--sampled", nargs="+", type=int)
    parser.add_argument("--paths", nargs="+", type=int)
    options = parser.parse_args()
    if options.paths:
        compare_paths(options.paths)
        return 0
    if options.root is None:
        parser.error("--root is needed: the folder with FashionMNIST")
    if options.sampled:
        return compare_sampled(options.root, options.runtimes, options.sampled)
    print("setting  runtime  clients  peak memory (MB)  s per round  s per client")
    passed = True
    for setting, runtime in product(options.settings, options.runtimes):
        seconds: dict[int, float] = {}
        for clients in sorted(options.clients):
            own = (SETTINGS[setting], runtime, clients)
            memory_mb, round_s, *_ = measured(*own, root=options.root, images=IMAGES)
            seconds[clients] = round_s
            passed &= memory_mb <= LIMIT_MB
            print(
                f"{setting:8} {runtime:8} {clients:7} {memory_mb:17.0f} {round_s:12.2f} "
                f"{round_s / clients:13.3f}",
                flush=True,
            )
        passed &= is_linear(seconds)
    return told(passed)


def told(passed: bool) -> int:
    """Print if all limits hold; return the exit code."""
    print("all limits hold" if passed else "A LIMIT WAS PASSED")
    return 0 if passed else 1


def compare_sampled(root: Path, runtimes: Sequence[str], clients: Sequence[int]) -> int:
    """Measure and print runs whose rounds ask some clients; return 1 if a limit is exceeded."""
    print(
        "runtime  clients  peak memory (MB)  s per round  CPU s per round  CPU s in all  "
        "over the fewest clients"
    )
    passed = True
    for runtime in runtimes:
        first: Measured | None = None
        for number in sorted(clients):
            found = measured(SAMPLED, runtime, number, root=root, images=SAMPLED_IMAGES)
            first = first or found
            time = Measured._fields.index("round_cpu_s" if runtime == "inline" else "round_s")
            ratios = (found.memory_mb / first.memory_mb, found[time] / first[time])
            passed &= max(ratios) <= SAMPLED_RATIO and found.memory_mb <= SAMPLED_LIMIT_MB
            print(
                f"{runtime:8} {number:7} {found.memory_mb:17.0f} {found.round_s:12.3f} "
                f"{found.round_cpu_s:16.3f} {found.cpu_s:13.1f}  "
                f"memory {ratios[0]:.3f}, time {ratios[1]:.3f}",
                flush=True,
            )
    return told(passed)


def compare_paths(candidates: Sequence[int]) -> None:
    """Measure and print the bytes of searches by DPNAS."""
    print("wire     candidates per message  MB per round")
    for wire, number in product(("float32", "int8"), sorted(candidates)):
        own = [f"algorithm.{kind}_candidates={number}" for kind in ("trained", "rewarded", "final")]
        own.append(f"runtime.wire={wire}")
        with tempfile.TemporaryDirectory() as folder:
            run(compose(*PATHS, *own, f"hydra.run.dir={folder}/run"))
            rounds = read_run(Path(folder) / "run").rounds("search")
        taken = sum(event["bytes_sent"] + event["bytes_received"] for event in rounds)
        print(f"{wire:8} {number:22} {taken / len(rounds) / 1e6:13.2f}", flush=True)


class Measured(NamedTuple):
    """Memory and time of a run.

    Attributes:
        memory_mb: Peak memory of its process, or of one that it started, in 10^6 bytes.
        round_s: Median seconds of a round after the first.
        round_cpu_s: Median CPU seconds of its process in a round after the first.
        cpu_s: Total CPU seconds of its process.
    """

    memory_mb: float
    round_s: float
    round_cpu_s: float
    cpu_s: float


def measured(
    settings: Sequence[str], runtime: str, clients: int, *, root: Path, images: int
) -> Measured:
    """Return the memory and time of a run in a separate process, with ``images`` per client."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *settings,
            *(f"runtime={runtime}", f"clients={clients}", f"dataset.root={root.resolve()}"),
            *(f"dataset.limit_train={images * clients}", "dataset.server_test=false"),
            *("trackers=[]", f"run_dir={folder}/run"),
        ]
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        last = done.stdout.strip().splitlines()[-1:]
        if done.returncode or not last:
            raise RuntimeError(f"{overrides} failed:\n{done.stdout[-2000:]}")
        events = read_run(Path(folder) / "run").of_kind("round")
    counted = [event["seconds"] for event in events][1:]
    memory_kb, cpu_s, rounds = json.loads(last[0])
    return Measured(memory_kb * 1024 / 1e6, median(counted), fmean(rounds), cpu_s)


def is_linear(seconds: dict[int, float]) -> bool:
    """Return True if a client costs about the same in the largest as in a smaller federation."""
    sizes = sorted(seconds)
    if len(sizes) < 2:
        return True
    base, largest = sizes[1 if len(sizes) > 2 else 0], sizes[-1]
    return seconds[largest] / largest <= LARGEST_RATIO * seconds[base] / base


if __name__ == "__main__":
    sys.exit(main())
