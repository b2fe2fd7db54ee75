"""Federated DARTS, "DARTS (f)" in FEATHERS' tables, and FedNAS, which is another local rule.

Every round each client searches for some local epochs from the global weights and alphas, and the
server averages both with weights N_k / N.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.requests import LocalSearch, Search
from fednas_flwr.privacy.plan import PlannedRelease, gradient_releases
from fednas_flwr.search.local_search import Alternating
from fednas_flwr.search.regularisation import rising
from fednas_flwr.search.settings import SGD, Adam, Temperatures
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import RoundStrategy, Shared


class FedDARTS(RoundStrategy):
    """FedAvg of DARTS' alternating steps (Seng et al., 2023, FEATHERS, section 4, baseline).

    With the rule ``mixed_level`` it is FedNAS (He et al., 2020, arXiv 2004.08546, Alg. 1).

    With ``temperatures`` the steps are GDAS' (``search.gumbel``).

    Args:
        supernet: Newly initialised; it is only read.
        courier: Reaches the clients.
        space: Search space of the supernet.
        alternating: The clients' steps.
        local_epochs: Passes over each client's training records per round.
        batch_size: Records per step.
        weights: SGD, annealed over the rounds.
        alphas: Adam.
        beta_decay: Weight of beta-DARTS' regulariser in the last round; it rises linearly.
        temperatures: Of GDAS' single paths; None computes all ops.
        **shared: See :class:`RoundStrategy`.
    """

    def __init__(
        self,
        supernet: Supernet,
        courier: Courier,
        *,
        space: SearchSpace,
        alternating: Alternating,
        local_epochs: int,
        batch_size: int,
        weights: SGD,
        alphas: Adam,
        beta_decay: float = 0.0,
        temperatures: Temperatures | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        super().__init__(supernet, courier, space=space, **shared)
        self.alternating, self.weights, self.alphas_settings = alternating, weights, alphas
        self.local_epochs, self.batch_size = local_epochs, batch_size
        self.beta_decay, self.temperatures = beta_decay, temperatures

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Search locally everywhere, average weights, alphas and buffers."""
        falling = self.temperatures
        temperature = None if falling is None else falling.at_round(server_round, num_rounds)
        local = LocalSearch(
            self.amount(self.local_epochs, self.batch_size),
            self.client_weights(self.weights.at_round(server_round, num_rounds)),
            self.alphas_settings,
            alternating=replace(
                self.alternating,
                beta_decay=rising(self.beta_decay, server_round, num_rounds),
                temperature=temperature,
            ),
        )
        request = Search(local, site=self.site)
        return self.train("train.search", request, self.weights.momentum)


def releases(
    server_round: int,
    num_rounds: int,
    *,
    batch_size: float | None,
    local_steps: int,
    norms: Mapping[str, float],
) -> list[PlannedRelease]:
    """Return what a round releases of each client: every local step's two gradients."""
    verbs = dict.fromkeys(("weights", "alphas"), "train.search")
    return gradient_releases(verbs, batch_size=batch_size, steps=local_steps, norms=norms)
