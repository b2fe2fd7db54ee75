"""FedSGD of one network: retraining by an exchange of gradients for every step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

from fednas_flwr.algorithms.base import mean_metrics
from fednas_flwr.algorithms.fedavg.strategy import (
    SPLITS,
    held_out_metrics,
    trained_on,
    training_settings,
)
from fednas_flwr.algorithms.gradient_steps import GradientStrategy
from fednas_flwr.algorithms.private_rounds import PrivateRound
from fednas_flwr.privacy.plan import PlannedRelease
from fednas_flwr.protocol.messages import Reply
from fednas_flwr.protocol.requests import TakeNetworkGradient
from fednas_flwr.search.optimizer_step import make_sgd
from fednas_flwr.settings import AlgorithmSettings


class FedSGD(GradientStrategy[AlgorithmSettings]):
    """McMahan et al. (2017), arXiv 1602.05629, section 2, with a round's clients in every step.

    Clients return sums of gradients over batches of theirs, and the server steps along ``sum_k G_k
    / sum_k B_k`` by SGD, whose momentum never begins anew: one client's training is plain SGD.
    With privacy it is DP-SGD (Abadi et al. 2016, arXiv 1607.00133, Alg. 1), of which secure sums
    share the noise.

    A round is of as many steps as in :class:`~fednas_flwr.algorithms.fedavg.strategy.FedAvg` and
    so, without privacy, of as many as the median client takes for its epochs.

    Deviations: batches of ``batch_size`` in place of all records; momentum and decay.
    """

    def set_up(self) -> None:
        """Make the server's optimiser."""
        self.weights, self.drop_path_prob = training_settings(self.config, self.found_configuration)
        self.optimizers = {"weights": make_sgd(self.states["weights"].values(), self.weights)}

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Take the steps of a round, one exchange each."""
        sgd, retrain = self.weights.at_round(server_round, num_rounds), self.config.retrain
        steps = self._steps()
        self.optimizers["weights"].param_groups[0]["lr"] = sgd.lr
        told: list[Reply] = []
        for step in range((server_round - 1) * steps, server_round * steps):
            request = TakeNetworkGradient(
                network=self.description,
                split="+".join(trained_on(retrain.evaluate_every)),
                step=step,
                batch_size=None if self.private is not None else retrain.batch_size,
                auxiliary_weight=retrain.auxiliary_weight,
                drop_path_prob=self.drop_path_prob * (server_round - 1) / num_rounds,
                site=self.site,
            )
            replies = self.ask(
                "train.network_gradient", request, states=self.states, layouts=self.layouts
            )
            told += self.descend(replies, ("weights",), clip_norm=sgd.clip_norm)
        return mean_metrics(told) | held_out_metrics(
            self, self.description, retrain.evaluate_every, server_round, num_rounds
        )

    def _steps(self) -> int:
        """Return the number of steps of a round."""
        if self.private is not None and self.private.local_steps is not None:
            return self.private.local_steps
        retrain = self.config.retrain
        declared = [known.get("splits", {}) for known in self.cohort.properties.values()]
        splits = trained_on(retrain.evaluate_every)
        records: float = median(sum(own.get(split, 0) for split in splits) for own in declared)
        return retrain.local_epochs * max(1, math.ceil(records / retrain.batch_size))

    @classmethod
    def releases(cls, settings: AlgorithmSettings, private: PrivateRound) -> list[PlannedRelease]:
        """Every step's gradient.

        With secure sums clients share its noise: a reply is a clipped sum at weights that all were
        sent.
        """
        actions, shared = {"weights": "train.network_gradient"}, private.secure_sum
        return private.gradients(actions, splits=SPLITS, shared=shared)
