"""A real process, killed in the middle of a round, goes on to bit-equal results."""

import json
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from fednas_flwr.cli import main
from fednas_flwr.runs.events import EventLog, latest_rounds, read_events

from ..finished_runs import named

ROUNDS = 4
KILLED_AFTER = 2  # rounds of the search; the kill falls into the next one
TIMEOUT_S = 600


def wait_for_round(folder, number, process):
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        events = folder / "events.jsonl"
        done = latest_rounds(read_events(events), "search") if events.exists() else []
        if len(done) >= number and (folder / "checkpoints" / f"search-{number:06d}.json").exists():
            return
        time.sleep(0.005)
    raise AssertionError(f"round {number} did not come within {TIMEOUT_S} s")


@pytest.fixture(scope="module")
def folders(fednas, tiny_overrides, tmp_path_factory):
    """Folders of an undisturbed run, and of two that were killed and resumed."""
    root = tmp_path_factory.mktemp("resume")
    # FNAS: its server has optimisers of its own, and batches go on over rounds.
    overrides = [*tiny_overrides, "algorithm=fnas", f"rounds={ROUNDS}", "algorithm.batch_size=8"]
    overrides += ["clients=2", "retrain.rounds=1", "stages=[search,retrain,export]"]
    with fednas("run", *overrides, f"run_dir={root / 'killed'}") as killed:
        try:
            wait_for_round(root / "killed", KILLED_AFTER, killed)
            time.sleep(0.05)  # into the next round, which takes longer than this
        finally:
            killed.send_signal(signal.SIGKILL)
        killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    shutil.copytree(root / "killed", root / "truncated")
    newest = max((root / "truncated" / "checkpoints").glob("search-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    before = {name: read_events(root / name / "events.jsonl") for name in ("killed", "truncated")}
    assert KILLED_AFTER <= len(latest_rounds(before["killed"], "search")) < ROUNDS
    assert not named(before["killed"], "run_finished")  # the kill fell into a round
    with fednas("run", f"resume={root / 'killed'}") as resumed:
        try:
            assert main(["run", *overrides, f"run_dir={root / 'whole'}"]) == 0
            assert main(["run", f"resume={root / 'truncated'}"]) == 0
            told = resumed.communicate(timeout=TIMEOUT_S)
            assert resumed.returncode == 0, told
        finally:
            resumed.kill()
    return root, before


def assert_same_results(folder, whole):
    for name in ("genotype.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    newest = f"search-{ROUNDS:06d}.safetensors"
    left, right = (load_file(f / "checkpoints" / newest) for f in (folder, whole))
    assert {"weights.float32", "alphas.float32", "server.weights.momentum_buffer"} <= set(left)
    assert set(left) == set(right)
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def metrics_by_round(folder, stage):
    return [e["metrics"] for e in latest_rounds(read_events(folder / "events.jsonl"), stage)]


@pytest.mark.run
def test_a_killed_run_goes_on_bit_by_bit(folders):
    root, before = folders
    assert_same_results(root / "killed", root / "whole")
    events = read_events(root / "killed" / "events.jsonl")
    assert events[: len(before["killed"])] == before["killed"]
    assert [event["resumed"] for event in named(events, "run_started")] == [False, True]
    resumed = [e["round"] for e in events[len(before["killed"]) :] if e["event"] == "round"]
    done = len(latest_rounds(before["killed"], "search"))
    assert resumed[0] in (done, done + 1)  # done: killed between the event and the checkpoint
    assert not named(events, "warning")
    for stage in ("search", "retrain"):
        left, right = (metrics_by_round(root / name, stage) for name in ("killed", "whole"))
        assert left == right


@pytest.mark.run
def test_a_truncated_checkpoint_costs_a_round_and_a_warning(folders):
    root, before = folders
    assert_same_results(root / "truncated", root / "whole")
    events = read_events(root / "truncated" / "events.jsonl")
    (warning,) = named(events, "warning")
    assert "is damaged" in warning["message"]
    assert "the one before it is used" in warning["message"]
    damaged = int(warning["message"].split("search-")[1][:6])
    resumed = [e["round"] for e in events[len(before["truncated"]) :] if e["event"] == "round"]
    assert resumed[0] == damaged  # the round of the damaged checkpoint is done again
    assert json.loads((root / "truncated" / "genotype.json").read_text())["space"] == "nasbench201"


def test_a_client_that_was_expelled_stays_out_of_a_resumed_run(run_inline):
    overrides = ("clients=3", "runtime.quorum=0.6", "rounds=1", "retrain.rounds=1")
    first = run_inline(*overrides)
    evaluated = first.the("evaluated")
    assert 1 in [result["client"] for result in evaluated["clients"]]
    with EventLog(first.folder / "events.jsonl") as log:
        place = {"stage": "retrain", "round": 1, "action": "train.weights"}
        log.emit("client_left", **place, client=1, reason="nonsense", expelled=True)
    again = run_inline(resume=first.folder)
    evaluated = again.named("evaluated")[-1]
    assert 1 not in [result["client"] for result in evaluated["clients"]]
