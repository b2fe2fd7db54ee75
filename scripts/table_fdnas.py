"""Tables: FDNAS and CFDNAS on Fashion-MNIST, small forms of the paper's Tables 3, 4 and 5.

    python scripts/table_fdnas.py --root <folder> [--jobs 2] [--full] [--cifar FILE]

10 clients whose groups of 3, 3 and 4 hold different classes, 3 seeds. The baselines search on one
client alone or on all records in one place; what they find is trained by all clients, as FDNAS'
network is. CFDNAS also with an epsilon per client for all that it does, on images and on scattering
features with a linear classifier beside the blocks. ``--full`` makes the first table's FDNAS and
MobileNetV2 with all 60,000 images and twice the width instead; ``--cifar`` makes them with all
images of CIFAR-10, an npz file, and the paper's 19 blocks at half their width, one seed. Both are
for a GPU. Continues where it was stopped; every finished run is added to scripts/results/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from table_runs import PERCENT, RESULTS, arguments, is_made, make_all, make_run, measure, start

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
ON_FEATURES = [  # networks are smaller there: 0.35 to 0.44 M multiply-adds
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
TRAINED = ["stages=[retrain,evaluate]"]
MOBILENET = "MobileNetV2's blocks, FedAvg"
NAIVE_ROUNDS = (4, 12)  # of each group's search from scratch; CFDNAS' groups have 4
ACCURACIES = [
    {"metric": "central_accuracy", "title": "federated averaged accuracy (%)", **PERCENT},
    {"metric": "personalised_accuracy", "title": "mean local accuracy (%)", **PERCENT},
]
SIZES = [
    {"metric": "num_parameters", "title": "parameters (k)", "scale": 1e-3, "decimals": 0},
    {"metric": "multiply_adds", "title": "multiply-adds (M)", "scale": 1e-6, "decimals": 2},
]
SEARCH = [{"metric": "search_seconds", "title": "search (s)", "decimals": 0}]
GROUPS = {"phone": range(3), "cpu": range(3, 6), "gpu": range(6, 10)}  # and their classes


def main() -> None:
    """Run what is missing."""
    parser = arguments(__doc__)
    parser.add_argument("--full", action="store_true", help="with all images")
    parser.add_argument("--cifar", type=Path, help="an npz file of CIFAR-10")
    options = parser.parse_args()
    root = (options.cifar or options.root).resolve()
    name, data, option = "fdnas", "Fashion-MNIST, small form: 2,500 images", ""
    if options.full:
        name, data, option = "fdnas_full", "Fashion-MNIST, all images", " --full"
    if options.cifar:
        name, data, option = "fdnas_cifar", "CIFAR-10 (JPEG), all images", " --cifar FILE"
    start(
        name,
        title=f"FDNAS and baselines on {data}",
        command=COMMAND + option,
        columns=[*ACCURACIES, *SIZES, *SEARCH],
        against={"algorithm": MOBILENET},
    )
    if options.cifar:
        make_pair(RUNS / "cifar", CIFAR, results=name, seed=1, root=root, blocks=19)
        return
    if options.full:
        for seed in SEEDS:
            make_pair(RUNS / "full", FULL, results=name, seed=seed, root=root)
        return
    start(
        "cfdnas",
        title="CFDNAS on Fashion-MNIST, small form: three groups",
        command=COMMAND,
        columns=[
            {"metric": "client_accuracy", "title": "group's network (%)", **PERCENT},
            *ACCURACIES[1:],
            {"metric": "all_classes", "title": "on all classes (%)", **PERCENT},
            {"metric": "without_cells", "title": "so without cells (%)", **PERCENT},
            *(
                {"metric": name, "title": f"{name} (M)", "scale": 1e-6, "decimals": 2}
                for name in GROUPS
            ),
            {"metric": "supernet_accuracy", "title": "supernet's train accuracy (%)", **PERCENT},
            {"metric": "inherited_seconds", "title": "search of all (s)", "decimals": 0},
            {"metric": "groups_seconds", "title": "search of the groups (s)", "decimals": 0},
        ],
        against={"algorithm": "naive-CFDNAS"},
    )
    make_all(lambda seed: make_seed(seed, root=root), SEEDS, at_a_time=options.jobs)


def make_seed(seed: int, *, root: Path) -> None:
    """Make all runs of one seed: the baselines need FDNAS' division of the records."""
    fdnas = make_pair(RUNS, [], results="fdnas", seed=seed, root=root)
    for name in ("DNAS on one client", "DNAS on pooled data"):
        folder = RUNS / f"{name.replace(' ', '_').lower()}_s{seed}"
        given = [*FDNAS, *TRAINED, f"genotype={folder / 'genotype.json'}"]
        if is_made(RESULTS / "fdnas.json", given, seed):
            continue
        partition = one_client(fdnas) if name == "DNAS on one client" else ["partition=iid"]
        alone = [*FDNAS, *partition, "clients=1", "stages=[search]"]
        search = make_run(folder, overrides=alone, seed=seed, root=root)
        if search is None:
            continue
        trained = folder.with_name(f"{folder.name}_trained")
        seconds = {"search_seconds": search.numbers()["search_seconds"]}
        add(name, trained, given, seed=seed, root=root, more=seconds)
    add_groups("CFDNAS", RUNS / f"cfdnas_s{seed}", CFDNAS, rounds=4, seed=seed, root=root)
    for name, folder, more in (
        (f"CFDNAS, budget of {BUDGET}", "cfdnas_private", []),
        (f"CFDNAS, budget of {BUDGET}, on features", "cfdnas_features", ON_FEATURES),
    ):
        overrides = [*CFDNAS, *PRIVATE, *more]
        add_groups(name, RUNS / f"{folder}_s{seed}", overrides, rounds=4, seed=seed, root=root)
    for rounds in NAIVE_ROUNDS:
        naive = [*CFDNAS, "algorithm.inherit=false", f"algorithm.group_rounds={rounds}"]
        folder = RUNS / f"naive{rounds}_s{seed}"
        add_groups("naive-CFDNAS", folder, naive, rounds=rounds, seed=seed, root=root)


def make_pair(
    folder: Path, sizes: Sequence[str], *, results: str, seed: int, root: Path, blocks: int = 6
) -> Path:
    """Make FDNAS' run and that of MobileNetV2's blocks; returns the folder of the former."""
    searched = folder / f"fdnas_s{seed}"
    add("FDNAS", searched, [*FDNAS, *sizes], results=results, seed=seed, root=root)
    unused = {"rounds", "algorithm.batch_size"}  # by what does not search
    sizes = [text for text in sizes if text.partition("=")[0] not in unused]
    genotype = mobilenet_blocks(RUNS / f"mobilenet_{blocks}.json", blocks)
    fixed = [*FDNAS, *TRAINED, *sizes, f"genotype={genotype}"]
    trained = folder / f"mobilenet_s{seed}"
    add(MOBILENET, trained, fixed, results=results, seed=seed, root=root)
    return searched


def mobilenet_blocks(path: Path, blocks: int) -> Path:
    """Write the genotype whose blocks are all MobileNetV2's."""
    edges = tuple(Edge("mbconv6_3x3", block, block + 1) for block in range(blocks))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_genotype(path, Genotype(space="mbconv", cells={"blocks": edges}))
    return path


def one_client(fdnas: Path) -> list[str]:
    """Return the settings under which the one client of a run has the first one's records."""
    path = fdnas.with_name("first_client.json")
    save_partition(path, load_partition(fdnas / "partition.json")[:1])
    return ["partition=saved", f"partition.file={path}"]


def add(
    name: str,
    folder: Path,
    overrides: Sequence[str],
    *,
    seed: int,
    root: Path,
    results: str = "fdnas",
    more: Mapping[str, float | None] | None = None,
) -> None:
    """Make a run of the first table."""
    measure(
        RESULTS / f"{results}.json",
        folder,
        overrides=overrides,
        group={"algorithm": name},
        seed=seed,
        root=root,
        more=lambda run: more or {},
    )


def add_groups(
    name: str, folder: Path, overrides: Sequence[str], *, rounds: int, seed: int, root: Path
) -> None:
    """Make a run of the second table."""
    measure(
        RESULTS / "cfdnas.json",
        folder,
        overrides=overrides,
        group={"algorithm": name, "rounds per group": rounds},
        seed=seed,
        root=root,
        more=group_numbers,
    )


def group_numbers(run: Run) -> dict[str, float | None]:
    """Return the mean over all groups' clients, each group's multiply-adds, and search seconds.

    Accuracies are on each client's own test part, before and after local training, and of drawn
    paths on train records in the last round of the groups' searches. Private clients tell none: the
    first is then that on the server's test records of their classes. Two more are the groups' means
    on all of the server's test records, of the network and of its linear part alone.
    """
    parts = {e["group"]: e for e in run.of_kind("group_finished") if e["status"] == "completed"}
    runs = {name: read_run(run.folder / event["folder"]) for name, event in parts.items()}
    tested = [part.last("evaluated") for part in runs.values()]
    accuracies = {
        name: [client["accuracy"] for event in tested for client in event.get(kind, [])]
        for name, kind in (
            ("client_accuracy", "clients"),
            ("personalised_accuracy", "personalised"),
        )
    }
    if not accuracies["client_accuracy"]:
        accuracies["client_accuracy"] = [
            accuracy_among(GROUPS[name], event["central"]["confusion"])
            for (name, group), event in zip(parts.items(), tested, strict=True)
            for _ in group["clients"]
        ]
    for name, number in (
        ("all_classes", "central_accuracy"),
        ("without_cells", "accuracy_without_cells"),
    ):
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
    """Return the share of records of these classes that were predicted right."""
    right = sum(confusion[own][own] for own in classes)
    return right / sum(sum(confusion[own]) for own in classes)


if __name__ == "__main__":
    main()
