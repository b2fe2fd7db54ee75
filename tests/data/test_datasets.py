import io
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fednas_flwr.data.datasets import find_source, load_or_build, load_sites
from fednas_flwr.data.prepared import partition
from fednas_flwr.data.readers import data_settings
from fednas_flwr.data.records import select_records
from fednas_flwr.settings.data_settings import Partition

from ..data_sets import prepared, read
from ..refusals import raising, refuses


@pytest.fixture
def npz(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (200, 6, 6, 3), np.uint8)
    y = np.arange(200) % 4
    np.savez(tmp_path / "data.npz", x_train=x, y_train=y, x_test=x[:50], y_test=y[:50])
    return tmp_path / "data.npz"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_digits_are_prepared_once(cache):
    first = prepared("digits", cache=cache)
    assert (first.input_shape, first.num_classes) == ((1, 8, 8), 10)
    assert (first.mean, first.std) == ((0.5,), (0.5,))
    total = len(first.train) + len(first.server_test)
    assert total == 1797
    assert len(first.server_test) / total == pytest.approx(0.2, abs=0.02)
    assert not set(first.train.ids.tolist()) & set(first.server_test.ids.tolist())
    folder = next(cache.iterdir())
    written = folder.stat().st_mtime_ns
    again = prepared("digits", cache=cache, mean=(0.3,), std=(0.4,))
    assert [path for path in cache.iterdir()] == [folder]
    assert folder.stat().st_mtime_ns == written
    assert torch.equal(again.train.features, first.train.features)
    assert again.mean == (0.3,)
    everything = prepared("digits", cache=cache, server_test=False)
    assert (len(everything.train), everything.server_test) == (1797, None)


def test_an_official_test_part_is_used_or_left(cache, npz):
    data = prepared("npz", cache=cache, root=npz)
    assert (len(data.train), len(data.server_test)) == (200, 50)
    data = prepared("npz", cache=cache, root=npz, server_test=False)
    assert (len(data.train), data.server_test) == (200, None)


def test_limits_take_the_same_records_always(cache, npz):
    def ids(limit):
        data = prepared("npz", cache=cache, root=npz, limit_train=limit, limit_test=7)
        assert len(data.server_test) == 7
        return data.train.ids.tolist()

    assert len(ids(30)) == 30
    assert set(ids(30)) < set(ids(31))
    assert len(ids(10_000)) == 200
    whole = prepared("npz", cache=cache, root=npz).train.ids.tolist()
    assert [i for i in whole if i in set(ids(30))] == ids(30)


def test_a_file_changed_at_equal_size_is_read_again(cache, npz):
    """Its name and size are as before; the time of its change is later by any amount."""
    before = npz.stat()
    first = prepared("npz", cache=cache, root=npz).train.features.clone()
    with np.load(npz) as arrays:
        np.savez(npz, **dict(arrays) | {"x_train": 255 - arrays["x_train"]})
    os.utime(npz, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert npz.stat().st_size == before.st_size
    assert torch.equal(prepared("npz", cache=cache, root=npz).train.features, 255 - first)


@pytest.mark.parametrize(("train", "test"), [(30, 7), (7, 30), (30, 30), (31, 30), (30, None)])
def test_each_limit_is_of_its_own_records_and_of_its_own_cached_copy(npz, train, test):
    shared = npz.parent.parent / "cache of all limits"
    prepared("npz", cache=shared, root=npz, limit_train=30, limit_test=7)
    data = prepared("npz", cache=shared, root=npz, limit_train=train, limit_test=test)
    assert (len(data.train), len(data.server_test)) == (train, test or 50)


def test_given_statistics_of_a_table(cache, table_csv):
    settings = {"cache": cache, "name": "csv", "root": table_csv, "server_test": False}
    settings["ignore"] = ("patient", "site")
    own = prepared(**settings)
    assert own.uses_own_statistics
    statistics = {"pressure": (2, 0.5), "age": (50.0, 10.0)}
    given = prepared(**settings, statistics=statistics)
    assert not given.uses_own_statistics
    # age, pressure, smokes=no, smokes=yes
    assert (given.mean, given.std) == ((50.0, 2.0, 0.0, 0.0), (10.0, 0.5, 1.0, 1.0))
    assert torch.equal(given.train.features.nan_to_num(), own.train.features.nan_to_num())
    words = "every numeric column once .*: age is missing or too"
    refuses(words, prepared, **settings, statistics={"pressure": (2, 0.5)})
    words = r"dataset.statistics.age=\[50.0, 0.0\] .* \[mean, std\]"
    refuses(words, prepared, **settings, statistics=statistics | {"age": (50.0, 0)})


def test_a_range_to_predict_within_is_of_its_own_cached_copy(cache, table_csv):
    settings = {"cache": cache, "name": "csv", "root": table_csv, "label": "age"}
    settings |= {"ignore": ("patient", "site"), "server_test": False}
    assert not prepared(**settings).train.is_regression
    assert prepared(**settings, target_range=(0.0, 120.0)).train.is_regression


def test_sites_become_a_partition(cache, tmp_path):
    root = tmp_path / "sites"
    root.mkdir()
    (root / "oslo.csv").write_text("a,y\n1,0\n2,1\n")
    (root / "bern.csv").write_text("a,y\n3,0\n4,1\n5,1\n")
    data = prepared("csv", cache=cache, root=root, sites=True, server_test=False)
    parts = partition(data.train, Partition("sites"), clients=2)
    assert [data.train.features[part, 0].tolist() for part in parts] == [[3, 4, 5], [1, 2]]


UNFIT_SETTINGS = [
    ({"label": "ill"}, "setting=dataset.label is unknown"),
    ({"mean": (0.5, 0.5)}, "do not fit images of 3 channels"),
    ({"std": (0.5, 0.5)}, "do not fit images of 3 channels"),
    ({"statistics": {"a": (0, 1)}}, "are for tables: these are images"),
]


@pytest.mark.parametrize(("settings", "message"), UNFIT_SETTINGS)
def test_settings_that_do_not_fit(cache, npz, settings, message):
    refuses(message, prepared, **{"cache": cache, "name": "npz", "root": npz} | settings)


def test_too_few_records_for_a_server_test(cache, tmp_path):
    (tmp_path / "t.csv").write_text("a,y\n1,0\n")
    given = {"cache": cache, "root": tmp_path / "t.csv"}
    refuses("too few .* dataset.server_test=false", prepared, "csv", **given)


OTHER_TESTS = {
    "a table": lambda x: x.reshape(len(x), -1).astype(np.float32),
    "smaller images": lambda x: x[:, :5, :5],
    "grey images": lambda x: x[..., 0],
}


@pytest.mark.parametrize("kind", OTHER_TESTS)
def test_a_test_part_of_another_kind_is_refused(cache, tmp_path, kind):
    x = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3), np.uint8)
    y = np.arange(40) % 4
    path = tmp_path / "data.npz"
    np.savez(path, x_train=x, y_train=y, x_test=OTHER_TESTS[kind](x), y_test=y)
    words = "dataset=npz and its test records do not .*one form"
    refuses(words, prepared, "npz", cache=cache, root=path)
    assert not cache.exists()


def _png():
    content = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(content, "PNG")
    return content.getvalue()


BROKEN = {  # name of the data set, path below its root, content
    "empty npz": ("npz", "data.npz", b""),
    "cut npz": ("npz", "data.npz", b"PK\x03\x04 and no more"),
    "csv of bytes": ("csv", "data.csv", b"a,b\n\xff\xfe\x00,1\n"),
    "csv with an open quote": ("csv", "data.csv", b'a,b\n"x,1\n2,3\n'),
    "no gzip": ("csv", "data.csv.gz", b"\x1f\x8b\x08nonsense"),
    "cut png": ("image_folder", "one/a.png", _png()[:-40]),
    "png with a broken chunk": ("image_folder", "one/a.png", _png().replace(b"IDAT", b"\0\0\0\0")),
    "cifar of bytes": ("cifar10", "cifar-10-batches-py/data_batch_1", b"no pickle"),
    "mnist of bytes": ("mnist", "MNIST/raw/train-images-idx3-ubyte", b"\0"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_one_sentence(cache, tmp_path, kind):
    name, file, content = BROKEN[kind]
    path = tmp_path / "root" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    root = path if name in ("npz", "csv") else tmp_path / "root"
    sentence = refuses("", prepared, name, cache=cache, root=root)
    assert str(tmp_path / "root") in sentence
    assert "\n" not in sentence
    assert not cache.exists()


def test_a_root_that_cannot_be_looked_at_is_one_sentence(cache):
    root = Path("/" + 300 * "a")
    refuses("^dataset.root=/a+ cannot be read: ", prepared, "npz", cache=cache, root=root)


FINITE = r"expected finite \[low, high\], low below high"


NO_RANGES = [
    ({"age": [80, 20]}, rf"dataset.ranges.age=\[80.0, 20.0\] .* {FINITE}"),
    ({"age": [1]}, FINITE),
    ({"age": [-1e308, 1e308]}, FINITE),
    ({"age": [1, float("nan")]}, r"dataset.ranges.age\[1\]=nan has the wrong type"),
    ({"weight": [40, 120]}, "dataset.ranges.weight has no effect beside dataset.statistics.w"),
]


@pytest.mark.parametrize(("ranges", "message"), NO_RANGES)
def test_ranges_that_are_none_are_refused(ranges, message):
    given = {"cache": "none", "statistics": {"weight": [70, 10]}, "ranges": ranges}
    refuses(message, lambda: data_settings("csv", given).column_statistics)


def test_a_table_is_standardised_by_its_declared_ranges(table_csv, tmp_path):
    chosen = {"name": "csv", "root": table_csv, "id_column": "patient", "server_test": False}
    pressure = {"statistics": {"pressure": [2, 1]}}
    found = prepared(cache=tmp_path, **chosen, **pressure, ranges={"age": [30, 90]})
    assert not found.uses_own_statistics
    assert found.mean == (60, 2, 0, 0, 0, 0)
    assert found.std == pytest.approx((60 / 12**0.5, 1, 1, 1, 1, 1))
    words = "or dataset.ranges must name every numeric column once"
    refuses(words, prepared, cache=tmp_path, **chosen, ranges={"age": [30, 90]})


never = raising(AssertionError("built although it was cached"))


def content(records):
    """Return what records hold, to be compared."""
    columns = {name: cells.tolist() for name, cells in records.columns.items()}
    named = (records.class_names, records.id_column, columns)
    return (records.features.tolist(), records.labels.tolist(), records.ids.tolist(), *named)


def assert_equal(one, other):
    assert (one.features.dtype, one.labels.dtype) == (other.features.dtype, other.labels.dtype)
    assert content(one) == content(other)


def of_cache(folder, records):
    """Return the cached records, built of the given ones if there are none."""
    return load_or_build(folder, lambda: {"train": records})["train"]


def test_round_trip_is_memory_mapped(tmp_path, images):
    persons = replace(select_records(images, np.arange(9)), id_column="patient")
    parts = {"train": images, "server_test": persons}
    for build in (lambda: parts, never):
        loaded = load_or_build(tmp_path / "set", build)
        assert loaded.keys() == parts.keys()
        for name, records in parts.items():
            assert_equal(loaded[name], records)
    assert isinstance(loaded["train"].ids, np.memmap)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path / "set" / "train-features.npy") in maps.read_text()
    assert os.listdir(tmp_path) == ["set"]


def test_writing_to_a_loaded_tensor_does_not_change_the_file(tmp_path, images):
    of_cache(tmp_path / "set", images).features.zero_()
    assert_equal(load_or_build(tmp_path / "set", never)["train"], images)


DAMAGES = {
    "no file": lambda folder: (folder / "train-ids.npy").unlink(),
    "no index": lambda folder: (folder / "index.json").unlink(),
    "less of a file": lambda folder: os.truncate(folder / "train-features.npy", 999),
    "less of the index": lambda folder: os.truncate(folder / "index.json", 99),
    "zeros in the features": lambda folder: overwrite(folder / "train-features.npy", -64, 64),
    "zeros in the labels": lambda folder: overwrite(folder / "train-labels.npy", -64, 64),
    "a broken header": lambda folder: overwrite(folder / "train-ids.npy", 0, 8),
    "an index of another form": lambda folder: (folder / "index.json").write_text("[1]"),
    "an index without files": lambda folder: (folder / "index.json").write_text("{}"),
    "an index of bytes": lambda folder: (folder / "index.json").write_bytes(b"\xff"),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "a folder in a file's place": lambda folder: make_folder(folder / "train-ids.npy"),
}


def make_folder(path):
    path.unlink()
    path.mkdir()


def overwrite(path, position, count):
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        file.write(bytes(count))
    times = path.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))  # clocks tick in steps


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_cache_with_other_content_is_built_again(tmp_path, images, damage):
    images = replace(images, features=images.features.clone(), labels=images.labels.clone())
    images.features[-1] = 7  # not zeros
    images.labels[-8:] = 1
    load_or_build(tmp_path / "set", lambda: {"train": images})
    DAMAGES[damage](tmp_path / "set")
    assert_equal(of_cache(tmp_path / "set", images), images)
    assert_equal(load_or_build(tmp_path / "set", never)["train"], images)
    assert os.listdir(tmp_path) == ["set"]


def test_a_copied_cache_is_used(tmp_path, images):
    load_or_build(tmp_path / "set", lambda: {"train": images})
    shutil.copytree(tmp_path / "set", tmp_path / "copy", copy_function=shutil.copyfile)
    assert_equal(load_or_build(tmp_path / "copy", never)["train"], images)


def test_a_process_killed_while_writing_leaves_nothing_that_is_read(tmp_path, images):
    program = f"""
        import os, signal
        from pathlib import Path
        import torch
        from fednas_flwr.data.datasets import load_or_build
        from fednas_flwr.data.records import Records, record_ids

        class Killer(dict):
            def __iter__(self):
                print("written:", len(list(Path({str(tmp_path)!r}).glob("*/*"))), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        ids = record_ids([b"a", b"b"])
        records = Records(torch.zeros(2, 1), torch.zeros(2).long(), ids, ("a",))
        object.__setattr__(records, "columns", Killer())
        load_or_build(Path({str(tmp_path)!r}) / "set", lambda: {{"train": records}})
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    child = subprocess.run(command, capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, "written: 3\n"), child.stderr
    assert not (tmp_path / "set").exists()
    assert_equal(of_cache(tmp_path / "set", images), images)


def test_two_may_build_at_once(tmp_path, images):
    both_building = threading.Barrier(2, timeout=20)

    def build():
        both_building.wait()
        return {"train": images}

    with ThreadPoolExecutor(2) as pool:
        loaded = [*pool.map(lambda _: load_or_build(tmp_path / "set", build), range(2))]
    for parts in loaded:
        assert_equal(parts["train"], images)
    assert os.listdir(tmp_path) == ["set"]


def test_an_unwritable_place_is_an_os_error(tmp_path, images):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "set"
    refuses("file", load_or_build, path, lambda: {"train": images}, error=OSError)


def sites_of(root, name):
    return load_sites(root, name=name, read=partial(read, name))


def test_a_folder_of_images_per_site(tmp_path):
    for i, site in enumerate(("b", "a")):
        for kind in ("cat", "dog"):
            (tmp_path / site / kind).mkdir(parents=True)
            Image.new("L", (4, 4), i).save(tmp_path / site / kind / "1.png")

    (tmp_path / "dataset.yaml").write_text("a: {}\n")
    records, _ = sites_of(tmp_path, "image_folder")
    assert records.notes == (f"dataset.yaml in {tmp_path} left out: expected nothing but sites",)
    assert records.columns["site"].tolist() == ["a", "a", "b", "b"]
    assert records.labels.tolist() == [0, 1, 0, 1]
    assert records.features[:, 0, 0, 0].tolist() == [1, 1, 0, 0]
    (tmp_path / "c" / "train" / "cat").mkdir(parents=True)
    (tmp_path / "c" / "test" / "cat").mkdir(parents=True)
    for part in ("train", "test"):
        Image.new("L", (4, 4)).save(tmp_path / "c" / part / "cat" / "1.png")
    refuses("the site .*c has a test part of its own", sites_of, tmp_path, "image_folder")


def test_sites_that_do_not_exist_or_fit(tmp_path):
    refuses("holds nothing of this kind", sites_of, tmp_path, "csv")
    refuses("partition=sites does not fit dataset.name=digits", sites_of, tmp_path, "digits")
    (tmp_path / "oslo.csv").write_text("a,y\n1,0\n2,1\n")
    (tmp_path / "bern.csv").write_text("a,y\n1,0\n2,0\n")
    refuses("dataset.class_names", sites_of, tmp_path, "csv")
    (tmp_path / "bern.csv").write_text("a,b,y\n1,0,1\n2,0,0\n")
    refuses("same feature columns .*differ in b", sites_of, tmp_path, "csv")
    (tmp_path / "bern.csv").rename(tmp_path / "oslo.csv.gz")
    refuses("oslo.csv, oslo.csv.gz: expected .csv, ", sites_of, tmp_path, "csv")


def find(name, root, *, sites=False):
    place = None if root is None else str(root)
    return find_source(data_settings(name, {"cache": "none", "root": place}), sites=sites)


def test_a_missing_root_is_one_sentence(tmp_path):
    refuses(r"dataset=npz needs .* dataset.root=", find, "npz", None)
    refuses("is not a file", find, "npz", tmp_path)
    refuses("is not a file or folder", find, "csv", tmp_path / "x")
    assert find("csv", tmp_path) == tmp_path
    refuses("is not a folder", find, "npz", tmp_path / "x", sites=True)
    refuses(r"FashionMNIST/raw.*dataset.root=.*download=true", find, "fashion_mnist", tmp_path)
