"""FEATHERS: a bandit over hyper-parameters alternating with federated DARTS."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.randomness import make_generator
from fednas_flwr.search.bandit import Bandit
from fednas_flwr.search.settings import BanditSettings, Configuration
from fednas_flwr.search_spaces.space import SearchSpace, Supernet
from fednas_flwr.strategies.base import RoundStrategy, average_replies


class FEATHERS(RoundStrategy):
    """Seng et al. (2023), Alg. 1: explore configurations, then search with the best one.

    Before every ``nas_rounds``-th round the bandit draws kappa configurations, each is tried by
    all clients from the same weights and alphas (``train.probe``), and the bandit learns their
    rewards. The rounds themselves are those of federated DARTS with the best configuration.
    Deviation: a learning rate is not annealed, it is the bandit that lowers it.

    Args:
        supernet: Initial global state.
        courier: Reaches the clients.
        space: The supernet's search space.
        configurations: The bandit's arms.
        bandit: Its constants.
        nas_rounds: Rounds of search between two explorations.
        rule: See ``search.local_search``.
        local_epochs: Passes over each client's training records per round and per trial.
        batch_size: Records per step.
        clip_norm: Of the weights' batch gradients; None does not clip.
        loss_bound: M; a record counts for at most this much in a reward.
        seed: The run's seed; the draw before a round comes from (seed, round).
        checkpoints: Where the state goes after every round.
    """

    def __init__(
        self,
        supernet: Supernet,
        courier: Courier,
        *,
        space: SearchSpace,
        configurations: Sequence[Configuration],
        bandit: BanditSettings,
        nas_rounds: int,
        rule: str,
        local_epochs: int,
        batch_size: int,
        clip_norm: float | None,
        loss_bound: float,
        seed: int,
        checkpoints: CheckpointFolder | None = None,
    ) -> None:
        """See the class."""
        super().__init__(supernet, courier, space=space, checkpoints=checkpoints)
        self.configurations = list(configurations)
        self.bandit = Bandit.of(len(self.configurations), bandit)
        self.nas_rounds, self.clip_norm, self.seed = nas_rounds, clip_norm, seed
        self.values = {"bandit": self.bandit.to_json()}
        self.settings = {
            "rule": rule,
            "validation_weight": 1.0,
            "local_epochs": local_epochs,
            "batch_size": batch_size,
        }
        self.loss_bound = loss_bound

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Explore where it is time to, then search with the best configuration."""
        self.bandit = self.bandit.with_json(self.values["bandit"])
        explores = (server_round - 1) % self.nas_rounds == 0
        num_trials = self._explore(server_round) if explores else 0
        best = self.configurations[self.bandit.best()]
        self.states, metrics = average_replies(
            self.ask(
                "train.search",
                settings=self._settings(best),
                states=self.states,
                layouts=self.layouts,
            )
        )
        return metrics | {
            "lr": best.lr,
            "alpha_lr": best.alpha_lr,
            "bandit_entropy": self.bandit.entropy(),
            "num_trials": num_trials,
        }

    def _explore(self, server_round: int) -> int:
        """Try the configurations that the bandit draws, let it learn; return how many."""
        started = time.monotonic()
        sent, received = self.courier.bytes_sent, self.courier.bytes_received
        entropy, kappa = self.bandit.entropy(), self.bandit.num_trials()
        generator = make_generator(self.seed, "bandit", server_round)
        rewards = {arm: self._try(arm) for arm in self.bandit.draw(kappa, generator)}
        self.bandit = self.bandit.updated(rewards)
        self.values = {"bandit": self.bandit.to_json()}
        best = self.bandit.best()
        self.courier.emit(
            "explored",
            stage=self.stage,
            round=server_round,
            entropy=entropy,
            kappa=kappa,
            rewards={str(arm): reward for arm, reward in rewards.items()},
            estimates=self.bandit.estimates_N.tolist(),
            best=best,
            configuration=asdict(self.configurations[best]),
            seconds=time.monotonic() - started,
            bytes_sent=self.courier.bytes_sent - sent,
            bytes_received=self.courier.bytes_received - received,
        )
        return kappa

    def _try(self, arm: int) -> float:
        """Return the reward of an arm (Eq. 5): the clients' mean decrease, by validation size.

        What a client says is held to the bound once more: one client's nonsense must not choose.
        """
        settings = self._settings(self.configurations[arm]) | {"loss_bound": self.loss_bound}
        total = weight = 0.0
        for _, reply in self.ask("train.probe", settings=settings, states=self.states):
            decrease = reply.metrics.get("loss_decrease", -self.loss_bound)
            total += reply.num_examples * min(max(decrease, -self.loss_bound), self.loss_bound)
            weight += reply.num_examples
        return total / weight

    def _settings(self, configuration: Configuration) -> dict[str, object]:
        weights, alphas = configuration.sgd(self.clip_norm), configuration.adam()
        return {**self.settings, "weights": asdict(weights), "alphas": asdict(alphas)}
