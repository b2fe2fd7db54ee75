"""FEATHERS: a bandit over hyper-parameters, in the search and again in retraining."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.states import Layout, unpack
from fednas_flwr.randomness import make_generator
from fednas_flwr.search.bandit import Bandit
from fednas_flwr.search.settings import BanditSettings, Configuration
from fednas_flwr.search_spaces.space import SearchSpace
from fednas_flwr.strategies.base import RoundStrategy, average_replies

BOUND_PER_SCALE = 4.0


class FEATHERS(RoundStrategy):
    """Seng et al. (2023), Alg. 1: explore configurations, then train with the best one.

    Before every ``nas_rounds``-th round the bandit draws kappa configurations, all clients try each
    from the same states (``train.probe``), and the bandit learns their rewards. With a search
    space the rounds are those of federated DARTS (search stage); without one they train the
    weights of a derived network on the clients' train records (evaluation stage, Alg. 3).

    Deviations: a learning rate is not annealed, it is the bandit that lowers it. One message asks a
    client for all trials of a phase, so that no client waits for another between them and the
    states travel once. With privacy, M shrinks with the rewards, which are noise of its size
    otherwise: after the first phase it is 4 times their running scale, at most ``loss_bound``.

    Args:
        network: Supernet, or newly initialised derived network.
        courier: Reaches the clients.
        space: The supernet's search space; None is the evaluation stage.
        description: What clients build the same network from, see ``clients.Client.network``.
        configurations: The bandit's arms.
        bandit: Its constants.
        nas_rounds: Rounds of training between two explorations.
        rule: Of the search, see ``search.local_search``.
        local_epochs: Passes over each client's training records per round and per trial.
        batch_size: Records per step.
        clip_norm: Of the weights' batch gradients; None does not clip.
        auxiliary_weight: Weight of a derived network's auxiliary loss.
        loss_bound: M; a record counts for at most this much in a reward.
        seed: The run's seed; the draw before a round comes from (seed, stage, round).
        checkpoints: Where the state goes after every round.
        private: See :class:`RoundStrategy`; clients then take ``private["local_steps"]`` noised
            steps instead of epochs.
    """

    def __init__(
        self,
        network: nn.Module,
        courier: Courier,
        *,
        space: SearchSpace | None,
        description: Mapping[str, object],
        configurations: Sequence[Configuration],
        bandit: BanditSettings,
        nas_rounds: int,
        rule: str,
        local_epochs: int,
        batch_size: int,
        clip_norm: float | None,
        loss_bound: float,
        seed: int,
        auxiliary_weight: float = 0.0,
        checkpoints: CheckpointFolder | None = None,
        private: Mapping[str, Any] | None = None,
    ) -> None:
        """See the class."""
        super().__init__(
            network,
            courier,
            space=space,
            checkpoints=checkpoints,
            stage="retrain" if space is None else "search",
            private=private,
        )
        self.configurations = list(configurations)
        self.bandit = Bandit.of(len(self.configurations), bandit)
        self.nas_rounds, self.clip_norm, self.seed = nas_rounds, clip_norm, seed
        self.loss_bound = loss_bound
        self.values = {"bandit": self.bandit.to_json()}
        self.verb = "train.weights" if space is None else "train.search"
        self.settings = {
            "network": description,
            "split": "train",
            "rule": rule,
            "validation_weight": 1.0,
            "local_epochs": local_epochs,
            "batch_size": batch_size,
            "auxiliary_weight": auxiliary_weight,
        }

    def run_round(self, server_round: int, num_rounds: int) -> Mapping[str, float]:
        """Explore where it is time to, then train with the best configuration."""
        self.bandit = self.bandit.with_json(self.values["bandit"])
        num_trials = self._explore(server_round) if explores(server_round, self.nas_rounds) else 0
        best = self.configurations[self.bandit.best()]
        self.states, metrics = average_replies(
            self.ask(
                self.verb,
                settings={**self.settings, **self._trial(best)},
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
        generator = make_generator(self.seed, "bandit", self.stage, server_round)
        bound = self._bound()
        rewards, noise = self._rewards(self.bandit.draw(kappa, generator), bound)
        self.bandit = self.bandit.updated(rewards, noise=noise)
        self.values = {"bandit": self.bandit.to_json()}
        best = self.bandit.best()
        self.courier.emit(
            "explored",
            stage=self.stage,
            round=server_round,
            entropy=entropy,
            kappa=kappa,
            loss_bound=bound,
            rewards={str(arm): reward for arm, reward in rewards.items()},
            noise=noise,
            estimates=self.bandit.estimates_N.tolist(),
            best=best,
            configuration=asdict(self.configurations[best]),
            seconds=time.monotonic() - started,
            bytes_sent=self.courier.bytes_sent - sent,
            bytes_received=self.courier.bytes_received - received,
        )
        return kappa

    def _bound(self) -> float:
        """Return M of the next phase."""
        if not self.private or self.bandit.scale == 0:
            return self.loss_bound
        return min(self.loss_bound, BOUND_PER_SCALE * self.bandit.scale)

    def _rewards(self, arms: Sequence[int], bound: float) -> tuple[dict[int, float], float]:
        """Return each arm's reward (Eq. 5), and the std of the noise on it.

        The clients' mean decreases by validation size. What a client says is held to the bound once
        more: one client's nonsense must not choose.
        """
        layout = Layout.of({"rewards": torch.zeros(len(arms))})
        trials = [self._trial(self.configurations[arm]) for arm in arms]
        settings = {**self.settings, "trials": trials, "loss_bound": bound}
        total, weight, num_clients = torch.zeros(len(arms), dtype=torch.float64), 0.0, 0
        for _, reply in self.ask(
            "train.probe", settings=settings, states=self.states, layouts={"rewards": layout}
        ):
            decreases = unpack(reply.states["rewards"], layout)["rewards"].double()
            total += reply.num_examples * decreases.clamp(-bound, bound)
            weight += reply.num_examples
            num_clients += 1
        sigma = self.private["releases"]["rewards"]["noise_multiplier"] if self.private else 0.0
        noise = bound * sigma * math.sqrt(num_clients) / weight
        return dict(zip(arms, (total / weight).tolist(), strict=True)), noise

    def _trial(self, configuration: Configuration) -> dict[str, object]:
        """Return the settings that a configuration stands for."""
        return {
            "weights": asdict(configuration.sgd(self.clip_norm)),
            "alphas": asdict(configuration.adam()),
            "drop_path_prob": configuration.dropout,
        }


def explores(server_round: int, nas_rounds: int) -> bool:
    """Return whether a round, from 1, begins with an exploration."""
    return (server_round - 1) % nas_rounds == 0
