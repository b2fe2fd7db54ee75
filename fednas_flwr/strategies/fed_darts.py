"""Federated DARTS, "DARTS (f)" in FEATHERS' tables, and FedNAS, which is another local rule.

Every round each client searches for some local epochs from the global weights and alphas, and the
server averages both with weights N_k / N.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict

from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.messages import Reply
from fednas_flwr.search.settings import SGD, Adam
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import RoundStrategy


class FedDARTS(RoundStrategy):
    """FedAvg of DARTS' alternating steps (Seng et al., 2023, FEATHERS, section 4, baseline).

    With ``rule="mixed_level"`` it is FedNAS (He et al., 2020, arXiv 2004.08546, Alg. 1). Clients
    keep no state between rounds: momentum and Adam's moments start anew each round.
    """

    def __init__(
        self,
        supernet: Supernet,
        courier: Courier,
        *,
        space: SearchSpace,
        rule: str,
        local_epochs: int,
        batch_size: int,
        weights: SGD,
        alphas: Adam,
        validation_weight: float = 1.0,
        checkpoints: CheckpointFolder | None = None,
    ) -> None:
        """Take the constants; see ``search.local_search`` for ``rule``."""
        super().__init__(supernet, courier, space=space, checkpoints=checkpoints)
        self.weights = weights
        self.settings = {
            "rule": rule,
            "validation_weight": validation_weight,
            "local_epochs": local_epochs,
            "batch_size": batch_size,
            "alphas": asdict(alphas),
        }

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Search locally everywhere, average weights, alphas and buffers."""
        self.states, metrics = self.average(self.search(server_round, num_rounds))
        return metrics

    def search(self, server_round: int, num_rounds: int) -> Iterator[tuple[int, Reply]]:
        """Yield every client's weights, alphas and buffers after its local epochs."""
        weights = asdict(self.weights.at_round(server_round, num_rounds))
        return self.ask(
            "train.search",
            settings={**self.settings, "weights": weights},
            states=self.states,
            layouts=self.layouts,
        )
