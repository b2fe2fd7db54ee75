"""One client that poisons every round, against the three ways to average."""

import pytest
import torch

from fednas_flwr.algorithms.stage_strategies import make_retraining, make_search
from fednas_flwr.protocol.states import TrimmedMean

from ..asked import filled
from .plain import PLAIN_CNN


@pytest.mark.parametrize("aggregate", ["mean", "median", "trimmed_mean"])
def test_a_poisoned_round_stays_between_the_honest_models_but_by_the_mean(aggregate, search):
    def poison(exchange, client, reply):
        return filled(reply, 1e5, reply.states) if client == 1 else reply

    federation = search(f"aggregate={aggregate}", "runtime.quorum=1", change=poison)
    ((_, replies),) = federation.asked
    for state in ("weights", "alphas"):
        models = torch.stack([replies[client].states[state]["float32"] for client in (0, 2)])
        result = federation.strategy.states[state]["float32"]
        low, high = models.min(dim=0).values, models.max(dim=0).values
        assert bool(((low <= result) & (result <= high)).all()) == (aggregate != "mean")


def test_both_stages_average_as_the_configuration_says(compose_config, federate):
    own = ("clients=5", "runtime.quorum=1", "aggregate=trimmed_mean", "aggregate.trim=2")
    fed = federate(compose_config(*own))
    retraining, _ = make_retraining(fed.config, PLAIN_CNN, fed.cohort)
    for strategy in (make_search(fed.config, fed.data[0], fed.cohort), retraining):
        average = strategy.new_average()
        assert isinstance(average, TrimmedMean)
        assert average.trim == 2
