"""Rows of README's table that name data, each run as it stands there on small made-up files."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fednas_flwr.cli import main
from fednas_flwr.runs.events import read_events

from .data_sets import save_pixels

ROOT = Path(__file__).parent.parent
ROWS = dict(re.findall(r"^\| ([^|]+?) \| (.+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE))
N, SIDE = 240, 12
LABELS = np.arange(N) % 2


def table(columns):
    return "\n".join(map(",".join, [list(columns), *zip(*columns.values(), strict=True)])) + "\n"


def numbers(scale):
    rng = np.random.default_rng(int(scale))
    return [f"{scale * (2 + label + rng.normal()):.3f}" for label in LABELS]


AGES = {"age": numbers(20), "chol": numbers(90)}


def images(folder, place):
    rng = np.random.default_rng(0)
    for i, label in enumerate(LABELS):
        pixels = rng.integers(0, 120, (SIDE, SIDE)).astype(np.uint8)
        pixels[: SIDE // 2] += 100 * np.uint8(label)
        save_pixels(pixels, folder / place(i))


def image_folder(folder):
    images(folder, lambda i: f"{'ab'[i % 2]}/{i}.png")
    return folder


def labelled(folder):
    images(folder, lambda i: f"{i}.png")
    text = table({"file": [f"{i}.png" for i in range(N)], "finding": [*map(str, LABELS)]})
    (folder / "labels.csv").write_text(text)
    return folder


def plain(folder):
    (folder / "t.csv").write_text(table({**AGES, "sick": [*map(str, LABELS)]}))
    return folder / "t.csv"


def marks(folder):
    both = {"effusion": [*map(str, LABELS)], "nodule": [str(i // 2 % 2) for i in range(N)]}
    (folder / "t.csv").write_text(table({**AGES, **both}))
    return folder / "t.csv"


def lists(folder):
    found = [["", "effusion", "nodule", "effusion;nodule"][i % 4] for i in range(N)]
    (folder / "t.csv").write_text(table({**AGES, "findings": found}))
    return folder / "t.csv"


def arrays(folder):
    y = np.stack([LABELS, np.arange(N) // 2 % 2], axis=1)
    x = np.random.default_rng(0).integers(0, 120, (N, SIDE, SIDE)).astype(np.uint8)
    x[:, : SIDE // 2] += (100 * y[:, :1, None]).astype(np.uint8)
    x[:, :, : SIDE // 2] += (30 * y[:, 1:, None]).astype(np.uint8)
    np.savez(folder / "t.npz", x_train=x, y_train=y)
    return folder / "t.npz"


IMAGES, TABLE = "images, one folder per class", "a table, several parties"
LABELLED = "a folder with images and a table of their labels"
SEVERAL, PRIVATE = "records with several labels", "partners whose records must stay private"
SMALL = ("retrain.rounds=1", "trackers=[]", "runtime.threads=1")
SIZES = ("dataset.image_size=8", "retrain.channels=4", "retrain.num_cells=1")
FEW = ("algorithm.eta=2", "algorithm.local_epochs=1", "algorithm.pool.draws=8")
DATA_FREE = ("algorithm.draws=4", "algorithm.shortlist={keep: 2, scores: [multiply_adds]}")
MLP = ("search_space=mlp_small", "'dataset.ranges={age: [0, 120], chol: [0, 600]}'")
TYPED = ("dataset=csv", "dataset.root=<file>", *MLP)
IMAGE = ("dataset=image_folder", "dataset.root=<folder>")
ONE = ("search_space.num_cells=1", "evaluation.baselines=0")
COMMANDS = {  # row, fragments of code in it, further settings, data, sizes
    "images": (IMAGES, [0], (), image_folder, (*SIZES, *FEW, *ONE)),
    "labels file": (LABELLED, [0], (), labelled, (*SIZES, "rounds=1", "search_space.channels=4")),
    "table": (TABLE, [0], (), plain, (*FEW, "evaluation.baselines=1")),
    "arrays with several labels": (SEVERAL, [0], (), arrays, ("rounds=1", *SIZES[1:])),
    "columns of labels": (SEVERAL, [2, 3], MLP[:1], marks, ("rounds=1",)),
    "lists of labels": (SEVERAL, [2, 4], MLP[:1], lists, ("rounds=1",)),
    "private table": (PRIVATE, [0], TYPED, plain, (*DATA_FREE, "evaluation.baselines=0")),
    "private images": (PRIVATE, [0], IMAGE, image_folder, (*SIZES, *DATA_FREE, *ONE)),
}


@pytest.mark.run
@pytest.mark.parametrize("case", COMMANDS)
def test_a_row_that_names_data_runs(case, tmp_path, capsys):
    row, places, more, make, sizes = COMMANDS[case]
    code = re.findall(r"`([^`]+)`", ROWS[row])
    fragments = []
    for at in places:
        fragments.append(code[at] if isinstance(at, int) else re.findall("`([^`]+)`", ROWS[at])[0])
    words = " ".join([*fragments, *more]).removeprefix("fednas run ")
    folder = tmp_path / "data"
    folder.mkdir()
    root = make(folder)
    words = re.sub("<folder>|<file>", str(root), words).replace("<column>", "finding")
    if "dataset.root" not in words:
        words += f" dataset.root={root}"
    run = tmp_path / "run"
    settings = [*shlex.split(words), *SMALL, *sizes]
    settings += [f"run_dir={run}", f"dataset.cache={tmp_path / 'cache'}"]
    assert main(["run", *settings]) == 0, capsys.readouterr().err
    for path in (run / "events.jsonl", *run.glob("baselines/*/events.jsonl")):
        (*_, last) = read_events(path)
        assert (last["event"], last["status"]) == ("run_finished", "completed"), path
