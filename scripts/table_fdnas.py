"""Tables: FDNAS and CFDNAS on Fashion-MNIST, small forms of the paper's Tables 3, 4 and 5.

    python scripts/table_fdnas.py --root <folder> [--jobs 2] [--size full]

There are 10 clients whose groups of 3, 3 and 4 hold different classes, and 3 seeds. The baselines
search on one client alone or on all records in one place; all clients train the result, as they do
FDNAS' network. CFDNAS also runs with an epsilon per client for everything, on images and on
scattering features with a linear classifier beside the blocks. Other sizes give only the rows of
FDNAS and MobileNetV2: ``full`` with all 60,000 images and twice the width, ``cifar`` with all
images of CIFAR-10, whose npz file is the root, and the paper's 19 blocks at half their width, one
seed, for a GPU. The script continues where it was stopped; every finished run is added to
scripts/results/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

from table_runs import MILLIONS, PERCENT, Job, Metrics, arguments, make_runs, start

from fednas_flwr.data.prepared import load_partition, save_partition
from fednas_flwr.runs.numbers import Run, read_run
from fednas_flwr.spaces.genotype import Edge, Genotype, save_genotype

RUNS = Path("runs/table_fdnas")
COMMAND = "python scripts/table_fdnas.py --root <folder>"
SEEDS = (1, 2, 3)
FDNAS = ["experiment=fdnas/fashion_mnist"]
CFDNAS = ["experiment=cfdnas/fashion_mnist"]
BUDGET = 8  # of each client's filter
PRIVATE = ["privacy=dp", f"privacy.epsilon={BUDGET}", "evaluation.personalised=false"]
ON_FEATURES = [  # with smaller networks: 0.35 to 0.44 M multiply-adds
    *("dataset.scattering={scales: 2, angles: 8}", "search_space.skip=linear"),
    *(
        f"algorithm.group_hardware.{name}.target={target:g}"
        for name, target in {"phone": 3.7e5, "cpu": 3.9e5, "gpu": 4.2e5}.items()
    ),
]
FULL = [
    *("dataset.limit_train=null", "dataset.limit_test=null", "search_space.width=1.0"),
    *("rounds=15", "algorithm.batch_size=128", "retrain.rounds=20", "retrain.batch_size=128"),
    "runtime.threads=1",
]
CIFAR = [
    *("dataset=npz", "dataset.crop_padding=4", "dataset.flip=true"),
    *("dataset.limit_train=null", "dataset.limit_test=null"),
    *("search_space=mbconv", "search_space.candidates=fdnas", "search_space.width=0.5"),
    *("rounds=10", "algorithm.batch_size=256", "retrain.rounds=16", "retrain.batch_size=256"),
    "runtime.threads=1",
]
SIZES: dict[str, tuple[str, list[str], int, tuple[int, ...]]] = {  # data, blocks, and seeds
    "small": ("Fashion-MNIST, small form: 2,500 images", [], 6, SEEDS),
    "full": ("Fashion-MNIST, all images", FULL, 6, SEEDS),
    "cifar": ("CIFAR-10 (JPEG), all images", CIFAR, 19, SEEDS[:1]),
}
OF_SEARCH = ("rounds=", "algorithm.batch_size=")  # without effect on runs that do not search
TRAINED = ["stages=[retrain,evaluate]"]
MOBILENET = "MobileNetV2's blocks, FedAvg"
NAIVE = ["algorithm.inherit=false"]
NAIVE_ROUNDS = (4, 12)  # rounds of each group's search from scratch; CFDNAS' groups have 4
ACCURACIES = [
    {"metric": "central_accuracy", "title": "federated averaged accuracy (%)", **PERCENT},
    {"metric": "personalised_accuracy", "title": "mean local accuracy (%)", **PERCENT},
]
IN_PAPER = {"metric": "paper", "title": "paper's, CIFAR-10 (%)", "decimals": 1}
GROUPS = {"phone": range(3), "cpu": range(3, 6), "gpu": range(6, 10)}  # and their classes


def main() -> None:
    """Run what is missing."""
    parser = arguments(__doc__)
    parser.add_argument("--size", choices=SIZES, default="small")
    options = parser.parse_args()
    (data, sizes, blocks, seeds), root = SIZES[options.size], options.root.resolve()
    is_small = options.size == "small"
    columns = [*ACCURACIES, "num_parameters", "multiply_adds", "search_seconds"]
    if not is_small:
        columns.insert(1, IN_PAPER)
    results = start(
        "fdnas" if is_small else f"fdnas_{options.size}",
        title=f"FDNAS and baselines on {data}",
        command=f"{COMMAND}{'' if is_small else f' --size {options.size}'}",
        columns=columns,
        against={"algorithm": MOBILENET},
    )
    jobs = [job for seed in seeds for job in federated(seed, sizes, blocks)]
    make_runs(results, jobs, root=root, at_a_time=options.jobs)
    if not is_small:
        return
    jobs = [job for seed in SEEDS for job in searched_elsewhere(seed)]  # by FDNAS' division
    make_runs(results, jobs, root=root, at_a_time=options.jobs)
    results = start(
        "cfdnas",
        title="CFDNAS on Fashion-MNIST, small form: three groups",
        command=COMMAND,
        columns=[
            {"metric": "client_accuracy", "title": "group's network (%)", **PERCENT},
            *ACCURACIES[1:],
            {"metric": "all_classes", "title": "on all classes (%)", **PERCENT},
            {"metric": "without_cells", "title": "so without cells (%)", **PERCENT},
            *({"metric": name, "title": f"{name} (M)", **MILLIONS} for name in GROUPS),
            {"metric": "supernet_accuracy", "title": "supernet's train accuracy (%)", **PERCENT},
            {"metric": "inherited_seconds", "title": "search of all (s)", "decimals": 0},
            {"metric": "groups_seconds", "title": "search of the groups (s)", "decimals": 0},
        ],
        against={"algorithm": "naive-CFDNAS"},
    )
    jobs = [job for seed in SEEDS for job in by_groups(seed)]
    make_runs(results, jobs, root=root, at_a_time=options.jobs, runs=f"{RUNS}/")


def federated(seed: int, sizes: list[str], blocks: int) -> Iterator[Job]:
    """Yield FDNAS' run and that of MobileNetV2's blocks."""
    yield Job({"algorithm": "FDNAS"}, [*FDNAS, *sizes], seed, f"fdnas_s{seed}", more=in_paper(78.8))
    edges = tuple(Edge("mbconv6_3x3", block, block + 1) for block in range(blocks))
    path = RUNS / f"mobilenet_{blocks}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_genotype(path, Genotype(space="mbconv", cells={"blocks": edges}))
    trained = [text for text in sizes if not text.startswith(OF_SEARCH)]
    fixed = [*FDNAS, *TRAINED, *trained, f"genotype={path}"]
    group, place = {"algorithm": MOBILENET}, f"mobilenet_s{seed}"
    yield Job(group, fixed, seed, place, more=in_paper(68.5))


def in_paper(accuracy: float) -> Callable[..., Metrics]:
    """Return a function of a run: the paper's federated averaged accuracy on CIFAR-10 (%)."""
    return lambda *_: {"paper": accuracy}


def searched_elsewhere(seed: int) -> Iterator[Job]:
    """Yield the runs that train networks found by one client, or on all records in one place."""
    first_client = RUNS / f"first_client_s{seed}.json"
    division = RUNS / f"fdnas_s{seed}" / "partition.json"
    if division.exists():  # without it the search is refused
        save_partition(first_client, load_partition(division)[:1])
    for name, partition in (
        ("DNAS on one client", ["partition=saved", f"partition.file={first_client}"]),
        ("DNAS on pooled data", ["partition=iid"]),
    ):
        folder = f"{name.replace(' ', '_').lower()}_s{seed}"
        alone = [*FDNAS, *partition, "clients=1", "stages=[search]"]
        given = [*FDNAS, *TRAINED, f"genotype={RUNS / folder / 'genotype.json'}"]
        search = Job({}, alone, seed, folder)
        yield Job({"algorithm": name}, given, seed, f"{folder}_trained", search, search_seconds)


def search_seconds(run: Run, of: Run) -> Metrics:
    """Return the duration of the search whose network was trained."""
    return {"search_seconds": of.numbers()["search_seconds"]}


def by_groups(seed: int) -> Iterator[Job]:
    """Yield the runs of CFDNAS."""
    budget = f"CFDNAS, budget of {BUDGET}"
    for name, folder, rounds, overrides in (
        ("CFDNAS", "cfdnas", 4, []),
        (budget, "cfdnas_private", 4, PRIVATE),
        (f"{budget}, on features", "cfdnas_features", 4, [*PRIVATE, *ON_FEATURES]),
        *(
            ("naive-CFDNAS", f"naive{rounds}", rounds, [*NAIVE, f"algorithm.group_rounds={rounds}"])
            for rounds in NAIVE_ROUNDS
        ),
    ):
        group, place = {"algorithm": name, "rounds per group": rounds}, f"{folder}_s{seed}"
        yield Job(group, [*CFDNAS, *overrides], seed, place, more=group_numbers)


def group_numbers(run: Run) -> Metrics:
    """Return means over all groups' clients, each group's multiply-adds, and search seconds.

    Accuracies are those on each client's own test part, before and after local training, and those
    of drawn paths on train records in the last round of the groups' searches. Private clients
    report none; the first one is then computed on the server's test records of their classes. Two
    more are the groups' means on all of the server's test records, for the network and for its
    linear part alone.
    """
    parts = {e["group"]: e for e in run.of_kind("group_finished") if e["status"] == "completed"}
    runs = {name: read_run(run.folder / event["folder"]) for name, event in parts.items()}
    tested = [part.last("evaluated") for part in runs.values()]
    kinds = {"client_accuracy": "clients", "personalised_accuracy": "personalised"}
    accuracies = {
        name: [client["accuracy"] for event in tested for client in event.get(kind, [])]
        for name, kind in kinds.items()
    }
    if not accuracies["client_accuracy"]:
        accuracies["client_accuracy"] = [
            accuracy_among(GROUPS[name], event["central"]["confusion"])
            for (name, group), event in zip(parts.items(), tested, strict=True)
            for _ in group["clients"]
        ]
    central = {"all_classes": "central_accuracy", "without_cells": "accuracy_without_cells"}
    for name, number in central.items():
        told = [part.numbers()[number] for part in runs.values()]
        accuracies[name] = [accuracy for accuracy in told if accuracy is not None]
    last = [part.rounds("search")[-1]["metrics"] for part in runs.values()]
    accuracies["supernet_accuracy"] = [
        metrics["train_accuracy"] for metrics in last if "train_accuracy" in metrics
    ]
    return {
        **{name: fmean(values) if values else None for name, values in accuracies.items()},
        "inherited_seconds": run.numbers()["search_seconds"],
        "groups_seconds": sum(p.numbers()["search_seconds"] or 0.0 for p in runs.values()),
        **{name: part.numbers()["multiply_adds"] for name, part in runs.items()},
    }


def accuracy_among(classes: Sequence[int], confusion: Sequence[Sequence[int]]) -> float:
    """Return the share of records of these classes that were predicted correctly."""
    right = sum(confusion[own][own] for own in classes)
    return right / sum(sum(confusion[own]) for own in classes)


if __name__ == "__main__":
    main()
