import numpy as np
import pytest

from ..data_sets import save_pixels


@pytest.fixture
def patients(tmp_path):
    """120 rows: 6 ages and 10 wards missing, one row twice, one outcome of ten rare."""
    rows = []
    for i in range(119):
        age = "" if i < 6 else f"{20 + i / 2:.1f}".replace(".", ",")
        ward = "" if 20 <= i < 30 else "ns"[i % 2]
        rows.append(f"{age};{ward};{1 + i % 28}.01.2024;{'died' if i % 10 == 0 else 'left'}")
    path = tmp_path / "patients.csv"
    path.write_text("\n".join(["age;ward;seen;outcome", *rows, rows[-1]]) + "\n")
    return path


def test_a_table_is_told_by_columns_clients_and_what_is_odd(patients, tmp_path, prints):
    own = ["clients=2", "dataset.server_test=false", f"dataset.cache={tmp_path / 'cache'}"]
    lines = prints("data", patients, *own).splitlines()
    assert lines[0] == "120 records for clients; shape of one: 4"
    assert lines[1] == "patients.csv: separator semicolon, decimal comma"
    for line in (
        "numbers: age (6 missing)",
        "dates: seen",
        "categories: ward (2 values, 10 missing)",
        "label outcome: died 12, left 108",
        "16 cells are missing: a number or date counts as the mean, a category as no category",
        "column age: number, 23 to 79, mean 51.2456, 6 missing",
        "column seen: date, 2024-01-01 to 2024-01-28",
        "column ward: one of n, s, 10 missing",
        "note: 1 record equals another; equal ones stay in one part",
        "suggestion: evaluation.positive=died, the rarer class, for AUROC and the like",
        "suggestion: with privacy=dp 'dataset.ranges={age:[23,79],seen:[2024-01-01,2024-01-28]}', "
        "with the ends that are usual in place of these, which are of the records, and "
        "experiment=fedavg/private_table",
        "suggestion: partition=column partition.column=<column>, if one of ward says whose a "
        "record is",
    ):
        assert line in lines
    clients = [line for line in lines if line.startswith("client ")]
    assert len(clients) == 2
    told = [int(word) for line in clients for word in line.split("; ")[0].split() if word.isdigit()]
    assert sum(told) == 120


def test_small_and_lopsided_clients_are_named(patients, tmp_path, prints):
    own = ["partition=column", "partition.column=outcome", "clients=2"]
    cache = f"dataset.cache={tmp_path / 'cache'}"
    settings = ["dataset.label=ward", "dataset.server_test=false", cache]
    patients.write_text(patients.read_text().replace(";;", ";e;"))
    printed = prints("data", patients, *own, *settings)
    assert "died is small: " in printed or "died has no record for " in printed
    assert "label ward: e 10, n 56, s 54" in printed
    patients.write_text(patients.read_text().replace("left", "Died", 40))
    said = "note: the column of clients holds Died and died: join them in the data if they are one"
    assert said in prints("data", patients, *own[:2], "clients=3", *settings)
    number = ["dataset.label=age", "dataset.task=regression"]
    said = "}' dataset.target_range=[23,79], with the ends that are usual"
    assert said in prints("data", patients, *number, *settings[1:])


def test_images_are_told_with_what_is_done_to_them(tmp_path, prints):
    rng = np.random.default_rng(0)
    for i in range(40):
        pixels = rng.integers(0, 256, (8 + i % 3, 8), np.uint8)
        save_pixels(pixels, tmp_path / "images" / "ab"[i % 2] / f"{i}.png")
    (tmp_path / "images" / "a" / "no.png").write_bytes(b"no image")
    cache = [f"dataset.cache={tmp_path / 'cache'}", "dataset.channels=1", "dataset.image_size=8"]
    told = prints("data", tmp_path / "images", *cache, code=2)
    assert "1 of 41 files cannot be read as an image" in told
    printed = prints("data", tmp_path / "images", *cache, "dataset.corrupt=skip")
    assert "1 broken images left out" in printed
    assert "resized to 8x8 (bilinear) from 8x9: 13, 8x10: 13" in printed
    assert "does not exist" in prints("data", tmp_path / "nothing", code=2)
