"""Runs that tests share: made once for the same settings and data, and each test has its copy."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from fednas_flwr.runs.run_folder import open_run_folder

from .finished_runs import FinishedRuns


@pytest.fixture
def make():
    """Stands in for a run: writes its number, and ends with an error where there is no search."""
    made = []

    def fake(config):
        made.append(config)
        folder = Path(str(config.run_dir))
        (folder / "events.jsonl").write_text("")
        (folder / "number").write_text(str(len(made)))
        error = None if "search" in config.stages else ValueError("no search")
        return SimpleNamespace(folder=folder, config=config, events=[], error=error)

    return fake


@pytest.fixture
def runs(tmp_path):
    return FinishedRuns(tmp_path / "kept", tmp_path / "copies")


def number(run):
    return int((run.folder / "number").read_text())


def test_a_run_is_made_once_and_everybody_has_a_copy(runs, make, compose_config):
    first = runs.get(compose_config(), make)
    (first.folder / "number").write_text("7")
    second = runs.get(compose_config(), make)
    assert (number(second), first.made_in) == (1, second.made_in)
    assert first.folder != second.folder
    assert open_run_folder(str(second.folder)) == second.config
    assert second.config.run_dir == str(second.folder)
    assert number(runs.get(compose_config("seed=5"), make)) == 2


def test_data_count_by_their_content(runs, make, compose_config, made_data, tmp_path):
    copy = shutil.copy(made_data, tmp_path / "copy.npz")
    assert number(runs.get(compose_config(), make)) == 1
    assert number(runs.get(compose_config(f"dataset.root={copy}"), make)) == 1
    arrays = bytearray(made_data.read_bytes())
    arrays[-1] ^= 1
    copy.write_bytes(arrays)
    assert number(runs.get(compose_config(f"dataset.root={copy}"), make)) == 2


def test_a_run_that_failed_is_not_kept(runs, make, compose_config):
    config = compose_config("stages=[retrain,evaluate,export]", "algorithm=fedavg")
    assert [number(runs.get(config, make)) for _ in range(2)] == [1, 2]
    assert str(runs.get(config, make).error) == "no search"
