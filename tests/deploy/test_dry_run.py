"""What ``fednas run --dry-run`` tells, against what the run then takes."""

import gc
from dataclasses import replace

import pytest

from fednas_flwr.base.processes import ALONE
from fednas_flwr.deploy import dry_run
from fednas_flwr.protocol.requests import Amount, Evaluate, Train
from fednas_flwr.report.templates import sentence
from fednas_flwr.settings import parser
from fednas_flwr.settings.configuration import parse_config
from fednas_flwr.settings.hydra_config import compose_tree

from ..asked import smallest
from ..refusals import refuses
from ..rows import seldom
from ..watched import noting

RECORDS = {"train": 100, "validation": 50, "test": 7}
SMALL = ("rounds=3", "retrain.rounds=2", "retrain.channels=4")
LOCAL = ("algorithm=successive_halving", "algorithm.rewarded=local", "rounds=1")
LOCAL += ("algorithm.pool={draws: 3, keep: 2}",)
DP = ("algorithm=dp_fnas", "privacy=dp", "privacy.epsilon=30", "search_space.norm=group")


def folder_of(path):
    return {str(file): file.read_bytes() for file in path.rglob("*") if file.is_file()}


RUNS = [
    (),
    ("clients=6", "sampling.per_round=2"),
    ("algorithm=fnas", "runtime.wire=int8"),
    (*DP, "retrain.norm=group"),
]


@pytest.mark.parametrize("overrides", RUNS)
def test_traffic_and_epsilon_are_those_of_the_run(overrides, compose_config, run_inline):
    told = dry_run.estimate(compose_config(*SMALL, *overrides))
    done = run_inline(*SMALL, *overrides)
    for stage in told.stages:
        rounds = [e for e in done.events if e["event"] == "round" and e["stage"] == stage.name]
        assert len(rounds) == stage.rounds
        taken = sum(event["bytes_sent"] + event["bytes_received"] for event in rounds)
        ratio = stage.rounds * stage.round_bytes / taken
        close = (0.7, 1.3) if overrides else (0.98, 1.02)  # rounds of fnas differ
        low, high = (1 / 3, 3) if stage.name == "retrain" else close  # of a random network
        assert low < ratio < high
        assert stage.seconds > 0
    assert [stage.name for stage in told.stages] == ["search", "retrain"]
    promised = done.named("privacy")
    assert told.privacy == (sentence("overall_text", promised[-1]) if promised else "")
    assert told.memory_bytes > 50e6


@pytest.mark.parametrize(("overrides", "cores"), [((), 1), (LOCAL, 1), (LOCAL, 2)])
def test_seconds_are_those_of_all_clients_steps(overrides, cores, compose_config, monkeypatch):
    """With a clock by which a message takes 2 s and each of its steps half a second."""
    monkeypatch.delenv(ALONE, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    asked = []
    answer = dry_run.MeasuringGrid._timed

    def timed(self, message, request, steps):
        reply, _ = answer(self, message, request, 1)
        asked.append(steps)
        return reply, 2 + 0.5 * steps

    monkeypatch.setattr(dry_run.MeasuringGrid, "_timed", timed)
    amount = ("algorithm.local_epochs=7", "algorithm.batch_size=2")
    config = compose_config("stages=[search]", *overrides, *amount)
    grids = noting(monkeypatch, dry_run, "MeasuringGrid", lambda grid, *_: grid)
    (stage,) = dry_run.estimate(config).stages
    parts = [properties["splits"]["train"] for properties in grids[0].properties.values()]
    expected = sum(2 + 0.5 * 7 * -(-part // 2) for part in parts) / cores
    assert stage.round_s == pytest.approx(expected, abs=30)  # the server's own seconds
    assert stage.round_s >= expected
    assert sorted(asked) == [1, 1, 1, 1, dry_run.FEW]


OTHER_WAYS = [
    ("algorithm=zero_cost",),
    ("algorithm=successive_halving", "algorithm.pool={draws: 3, keep: 2}"),
    ("secure_sum=true",),
    seldom(("algorithm=successive_halving", "algorithm.pool.draws=3")),
    seldom(LOCAL),
    seldom(("algorithm=fedavg", "algorithm.network=linear")),
]


@pytest.mark.parametrize("overrides", OTHER_WAYS)
def test_other_ways_are_measured(overrides, compose_config):
    told = dry_run.estimate(compose_config(*SMALL, *overrides))
    assert told.stages[-1].name == "retrain"
    assert all(stage.round_s >= 0 for stage in told.stages)
    lines = "\n".join(told.lines())
    assert "retrain  2 rounds of " in lines
    assert "of traffic" in lines


def test_simulated_sites_that_are_kept_pay_nothing(tmp_path, compose_config, run_inline):
    sites = tmp_path / "sites"
    noise = [f"privacy.{kind}.noise_multiplier=3" for kind in ("weights", "alphas")]
    terms = (*SMALL, *DP, *noise, f"privacy.sites={sites}", "stages=[search]")
    run_inline(*terms)
    before = folder_of(sites)
    gc.collect()  # nothing of the run is open any more
    assert dry_run.estimate(compose_config(*terms)).privacy
    assert folder_of(sites) == before


def test_command_runs_nothing(tmp_path, monkeypatch, prints):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(parser.SECONDS, "s", 1e-9)
    given = ["algorithm=fedavg", "algorithm.network=linear", "retrain.rounds=3"]
    late = ["stages=[retrain,evaluate,export]", "runtime.time_limit=1s"]
    lines = prints("run", "--dry-run", *late, *given).splitlines()
    assert lines[0].startswith("retrain  3 rounds of ")
    assert [line.split()[0] for line in lines[1:]] == "together limit memory disk Measured".split()
    assert lines[2].endswith("0.0 s are less: a round of retrain takes longer, and is not cut")
    assert list(tmp_path.iterdir()) == []
    for wrong in (["-m", "seed=1,2"], ["resume=x"], ["--cfg", "job"]):
        assert "--dry-run is of one new run" in prints("run", "--dry-run", *wrong, code=2)


def test_sites_that_are_elsewhere_cannot_be_measured():
    real = ["runtime=deployment", "runtime.superlink=site", "partition=sites"]
    config = parse_config(compose_tree([*real, "dataset=npz", "dataset.server_test=false"]))
    refuses("only the sites know their records", dry_run.estimate, config)


def test_number_of_steps_of_every_action():
    asked = smallest()
    for action, settings in asked.items():
        assert settings.num_steps(RECORDS) == 1, action
        trains = action.startswith("train.") or action == "evaluate.personalised"
        trains &= action != "train.network_gradient"  # of which every request is one step
        assert settings.with_steps(5).num_steps(RECORDS) == (5 if trains else 1), action
    train = asked["train.weights"]
    assert isinstance(train, Train)
    for amount, split, expected in (
        (Amount(3, None, 40), "train", 9),
        (Amount(3, None, 40), "train+validation", 12),
        (Amount(3, None, None), "train", 3),
        (Amount(None, 17, 40), "train", 17),
    ):
        local = replace(train.local, amount=amount, split=split)
        assert replace(train, local=local).num_steps(RECORDS) == expected
    evaluate = Evaluate(network={"name": "x"}, split="test")
    assert evaluate.with_steps(9) == evaluate
