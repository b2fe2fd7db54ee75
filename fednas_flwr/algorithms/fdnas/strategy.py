"""FDNAS: federated ProxylessNAS by weighted averaging."""

from collections.abc import Iterator

import torch

from fednas_flwr.algorithms.base import Metrics, PrivateRound, Replies, RoundStrategy
from fednas_flwr.algorithms.fdnas import CFDNASSettings, FDNASSettings, all_hardware
from fednas_flwr.data.datasets import Prepared
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.states import Packed
from fednas_flwr.search.proxyless import SampledPaths
from fednas_flwr.settings import Config
from fednas_flwr.spaces.costs import check_hardware, hardware_loss
from fednas_flwr.spaces.space import SearchSpace


class FDNAS(RoundStrategy[FDNASSettings]):
    """Zhang et al. (2020), FDNAS, Alg. 1: local epochs on sampled paths, averaged by N_k / N.

    Weights and alphas are averaged alike.

    Attributes:
        keeps_updates: True if ``values`` record how far each client has moved the alphas, by which
            CFDNAS can group clients; set before the first round.
    """

    keeps_updates = False

    def set_up(self) -> None:
        """Create the hardware loss."""
        self._hardware = hardware_loss(self.settings.hardware, self.space)

    def run_round(self, server_round: int, num_rounds: int) -> Metrics:
        """Search locally everywhere, average weights, alphas and buffers."""
        paths = SampledPaths(server_round <= self.settings.warm_up_rounds, self._hardware)
        return self.search_locally(server_round, num_rounds, paths=paths)

    def average(self, replies: Replies) -> tuple[dict[str, Packed], Metrics]:
        """Average as :meth:`RoundStrategy.average` does; keep each client's update if asked to."""
        return super().average(self._keep(replies) if self.keeps_updates else replies)

    def updates(self) -> dict[int, torch.Tensor]:
        """The sum of each client's updates of the alphas over the rounds, float64 [A].

        With privacy they are sums of what the client has released, and cost nothing more.
        """
        return {
            int(client): torch.tensor(moved, dtype=torch.float64)
            for client, moved in self.values.get("updates", {}).items()
        }

    def _keep(self, replies: Replies) -> Iterator[tuple[int, Reply]]:
        before = _flat(self.states["alphas"])
        earlier = self.updates()
        updates = self.values.setdefault("updates", {})
        for client, reply in replies:
            moved = _flat(reply.states["alphas"]) - before
            updates[str(client)] = (earlier.get(client, 0.0) + moved).tolist()
            yield client, reply

    @classmethod
    def releases(cls, settings: FDNASSettings, private: PrivateRound) -> list[PlannedRelease]:
        """The releases of every local step's gradients; the warm-up releases no alphas."""
        warm_up = private.number <= settings.warm_up_rounds
        states = ("weights",) if warm_up else ("weights", "alphas")
        return private.gradients(dict.fromkeys(states, "train.search"))

    @classmethod
    def check(cls, config: Config, prepared: Prepared, space: SearchSpace) -> None:
        """Refuse targets that no network reaches, and groups that cannot be formed."""
        check_hardware(all_hardware(config.algorithm), space)
        if isinstance(config.algorithm, CFDNASSettings):
            config.algorithm.check_groups(config)


def _flat(alphas: Packed) -> torch.Tensor:
    return torch.cat(list(alphas.values())).double()
