"""``flwr run .`` in the project's root: what Flower's own commands make of the project."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.install import install_from_fab

from fednas_flwr.cli import main
from fednas_flwr.deploy import bundle
from fednas_flwr.deploy.server_app import configure
from fednas_flwr.deploy.sites.doctor import is_open
from fednas_flwr.runs.events import read_events

from ..finished_runs import assert_same_files
from ..processes import told, until
from ..refusals import refuses

ROOT = Path(__file__).parents[2]
PATIENCE_S = 600.0
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # within flwr


# --- the bundle


def test_sites_accept_what_flower_builds_of_the_root():
    bundle.check_bundle(build_fab_from_disk(ROOT))


def test_the_environment_of_a_run_is_empty(tmp_path, monkeypatch):
    """By Flower's command, but with the installed hatchling, so that nothing is downloaded."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    folder = install_from_fab(build_fab_from_disk(ROOT), skip_prompt=True)
    command = [sys.executable, "-m", "uv", "sync", "--python", sys.executable, "--inexact"]
    command += ["--no-install-project", "--no-install-package", "flwr"]
    command += ["--offline", "--no-build-isolation", "--dry-run"]
    own = {"UV_PROJECT_ENVIRONMENT": sys.prefix, "UV_CACHE_DIR": str(tmp_path / "uv")}
    done = subprocess.run(command, cwd=folder, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Resolved 1 package" in done.stderr


# --- its configuration


WRONG = [
    ("clients=5", "the federation has 2 nodes: leave clients out, or set the nodes by `flwr "),
    ("runtime=ray", "runtime is chosen by Flower's federation"),
    ("runtime.client_gpus=1", "runtime.client_gpus is a setting of runtime=ray"),
    ("algorithm=fnass", "algorithm=fnass is unknown"),
    ("training.class_factors='{a: 1", "overrides=training.class_factors='{a: 1 cannot be read"),
    ("resume=/nowhere rounds=2", "resume=/nowhere takes no other override"),
    ("resume=/nowhere", "resume=/nowhere: /nowhere/config.yaml does not exist"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_wrong_overrides_are_one_sentence(text, words):
    before = set(ROOT.glob("runs/*"))
    refuses(re.escape(words), configure, text, num_nodes=2)
    assert set(ROOT.glob("runs/*")) == before


def test_a_run_has_a_client_for_every_node_and_lies_in_the_projects_runs(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "fednas_flwr").mkdir()
    monkeypatch.chdir(tmp_path)  # a clone; another one is installed
    config, resumed = configure("algorithm=fnas rounds=1", num_nodes=4)
    assert (config.clients, config.rounds, config.algorithm.name) == (4, 1, "fnas")
    assert not resumed
    assert Path(str(config.run_dir)).parent == tmp_path / "runs"
    again, resumed = configure(f"resume={config.run_dir}", num_nodes=4)
    assert again == config
    assert resumed


def test_elsewhere_a_run_lies_in_the_installed_project(tmp_path, monkeypatch):
    (tmp_path / "installed" / "fednas_flwr").mkdir(parents=True)
    monkeypatch.setattr(bundle, "checkout", lambda: tmp_path / "installed")
    monkeypatch.chdir(tmp_path)
    assert bundle.typed_in() == tmp_path / "installed"
    monkeypatch.setattr(bundle, "checkout", lambda: None)  # a wheel
    assert bundle.typed_in() == tmp_path


def test_nodes_that_hold_the_data_are_sites(tmp_path):
    text = f"partition=sites dataset=npz dataset.server_test=false run_dir={tmp_path / 'run'}"
    config, _ = configure(text, num_nodes=3)
    assert (config.runtime.name, config.clients) == ("deployment", 3)


# --- real runs


class Flower:
    """The commands of Flower on a SuperLink of our own that simulates."""

    def __init__(self, home):
        """Name the SuperLink in Flower's configuration."""
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = found.getsockname()[1]
        home.mkdir()
        superlink = f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (home / "config.toml").write_text(superlink)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        settings = {"FLWR_HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1"}
        self.environment = os.environ | settings
        self.environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"  # tested above

    def __call__(self, *arguments):
        """Run a command in the project's root and return what it prints."""
        printed = told("-m", "flwr.cli.app", *arguments, cwd=ROOT, env=self.environment)
        return re.sub(r"\x1b\[\d+m", "", printed)

    def run(self, overrides, *options):
        """``flwr run .`` with overrides and two clients; returns what it prints."""
        run_config = f"overrides={json.dumps(' '.join(overrides))}"
        nodes = ("--federation-config", "num-supernodes=2")
        return self("run", ".", "here", "--run-config", run_config, *nodes, *options)

    def status(self, run_id=""):
        """Return what ``flwr ls`` says of a run, by default of the newest."""
        chosen = ("--run-id", run_id) if run_id else ()
        return json.loads(self("ls", "here", *chosen, "--format", "json"))["runs"][0]["status"]


@pytest.fixture(scope="module")
def flwr(tmp_path_factory):
    """Flower's commands, with a SuperLink that ends with the tests."""
    flower = Flower(tmp_path_factory.mktemp("flower") / "home")
    command = [str(Path(sys.executable).parent / "flower-superlink"), "--insecure", "--simulation"]
    command += ["--host", "127.0.0.1", "--port", str(flower.port)]
    quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
    superlink = subprocess.Popen(command, env=flower.environment, **quiet)
    try:
        until(lambda: is_open(flower.port), "the SuperLink", within_s=PATIENCE_S)
        yield flower
    finally:
        superlink.terminate()
        superlink.wait()


@pytest.mark.slow
@pytest.mark.ray
def test_flwr_run_gives_the_bits_of_fednas_run_and_its_report(flwr, tiny_overrides, tmp_path):
    overrides = [*tiny_overrides, "rounds=1", "retrain.rounds=1"]
    output = flwr.run([*overrides, f"run_dir={tmp_path / 'flwr'}"], "--stream")
    assert flwr.status() == "finished:completed", output
    assert main(["run", *overrides, "clients=2", f"run_dir={tmp_path / 'own'}"]) == 0
    assert_same_files(tmp_path / "flwr", tmp_path / "own")
    lines = output.splitlines()
    assert f"run folder: {tmp_path / 'flwr'}" in lines
    assert [line for line in lines if line.startswith("search 1/1  validation loss")]
    assert not [line for line in lines if "fednas-event" in line]
    (last,) = [line for line in lines if line.startswith("report: ")]
    html = Path(last.removeprefix("report: ")).read_text(encoding="utf-8")
    assert "<html" in html
    assert "fed_darts" in html


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_that_flwr_stops_goes_on_where_it_was(flwr, tiny_overrides, tmp_path):
    folder = tmp_path / "run"
    overrides = [*tiny_overrides, "rounds=40", f"run_dir={folder}"]
    started = json.loads(flwr.run(overrides, "--format", "json"))
    run_id, file = started["run-id"], folder / "events.jsonl"

    def has_checkpoint():
        assert not flwr.status(run_id).startswith("finished"), flwr("log", run_id, "here", "--show")
        return bool(list((folder / "checkpoints").glob("search-*")))

    until(has_checkpoint, "a checkpoint", within_s=PATIENCE_S)
    flwr("stop", run_id, "here")
    until(lambda: flwr.status(run_id) == "finished:stopped", "the end", within_s=PATIENCE_S)
    assert "search 1/40" in flwr("log", run_id, "here", "--show")
    done = [event["round"] for event in read_events(file) if event["event"] == "round"]
    assert 0 < len(done) < 40
    output = flwr.run([f"resume={folder}"], "--stream")
    assert flwr.status() == "finished:completed", output
    rounds = [e["round"] for e in read_events(file) if e["event"] == "round"]
    rounds = rounds[:-2]  # those of retraining
    assert sorted(set(rounds)) == list(range(1, 41))
    assert len(rounds) <= 41  # at most the one that was under way is repeated
