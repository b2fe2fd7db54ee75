"""FEATHERS: a bandit over hyper-parameters, in the search and again in retraining."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import nn

from fednas_flwr.exchange.checkpoint import CheckpointFolder
from fednas_flwr.exchange.courier import Courier
from fednas_flwr.exchange.states import Layout, unpack
from fednas_flwr.randomness import make_generator
from fednas_flwr.search.settings import LEAST_LOSS_BOUND, Configuration
from fednas_flwr.search.tuner import Tuner
from fednas_flwr.search_spaces.space import SearchSpace
from fednas_flwr.strategies.base import RoundStrategy

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
    otherwise: after the first phase it is 4 times their running scale, within
    ``LEAST_LOSS_BOUND`` and ``loss_bound``.

    Args:
        network: Supernet, or newly initialised derived network.
        courier: Reaches the clients.
        space: The supernet's search space; None is the evaluation stage.
        description: What clients build the same network from, see ``clients.Client.network``.
        tuner: The bandit and its arms.
        nas_rounds: Rounds of training between two explorations.
        rule: Of the search, see ``search.local_search``.
        local_epochs: Passes over each client's training records per round and per trial.
        batch_size: Records per step.
        clip_norm: Of the weights' batch gradients; None does not clip.
        auxiliary_weight: Weight of a derived network's auxiliary loss.
        loss_bound: M; a record counts for at most this much in a reward.
        seed: The run's seed; the draw before a round comes from (seed, stage, round).
        checkpoints: Where the state goes after every round.
    """

    def __init__(
        self,
        network: nn.Module,
        courier: Courier,
        *,
        space: SearchSpace | None,
        description: Mapping[str, object],
        tuner: Tuner,
        nas_rounds: int,
        rule: str,
        local_epochs: int,
        batch_size: int,
        clip_norm: float | None,
        loss_bound: float,
        seed: int,
        auxiliary_weight: float = 0.0,
        checkpoints: CheckpointFolder | None = None,
    ) -> None:
        """See the class."""
        super().__init__(
            network,
            courier,
            space=space,
            checkpoints=checkpoints,
            stage="retrain" if space is None else "search",
        )
        self.tuner = tuner
        self.nas_rounds, self.clip_norm, self.seed = nas_rounds, clip_norm, seed
        self.loss_bound = loss_bound
        self.values = {"tuner": tuner.to_json(), "loss": None}
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
        self.tuner = self.tuner.with_json(self.values["tuner"])
        if explores(server_round, self.nas_rounds):
            self._explore(server_round, progress=(server_round - 1) / num_rounds)
        best = self.tuner.best()
        self.states, metrics = self.average(
            self.ask(
                self.verb,
                settings={**self.settings, **self._trial(best)},
                states=self.states,
                layouts=self.layouts,
            )
        )
        loss = metrics.get("validation_loss", metrics.get("train_loss"))
        self.values = {"tuner": self.tuner.to_json(), "loss": loss}
        return metrics | {"lr": best.lr, "alpha_lr": best.alpha_lr}

    def _explore(self, server_round: int, *, progress: float) -> None:
        """Try the configurations that the bandit draws, and let it learn."""
        started = time.monotonic()
        sent, received = self.courier.bytes_sent, self.courier.bytes_received
        generator = make_generator(self.seed, "bandit", self.stage, server_round)
        before = self.tuner.seeing(progress=progress, loss=self.values["loss"])
        entropy, arms, bound = before.bandit.entropy(), before.draw(generator), self._bound()
        rewards, noise = self._rewards([before.configurations[arm] for arm in arms], bound)
        rewarded = dict(zip(arms, rewards, strict=True))
        self.tuner = before.updated(rewarded, generator, noise=noise)
        best = self.tuner.bandit.best()
        self.courier.emit(
            "explored",
            stage=self.stage,
            round=server_round,
            entropy=entropy,
            kappa=len(arms),
            loss_bound=bound,
            rewards={str(arm): reward for arm, reward in rewarded.items()},
            noise=noise,
            estimates=self.tuner.bandit.estimates_N.tolist(),
            best=best,
            configuration=asdict(self.tuner.best()),
            seconds=time.monotonic() - started,
            bytes_sent=self.courier.bytes_sent - sent,
            bytes_received=self.courier.bytes_received - received,
        )

    def _bound(self) -> float:
        """Return M of the next phase."""
        scale = self.tuner.bandit.scale
        if not self.private or scale == 0:
            return self.loss_bound
        return min(self.loss_bound, max(LEAST_LOSS_BOUND, BOUND_PER_SCALE * scale))

    def _rewards(
        self, configurations: Sequence[Configuration], bound: float
    ) -> tuple[list[float], float]:
        """Return each configuration's reward (Eq. 5), and the std of the noise on it.

        The clients' mean decreases by validation size. What a client says is held to the bound once
        more: one client's nonsense must not choose.
        """
        layout = Layout.of({"rewards": torch.zeros(len(configurations))})
        trials = [self._trial(configuration) for configuration in configurations]
        settings = {**self.settings, "trials": trials, "loss_bound": bound}
        total = torch.zeros(len(configurations), dtype=torch.float64)
        weight, num_clients = 0.0, 0
        for _, reply in self.ask(
            "train.probe", settings=settings, states=self.states, layouts={"rewards": layout}
        ):
            decreases = unpack(reply.states["rewards"], layout)["rewards"].double()
            total += reply.num_examples * decreases.clamp(-bound, bound)
            weight += reply.num_examples
            num_clients += 1
        sigma = self.private["releases"]["rewards"]["noise_multiplier"] if self.private else 0.0
        noise = bound * sigma * math.sqrt(num_clients) / weight
        return (total / weight).tolist(), noise

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
