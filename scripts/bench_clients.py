"""Cost of adding clients: peak memory of the server process, and seconds per round.

    python scripts/bench_clients.py --root <folder with FashionMNIST> [--runtimes inline ray]
        [--clients 5 10 50 100] [--settings feathers fedavg]

Every client has 20 images, so that a round's work grows with the clients alone. feathers searches
with a small supernet; fedavg trains MobileNetV2, whose 2.2 M weights fill the server's memory.
Inline the server's process is the clients', too. Exits with 1 when a server took more than 4 GB or
when a client of the largest federation costs more than 1.5 times as much as one of the second
smallest. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from fednas_flwr.reporting.runs import read_run

IMAGES = 20  # per client
LIMIT_MB = 4000
LARGEST_RATIO = 1.5  # of costs per client
ROUNDS = 4  # the first is not counted: networks are built in it
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
CHILD = """
import json, resource, sys
from fednas_flwr.cli import main
code = main(sys.argv[1:])
print(json.dumps([code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


def main() -> int:
    """Measure and print, a line at a time; exit code 1 when a limit is passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument(
        "--runtimes", nargs="+", choices=("inline", "ray"), default=["inline", "ray"]
    )
    parser.add_argument("--clients", nargs="+", type=int, default=[5, 10, 50, 100])
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    options = parser.parse_args()
    print("setting  runtime  clients  peak memory (MB)  s per round  s per client")
    passed = True
    for setting in options.settings:
        for runtime in options.runtimes:
            seconds: dict[int, float] = {}
            for clients in sorted(options.clients):
                memory_mb, seconds[clients] = measure(setting, runtime, clients, root=options.root)
                passed &= memory_mb <= LIMIT_MB
                print(
                    f"{setting:8} {runtime:8} {clients:7} {memory_mb:17.0f} "
                    f"{seconds[clients]:12.2f} {seconds[clients] / clients:13.3f}",
                    flush=True,
                )
            passed &= is_linear(seconds)
    print("all limits hold" if passed else "A LIMIT WAS PASSED")
    return 0 if passed else 1


def measure(setting: str, runtime: str, clients: int, *, root: Path) -> tuple[float, float]:
    """Return the peak memory of a run's server process in 10^6 bytes, and seconds per round."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            *SETTINGS[setting],
            *(f"runtime={runtime}", f"clients={clients}", f"dataset.root={root.resolve()}"),
            *(f"dataset.limit_train={IMAGES * clients}", "dataset.server_test=false"),
            *("tensorboard=false", f"run_dir={folder}/run"),
        ]
        done = subprocess.run(
            [sys.executable, "-c", CHILD, "run", *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        last = done.stdout.strip().splitlines()[-1:]
        if done.returncode or not last or not last[0].startswith("[0,"):
            raise RuntimeError(f"{overrides} failed:\n{done.stdout[-2000:]}")
        events = read_run(Path(folder) / "run").of_kind("round")
    counted = [event["seconds"] for event in events][1:]
    return json.loads(last[0])[1] * 1024 / 1e6, sum(counted) / len(counted)


def is_linear(seconds: dict[int, float]) -> bool:
    """Return whether a client costs about the same in the largest as in a smaller federation."""
    sizes = sorted(seconds)
    if len(sizes) < 2:
        return True
    base, largest = sizes[1 if len(sizes) > 2 else 0], sizes[-1]
    return seconds[largest] / largest <= LARGEST_RATIO * seconds[base] / base


if __name__ == "__main__":
    sys.exit(main())
