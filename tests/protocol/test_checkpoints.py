import hashlib
import json
from pathlib import Path

import pytest
import torch

from fednas_flwr.base.files import write_atomically
from fednas_flwr.runs.checkpoints import Checkpoint, CheckpointFolder

from ..refusals import refuses


def checkpoint(number, stage="search"):
    tensors = {
        "weights.float32": torch.full((100,), float(number)),
        "buffers.int64": torch.tensor([2**40 + number]),
        "server.alphas.step": torch.tensor(float(number)),  # no dimensions
    }
    return Checkpoint(stage, number, tensors, {"accuracy": 0.1 * number, "genotype": "{}"})


def save(folder, *numbers):
    for number in numbers:
        folder.save(checkpoint(number))


@pytest.fixture
def warnings():
    return []


@pytest.fixture
def folder(tmp_path, warnings):
    return CheckpointFolder(tmp_path / "checkpoints", warn=warnings.append)


def assert_is(loaded, number, stage="search"):
    expected = checkpoint(number, stage)
    assert (loaded.stage, loaded.round, loaded.values) == (stage, number, expected.values)
    assert set(loaded.tensors) == set(expected.tensors)
    for name, tensor in expected.tensors.items():
        assert loaded.tensors[name].dtype == tensor.dtype
        assert torch.equal(loaded.tensors[name], tensor)


def test_the_newest_is_loaded_bit_by_bit(folder, warnings):
    assert folder.latest("search") is None
    save(folder, 9, 10, 11)
    assert_is(folder.latest("search"), 11)
    assert_is(CheckpointFolder(folder.path, warn=warnings.append).latest("search"), 11)
    assert warnings == []


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_half_a_checkpoint_is_deleted_with_the_old_ones(folder, suffix):
    save(folder, 1, 2, 3)
    (folder.path / f"search-000001.{suffix}").unlink()
    save(folder, 4, 5)
    known = {f"search-00000{n}" for n in range(1, 6)}
    assert {path.stem for path in folder.path.iterdir()} <= known
    assert_is(folder.latest("search"), 5)


def test_the_last_three_of_each_stage_are_kept(folder):
    save(folder, *range(1, 6))
    folder.save(checkpoint(1, "retrain"))
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(
        f"{stem}.{suffix}"
        for stem in ("search-000003", "search-000004", "search-000005", "retrain-000001")
        for suffix in ("json", "safetensors")
    )
    assert_is(folder.latest("retrain"), 1, "retrain")
    assert folder.latest("evaluate") is None


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def empty(path):
    path.write_bytes(b"")


def flip(path):
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
@pytest.mark.parametrize("damage", [truncate, empty, flip, Path.unlink])
def test_the_one_before_a_damaged_one_is_used(suffix, damage, folder, warnings):
    save(folder, 1, 2, 3)
    damage(folder.path / f"search-000003.{suffix}")
    assert_is(folder.latest("search"), 2)
    unfinished = damage is Path.unlink and suffix == "json"  # written last: never was one
    assert len(warnings) == (0 if unfinished else 1)
    assert all("search-000003 is damaged" in warning for warning in warnings)
    folder.save(checkpoint(3))  # the round is done again
    assert_is(folder.latest("search"), 3)


def test_of_two_damaged_ones_both_are_named(folder, warnings):
    save(folder, 1, 2, 3)
    truncate(folder.path / "search-000003.json")
    flip(folder.path / "search-000002.safetensors")
    assert_is(folder.latest("search"), 1)
    assert len(warnings) == 2


def test_swapped_files_of_two_rounds_are_damaged(folder, warnings):
    save(folder, 1, 2, 3)
    other = (folder.path / "search-000001.safetensors").read_bytes()
    (folder.path / "search-000003.safetensors").write_bytes(other)
    assert_is(folder.latest("search"), 2)
    assert "does not have the hash" in warnings[0]


def test_the_header_holds_the_hash_of_the_tensors_and_its_own(folder):
    folder.save(checkpoint(1))
    body, digest = (folder.path / "search-000001.json").read_text().splitlines()
    assert hashlib.sha256(body.encode()).hexdigest() == digest
    data = (folder.path / "search-000001.safetensors").read_bytes()
    assert json.loads(body)["tensors_sha256"] == hashlib.sha256(data).hexdigest()
    assert b"pickle" not in data


def test_a_kill_between_the_two_files_costs_one_round(folder, monkeypatch, warnings):
    folder.save(checkpoint(1))
    written = []

    def killed(path, data):
        if path.suffix == ".json":
            raise KeyboardInterrupt
        written.append(path.suffix)
        write_atomically(path, data)

    with monkeypatch.context() as patch:
        patch.setattr("fednas_flwr.runs.checkpoints.write_atomically", killed)
        refuses("", folder.save, checkpoint(2), error=KeyboardInterrupt)
    assert written == [".safetensors"]
    assert_is(folder.latest("search"), 1)
    assert warnings == []


def test_views_and_transposed_tensors_are_written_as_they_read(folder):
    base = torch.arange(12.0).view(3, 4)
    folder.save(Checkpoint("search", 1, {"view": base[1:], "t": base.t()}, {}))
    loaded = folder.latest("search").tensors
    assert torch.equal(loaded["view"], base[1:])
    assert torch.equal(loaded["t"], base.t())


def test_no_tensors_are_a_state_too(folder):
    folder.save(Checkpoint("search", 1, {}, {"genotype": "x"}))
    assert folder.latest("search").values == {"genotype": "x"}
