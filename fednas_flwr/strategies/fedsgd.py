"""FedSGD of one network: retraining by an exchange of gradients for every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, Unpack

from torch import nn

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.messages import Reply
from fednas_flwr.exchange.requests import TakeNetworkGradient
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.search.descent import make_sgd
from fednas_flwr.search.settings import SGD
from fednas_flwr.strategies.base import Shared, mean_metrics
from fednas_flwr.strategies.fedavg import SPLITS, held_out_metrics, trained_on
from fednas_flwr.strategies.gradients import GradientStrategy


class FedSGD(GradientStrategy):
    """McMahan et al. (2017), arXiv 1602.05629, section 2, with a round's clients in every step.

    Clients return sums of gradients over batches of theirs, and the server steps along ``sum_k G_k
    / sum_k B_k`` by SGD, whose momentum never begins anew: one client's training is plain SGD.
    With privacy it is DP-SGD (Abadi et al. 2016, arXiv 1607.00133, Alg. 1), of which secure sums
    share the noise.

    A round is of as many steps as in :class:`~fednas_flwr.strategies.fedavg.FedAvg` and so, without
    privacy, of as many as the median client takes for its epochs.

    Deviations: batches of ``batch_size`` in place of all records; momentum and decay.

    Args:
        network: The network to train, newly initialised.
        courier: Reaches the clients.
        description: What clients build the same network from, see ``clients.Client.network``.
        local_epochs: Passes over the median client's records per round.
        batch_size: Of each client, in every step.
        weights: SGD, annealed over the rounds.
        auxiliary_weight: Weight of the auxiliary head's loss; 0 without one.
        drop_path_prob: Drop-path probability of the last round; rises linearly from 0.
        evaluate_every: See :class:`~fednas_flwr.strategies.fedavg.FedAvg`.
        **shared: See :class:`RoundStrategy`; the server's own SGD has the momentum.
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
        evaluate_every: int = 0,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        shared["momentum"] = "reset"
        super().__init__(network, courier, stage="retrain", **shared)
        self.description, self.weights = dict(description), weights
        self.local_epochs, self.batch_size = local_epochs, batch_size
        self.auxiliary_weight, self.drop_path_prob = auxiliary_weight, drop_path_prob
        self.evaluate_every = evaluate_every
        self.optimizers = {"weights": make_sgd(self.states["weights"].values(), weights)}

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Take the steps of a round, one exchange each."""
        sgd = self.weights.at_round(server_round, num_rounds)
        steps = self._steps()
        self.optimizers["weights"].param_groups[0]["lr"] = sgd.lr
        told: list[Reply] = []
        for step in range((server_round - 1) * steps, server_round * steps):
            request = TakeNetworkGradient(
                self.description,
                "+".join(trained_on(self.evaluate_every)),
                step,
                None if self.private is not None else self.batch_size,
                self.auxiliary_weight,
                self.drop_path_prob * (server_round - 1) / num_rounds,
                self.site,
            )
            replies = self.ask(
                "train.network_gradient", request, states=self.states, layouts=self.layouts
            )
            told += self.descend(replies, ("weights",), clip_norm=sgd.clip_norm)
        return mean_metrics(told) | held_out_metrics(
            self, self.description, self.evaluate_every, server_round, num_rounds
        )

    def _steps(self) -> int:
        """Return the number of steps of a round."""
        if self.private is not None and self.private.local_steps is not None:
            return self.private.local_steps
        declared = [known.get("splits", {}) for known in self.courier.facts.values()]
        splits = trained_on(self.evaluate_every)
        records: float = median(sum(own.get(split, 0) for split in splits) for own in declared)
        return self.local_epochs * max(1, math.ceil(records / self.batch_size))


def releases(
    server_round: int,
    num_rounds: int,
    *,
    batch_size: float | None,
    local_steps: int,
    norm: float,
    secure_sum: bool,
) -> list[PlannedRelease]:
    """Return what a round releases of each client: every step's gradient.

    With secure sums clients share its noise: a reply is a clipped sum at weights that all were
    sent.
    """
    terms = (SPLITS, batch_size, local_steps, norm)
    return [
        PlannedRelease("retrain", "train.network_gradient", "weights", *terms, shared=secure_sum)
    ]
