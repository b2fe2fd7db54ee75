"""What is kept where a stage fails, and who is asked to test."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from fednas_flwr import api
from fednas_flwr.algorithms.fed_darts.strategy import FedDARTS
from fednas_flwr.base.errors import ConfigError
from fednas_flwr.client.handlers import ANSWERS
from fednas_flwr.data.prepared import make_data, save_partition
from fednas_flwr.data.records import assign_splits
from fednas_flwr.report.score_tables import setting_rows
from fednas_flwr.report.templates import sentence
from fednas_flwr.runs.numbers import read_run
from fednas_flwr.runs.run_folder import create_run_folder, find_unfinished, occupied
from fednas_flwr.settings.registry import TABLES

from ..booked import booked
from ..composing import ranges_of
from ..refusals import raising, refuses
from ..report.conftest import emit


def test_a_network_is_exported_although_its_test_fails(run_inline, monkeypatch):
    monkeypatch.setitem(TABLES["metric"], "mine", lambda probabilities, labels: math.nan)
    done = run_inline(fails=True)
    assert "the metric mine of your own fails" in str(done.error)
    assert done.named("run_finished")[-1]["status"] == "failed"
    assert done.named("exported")[-1]["files"] == ["model.safetensors", "model.onnx"]
    assert load_file(done.folder / "model.safetensors")
    assert "evaluated" not in [event["event"] for event in done.events]


def test_a_training_loss_that_is_not_finite_ends_the_run(run_inline, monkeypatch):
    monkeypatch.setitem(TABLES["loss"], "odd", lambda logits, labels: logits.sum() * math.nan)
    done = run_inline("training.loss=odd", fails=True)
    assert "train_loss=nan is not finite: lower the learning rate" in str(done.error)
    assert done.named("run_finished")[-1]["status"] == "failed"
    assert not (done.folder / "genotype.json").exists()


def test_a_client_that_was_expelled_stays_out_of_a_resumed_run(run_inline):
    first = run_inline("clients=3", "runtime.quorum=0.6", "rounds=1", "retrain.rounds=1")
    evaluated = first.the("evaluated")
    assert 1 in [result["client"] for result in evaluated["clients"]]
    place = {"stage": "retrain", "round": 1, "action": "train.weights", "client": 1}
    emit(first.folder, "client_left", **place, reason="nonsense", expelled=True)
    evaluated = run_inline(resume=first.folder).named("evaluated")[-1]
    assert 1 not in [result["client"] for result in evaluated["clients"]]


def test_clients_without_test_records_are_not_asked_to_test(finished_run, compose_config, tmp_path):
    config = compose_config()
    prepared, _ = make_data(config)
    splits = assign_splits(prepared.train.ids, **config.dataset.division)
    without = np.flatnonzero(splits != 2)[:30]
    others = np.setdiff1d(np.arange(len(splits)), without)
    save_partition(tmp_path / "parts.json", [without, others[::2], others[1::2]])
    own = ("partition=saved", f"partition.file={tmp_path / 'parts.json'}", "rounds=1")
    more = ("retrain.rounds=1", "evaluation.personalised=true", "runtime.quorum=1")
    done = finished_run(*own, *more)
    for kind in ("clients", "personalised"):
        assert [own["client"] for own in done.the("evaluated")[kind]] == [1, 2]
    assert not done.named("client_failed", "warning")


@pytest.mark.parametrize("fraction", ["0", ".0001"])
def test_a_run_without_test_records_completes(finished_run, fraction):
    train = 0.6 if fraction == "0" else 0.5999
    fractions = json.dumps({"train": train, "validation": 0.4, "test": float(fraction)})
    done = finished_run(f"dataset.fractions={fractions}".replace('"', ""), "rounds=1")
    assert done.named("evaluated")[-1]["clients"] == []
    assert not done.named("client_failed", "warning")


def test_clients_find_the_statistics_of_a_table_together(finished_run, run_inline, tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{rng.normal(40 + 20 * (i % 2), 10):.2f},{'nN'[i % 2]},{i % 3}" for i in range(200)]
    (tmp_path / "table.csv").write_text("\n".join(["age,ward,ill", *rows]))
    own = ("dataset=csv", f"dataset.root={tmp_path / 'table.csv'}", "dataset.ignore=[ward]")
    own += ("partition=column", "partition.column=ward", "clients=2", "search_space=mlp_small")
    small = ("search_space.channels=8", "retrain.channels=8", "rounds=1", "retrain.rounds=1")
    done = finished_run(*own, *small)
    assert "the column of clients holds N and n" in str(done.named("data")[0]["odd"])
    prepared, _ = make_data(done.config)
    splits = assign_splits(prepared.train.ids, **done.config.dataset.division)
    ages = prepared.train.features[splits == 0, 0].double().numpy()
    found = done.named("statistics")[-1]
    assert found["mean"] == pytest.approx([ages.mean()])
    assert found["std"] == pytest.approx([ages.std()])
    assert done.named("exported")[-1]["inputs"]["mean"] == found["mean"]
    # a run that goes on keeps those that it began with, whatever the clients tell now
    events = done.folder / "events.jsonl"
    lines = events.read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["event"] in ("run_started", "statistics")]
    changed = [line.replace(str(found["mean"][0]), "55.5") for line in kept]
    events.write_text("\n".join(changed) + "\n")
    assert run_inline(resume=done.folder).named("exported")[-1]["inputs"]["mean"] == [55.5]


def test_clients_that_cannot_test_the_network_do_not_end_the_run(run_inline, monkeypatch, tmp_path):
    """Nor does it that there is no git, which would tell the commit."""
    monkeypatch.setenv("PATH", str(tmp_path))

    monkeypatch.setitem(ANSWERS, "evaluate.model", raising(ValueError("the disk is full")))
    own = ("algorithm=fedavg", "algorithm.network=linear", "retrain.rounds=1")
    done = run_inline(*own, "stages=[retrain,evaluate,export]")
    assert done.named("evaluated")[-1]["clients"] == []
    assert "the disk is full" in done.named("warning")[-1]["message"]
    assert (done.events[0]["event"], done.events[0]["commit"]) == ("run_started", None)
    assert done.named("run_finished")[-1]["status"] == "completed"


# --- Which run ``resume=auto`` continues, and that no two processes run in one folder


STAMP = {"time": "2026-11-20T18:45:16.000+00:00", "elapsed": 1.0}


def begun(config, name, *statuses, age_s):
    """Make the folder of a run with one attempt per status, the newest ``age_s`` ago."""
    run = create_run_folder(replace(config, run_dir=str(Path("runs") / name)))
    folder = Path(str(run.run_dir))
    end = STAMP | {"event": "run_finished", "reason": None, "seconds": 1.0}
    lines = [json.dumps(end | {"status": status}) + "\n" for status in statuses]
    (folder / "events.jsonl").write_text("".join(lines))
    time = (folder / "config.yaml").stat().st_mtime - age_s
    os.utime(folder / "config.yaml", (time, time))
    return run


def test_the_newest_unfinished_run_of_its_kind_goes_on(compose_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, other = compose_config(), compose_config("seed=2")
    assert find_unfinished(config) is None
    begun(config, "old", "failed", age_s=50)
    failed = begun(config, "failed", "failed", age_s=40)
    begun(config, "failed and continued", "failed", "completed", age_s=30)
    begun(config, "completed", "completed", age_s=20)
    begun(other, "other", age_s=0)
    Path("runs/foreign").mkdir()
    Path("runs/foreign/config.yaml").write_bytes(FOREIGN["no YAML"])  # is passed
    assert find_unfinished(config) == failed
    assert begun(config, "killed", age_s=10) == find_unfinished(config)
    there = replace(config, run_dir="runs/old")
    assert find_unfinished(there) == replace(config, run_dir=str(tmp_path / "runs/old"))
    assert find_unfinished(replace(config, run_dir="runs/completed")) is None
    assert find_unfinished(replace(other, run_dir="runs/old")) is None


HOLDER = """
import sys
from pathlib import Path
from fednas_flwr.runs.run_folder import occupied
with occupied(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_has_one_process_at_a_time_and_is_free_after_a_kill(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="is going on in another process"):
            with occupied(tmp_path):
                pass
        holder.kill()
    with occupied(tmp_path):
        pass


FOREIGN = {
    "no YAML": b"a: [1\n b: }",
    "bytes": b"\xff\xfe\x00\x81",
    "a list": b"- 1\n- 2\n",
    "a text": b"hello",
    "nothing": b"",
    "another mapping": b"model: resnet\nlr: 0.1\n",
    "a name of another type": b"algorithm: {name: [1]}\ndataset: 3\n",
}


@pytest.mark.parametrize("content", FOREIGN)
@pytest.mark.parametrize("own_strategy", [False, True])
def test_a_foreign_configuration_is_not_continued(tmp_path, content, own_strategy):
    (tmp_path / "config.yaml").write_bytes(FOREIGN[content])
    told = refuses("", api.run, tmp_path, strategy=FedDARTS if own_strategy else None)
    assert "\n" not in told
    assert len(told) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


# --- Report and model card of real runs state what the clients did, whatever the settings say


PRIVATE = ["privacy=dp", "privacy.epsilon=100", "clients=2", "algorithm.batch_size=8"]
PRIVATE += ["retrain.batch_size=16", "retrain.local_epochs=9", "search_space.norm=group"]
PRIVATE += ["retrain.norm=group", "privacy.local_steps=2", "privacy.retrain.local_steps=3"]


def card(run):
    return (run.folder / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_private_training_is_told_in_the_steps_that_the_ledgers_hold(run_inline):
    run = run_inline(*PRIVATE, "algorithm.local_epochs=7", "stages=[search,retrain]")
    rows = [row for row in booked(run.folder / "sites") if row.action.endswith(":weights")]
    assert Counter(row.stage for row in rows) == {"search": 2 * 2, "retrain": 2 * 3}
    assert {row.release.steps for row in rows} == {1}
    shown = dict(setting_rows(read_run(run.folder)))
    expected = {
        "algorithm.name": "fed_darts",
        "algorithm.local_steps": "2",
        "algorithm.expected_batch_size": "8",
        "retrain.local_steps": "3",
        "retrain.expected_batch_size": "16",
        "rounds": "2",
    }
    assert shown.items() >= expected.items()
    assert "algorithm.local_epochs" not in shown
    text = card(run)
    assert "epochs" not in text
    assert "| algorithm.local_steps | 2 |" in text
    assert "| algorithm.expected_batch_size | 8 |" in text
    assert "- It was not evaluated." in text
    assert "Not all of it was released" not in text


def test_a_given_genotype_was_not_searched_for(finished_run):
    searched = finished_run("stages=[search]", "clients=2", "rounds=1")
    assert "; its weights were not trained." in card(searched)
    assert "Nothing was searched" not in card(searched)
    given = ("stages=[retrain,evaluate]", f"genotype={searched.folder / 'genotype.json'}")
    run = finished_run(*given, "clients=2", "retrain.rounds=1", "algorithm.local_epochs=7")
    assert run.error is None
    shown, text = dict(setting_rows(read_run(run.folder))), card(run)
    assert sentence("title", read_run(run.folder)) == "npz, 2 clients"
    assert not {"algorithm.name", "search_space.name", "rounds"} & set(shown)
    assert shown["genotype"].endswith("genotype.json")
    assert "A classifier of a given architecture, whose weights several clients trained" in text
    assert "algorithm" not in text
    assert "another seed gives another accuracy." in text
    report = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "The network that was given" in report
    assert "The network that was found" not in report


def test_hyper_parameters_that_were_chosen_are_not_those_of_the_settings(finished_run):
    feathers = ("algorithm=feathers", "algorithm.num_configurations=3", "algorithm.nas_rounds=2")
    text = card(finished_run(*feathers, "clients=2", "stages=[search,retrain]"))
    assert "retrain.weights.lr" not in text
    assert "| retrain.hyperparameters | chosen by feathers in every round |" in text
    own = ("algorithm=random_search", "rounds=1", "clients=2", "retrain.rounds=1")
    found = finished_run(*own, ranges_of(lr=(0.001, 0.002), dropout=(0.0, 0.1)))
    derived = found.the("derived")
    assert f"| retrain.weights.lr | {derived['configuration']['lr']} |" in card(found)
    assert f"| retrain.drop_path_prob | {derived['configuration']['dropout']} |" in card(found)


@pytest.mark.parametrize("private", [False, True])
def test_the_time_of_each_client_is_told_unless_it_is_private(finished_run, private):
    linear = ("algorithm=fedavg", "algorithm.network=linear", "clients=2", "retrain.rounds=2")
    terms = ("privacy=dp", "privacy.epsilon=30") if private else ()
    run = finished_run(*linear, "stages=[retrain]", *terms)
    seconds = [event["client_seconds"] for event in run.named("round")]
    assert [{*of} for of in seconds] == [set() if private else {"0", "1"}] * 2
    assert all(used > 0 for of in seconds for used in of.values())
