import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fednas_flwr.data.datasets import load_or_build
from fednas_flwr.data.records import select_records


def never():
    raise AssertionError("built although it was cached")


def assert_equal(one, other):
    assert torch.equal(one.features, other.features)
    assert torch.equal(one.labels, other.labels)
    assert one.ids.tolist() == other.ids.tolist()
    assert one.class_names == other.class_names
    assert one.id_column == other.id_column
    assert {k: v.tolist() for k, v in one.columns.items()} == {
        k: v.tolist() for k, v in other.columns.items()
    }


def test_round_trip_is_memory_mapped(tmp_path: Path, images):
    persons = replace(select_records(images, np.arange(9)), id_column="patient")
    parts = {"train": images, "server_test": persons}
    for build in (lambda: parts, never):
        loaded = load_or_build(tmp_path / "set", build)
        assert loaded.keys() == parts.keys()
        for name, records in parts.items():
            assert_equal(loaded[name], records)
    assert isinstance(loaded["train"].ids, np.memmap)
    assert _is_mapped(tmp_path / "set" / "train-features.npy")
    assert os.listdir(tmp_path) == ["set"]


def test_writing_to_a_loaded_tensor_does_not_change_the_file(tmp_path: Path, images):
    load_or_build(tmp_path / "set", lambda: {"train": images})["train"].features.zero_()
    assert_equal(load_or_build(tmp_path / "set", never)["train"], images)


@pytest.mark.parametrize("file", ["train-features.npy", "train-ids.npy", "index.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, images, file, damage):
    load_or_build(tmp_path / "set", lambda: {"train": images})
    path = tmp_path / "set" / file
    if damage == "gone":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    assert_equal(load_or_build(tmp_path / "set", lambda: {"train": images})["train"], images)
    assert os.listdir(tmp_path) == ["set"]


DAMAGES = {
    "zeros in the features": lambda folder: overwrite(folder / "train-features.npy", -64, 64),
    "zeros in the labels": lambda folder: overwrite(folder / "train-labels.npy", -64, 64),
    "a broken header": lambda folder: overwrite(folder / "train-ids.npy", 0, 8),
    "an index of another form": lambda folder: (folder / "index.json").write_text("[1]"),
    "an index without files": lambda folder: (folder / "index.json").write_text("{}"),
    "an index of bytes": lambda folder: (folder / "index.json").write_bytes(b"\xff"),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "a folder in a file's place": lambda folder: (
        (folder / "train-ids.npy").unlink(),
        (folder / "train-ids.npy").mkdir(),
    ),
}


def overwrite(path: Path, position: int, count: int) -> None:
    with path.open("r+b") as file:
        file.seek(position, os.SEEK_END if position < 0 else os.SEEK_SET)
        file.write(bytes(count))
    times = path.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))  # clocks tick in steps


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_cache_with_other_content_is_built_again(tmp_path: Path, images, damage):
    images = replace(images, features=images.features.clone(), labels=images.labels.clone())
    images.features[-1] = 7  # not zeros
    images.labels[-8:] = 1
    load_or_build(tmp_path / "set", lambda: {"train": images})
    DAMAGES[damage](tmp_path / "set")
    assert_equal(load_or_build(tmp_path / "set", lambda: {"train": images})["train"], images)
    assert_equal(load_or_build(tmp_path / "set", never)["train"], images)
    assert os.listdir(tmp_path) == ["set"]


def test_a_copied_cache_is_used(tmp_path: Path, images):
    load_or_build(tmp_path / "set", lambda: {"train": images})
    shutil.copytree(tmp_path / "set", tmp_path / "copy", copy_function=shutil.copyfile)
    assert_equal(load_or_build(tmp_path / "copy", never)["train"], images)


def test_a_process_killed_while_writing_leaves_nothing_that_is_read(tmp_path: Path, images):
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
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert child.stdout == "written: 3\n"
    assert not (tmp_path / "set").exists()
    assert_equal(load_or_build(tmp_path / "set", lambda: {"train": images})["train"], images)


def test_two_may_build_at_once(tmp_path: Path, images):
    both_building = threading.Barrier(2, timeout=20)
    loaded = []

    def build():
        both_building.wait()
        return {"train": images}

    threads = [
        threading.Thread(target=lambda: loaded.append(load_or_build(tmp_path / "set", build)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 2
    for parts in loaded:
        assert_equal(parts["train"], images)
    assert os.listdir(tmp_path) == ["set"]


def test_an_unwritable_place_is_an_os_error(tmp_path: Path, images):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        load_or_build(tmp_path / "file" / "set", lambda: {"train": images})


def _is_mapped(path: Path) -> bool:
    maps = Path("/proc/self/maps")
    return not maps.exists() or str(path) in maps.read_text()
