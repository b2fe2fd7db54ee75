"""Our strategies in a ServerApp of the user's own, written as Flower's quickstart-pytorch is."""

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.serverapp import ServerApp

from ..rows import seldom

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
