"""FedAvg of one network: retraining of derived networks, and fixed networks as baselines.

FedProx is the same with a proximal term in the clients' steps, FedAdam, FedYogi and FedAdagrad with
an optimiser of the server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fednas_flwr.algorithms.base import RoundStrategy, evaluates
from fednas_flwr.algorithms.fedavg import FedAvgSettings
from fednas_flwr.algorithms.fedavg.flower_optimizer import ServerOptimizer
from fednas_flwr.algorithms.private_rounds import PrivateRound
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.requests import LocalTraining, Train
from fednas_flwr.protocol.states import Packed, Tensors
from fednas_flwr.settings import AlgorithmSettings, Config
from fednas_flwr.settings.optimizers import SGD, Configuration

SPLITS = ("train", "validation")  # what is trained on where nothing is held out


def trained_on(evaluate_every: int) -> tuple[str, ...]:
    """Return the splits to train on: those of validation are held out where they are measured."""
    return SPLITS[:1] if evaluate_every else SPLITS


def training_settings(config: Config, configuration: Configuration | None) -> tuple[SGD, float]:
    """The optimiser of retraining and the drop-path probability of its last round.

    Args:
        config: Gives them where the search has found no others.
        configuration: The hyper-parameters that the search has found, None if none.
    """
    weights = config.retrain.weights
    if configuration is None:
        return weights, config.retrain.drop_path_prob
    return configuration.annealed(weights), configuration.dropout


def held_out_metrics(
    strategy: RoundStrategy[Any],
    network: Mapping[str, Any],
    evaluate_every: int,
    server_round: int,
    num_rounds: int,
) -> dict[str, float]:
    """Return the validation metrics of a round, every so many rounds and after the last; or none.

    Args:
        strategy: Whose model it is.
        network: Its description.
        evaluate_every: 0 is never.
        server_round: From 1.
        num_rounds: Number of rounds.
    """
    if not evaluate_every or not evaluates(evaluate_every, server_round, num_rounds):
        return {}
    return strategy.validation_metrics(network)


class FedAvg(RoundStrategy[AlgorithmSettings]):
    """McMahan et al. (2017), arXiv 1602.05629, Alg. 1; C is ``sampling.per_round``.

    The settings of ``retrain`` say how; ``drop_path_prob`` rises linearly from 0 to the last round.
    The server steps towards the clients' average where it has an optimiser.
    """

    def set_up(self) -> None:
        """Make the optimisers of clients and server."""
        self.weights, self.drop_path_prob = training_settings(self.config, self.found_configuration)
        self.proximal, self.optimizer = 0.0, ServerOptimizer.of(self.config.server_optimizer)
        if isinstance(self.config.algorithm, FedAvgSettings):
            self.proximal = self.config.algorithm.proximal

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Train locally everywhere, average the weights, and measure them where that is due."""
        retrain = self.config.retrain
        local = LocalTraining(
            self.description,
            "+".join(trained_on(retrain.evaluate_every)),
            self.amount(retrain.local_epochs, retrain.batch_size),
            self.client_weights(self.weights.at_round(server_round, num_rounds)),
            retrain.auxiliary_weight,
            self.drop_path_prob * (server_round - 1) / num_rounds,
            self.proximal,
        )
        metrics = self.train(
            "train.weights", Train(local=local, site=self.site), self.weights.momentum
        )
        return metrics | held_out_metrics(
            self, self.description, retrain.evaluate_every, server_round, num_rounds
        )

    def move(self, average: dict[str, Packed], momentum: float) -> None:
        """Step towards the clients' average by the server's optimiser, or take it as it is."""
        if self.optimizer is not None:
            before = self.states["weights"]
            average["weights"] = self.optimizer.step(average["weights"], before, self._round)
        super().move(average, momentum)

    def server_tensors(self) -> Tensors:
        """Return the moments of the server's optimiser."""
        return {} if self.optimizer is None else self.optimizer.tensors()

    def load_server_tensors(self, tensors: Tensors) -> None:
        """Take them back."""
        if self.optimizer is not None:
            self.optimizer.load(tensors)

    @classmethod
    def releases(cls, settings: AlgorithmSettings, private: PrivateRound) -> list[PlannedRelease]:
        """Every local step's gradient."""
        return private.gradients({"weights": "train.weights"}, splits=SPLITS)
