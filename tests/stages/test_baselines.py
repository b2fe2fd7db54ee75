"""``baselines=2``: networks that were not searched, trained beside the found one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fednas_flwr.api import run
from fednas_flwr.builders.networks import load_description
from fednas_flwr.config import Config
from fednas_flwr.evaluation.fixed_networks import FIXED_NETWORKS
from fednas_flwr.hardware.flops import count_multiply_adds
from fednas_flwr.reporting.compare import run_folders
from fednas_flwr.reporting.runs import read_run
from fednas_flwr.search.settings import RESNETS
from fednas_flwr.stages import baselines
from fednas_flwr.stages.run_folder import open_run_folder

SETTINGS = ("dataset", "partition", "retrain", "privacy", "clients", "threads", "wire", "momentum")

RANGES = {
    **dict.fromkeys(("lr", "momentum", "alpha_lr", "dropout"), (0.02, 0.03)),
    **dict.fromkeys(("weight_decay", "alpha_weight_decay"), (1e-4, 2e-4)),
}


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take fewer networks for the data-free choice, for time alone."""
    monkeypatch.setattr(baselines, "DRAWS", 4)


def told(folder: Path) -> dict[str, dict[str, Any]]:
    return {own.folder.name: own.config for own in read_run(folder).baselines()}


@pytest.mark.usefixtures("few_draws")
def test_baselines_are_trained_as_the_found_network(
    compose_config: Callable[..., Config], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    result = run(compose_config("baselines=2", f"run_dir={folder}"))
    configs = told(folder)
    names = ["data_free", "random_1", "random_2"]
    assert [name for name in configs if not name.startswith("resnet8_")] == names
    assert len(configs) == 4
    own = read_run(folder)
    for config in configs.values():
        assert config["baselines"] == 0
        assert all(config[setting] == own.config[setting] for setting in SETTINGS)
    genotypes = [load_description(b.folder).get("genotype") for b in own.baselines()]
    assert genotypes[1] != genotypes[2]
    assert genotypes[3] is None
    found = load_description(folder)["genotype"]
    assert len({len(genotype["cells"]) for genotype in [found, *genotypes[:3]]}) == 1
    assert all(0 <= b.accuracy() <= 1 for b in own.baselines())
    shape = tuple(load_description(folder)["input_shape"])
    costs = {}
    for name in RESNETS:
        network = FIXED_NETWORKS[name](shape, 3, norm="batch")
        costs[name] = count_multiply_adds(network, shape) / own.numbers()["multiply_adds"]
    nearest = min(costs, key=lambda name: max(costs[name], 1 / costs[name]))
    assert own.baselines()[3].folder.name == nearest != RESNETS[0]
    page = (folder / "report.html").read_text()
    assert "What the search was worth" in page
    assert "random_2" in page
    assert run_folders([tmp_path]) == [folder]

    # A run that is resumed trains what is missing, to the same, and nothing else.
    times = {b.folder.name: b.events[-1]["time"] for b in own.baselines()}
    missing = own.baselines()[2]
    accuracy = missing.accuracy()
    (missing.folder / "events.jsonl").unlink()
    run(result.folder)
    again = {b.folder.name: b for b in read_run(folder).baselines()}
    assert {n for n, b in again.items() if b.events[-1]["time"] == times[n]} == {*configs} - {
        "random_2"
    }
    assert again["random_2"].accuracy() == accuracy


@pytest.mark.usefixtures("few_draws")
def test_private_baselines_have_a_ledger_of_their_own(
    compose_config: Callable[..., Config], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    overrides = ["algorithm=dp_fnas", "privacy=dp", "privacy.epsilon=50", "clients=2"]
    overrides += ["search_space.norm=group", "retrain.norm=group", "baselines=1"]
    run(compose_config(*overrides, f"run_dir={folder}"))
    own = read_run(folder)
    assert {b.status for b in [own, *own.baselines()]} == {"completed"}
    assert "linear" in {b.folder.name for b in own.baselines()}
    for single in [own, *own.baselines()]:
        epsilon = single.numbers()["epsilon"]
        assert epsilon is not None
        assert 0 < epsilon <= 50
    assert "a ledger of its own" in (folder / "report.html").read_text()
    assert {b.numbers()["linear_accuracy"] for b in [own, *own.baselines()]} == {None}


@pytest.mark.parametrize(
    ("search", "retrain", "number"), [(200.0, 10.0, 2), (40.0, 1.0, 0), (200.0, 30.0, 0)]
)
def test_baselines_are_made_by_default_where_they_add_little(
    tmp_path: Path, search: float, retrain: float, number: int
) -> None:
    """The run takes over a minute, and five times its retraining is less than half of it."""
    stages = {"search": search, "retrain": retrain}
    lines = [{"event": "run_started"}]
    for name, seconds in stages.items():
        lines += [
            {"event": "stage_started", "stage": name, "elapsed": 0.0},
            {"event": "stage_finished", "stage": name, "seconds": seconds, "elapsed": seconds},
        ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert baselines.affordable(tmp_path) == number
    (tmp_path / "baselines").mkdir()
    assert baselines.affordable(tmp_path) == 2  # it goes on with what it has begun


def test_found_hyper_parameters_are_taken_over(
    compose_config: Callable[..., Config], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    ranges = ",".join(
        f"{name}: {{low: {low}, high: {high}, log: false}}" for name, (low, high) in RANGES.items()
    )
    config = compose_config(
        *("algorithm=random_search", "rounds=1"),
        f"algorithm.ranges={{{ranges}}}",
        f"run_dir={folder}",
    )
    run(config)
    found = read_run(folder).last("derived")["configuration"]
    assert 0.02 <= found["lr"] <= 0.03
    again = replace(open_run_folder(str(folder)), baselines=1)
    (own, *_) = [config for _, config in baselines._baselines(again)]
    assert own.retrain.weights.lr == found["lr"]
