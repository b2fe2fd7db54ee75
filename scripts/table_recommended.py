"""Tables: the network that the recommended command delivers, beside the simplest alternatives.

    python scripts/table_recommended.py --data <folder> [--jobs 2] [--only heart digits]

The seeds listed here were not used for tuning; each has its own split into clients' records and the
server's test set. All choices are made by validation records. ``<folder>`` has the data of the
README's table in their published forms: ``heart_disease/``, ``fraud/``, ``breastmnist/``,
``FashionMNIST/``, ``cifar10_jpeg60k.npz.xz``. Digits, diabetes, and tables with interactions and of
patients are made here. The script continues where it was stopped; every finished run is added to
scripts/results/recommended.json or, for a number to predict, regression.json or, for a table with
privacy, private_tables.json.

Columns are test scores by each row's own metric: those of the delivered network; of the found one,
the random ones on average, the data-free choice and ResNet-8, which all had the same rounds; of the
linear model; of logistic regression and boosted trees on pooled records of a table; and of a random
forest on those of ``breast``, whose seeds are five folds of all images. For numbers they are R2,
also that of ridge regression on pooled records, and the delivered network's RMSE. Tables with
privacy share the noise in secure sums; each is compared with the run of its seed without privacy.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pandas as pd
from table_runs import PERCENT, RESULTS, Job, arguments, make_all, measure, start

from fednas_flwr.base.files import write_atomically
from fednas_flwr.runs.leaderboard import candidates, chosen, compared, validated
from fednas_flwr.runs.numbers import Run

COMMAND = "python scripts/table_recommended.py --data <folder>"
RUNS = Path("runs/table_recommended")
SEEDS, FEW_SEEDS, TEN_SEEDS = (101, 102, 103, 104, 105), (101, 102, 103), tuple(range(101, 111))
SUFFIX = {"dataset=csv": ".csv"}
MLP = "search_space=mlp_small"
TABLE = ("dataset=csv", MLP, "dataset.id_column=id")
RECOMMENDED = ("experiment=search/recommended", "evaluation.baselines=2")
RECOMMENDED_PRIVATE = "experiment=search/recommended_private"
NUMBERS_ALONE = "experiment=fedavg/private_numbers"
NETWORKS = {
    "one layer": ("experiment=fedavg/private_table",),
    "searched": (RECOMMENDED_PRIVATE, MLP),
}
HEART = "age sex cp trestbps chol fbs restecg thalach exang oldpeak slope ca thal num".split()
GROUPS = "partition.groups=[[0,1],[2,3],[4,5],[6,7],[8,9]]"
PARTITIONS = {
    "iid": ("clients=5",),
    "Dirichlet .3": ("clients=5", "partition=dirichlet", "partition.alpha=0.3"),
    "label groups": (
        *("clients=5", "partition=label_groups", GROUPS),
        "partition.clients_per_group=[1,1,1,1,1]",
    ),
}
NAMES = ("delivered", "found", "random", "data-free", "ResNet-8", "linear", "pooled", "trees")
COLUMNS = [{"metric": name, "title": name, **PERCENT} for name in NAMES]
COLUMNS.append({"metric": "forest", "title": "random forest", **PERCENT})
COLUMNS.append({"metric": "minus_simple", "title": "delivered minus simple", **PERCENT})
OF_NUMBERS = [
    {"metric": name, "title": name, "decimals": 3}
    for name in ("delivered", "found", "linear", "ridge", "trees")
]
OF_NUMBERS.append({"metric": "rmse", "title": "RMSE of delivered"})
WITH_PRIVACY = [
    {"metric": name, "title": title, **PERCENT}
    for name, title in (
        ("central_auroc", "AUROC"),
        ("plain", "without privacy"),
        ("minus_plain", "difference"),
        ("central_f1", "F1"),
        ("released_auroc", "AUROC told of training records"),
    )
]
WITH_PRIVACY.append({"metric": "epsilon", "title": "PRV epsilon"})
TABLES = {
    "recommended": (
        "The recommended command and simpler networks, test score of each row's metric (%)",
        COLUMNS,
    ),
    "regression": ("Numbers: the recommended command and simpler models, test R2", OF_NUMBERS),
    "private_tables": (
        "Tables at a budget of 8 with shared noise, and the same without privacy (%)",
        WITH_PRIVACY,
    ),
}


def main() -> None:
    """Run what is missing."""
    parser = arguments(__doc__, needs_root=False)
    parser.add_argument("--data", type=Path, required=True, help="folder of the published data")
    names = 'names of data, of tables with privacy "<name> private"; all by default'
    parser.add_argument("--only", nargs="*", default=[], help=names)
    options = parser.parse_args()
    for table, (title, columns) in TABLES.items():
        start(table, title=title, command=COMMAND, columns=columns)
    make = partial(make_row, data=options.data.resolve())
    for rows in (plain_rows(), private_rows()):
        asked = [row for row in rows if not options.only or row.asked in options.only]
        make_all(make, asked, at_a_time=options.jobs)


class Row(NamedTuple):
    """One run: its overrides, the name of its data, its table, and how it is made."""

    asked: str
    name: str
    table: str
    job: Job


def make_row(row: Row, *, data: Path) -> None:
    """Make one run, unless it exists, and the data that it needs."""
    group, overrides, seed, place, _, more = row.job
    write, _, (kind, *_), _ = ROWS[row.name]
    file = f"{row.name}_{seed}{SUFFIX.get(kind, '.npz')}"
    root = (RUNS / "data" / file.replace(",", "")).resolve()  # a comma would start a sweep
    if not root.exists():
        write(data, root, seed)
    folder = RUNS / f"{row.name}_{place}_{seed}".replace(" ", "_").replace(",", "")
    table = RESULTS / f"{row.table}.json"
    measure(table, folder, overrides=overrides, group=group, seed=seed, root=root, more=more)


def plain_rows() -> Iterator[Row]:
    """Yield the rows of the recommended command, and those with a number to predict."""
    for name, (_, partitions, overrides, seeds) in ROWS.items():
        is_number = partitions is BUDGETS.get(name)
        table, more = ("regression", scores_of_numbers) if is_number else ("recommended", scores)
        for (partition, divided), seed in product(partitions.items(), seeds):
            settings = [*RECOMMENDED, "runtime.threads=1", *overrides]
            if divided[0] == NUMBERS_ALONE:
                settings = ["runtime.threads=1", *without_search(overrides)]
            group = {"data": name, "privacy" if is_number else "partition": partition}
            job = Job(group, [*settings, *divided], seed, partition, more=more)
            yield Row(name, name, table, job)


def private_rows() -> Iterator[Row]:
    """Yield the rows of tables with privacy, which are compared with those without."""
    for network, name, seed in product(NETWORKS, RANGES, SEEDS):
        _, partitions, overrides, _ = ROWS[name]
        ((partition, divided),) = partitions.items()
        beside = partial(scores_beside, {"data": name, "partition": partition}, seed)
        settings = [*NETWORKS[network], "privacy.epsilon=8", "secure_sum=true", "runtime.threads=1"]
        settings += [*without_search(overrides), *divided]
        settings.append(f"dataset.ranges={{{RANGES[name]}}}")
        group, place = {"data": name, "network": network}, f"epsilon 8 {network}"
        job = Job(group, settings, seed, place, more=beside)
        yield Row(f"{name} private", name, "private_tables", job)


def without_search(overrides: Sequence[str]) -> list[str]:
    """Return the overrides without the search space."""
    return [text for text in overrides if text != MLP]


def scores(run: Run) -> dict[str, float | None]:
    """Return the test scores of a run's leaderboard, by the columns' names."""
    known, choice, metric = candidates(run.folder), chosen(run.folder), run.score.name
    short = {one.name: one.short.scores("central").get(metric) for one in known}
    long = {one.name: one.row()["test"] for one in known}
    resnet = next((name for name in short if name.startswith("resnet")), "")
    simple = max(
        (one for one in known if one.name in ("linear", resnet)), key=lambda one: validated(one.run)
    )
    random = [value for name, value in short.items() if name.startswith("random") and value]
    delivered = run.scores("central")[metric]
    forest = forest_auroc(run) if run.folder.name.startswith("breast") else None
    return {
        "delivered": delivered,
        "forest": forest,
        "found": short.get("found"),
        "random": fmean(random) if random else None,
        "data-free": short.get("data_free", short.get("found")),  # if they are the same
        "ResNet-8": short.get(resnet),
        "linear": long.get("linear"),
        "pooled": run.scores("linear").get(metric),
        "trees": run.scores("trees").get(metric),
        "minus_simple": delivered - simple.row()["test"],
        "chose": list(long).index(choice.name) if choice else None,
    }


def forest_auroc(run: Run) -> float:
    """Return the test AUROC of a random forest on the pixels of all clients' records."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.metrics import roc_auc_score

    with np.load(run.group("dataset")["root"]) as file:
        x, x_test = (file[name].reshape(len(file[name]), -1) for name in ("x_train", "x_test"))
        forest = RandomForestClassifier(500, random_state=run.config["seed"]).fit(
            x, file["y_train"].ravel()
        )
        return float(roc_auc_score(file["y_test"].ravel(), forest.predict_proba(x_test)[:, 1]))


def scores_beside(group: dict[str, str], seed: int, run: Run) -> dict[str, float | None]:
    """Return the AUROC of the row and seed without privacy, and a private run's difference."""
    rows = json.loads((RESULTS / "recommended.json").read_text())["runs"]
    (plain,) = (row for row in rows if (row["group"], row["seed"]) == (group, seed))
    without = plain["metrics"]["central_auroc"]
    return {"plain": without, "minus_plain": run.scores("central")["auroc"] - without}


def scores_of_numbers(run: Run) -> dict[str, float | None]:
    """Return the test scores of a run that predicts a number, by the columns' names."""
    searched = "search" in run.config["stages"]
    rows = {row["network"]: row["test"] for row in compared(run) if searched}
    return {
        "delivered": run.test_score(),
        "found": rows.get("found"),
        "linear": rows.get("linear"),
        "ridge": run.test_score("linear"),
        "trees": run.test_score("trees"),
        "rmse": run.scores("central")["rmse"],
    }


def write_heart(data: Path, root: Path, seed: int) -> None:
    """Write the four hospitals' tables unchanged, with an id that the split follows."""
    for file in sorted((data / "heart_disease").glob("processed.*.data")):
        table = pd.read_csv(file, header=None, names=HEART, dtype=str)
        _write_table(root / f"{file.name.split('.')[1]}.csv", table, seed)
    lines = ['  missing_values: ["?"]', "  map: {num: {2: 1, 3: 1, 4: 1}}"]
    write_atomically(root / "dataset.yaml", "\n".join(["all:", *lines]) + "\n")


def write_fraud(data: Path, root: Path, seed: int) -> None:
    """Write 6,000 transactions, drawn with the seed."""
    (file,) = (data / "fraud").glob("*.csv.gz")
    table = pd.read_csv(file).sample(6000, random_state=seed)
    _write_table(root, table.rename(columns={table.columns[-1]: "label"}), seed)


def write_interactions(data: Path, root: Path, seed: int) -> None:
    """Write a made-up table of 3,000 records, whose label follows from products of columns."""
    drawn = np.random.default_rng(seed)
    x, site = drawn.normal(size=(3000, 12)), drawn.integers(0, 6, 3000)
    odds = 1.5 * x[:, 0] * x[:, 1] + np.where(x[:, 2] > 0, x[:, 3], -x[:, 3]) + 0.8 * x[:, 4]
    odds += 0.2 * (site - 2.5) + 0.6 * (x[:, 5] ** 2 - 1) - 1
    table = pd.DataFrame(x.round(4), columns=[f"x{i}" for i in range(12)])
    table["label"] = (drawn.random(3000) < 1 / (1 + np.exp(-odds))).astype(int)
    _write_table(root, table.assign(site=[f"site {s}" for s in site]), seed)


def write_patients(data: Path, root: Path, seed: int) -> None:
    """Write 1,500 made-up patients of 6 hospitals, of whom about 12 % die."""
    drawn = np.random.default_rng(seed)
    age, crp = drawn.normal(64, 14, 1500).clip(18, 99).round(), drawn.lognormal(2.5, 1, 1500)
    lactate, pressure = drawn.lognormal(0.3, 0.5, 1500), drawn.normal(125, 22, 1500)
    ward, site = drawn.choice(["surgery", "icu", "medicine"], 1500), drawn.integers(0, 6, 1500)
    odds = 0.07 * (age - 64) + 0.8 * np.log(crp / 12) + 1.6 * np.log(lactate) - 3.8
    odds += 1.3 * (ward == "icu") + 0.0004 * (pressure - 125) ** 2 + 0.15 * (site - 2.5)
    columns = {"age": age, "crp": crp.round(1), "lactate": lactate.round(2), "ward": ward}
    table = pd.DataFrame(columns | {"pressure": pressure.round()})
    table["died"] = np.where(drawn.random(1500) < 1 / (1 + np.exp(-odds)), "yes", "no")
    _write_table(root, table.assign(site=[f"site {s}" for s in site]), seed)


def write_diabetes(data: Path, root: Path, seed: int) -> None:
    """Write scikit-learn's 442 patients, with a number for the progression of their disease."""
    from sklearn.datasets import load_diabetes

    _write_table(root, load_diabetes(as_frame=True, scaled=False).frame, seed)


def write_stays(data: Path, root: Path, seed: int) -> None:
    """Write 1,200 made-up stays in four hospitals, in days, with an interaction of two columns."""
    drawn = np.random.default_rng(seed)
    age, crp = drawn.integers(20, 95, 1200), drawn.exponential(12, 1200).round(1)
    ward, site = drawn.choice(["surgery", "icu", "eye"], 1200), drawn.integers(0, 4, 1200)
    days = 2 + 0.05 * age + 0.05 * crp + (ward == "icu") * (2 + 0.15 * crp) + 0.3 * site
    days = (days + drawn.normal(0, 1, 1200)).clip(0.1).round(1)
    crp[drawn.random(1200) < 0.05] = np.nan
    columns = {"age": age, "ward": ward, "crp": crp, "site": [f"site {s}" for s in site]}
    _write_table(root, pd.DataFrame(columns).assign(days=days), seed)


def write_breast(data: Path, root: Path, seed: int) -> None:
    """Write all 780 images; the seed decides which of five folds is the test set."""
    from sklearn.model_selection import StratifiedKFold

    with np.load(data / "breastmnist" / "breastmnist.npz") as file:
        x, y = (np.concatenate([file[f"{n}_train"], file[f"{n}_test"]]) for n in "xy")
    folds = StratifiedKFold(len(SEEDS), shuffle=True, random_state=SEEDS[0]).split(x, y.ravel())
    a, b = list(folds)[SEEDS.index(seed)]
    _save(root, x_train=x[a], y_train=y[a], x_test=x[b], y_test=y[b])


def write_official_breast(data: Path, root: Path, seed: int) -> None:
    """Write the images in their published split: 156 for the test, whatever the seed."""
    with np.load(data / "breastmnist" / "breastmnist.npz") as file:
        _save(root, **file)


def write_digits(data: Path, root: Path, seed: int) -> None:
    """Write scikit-learn's digits; a fifth, drawn with the seed, is the test set."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = (digits.images * 255 / 16).astype(np.uint8)
    rows = np.random.default_rng(seed).permutation(len(x))
    a, b = rows[len(x) // 5 :], rows[: len(x) // 5]
    _save(root, x_train=x[a], y_train=digits.target[a], x_test=x[b], y_test=digits.target[b])


def write_fashion(data: Path, root: Path, seed: int, *, number: int) -> None:
    """Write some of Fashion-MNIST's training images, drawn with the seed, and its test set."""
    arrays = []
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        content = gzip.decompress((data / f"FashionMNIST/raw/{name}-ubyte.gz").read_bytes())
        shape = (-1, 28, 28) if "images" in name else (-1,)
        skipped = 16 if "images" in name else 8
        arrays.append(np.frombuffer(content, np.uint8, offset=skipped).reshape(shape))
    _write_subset(root, *arrays, seed=seed, number=number)


def write_cifar10(data: Path, root: Path, seed: int, *, number: int) -> None:
    """Write some of CIFAR-10's training images (JPEG), drawn with the seed, and its test set."""
    arrays = read_cifar10(data / "cifar10_jpeg60k.npz.xz").values()
    _write_subset(root, *arrays, seed=seed, number=number)


def read_cifar10(path: Path) -> dict[str, np.ndarray]:
    """Return x_train, y_train, x_test and y_test of a file of JPEGs."""
    from PIL import Image

    arrays: dict[str, np.ndarray] = {}
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as file:
        for part in ("train", "test"):
            ends, content = file[f"{part}_off"], file[f"{part}_bytes"].tobytes()
            places = zip(ends[:-1], ends[1:], strict=True)
            images = [Image.open(io.BytesIO(content[a:b])).convert("RGB") for a, b in places]
            arrays |= {
                f"x_{part}": np.stack([*map(np.asarray, images)]),
                f"y_{part}": file[f"y_{part}"],
            }
    return arrays


def _write_subset(
    root: Path,
    x: np.ndarray,
    y: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
    *,
    seed: int,
    number: int,
) -> None:
    rows = np.random.default_rng(seed).permutation(len(x))[:number]
    _save(root, x_train=x[rows], y_train=y[rows], x_test=x_test, y_test=y_test)


def _save(root: Path, **arrays: np.ndarray) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    write_atomically(root, content.getvalue())


def _write_table(path: Path, table: pd.DataFrame, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    named = table.assign(id=[f"{seed}-{path.stem}-{row}" for row in range(len(table))])
    write_atomically(path, named.to_csv(index=False))


Write = Callable[[Path, Path, int], None]
SITES = ("partition=column", "partition.column=site")
SIX = (*SITES, "clients=6")
EPSILON = (NUMBERS_ALONE, "privacy.epsilon=8", "clients=4")
OF_DIABETES = (
    *EPSILON,
    "dataset.target_range=[25,350]",
    "dataset.ranges={age:[18,80],sex:[1,2],bmi:[15,45],bp:[60,140],s1:[90,310],s2:[40,250],"
    "s3:[20,100],s4:[2,10],s5:[3,6.5],s6:[55,125]}",
)
OF_STAYS = (
    *EPSILON,
    *(*SITES, "dataset.target_range=[0,25]", "dataset.ranges={age:[18,100],crp:[0,60]}"),
)
ITS_LINEAR = "algorithm.network=linear"
BUDGETS: dict[str, dict[str, tuple[str, ...]]] = {  # for numbers: budgets in place of partitions
    "diabetes": {
        "none": ("clients=4",),
        "epsilon 8": OF_DIABETES,
        "epsilon 8, linear": (*OF_DIABETES, ITS_LINEAR),
    },
    "stays": {
        "none": (*SITES, "clients=4"),
        "epsilon 8": OF_STAYS,
        "epsilon 8, linear": (*OF_STAYS, ITS_LINEAR),
    },
}
RANGES = {  # as stated without having seen the records
    "patients": "age:[18,100],crp:[0,200],lactate:[0,10],pressure:[50,220]",
    "heart": "age:[18,100],sex:[0,1],cp:[1,4],trestbps:[60,220],chol:[0,600],fbs:[0,1],"
    "restecg:[0,2],thalach:[50,220],exang:[0,1],oldpeak:[-3,7],slope:[1,3],ca:[0,3],thal:[3,7]",
    "fraud": "Time:[0,172800],Amount:[0,5000]," + ",".join(f"V{i}:[-10,10]" for i in range(1, 29)),
    "interactions": ",".join(f"x{i}:[-4,4]" for i in range(12)),
}
ROWS: dict[str, tuple[Write, dict[str, tuple[str, ...]], tuple[str, ...], tuple[int, ...]]] = {
    "patients": (write_patients, {"sites": SIX}, (*TABLE, "dataset.label=died"), SEEDS),
    "heart": (
        write_heart,
        {"sites": ("partition=sites", "clients=4")},
        (*TABLE, "dataset.label=num", "evaluation.positive=1"),
        TEN_SEEDS,
    ),
    "fraud": (write_fraud, {"iid": ("clients=5",)}, (*TABLE, "dataset.label=label"), SEEDS),
    "interactions": (write_interactions, {"sites": SIX}, (*TABLE, "dataset.label=label"), SEEDS),
    "diabetes": (write_diabetes, BUDGETS["diabetes"], (*TABLE, "dataset.label=target"), FEW_SEEDS),
    "stays": (write_stays, BUDGETS["stays"], (*TABLE, "dataset.label=days"), FEW_SEEDS),
    "breast": (write_breast, {"iid": ("clients=4",)}, ("dataset=npz",), SEEDS),
    "breast official": (write_official_breast, {"iid": ("clients=4",)}, ("dataset=npz",), SEEDS),
    "digits": (write_digits, PARTITIONS, ("dataset=npz",), SEEDS),
    "fashion 2,000": (partial(write_fashion, number=2000), PARTITIONS, ("dataset=npz",), SEEDS),
    "fashion 20,000": (
        partial(write_fashion, number=20000),
        PARTITIONS,
        ("dataset=npz",),
        FEW_SEEDS,
    ),
    "CIFAR-10 8,000": (
        partial(write_cifar10, number=8000),
        {"iid": PARTITIONS["iid"]},
        ("dataset=npz",),
        FEW_SEEDS,
    ),
}

if __name__ == "__main__":
    main()
