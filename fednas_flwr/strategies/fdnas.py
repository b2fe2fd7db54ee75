"""FDNAS: federated ProxylessNAS by weighted averaging."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Unpack

import torch
from torch import Tensor

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.messages import Reply
from fednas_flwr.exchange.requests import LocalSearch, Search
from fednas_flwr.exchange.states import Packed
from fednas_flwr.hardware.costs import HardwareTerms
from fednas_flwr.privacy.plan import PlannedRelease, gradient_releases
from fednas_flwr.search.proxyless import SampledPaths
from fednas_flwr.search.settings import SGD, Adam
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import RoundStrategy, Shared


class FDNAS(RoundStrategy):
    """Zhang et al. (2020), FDNAS, Alg. 1: local epochs on sampled paths, averaged by N_k / N.

    Weights and alphas are averaged alike.

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
        hardware: What cost does to the loss of the alphas; None leaves it out.
        sparse: Whether clients send only tensors that they have changed, and so only the paths that
            they have trained. The average is the same to the last bit.
        **shared: See :class:`RoundStrategy`.

    Attributes:
        keeps_updates: Whether ``values`` hold by how much each client has moved the alphas, by
            which CFDNAS can group clients; set before the first round.
    """

    keeps_updates = False

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
        hardware: HardwareTerms | None = None,
        sparse: bool = False,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        super().__init__(supernet, courier, space=space, **shared)
        self.gates, self.warm_up_rounds, self.hardware = gates, warm_up_rounds, hardware
        self.local_epochs, self.batch_size, self.sparse = local_epochs, batch_size, sparse
        self.weights, self.alphas_settings = weights, alphas

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Search locally everywhere, average weights, alphas and buffers."""
        weights = self.weights.at_round(server_round, num_rounds)
        request = self.request(weights, warm_up=server_round <= self.warm_up_rounds)
        return self.train("train.search", request, self.weights.momentum)

    def average(
        self, replies: Iterable[tuple[int, Reply]]
    ) -> tuple[dict[str, Packed], dict[str, float]]:
        """Return what :meth:`RoundStrategy.average` does, and keep each client's update."""
        return super().average(self._keep(replies) if self.keeps_updates else replies)

    def updates(self) -> dict[int, Tensor]:
        """Return by client the sum of its updates of the alphas over the rounds, float64 [A].

        With privacy these are sums of what the client has released, and cost nothing more.
        """
        return {
            int(client): torch.tensor(moved, dtype=torch.float64)
            for client, moved in self.values.get("updates", {}).items()
        }

    def _keep(self, replies: Iterable[tuple[int, Reply]]) -> Iterator[tuple[int, Reply]]:
        before = _flat(self.states["alphas"])
        earlier = self.updates()
        kept = self.values.setdefault("updates", {})
        for client, reply in replies:
            moved = _flat(reply.states["alphas"]) - before
            kept[str(client)] = (earlier.get(client, 0.0) + moved).tolist()
            yield client, reply

    def request(self, weights: SGD, *, warm_up: bool) -> Search:
        """Return what asks for weights, alphas and buffers after a client's local epochs."""
        local = LocalSearch(
            self.amount(self.local_epochs, self.batch_size),
            self.client_weights(weights),
            self.alphas_settings,
            paths=SampledPaths(self.gates, warm_up, self.hardware),
        )
        return Search(local, sparse=self.sparse, site=self.site)


def _flat(alphas: Packed) -> Tensor:
    return torch.cat(list(alphas.values())).double()


def releases(
    server_round: int,
    num_rounds: int,
    *,
    warm_up_rounds: int,
    batch_size: float | None,
    local_steps: int,
    norms: Mapping[str, float],
) -> list[PlannedRelease]:
    """Return what a round releases of each client; the warm-up releases no alphas."""
    states = ("weights",) if server_round <= warm_up_rounds else ("weights", "alphas")
    verbs = dict.fromkeys(states, "train.search")
    return gradient_releases(verbs, batch_size=batch_size, steps=local_steps, norms=norms)
