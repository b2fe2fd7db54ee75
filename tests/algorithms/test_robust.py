"""One client that poisons every round, against the three ways to average."""

import pytest
import torch

from fednas_flwr.algorithms.stage_strategies import make_retraining, make_search
from fednas_flwr.deploy.grids import InProcessGrid
from fednas_flwr.protocol.states import TrimmedMean

HUGE = {"weights": 1e5, "alphas": 1.0, "buffers": 1e5}  # small enough for the gate


class Poisoned(InProcessGrid):
    """Client 1 sends one huge value for all weights, another for all alphas."""

    def answer(self, message):
        reply = super().answer(message)
        if reply.has_content() and message.metadata.dst_node_id == 3:
            for name, record in reply.content.array_records.items():
                if "float32" in record:
                    vector = record["float32"].numpy()
                    record["float32"] = type(record["float32"])(
                        0 * vector + HUGE[name.removeprefix("state.")]
                    )
        return reply


def poisoned_search(compose_config, federate, aggregate):
    unclipped = "algorithm.weights.clip_norm=null"  # else no gate lets so much pass
    config = compose_config("rounds=1", f"aggregate={aggregate}", "runtime.quorum=1", unclipped)
    fed = federate(config)
    grid = Poisoned(fed.grid._client_app, config.clients)
    honest = {}
    average = fed.strategy.average

    def noting(replies):
        replies = list(replies)
        honest.update({client: reply.states for client, reply in replies if client != 1})
        return average(replies)

    fed.strategy.average = noting
    fed.strategy.start(grid, num_rounds=1)
    return fed.strategy.states, honest


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean"])
def test_a_poisoned_round_stays_between_the_honest_models(compose_config, federate, aggregate):
    states, honest = poisoned_search(compose_config, federate, aggregate)
    for state in ("weights", "alphas"):
        models = torch.stack([tensors[state]["float32"] for tensors in honest.values()])
        result = states[state]["float32"]
        assert len(models) == 2
        assert (models.min(dim=0).values <= result).all()
        assert (result <= models.max(dim=0).values).all()


def test_the_weighted_mean_does_not(compose_config, federate):
    states, _ = poisoned_search(compose_config, federate, "mean")
    assert states["weights"]["float32"].min() > HUGE["weights"] / 10


def test_both_stages_average_as_the_configuration_says(compose_config, federate):
    config = compose_config(
        "clients=5", "runtime.quorum=1", "aggregate=trimmed_mean", "aggregate.trim=2"
    )
    fed = federate(config)
    description = {"name": "plain_cnn", "input_shape": [3, 8, 8], "num_classes": 3}
    retraining, _ = make_retraining(fed.config, description, fed.cohort, None)
    for strategy in (make_search(fed.config, fed.data[0], fed.cohort, None), retraining):
        average = strategy.new_average()
        assert isinstance(average, TrimmedMean)
        assert average.trim == 2
