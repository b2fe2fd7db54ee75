"""From Python: a run with one's own strategy, algorithm, search space and data set."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import ClassVar, get_type_hints

import numpy as np
import pytest
import torch
import yaml
from hydra.core.config_store import ConfigStore

import fednas_flwr
from fednas_flwr import Algorithm, Result, compose, load, run
from fednas_flwr.algorithms.base import RoundStrategy
from fednas_flwr.algorithms.fed_darts import FedDARTSSettings
from fednas_flwr.algorithms.fed_darts.strategy import FedDARTS
from fednas_flwr.api import register_algorithm, register_data_set, register_search_space
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.base.processes import ALONE
from fednas_flwr.cli import main
from fednas_flwr.data.images import records_from_arrays
from fednas_flwr.data.prepared import make_data
from fednas_flwr.deploy.client_app import make_client_app
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.pipeline.beginning import make_cohort
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.server.cohort import QuorumError
from fednas_flwr.settings import AlgorithmSettings, GivenNetwork, SearchSpaceSettings, dump_config
from fednas_flwr.settings.optimizers import SGD
from fednas_flwr.settings.registry import OWN, TABLES
from fednas_flwr.settings.run_settings import AggregateSettings
from fednas_flwr.spaces.nasbench201 import NASBench201Space

from . import processes
from .finished_runs import stop_at
from .refusals import refuses
from .test_cli import without as others

ROOT = Path(__file__).parent.parent
PRIVATE = ("privacy=dp", "search_space.norm=group", "retrain.norm=group")


pytestmark = pytest.mark.usefixtures("only_here")


class LateAlphas(FedDARTS):
    """Federated DARTS whose alphas rest in the first round."""

    rest = 1

    def run_round(self, server_round, num_rounds):
        alphas = self.states["alphas"]
        metrics = super().run_round(server_round, num_rounds)
        if server_round <= self.rest:
            self.states["alphas"] = alphas
            return None  # a round may measure nothing
        return dict(metrics)


class Resting(RoundStrategy):
    """No search at all, and no settings."""

    def run_round(self, server_round, num_rounds):
        return {"rested": float(server_round)}


@dataclasses.dataclass(frozen=True)
class LateSettings(FedDARTSSettings):
    """Those of federated DARTS, and how long alphas rest."""

    rest: int


class LateDARTS(LateAlphas):
    """:class:`LateAlphas` with a setting."""

    @property
    def rest(self):
        return self.settings.rest


LATE = {"defaults": ["fed_darts"], "rest": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small201(NASBench201Space):
    """NAS-Bench-201 at other sizes."""

    name: ClassVar[str] = "small201"
    channels: int = 3


@pytest.fixture
def tiny(tiny_overrides, tmp_path):
    return [*tiny_overrides, "clients=2", f"run_dir={tmp_path / 'run'}"]


def alphas_by_round(folder):
    return [event["alphas"] for event in read_run(folder).of_kind("alphas")]


def stages_of(folder):
    return [event["stage"] for event in read_run(folder).of_kind("stage_finished")]


def algorithm_in(folder):
    """Return the settings of the algorithm in a run's configuration."""
    return yaml.safe_load((folder / "config.yaml").read_text())["algorithm"]


def check_whole(result):
    """Check that a run went through all its stages."""
    assert stages_of(result.folder) == ["search", "derive", "retrain", "export", "evaluate"]
    assert (result.folder / "report.html").is_file()
    assert (result.folder / "model.onnx").is_file()


def equal_networks(left, right):
    one, other = left.state_dict(), right.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.run
def test_the_readmes_example_is_short_and_makes_a_whole_run(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "class " in b)
    assert len(code.splitlines()) <= 15
    (tmp_path / "own.py").write_text(code)
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", ALONE: "1"}
    printed = processes.told("own.py", cwd=tmp_path, env=own)
    (folder,) = (tmp_path / "runs").iterdir()
    check_whole(Result(folder))
    assert folder.name.endswith("_fed_darts.LateAlphas_digits")
    assert printed.startswith("Genotype(space='nasbench201'")
    assert str(folder) in printed
    first, second, third, _ = alphas_by_round(folder)
    assert first == second != third


@pytest.mark.run
def test_a_run_returns_what_the_command_leaves(tiny, tmp_path, capsys):
    result = run(compose(*tiny))
    assert capsys.readouterr().out == ""
    check_whole(result)
    assert (result.folder, result.genotype.space) == (tmp_path / "run", "nasbench201")
    assert not result.model.training
    assert {p.device.type for p in result.model.parameters()} == {"cpu"}
    assert result.model(torch.zeros(2, 3, 8, 8)).shape == (2, 3)
    (evaluated,) = read_run(result.folder).of_kind("evaluated")
    assert result.scores == {key: evaluated[key] for key in result.scores}
    assert set(result.scores) == {"central", "linear", "trees", "clients", "personalised"}
    assert result.scores["central"]["num_examples"] == 30
    assert main(["run", *tiny[:-1], f"run_dir={tmp_path / 'command'}"]) == 0
    assert f"run folder: {tmp_path / 'command'}" in capsys.readouterr().out
    assert equal_networks(result.model, load(tmp_path / "command"))
    refuses("already holds a run", run, compose(*tiny))
    again = run(result.folder, quiet=False)  # nothing is left to do
    assert "run folder: " in capsys.readouterr().out
    assert equal_networks(result.model, again.model)


def test_a_run_without_a_network_says_so(tiny):
    searched = run(compose(*others(tiny, "retrain.rounds"), "stages=[search]"))
    assert searched.scores == {}
    with pytest.raises(ConfigError, match="has not reached its export"):
        _ = searched.model


def test_mistakes_from_python_leave_no_folder(tiny, tmp_path):
    config = compose(*tiny)
    for change, words in (
        ({"aggregate": AggregateSettings("median")}, "aggregate=median with a round of 2 clients"),
        ({"clients": 500}, "clients=500"),
        ({"genotype": "none.json", "stages": ["retrain"]}, "none.json cannot be read"),
    ):
        refuses(words, run, dataclasses.replace(config, **change))
    refuses("strategy=len must be a class that derives from", run, config, strategy=len)
    mbconv = ["search_space=mbconv", "retrain=mbconv"]
    for other in (["algorithm=fedavg"], ["algorithm=cfdnas", *mbconv]):
        given = dataclasses.replace(config, algorithm=compose(*other).algorithm)
        refuses("the place of one search; set algorithm=fed_darts", run, given, strategy=LateAlphas)
    retraining = dataclasses.replace(config, stages=["retrain"], genotype="g.json")
    deployed = compose(*tiny, "runtime=deployment", "runtime.superlink=site")
    for given, strategy, words in (
        (retraining, LateAlphas, "stages=.retrain. with strategy=LateAlphas"),
        (deployed, LateAlphas, "runtime=deployment with strategy=LateAlphas"),
        (tmp_path / "nowhere", None, "give the folder of a run"),
        (tmp_path / "nowhere", LateAlphas, "give the folder of a run"),
    ):
        refuses(words, run, given, strategy=strategy)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.run
def test_a_strategy_is_interrupted_and_continued(tiny, tmp_path):
    whole = run(compose(*tiny, "rounds=3"), strategy=LateAlphas)
    check_whole(whole)
    first, second, third = alphas_by_round(whole.folder)
    assert second != third
    stored = {"name": "fed_darts.LateAlphas", "rule": "first_order"}
    assert stored.items() <= algorithm_in(whole.folder).items()
    plain = run(compose(*tiny, "rounds=3", f"run_dir={tmp_path / 'plain'}"))
    assert alphas_by_round(plain.folder)[0] != first
    folder = tmp_path / "broken"
    broken, stop = compose(*tiny, "rounds=3", f"run_dir={folder}"), [stop_at("round")]
    refuses("", run, broken, strategy=LateAlphas, listeners=stop, error=KeyboardInterrupt)
    with processes.started("run", f"resume={folder}") as done:
        _, errors = done.communicate()
    assert done.returncode == 2
    for words in ("=fed_darts.LateAlphas is unknown", "one of your own must be registered first"):
        assert words in errors
    refuses(r"fed_darts.LateAlphas, which is not own.Resting", run, folder, strategy=Resting)
    continued = run(folder, strategy=LateAlphas)
    assert alphas_by_round(folder)[-2:] == [second, third]
    assert equal_networks(whole.model, continued.model)


def test_a_strategy_without_settings_has_none_in_the_configuration(tiny):
    result = run(compose(*tiny), strategy=Resting)
    check_whole(result)
    assert algorithm_in(result.folder) == {"name": "own.Resting"}
    rounds = read_run(result.folder).of_kind("round")
    assert [e["metrics"]["rested"] for e in rounds if e["stage"] == "search"] == [1.0, 2.0]
    with pytest.raises(ConfigError, match=r"algorithm=own.Resting is not possible yet"):
        run(compose(*tiny, *PRIVATE), strategy=Resting)


@pytest.mark.run
def test_a_strategy_that_releases_what_its_algorithm_does_can_be_private(tiny, tmp_path):
    terms = ["privacy.test_seed=1", "privacy.epsilon=100", "trackers=[]"]
    result = run(compose(*tiny, *PRIVATE, *terms), strategy=LateAlphas)
    check_whole(result)
    first, second = alphas_by_round(result.folder)
    assert first != second


@pytest.mark.run
def test_an_algorithm_of_ones_own_has_settings_and_defaults(tiny):
    refuses("algorithm=late_darts is unknown", compose, "algorithm=late_darts")
    register_algorithm("late_darts", Algorithm(LateSettings, LateDARTS), defaults=LATE)
    config = compose("algorithm=late_darts")
    fed_darts = dataclasses.asdict(compose("algorithm=fed_darts").algorithm)
    assert dataclasses.asdict(config.algorithm) == fed_darts | {"name": "late_darts", "rest": 2}
    for override, words in {
        "algorithm=late_dart": r"choose one of .*late_darts.*nearest: late_darts",
        "algorithm.rset=1": r"algorithm.rset is unknown.*algorithm.rest",
        "algorithm.rest=soon": "algorithm.rest=soon has the wrong type: expected a whole number",
    }.items():
        refuses(words, compose, "algorithm=late_darts", override)
    result = run(compose(*tiny, "algorithm=late_darts", "rounds=3"))
    check_whole(result)
    first, second, third = alphas_by_round(result.folder)
    assert first == second != third


def test_names_that_exist_or_cannot_be_written_are_refused():
    entry = Algorithm(LateSettings, LateDARTS)
    for name in ("fed_darts", "feathers"):
        refuses(f"algorithm={name} exists", register_algorithm, name, entry, defaults=LATE)
        assert compose(f"algorithm={name}")
    assert not any(OWN.values())
    register_algorithm("late", entry, defaults=LATE)
    either = "needs either search=<strategy> or settings"
    for register, name, given, words in (
        (register_algorithm, "late", entry, "algorithm=late exists"),
        (register_search_space, "mlp", Small201, "search_space=mlp exists"),
        (register_data_set, "digits", {}, "dataset=digits exists"),
        (register_algorithm, "my darts", entry, "expected letters, digits and underscores"),
        (register_algorithm, "wrong", Algorithm(AlgorithmSettings), either),
        (register_algorithm, "wrong", Algorithm(GivenNetwork, LateDARTS), either),
    ):
        refuses(words, register, name, given, defaults={})


def test_a_baseline_of_ones_own_is_no_search(tiny):
    register_algorithm("line", Algorithm(GivenNetwork), defaults={"network": "linear"})
    kept = others(tiny, "search_space.", "rounds=", "retrain.channels")
    result = run(compose(*kept, "algorithm=line"))
    assert result.genotype is None
    assert result.model(torch.zeros(1, 3, 8, 8)).shape == (1, 3)
    assert stages_of(result.folder) == ["derive", "retrain", "export", "evaluate"]


def test_a_space_of_another_name_than_its_registration_is_refused(tiny, tmp_path):
    sizes = {"channels": 3, "num_cells": 1, "norm": "batch"}
    register_search_space("misnamed", Small201, defaults=sizes)
    with pytest.raises(ConfigError, match="search_space=misnamed makes a space .* small201"):
        run(compose(*others(tiny, "search_space."), "search_space=misnamed"))
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True)
class WidthSettings(SearchSpaceSettings):
    """One number, from which all sizes follow."""

    width: int


def make_wide(*, width, **settings):
    kind = {"bases": (Small201,), "namespace": {"name": "wide"}, "frozen": True, "kw_only": True}
    made = dataclasses.make_dataclass("Wide", [], **kind)
    return made(channels=2 * width, num_cells=1, **settings)


@pytest.mark.run
def test_a_search_space_with_settings_of_its_own_gives_its_networks_size(tiny):
    defaults = {"width": 2, "norm": "batch"}
    register_search_space("wide", make_wide, settings=WidthSettings, defaults=defaults)
    kept = others(tiny, "search_space.", "retrain.channels")
    refuses("its networks have the supernet's size", run, compose(*kept, "search_space=wide"))
    null = ["retrain.channels=null", "retrain.num_cells=null"]
    result = run(compose(*kept, "search_space=wide", *null))
    check_whole(result)
    assert result.genotype.space == "wide"
    assert equal_networks(result.model, load(result.folder))
    assert {len(p) for p in result.model.parameters() if p.dim() == 4} == {4, 8, 16}


def made_arrays(seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, 60)
    images = rng.integers(0, 120, (60, 1, 8, 8))
    images[labels == 1] += 100
    images = images.astype(np.uint8)
    arrays = {"x_train": images[:40], "y_train": labels[:40]}
    return arrays | {"x_test": images[40:], "y_test": labels[40:]}


def test_a_data_set_of_arrays(tiny):
    register_data_set("own_images", made_arrays(0), defaults={"crop_padding": 1})
    kept = others(tiny, "dataset=", "dataset.root")
    config = compose(*kept, "dataset=own_images", "dataset.class_names=[dark,bright]")
    assert (config.dataset.crop_padding, config.dataset.flip) == (1, False)
    prepared, parts = make_data(config)
    assert len(prepared.server_test) == 20
    assert prepared.train.class_names == ("dark", "bright")
    assert sorted(np.concatenate(parts)) == list(range(40))
    with pytest.raises(ConfigError, match="partition=sites does not fit dataset.name=own_images"):
        make_data(compose(*kept, "dataset=own_images", "partition=sites"))


def test_other_records_under_the_same_name_are_not_taken_from_the_cache(tiny):
    kept = others(tiny, "dataset=", "dataset.root")
    trains = []
    for seed in (0, 1, 0):
        TABLES["dataset"].pop("changing", None)
        ConfigStore.instance().repo.get("dataset", {}).pop("changing.yaml", None)
        register_data_set("changing", made_arrays(seed))
        trains.append(make_data(compose(*kept, "dataset=changing"))[0].train.features)
    assert not torch.equal(trains[0], trains[1])
    assert torch.equal(trains[0], trains[2])


def test_a_data_set_with_a_reader(tiny, tmp_path):
    np.save(tmp_path / "images.npy", made_arrays(0)["x_train"])

    def read(root, *, class_names):
        images = np.load(root / "images.npy")
        labels = (images.mean(axis=(1, 2, 3)) > 100).astype(np.int64)
        return records_from_arrays(images, labels, tuple(class_names) or ("0", "1")), None

    register_data_set("read", read, settings=["class_names"])
    kept = others(tiny, "dataset=", "dataset.root")
    kept += ["dataset=read", f"dataset.root={tmp_path}"]
    prepared, _ = make_data(compose(*kept, "dataset.class_names=[a,b]"))
    assert prepared.train.class_names == ("a", "b")
    assert prepared.server_test is not None
    refuses("dataset=read has none of that name", compose, *kept, "dataset.label=y")
    with pytest.raises(ConfigError, match=r"setting=lable is unknown: choose one of .* label, "):
        register_data_set("unknown", read, settings=["lable"])


def test_a_site_without_the_registration_refuses_and_says_so(tiny):
    register_algorithm("late_darts", Algorithm(LateSettings, LateDARTS), defaults=LATE)
    config = compose(*tiny, "algorithm=late_darts")
    text = dump_config(config)
    del TABLES["algorithm"]["late_darts"], OWN["algorithm"]["late_darts"]
    grid = InProcessGrid(make_client_app(text), config.clients)
    told = refuses("", make_cohort(config, run="run").connect, grid, error=QuorumError)
    assert "algorithm=late_darts is unknown: choose one of" in told
    assert "must be registered first, in each process and at each site" in told


def test_importing_composing_and_mistakes_need_no_torch():
    code = (
        "import sys, fednas_flwr\n"
        "from fednas_flwr import compose, run, register_algorithm, Algorithm\n"
        "from fednas_flwr.settings import AlgorithmSettings\n"
        "compose('algorithm=feathers', 'rounds=2')\n"
        "print(sorted({'torch', 'numpy', 'flwr', 'sklearn', 'ray'} & set(sys.modules)))\n"
    )
    assert processes.told("-c", code) == "[]\n"
    code = "import sys, fednas_flwr; print('hydra' in sys.modules)"
    assert processes.told("-c", code) == "False\n"
    assert dir(fednas_flwr) == sorted(fednas_flwr.__all__)
    for name in fednas_flwr.__all__:
        assert getattr(fednas_flwr, name)
    with pytest.raises(AttributeError, match="has no attribute 'walk'"):
        _ = fednas_flwr.walk


SCRIPT = """
from __future__ import annotations  # other processes must know what the texts of types mean

from dataclasses import dataclass

from fednas_flwr import Algorithm, register_algorithm
from fednas_flwr.algorithms.fed_darts import FedDARTSSettings
from fednas_flwr.algorithms.fed_darts.strategy import FedDARTS
from fednas_flwr.settings.optimizers import SGD
from fednas_flwr.settings.registry import packed


@dataclass(frozen=True)
class OwnSettings(FedDARTSSettings):
    more: SGD | None


defaults = {"defaults": ["fed_darts"], "more": None}
register_algorithm("own", Algorithm(OwnSettings, FedDARTS), defaults=defaults)
print(packed(len).hex())
"""


@pytest.mark.run
def test_other_processes_know_the_settings_of_a_script(tmp_path):
    (tmp_path / "own.py").write_text(SCRIPT)
    sent = bytes.fromhex(processes.told("own.py", cwd=tmp_path))
    assert pickle.loads(sent)("abc") == 3
    own = TABLES["algorithm"].pop("own")  # as in a process that has not run the script
    assert get_type_hints(own.settings)["more"] == SGD | None
