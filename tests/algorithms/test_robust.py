"""One client that poisons every round, against the three ways to average."""

from dataclasses import replace

import pytest
import torch

from fednas_flwr.algorithms.stage_strategies import make_retraining, make_search
from fednas_flwr.protocol.states import TrimmedMean

from ..asked import spied
from .plain import PLAIN_CNN

HUGE = 1e5


def poisoned_search(compose_config, federate, aggregate):
    """The states after a round in which client 1 sent one huge value, and the honest models."""
    own = ("rounds=1", f"aggregate={aggregate}", "runtime.quorum=1")
    fed = federate(compose_config(*own))

    def poison(exchange, client, reply):
        states = {
            name: {dtype: torch.full_like(vector, HUGE) for dtype, vector in packed.items()}
            for name, packed in reply.states.items()
        }
        return replace(reply, states=states) if client == 1 else reply

    asked = spied(fed, poison)
    fed.strategy.start(fed.grid, num_rounds=1)
    honest = [own.states for _, replies in asked for client, own in replies.items() if client != 1]
    return fed.strategy.states, honest


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean"])
def test_a_poisoned_round_stays_between_the_honest_models(compose_config, federate, aggregate):
    states, honest = poisoned_search(compose_config, federate, aggregate)
    assert len(honest) == 2
    for state in ("weights", "alphas"):
        models = torch.stack([tensors[state]["float32"] for tensors in honest])
        result = states[state]["float32"]
        assert (models.min(dim=0).values <= result).all()
        assert (result <= models.max(dim=0).values).all()


def test_the_weighted_mean_does_not(compose_config, federate):
    states, _ = poisoned_search(compose_config, federate, "mean")
    assert states["weights"]["float32"].min() > HUGE / 10


def test_both_stages_average_as_the_configuration_says(compose_config, federate):
    own = ("clients=5", "runtime.quorum=1", "aggregate=trimmed_mean", "aggregate.trim=2")
    fed = federate(compose_config(*own))
    retraining, _ = make_retraining(fed.config, PLAIN_CNN, fed.cohort, None)
    for strategy in (make_search(fed.config, fed.data[0], fed.cohort, None), retraining):
        average = strategy.new_average()
        assert isinstance(average, TrimmedMean)
        assert average.trim == 2
