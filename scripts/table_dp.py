"""Tables: DP-FNAS on Fashion-MNIST, small form, by clients, variance of the noise, and budget.

    python scripts/table_dp.py --root <folder with FashionMNIST> [--jobs 2] [--table dp_shared]
    python scripts/table_dp.py --root <cifar10.npz> --table dp_cifar10 --jobs 1
    python scripts/table_dp.py --plot

DP-FNAS runs on scattering features with 1, 2, 4, 8 clients (paper's Table 1), beside a linear model
on the same features with the same budget, and the found network trained without privacy. DP-FNAS
and the linear model then run with 4 clients at noise variances .5 to 10 (Table 2); 3 seeds each.
``dp_shared``: DP-FNAS whose search and retraining take one step per exchange, with separate noise
for each client and with noise shared by secure sums of {least_sites, colluding}. ``dp_budget``:
DP-FNAS and the linear model by the budget of clients' filters, with 1 and 4 clients; with 1 client
also a given cell of 3x3 convolutions that is trained with the whole budget, and CNN-Tanh on the
images. ``dp_cifar10``: the linear model on CIFAR-10 (x_train, y_train, x_test and y_test of a file)
at PRV epsilon 3, with the CPU time of everything, including features. The script continues where it
was stopped; every finished run is added to scripts/results/. ``--plot`` runs nothing and draws
scripts/results/dp_budget.svg from dp_budget.json.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure
from table_runs import RESULTS, Job, Metrics, arguments, make_runs, start

from fednas_flwr.spaces.genotype import to_json
from fednas_flwr.spaces.nasbench201 import EDGES, OPS, NASBench201Space

RUNS = "runs/table_dp/"
SEEDS = (1, 2, 3)
COMMAND = "python scripts/table_dp.py --root <folder>"
COLUMNS = [
    "central_accuracy",
    {"metric": "accuracy_without_cells", "title": "without cells", "scale": 100, "decimals": 1},
    {"metric": "accuracy_without_skip", "title": "without skip", "scale": 100, "decimals": 1},
    "epsilon",
    {"metric": "retrain_seconds", "title": "retraining (s)", "decimals": 0},
]
CPU = {"metric": "cpu", "title": "CPU, features included (min)", "scale": 1 / 60, "decimals": 0}
SEARCHED = ("experiment=dp_fnas/features",)
GIVEN = ("algorithm=fedavg", "stages=[retrain,evaluate,export]")
SPLITS = "dataset.fractions={train: 0.5, validation: 0.5, test: 0.0}"
SCATTERING = "dataset.scattering={scales: 2, angles: 8}"
DATA = ("dataset=fashion_mnist", "dataset.limit_train=8000", SCATTERING, SPLITS)
PRIVATE = ("privacy=dp", "privacy.micro_batch_size=64")
LINEAR = (*GIVEN, *DATA, "algorithm.network=linear", *PRIVATE)
ON_FEATURES = (*GIVEN, SCATTERING, SPLITS, "algorithm.network=linear", *PRIVATE)
CNN_TANH = (*GIVEN, *DATA, "dataset.scattering=null", "algorithm.network=cnn_tanh", *PRIVATE)
CELL = Path(f"{RUNS}all_3x3.json")
WITHOUT_SEARCH = (
    *(*GIVEN, *DATA, "search_space.skip=linear", "retrain=small", "retrain.channels=8"),
    *(f"genotype={CELL}", *PRIVATE),
)
CIFAR10 = "dp_cifar10"
PRV_BUDGETS = {1: 1.24, 2: 2.44, 3: 3.66}  # of a filter, by PRV epsilon of the whole run
MICRO_BATCHES = {1: 256, 8: 128}  # for all 60,000 images, by clients; only for speed
BUDGETS = (1, 3, 8)  # as counted by each client's filter
COMPARED = {
    "DP-FNAS": SEARCHED,
    "given 3x3 cell": WITHOUT_SEARCH,
    "linear": LINEAR,
    "CNN-Tanh": CNN_TANH,
}
EXACT = (
    *(*GIVEN, *DATA, "search_space.skip=linear"),
    *("retrain=small", "retrain.norm=group", "retrain.channels=8", "retrain.rounds=15"),
    "retrain.weights={lr: 0.02, min_lr: 0.0005, momentum: 0.9, weight_decay: 5e-4, clip_norm: 5.0}",
)
TITLES = {
    "dp_clients": "Fashion-MNIST on scattering features, 8,000 images over K clients, budget of 8, "
    "3 seeds",
    "dp_noise": "By variance of the noise: Fashion-MNIST on scattering features, 8,000 images over "
    "4 clients, 3 seeds",
    "dp_shared": "DP-FNAS, one step per exchange, by kind of noise: each client's own, or shared "
    "by secure sums of least_sites-colluding; Fashion-MNIST on scattering features, 8,000 images "
    "over K clients, budget of 8, 3 seeds",
    "dp_images": "Fashion-MNIST on scattering features, all 60,000 images over K clients, by PRV "
    "epsilon",
    CIFAR10: "CIFAR-10 on scattering features, all 50,000 images (JPEG) of one client",
    "dp_budget": "By budget: Fashion-MNIST, 8,000 images over K clients, 3 seeds",
}
SUMS = {  # sharing of noise: terms of secure sums, numbers of clients
    "local": ((), (4, 8)),
    "shared 3-1": (("secure_sum={least_sites: 3, colluding: 1}",), (4, 8)),
    "shared 7-1": (("secure_sum={least_sites: 7, colluding: 1}",), (8,)),
}


def jobs(seed: int) -> Iterator[tuple[str, Job]]:
    """Yield the runs of one seed, each with the name of its table."""
    for clients in (1, 2, 4, 8):
        group, own = {"K": clients}, f"clients={clients}"
        searched = Job({"network": "DP-FNAS", **group}, (*SEARCHED, own), seed)
        found = f"genotype={RUNS}dp_clients_{searched.name}/genotype.json"
        yield "dp_clients", searched
        exact = (*EXACT, own, found)
        yield "dp_clients", Job({"network": "without privacy", **group}, exact, seed, of=searched)
        yield "dp_clients", Job({"network": "linear", **group}, (*LINEAR, own), seed)
    for variance in (0.5, 1, 2, 5, 8, 10):
        weights, alphas, retrain = (
            f"privacy.{part}.noise_multiplier={round(math.sqrt(variance), 4)}"
            for part in ("weights", "alphas", "retrain")
        )
        # Noise is given, not calibrated; no row reaches this budget.
        terms = ("clients=4", retrain, "privacy.epsilon=100000")
        for name, chosen in (("DP-FNAS", (*terms, weights, alphas)), ("linear", terms)):
            group = {"network": name, "variance": variance}
            yield "dp_noise", Job(group, (*COMPARED[name], *chosen), seed)
    for epsilon, clients in ((3, 1), (1, 1), (2, 1), (3, 8)):
        chosen = (
            *("dataset.limit_train=null", f"clients={clients}"),
            f"privacy.epsilon={PRV_BUDGETS[epsilon]}",
            f"privacy.micro_batch_size={MICRO_BATCHES[clients]}",
        )
        for name in ("linear", "DP-FNAS"):
            group = {"network": name, "K": clients, "epsilon": epsilon}
            yield "dp_images", Job(group, (*COMPARED[name], *chosen), seed)
    cifar10 = ("dataset=npz", f"privacy.epsilon={PRV_BUDGETS[3]}", "clients=1")
    features = f"{RUNS}cifar10_features_s{seed}"
    of_cifar10 = (*ON_FEATURES, *cifar10, f"dataset.cache={features}")
    group = {"network": "linear", "epsilon": 3}
    yield CIFAR10, Job(group, of_cifar10, seed, more=lambda run: removed(features))
    for name, (sums, numbers) in SUMS.items():
        for clients in numbers:
            own = (*SEARCHED, f"clients={clients}", "retrain.exchange=gradients", *sums)
            yield "dp_shared", Job({"noise": name, "K": clients}, own, seed)
    for budget, clients in itertools.product(BUDGETS, (1, 4)):
        for name in COMPARED if clients == 1 else ("DP-FNAS", "linear"):
            group = {"network": name, "K": clients, "budget": budget}
            own = (*COMPARED[name], f"clients={clients}", f"privacy.epsilon={budget}")
            yield "dp_budget", Job(group, own, seed)


def removed(features: str) -> Metrics:
    """Remove a finished run's features, which would fill a disk; return no metrics."""
    shutil.rmtree(features, ignore_errors=True)
    return {}


def main() -> None:
    """Run what is missing."""
    parser = arguments(__doc__, needs_root=False)
    parser.add_argument("--table", choices=TITLES, help="only this one")
    parser.add_argument("--plot", action="store_true", help="run nothing, draw dp_budget.svg")
    options = parser.parse_args()
    if options.plot:
        draw(json.loads((RESULTS / "dp_budget.json").read_text())["runs"])
        return
    if options.root is None:
        parser.error("--root is needed to run: the folder with FashionMNIST")
    CELL.parent.mkdir(parents=True, exist_ok=True)
    space = NASBench201Space(input_shape=(1, 1, 1), num_classes=1)
    CELL.write_text(to_json(space.genotype([OPS.index("nor_conv_3x3")] * len(EDGES))))
    columns = {
        "dp_budget": [*COLUMNS, "num_parameters"],
        CIFAR10: ["central_accuracy", *COLUMNS[3:], CPU],
    }
    against = {"dp_shared": {"noise": "local"}, CIFAR10: None}
    for table in [options.table] if options.table else [name for name in TITLES if name != CIFAR10]:
        results = start(
            table,
            title=TITLES[table],
            command=COMMAND,
            columns=columns.get(table, COLUMNS),
            against=against.get(table, {"network": "linear"}),
        )
        asked = [job for seed in SEEDS for name, job in jobs(seed) if name == table]
        make_runs(results, asked, root=options.root, at_a_time=options.jobs, runs=f"{RUNS}{table}_")


LINES = {  # lines of the picture, by network and clients: label, colour, dashes
    ("DP-FNAS", 1): ("searched, on fixed features, 1 client", "#0072b2", "-"),
    ("linear", 1): ("linear, on fixed features, 1 client", "#009e73", "-"),
    ("linear", 4): ("linear, 4 clients", "#009e73", "--"),
    ("DP-FNAS", 4): ("searched, 4 clients", "#0072b2", "--"),
    ("CNN-Tanh", 1): ("a CNN on the images, 1 client", "#cc79a7", "-"),
}


def draw(runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw test accuracy over budget of dp_budget.json's runs: a line per network and K."""
    picture = Figure(figsize=(9, 4), layout="constrained")
    axes = picture.add_subplot()
    for (network, clients), (label, colour, dashes) in LINES.items():
        values = {
            budget: [
                100 * run["metrics"]["central_accuracy"]
                for run in runs
                if run["group"] == {"network": network, "K": clients, "budget": budget}
            ]
            for budget in BUDGETS
        }
        means, deviations = map(fmean, values.values()), map(stdev, values.values())
        style: dict[str, Any] = {"color": colour, "linestyle": dashes, "capsize": 3, "marker": "o"}
        axes.errorbar(BUDGETS, [*means], [*deviations], label=label, **style)
    axes.set(
        title="Private training on 8,000 images of Fashion-MNIST",
        xlabel="epsilon that each client may spend",
        ylabel="test accuracy (%)",
        xscale="log",
    )
    axes.set_xticks(BUDGETS, map(str, BUDGETS), minor=False)
    axes.minorticks_off()
    axes.grid(axis="y", color="#ddd")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    picture.savefig(RESULTS / "dp_budget.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
