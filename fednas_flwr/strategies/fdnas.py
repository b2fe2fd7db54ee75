"""FDNAS: federated ProxylessNAS by weighted averaging."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.search.settings import SGD, Adam
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import RoundStrategy


class FDNAS(RoundStrategy):
    """Zhang et al. (2020), FDNAS, Alg. 1: local epochs on sampled paths, averaged by N_k / N.

    Weights and alphas are averaged alike. Clients keep no state between rounds: momentum and Adam's
    second moments start anew each round.

    Args:
        supernet: Of the MBConv space; the initial global state.
        courier: Reaches the clients.
        space: The supernet's search space.
        gates: ``two`` or ``full``, see ``search.gates``.
        warm_up_rounds: First rounds, which train weights on uniformly drawn paths only.
        local_epochs: Passes over each client's training records per round.
        batch_size: Records per step.
        weights: SGD with Nesterov's momentum, annealed over the rounds.
        alphas: Adam with betas (0, .999).
        hardware: What cost does to the loss of the alphas, see ``hardware.costs.loss_settings``;
            None leaves it out.
        sparse: Whether clients send only tensors that they have changed, and so only the paths that
            they have trained. The average is the same to the last bit.
        checkpoints: Where the state goes after every round.
    """

    def __init__(
        self,
        supernet: Supernet,
        courier: Courier,
        *,
        space: SearchSpace,
        gates: str,
        warm_up_rounds: int,
        local_epochs: int,
        batch_size: int,
        weights: SGD,
        alphas: Adam,
        hardware: Mapping[str, object] | None = None,
        sparse: bool = False,
        checkpoints: CheckpointFolder | None = None,
    ) -> None:
        """See the class."""
        super().__init__(supernet, courier, space=space, checkpoints=checkpoints)
        self.weights, self.warm_up_rounds, self.sparse = weights, warm_up_rounds, sparse
        self.settings = {
            "gates": gates,
            "local_epochs": local_epochs,
            "batch_size": batch_size,
            "alphas": asdict(alphas),
            "hardware": hardware,
        }

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Search locally everywhere, average weights, alphas and buffers."""
        settings = {
            **self.settings,
            "weights": asdict(self.weights.at_round(server_round, num_rounds)),
            "warm_up": server_round <= self.warm_up_rounds,
        }
        self.states, metrics = self.average(
            self.ask(
                "train.search",
                settings=settings,
                states=self.states,
                layouts=self.layouts,
                sparse=self.sparse,
            )
        )
        return metrics
