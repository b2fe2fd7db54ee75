"""Successive halving: a pool is trained side by side and halved by validation accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import nn

from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.requests import LocalTraining, RewardCandidates, Train
from fednas_flwr.exchange.states import pack, unpack
from fednas_flwr.privacy.plan import PlannedRelease, rewards_release
from fednas_flwr.randomness import make_generator
from fednas_flwr.search.pool import name_before
from fednas_flwr.search.settings import SGD
from fednas_flwr.search_spaces.genotype import Genotype, from_json, to_json
from fednas_flwr.search_spaces.space import SearchSpace
from fednas_flwr.strategies.base import RoundStrategy, Shared


class SuccessiveHalving(RoundStrategy):
    """Successive halving (Jamieson and Talwalkar 2016, arXiv 1502.07943, Fig. 3), by FedAvg.

    The server chooses a pool without a record. In every round all clients train all networks that
    are left, in one exchange (``train.weights``), and each network is averaged. After the last
    round of a rung one more exchange (``evaluate.candidates``) measures them on validation records,
    and the best ``1 / eta`` of them stay and train on. The one left after the last round is found.
    Of three or more clients without privacy none decides: see ``exchange.robust.median_rewards``.

    Deviations: rungs have equal numbers of rounds, as nearly as their number allows, so that the
    first costs most; of the text all rungs cost the same, and survivors train longer. The learning
    rate is annealed over all rounds, since training is continued.

    With ``rewarded="local"`` no network is averaged: each round is one exchange, in which all
    clients train all networks that are left from their first weights, and return how fast each
    trains, see ``clients.verbs.trained_rewards``. The averages of a few local epochs are poor
    models of deep networks, and rank them by chance. Not with privacy.

    With privacy each step is one release of all networks' gradients, see ``NoisedGradients``, and
    each measurement one of all accuracies.

    Args:
        network: One without tensors: the pool takes its place in the first round.
        courier: Reaches the clients.
        space: Where architectures come from.
        choose: Returns the pool, given a generator.
        describe: Returns what a pool is built from, see ``builders``.
        make_network: Builds it from that description, newly initialised.
        seed: The run's seed.
        keep: Size of the pool.
        eta: Of how many networks one stays, at least 2.
        local_epochs: Passes over each client's training records per round.
        batch_size: Records per step.
        weights: SGD, annealed over the rounds, or over the local epochs of ``local``.
        rewarded: What ranks the networks: the validation accuracy of the clients' average
            (``averaged``), or the training loss of each client's own copy (``local``).
        **shared: See :class:`RoundStrategy`.
    """

    def __init__(
        self,
        network: nn.Module,
        courier: Courier,
        *,
        space: SearchSpace,
        choose: Callable[[torch.Generator], Sequence[Genotype]],
        describe: Callable[[Sequence[Genotype]], dict[str, Any]],
        make_network: Callable[[Mapping[str, Any]], nn.Module],
        seed: int,
        keep: int,
        eta: int,
        local_epochs: int,
        batch_size: int,
        weights: SGD,
        rewarded: str,
        **shared: Unpack[Shared],
    ) -> None:
        """See the class."""
        super().__init__(network, courier, space=space, **shared)
        self.choose, self.describe, self.make_network = choose, describe, make_network
        self.seed, self.keep, self.eta = seed, keep, eta
        self.local_epochs, self.batch_size, self.weights = local_epochs, batch_size, weights
        self.rewarded = rewarded

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Train what is left; at the end of a rung keep the best."""
        if "pool" not in self.values:
            generator = make_generator(self.seed, "successive_halving")
            self._set_pool(list(self.choose(generator))[: self.keep])
            self.layouts, self.states = self._initial(self._network())
        described = self.describe(self.pool())
        amount = self.amount(self.local_epochs, self.batch_size)
        local = LocalTraining(described, "train", amount, self.weights, 0.0, 0.0)
        metrics = {"candidates": float(len(self.pool()))}
        if self.rewarded == "local":
            measured = RewardCandidates(training=local, site=self.site)
        else:
            weights = self.client_weights(self.weights.at_round(server_round, num_rounds))
            request = Train(replace(local, weights=weights), site=self.site)
            metrics |= self.train("train.weights", request, self.weights.momentum)
            measured = RewardCandidates(network=described, site=self.site)
        left = num_left(server_round, num_rounds, keep=self.keep, eta=self.eta)
        if left < len(self.pool()):
            metrics |= self._halve(left, server_round, measured)
        return metrics

    def pool(self) -> list[Genotype]:
        """Return the networks that are left, after a measurement the best first."""
        return [from_json(json.dumps(genotype)) for genotype in self.values["pool"]]

    def derive(self) -> Genotype:
        """Return the best of the networks that are left.

        Raises:
            ValueError: The first round is not over.
        """
        if "pool" not in self.values:
            raise ValueError("the pool is chosen in the first round")
        return self.pool()[0]

    def fit_states(self) -> None:
        """Give the states the form of the pool that the restored ``values`` hold."""
        self.layouts, self.states = self._initial(self._network())

    def _set_pool(self, pool: Sequence[Genotype]) -> None:
        self.values = {"pool": [json.loads(to_json(genotype)) for genotype in pool]}

    def _network(self) -> nn.Module:
        """Return the pool's networks, newly initialised."""
        return self.make_network(self.describe(self.pool()))

    def _halve(self, left: int, server_round: int, request: RewardCandidates) -> dict[str, float]:
        """Measure all networks, keep the ``left`` best and return metrics; ties: the earlier."""
        pool = self.pool()
        rewards, noise, metrics = self.reward(request, by_median=True)
        self.courier.emit(
            "rewarded", stage=self.stage, round=server_round, genotypes=self.values["pool"],
            rewards=rewards, noise=noise,
        )  # fmt: skip
        kept = sorted(range(len(pool)), key=lambda index: -rewards[index])[:left]
        self._set_pool([pool[index] for index in kept])
        before, states, velocity = self.layouts, self.states, self._velocity
        self.layouts, self.states = self._initial(self._network())
        for state, packed in states.items():
            tensors = unpack(packed, before[state])
            names = (name for name, _, _ in self.layouts[state].entries)
            self.states[state] = pack({name: tensors[name_before(name, kept)] for name in names})
        if velocity:
            tensors = unpack(velocity, before["weights"])
            names = (name for name, _, _ in self.layouts["weights"].entries)
            self._velocity = pack({name: tensors[name_before(name, kept)] for name in names})
        mean, best = sum(rewards) / len(rewards), max(rewards)
        if self.rewarded == "local":
            return {"train_loss": -math.log(max(mean, 1e-30)), **metrics}
        return {"validation_accuracy": mean, "validation_best": best, **metrics}


def num_left(server_round: int, num_rounds: int, *, keep: int, eta: int) -> int:
    """Return how many networks of a pool of ``keep`` are left after a round.

    Example:
        >>> [num_left(r, 8, keep=12, eta=2) for r in range(9)]
        [12, 12, 6, 6, 3, 3, 2, 2, 1]
    """
    divisor: int = eta ** (num_rungs(keep, eta) * server_round // num_rounds)
    return -(-keep // divisor)


def num_rungs(keep: int, eta: int) -> int:
    """Return after how many choices of one in ``eta`` a single one of ``keep`` networks is left."""
    return math.ceil(math.log(keep, eta) - 1e-9)


def releases(
    server_round: int,
    num_rounds: int,
    *,
    keep: int,
    eta: int,
    local_steps: int,
    batch_size: float | None,
    norms: Mapping[str, float],
) -> list[PlannedRelease]:
    """Return what a round releases of each client: every step, and what ends a rung."""
    steps = ("train.weights", "weights", ("train",), batch_size, local_steps, norms["weights"])
    planned = [PlannedRelease("search", *steps)]
    left = [num_left(r, num_rounds, keep=keep, eta=eta) for r in (server_round - 1, server_round)]
    if left[1] < left[0]:
        planned += [rewards_release("search", "evaluate.candidates", 1, norms["rewards"])]
    return planned
