"""FedEx: FedAvg of one network whose clients draw their hyper-parameters from a distribution."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack

from torch import nn

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.messages import Reply
from fednas_flwr.exchange.requests import LocalTraining, Train
from fednas_flwr.randomness import make_generator
from fednas_flwr.search.exponentiated_gradient import Theta, Trial
from fednas_flwr.search.settings import Configuration, ThetaSettings
from fednas_flwr.strategies.base import RoundStrategy, Shared


class FedEx(RoundStrategy):
    """Khodak et al. (2021), arXiv 2106.04502, Alg. 2, over FedAvg.

    Deviations: the server draws for the clients, who need to know nothing of theta; a client's
    loss counts by its training records, not its validation records, which are the same share
    of every client's, and one that has none moves nothing; learning rates are not annealed.
    Validation records are not trained on.

    Args:
        network: The network to train, newly initialised.
        courier: Reaches the clients.
        description: What clients build the same network from, see ``clients.Client.network``.
        configurations: What theta is a distribution over; of each the learning rate, momentum and
            decay of the weights and the drop-path probability.
        theta: Its constants.
        local_epochs: Passes over each client's training records per round.
        batch_size: Records per step.
        clip_norm: Of batch gradients; None does not clip.
        auxiliary_weight: Weight of the auxiliary head's loss; 0 without one.
        loss_bound: A client's validation loss counts for at most this much, in nats.
        seed: The run's seed; a client's draw comes from (seed, round, client).
        **shared: See :class:`RoundStrategy`.
    """

    def __init__(
        self,
        network: nn.Module,
        courier: Courier,
        *,
        description: Mapping[str, Any],
        configurations: Sequence[Configuration],
        theta: ThetaSettings,
        local_epochs: int,
        batch_size: int,
        clip_norm: float | None,
        auxiliary_weight: float,
        loss_bound: float,
        seed: int,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        super().__init__(network, courier, stage="retrain", **shared)
        self.configurations = list(configurations)
        self.theta = Theta.of(len(self.configurations), theta)
        self.values = {"theta": self.theta.to_json()}
        self.clip_norm, self.loss_bound, self.seed = clip_norm, loss_bound, seed
        self.description, self.auxiliary_weight = dict(description), auxiliary_weight
        self.local_epochs, self.batch_size = local_epochs, batch_size

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Draw a configuration for every client, train, average the weights, move theta."""
        self.theta = self.theta.with_json(self.values["theta"])
        drawn = {
            client: self.theta.draw(make_generator(self.seed, "theta", server_round, client))
            for client in self.candidates()
        }
        trials: list[Trial] = []

        def observed() -> Iterator[tuple[int, Reply]]:
            for client, reply in self.ask(
                "train.weights",
                self._training(self.configurations[0]),
                own_settings={c: self._training(self.configurations[i]) for c, i in drawn.items()},
                states=self.states,
                layouts=self.layouts,
            ):
                if "validation_loss" in reply.metrics:
                    trials.append(Trial(drawn[client], self._loss(reply), reply.num_examples))
                yield client, reply

        self.states, metrics = self.average(observed())
        self.theta = self.theta.updated(trials)
        self.values = {"theta": self.theta.to_json()}
        return metrics | {
            "lr": self.configurations[self.theta.best()].lr,
            "theta_entropy": self.theta.entropy(),
        }

    def _training(self, configuration: Configuration) -> Train:
        """Return what a client with a configuration is asked."""
        local = LocalTraining(
            self.description,
            "train",
            self.amount(self.local_epochs, self.batch_size),
            configuration.sgd(self.clip_norm),
            self.auxiliary_weight,
            configuration.dropout,
        )
        return Train(local, validates=True)

    def _loss(self, reply: Reply) -> float:
        """Return a client's loss, held to the bound: one client's nonsense must not choose."""
        loss = reply.metrics["validation_loss"]
        return min(max(loss, 0.0), self.loss_bound) if math.isfinite(loss) else self.loss_bound
