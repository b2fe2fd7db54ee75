"""FedAvg of one network: retraining of derived networks, and fixed networks as baselines.

FedProx is the same with a proximal term in the clients' steps, FedAdam, FedYogi and FedAdagrad with
an optimiser of the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from torch import nn

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.requests import LocalTraining, Train
from fednas_flwr.exchange.states import Packed, Tensors
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.search.settings import SGD
from fednas_flwr.strategies.base import RoundStrategy, Shared, evaluates
from fednas_flwr.strategies.server_optimizer import ServerOptimizer

SPLITS = ("train", "validation")  # what is trained on where nothing is held out


def trained_on(evaluate_every: int) -> tuple[str, ...]:
    """Return the splits to train on: those of validation are held out where they are measured."""
    return SPLITS[:1] if evaluate_every else SPLITS


def held_out_metrics(
    strategy: RoundStrategy,
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


class FedAvg(RoundStrategy):
    """McMahan et al. (2017), arXiv 1602.05629, Alg. 1; C is ``clients_per_round``.

    Args:
        network: The network to train, newly initialised.
        courier: Reaches the clients.
        description: What clients build the same network from, see ``clients.Client.network``.
        local_epochs: Passes over each client's records per round.
        batch_size: Records per step.
        weights: SGD, annealed over the rounds.
        auxiliary_weight: Weight of the auxiliary head's loss; 0 without one.
        drop_path_prob: Drop-path probability of the last round; rises linearly from 0.
        proximal: mu of FedProx, at least 0; see :class:`~fednas_flwr.search.descent.Proximal`.
        evaluate_every: Rounds between evaluations on validation records, which are then not trained
            on; 0 is never, and they are.
        optimizer: Of the server, which steps towards the clients' average; None takes the average.
        **shared: See :class:`RoundStrategy`.
    """

    def __init__(
        self,
        network: nn.Module,
        courier: Courier,
        *,
        description: Mapping[str, Any],
        local_epochs: int,
        batch_size: int,
        weights: SGD,
        auxiliary_weight: float = 0.0,
        drop_path_prob: float = 0.0,
        proximal: float = 0.0,
        evaluate_every: int = 0,
        optimizer: ServerOptimizer | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        super().__init__(network, courier, stage="retrain", **shared)
        self.description, self.weights = dict(description), weights
        self.local_epochs, self.batch_size = local_epochs, batch_size
        self.auxiliary_weight, self.drop_path_prob = auxiliary_weight, drop_path_prob
        self.proximal, self.optimizer = proximal, optimizer
        self.evaluate_every = evaluate_every

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Train locally everywhere, average the weights, and measure them where that is due."""
        local = LocalTraining(
            self.description,
            "+".join(trained_on(self.evaluate_every)),
            self.amount(self.local_epochs, self.batch_size),
            self.client_weights(self.weights.at_round(server_round, num_rounds)),
            self.auxiliary_weight,
            self.drop_path_prob * (server_round - 1) / num_rounds,
            self.proximal,
        )
        metrics = self.train("train.weights", Train(local, site=self.site), self.weights.momentum)
        return metrics | held_out_metrics(
            self, self.description, self.evaluate_every, server_round, num_rounds
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


def releases(
    server_round: int,
    num_rounds: int,
    *,
    batch_size: float | None,
    local_steps: int,
    norm: float,
    splits: Sequence[str] = SPLITS,
) -> list[PlannedRelease]:
    """Return what a round releases of each client: every local step's gradient."""
    terms = (tuple(splits), batch_size, local_steps, norm)
    return [PlannedRelease("retrain", "train.weights", "weights", *terms)]
