"""FedAvg of one network: retraining of derived networks, and fixed networks as baselines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from torch import nn

from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.search.settings import SGD
from fednas_flwr.strategies.base import RoundStrategy


class FedAvg(RoundStrategy):
    """McMahan et al. (2017), arXiv 1602.05629, Alg. 1, with all clients in every round.

    Args:
        network: The network to train, newly initialised.
        courier: Reaches the clients.
        description: What clients build the same network from, see ``clients.Client.network``.
        local_epochs: Passes over each client's records per round.
        batch_size: Records per step.
        weights: SGD, annealed over the rounds.
        auxiliary_weight: Weight of the auxiliary head's loss; 0 without one.
        drop_path_prob: Drop-path probability of the last round; rises linearly from 0.
        checkpoints: Where the state goes after every round.
    """

    def __init__(
        self,
        network: nn.Module,
        courier: Courier,
        *,
        description: Mapping[str, object],
        local_epochs: int,
        batch_size: int,
        weights: SGD,
        auxiliary_weight: float = 0.0,
        drop_path_prob: float = 0.0,
        checkpoints: CheckpointFolder | None = None,
    ) -> None:
        """See the class."""
        super().__init__(network, courier, checkpoints=checkpoints, stage="retrain")
        self.weights = weights
        self.drop_path_prob = drop_path_prob
        self.settings = {
            "network": description,
            "local_epochs": local_epochs,
            "batch_size": batch_size,
            "auxiliary_weight": auxiliary_weight,
            "split": "train+validation",
        }

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Train locally everywhere on train and validation records, average the weights."""
        settings = {
            **self.settings,
            "weights": asdict(self.weights.at_round(server_round, num_rounds)),
            "drop_path_prob": self.drop_path_prob * (server_round - 1) / num_rounds,
        }
        replies = self.ask(
            "train.weights", settings=settings, states=self.states, layouts=self.layouts
        )
        self.states, metrics = self.average(replies)
        return metrics
