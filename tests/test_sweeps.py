"""Sweeps that Hydra's own launchers and sweepers run, and files of the user's own."""

import json
import shutil

import pytest
import yaml

from fednas_flwr import api, cli
from fednas_flwr.cli import run as sweeps
from fednas_flwr.runs.events import read_events
from fednas_flwr.settings.hydra_config import compose_tree, expand_sweep, user_settings

from .processes import told

ENOUGH_S = 900.0


@pytest.fixture
def brief(tiny_overrides):
    """Overrides of a run that takes a second."""
    return [*tiny_overrides, "clients=2", "rounds=1", "retrain.rounds=1"]


def sweep(folder, *arguments):
    """Run ``fednas run -m`` in a process of its own, as joblib needs it; return its output."""
    command = ("-m", "fednas_flwr", "run", "-m", *arguments, f"hydra.sweep.dir={folder}")
    return told(*command, env={"OMP_NUM_THREADS": "1"}, timeout=ENOUGH_S)


def test_groups_and_baselines_are_no_jobs(compose_config, tmp_path, capsys):
    folder, run = tmp_path / "sweep", tmp_path / "run"
    api.run(compose_config("stages=[search]", "rounds=1", f"run_dir={run}"))
    for inside in (".", "groups/phone", "baselines/random_1"):
        shutil.copytree(run, folder / "0_seed-1" / inside, dirs_exist_ok=True)
    assert sweeps._tell_end(folder) == 0
    assert f"1 of 1 job completed; sweep folder: {folder}" in capsys.readouterr().out


LAUNCHERS = {
    "joblib": ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
    "submitit": ["hydra/launcher=submitit_local"],
    "ray": ["hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_launcher_runs_two_jobs_at_once(name, brief, tmp_path):
    pytest.importorskip(f"hydra_plugins.hydra_{name}_launcher")
    folder = tmp_path / "sweep"
    output = sweep(folder, *brief, "seed=1,2", *LAUNCHERS[name])
    assert "2 of 2 jobs completed" in output
    runs = [read_events(folder / job / "events.jsonl") for job in ("0_seed-1", "1_seed-2")]
    assert [events[-1]["status"] for events in runs] == ["completed"] * 2
    assert max(events[0]["time"] for events in runs) < min(events[-1]["time"] for events in runs)


@pytest.mark.slow
def test_the_best_trial_of_optuna_is_the_first_line(brief, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    folder = tmp_path / "sweep"
    trials = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=8", "hydra.sweeper.n_jobs=1"]
    trials += ["hydra.sweeper.sampler.seed=1", "algorithm.weights.lr=interval(.01,.5)"]
    trials += ["rounds=2"]  # the first validation loss is of weights that have not stepped yet
    output = sweep(folder, *brief, *trials, "stages=[search,retrain,evaluate,export]")
    assert "8 of 8 jobs completed" in output
    found = yaml.safe_load((folder / "optimization_results.yaml").read_text())
    losses = {}
    for path in folder.glob("*/events.jsonl"):
        *_, last = [e for e in read_events(path) if e.get("stage") == "search" and "metrics" in e]
        lr = yaml.safe_load((path.parent / "config.yaml").read_text())["algorithm"]["weights"]["lr"]
        losses[lr] = last["metrics"]["validation_loss"]
    best = min(losses, key=lambda lr: losses[lr])
    assert found["best_params"] == {"algorithm.weights.lr": best}
    assert found["best_value"] == pytest.approx(losses[best])
    document = json.loads((folder / "compare.json").read_text())
    assert document["best"][0].startswith(f"best trial: algorithm.weights.lr={best} (")
    assert document["groups"][0]["settings"] == {"algorithm.weights.lr": str(best)}
    html = (folder / "compare.html").read_text(encoding="utf-8")
    assert f"<h1>{document['best'][0]}</h1>" in html


def test_experiments_in_a_folder_of_ones_own(tmp_path, capsys):
    own = tmp_path / "own"
    (own / "experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults:\n  - override /algorithm: fnas\nrounds: 3\n"
    (own / "experiment" / "mine.yaml").write_text(text)
    where = f"hydra.searchpath=[file://{own}]"
    assert cli.main(["run", where, "experiment=mine", "--cfg", "job"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert (tree["algorithm"]["name"], tree["rounds"]) == ("fnas", 3)
    assert "rounds" in user_settings([where, "experiment=mine"]).experiment
    (own / "haste").mkdir()
    (own / "haste" / "great.yaml").write_text("# @package _global_\nrounds: 2\n")
    hasty = compose_tree(["+haste=great", where])
    given = user_settings(["+haste=great", "clients=2", where])
    assert (hasty["rounds"], given.typed) == (2, ["clients"])
    _, second = expand_sweep(["experiment=mine", where, "seed=1,2"])
    assert second == ["experiment=mine", where, "seed=2"]
    assert cli.main(["run", where, "experiment=mime"]) == cli.USER_ERROR
    assert "(nearest: mine)" in capsys.readouterr().err


def test_hydras_grammar():
    assert compose_tree(["++seed=7"])["seed"] == 7
    assert compose_tree(["seed=${clients}", "clients=4"])["seed"] == 4
    jobs = expand_sweep(["algorithm=glob(*,exclude=[_*,fe*,c*,s*])", "seed=range(1,3)"])
    algorithms = {job[0].removeprefix("algorithm=") for job in jobs}
    assert {"fnas", "zero_cost", "dpnas"} <= algorithms
    assert "fed_darts" not in algorithms
    assert len(jobs) == 2 * len(algorithms)
    assert user_settings(["seed=2", "hydra.sweep.dir=x", "sweep.metric=epsilon"]).typed == ["seed"]


@pytest.mark.run
def test_hydra_informs(capsys):
    shortlist = ["algorithm.shortlist.keep=5", "algorithm.shortlist.scores=[synflow]"]  # was null
    assert cli.main(["run", "algorithm=zero_cost", *shortlist, "--cfg", "job"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["algorithm"]["shortlist"] == {"keep": 5, "scores": ["synflow"]}
    assert "file://" in told("-m", "fednas_flwr", "run", "--info", "searchpath")
    typed = {"COMP_LINE": "fednas run algorithm=fed_"}
    completed = told("-m", "fednas_flwr", "-sc", "query=bash", env=typed)
    assert "algorithm=fed_darts" in completed.split()


def test_a_runs_configuration_repeats_it(brief, tmp_path, capsys):
    assert cli.main(["run", *brief, "seed=5", f"run_dir={tmp_path / 'first'}"]) == 0
    config = f"config={tmp_path / 'first' / 'config.yaml'}"
    assert cli.main(["run", config, f"run_dir={tmp_path / 'second'}"]) == 0
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    for more, words in (
        ("seeed=2", "(nearest: seed)"),
        ("algorithm=fnas", "only single values are"),
    ):
        assert cli.main(["run", config, more]) == cli.USER_ERROR
        assert words in capsys.readouterr().err
