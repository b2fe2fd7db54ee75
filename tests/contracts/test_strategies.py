"""What every search algorithm owes to the round loop: two clients, two rounds, inline."""

import json
import math
import shutil

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import Strategy

from fednas_flwr.protocol.states import MOMENTS
from fednas_flwr.settings.names import BFLOAT16, FLOAT32, PRECISIONS
from fednas_flwr.settings.registry import NETWORKS, algorithms
from fednas_flwr.spaces.genotype import to_json

from ..rows import rows, seldom

pytestmark = pytest.mark.usefixtures("one_cell")
# cfdnas is runs of fdnas, tests/pipeline/test_groups.py; fedavg, fedprox, fedex do not search;
# dp_fnas never repeats a draw, tests/pipeline/test_private_run.py; zero_cost trains nothing,
# tests/algorithms/test_zero_cost.py
OTHERS = ("fedavg", "fedprox", "fedex", "dp_fnas", "cfdnas", "zero_cost")
OWN = """
fedprox_darts | algorithm.proximal=0.1
fnas | algorithm.batch_size=16
vanilla_nas | clients=1 algorithm.batch_size=16
feathers | algorithm.nas_rounds=1 algorithm.bandit.beta=1.0
fdnas | search_space=mbconv_small search_space.width=0.25 retrain=mbconv algorithm.local_epochs=1
    algorithm.batch_size=16 algorithm.warm_up_rounds=0
dpnas | search_space=dp_cells search_space.widths=[4] search_space.head=8 retrain=dp_cells
    algorithm.warm_up_rounds=0 algorithm.batch_size=16 algorithm.trained_candidates=2
    algorithm.rewarded_candidates=2 algorithm.final_candidates=3 algorithm.controller.scaled=true
random_search | rounds=2
successive_halving | algorithm.pool.draws=5 algorithm.pool.keep=4 algorithm.pool.by=[synflow]
"""
SETTINGS = {name: list[str]() for name in algorithms() if name not in OTHERS}
SETTINGS |= {name: given.split() for name, given in rows(OWN)}
ROUNDS = 2
UNEQUAL = ["partition=quantity", "partition.fractions=[0.6,0.4]"]


def compose(compose_config, algorithm, *overrides):
    unequal = [] if algorithm == "vanilla_nas" else UNEQUAL
    own = [f"algorithm={algorithm}", "clients=2", *unequal, *SETTINGS[algorithm]]
    return compose_config(*own, *overrides)


def snapshot(strategy):
    """Everything that a round leaves behind, as named tensors and JSON."""
    tensors = {
        f"{state}.{dtype}": vector.clone()
        for state, packed in strategy.states.items()
        for dtype, vector in packed.items()
    }
    tensors |= {f"server.{n}": t.clone() for n, t in strategy.server_tensors().items()}
    return tensors, json.dumps(strategy.values, sort_keys=True), to_json(strategy.derive())


def assert_equal(left, right):
    assert left[1:] == right[1:]
    assert set(left[0]) == set(right[0])
    for name, tensor in left[0].items():
        assert torch.equal(tensor, right[0][name]), name


@pytest.fixture(scope="module", params=sorted(SETTINGS))
def undisturbed(request, compose_config, federate, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    federation = federate(compose(compose_config, request.param), checkpoints=folder)
    federation.folder, federation.algorithm = folder, request.param
    named = federation.strategy.named_arrays().to_torch_state_dict()
    federation.initial = {name: tensor.clone() for name, tensor in named.items()}
    federation.result = federation.strategy.start(federation.grid, num_rounds=ROUNDS)
    return federation


def test_rounds_are_finite_and_told(undisturbed):
    rounds = undisturbed.named("round")
    assert [event["round"] for event in rounds] == [1, 2]
    assert not undisturbed.named("client_failed", "warning")
    for event in rounds:
        assert math.isfinite(event["metrics"]["train_loss"])
        assert math.isfinite(event["metrics"]["validation_loss"])
        assert event["bytes_sent"] > 0 < event["bytes_received"]
        assert set(event["clients"]) == {str(c) for c in range(undisturbed.config.clients)}
    metrics = undisturbed.result.train_metrics_clientapp
    losses = [event["metrics"]["train_loss"] for event in rounds]
    assert [metrics[number]["train_loss"] for number in (1, 2)] == losses


def test_it_is_a_flower_strategy_that_learns_and_derives(undisturbed):
    strategy = undisturbed.strategy
    assert isinstance(strategy, Strategy)
    strategy.space.check(strategy.derive())
    if algorithms()[undisturbed.algorithm].trains == NETWORKS:  # no model before
        return
    arrays = undisturbed.result.arrays.to_torch_state_dict()
    for state in strategy.states.keys() & {"weights", "alphas"}:
        changed = [n for n in arrays if n.startswith(f"{state}.")]
        assert changed
        assert any(not torch.equal(arrays[n], undisturbed.initial[n]) for n in changed)


def test_resume_after_round_1_gives_equal_tensors(undisturbed, compose_config, federate, tmp_path):
    config = compose(compose_config, undisturbed.algorithm)
    last = shutil.ignore_patterns("search-000002.*")
    half = shutil.copytree(undisturbed.folder, tmp_path / "half", ignore=last)
    resumed = federate(config, checkpoints=half)
    resumed.strategy.start(resumed.grid, num_rounds=ROUNDS)
    assert [e["round"] for e in resumed.named("round")] == [2]
    assert_equal(snapshot(resumed.strategy), snapshot(undisturbed.strategy))


PLAIN = {"dpnas": ["algorithm.dp_aware=null"]}  # else it trains by float32 gradients of records


@pytest.mark.run
@pytest.mark.parametrize("algorithm", sorted(SETTINGS))
def test_the_precision_arrives_at_every_gradient(algorithm, compose_config, federate):
    """Every state that is trained moves otherwise in bfloat16."""
    trained = {}
    for precision in PRECISIONS:
        own = [*PLAIN.get(algorithm, []), f"training.precision={precision}", "rounds=1"]
        federation = federate(compose(compose_config, algorithm, *own))
        federation.strategy.start(federation.grid, num_rounds=1)
        trained[precision] = federation.strategy.states
    full, half = trained[FLOAT32], trained[BFLOAT16]
    for state in ("weights", "alphas"):
        if full.get(state):
            assert not torch.equal(full[state]["float32"], half[state]["float32"]), state


@pytest.mark.run
def test_the_seed_decides(undisturbed, compose_config, federate):
    first_loss = undisturbed.named("round")[0]["metrics"]
    saved = undisturbed.checkpoints._load("search-000001")  # the second round is resumed above
    for seed in (1, 7):
        again = federate(compose(compose_config, undisturbed.algorithm, f"seed={seed}"))
        schedule = again.strategy.run_round
        again.strategy.run_round = lambda number, _, schedule=schedule: schedule(number, ROUNDS)
        again.strategy.start(again.grid, num_rounds=1)
        event = again.the("round")
        same = seed == undisturbed.config.seed
        assert (event["metrics"]["train_loss"] == first_loss["train_loss"]) == same
        assert (again.strategy.values == saved.values) or not same
        for state, packed in again.strategy.states.items():
            for dtype, vector in packed.items():
                equal = torch.equal(vector, saved.tensors[f"{state}.{dtype}"])
                assert equal == same or dtype == "int64"  # batch norm's counters


# --- Whatever averages what clients trained goes on bit by bit


UNLIKE = ("clients=2", "partition=quantity", "partition.fractions=[0.65,0.35]")
GIVEN = ("algorithm=fedavg", "algorithm.network=plain_cnn", "retrain.batch_size=32")
SEARCH = ("algorithm=fed_darts", "search_space.norm=group", "algorithm.batch_size=16")
TRAININGS = {
    "search, averaged": (*SEARCH, "training.momentum=averaged"),
    "averaged": (*GIVEN, "training.momentum=averaged"),
    "gradients": (*GIVEN, "retrain.exchange=gradients"),
    "adam": (*GIVEN, "server_optimizer=adam"),
    "fedex": ("algorithm=fedex", "algorithm.network=plain_cnn", "algorithm.num_configurations=5"),
}
RESUMED_ROUNDS = 3


@pytest.mark.parametrize("training", TRAININGS)
def test_training_that_is_resumed_gives_equal_tensors(training, compose_config, federate, tmp_path):
    config = compose_config(*TRAININGS[training], *UNLIKE)
    stage = "search" if training.startswith("search") else "retrain"
    whole = federate(config, checkpoints=tmp_path / "whole")
    whole.strategy.start(whole.grid, num_rounds=RESUMED_ROUNDS)
    later = shutil.ignore_patterns(f"{stage}-000002.*", f"{stage}-000003.*")
    half = shutil.copytree(tmp_path / "whole", tmp_path / "half", ignore=later)
    resumed = federate(config, checkpoints=half)
    resumed.strategy.start(resumed.grid, num_rounds=RESUMED_ROUNDS)
    assert [e["round"] for e in resumed.named("round")] == [2, 3]
    assert resumed.strategy.values == whole.strategy.values
    states = [f.strategy.states for f in (whole, resumed)]
    assert (MOMENTS in states[0]) == training.endswith("averaged")
    for state, packed in states[0].items():
        assert all(torch.equal(v, states[1][state][d]) for d, v in packed.items()), state


# --- In a ServerApp of the user's own, written as Flower's quickstart-pytorch is


STRATEGIES = ["fed_darts", "fedavg", seldom("fnas"), seldom("random_search")]


@pytest.mark.parametrize("algorithm", STRATEGIES)
def test_a_strategy_runs_in_a_server_app(algorithm, compose_config, federate):
    given = ["algorithm.network=plain_cnn"] if algorithm == "fedavg" else []
    federation = federate(compose_config(f"algorithm={algorithm}", *given))
    strategy = federation.strategy
    app, seen = ServerApp(), {}

    def global_evaluate(server_round, arrays):
        seen[server_round] = arrays.to_torch_state_dict()
        return MetricRecord({"weights": float(len(seen[server_round]))})

    @app.main()
    def main(grid, context):
        num_rounds = context.run_config["num-server-rounds"]
        assert isinstance(num_rounds, int)
        initial = strategy.named_arrays().to_torch_state_dict()
        initial = {n: t / 2 if t.is_floating_point() else t for n, t in initial.items()}
        own = {"train_config": ConfigRecord({"lr": 0.01}), "evaluate_fn": global_evaluate}
        own |= {"initial_arrays": ArrayRecord(initial), "num_rounds": num_rounds}
        result = strategy.start(grid=grid, **own)
        seen["result"] = result.arrays.to_torch_state_dict()
        seen["rounds"] = list(result.train_metrics_clientapp)
        seen["told"] = result.evaluate_metrics_serverapp[0]["weights"]
        seen["central"] = result.train_metrics_clientapp[2]["central_weights"]
        seen["initial"] = initial

    context = Context(1, 1, {}, RecordDict(), {"num-server-rounds": 2})
    app(federation.grid, context)
    assert seen["rounds"] == [1, 2]
    assert seen["told"] == seen["central"] == len(seen[0])
    assert not federation.failed
    assert all(torch.equal(seen[0][name], tensor) for name, tensor in seen["initial"].items())
    assert seen["result"].keys() == seen[0].keys()
    assert all(torch.equal(tensor, seen[2][name]) for name, tensor in seen["result"].items())
    if algorithm != "random_search":  # whose networks are the clients' alone
        assert any(not torch.equal(t, seen[0][name]) for name, t in seen["result"].items())
