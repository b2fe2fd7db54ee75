"""Table: the papers' rows on all images of Fashion-MNIST or CIFAR-10, at 25 M multiply-adds.

    python scripts/table_papers.py --root <folder> [--for 150min] [--only DP-FNAS] [--cifar FILE]

All rows retrain a network with the fewest channels (a multiple of 2) that give it 25 M
multiply-adds, for 20 rounds of one epoch of all images. Only FedEx and FEATHERS tune while they
retrain, as this is part of the algorithm. Unless named otherwise, rows of FEATHERS' table use
NAS-Bench-201's cell, one per stage, and those of DP-FNAS' table use three of DARTS' cells; searches
have the same depth. Clients with different classes exchange gradients of networks with group norm,
as in the recommended retraining. Batches of 32 and the learning rate were chosen on 10,000 held-out
training images, after ten rounds on 20,000 others; DARTS' cells, whose steps take twice as long,
have batches of 64. DP-FNAS' search is private, with a budget of 3.5; as in the paper, the delivered
model is not. In NAS-Bench-201's space a search takes about 20 minutes on an idle core and a
retraining 35, or 50 without bfloat16; rows in DARTS' space, which take hours there, are for a GPU.

Runs are made in the order of the list, one core each, and continue where they were stopped;
``--for`` limits the time. Runs of any commit count, and each is stored with its commit, so that
core-hours are not spent again after each change. Results go to scripts/results/papers.json.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from table_runs import arguments, make_all, make_run, measure, start

from fednas_flwr.models.networks import make_space
from fednas_flwr.settings.parser import seconds
from fednas_flwr.spaces.costs import count_multiply_adds
from fednas_flwr.spaces.genotype import load_genotype

RUNS = Path("runs/table_papers")
LEAST_MULTIPLY_ADDS = 25e6
FASHION, CIFAR = "Fashion-MNIST", "CIFAR-10 (JPEG)"
SHAPES = {FASHION: (1, 28, 28), CIFAR: (3, 32, 32)}
NASBENCH = ("search_space=nasbench201_small", "search_space.channels=4")
DARTS_CELLS = (
    *("search_space=darts_small", "search_space.channels=4", "search_space.num_cells=3"),
    "retrain.num_cells=3",  # a search reports the costs of this network
)
SIZES = {"nasbench201": (1, 32), "darts": (3, 64)}  # number of retrained cells, and batch sizes
TRAINING = ("stages=[retrain,evaluate,export]", "retrain.rounds=20", "retrain.local_epochs=1")
GIVEN = ("algorithm=fedavg", "retrain=recommended")
FEDAVG = (*GIVEN, "retrain.weights.lr=0.1", "retrain.unaugmented=0.3")
FEDSGD = (*GIVEN, "retrain.exchange=gradients", "retrain.norm=group")  # for unlike clients
SHIFTED = (*FEDAVG, "dataset.crop_padding=4", "dataset.flip=true")  # of files, which have none
TWO, IN_201 = "two classes each", "FNAS, NAS-Bench-201's cell"
DIVISIONS = {"iid": "iid", "Dirichlet .5": "dirichlet", TWO: "label_groups"}
MINUTES = {"scale": 1 / 60, "decimals": 0}
COLUMNS = [
    "central_accuracy",
    {"metric": "paper", "title": "paper's (%)", "decimals": 1},
    "num_parameters",
    {"metric": "multiply_adds", "title": "multiply-adds (M)", "scale": 1e-6, "decimals": 1},
    {"metric": "searched_seconds", "title": "search (min)", **MINUTES},
    {"metric": "retrain_seconds", "title": "retraining (min)", **MINUTES},
    {"metric": "searched_epsilon", "title": "PRV epsilon of the search", "decimals": 2},
]
DARTS = ("experiment=fed_darts/published", "rounds=5", "algorithm.batch_size=64")
BATCHES = ("experiment=fnas/fashion_mnist", "algorithm.batch_size=64")
FNAS, FNAS_201 = (*BATCHES, "rounds=300", "algorithm.evaluate_every=0"), (*BATCHES, "rounds=400")
FEATHERS = ("experiment=feathers/fashion_mnist",)
WAITS = "algorithm.warm_up_rounds=30"
DP_FNAS = (
    *("experiment=dp_fnas/fashion_mnist", "privacy.epsilon=3.5", "rounds=60", WAITS),
    "privacy.micro_batch_size=512",
)
RECOMMENDED = ("experiment=search/recommended",)


@dataclass(frozen=True)
class Row:
    """One row: a search, and the retraining of its result.

    Attributes:
        paper: The paper whose table has the row.
        name: Name of the algorithm.
        clients: Number of clients that share the images.
        search: Settings of the search.
        number: The paper's number on its own data (%); None if it has no such row.
        training: Settings of the retraining.
        partition: One of ``DIVISIONS``.
        data: The images.
        space: Space of the search.
    """

    paper: str
    name: str
    clients: int
    search: tuple[str, ...]
    number: float | None
    training: tuple[str, ...] = FEDAVG
    partition: str = "iid"
    data: str = FASHION
    space: tuple[str, ...] = NASBENCH

    def settings(self, *, of: tuple[str, ...]) -> list[str]:
        """Overrides of a run: those ``of`` a stage, and those of the data and their division."""
        files = "fashion_mnist" if self.data == FASHION else "npz"
        data = (f"dataset={files}", "dataset.limit_train=null", "dataset.limit_test=null")
        division = (f"partition={DIVISIONS[self.partition]}", f"clients={self.clients}")
        return [*of, *data, *division, "runtime.threads=1", "training.precision=auto"]


def feathers(partition: str, clients: int, numbers: tuple[float, float, float]) -> list[Row]:
    """Rows of FEATHERS' Table 2: DARTS (f), FedEx and FEATHERS, for which it has numbers.

    The table does not say how skewed its labels are.
    """
    tuned, trained = ("algorithm.num_configurations=12",), FEDAVG if partition == "iid" else FEDSGD
    searches = {
        "DARTS (f)": (DARTS, numbers[0], trained),
        "recommended": (RECOMMENDED, None, trained),
        "FEATHERS": (
            (*FEATHERS, "rounds=5", "algorithm.nas_rounds=5", "algorithm.batch_size=64"),
            numbers[2],
            (*FEATHERS, "algorithm.nas_rounds=10", *tuned),
        ),
        "FedEx on DARTS' cell": (DARTS, numbers[1], ("experiment=fedex/fashion_mnist", *tuned)),
        "random search": (("experiment=random_search/fashion_mnist", "rounds=5"), None, trained),
    }
    return [
        Row("FEATHERS", name, clients, search, number, training, partition)
        for name, (search, number, training) in searches.items()
    ]


ROWS = [
    *feathers("iid", 5, (92, 82, 94)),
    Row("DP-FNAS", "FNAS", 4, FNAS, 96.8, space=DARTS_CELLS),
    Row("DP-FNAS", "DP-FNAS", 4, DP_FNAS, 96.9, space=DARTS_CELLS),
    *feathers("Dirichlet .5", 5, (93, 81, 93)),
    Row("FEATHERS", "DARTS (f)", 5, DARTS, None, FEDSGD, partition=TWO),
    Row("FEATHERS", "recommended", 5, RECOMMENDED, None, FEDSGD, partition=TWO),
    Row("DP-FNAS", "vanilla NAS", 1, FNAS, 97.2, space=DARTS_CELLS),
    Row("DP-FNAS", "DP-FNAS", 1, DP_FNAS, 97.0, space=DARTS_CELLS),
    Row("DP-FNAS", "FNAS", 8, FNAS, 96.7, space=DARTS_CELLS),
    Row("DP-FNAS", "DP-FNAS", 8, DP_FNAS, 96.6, space=DARTS_CELLS),
    *(row for row in feathers("iid", 10, (91, 78, 93)) if row.number and "FedEx" not in row.name),
    Row("DP-FNAS", "DP-FNAS", 4, DP_FNAS, 96.9, SHIFTED, data=CIFAR, space=DARTS_CELLS),
    Row("DP-FNAS", "FNAS", 4, FNAS, 96.8, SHIFTED, data=CIFAR, space=DARTS_CELLS),
    Row("DP-FNAS", IN_201, 4, FNAS_201, 96.8),
    Row("DP-FNAS", IN_201, 4, FNAS_201, 96.8, SHIFTED, data=CIFAR),
    Row("DP-FNAS", "recommended", 4, RECOMMENDED, None, SHIFTED, data=CIFAR),
]


def main() -> None:
    """Make the missing runs until the time is over."""
    parser = arguments(__doc__)
    parser.add_argument("--for", dest="time", default="1000h", help="stop after 150min, 2h, ...")
    parser.add_argument("--only", default="", help="rows of one paper: FEATHERS, DP-FNAS")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--cifar", type=Path, help="an npz file of CIFAR-10")
    options = parser.parse_args()
    results = start(
        "papers",
        title="The papers' rows on all images of Fashion-MNIST or CIFAR-10",
        columns=COLUMNS,
    )
    roots = {FASHION: options.root.resolve()}
    if options.cifar:
        roots[CIFAR] = options.cifar.resolve()
    end = time.monotonic() + seconds(options.time)
    rows = [row for row in ROWS if options.only in ("", row.paper) and row.data in roots]
    jobs = [
        partial(make, row, seed, results, root=roots[row.data], end=end)
        for seed in options.seeds
        for row in rows
    ]
    make_all(lambda job: job(), jobs, at_a_time=options.jobs)


def make(row: Row, seed: int, results: Path, *, root: Path, end: float) -> None:
    """Make one row's runs, unless they exist or the time is over."""
    group = {name: getattr(row, name) for name in ("data", "paper", "clients", "partition")}
    group["algorithm"] = row.name
    known = json.loads(results.read_text(encoding="utf-8"))["runs"]
    if any((run["group"], run["seed"]) == (group, seed) for run in known):
        return
    overrides = row.settings(of=(*row.search, *row.space, "stages=[search]"))
    place = row.search[0] if row.name != IN_201 else f"{row.search[0]} 201"
    kept: dict[str, Any] = {"seed": seed, "root": root, "end": end, "any_commit": True}
    search = make_run(folder(place, row, seed), overrides, **kept)
    if search is None:
        return
    genotype = search.folder / "genotype.json"
    cells, batch_size = SIZES[load_genotype(genotype).space]
    sizes = (
        *(f"genotype={genotype}", f"retrain.num_cells={cells}", f"retrain.batch_size={batch_size}"),
        f"retrain.channels={channels(genotype, SHAPES[row.data])}",
    )
    measure(
        results,
        folder(f"{row.paper} {row.name}", row, seed),
        overrides=row.settings(of=(*row.training, *TRAINING, *sizes)),
        group=group,
        **kept,
        more=lambda run: {
            "paper": row.number,
            "searched_seconds": search.numbers()["search_seconds"],
            "searched_epsilon": search.numbers()["epsilon"],
        },
    )


def folder(name: str, row: Row, seed: int) -> Path:
    """Return the folder of a run with this name on a row's division of the images."""
    place = row.partition if row.data == FASHION else f"cifar10 {row.partition}"
    words = re.findall(r"[\w-]+", f"{name.removeprefix('experiment=')} {place}")
    return RUNS / "_".join([*words, str(row.clients), f"s{seed}"])


def channels(genotype: Path, shape: tuple[int, int, int]) -> int:
    """Return the fewest channels, a multiple of 2, that give found cells 25 M multiply-adds."""
    cell, width, cost = load_genotype(genotype), 0, 0
    name = cell.space
    while cost < LEAST_MULTIPLY_ADDS:
        width += 2
        settings = {"channels": width, "num_cells": SIZES[name][0], "norm": "batch"}
        space = make_space(name, input_shape=shape, num_classes=10, **settings)
        cost = count_multiply_adds(space.network(cell), space.input_shape)
    return width


if __name__ == "__main__":
    main()
